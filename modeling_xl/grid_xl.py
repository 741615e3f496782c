"""The segment grid: what one call means for each row. A call is packed (pads dropped), then cut into pieces that every layer
runs as a whole. No tensor of the model is computed here; all of it is integer arithmetic on the CPU.

Legend: B rows of the batch, T columns of the call, t columns of a piece, U kept tokens a piece looks back to.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from .cache_xl import BEFORE_ALL, XLCache
from .position_base import GatheredDistances, PositionContext


class Packing:
    """Drops the pads of a call: real tokens move to the left of each row, in order, and back again.

    real: (B, T) booleans. counts: (B,) real tokens a row. width: columns left, the largest count.
    """

    def __init__(self, real: torch.Tensor):
        self.real = real
        self.counts = real.sum(1).cpu()
        self.width = int(self.counts.max()) if len(self.counts) else 0
        self.is_identity = bool((self.counts == real.shape[1]).all())
        if not self.is_identity:
            self._order = torch.argsort(~real, dim=1, stable=True)[:, : self.width]
            self._rank = (real.long().cumsum(1) - 1).clamp(0, max(self.width - 1, 0))

    def pack(self, columns: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (B, width, ...)."""
        if self.is_identity:
            return columns
        index = self._order.to(columns.device).view(*self._order.shape, *[1] * (columns.dim() - 2))
        return columns.gather(1, index.expand(*self._order.shape, *columns.shape[2:]))

    def unpack(self, columns: torch.Tensor) -> torch.Tensor:
        """(B, width, ...) -> (B, T, ...), zero at pads."""
        if self.is_identity:
            return columns
        shape = self.real.shape
        if not self.width:
            return columns.new_zeros(*shape, *columns.shape[2:])
        index = self._rank.to(columns.device).view(*shape, *[1] * (columns.dim() - 2))
        spread = columns.gather(1, index.expand(*shape, *columns.shape[2:]))
        return spread * self.real.to(columns.device).view(*shape, *[1] * (columns.dim() - 2)).to(columns.dtype)


@dataclass
class Piece:
    """Consecutive packed columns [start, stop) that the layers run as a whole, and what they share meanwhile.

    positions (B, t): tokens of the row before each one; a row that has ended goes on counting, unseen by what is real.
    encode_positions (B or 1, t): what enters the position scheme. document_start (B, t): position at which the token's
    document begins. in_document (B, t): what enters the position scheme where it must count from there. call_start (B,):
    positions at the call's start. lengths (B,): tokens of each row after the piece. fillers (B,): columns at the end of the
    piece that are no token, or None. fresh (B,): rows without any token before the piece, on the first piece of a call, or
    None. cut (B,): rows whose gradient ends before the piece, or None.
    """

    start: int
    stop: int
    positions: torch.Tensor
    encode_positions: torch.Tensor
    document_start: torch.Tensor
    in_document: torch.Tensor
    call_start: torch.Tensor
    lengths: torch.Tensor
    fillers: torch.Tensor | None
    fresh: torch.Tensor | None
    cut: torch.Tensor | None
    device: torch.device
    mem_len: int
    form: str
    state_dtype: torch.dtype | None
    undo: int
    history: torch.Tensor | None
    context: PositionContext
    wants_weights: bool = False
    wants_aux_loss: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def is_irregular(self) -> bool:
        """Whether distances are the user's `position_ids` and not those of tokens."""
        return self.history is not None

    # What the values of integers decide. Where shapes may not depend on them, a piece answers without looking.

    def holds(self, condition: torch.Tensor) -> bool:
        """Whether the condition is known to be true everywhere; False where it need not be."""
        return bool(condition.all())

    def most(self, counts: torch.Tensor, limit: float) -> int:
        """The largest count, or the limit that none of them exceeds."""
        return int(counts.max())

    def falling(self, count: int) -> torch.Tensor:
        """The distances count - 1 ... 0."""
        return torch.arange(count - 1, -1, -1, device=self.device)

    def gathered(self, distances: torch.Tensor, limit: float) -> GatheredDistances:
        """Distances (B or 1, Q, K) that follow no pattern, those below 0 counted as 0; none exceeds the limit."""
        return GatheredDistances.of(distances.clamp(min=0), self.device)

    def key_positions(self, past: int) -> torch.Tensor:
        """What enters the position scheme for `past` kept tokens and the piece, (B or 1, past + t)."""
        if self.history is not None:
            before = self.history.shape[1] - (self.stop - self.start)
            return self.history[:, before - past :]
        if not past:
            return self.encode_positions
        back = torch.arange(-past, 0, device=self.encode_positions.device)[None]
        return torch.cat([self.encode_positions[:, :1] + back, self.encode_positions], 1)


