"""What a memory mechanism is, and `RowMemory`: attention over kept tokens, on which `none`, `recurrence` and
`compressive` stand.

A mechanism reads the state handed to it and returns a new one; it never writes to the cache. Legend: B batch, H heads, t
tokens of the piece, U kept tokens it looks back to, K = U + t, M mem_len, E hidden size, D head size, s sink tokens.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from .cache_xl import LayerState
from .position_base import GatheredDistances


class Attended(NamedTuple):
    """What a mechanism returns for a piece.

    output (B, t, H * D); state: the new one; weights (B, H, t, s + K) or None; aux_loss (2,): the sum and the number of the
    terms of a loss of its own, or None.
    """

    output: torch.Tensor
    state: LayerState
    weights: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


class Projected(NamedTuple):
    """What a piece was projected to, not encoded: its queries (B, H, t, D), and keys and values (B, heads, U, D) of the rows
    kept before it where these are layer inputs, else None."""

    query: torch.Tensor
    past_key: torch.Tensor | None = None
    past_value: torch.Tensor | None = None


class MemoryMechanism(nn.Module):
    """What a layer keeps of the past and how it attends to it. One instance a layer.

    name: the value of `memory_type`; the file is `memory_<name>.py`.
    uses_grid: whether segments mean anything to it; only then are calls cut and gradients ended at segment lines.
    needs_row_lines: whether a piece must end at the segment line of each row (else only where gradient asks for it).
    may_start_with_zeros, uses_window, uses_sinks, has_weights: whether `initial_memory='zeros'`, `attention_window`,
    `num_sink_tokens`, and weights (`attention_dropout`, `output_attentions`) mean anything to it.
    has_two_forms: whether it keeps hidden states with gradient and keys and values without.
    config_fields: fields of its own that a saved state depends on.
    """

    name: ClassVar[str]
    uses_grid: ClassVar[bool] = True
    needs_row_lines: ClassVar[bool] = True
    may_start_with_zeros: ClassVar[bool] = False
    uses_window: ClassVar[bool] = False
    uses_sinks: ClassVar[bool] = False
    has_weights: ClassVar[bool] = False
    has_two_forms: ClassVar[bool] = False
    config_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx

    @classmethod
    def validate(cls, config) -> None:
        """Raises ValueError where the config cannot work with this mechanism."""

    @classmethod
    def check_mem_len(cls, config, mem_len: int) -> None:
        """Raises ValueError where a memory of `mem_len` cannot work."""

    @classmethod
    def oldest_visible(cls, config, mem_len: int, positions, call_start=None):
        """The oldest position that a query at each of `positions` sees, never moving back as positions grow.

        positions: integers (any shape); call_start: position at the start of the call, broadcastable, or None where a
        call may have begun anywhere before. Returns a tensor of the shape of `positions`, or None: everything.
        """

    @classmethod
    def pattern_len(cls, config) -> int:
        """After how many tokens `oldest_visible` repeats itself, so many tokens further on."""
        return config.segment_len or 1

    @classmethod
    def kept_rows(cls, config, mem_len: int) -> float:
        """Most tokens that a query looks back to, itself excluded; inf: all; 0 where nothing is kept token by token."""
        return 0

    @classmethod
    def remembered_tokens(cls, config) -> int | None:
        """The memory length as papers state it, tokens that rows and slots stand for; None where it has no such length."""
        return None

    @classmethod
    def why_no_roll_back(cls, config) -> str | None:
        """Why newest tokens cannot be taken back from a state, or None where they can."""
        return f"memory_type='{cls.name}' folds tokens into its state."

    @classmethod
    def tp_plan(cls, config) -> dict[str, str] | None:
        """As `PositionScheme.tp_plan`. Under tensor parallelism `attention` has some of the heads only; what mixes heads must
        ask for `attention.mean_over_heads`."""
        return None

    def slot_positions(self, state: LayerState | None, mem_len: int, position: int) -> torch.Tensor:
        """Positions of the kept rows that stand for several tokens: for each, oldest first, that of its newest token, (n,).

        state: of a batch of one row, which has read `position` tokens. In the weights these rows come before the others.
        """
        return torch.empty(0, dtype=torch.long)

    def init_parameters(self, std: float) -> None:
        """(Re-)creates parameters that are not modules of torch, and buffers."""

    def before_call(self, is_fresh: bool) -> None:
        """Told once before each call in training, and not again when layers run anew for the backward pass.

        is_fresh: no row carries a state, so what states depend on may change.
        """

    def prepare(self, attention, hidden_states, state: LayerState | None, piece) -> None:
        """Told before the layers run, where nothing is compiled, what `attend` will be told; of hidden_states only dtype and
        device count. Integer arithmetic belongs here, its results into `piece.memo`, and the position scheme's `prepare`."""

    def attend(self, attention, hidden_states, state: LayerState | None, piece) -> Attended:
        """One layer's attention over a piece.

        attention: the layer's `XLAttention`, which projects (`project`, `project_past`), encodes (`encode`) and computes
        softmax attention (`softmax`). hidden_states (B, t, E): layer inputs, not normalised. state: what this method
        returned for the tokens before, or None. piece: `grid_xl.Piece`; its columns `fillers` are no tokens and may not
        enter the state.
        """
        raise NotImplementedError


