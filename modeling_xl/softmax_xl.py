"""Softmax attention with a bias that depends on distance: the plain form (reference) and the blocked forms.

A query block of length t at the end of S keys needs the bias of S distances, of which query i uses those from column t-1-i
on. The blocked forms write "bias by distance" into a buffer (H, B, t, S + t - 1) whose tail is -inf and read it through
strides that shift row i by t-1-i: shifted and causally masked without a copy, and never more than one block at a time.

Legend: B batch, H heads, Q queries, K keys (the newest under the last query), D head size, t queries and S keys of a block,
W = S + t - 1.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .few_rows_xl import dot_products
from .position_base import SPARE, DistanceBias, GatheredDistances

# The blocked forms are operators, which torch.compile takes as they are: it would copy the buffer that they read by strides.
# Their names are this module's own, for copies of this file may come from the Hub.
OPERATORS = __name__.replace(".", "_")

# Most queries of a block. On CPUs one block was the fastest up to 128 queries, and blocks of 64 for more.
BLOCK = SPARE + 1


def shift_by_query(by_distance: Tensor, num_queries: int) -> Tensor:
    """(..., Q or 1, K) by falling distance of the last query -> (..., Q, K) by key: row i moves left by Q - 1 - i.

    Places above the diagonal hold numbers of other rows; a causal mask must hide them (appendix B of Transformer-XL).
    """
    if num_queries == 1:
        return by_distance
    *lead, _, num_keys = by_distance.shape
    by_distance = by_distance.expand(*lead, num_queries, num_keys)
    padded = functional.pad(by_distance, (1, 0)).reshape(*lead, num_keys + 1, num_queries)
    return padded[..., 1:, :].reshape(*lead, num_queries, num_keys)


def gather_bias(bias: DistanceBias | None, distances: GatheredDistances) -> Tensor | None:
    """Bias (B, H, Q, K) of a scheme for `distances.values`, where they stand."""
    if bias is None:
        return None
    by_distance = bias.by_distance()  # (B or 1, H, Q or 1, V)
    place = distances.place
    batch = max(by_distance.shape[0], place.shape[0])
    shape = (batch, by_distance.shape[1], place.shape[1])
    index = place[:, None].expand(*shape, place.shape[2])
    return by_distance.expand(*shape, by_distance.shape[3]).gather(-1, index)


def causal_mask(num_queries: int, num_keys: int, device) -> Tensor:
    """(1, 1, Q, K) booleans, true where visible, the newest key under the last query."""
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril_(num_keys - num_queries)[None, None]


def scaled_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """q . k * scaling, (B, H, Q, K), in float32 at least; key may have fewer heads, each for a group of query heads."""
    batch, heads, queries, size = query.shape
    if query.dtype == torch.float16:  # its range ends at 65504; bfloat16 has that of float32
        query, key = query.float(), key.float()
    grouped = (query * scaling).reshape(batch, key.shape[1], -1, size)
    scores = dot_products(grouped, key).reshape(batch, heads, queries, key.shape[2])
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def weighted_sums(weights: Tensor, value: Tensor) -> Tensor:
    """(B, H, Q, K) and (B, heads, K, D) -> (B, H, Q, D)."""
    grouped = weights.reshape(weights.shape[0], value.shape[1], -1, weights.shape[-1])
    return (grouped @ value).view(*weights.shape[:3], value.shape[-1])


def plain_attention(query, key, value, bias, mask, scaling: float, dropout: float = 0.0, sinks=None):
    """The reference: every score at once, in float32 at least. Any gradient, dropout, and the weights.

    bias: (B or 1, H, Q, K) or None. mask: (B or 1, 1, Q, K), true where visible, or None: all. sinks: (logits
    (B, H, Q, s), values (B, heads, s, D)) or None. Returns output (B, H, Q, D) and weights (B, H, Q, s + K). A query that
    sees nothing gets zeros.
    """
    scores = scaled_scores(query, key, scaling)
    if bias is not None:
        scores = scores + bias
    sees = None
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        sees = mask.any(-1, keepdim=True)
    num_sinks = 0
    if sinks is not None:
        num_sinks = sinks[0].shape[-1]
        scores = torch.cat([sinks[0].to(scores.dtype), scores], -1)
        sees = None if sees is None else sees | (sinks[0] > -math.inf).any(-1, keepdim=True)
    weights = scores.softmax(-1)
    if sees is not None:
        weights = weights * sees
    if dropout:
        weights = functional.dropout(weights, dropout)
    weights = weights.to(value.dtype)

    output = weighted_sums(weights[..., num_sinks:], value)
    if sinks is not None:
        output = output + weighted_sums(weights[..., :num_sinks], sinks[1])
    return output, weights


def kernel_attention(query, key, value, bias, scaling: float) -> Tensor:
    """torch's kernel on queries (B, H, Q, D) and keys (B, heads, K, D), all of which they see unless bias (B or 1, H, Q, K) is
    -inf; without gradient."""
    grouped = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, **grouped)


def _blocks(num_queries: int) -> Iterator[tuple[int, int]]:
    """Bounds of the blocks of queries."""
    length = BLOCK if num_queries <= BLOCK else max(1, BLOCK // 2)
    return ((start, min(start + length, num_queries)) for start in range(0, num_queries, length))


def _spared(query, table, num_queries: int, num_keys: int):
    """The table with as many spare entries as blocks of queries read, where there is a query."""
    missing = min(BLOCK, num_queries) - 1 - (table.shape[1] - num_keys)
    return table if query is None or missing <= 0 else functional.pad(table, (0, 0, 0, missing))


def _skewed(space, query, table, batch: int, first: int, size: int, start: int, stop: int):
    """The buffer (H, B', t, W) of the block [start, stop), in `space`, and its shifted view (B', H, t, S).

    query: (H, B, Q, D) contiguous or None. table: (H, K + spare, D) or (H, K); the block sees its columns from `first` on.
    """
    heads, length = table.shape[0], stop - start
    width = size + length - 1
    buffer = space[: heads * batch * length * width].view(heads, batch, length, width)
    if query is None:
        buffer[..., :size] = table[:, None, None, first:]
    else:
        # The whole width, for a product into a part of a tensor would go through the heads one by one.
        block = query[:, :, start:stop].reshape(heads, batch * length, -1)
        torch.bmm(block, table[:, first : first + width].transpose(1, 2), out=buffer.view(heads, batch * length, width))
    buffer[..., size:] = -math.inf
    strides = (length * width, batch * length * width, width - 1, 1)
    return buffer, buffer.as_strided((batch, heads, length, size), strides, length - 1)


def _biased_blocks(query, table, mask, batch: int, num_queries: int, num_keys: int) -> Iterator[tuple]:
    """Of each block of queries its bounds, the number S of keys it meets, and the buffer and view of its bias (`_skewed`),
    -inf where the mask (B' or 1, 1, Q, K) hides. The buffer is the next block's, too."""
    table = _spared(query, table, num_queries, num_keys)
    blocks = list(_blocks(num_queries))
    length = max(stop - start for start, stop in blocks)
    # Once, as large as the last one needs: memory for a larger one each time would be new to the process each time.
    space = table.new_empty(table.shape[0] * batch * length * (num_keys + length - 1))
    for start, stop in blocks:
        size = num_keys - num_queries + stop
        buffer, view = _skewed(space, query, table, batch, num_keys - size, size, start, stop)
        if mask is not None:
            view.masked_fill_(~mask[:, :, start:stop, :size], -math.inf)
        yield start, stop, size, buffer, view


def blocked_attention(query, key, value, bias: DistanceBias, mask, scaling: float) -> Tensor:
    """Attention without gradient, one block of queries after the other. Arguments and result as `plain_attention`'s,
    but the bias as factors, no weights, and mask may be None: causal."""
    table, position_query = bias.table, bias.query
    if position_query is not None:  # autocast may have made one of them and not the other
        dtype = torch.promote_types(position_query.dtype, table.dtype)
        if dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):  # which passes a product with `out` by
            dtype = torch.get_autocast_dtype(query.device.type)
        position_query, table = position_query.to(dtype), table.to(dtype)
    output = _read(query, key, value, position_query, table, mask, scaling)  # (B, Q, H, D)
    return zero_unseeing(output.transpose(1, 2), mask)


@torch.library.custom_op(f"{OPERATORS}::read", mutates_args=())
def _read(
    query: Tensor, key: Tensor, value: Tensor, position_query: Tensor | None, table: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    batch, _, num_queries, _ = query.shape
    num_keys = key.shape[2]
    rows = batch if position_query is not None or (mask is not None and mask.shape[0] > 1) else 1
    by_head = None if position_query is None else position_query.transpose(0, 1).contiguous()
    falls_low = by_head is None and _falls_low(table)
    output = _empty_by_column(query, value)
    for start, stop, size, _, view in _biased_blocks(by_head, table, mask, rows, num_queries, num_keys):
        block, keys, values = query[:, :, start:stop], key[:, :, :size], value[:, :, :size]
        if falls_low:
            scores = scaled_scores(block, keys, scaling).add_(view)
            weights = _flush(torch.softmax(scores, -1, out=scores)).to(value.dtype)
            block = weighted_sums(weights, values)
        else:
            if query.device.type != "cpu":
                view = view.contiguous()  # kernels on accelerators want aligned rows
            block = kernel_attention(block, keys, values, view, scaling)
        output[:, start:stop] = block.transpose(1, 2)
    return output


def _empty_by_column(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, num_queries, _ = query.shape
    return query.new_empty(batch, num_queries, heads, value.shape[3])


@_read.register_fake
def _(query, key, value, position_query, table, mask, scaling):
    return _empty_by_column(query, value)


def zero_unseeing(output: Tensor, mask) -> Tensor:
    """Zeros for queries that see nothing, whatever a kernel made of them."""
    return output if mask is None else output.masked_fill(~mask.any(-1, keepdim=True), 0.0)  # (B or 1, 1, Q, 1)


_NOTHING = 1e-30  # of a weight: no float32 sum of weights notices it
_CPU_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


@torch.library.custom_op(f"{OPERATORS}::train", mutates_args=())
def _train(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_query: Tensor | None,
    table: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, Q, D), and the log of each query's softmax sum (B, H, Q).

    For training: gradients by hand, scores of one block at a time. Kept for the backward pass are inputs and results.
    Dropout is drawn again from its seed, block by block. `plain_attention` is the reference.
    """
    batch, heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    by_head = None if position_query is None else position_query.transpose(0, 1).contiguous()
    kernel = _CPU_KERNEL if query.device.type == "cpu" and not dropout else None
    rows = batch
    if kernel is not None and by_head is None and (mask is None or mask.shape[0] == 1):
        rows = 1
    falls_low = by_head is None and kernel is None and _falls_low(table)
    output = torch.empty_like(query)
    log_sum = query.new_empty(batch, heads, num_queries)
    for start, stop, size, _, view in _biased_blocks(by_head, table, mask, rows, num_queries, num_keys):
        queries, keys, values = query[:, :, start:stop], key[:, :, :size], value[:, :, :size]
        if kernel is not None:
            block, sums = kernel(queries, keys, values, 0.0, False, attn_mask=view, scale=scaling)
        else:
            scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scaling).add_(view)
            sums = scores.logsumexp(-1)
            weights = _weights(scores, _finite(sums)[..., None], falls_low)
            if dropout:
                weights.mul_(_kept(weights.shape, dropout, seed, start, weights))
            block = weights @ values
        output[:, :, start:stop], log_sum[:, :, start:stop] = block, sums
    output = zero_unseeing(output, mask)
    return output, log_sum