@dataclass
class CallPlan:
    """What a call does to the counters of the cache, and its pieces."""

    pieces: list[Piece]
    lengths: torch.Tensor
    document_start: torch.Tensor
    document_shift: torch.Tensor
    document_id: torch.Tensor
    has_document_id: torch.Tensor
    next_position_id: torch.Tensor
    position_shift: torch.Tensor
    row_positions: torch.Tensor | None
    undo_limit: float  # tokens that can be taken back afterwards

    def write(self, cache: XLCache, columns: int) -> None:
        """Moves the counters of `cache` to the end of the call."""
        if self.row_positions is not None:
            self.row_positions = self.row_positions[:, max(0, self.row_positions.shape[1] - cache.most_rows()) :]
        cache._lengths = self.lengths
        cache.document_start, cache.document_shift = self.document_start, self.document_shift
        cache.document_id, cache.has_document_id = self.document_id, self.has_document_id
        cache.next_position_id, cache.position_shift = self.next_position_id, self.position_shift
        cache.row_positions = self.row_positions
        cache.columns += columns
        cache.undoable = int(min(cache.undoable + columns, self.undo_limit))


def plan_call(
    cache: XLCache,
    counts: torch.Tensor,
    document_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    device: torch.device,
    segment_len: int | None,
    longest_piece: int | None,
    bptt_segments: int,
    needs_row_lines: bool,
    kept_rows: int,
    undo_limit: float,
    context: PositionContext,
    wants_weights: bool,
    wants_aux_loss: bool,
) -> CallPlan:
    """Lays the packed call over the grid of each row.

    counts (B,): real tokens a row. document_ids, position_ids: packed (B, T) integers on the CPU, or None.
    segment_len: None where there are no lines; then a piece is at most `longest_piece` tokens (None: the call).
    needs_row_lines: whether a piece may not cross the segment line of any row (gradient, or a mechanism that asks for it).
    kept_rows: most rows that a mechanism with a bounded number keeps.
    """
    before = cache._lengths
    width = int(counts.max())
    columns = torch.arange(width)[None]
    positions = before[:, None] + columns
    real = columns < counts[:, None]

    begins, document_id, has_id = _documents(cache, counts, real, positions, document_ids, position_ids)
    starts = torch.where(begins, positions, BEFORE_ALL)
    document_start = torch.maximum(starts.cummax(1).values, cache.document_start[:, None])
    shift, next_id = _position_shift(cache, counts, real, positions, begins, position_ids)
    is_irregular = cache.row_positions is not None or bool((shift != cache.position_shift[:, None]).any())
    encode_positions = positions + shift
    history = None
    if is_irregular:
        # Rows of zeros that an initial memory puts before the first token are not kept yet; and the token before them all.
        kept = max(cache.most_rows(), kept_rows) + 1
        history = torch.cat([cache.positions_of_last(kept), encode_positions], 1)

    # Positions counted from the first token of the document: what ran ahead before it does not count.
    first = torch.where(begins, columns, -1).cummax(1).values
    shift_before = torch.where(first >= 0, shift.gather(1, first.clamp(min=0)), cache.document_shift[:, None])
    in_document = encode_positions - document_start.clamp(min=0) - shift_before

    def last_real(values: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        index = (counts - 1).clamp(min=0)[:, None]
        return torch.where(counts > 0, values.gather(1, index)[:, 0], old)

    fresh = before == 0
    pieces = []
    if segment_len is None:
        edges = [*range(0, width, longest_piece or width), width]
    else:
        edges = _edges(segment_len, before, counts, width, needs_row_lines)
    for start, stop in pairwise(edges):
        fillers = (stop - counts).clamp(0, stop - start)
        here = encode_positions[:, start:stop]
        pieces.append(
            Piece(
                start=start,
                stop=stop,
                positions=positions[:, start:stop],
                encode_positions=here[:1] if bool((here == here[:1]).all()) else here,
                document_start=document_start[:, start:stop],
                in_document=in_document[:, start:stop],
                call_start=before,
                lengths=before + counts.clamp(max=stop),
                fillers=fillers if bool(fillers.any()) else None,
                fresh=fresh if start == 0 and bool(fresh.any()) else None,
                cut=_cut(segment_len, bptt_segments, before, start),
                device=device,
                mem_len=cache.mem_len,
                form=cache.form or "key_value",
                state_dtype=cache.dtype,
                undo=int(undo_limit) if math.isfinite(undo_limit) else 0,
                history=None if history is None else history[:, : history.shape[1] - width + stop],
                context=replace(context, tables={}),
                wants_weights=wants_weights,
                wants_aux_loss=wants_aux_loss,
            )
        )
    row_positions = None
    if history is not None:
        packed = torch.arange(history.shape[1])[None] - (width - counts)[:, None]
        row_positions = history.gather(1, packed.clamp(min=0))
    return CallPlan(
        pieces,
        lengths=before + counts,
        document_start=last_real(document_start, cache.document_start),
        document_shift=last_real(shift_before, cache.document_shift),
        document_id=document_id,
        has_document_id=has_id,
        next_position_id=next_id,
        position_shift=last_real(shift, cache.position_shift),
        row_positions=row_positions,
        undo_limit=undo_limit,
    )


def _edges(segment: int, before, counts, width: int, needs_row_lines: bool) -> list[int]:
    """Columns at which pieces begin and end."""
    if width == 1:
        return [0, width]
    phases = {phase for phase, count in zip((before % segment).tolist(), counts.tolist(), strict=True) if count}
    if needs_row_lines or len(phases) == 1:
        # Line of a row: its own count of tokens is a multiple of L. In phase these are the same columns for all rows.
        inner = {column for phase in phases for column in range(segment - phase, width, segment)}
    else:
        inner = set(range(segment, width, segment))
    return [0, *sorted(inner), width]


def _cut(segment: int | None, bptt_segments: int, before, start: int) -> torch.Tensor | None:
    """Rows that begin, at column `start`, segment k + 1, 2(k + 1), ... of the call: there the gradient ends."""
    if start == 0 or segment is None:
        return None
    here = before + start
    number = here // segment - before // segment
    cut = (here % segment == 0) & (number % (bptt_segments + 1) == 0)
    return cut if bool(cut.any()) else None


def _documents(cache, counts, real, positions, document_ids, position_ids):
    """Where documents begin (B, T), and each row's last document id and whether it has one."""
    begins = torch.zeros_like(real)
    if document_ids is not None:
        before = torch.cat([cache.document_id[:, None], document_ids[:, :-1]], 1)
        begins = document_ids != before
        begins[:, 0] |= ~cache.has_document_id
        index = (counts - 1).clamp(min=0)[:, None]
        last = torch.where(counts > 0, document_ids.gather(1, index)[:, 0], cache.document_id)
        result = last, cache.has_document_id | (counts > 0)
    else:
        if position_ids is not None:
            begins = position_ids == 0
        result = cache.document_id.clone(), cache.has_document_id.clone()
    # The first token of a row begins no new document: rows of zeros before it are its own.
    return begins & real & (positions > 0), *result


def _position_shift(cache, counts, real, positions, begins, position_ids):
    """How far `position_ids` run ahead of the count of tokens (B, T), and the id each row's next token should have.

    Inside a document only differences of positions count, so where they go on by one nothing is shifted.
    """
    shift = cache.position_shift[:, None].expand(-1, positions.shape[1])
    if position_ids is None:
        known = cache.next_position_id >= 0
        return shift, torch.where(known, cache.next_position_id + counts, -1)
    expected = torch.cat([cache.next_position_id[:, None], position_ids[:, :-1] + 1], 1)
    expected[:, 0] = torch.where(cache.next_position_id < 0, positions[:, 0], cache.next_position_id)
    jumps = torch.where(real & ~begins & (positions > 0), position_ids - expected, 0)
    if bool((jumps < 0).any()):
        row, column = (jumps < 0).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids of row {row} go from {int(expected[row, column]) - 1} to {int(position_ids[row, column])} inside "
            "a document; positions must rise. Begin a new document at position 0, or give document_ids."
        )
    index = (counts - 1).clamp(min=0)[:, None]
    next_id = torch.where(counts > 0, position_ids.gather(1, index)[:, 0] + 1, cache.next_position_id)
    return shift + jumps.cumsum(1), next_id
