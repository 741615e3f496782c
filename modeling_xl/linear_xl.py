"""Linear attention by blocks of queries: what a block meets, how much that weighs, and the sums.

Σ_j w_ij (q_i . k_j) v_j is, for the keys near a block, a product of blocks, and for all older ones q_i S with the state
S = Σ_j k_j v_jᵀ. So time and memory grow with the length of a text and not with its square. One block over everything is
the parallel form, one query a block the recurrent one.

Legend: B batch, H heads, G heads of the state, g = H / G, t tokens of the piece, U tokens kept as rows before it, C queries
and K keys of a block, n keys that enter the state, F features of a query or key, V size of a value.
"""

import importlib
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.utils.import_utils import is_flash_linear_attention_available

from .position_base import DistanceBias

# Queries a block: 32 to 128 differ by less than 30 % on CPUs; 64 was the fastest at most lengths.
BLOCK = 64
# Blocks at once, where they need nothing from each other but sums.
RUN = 16


class Weights(NamedTuple):
    """Weights of what a block of queries meets, all (B or 1, G or 1, g or 1, ...); None where they are 1.

    local (..., C, K): of its keys, 0 where invisible. state (..., C, 1): of the state. entering (B or 1, G or 1, n, 1): of
    the n keys that enter the state after the block. decay (B or 1, G or 1, 1, 1): of the state before them.
    """

    local: torch.Tensor
    state: torch.Tensor | None = None
    entering: torch.Tensor | None = None
    decay: torch.Tensor | None = None


@dataclass
class Block:
    """Queries [start, stop) and the keys they meet, [first, last); of these [first, out) enter the state afterwards.

    Columns of keys count the U kept rows first, then the piece.
    """

    start: int
    stop: int
    first: int
    last: int
    out: int


class Text:
    """What the layers share about a piece: its blocks, who sees whom, and distances. Integers and booleans only."""

    def __init__(self, piece, past: int, band: int):
        self.piece, self.past, self.band = piece, past, band
        width, missing = piece.width, band - past
        self.blocks = [
            Block(
                start=start,
                stop=min(start + BLOCK, width),
                first=max(0, start - missing),
                last=min(start + BLOCK, width) + past,
                out=max(0, min(start + BLOCK, width) - missing),
            )
            for start in range(0, width, BLOCK)
        ]
        self.begin = piece.positions[:, :1]  # (B, 1), tokens of the row before the piece
        self.lowest = piece.document_start.clamp(min=0)  # (B, t), oldest token each query sees
        self.counts = torch.full_like(self.begin, width)  # (B, 1), tokens of the row in the piece
        if piece.fillers is not None:
            self.counts = width - piece.fillers[:, None]
        # Whether rows differ in nothing: all that is kept belongs to the document of each query, and nothing ends.
        oldest = self.begin - past if past else (self.begin - 1).clamp(min=0)  # without rows, the state's newest token
        self.is_plain = piece.fillers is None and piece.holds(self.lowest <= oldest)
        self.positions = piece.key_positions(past)  # (B or 1, U + t)
        # Of each block, whether the state holds nothing of the document of some query.
        self.is_torn = [not piece.holds(self.sees_state(block)) for block in self.blocks]
        self.has_one_pattern = self.is_plain and not piece.is_irregular
        self._shared: dict[tuple, torch.Tensor] = {}

    def mask(self, block: Block) -> torch.Tensor:
        """(B or 1, C, K), true where visible."""
        queries = torch.arange(block.start, block.stop, device=self.begin.device)[None, :, None]
        keys = torch.arange(block.first, block.last, device=self.begin.device) - self.past
        visible = keys <= queries
        if self.is_plain:
            return visible
        return visible & (self.begin[:, :, None] + keys >= self.lowest[:, block.start : block.stop, None])

    def sees_state(self, block: Block) -> torch.Tensor:
        """(B, C): whether the state holds tokens of the query's document."""
        newest = self.begin + block.start - self.band - 1
        return newest >= self.lowest[:, block.start : block.stop]

    def keeps_state(self, block: Block) -> torch.Tensor:
        """(B,): whether no document begins in the block."""
        return (self._lowest_at(block.stop) < self.begin + block.start)[:, 0]

    def entering(self, block: Block) -> torch.Tensor:
        """(B, n): which keys enter the state: tokens of the document that the block ends in, and no fillers."""
        keys = torch.arange(block.first, block.out, device=self.begin.device)[None] - self.past
        return (self.begin + keys >= self._lowest_at(block.stop)) & (keys < self.counts - self.band)

    def _lowest_at(self, column: int) -> torch.Tensor:
        """(B, 1): oldest token seen by the newest token before the column."""
        return self.lowest.gather(1, (self.counts.clamp(max=column) - 1).clamp(min=0))

    def newest(self, column: int) -> torch.Tensor:
        """(B or 1, 1): position of the newest token before the column of the piece."""
        if column and self.piece.fillers is None:
            return self.positions[:, self.past + column - 1 : self.past + column]
        positions = self.piece.key_positions(self.past + 1)[:, self.past :]  # of the token before the piece, and on
        if self.piece.fillers is None:
            return positions[:, :1]
        positions = positions.expand(len(self.counts), -1)
        return positions.gather(1, self.counts.clamp(max=column))

    def distances(self, block: Block) -> torch.Tensor:
        """(B or 1, C, K), from 0 up."""
        queries = self.positions[:, self.past + block.start : self.past + block.stop, None]
        return (queries - self.positions[:, None, block.first : block.last]).clamp(min=0)

    def once(self, make, block: Block, *names) -> torch.Tensor:
        """make(block), made once for all blocks of the same shape where only the shape counts."""
        if not self.has_one_pattern:
            return make(block)
        key = (*names, block.stop - block.start, block.last - block.first)
        if key not in self._shared:
            self._shared[key] = make(block)[:1]  # rows differ in where they are, not in distances
        return self._shared[key]


