"""The slow dense pass that the model is held against: one row, every token at once, distances and visibility written out.

It takes the weights and the pointwise parts (embedding, norms, feed-forward, head) from the model, and nothing of its
attention, positions, grid or cache. Legend: T tokens, z rows of zeros before them, H heads, D head size, s sinks.
"""

import math

import torch


def _rotate(states, distances, config):
    """(..., D) rotated by distances (...), halves as pairs."""
    size = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, size, 2, dtype=torch.float64)
    angles = distances[..., None].double() * config.rope_parameters["rope_theta"] ** (-steps / size)
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second, kept = states[..., : size // 2], states[..., size // 2 : size], states[..., size:]
    kept = kept.expand(*angles.shape[:-1], -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, kept], -1)


def _bucket(distances, config):
    buckets, most = config.relative_attention_num_buckets, config.relative_attention_max_distance
    exact = buckets // 2
    found = []
    for d in distances.flatten().tolist():
        found.append(d if d < exact else min(buckets - 1, exact + int(math.log(d / exact) / math.log(most / exact) * exact)))
    return torch.tensor(found).view(distances.shape)


def _slopes(count):
    power = 2 ** int(math.log2(count))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)][: count - power]


def _scores(model, layer, query, key, distances):
    """Complete logits (H, n, k): query (n, H, D), key (k, H, D), distances (n, k) >= 0."""
    config, scheme = model.config, layer.self_attn.position
    scale = config.head_dim**-0.5
    if config.position_type == "rope":
        turned = _rotate(query[:, None], distances[:, :, None].expand(-1, -1, query.shape[1]), config)
        return torch.einsum("nkhd,khd->hnk", turned, key) * scale
    if config.position_type == "xl":
        biases = scheme.biases if scheme.biases is not None else model.model.shared_position
        clipped = distances.clamp(max=config.clamp_len) if config.clamp_len else distances
        size = config.hidden_size
        angles = clipped[..., None].double() * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        table = torch.cat([angles.sin(), angles.cos()], -1).to(query.dtype)[..., :size] @ scheme.r_proj.weight.T
        table = table.view(*distances.shape, *query.shape[1:])  # (n, k, H, D)
        content = torch.einsum("nhd,khd->hnk", query + biases.u, key)
        return (content + torch.einsum("nhd,nkhd->hnk", query + biases.v, table)) * scale
    scores = torch.einsum("nhd,khd->hnk", query, key) * scale
    if config.position_type == "t5":
        scores = scores + model.model.shared_position.table[_bucket(distances, config)].permute(2, 0, 1)
    if config.position_type == "alibi":
        slopes = torch.tensor(config.alibi_slopes or _slopes(query.shape[1]), dtype=query.dtype)
        scores = scores - slopes[:, None, None] * distances
    return scores


def dense_pass(model, ids, documents=None, positions=None, calls=None, mem_len=None):
    """(T,) ids -> logits (T, V) and the inputs of all layers, each (T, E).

    documents (T,): ids of documents. positions (T,): rising positions. calls: first token of each call, which matters
    where segment_len is None.
    """
    config = model.config
    count = len(ids)
    memory = config.mem_len if mem_len is None else mem_len
    recurrent = config.memory_type == "recurrence"
    zeros = memory if recurrent and config.initial_memory == "zeros" else 0
    token = torch.arange(count)
    if not recurrent:
        oldest = torch.zeros(count, dtype=torch.long)
    elif config.segment_len is None:
        starts = torch.tensor(calls or [0])
        oldest = starts[(token[:, None] >= starts).sum(1) - 1] - memory
    else:
        oldest = token // config.segment_len * config.segment_len - memory
    if config.attention_window:
        oldest = torch.maximum(oldest, token - config.attention_window + 1)
    oldest = oldest.clamp(min=-zeros)
    where = torch.arange(-zeros, count)
    documents = torch.zeros(count, dtype=torch.long) if documents is None else documents
    number = torch.cat([torch.zeros(1), (documents[1:] != documents[:-1]).cumsum(0)]) if count > 1 else torch.zeros(1)
    number_of_key = torch.cat([number[:1].expand(zeros), number])
    visible = (where[None] <= token[:, None]) & (where[None] >= oldest[:, None])
    visible &= number_of_key[None] == number[:, None]
    standing = where if positions is None else torch.cat([where[:zeros], positions])
    distances = (standing[zeros:, None] - standing[None]).clamp(min=0)
    sinks = config.num_sink_tokens
    slots = oldest.clamp(0, sinks)
    sink_distances = (token - oldest + slots)[:, None] - torch.arange(sinks)[None]
    sink_visible = (torch.arange(sinks)[None] < slots[:, None]) & (number == 0)[:, None]

    hidden = model.model.embed(ids)
    if model.model.embed_norm is not None:
        hidden = model.model.embed_norm(hidden)
    inputs = []
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for layer in model.model.layers:
        inputs.append(hidden)
        rows = layer.self_attn.norm(torch.cat([hidden.new_zeros(zeros, hidden.shape[1]), hidden]))
        projected = layer.self_attn.qkv_proj(rows).view(zeros + count, heads + 2 * groups, size)
        query = projected[zeros:, :heads]
        key, value = (
            projected[:, first : first + groups].repeat_interleave(heads // groups, 1) for first in (heads, heads + groups)
        )
        scores = _scores(model, layer, query, key, distances).masked_fill(~visible, -math.inf)
        first = [key[zeros : zeros + sinks], value[zeros : zeros + sinks]]
        if sinks:
            missing = max(0, sinks - count)
            first = [torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for t in first]
            extra = _scores(model, layer, query, first[0], sink_distances.clamp(min=0))
            scores = torch.cat([extra.masked_fill(~sink_visible, -math.inf), scores], -1)
            value = torch.cat([first[1], value])
        read = torch.einsum("hnk,khd->nhd", scores.softmax(-1), value).reshape(count, -1)
        attended = layer.self_attn.o_proj(read)
        if config.norm_position == "post":
            hidden = layer.attention_norm(hidden + attended)
            hidden = layer.mlp_norm(hidden + layer.mlp(hidden))
        elif config.use_parallel_residual:
            hidden = hidden + attended + layer.mlp(layer.mlp_norm(hidden))
        else:
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
    if model.model.norm is not None:
        hidden = model.model.norm(hidden)
    return model.lm_head(hidden), inputs
