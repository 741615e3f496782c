"""Softmax attention with a bias that depends on distance: the plain form (reference) and the blocked forms.

A query block of length t at the end of S keys needs the bias of S distances, of which query i uses those from column t-1-i
on. The blocked forms write "bias by distance" into a buffer (h, B, t, S + t - 1) whose tail is -inf and read it through
strides that shift row i by t-1-i: shifted and causally masked without a copy, and never more than one block at a time.

Legend: B batch, H heads, Q queries, K keys (the newest under the last query), D head size; h heads, t queries and S keys of a
block, W = S + t - 1.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .few_rows_xl import dot_products
from .position_base import SPARE, DistanceBias, GatheredDistances

# The blocked forms are operators, which torch.compile takes as they are: it would copy the buffer that they read by strides.
# Their names are this module's own, for copies of this file may come from the Hub.
OPERATORS = __name__.replace(".", "_")

# Most queries of a block, of which half were faster where there are several blocks and few keys. On CPUs a block has so many
# heads that its buffer holds about as many entries for each thread, to fit in that thread's own cache.
BLOCK = SPARE + 1
MANY_KEYS = 640
ENTRIES = 2**18


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


def _by_head(tensor: Tensor) -> Tensor:
    """(B, H, ...) -> (H, B, ...), contiguous."""
    return tensor.transpose(0, 1).contiguous()


def _parts(total: int, most: int) -> Iterator[slice]:
    """The numbers from 0 up in parts of at most so many, as alike as can be."""
    size = -(-total // -(-total // most))
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _skewed(space, query, table, batch: int, size: int, length: int):
    """The buffer (h, B', t, W) of a block in `space`, and its shifted view (B', h, t, S).

    query: (h, B', t, D), and table (h, W, D) whose entries from S on mean nothing; or None, and table (h, S).
    """
    heads, width = table.shape[0], size + length - 1
    buffer = space[: heads * batch * length * width].view(heads, batch, length, width)
    if query is None:
        buffer[..., :size] = table[:, None, None]
    else:
        # The whole width, for a product into a part of a tensor would go through the heads one by one.
        block = query.reshape(heads, batch * length, -1)
        torch.bmm(block, table.transpose(1, 2), out=buffer.view(heads, batch * length, width))
    buffer[..., size:] = -math.inf
    strides = (length * width, batch * length * width, width - 1, 1)
    return buffer, buffer.as_strided((batch, heads, length, size), strides, length - 1)


class Block(NamedTuple):
    """Queries and heads of a block, those heads of the keys, the number S of keys it meets, and the buffer and view of its bias
    (`_skewed`), -inf where the mask hides."""

    heads: slice
    key_heads: slice
    queries: slice
    size: int
    buffer: Tensor
    bias: Tensor


def _biased_blocks(query, table, mask, batch: int, num_queries: int, key) -> Iterator[Block]:
    """All blocks, whose buffer is the next one's, too. query (H, B', Q, D) or None; mask (B' or 1, 1, Q, K); key (B, heads,
    K, D)."""
    num_heads, (key_heads, num_keys) = table.shape[0], key.shape[1:3]
    is_short = num_queries > BLOCK and num_keys < MANY_KEYS
    queries = list(_parts(num_queries, -(-BLOCK // 2) if is_short else BLOCK))
    length = queries[0].stop
    width, repeats = num_keys + length - 1, num_heads // key_heads
    together = key_heads
    if table.device.type == "cpu":
        together = -(-ENTRIES // (batch * length * width * repeats)) * torch.get_num_threads()
    groups = list(_parts(key_heads, together))
    spare = length - 1 if query is not None else 0
    missing = spare - (table.shape[1] - num_keys)
    if missing > 0:
        table = functional.pad(table, (0, 0, 0, missing))
    # Once, as large as the largest one needs: memory for another each time would be new to the process each time.
    space = table.new_empty(groups[0].stop * repeats * batch * length * width)
    for part in queries:
        size, count = num_keys - num_queries + part.stop, part.stop - part.start
        columns = slice(num_keys - size, num_keys + min(spare, count - 1))
        for group in groups:
            heads = slice(group.start * repeats, group.stop * repeats)
            block = None if query is None else query[heads, :, part]
            buffer, view = _skewed(space, block, table[heads, columns], batch, size, count)
            if mask is not None:
                view.masked_fill_(~mask[:, :, part, :size], -math.inf)
            yield Block(heads, group, part, size, buffer, view)


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
    rows = batch if position_query is not None or (mask is not None and mask.shape[0] > 1) else 1
    position = None if position_query is None else _by_head(position_query)
    dtypes = {query.dtype, key.dtype, value.dtype}  # under autocast they may differ
    has_products = query.device.type == "cpu" and dtypes in ({torch.float32}, {torch.float64})
    falls_low = has_products and position is None and _falls_low(table)
    if falls_low:
        scaling, position, table = _to_log2(scaling, position, table)
    output = _empty_by_column(query, value)
    space = None
    for heads, key_heads, queries, size, _, view in _biased_blocks(position, table, mask, rows, num_queries, key):
        parts = [slice(None)]
        if has_products and key_heads.stop - key_heads.start < key.shape[1]:
            # One row at a time, for some heads of several are not evenly spaced, and would be copied to be multiplied.
            parts = [slice(row, row + 1) for row in range(batch)]
        for row in parts:
            block, keys, values = query[row, heads, queries], key[row, key_heads, :size], value[row, key_heads, :size]
            bias = view if rows == 1 else view[row]
            if has_products:
                if space is None:  # once, as that of the bias
                    space = block.new_empty(block[..., 0].numel() * key.shape[2])
                block = _products(space, block, keys, values, bias, scaling, falls_low)
            else:
                if query.device.type != "cpu":
                    bias = bias.contiguous()  # kernels on accelerators want aligned rows
                block = kernel_attention(block, keys, values, bias, scaling)
            output[row, queries, heads] = block.transpose(1, 2)
    return output


def _products(space, query, key, value, bias, scaling: float, falls_low: bool) -> Tensor:
    """As `kernel_attention`, by two products and a softmax of all scores in `space`, which should fit in a cache. Where biases
    fall low, they and scaling make exponents of 2."""
    batch, heads, num_queries, size = query.shape
    grouped = query.reshape(batch * key.shape[1], -1, size)
    scores = space[: batch * heads * num_queries * key.shape[2]].view(*grouped.shape[:2], key.shape[2])
    scores.baddbmm_(grouped, key.flatten(0, 1).transpose(1, 2), beta=0, alpha=scaling)
    weights = scores.view(batch, heads, num_queries, -1).add_(bias)
    total = None
    if falls_low:
        _, total = _raise_above_most(weights, falls_low)
    else:
        torch.softmax(weights, -1, out=weights)
    output = torch.bmm(scores, value.flatten(0, 1)).view(batch, heads, num_queries, -1)
    return output if total is None else output.div_(total)


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
_LOG2E = math.log2(math.e)
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
    batch, num_heads, num_queries, _ = query.shape
    position = None if position_query is None else _by_head(position_query)
    kernel = _CPU_KERNEL if query.device.type == "cpu" and not dropout else None
    rows = batch
    if kernel is not None and position is None and (mask is None or mask.shape[0] == 1):
        rows = 1
    falls_low = position is None and kernel is None and _falls_low(table)
    if kernel is None:
        scaling, position, table = _to_log2(scaling, position, table)
    output = torch.empty_like(query)
    log_sum = query.new_empty(batch, num_heads, num_queries)
    for heads, _, part, size, _, view in _biased_blocks(position, table, mask, rows, num_queries, key):
        queries, keys, values = query[:, heads, part], key[:, heads, :size], value[:, heads, :size]
        if kernel is not None:
            block, sums = kernel(queries, keys, values, 0.0, False, attn_mask=view, scale=scaling)
        else:
            weights = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scaling).add_(view)
            most, total = _raise_above_most(weights, falls_low)
            sums = (total.log2() + most)[..., 0] / _LOG2E
            if dropout:
                weights.mul_(_kept(view.transpose(0, 1), dropout, seed, part.start, heads).transpose(0, 1))
            block = (weights @ values) / total
        output[:, heads, part], log_sum[:, heads, part] = block, sums
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
    batch, num_heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    queries, keys, values, grads = (_by_head(t).flatten(0, 1) for t in (query, key, value, grad_output))
    position = None if position_query is None else _by_head(position_query)
    falls_low = position is None and _falls_low(table)
    scaling_2, position_2, table_2 = _to_log2(scaling, position, table)
    sums = _finite(_by_head(log_sum).flatten(0, 1))[..., None] * _LOG2E
    delta = _by_head((grad_output * output).sum(-1, keepdim=True)).flatten(0, 1)
    grad_query = torch.empty_like(queries)
    grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
    grad_position = None if position is None else torch.empty_like(position)
    grad_table = torch.zeros_like(table)
    space = None
    unread = _unread(min(num_queries, BLOCK), table.device)
    for heads, _, part, size, buffer, _ in _biased_blocks(position_2, table_2, mask, batch, num_queries, key):
        first, rows = num_keys - size, slice(heads.start * batch, heads.stop * batch)
        count, _, length, width = buffer.shape
        shifted = buffer.as_strided((count * batch, length, size), (length * width, width - 1, 1), length - 1)
        block_query, block_grad = queries[rows, part], grads[rows, part]
        block_key, block_value = keys[rows, :size], values[rows, :size]
        if space is None:  # once, as that of the bias
            space = buffer.new_empty(2, count * batch * length * num_keys)
        weights, grad_weights = space[:, : count * batch * length * size].view(2, count * batch, length, size)
        torch.sub(shifted, sums[rows, part], out=weights)  # which a product adds to without a copy
        weights.baddbmm_(block_query, block_key.transpose(1, 2), alpha=scaling_2)
        _raise(weights, falls_low)
        torch.bmm(block_grad, block_value.transpose(1, 2), out=grad_weights)
        dropped = weights
        if dropout:
            kept = _kept(buffer[..., :size], dropout, seed, part.start, heads).flatten(0, 1)
            dropped = weights * kept
            grad_weights.mul_(kept)
        # In a pass of its own: a product that adds to a part of a tensor would go through the heads one by one.
        grad_value[rows, :size].add_(torch.bmm(dropped.transpose(1, 2), block_grad))
        # From here on the buffer holds the gradient of the scores, in place of their bias.
        torch.mul(weights, grad_weights.sub_(delta[rows, part]), out=shifted)
        grad_query[rows, part] = torch.bmm(shifted, block_key)
        grad_key[rows, :size].add_(torch.bmm(shifted.transpose(1, 2), block_query), alpha=scaling)
        if length > 1:
            buffer[..., : length - 1].masked_fill_(unread[-length:, : length - 1], 0.0)
        by_distance = buffer[..., :size]
        if position is None or grad_position is None:
            grad_table[heads, first:] += by_distance.sum((1, 2))
        else:
            by_distance = by_distance.reshape(count, batch * length, size)
            block_position = position[heads, :, part].reshape(count, batch * length, -1)
            moved = torch.bmm(by_distance, table[heads, first:])
            grad_position[heads, :, part] = moved.view(count, batch, length, -1)
            grad_table[heads, first:] += torch.bmm(by_distance.transpose(1, 2), block_position)
    grad_query.mul_(scaling)
    if grad_position is None:
        grad_position = query.new_empty(0, 0)
    grad_query, grad_key, grad_value = (
        grad.view(num_heads, batch, *grad.shape[1:]).transpose(0, 1) for grad in (grad_query, grad_key, grad_value)
    )
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
    """-inf, the log of an empty sum and the most of no scores, as 0, with which a query that sees nothing has weights of 0."""
    return sums.masked_fill(sums == -math.inf, 0.0)


def _falls_low(table: Tensor) -> bool:
    """Whether biases of distances, where they are all the bias, fall as low as ALiBi's: weights then can be next to nothing."""
    return table.device.type == "cpu" and bool(table.min() < math.log(_NOTHING))