class Weighing:
    """How much each key and the state count for each query. This one: a token counts 1 if it is seen.

    rates: -log of the weight of a token before this one, (H,), or None where it is 1; for a kernel that knows no other.
    """

    rates: torch.Tensor | None = None

    def __init__(self, text: Text, dtype: torch.dtype):
        self.text, self.dtype, self.device = text, dtype, text.piece.device

    def share(self, block: Block) -> None:
        """Makes what all blocks of a shape have in common: a step that is run again for the backward pass may not keep it."""

    @property
    def is_uniform(self) -> bool:
        """Whether each query sees all before it and every weight is 1."""
        return type(self) is Weighing and self.text.is_plain

    def __call__(self, number: int, block: Block) -> Weights:
        return self._across(block, self._number(self.text.mask(block))[:, None, None])

    def _across(self, block: Block, local: torch.Tensor) -> Weights:
        """With what of the state counts before and after the block: documents begin in it, and rows end."""
        if self.text.is_plain:
            return Weights(local)
        return Weights(
            local,
            state=self._number(self.text.sees_state(block))[:, None, None, :, None],
            entering=self._number(self.text.entering(block))[:, None, :, None],
            decay=self._number(self.text.keeps_state(block))[:, None, None, None],
        )

    def _number(self, integers: torch.Tensor) -> torch.Tensor:
        return integers.to(self.device, self.dtype)


class Decay(Weighing):
    """A token at distance d counts exp(-rate d), with a rate for each head: the state decays."""

    rates: torch.Tensor

    def __init__(self, text: Text, dtype: torch.dtype, rates: torch.Tensor):
        super().__init__(text, dtype)
        self.rates = rates.to(dtype)

    def share(self, block: Block) -> None:
        if self.text.has_one_pattern:
            self.text.once(self._local, block, "decay", self.dtype)

    def __call__(self, number: int, block: Block) -> Weights:
        text = self.text
        seen = self._across(block, text.once(self._local, block, "decay", self.dtype))
        here = text.positions[:, block.start : block.stop]
        before, after = text.newest(block.start), text.newest(block.stop)
        state = self._power(here - before)[:, :, None, :, None]
        decay = self._power(after - before)[:, :, None]
        entering = self._power((after - here).clamp(min=0))[..., None]
        if seen.state is None or seen.entering is None or seen.decay is None:
            return Weights(seen.local, state, entering, decay)
        return Weights(seen.local, state * seen.state, entering * seen.entering, decay * seen.decay)

    def _power(self, distances: torch.Tensor) -> torch.Tensor:
        """(B or 1, n) -> (B or 1, H, n)."""
        return (-self.rates[:, None] * self._number(distances)[:, None]).exp()

    def _local(self, block: Block) -> torch.Tensor:
        distances = self.text.distances(block)
        weights = self._power(distances.flatten(1)).unflatten(2, distances.shape[1:])[:, :, None]  # (B or 1, H, 1, C, K)
        return weights * self._number(self.text.mask(block))[:, None, None]