@_train.register_fake
def _(query, key, value, position_query, table, mask, scaling, dropout, seed):
    return torch.empty_like(query), query.new_empty(query.shape[:3])


@torch.library.custom_op(f"{OPERATORS}::train_backward", mutates_args=())
def _train_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_query: Tensor | None,
    table: Tensor,
    mask: Tensor | None,
    output: Tensor,
    log_sum: Tensor,
    scaling: float,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, position queries (nothing where there are none) and table."""
    batch, heads, num_queries, size_of_head = query.shape
    num_keys = key.shape[2]

    def by_head(tensor):  # (B, H, ...) -> (H, B, ...)
        return tensor.transpose(0, 1).contiguous()

    def flat(tensor):  # (H, B, n, D) -> (H * B, n, D)
        return tensor.reshape(heads * batch, tensor.shape[2], tensor.shape[3])

    queries, keys, values, grads = (by_head(t) for t in (query, key, value, grad_output))
    position = None if position_query is None else by_head(position_query)
    sums = _finite(by_head(log_sum))[..., None]
    falls_low = position is None and _falls_low(table)
    delta = (grads * by_head(output)).sum(-1, keepdim=True)
    grad_query = torch.empty_like(queries)
    grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
    grad_position = None if position is None else torch.empty_like(position)
    grad_table = torch.zeros_like(table)
    flat_key, flat_value = grad_key.view(-1, num_keys, size_of_head), grad_value.view(-1, num_keys, size_of_head)
    for start, stop, size, buffer, _ in _biased_blocks(position, table, mask, batch, num_queries, num_keys):
        first, length, width = num_keys - size, stop - start, buffer.shape[3]
        shifted = buffer.as_strided((heads * batch, length, size), (length * width, width - 1, 1), length - 1)
        block_query, block_grad = flat(queries[:, :, start:stop]), flat(grads[:, :, start:stop])
        block_key, block_value = flat(keys[:, :, :size]), flat(values[:, :, :size])
        weights = torch.baddbmm(shifted, block_query, block_key.transpose(1, 2), alpha=scaling)
        weights = _weights(weights, flat(sums[:, :, start:stop]), falls_low)
        grad_weights = torch.bmm(block_grad, block_value.transpose(1, 2))
        if dropout:
            kept = _kept((batch, heads, length, size), dropout, seed, start, weights)
            kept = kept.transpose(0, 1).reshape(heads * batch, length, size)
            flat_value[:, :size] += torch.bmm((weights * kept).transpose(1, 2), block_grad)
            grad_weights.mul_(kept)
        else:
            # In a pass of its own: a product that adds to a part of a tensor would go through the heads one by one.
            flat_value[:, :size] += torch.bmm(weights.transpose(1, 2), block_grad)
        # From here on the buffer holds the gradient of the scores, in place of their bias.
        torch.mul(weights, grad_weights.sub_(flat(delta[:, :, start:stop])), out=shifted)
        grad_query[:, :, start:stop] = torch.bmm(shifted, block_key).view(heads, batch, length, -1)
        flat_key[:, :size].add_(torch.bmm(shifted.transpose(1, 2), block_query), alpha=scaling)
        if length > 1:
            buffer[..., : length - 1].masked_fill_(_unread(length, buffer.device), 0.0)
        by_distance = buffer[..., :size]
        if position is None or grad_position is None:
            grad_table[:, first:] += by_distance.sum((1, 2))
        else:
            by_distance = by_distance.reshape(heads, batch * length, size)
            block_position = position[:, :, start:stop].reshape(heads, batch * length, -1)
            moved = torch.bmm(by_distance, table[:, first:])
            grad_position[:, :, start:stop] = moved.view(heads, batch, length, -1)
            grad_table[:, first:] += torch.bmm(by_distance.transpose(1, 2), block_position)
    grad_query.mul_(scaling)
    if grad_position is None:
        grad_position = query.new_empty(0, 0)
    grad_query, grad_key, grad_value = (tensor.transpose(0, 1) for tensor in (grad_query, grad_key, grad_value))
    return grad_query, grad_key, grad_value, grad_position.transpose(0, 1), grad_table


@_train_backward.register_fake
def _(grad_output, query, key, value, position_query, table, mask, output, log_sum, scaling, dropout, seed):
    def by_head(tensor):
        if tensor is None:
            return query.new_empty(0, 0)
        return tensor.new_empty(tensor.shape[1], tensor.shape[0], *tensor.shape[2:]).transpose(0, 1)

    return (*map(by_head, (query, key, value, position_query)), torch.empty_like(table))


def _keep_for_backward(ctx, inputs, output):
    *tensors, scaling, dropout, seed = inputs
    ctx.save_for_backward(*tensors, *output, seed)
    ctx.scaling, ctx.dropout = scaling, dropout


def _backward(ctx, grad_output, _):
    *tensors, seed = ctx.saved_tensors
    *grads, position, table = _train_backward(grad_output, *tensors, ctx.scaling, ctx.dropout, seed)
    return *grads, None if tensors[3] is None else position, table, None, None, None, None


_train.register_autograd(_backward, setup_context=_keep_for_backward)


def _finite(sums: Tensor) -> Tensor:
    """The log of an empty sum is -inf; with 0 in its place the weights of a query that sees nothing become exp(-inf)."""
    return sums.masked_fill(sums == -math.inf, 0.0)


def _falls_low(table: Tensor) -> bool:
    """Whether biases of distances, where they are all the bias, fall as low as ALiBi's: weights then can be next to nothing."""
    return table.device.type == "cpu" and bool(table.min() < math.log(_NOTHING))


