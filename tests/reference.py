"""The slow dense pass that the model is held against: one row, every token at once, distances and visibility written out.

It takes the weights and the pointwise parts (embedding, norms, feed-forward, head) from the model, and nothing of its
attention, positions, memories, grid or cache. Legend: T tokens, z rows of zeros before them, H heads, D head size, s sinks.
"""

import math
from typing import NamedTuple

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
    return torch.tensor(found, dtype=torch.long).view(distances.shape)


def _slopes(count):
    power = 2 ** int(math.log2(count))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)][: count - power]


def _biases(model, layer):
    scheme = layer.self_attn.position
    return scheme.biases if scheme.biases is not None else model.model.shared_position


def _encoded(model, layer, query, key, distances):
    """Products (H, n, k) of query (n, H, D) and key (k, H, D), as the scheme makes them, for distances (n, k) >= 0."""
    if model.config.position_type == "rope":
        turned = _rotate(query[:, None], distances[:, :, None].expand(-1, -1, query.shape[1]), model.config)
        return torch.einsum("nkhd,khd->hnk", turned, key)
    if model.config.position_type == "xl":
        query = query + _biases(model, layer).u
    return torch.einsum("nhd,khd->hnk", query, key)


def _bias(model, layer, query, distances):
    """Logits (H, n, k) of distances (n, k) >= 0, for query (n, H, D)."""
    config, scheme = model.config, layer.self_attn.position
    if config.position_type == "xl":
        clipped = distances.clamp(max=config.clamp_len) if config.clamp_len else distances
        size = config.hidden_size
        angles = clipped[..., None].double() * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        table = torch.cat([angles.sin(), angles.cos()], -1).to(query.dtype)[..., :size] @ scheme.r_proj.weight.T
        table = table.view(*distances.shape, *query.shape[1:])  # (n, k, H, D)
        return torch.einsum("nhd,nkhd->hnk", query + _biases(model, layer).v, table) * config.head_dim**-0.5
    if config.position_type == "t5":
        return model.model.shared_position.table[_bucket(distances, config)].permute(2, 0, 1)
    if config.position_type == "alibi":
        slopes = torch.tensor(config.alibi_slopes or _slopes(query.shape[1]), dtype=query.dtype)
        return -slopes[:, None, None] * distances
    return query.new_zeros(query.shape[1], *distances.shape)


def _scores(model, layer, query, key, distances):
    """Complete logits (H, n, k): query (n, H, D), key (k, H, D), distances (n, k) >= 0."""
    products = _encoded(model, layer, query, key, distances) * model.config.head_dim**-0.5
    return products + _bias(model, layer, query, distances)