class Bias(Weighing):
    """A token at distance d counts exp(bias_d), at the state's exp(bias at the far distance). What is subtracted from a
    query's exponents, the largest of those that count for it, cancels and keeps them in range."""

    def __init__(self, text: Text, dtype: torch.dtype, bias: DistanceBias, groups: int):
        super().__init__(text, dtype)
        self.groups = groups
        # Of the distances F, F - 1, ... 0; one more entry for keys that are not seen.
        self.table = bias.entries.to(dtype)
        self.queries = None if bias.query is None else bias.query.to(dtype).split(BLOCK, 2)
        self.far = self.table.shape[1] - 1

    def share(self, block: Block) -> None:
        if self.text.has_one_pattern:
            self.text.once(self._index, block, "index")

    def __call__(self, number: int, block: Block) -> Weights:
        text = self.text
        by_distance = self.table[None, :, None]  # (B or 1, H, C or 1, F + 1)
        if self.queries is not None:
            by_distance = self.queries[number] @ self.table.transpose(1, 2)
        state = by_distance[..., :1]
        index = text.once(self._index, block, "index")
        shape = (max(by_distance.shape[0], index.shape[0]), by_distance.shape[1], *index.shape[1:])
        by_distance = functional.pad(by_distance, (0, 1), value=-torch.inf)
        local = by_distance.expand(*shape[:3], -1).gather(-1, index[:, None].expand(shape))
        largest = local.detach().amax(-1, keepdim=True)
        if text.is_torn[number]:
            state = state.masked_fill(~text.sees_state(block)[:, None, :, None].to(self.device), -torch.inf)
        largest = torch.maximum(largest, state.detach())
        local, state = (local - largest).exp(), (state - largest).exp()
        local, state = (weights.unflatten(1, (self.groups, -1)) for weights in (local, state))
        return self._across(block, local)._replace(state=state)

    def _index(self, block: Block) -> torch.Tensor:
        """(B or 1, C, K): where in the table each key's bias stands."""
        index = self.far - self.text.distances(block).clamp(max=self.far)
        return torch.where(self.text.mask(block), index, self.far + 1).to(self.device)


def windows(tensor: torch.Tensor, cuts: list[int]):
    """A function (first, last) -> tensor[:, :, first:last] for bounds out of `cuts`.

    With gradient the parts are split off once: each slice would fill a gradient of the whole length.
    """
    if not torch.is_grad_enabled():
        return lambda first, last: tensor[:, :, first:last]
    cuts = sorted({0, *cuts, tensor.shape[2]})
    parts = tensor.split([b - a for a, b in pairwise(cuts)], 2)
    number = {cut: n for n, cut in enumerate(cuts)}

    def window(first: int, last: int) -> torch.Tensor:
        found = parts[number[first] : number[last]]
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    return window


def kernel_for(query: torch.Tensor):
    """The chunked kernel of flash-linear-attention for queries (B, H, t, F) that it can take, else None.

    A single block is done sooner without; 256 features are what its tiles hold.
    """
    fits = query.is_cuda and query.dtype == torch.float32 and query.shape[2] > BLOCK and query.shape[3] <= 256
    if not fits or not is_flash_linear_attention_available():
        return None
    return importlib.import_module("fla.ops.simple_gla").chunk_simple_gla


def with_kernel(kernel, query, key, value, state, rates):
    """`blockwise` for queries that see all before them, with decay or without: o_t = q_t S_t, S_t = e^-rate S_t-1 + k_t v_t.

    The kernel wants (B, t, H, size) and as many heads of keys as of queries.
    """
    groups = query.shape[1] // key.shape[1]
    key, value, state = (tensor.repeat_interleave(groups, 1) for tensor in (key, value, state))
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    decay = None if rates is None else -rates.to(query).expand(*query.shape[:3]).contiguous()
    output, state = kernel(query, key, value, g=decay, scale=1.0, initial_state=state.contiguous(), output_final_state=True)
    return output.transpose(1, 2), state[:, ::groups]


def at_once(query, key, value, state):
    """`blockwise` where every query sees all before it and every weight is 1: many blocks in one product. value None: all 1."""
    if query.shape[2] == 1:  # a decoded token
        entering = key.transpose(-1, -2)  # (B, G, F, 1)
        state = state + (entering if value is None else entering * value)
        return (query.unflatten(1, (key.shape[1], -1)).flatten(2, 3) @ state).flatten(1, 2)[:, :, None], state
    whole, rest = divmod(query.shape[2], BLOCK)
    widths = [BLOCK * min(RUN, whole - block) for block in range(0, whole, RUN)] + [rest] * bool(rest)
    values = [None] * len(widths) if value is None else value.split(widths, 2)
    outputs = []
    for part in zip(query.split(widths, 2), key.split(widths, 2), values, strict=True):
        output, state = _run(*part, state)
        outputs.append(output)
    return torch.cat(outputs, 2), state