@dataclass
class RowView:
    """What the layers with the same mechanism share about a piece.

    past: U. mask (B or 1, 1, t, K), true where visible; None: causal, the newest key under the last query.
    distances (K,) falling to 0, of the last query; gather_distances (B or 1, t, K) in their place, or None.
    needed: kept tokens that the next token will look back to, for the row that needs most. kept: most tokens that any will,
    with those that may be taken back.
    """

    past: int
    mask: torch.Tensor | None
    distances: torch.Tensor
    gather_distances: GatheredDistances | None
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    needed: int
    kept: float
    sinks: "SinkView | None"


@dataclass
class SinkView:
    """Sink tokens for a piece: source column of each (B, s), whether it is in the piece, and for the queries their
    positions relative to the sinks' slots (B, t), the distances (B, t, s) and which are visible (B, 1, t, s). slots (1, s)."""

    column: torch.Tensor
    is_new: torch.Tensor | None
    query_positions: torch.Tensor
    slots: torch.Tensor
    distances: GatheredDistances
    visible: torch.Tensor


class RowMemory(MemoryMechanism):
    """Softmax attention over [sinks ; kept tokens ; piece]; `oldest_visible` says which of them a query sees."""

    needs_row_lines = False
    uses_window = uses_sinks = has_weights = True

    @classmethod
    def oldest_visible(cls, config, mem_len, positions, call_start=None):
        oldest = cls.oldest_of_memory(config, mem_len, positions, call_start)
        if config.attention_window is None:
            return oldest
        window = positions - (config.attention_window - 1)
        return window if oldest is None else torch.maximum(oldest, window)

    @classmethod
    def oldest_of_memory(cls, config, mem_len, positions, call_start):
        """`oldest_visible` without regard to a window."""
        raise NotImplementedError

    @classmethod
    def tp_plan(cls, config) -> dict[str, str]:
        return {}

    def rows_of_zeros(self, mem_len: int) -> int:
        """Rows of zeros before the first token."""
        return mem_len if self.may_start_with_zeros and self.config.initial_memory == "zeros" else 0

    def is_hidden(self, piece) -> bool:
        return self.has_two_forms and piece.form == "hidden"

    def prepare(self, attention, hidden_states, state, piece):
        view = self._view(state or LayerState(), piece)
        positions = [piece.encode_positions]
        if self.is_hidden(piece):
            positions.append(view.key_positions)
        if view.sinks is not None:
            positions += [view.sinks.query_positions, view.sinks.slots]
        distances = view.distances if view.gather_distances is None else None
        attention.position.prepare(hidden_states, distances, positions, piece.context)

    def attend(self, attention, hidden_states, state, piece):
        state = self._begin(attention, hidden_states, state or LayerState(), piece)
        view = self._view(state, piece)
        if view.past > state.size:
            raise RuntimeError(f"A layer's memory holds {state.size} rows where {view.past} are needed; the cache is damaged.")
        query, key, value = attention.project(hidden_states)
        context = piece.context
        projected = Projected(query)
        if self.is_hidden(piece):
            source = {"sink_hidden": hidden_states[:, None]}
            if view.past:
                past = state.last("hidden", view.past)[:, 0].to(hidden_states.dtype)
                past_key, past_value = attention.project_past(past)
                projected = Projected(query, past_key, past_value)
                key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)  # (B, H, K, D)
            encoded, key = attention.encode(query, key, view.query_positions, view.key_positions, context)
            state = self._append_hidden(state, hidden_states, view, piece)
        else:
            source = {"sink_key": key, "sink_value": value}
            others = self.rows_beside(hidden_states, key)
            encoded, key = attention.encode(query, key, piece.encode_positions, piece.encode_positions, context)
            keep = int(min(state.size, max(view.kept, view.past)))
            state = state.append(keep, True, piece.state_dtype, key=key, value=value, **others)
            if view.past or piece.state_dtype is not None:
                key = state.last("key", view.past + piece.width).to(query.dtype)
                value = state.last("value", view.past + piece.width).to(query.dtype)
        sinks = None
        if view.sinks is not None:
            state = state.with_fixed(**self._update_sinks(state, source, view.sinks, piece))
            sinks = self._read_sinks(attention, query, state, view.sinks, piece)
        output, weights = attention.softmax(
            query, encoded, key, value, context, view.mask, view.distances, view.gather_distances, sinks, piece.wants_weights
        )
        state = self.observe(attention, state, view, piece, projected)
        if piece.fillers is not None:
            state = state.pack(piece.fillers)
        state, aux_loss = self.close(attention, state, piece, hidden_states.dtype, projected)
        if math.isfinite(view.kept):
            state = state.shrink(int(view.kept))
        return Attended(output, state, weights, aux_loss)

    def rows_beside(self, hidden_states, key) -> dict[str, torch.Tensor]:
        """Rows (B, heads, t, size) to keep beside keys and values, from layer inputs and keys that are not encoded."""
        return {}

    def observe(self, attention, state: LayerState, view: "RowView", piece, projected: Projected) -> LayerState:
        """Takes note of the piece's queries."""
        return state

    def close(
        self, attention, state: LayerState, piece, dtype: torch.dtype, projected: Projected
    ) -> tuple[LayerState, torch.Tensor | None]:
        """Changes what is kept where a segment has closed; the rows of the state are right-aligned. Also `aux_loss`.

        dtype: of layer inputs, which rows may not be stored in.
        """
        return state, None

    def _append_hidden(self, state, hidden_states, view: RowView, piece) -> LayerState:
        needed = view.needed
        if piece.undo:  # any of the last tokens may become the newest again, in the middle of its segment
            needed = int(view.kept)
        if piece.fillers is not None:
            needed += int(piece.fillers.max())  # dropped after the piece
        new = min(needed, piece.width)
        if not new:
            return LayerState(fixed=state.fixed)
        rows = hidden_states[:, None, piece.width - new :]
        return state.append(needed - new, False, piece.state_dtype, hidden=rows)

    def _begin(self, attention, hidden_states, state: LayerState, piece) -> LayerState:
        """Puts the rows of zeros, where the config asks for them, before the first token of rows that have none yet."""
        size = 0 if piece.fresh is None else self.rows_of_zeros(piece.mem_len)
        if not size:
            return state
        zeros = hidden_states.new_zeros(1, size, hidden_states.shape[-1])
        if self.is_hidden(piece):
            values = {"hidden": zeros[:, None]}
        else:
            key, value = attention.project_past(zeros)
            positions = torch.arange(-size, 0)[None]
            others = self.rows_beside(zeros, key)
            _, key = attention.encode(key[:, :1], key, positions, positions, piece.context)
            values = {"key": key, "value": value, **others}
        if not state.rows:
            batch = hidden_states.shape[0]
            rows = {name: row.expand(batch, -1, -1, -1) for name, row in values.items()}
            return state.append(0, True, piece.state_dtype, **rows)
        return state.fill(piece.fresh, size, **values)

    def _view_key(self) -> tuple:
        """What the view of a piece is kept under; layers with the same one share it."""
        return (type(self).name, "view")

    def _view(self, state: LayerState, piece) -> RowView:
        key = self._view_key()
        if key not in piece.memo:
            piece.memo[key] = self.make_view(state, piece)
        return piece.memo[key]

    def make_view(self, state: LayerState, piece) -> RowView:
        config, positions = self.config, piece.positions
        first = -self.rows_of_zeros(piece.mem_len)

        def oldest(at):
            found = self.oldest_visible(config, piece.mem_len, at, piece.call_start[:, None])
            return torch.full_like(at, first) if found is None else found.clamp(min=first)

        lowest = torch.maximum(oldest(positions), piece.document_start)  # (B, t)
        start = positions[:, :1]
        looks_back = (start - lowest[:, :1])[:, 0]
        if piece.fillers is not None:  # a row that has ended needs nothing, and kept no more than its end asked for
            looks_back = looks_back.masked_fill(piece.fillers >= piece.width, 0)
        kept = self.kept_rows(config, piece.mem_len)
        past = piece.most(looks_back, kept)
        mask = None
        if not piece.holds(lowest <= start - past):
            if lowest.shape[0] > 1 and piece.holds(positions - lowest == (positions - lowest)[:1]):
                lowest, start, positions = lowest[:1], start[:1], positions[:1]
            keys = start[:, None] - past + torch.arange(past + piece.width, device=start.device)  # (B, 1, K)
            mask = (keys >= lowest[:, :, None]) & (keys <= positions[:, :, None])
            mask = mask[:, None].to(piece.device)
        key_positions = piece.key_positions(past)
        after = piece.lengths[:, None]
        needed = after - oldest(after)
        if config.segment_len is None and type(self).uses_grid:
            needed = (after - first).clamp(max=piece.mem_len)  # the next call is a new segment
        return RowView(
            past=past,
            mask=mask,
            distances=piece.falling(past + piece.width),
            gather_distances=self.gather_distances(piece, key_positions),
            query_positions=piece.encode_positions,
            key_positions=key_positions,
            needed=piece.most(needed, kept),
            kept=kept + piece.undo,
            sinks=self.view_sinks(oldest(piece.positions), piece) if config.num_sink_tokens else None,
        )

    def gather_distances(self, piece, key_positions) -> GatheredDistances | None:
        """Distances to keys at `key_positions` (B or 1, K), where they follow no pattern and the scheme asks for any."""
        if not (piece.is_irregular and self.config.position_scheme.has_bias):
            return None
        distances = piece.encode_positions[:, :, None] - key_positions[:, None]
        return piece.gathered(distances, math.inf)

    def view_sinks(self, oldest, piece, between: int | torch.Tensor = 0) -> SinkView:
        """Sinks stand in the slots just before the oldest visible key; one that is still visible itself is no sink yet.

        oldest (B, t): oldest token each query sees as itself. between (B, 1): how many keys stand before that token.
        """
        if piece.is_irregular:
            raise ValueError(
                "num_sink_tokens > 0 does not go with position_ids that skip positions: a sink's distance is counted in "
                "slots. Leave position_ids out, or set num_sink_tokens=0."
            )
        count = self.config.num_sink_tokens
        farthest = self.kept_rows(self.config, piece.mem_len) + piece.width + count
        slots = torch.arange(count, device=oldest.device)
        hidden = oldest.clamp(0, count)  # sinks before the oldest visible key
        relative = piece.positions - oldest + hidden + between  # position of the query if sink j stood at j
        visible = (slots < hidden[:, :, None]) & (piece.document_start <= 0)[:, :, None]
        column = slots[None] - piece.positions[:, :1]
        real = piece.width if piece.fillers is None else piece.width - piece.fillers[:, None]
        is_new = (column >= 0) & (column < real)
        return SinkView(
            column=column.clamp(0, piece.width - 1).to(piece.device),
            is_new=None if piece.holds(~is_new) else is_new.to(piece.device),
            query_positions=relative,
            slots=slots[None],
            distances=piece.gathered(relative[:, :, None] - slots, farthest),
            visible=visible[:, None].to(piece.device),
        )

    def _update_sinks(self, state: LayerState, source, view: SinkView, piece) -> dict[str, torch.Tensor]:
        sinks = {}
        for name, tensor in source.items():
            old = state.fixed.get(name)
            if old is None:
                count = self.config.num_sink_tokens
                old = tensor.new_zeros(*tensor.shape[:2], count, tensor.shape[-1], dtype=piece.state_dtype or tensor.dtype)
            if view.is_new is not None:
                index = view.column[:, None, :, None].expand(*tensor.shape[:2], -1, tensor.shape[-1])
                new = tensor.gather(2, index).to(old.dtype)
                old = torch.where(view.is_new[:, None, :, None], new, old)
            sinks[name] = old
        return sinks

    def _read_sinks(self, attention, query, state: LayerState, view: SinkView, piece):
        """Complete logits (B, H, t, s) of the sinks, -inf where invisible, and their values (B, heads, s, D).

        Their slots differ from query to query where a window moves, so their logits are computed on their own.
        """
        if self.is_hidden(piece):
            key, value = attention.project_past(state.fixed["sink_hidden"][:, 0].to(query.dtype))
        else:
            key, value = (state.fixed[name].to(query.dtype) for name in ("sink_key", "sink_value"))
        encoded, key = attention.encode(query, key, view.query_positions, view.slots, piece.context)
        logits = attention.scores(query, encoded, key, view.distances, piece.context)
        return logits.masked_fill(~view.visible, -math.inf), value