def _to_log2(scaling: float, position_query: Tensor | None, table: Tensor) -> tuple[float, Tensor | None, Tensor]:
    """What makes scores, so that they are exponents of 2: for `exp` torch calls Intel's library, which takes ten times as long
    for -inf, and eighty times where the result is a subnormal number."""
    if position_query is None:
        return scaling * _LOG2E, None, table * _LOG2E
    return scaling * _LOG2E, position_query * _LOG2E, table


def _raise(exponents: Tensor, falls_low: bool) -> Tensor:
    """2 to the power of them, in place. Where they may fall low, zeros below 1e-30: Intel's processors take a hundred times as
    long to multiply subnormal numbers, which they and their gradients would be."""
    if falls_low:
        torch.threshold_(exponents, math.log2(_NOTHING), -math.inf)
    return exponents.exp2_()


def _raise_above_most(exponents: Tensor, falls_low: bool) -> tuple[Tensor, Tensor]:
    """2 to the power of exponents less the most of their row, in place. Returns that most, and the sum of each row."""
    most = _finite(exponents.amax(-1, keepdim=True))
    total = _raise(exponents.sub_(most), falls_low).sum(-1, keepdim=True)
    return most, total


def _unread(length: int, device) -> Tensor:
    """(t, t - 1): entries of the buffer that lie before the first one row i reads."""
    row = torch.arange(length, device=device)[:, None]
    return torch.arange(length - 1, device=device)[None] < length - 1 - row


def _kept(like: Tensor, dropout: float, seed: Tensor, start: int, heads: slice) -> Tensor:
    """Factors of dropout for a block, (h, B, t, S) as `like`: 0 or 1 / (1 - p), the same whenever they are drawn, and however
    heads are grouped."""
    generator = torch.Generator(like.device)
    drawn = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    for head, factors in enumerate(drawn, heads.start):
        factors.uniform_(generator=generator.manual_seed(int(seed) + start + (head << 32)))
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