def _run(query, key, value, state):
    """The same for a whole number of blocks, or for less than one."""
    size = min(BLOCK, query.shape[2])
    rows = query.unflatten(1, (key.shape[1], -1)).unflatten(3, (-1, size)).transpose(2, 3)  # (B, G, blocks, g, C, F)
    rows, shape = rows.flatten(3, 4).contiguous(), rows.shape  # each product would make and keep a copy of its own
    key = key.unflatten(2, (-1, size)).contiguous()  # (B, G, blocks, C, F)
    scores = (rows @ key.transpose(-1, -2)).unflatten(3, (-1, size)).tril_().flatten(3, 4)
    if value is None:
        output, sums = scores.sum(-1, keepdim=True), key.sum(3)[..., None]
    else:
        value = value.unflatten(2, (-1, size)).contiguous()
        output, sums = scores @ value, key.transpose(-1, -2) @ value
    before, state = _running_sums(state, sums)
    output = (output + rows @ before).view(*shape[:5], -1)
    return output.transpose(2, 3).flatten(3, 4).flatten(1, 2), state


def _running_sums(state, sums):
    """The states before each block, (B, G, blocks, F, V), and after the last, from what each block adds to them."""
    number = sums.shape[2] + 1
    if number == 2:
        return state[:, :, None], state + sums[:, :, 0]
    states = torch.cat([state[:, :, None], sums], 2)
    states = (states.new_ones(number, number).tril_() @ states.flatten(3)).view_as(states)  # a tenth of the time of cumsum
    return states[:, :, :-1], states[:, :, -1].clone()  # a part would keep all of them


def blockwise(query, key, value, state, text: Text, weigh: Weighing):
    """Σ_j w_ij (query_i . key_j) value_j, and the state after the piece.

    query (B, H, t, F); key (B, G, U + t, F), value (B, G, U + t, V), heads of queries in groups; state (B, G, F, V).
    Returns (B, H, t, V) and (B, G, F, V).
    """
    groups = key.shape[1]
    if weigh.is_uniform or (text.has_one_pattern and weigh.rates is not None):
        kernel = kernel_for(query)
        if kernel is not None:
            return with_kernel(kernel, query, key, value, state, weigh.rates)
    if weigh.is_uniform:
        return at_once(query, key, value, state)
    cuts = [cut for block in text.blocks for cut in (block.first, block.last, block.out)]
    key_of, value_of = windows(key, cuts), windows(value, cuts)
    queries = query.unflatten(1, (groups, -1)).split(BLOCK, 3)  # (B, G, g, C, F)

    def step(number: int, block: Block, query, key, value, state):
        rows = query.flatten(2, 3)  # (B, G, g * C, F)
        weights = weigh(number, block)
        scores = (rows @ key.transpose(-1, -2)).view(*query.shape[:4], key.shape[2]) * weights.local
        past = (rows @ state).view(*query.shape[:4], -1)
        if weights.state is not None:
            past = past * weights.state
        output = (scores.flatten(2, 3) @ value).view_as(past) + past
        count = block.out - block.first
        if count:
            entering, kept = key[:, :, :count], state
            if weights.entering is not None:
                entering = entering * weights.entering
            if weights.decay is not None:
                kept = kept * weights.decay
            state = kept + entering.transpose(-1, -2) @ value[:, :, :count]
        return output, state

    for block in text.blocks:
        weigh.share(block)
    # Beside kept rows a block's scores are many times its inputs: they are made again for the backward pass.
    recompute = bool(text.band) and torch.is_grad_enabled()
    outputs = []
    for number, block in enumerate(text.blocks):
        bounds = (block.first, block.last)
        inputs = (number, block, queries[number], key_of(*bounds), value_of(*bounds), state)
        if recompute:
            output, state = checkpoint(step, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            output, state = step(*inputs)
        outputs.append(output)
    return torch.cat(outputs, 3).flatten(1, 2), state


def normalisers(query, key, norm, text: Text, weigh: Weighing):
    """Σ_j w_ij query_i . key_j, (B, H, t, 1), and the sum of keys after the piece, (B, G, F); norm (B, G, F): before it."""
    if weigh.is_uniform:
        total, norm = at_once(query, key, None, norm[..., None])
        return total, norm[..., 0]
    ones = key.new_ones(*key.shape[:3], 1)
    total, norm = blockwise(query, key, ones, norm[..., None], text, weigh)
    return total, norm[..., 0]