def _weights(scores: Tensor, sums: Tensor, falls_low: bool) -> Tensor:
    """exp(scores - sums), in place."""
    weights = scores.sub_(sums).exp_()
    return _flush(weights) if falls_low else weights


def _flush(weights: Tensor) -> Tensor:
    """Makes weights below 1e-30 zero, in place: Intel's processors take a hundred times as long for the subnormal numbers that
    they and their gradients would be."""
    return torch.threshold_(weights, _NOTHING, 0.0)


def _unread(length: int, device) -> Tensor:
    """(t, t - 1): entries of the buffer that lie before the first one row i reads."""
    row = torch.arange(length, device=device)[:, None]
    return torch.arange(length - 1, device=device)[None] < length - 1 - row


def _kept(shape, dropout: float, seed: Tensor, start: int, like: Tensor) -> Tensor:
    """Factors of dropout for a block: 0 or 1 / (1 - p), the same whenever they are drawn."""
    generator = torch.Generator(like.device).manual_seed(int(seed) + start)
    drawn = torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)
    return (drawn >= dropout).to(like.dtype).div_(1 - dropout)


def trained_attention(query, key, value, bias: DistanceBias, mask, scaling: float, dropout: float) -> Tensor:
    """`blocked_attention` with gradient and dropout; half precision is raised to float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    inputs = [None if t is None else t.to(dtype) for t in (query, key, value, bias.query, bias.table)]
    seed = torch.randint(2**62, (), device="cpu") if dropout else torch.zeros((), dtype=torch.long)
    with torch.autocast(query.device.type, enabled=False):
        output, _ = _train(*inputs, mask, scaling, dropout, seed)
    return output.to(query.dtype)