def _project(model, layer, rows):
    """Queries, keys and values (n, H, D) of layer inputs (n, E)."""
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    projected = layer.self_attn.qkv_proj(layer.self_attn.norm(rows)).view(len(rows), heads + 2 * groups, model.config.head_dim)
    if model.config.clip_qkv is not None:
        projected = projected.clamp(-model.config.clip_qkv, model.config.clip_qkv)
    query, key, value = projected.split([heads, groups, groups], 1)
    if model.config.qk_norm:
        query, key = layer.self_attn.q_norm(query), layer.self_attn.k_norm(key)
    return query, key.repeat_interleave(heads // groups, 1), value.repeat_interleave(heads // groups, 1)


def _read(weights, value):
    """(H, n, k) weights of values (k, H, D) -> (n, H * D)."""
    return torch.einsum("hnk,khd->nhd", weights, value).flatten(1)


class Seen(NamedTuple):
    """Weights (H, n, k) of some queries, where these stand (n,), where the keys stand (k,), a slot at the newest token in it,
    and how many keys are sinks and slots: they come first."""

    weights: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    num_sinks: int
    num_slots: int


class Text:
    """What stands where: documents numbered from 0, positions as the user gives them, calls."""

    def __init__(self, count, documents, positions, calls):
        self.token = torch.arange(count)
        self.number = torch.zeros(count, dtype=torch.long)
        if documents is not None and count > 1:
            self.number[1:] = (documents[1:] != documents[:-1]).cumsum(0)
        self.begin = torch.stack([(self.number == n).nonzero()[0, 0] for n in self.number])  # first token of its document
        self.positions = self.token if positions is None else positions
        self.calls = torch.tensor(calls or [0])


def softmax_over_rows(model, layer, hidden, text, memory, recurrent, seen):
    """Recurrence, and plain attention: the staircase."""
    config, count = model.config, len(hidden)
    token = text.token
    zeros = memory if recurrent and config.initial_memory == "zeros" else 0
    if not recurrent:
        oldest = torch.zeros(count, dtype=torch.long)
    elif config.segment_len is None:
        oldest = text.calls[(token[:, None] >= text.calls).sum(1) - 1] - memory
    else:
        oldest = token // config.segment_len * config.segment_len - memory
    if config.attention_window:
        oldest = torch.maximum(oldest, token - config.attention_window + 1)
    oldest = oldest.clamp(min=-zeros)
    where = torch.arange(-zeros, count)
    number_of_key = torch.cat([text.number[:1].expand(zeros), text.number])
    visible = (where[None] <= token[:, None]) & (where[None] >= oldest[:, None])
    visible &= number_of_key[None] == text.number[:, None]
    standing = torch.cat([where[:zeros], text.positions])
    distances = (standing[zeros:, None] - standing[None]).clamp(min=0)
    sinks = config.num_sink_tokens
    slots = oldest.clamp(0, sinks)
    sink_distances = (token - oldest + slots)[:, None] - torch.arange(sinks)[None]
    sink_visible = (torch.arange(sinks)[None] < slots[:, None]) & (text.number == 0)[:, None]

    query, key, value = _project(model, layer, torch.cat([hidden.new_zeros(zeros, hidden.shape[1]), hidden]))
    query = query[zeros:]
    scores = _scores(model, layer, query, key, distances).masked_fill(~visible, -math.inf)
    if sinks:
        missing = max(0, sinks - count)
        first = [torch.cat([t[zeros : zeros + sinks], t.new_zeros(missing, *t.shape[1:])]) for t in (key, value)]
        extra = _scores(model, layer, query, first[0], sink_distances.clamp(min=0))
        scores = torch.cat([extra.masked_fill(~sink_visible, -math.inf), scores], -1)
        value = torch.cat([first[1], value])
    weights = scores.softmax(-1)
    seen.append(Seen(weights, token, torch.cat([torch.arange(sinks), where]), sinks, 0))
    return _read(weights, value)


def compressed(layer, rows, usage, config):
    """(n, E) evicted rows -> list of (row (E,), oldest and newest of the evicted rows that it stands for)."""
    function, rate, memory = config.compression_fn, config.compression_rate, layer.self_attn.memory
    made = []
    if function == "most_used":
        order = sorted(range(len(rows)), key=lambda i: (-float(usage[i]), i))[: len(rows) // rate]
        return [(rows[i], i, i) for i in sorted(order)]
    for last in range(rate - 1, len(rows), rate):
        window = rows[last - rate + 1 : last + 1]
        if function == "mean":
            made.append((window.mean(0), last - rate + 1, last))
        elif function == "max":
            made.append((window.max(0).values, last - rate + 1, last))
        else:
            apart = config.compression_dilation if function == "dilated" else 1
            taps = [last - (rate - 1 - tap) * apart for tap in range(rate)]
            row = memory.compression.bias
            for tap, at in enumerate(taps):
                if at >= 0:
                    row = row + memory.compression.weight[:, :, tap] @ rows[at]
            made.append((row, min(at for at in taps if at >= 0), last))
    return made


def compressive(model, layer, hidden, text, memory, seen):
    """A queue of rows and one of slots, moved by hand at every segment line."""
    config, size, zeros = model.config, hidden.shape[1], model.config.initial_memory == "zeros"
    segment_len, rate = config.segment_len, config.compression_rate
    # A row with the token it is (below 0: none); a slot with the oldest and newest token that it stands for.
    rows = [(hidden.new_zeros(size), token) for token in range(-memory if zeros else 0, 0)]
    slots = [(hidden.new_zeros(size), -1, -1)] * (config.compressed_mem_len if zeros else 0)
    outputs = []

    def number(token):
        return 0 if token < 0 else int(text.number[token])

    for start in range(0, len(hidden), segment_len):
        segment = [(row, start + i) for i, row in enumerate(hidden[start : start + segment_len])]
        kept = [*rows, *segment]
        keys = torch.stack([*(slot[0] for slot in slots), *(row for row, _ in kept)])
        query, key, value = _project(model, layer, keys)
        query = query[len(slots) + len(rows) :]
        standing = [token if token < 0 else int(text.positions[token]) for _, token in kept]
        standing = torch.tensor([*(standing[0] - n for n in range(len(slots), 0, -1)), *standing])
        own = standing[len(slots) + len(rows) :]
        of_key = [number(a) if number(a) == number(b) else -1 for _, a, b in slots] + [number(t) for _, t in kept]
        visible = torch.tensor(of_key)[None] == torch.tensor([number(t) for _, t in segment])[:, None]
        visible &= torch.ones_like(visible).tril(len(slots) + len(rows))
        distances = (own[:, None] - standing[None]).clamp(min=0)
        scores = _scores(model, layer, query, key, distances).masked_fill(~visible, -math.inf)
        sinks, there = config.num_sink_tokens, []
        if sinks:
            oldest = kept[0][1]
            there = [j for j in range(sinks) if j < oldest]
            first = _project(model, layer, hidden[:sinks])
            place = oldest - len(slots) - len(there)
            apart = torch.tensor([[t - (place + j) for j in range(len(there))] for _, t in segment], dtype=torch.long)
            extra = _scores(model, layer, query, first[1][: len(there)], apart.view(len(segment), len(there)))
            in_first = torch.tensor([number(t) == 0 for _, t in segment])[:, None]
            scores = torch.cat([extra.masked_fill(~in_first, -math.inf), scores], -1)
            value = torch.cat([first[2][: len(there)], value])
        weights = scores.softmax(-1)
        at = [*there, *(newest for _, _, newest in slots), *(token for _, token in kept)]
        tokens = torch.tensor([token for _, token in segment])
        seen.append(Seen(weights, tokens, torch.tensor(at), len(there), len(slots)))
        outputs.append(_read(weights, value))
        if len(segment) < segment_len:
            break
        content = torch.einsum("nhd,khd->hnk", query, key[len(slots) : len(slots) + len(rows)]) * config.head_dim**-0.5
        in_sight = visible[:, len(slots) : len(slots) + len(rows)]
        content = content.detach().masked_fill(~in_sight, torch.finfo(content.dtype).min).softmax(-1) * in_sight
        leaving = max(0, len(kept) - memory) // rate * rate
        found = (
            compressed(layer, torch.stack([row for row, _ in kept])[:leaving], content.sum((0, 1)), config) if leaving else []
        )
        slots = [*slots, *((row.detach(), kept[a][1], kept[b][1]) for row, a, b in found)][-config.compressed_mem_len :]
        rows = kept[leaving:]
    return torch.cat(outputs)


def _features(layer, states, config, is_query):
    """φ of (n, H, D)."""
    if config.feature_map == "elu":
        return torch.where(states > 0, states + 1, states.clamp(max=0).exp())
    if config.feature_map == "relu":
        return states.clamp(min=0) + 1e-3
    scaled = states / config.head_dim**0.25
    features = layer.self_attn.memory.feature_map.features
    exponents = scaled @ features.T - (scaled**2).sum(-1, keepdim=True) / 2
    # float32 would overflow for queries without it; it cancels between numerator and denominator.
    return (exponents - exponents.amax(-1, keepdim=True) if is_query else exponents).exp()


def linear(model, layer, hidden, text):
    """Every pair of tokens with its positional weight, numerator and denominator."""
    config = model.config
    query, key, value = _project(model, layer, hidden)
    visible = (text.token[None] <= text.token[:, None]) & (text.number[None] == text.number[:, None])
    distances = (text.positions[:, None] - text.positions[None]).clamp(min=0)
    bias = _bias(model, layer, query, distances).masked_fill(~visible, -math.inf)
    weights = (bias - bias.amax(-1, keepdim=True)).exp()
    if config.position_type == "xl":
        query = query + _biases(model, layer).u
    turns = config.position_type == "rope"
    if turns and config.feature_map == "favor":
        places = (text.positions - text.positions[text.begin])[:, None].expand(-1, query.shape[1])
        query, key = _rotate(query, places, config), _rotate(key, places, config)
        turns = False
    query, key = _features(layer, query, config, True), _features(layer, key, config, False)
    products = torch.einsum("nhf,khf->hnk", query, key)
    total = (products * weights).sum(-1, keepdim=True)
    if turns:
        products = _encoded(model, layer, query, key, distances)
    return _read(products * weights / total, value)


def dense_pass(model, ids, documents=None, positions=None, calls=None, mem_len=None, seen=None):
    """(T,) ids -> logits (T, V) and the inputs of all layers, each (T, E).

    documents (T,): ids of documents. positions (T,): rising positions. calls: first token of each call, which matters
    where segment_len is None. seen: a list, which gets for each layer a list of what it `Seen` there is (softmax only).
    """
    config = model.config
    text = Text(len(ids), documents, positions, calls)
    memory = config.mem_len if mem_len is None else mem_len
    hidden = model.model.embed(ids)
    if model.model.embed_norm is not None:
        hidden = model.model.embed_norm(hidden)
    inputs = []
    for layer, kind in zip(model.model.layers, config.layer_memory_types, strict=True):
        inputs.append(hidden)
        seen_here: list[Seen] = []
        if kind == "linear":
            read = linear(model, layer, hidden, text)
        elif kind == "compressive":
            read = compressive(model, layer, hidden, text, memory, seen_here)
        else:
            read = softmax_over_rows(model, layer, hidden, text, memory, kind == "recurrence", seen_here)
        if seen is not None:
            seen.append(seen_here)
        attended = layer.self_attn.o_proj(read)
        if config.norm_position == "post":
            hidden = layer.attention_norm(hidden + attended)
            hidden = layer.mlp_norm(hidden + layer.mlp(hidden))
        elif config.use_parallel_residual:
            hidden = hidden + attended + layer.mlp(layer.mlp_norm(hidden))
        elif config.norm_residual:
            hidden = layer.mlp_norm(layer.self_attn.norm(hidden) + attended)
            hidden = hidden + layer.mlp(hidden)
        else:
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
    if model.model.norm is not None:
        hidden = model.model.norm(hidden)
    return model.lm_head(hidden), inputs
