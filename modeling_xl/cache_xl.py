"""The model's state between calls: `XLCache`, one `LayerState` a layer and what all layers share.

It knows nothing of how a mechanism uses its state: it stores, copies, selects, joins, saves. Legend: B batch (rows of the
batch), N kept tokens ("rows" of a state tensor, on its last axis but one).
"""

import copy
import json
import os
import uuid
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from transformers import Cache

FORMAT_VERSION = 1
# Before any position: the first document of a row, and the rows that stand for nothing before it, begin here.
BEFORE_ALL = -(2**62)
FORMS = ("hidden", "key_value")


class LayerState:
    """What one layer keeps. A value: operations return a new state and leave this one as it was.

    rows: tensors (B, heads, capacity, size) with one entry a token on their last axis but one, right-aligned: the newest
    token lies at `end - 1`, the `size` newest are valid. Without gradient `append` writes behind `end` into the same
    storage, so nothing is concatenated a token and the state before stays readable.
    fixed: tensors (B, ...) of constant size.
    """

    def __init__(self, rows=None, fixed=None, end: int = 0, size: int = 0):
        self.rows: dict[str, torch.Tensor] = rows or {}
        self.fixed: dict[str, torch.Tensor] = fixed or {}
        self.end = end
        self.size = size

    def tensors(self) -> Iterable[torch.Tensor]:
        yield from self.rows.values()
        yield from self.fixed.values()

    def last(self, name: str, count: int) -> torch.Tensor:
        """The `count` newest rows, oldest first: a view (B, heads, count, size)."""
        return self.rows[name][..., self.end - count : self.end, :]

    def append(self, keep: int, has_slack: bool, dtype: torch.dtype | None = None, **rows: torch.Tensor) -> "LayerState":
        """Adds the same number of rows to each tensor; of the rows before, at least the `keep` newest stay readable.

        has_slack: whether a new buffer gets room for further rows. dtype: of the stored rows (None: as given).
        """
        new = next(iter(rows.values())).shape[-2]
        kept = min(self.size, keep)
        dtypes = {name: dtype or row.dtype for name, row in rows.items()}
        if torch.is_grad_enabled():
            merged = {name: row.to(dtypes[name]) for name, row in rows.items()}
            if kept:
                merged = {name: torch.cat([self.last(name, kept), row], -2) for name, row in merged.items()}
            return LayerState(merged, self.fixed, kept + new, kept + new)
        buffers, end = self.rows, self.end
        if not buffers or not self._has_room(new):
            buffers = {}
            slack = 64 + keep // 4 if has_slack else 0
            for name, row in rows.items():
                shape = (*row.shape[:-2], kept + new + slack, row.shape[-1])
                buffers[name] = torch.empty(shape, dtype=dtypes[name], device=row.device)
                if kept:
                    buffers[name][..., :kept, :] = self.last(name, kept)
            end = kept
        for name, row in rows.items():
            buffers[name][..., end : end + new, :] = row
        size = new + (kept if buffers is not self.rows else self.size)
        return LayerState(buffers, self.fixed, end + new, size)

    def _has_room(self, new: int) -> bool:
        buffer = next(iter(self.rows.values()))
        return self.end + new <= buffer.shape[-2] and not buffer.requires_grad

    def shrink(self, keep: int) -> "LayerState":
        """Moves the `keep` newest rows to storage of their own where a long call has left much more than they need."""
        capacity = next((tensor.shape[-2] for tensor in self.rows.values()), 0)
        if capacity <= 2 * keep + 256:
            return self
        keep = min(keep, self.size)
        rows = {name: self.last(name, keep).clone() for name in self.rows}
        return LayerState(rows, self.fixed, keep, keep)

    def with_fixed(self, **fixed: torch.Tensor) -> "LayerState":
        return LayerState(self.rows, {**self.fixed, **fixed}, self.end, self.size)

    def pack(self, fillers: torch.Tensor) -> "LayerState":
        """Drops the newest `fillers[b]` rows of each batch row and right-aligns the others. fillers (B,), on the CPU."""
        if not self.rows:
            return self
        source = torch.arange(self.size)[None] - fillers[:, None]  # (B, N)
        packed = {}
        for name in self.rows:
            tensor = self.last(name, self.size)
            index = source.clamp(min=0).to(tensor.device)[:, None, :, None].expand_as(tensor)
            packed[name] = tensor.gather(-2, index)
        return LayerState(packed, self.fixed, self.size, self.size)

    def fill(self, rows: torch.Tensor, count: int, **values: torch.Tensor) -> "LayerState":
        """Puts `values` (1, heads, count, size) into the `count` newest places of the batch rows where `rows` (B,)."""
        size = max(self.size, count)
        chosen = rows.view(-1, 1, 1, 1)
        filled = {}
        for name, value in values.items():
            old = self.last(name, self.size)
            old = torch.cat([old.new_zeros(*old.shape[:-2], size - self.size, old.shape[-1]), old], -2)
            new = torch.where(chosen.to(old.device), value.to(old.dtype), old[..., size - count :, :])
            filled[name] = torch.cat([old[..., : size - count, :], new], -2)
        return LayerState(filled, self.fixed, size, size)

    def detach(self, rows: torch.Tensor | None = None) -> "LayerState":
        """Cuts the gradient, of the batch rows where `rows` (B,) is true, or of all."""
        if not any(tensor.requires_grad or tensor.is_inference() for tensor in self.tensors()):
            return self

        def cut(tensor):
            if tensor.is_inference() and not torch.is_inference_mode_enabled():
                return tensor.clone()  # one made in inference mode may not be kept for a backward pass
            if rows is None or not tensor.requires_grad:
                return tensor.detach()
            chosen = rows.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
            return torch.where(chosen, tensor.detach(), tensor)

        return self._map(cut)

    def forget(self, rows: torch.Tensor) -> "LayerState":
        """Zeroes the batch rows where `rows` (B,) is true, in new tensors."""
        return self._map(lambda t: t.masked_fill(rows.to(t.device).view(-1, *[1] * (t.dim() - 1)), 0))

    def _map(self, change) -> "LayerState":
        rows = {name: change(tensor) for name, tensor in self.rows.items()}
        fixed = {name: change(tensor) for name, tensor in self.fixed.items()}
        return LayerState(rows, fixed, self.end, self.size)

    @staticmethod
    def cat(parts: list[tuple[int, "LayerState | None"]]) -> "LayerState | None":
        """Joins (batch size, state) along the batch, right-aligned; what a part lacks are zeros before its first token."""
        if all(state is None for _, state in parts):
            return None
        states = [state or LayerState() for _, state in parts]
        size = max(state.size for state in states)
        batches = [count for count, _ in parts]

        def joined(kind: str, height: int | None):
            """Each named tensor, rows cut or filled to `height`, zeros where a part has none."""
            found: dict[str, torch.Tensor] = {}
            for name in dict.fromkeys(name for state in states for name in getattr(state, kind)):
                like = next(getattr(state, kind)[name] for state in states if name in getattr(state, kind))
                pieces = []
                for batch, state in zip(batches, states, strict=True):
                    shape = [batch, *like.shape[1:]]
                    if height is not None:
                        shape[-2] = height
                    whole = like.new_zeros(shape)
                    if name in getattr(state, kind):
                        if height is None:
                            whole = state.fixed[name]
                        else:
                            whole[..., height - state.size :, :] = state.last(name, state.size)
                    pieces.append(whole)
                found[name] = torch.cat(pieces)
            return found

        return LayerState(joined("rows", size), joined("fixed", None), size, size)


class XLCache(Cache):
    """What a model remembers between calls, for a batch of B streams.

    config: the model's. mem_len: wins over the config's for the whole life of the cache and is saved with it. dtype: of
    the stored rows (None: as computed; linear states keep float32 at least). form: how memory of recurrence and compressive
    layers is kept: "hidden" (layer inputs, so that W_K and W_V get gradient through memory) or "key_value" (less work,
    frozen weights only); None: decided by the first call, hidden with gradient enabled.

    The model returns the cache it was handed, changed; a failed call leaves it unchanged. Derived tensors (projected
    distances) belong to the weights that filled them: after a change of weights start a new cache.

    Raises ValueError for a mem_len, dtype or form that cannot be. Used with a model of another kind it raises ValueError that
    names the first field that differs.
    """

    def __init__(self, config, mem_len: int | None = None, dtype: torch.dtype | None = None, form: str | None = None):
        super().__init__(layers=[])
        if mem_len is not None and (isinstance(mem_len, bool) or not isinstance(mem_len, int) or mem_len < 0):
            raise ValueError(f"mem_len={mem_len!r} of XLCache must be an integer >= 0, or None for the config's.")
        if form is not None and form not in FORMS:
            raise ValueError(f"form={form!r} of XLCache must be one of {', '.join(FORMS)}, or None (first call decides).")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype={dtype!r} of XLCache must be a floating torch.dtype, or None (as computed).")
        self.config = config
        self.mem_len: int = config.mem_len if mem_len is None else mem_len
        config.check_mem_len(self.mem_len)
        self.dtype = dtype
        self.form = form if config.has_two_forms else "key_value"
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forgets everything, the batch size included."""
        self.states: list[LayerState | None] = [None] * self.config.num_hidden_layers
        self.derived: dict[Any, tuple[Any, torch.Tensor]] = {}
        self.columns = 0
        self._lengths = torch.zeros(0, dtype=torch.long)
        # Position at which each row's current document begins, by how much the positions that entered attention ran ahead of
        # the count of tokens there, its id, and whether it was given one.
        self.document_start = torch.zeros(0, dtype=torch.long)
        self.document_shift = torch.zeros(0, dtype=torch.long)
        self.document_id = torch.zeros(0, dtype=torch.long)
        self.has_document_id = torch.zeros(0, dtype=torch.bool)
        # Position id each row's next token has if its positions go on by one (-1: none seen yet), and by how much the
        # positions that entered attention run ahead of the count of tokens.
        self.next_position_id = torch.zeros(0, dtype=torch.long)
        self.position_shift = torch.zeros(0, dtype=torch.long)
        # Positions of the kept rows, (B, N), from the first irregular one on; None while distances are those of tokens.
        self.row_positions: torch.Tensor | None = None
        # Most tokens that can be taken back, and that a next call may still take back.
        self.undoable = 0

    _COUNTERS: ClassVar[tuple[str, ...]] = (
        "_lengths",
        "document_start",
        "document_shift",
        "document_id",
        "has_document_id",
        "next_position_id",
        "position_shift",
    )
    _EMPTY: ClassVar[dict[str, int]] = {"document_start": BEFORE_ALL, "next_position_id": -1}

    def start(self, batch_size: int) -> None:
        """Fixes the batch size at the first call."""
        if self.batch_size in (-1, batch_size):
            if self.batch_size == -1:
                for name in self._COUNTERS:
                    old = getattr(self, name)
                    setattr(self, name, torch.full((batch_size,), self._EMPTY.get(name, 0), dtype=old.dtype))
            return
        raise ValueError(
            f"The cache holds {self.batch_size} rows but the call has batch size {batch_size}; they must agree. Take rows "
            "out with cache.select(rows), join caches with XLCache.cat([...]), or start a new XLCache."
        )

    def working_copy(self) -> "XLCache":
        """A cache that shares tensors with this one: a call works on it and commits it when it has succeeded."""
        work = object.__new__(XLCache)
        work.__dict__.update(self.__dict__)
        work.states = list(self.states)
        work.derived = dict(self.derived)
        for name in self._COUNTERS:
            setattr(work, name, getattr(self, name).clone())
        return work

    def commit(self, work: "XLCache") -> None:
        """Takes over what a call made of `working_copy`."""
        self.__dict__.update(work.__dict__)

    # What Transformers asks of a cache.

    def __len__(self) -> int:
        return self.config.num_hidden_layers

    def __repr__(self) -> str:
        return (
            f"XLCache(rows={max(self.batch_size, 0)}, lengths={self._lengths.tolist()[:8]}, mem_len={self.mem_len}, "
            f"form={self.form}, nbytes={self.nbytes})"
        )

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first call."""
        return len(self._lengths) or -1

    @property
    def lengths(self) -> torch.Tensor:
        """Real tokens fed to each row, (B,) integers on the CPU."""
        return self._lengths.clone()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed, padding included: what Transformers subtracts from a prompt it continues."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns + query_length, 0

    @property
    def is_initialized(self) -> bool:
        return self.batch_size > 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether the mechanisms can take tokens back (assisted and prompt-lookup decoding)."""
        return self.config.can_roll_back

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)

    def update(self, *args, **kwargs):
        raise NotImplementedError(
            "XLCache is not filled layer by layer from outside: hand it to the model as `cache=` and the model updates it."
        )

    def activate_past_recording(self) -> None:
        """Keeps enough rows from now on for `crop` to take the tokens of the last call back."""
        self.record_past = True

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the newest tokens of every row back. tokens_to_remove: minus their number, as Transformers counts.

        Raises ValueError where the memory has folded them into its state (`is_croppable`), where rows were not recorded for
        it (`activate_past_recording`), and behind the beginning of a document.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give minus the number of tokens to take back, as a number <= 0.")
        count = -tokens_to_remove
        if count == 0:
            return
        if not self.is_croppable:
            raise ValueError(f"This cache cannot take tokens back: {self.config.why_no_roll_back}")
        if count > self.undoable or count > int(self._lengths.min()):
            raise ValueError(
                f"crop({tokens_to_remove}) goes back further than the {min(self.undoable, int(self._lengths.min()))} tokens "
                "this cache can take back: call activate_past_recording() before the call whose tokens may go, and take "
                "back at most the tokens of that call."
            )
        if bool((self._lengths - count < self.document_start).any()):
            raise ValueError(f"crop({tokens_to_remove}) goes back behind the beginning of a document: take back fewer tokens.")
        for index, state in enumerate(self.states):
            if state is not None and state.rows:
                self.states[index] = LayerState(state.rows, state.fixed, state.end - count, state.size - count)
        if self.row_positions is None:
            self.next_position_id = torch.where(self.next_position_id < 0, -1, self.next_position_id - count)
            self._lengths = self._lengths - count
        else:
            last = self.positions_of_last(count + 1)[:, 0]  # of what becomes the newest token
            newest = self._lengths - 1 + self.position_shift
            self.next_position_id = torch.where(self.next_position_id < 0, -1, self.next_position_id - (newest - last))
            self._lengths = self._lengths - count
            self.position_shift = last - (self._lengths - 1)
            self.row_positions = self.row_positions[:, : max(0, self.row_positions.shape[1] - count)]
        self.columns -= count
        self.undoable -= count

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row b becomes what row beam_idx[b] was, (B,), as beam search asks for."""
        self._take(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows only, in this order: numbers (n,), or a boolean mask (B,). `select` leaves the cache as it is."""
        self._take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, side by side."""
        self._take(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def _take(self, indices: torch.Tensor) -> None:
        if self.batch_size == -1:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        for index, state in enumerate(self.states):
            if state is not None:
                self.states[index] = state._map(lambda t: t.index_select(0, indices.to(t.device)))
        indices = indices.cpu()
        for name in self._COUNTERS:
            setattr(self, name, getattr(self, name)[indices])
        if self.row_positions is not None:
            self.row_positions = self.row_positions[indices]

    # What memory needs.

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Starts the rows again where `rows` (B,) booleans is true: memory, grid and document. ValueError for another mask."""
        rows = torch.as_tensor(rows)
        if rows.dtype != torch.bool or rows.shape != (max(self.batch_size, 0),):
            raise ValueError(
                f"reset_rows takes a boolean mask of shape ({max(self.batch_size, 0)},), one entry a row; got {rows.dtype} "
                f"of shape {tuple(rows.shape)}."
            )
        rows = rows.cpu()
        for index, state in enumerate(self.states):
            if state is not None:
                self.states[index] = state.forget(rows)
        for name in self._COUNTERS:
            counter = getattr(self, name)
            setattr(self, name, counter.masked_fill(rows, self._EMPTY.get(name, 0)))
        if bool(rows.all()):
            self.columns, self.row_positions = 0, None
        elif self.row_positions is not None:
            fresh = torch.arange(-self.row_positions.shape[1], 0)
            self.row_positions = torch.where(rows[:, None], fresh, self.row_positions)

    def select(self, rows) -> "XLCache":
        """A new cache with the given rows (list of numbers, or boolean mask (B,)), in that order; one may be named twice.

        Raises ValueError for a row that there is not, and for none.
        """
        rows = torch.as_tensor(rows)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        if rows.dim() != 1 or not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= max(self.batch_size, 0):
            raise ValueError(
                f"select({rows.tolist()}) must name at least one row, each from 0 to {max(self.batch_size, 0) - 1}."
            )
        chosen = self.working_copy()
        chosen._take(rows.long())
        # All rows of a batch lie in buffers as long as its longest text needs; those that stay may need less.
        before = self.mem_len + self.config.compressed_mem_len if self.config.initial_memory == "zeros" else 0
        most = int(chosen._lengths.max()) + before
        chosen.states = [None if state is None else state.shrink(most) for state in chosen.states]
        return chosen

    def split(self) -> list["XLCache"]:
        """One cache for each row."""
        return [self.select([row]) for row in range(max(self.batch_size, 0))]

    @staticmethod
    def cat(caches: list["XLCache"]) -> "XLCache":
        """Joins caches of one model into one batch, row after row. They may have read texts of different lengths.

        Raises ValueError for no cache, and for caches of different models, memory lengths, forms or dtypes.
        """
        if not caches:
            raise ValueError("XLCache.cat needs at least one cache.")
        first = caches[0]
        for cache in caches[1:]:
            mine, other = first.fingerprint(), cache.fingerprint()
            for name in ("form", "dtype"):  # nothing has been stored yet where they are None
                if mine[name] is None or other[name] is None:
                    mine[name] = other[name] = None
            _compare(mine, other, "The caches to join")
        caches = [cache for cache in caches if cache.batch_size > 0]
        if not caches:
            return first.working_copy()
        # One that has read something knows what those that have not will be: the form, and tables of distances.
        joined = next((cache for cache in caches if any(cache.states)), caches[0]).working_copy()
        for index in range(len(joined)):
            joined.states[index] = LayerState.cat([(cache.batch_size, cache.states[index]) for cache in caches])
        for name in XLCache._COUNTERS:
            setattr(joined, name, torch.cat([getattr(cache, name) for cache in caches]))
        if any(cache.row_positions is not None for cache in caches):
            size = max(cache.most_rows() for cache in caches)
            joined.row_positions = torch.cat([cache.positions_of_last(size) for cache in caches])
        joined.columns = max(cache.columns for cache in caches)
        joined.undoable = min(cache.undoable for cache in caches)
        return joined

    def most_rows(self) -> int:
        return max((state.size for state in self.states if state is not None and state.rows), default=0)

    def positions_of_last(self, count: int) -> torch.Tensor:
        """Positions that entered attention of the `count` newest tokens, (B, count)."""
        back = torch.arange(count, 0, -1)[None]
        if self.row_positions is None or not self.row_positions.shape[1]:
            return self._lengths[:, None] - back + self.position_shift[:, None]
        known = self.row_positions[:, max(0, self.row_positions.shape[1] - count) :]
        missing = torch.arange(count - known.shape[1], 0, -1)[None]
        return torch.cat([known[:, :1] - missing, known], 1)

    def detach(self) -> "XLCache":
        """Cuts the gradient into everything kept; returns the cache."""
        self.states = [None if state is None else state.detach() for state in self.states]
        return self

    def to(self, *args, **kwargs) -> "XLCache":
        """Moves everything, and changes the dtype of rows, as `Tensor.to(device, dtype)` does; what has a constant size (sums
        over the past, sinks) keeps its precision. Derived tensors are made anew. Returns the cache."""

        def moved(tensor):
            return tensor.to(*args, **kwargs)

        for index, state in enumerate(self.states):
            if state is not None:
                rows = {name: moved(tensor) for name, tensor in state.rows.items()}
                fixed = {name: tensor.to(moved(tensor).device) for name, tensor in state.fixed.items()}
                self.states[index] = LayerState(rows, fixed, state.end, state.size)
        dtype = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)), None)
        self.dtype = dtype or self.dtype
        self.derived = {}
        return self

    def __deepcopy__(self, memo) -> "XLCache":
        copied = self.working_copy()
        copied.config = self.config  # the model's: a copy of the state is not a copy of the model's description
        for index, state in enumerate(self.states):
            if state is not None:
                copied.states[index] = state._map(lambda tensor: tensor.detach().clone())
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> "XLCache":
        # Two caches on the same buffers would write over each other.
        return copy.deepcopy(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, derived ones and spare room included."""
        tensors = [t for state in self.states if state is not None for t in state.tensors()]
        return sum(tensor.nbytes for tensor in [*tensors, *(derived for _, derived in self.derived.values())])

    @property
    def max_context(self) -> int | float:
        """Largest distance at which a token can still change a logit, with this cache's mem_len."""
        return self.config.reach(self.mem_len)

    # Files.

    def fingerprint(self) -> dict[str, Any]:
        """What must agree between a cache and the model, or another cache, that it is used with."""
        # Of rows: what has a constant size keeps a precision of its own.
        stored = next((t.dtype for state in self.states if state is not None for t in state.rows.values()), self.dtype)
        return {
            **self.config.memory_fingerprint(),
            "mem_len": self.mem_len,
            "form": self.form,
            "dtype": None if stored is None else str(stored).removeprefix("torch."),
        }

    def check_config(self, config) -> None:
        """Raises where this cache was made for another kind of model."""
        if config is not self.config:
            _compare(config.memory_fingerprint(), self.config.memory_fingerprint(), "The model and the cache")

    def state_dict(self) -> dict[str, Any]:
        """Everything as tensors and plain values; buffers as they lie, so that resuming equals never having stopped."""
        tensors: dict[str, torch.Tensor] = {name: getattr(self, name) for name in self._COUNTERS}
        if self.row_positions is not None:
            tensors["row_positions"] = self.row_positions
        layout: list[Any] = []
        for index, state in enumerate(self.states):
            if state is None:
                layout.append(None)
                continue
            capacity = next((t.shape[-2] for t in state.rows.values()), 0)
            rows = {f"layers.{index}.rows.{name}": state.last(name, state.size) for name in state.rows}
            fixed = {f"layers.{index}.fixed.{name}": tensor for name, tensor in state.fixed.items()}
            shapes = {name: list(tensor.shape) for name, tensor in (rows | fixed).items()}
            layout.append({"end": state.end, "size": state.size, "capacity": capacity, "shapes": shapes})
            tensors |= rows | fixed
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        values = {
            "columns": self.columns,
            "undoable": self.undoable,
            "record_past": self.record_past,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "layout": layout,
        }
        return {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint(), "values": values, "tensors": tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, made with the same kind of model; unchanged where it raises."""
        version = state_dict.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"The cache has format_version {version!r}; this package reads {FORMAT_VERSION}. Make the cache anew from "
                "its text, or use the package version that wrote it."
            )
        saved = state_dict.get("fingerprint")
        if not isinstance(saved, dict):
            raise ValueError("The saved cache has no fingerprint; make it anew from its text.")
        mine = self.fingerprint()
        if self.batch_size == -1:
            # A cache that has not been used yet takes these over; they are what it would have been made with.
            mine |= {name: saved.get(name) for name in ("mem_len", "form", "dtype") if name == "mem_len" or mine[name] is None}
        _compare(mine, saved, "The cache and the saved one")
        try:
            loaded = self._loaded(saved, state_dict["values"], dict(state_dict["tensors"]))
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"The saved cache is incomplete or damaged ({error!r}); make it anew from its text.") from error
        self.commit(loaded)

    def _loaded(self, saved: dict[str, Any], values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> "XLCache":
        loaded = XLCache(self.config, mem_len=saved["mem_len"], form=saved["form"])
        if values["dtype"] is not None:
            loaded.dtype = getattr(torch, values["dtype"])
        for name in self._COUNTERS:
            counter = tensors.pop(name)
            if counter.dtype != getattr(loaded, name).dtype or counter.dim() != 1:
                raise ValueError(f"{name} has dtype {counter.dtype} and shape {tuple(counter.shape)}")
            setattr(loaded, name, counter)
        batch_size = max(loaded.batch_size, 0)
        if any(len(getattr(loaded, name)) != batch_size for name in self._COUNTERS):
            raise ValueError("counters of different batch sizes")
        loaded.row_positions = tensors.pop("row_positions", None)
        if len(values["layout"]) != len(loaded):
            raise ValueError(f"{len(values['layout'])} layers where the model has {len(loaded)}")
        for index, place in enumerate(values["layout"]):
            if place is None:
                continue
            size, end, capacity = (int(place[name]) for name in ("size", "end", "capacity"))
            state = LayerState(end=end, size=size)
            for key, shape in place["shapes"].items():
                kind, name = key.removeprefix(f"layers.{index}.").split(".", 1)
                tensor = tensors.pop(key)
                is_whole = list(tensor.shape) == shape and shape[0] == batch_size and kind in ("rows", "fixed")
                if not is_whole or (kind == "rows" and not shape[-2] == size <= end <= capacity):
                    raise ValueError(f"{key} has shape {tuple(tensor.shape)}")
                if kind == "rows":
                    buffer = tensor.new_zeros(*tensor.shape[:-2], capacity, tensor.shape[-1])
                    buffer[..., end - size : end, :] = tensor
                    state.rows[name] = buffer
                else:
                    state.fixed[name] = tensor
            loaded.states[index] = state
        if tensors:
            raise ValueError(f"unknown tensors {sorted(tensors)[:3]}")
        loaded.columns, loaded.undoable = int(values["columns"]), int(values["undoable"])
        loaded.record_past = bool(values["record_past"])
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `cache.safetensors` and `cache.json` into the folder; what lay there before stays whole until then.

        Rows, counters and settings, and not what is derived from weights. `from_pretrained` reads them.
        """
        folder = os.fspath(save_directory)
        os.makedirs(folder, exist_ok=True)
        state = self.state_dict()
        tensors = state.pop("tensors")
        # Both files carry the identity of the save. The tensors' file holds all that is needed, so a process killed
        # between the two renames leaves a state that loads: the newer one.
        state["save_id"] = uuid.uuid4().hex
        description = json.dumps(state, indent=2)
        for name in ("cache.safetensors", "cache.json"):
            temporary = os.path.join(folder, f".{name}.{state['save_id']}")
            try:
                if name == "cache.json":
                    with open(temporary, "w", encoding="utf-8") as file:
                        file.write(description)
                else:
                    save_file(tensors, temporary, metadata={"cache": description})
                os.replace(temporary, os.path.join(folder, name))
            finally:
                if os.path.exists(temporary):
                    os.remove(temporary)

    @classmethod
    def from_pretrained(cls, save_directory: str | os.PathLike, config, dtype: torch.dtype | None = None) -> "XLCache":
        """Reads a cache saved for a model with this config.

        dtype: what the stored rows must have (None: whatever they have). Raises FileNotFoundError for a folder without a
        cache, and ValueError for one that is damaged, of another format, or of another kind of model, naming the first field
        that differs.
        """
        folder = os.fspath(save_directory)
        path = os.path.join(folder, "cache.safetensors")
        described = os.path.join(folder, "cache.json")
        for needed in (path, described):
            if not os.path.isfile(needed):
                raise FileNotFoundError(f"{needed} does not exist: a saved cache holds cache.safetensors and cache.json.")
        try:
            # Not tensor by tensor: safe_open of safetensors 0.8 leaves some bytes behind for each, without end in a long run.
            with open(path, "rb") as file:
                content = file.read()
            tensors = load(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            state = json.loads(header["__metadata__"]["cache"])
            with open(described, encoding="utf-8") as file:
                description = json.load(file)
            if description["save_id"] == state["save_id"]:
                state = description
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder} does not hold a whole cache ({error}); make it anew from its text.") from error
        cache = cls(config, dtype=dtype)
        cache.load_state_dict({**state, "tensors": tensors})
        return cache


def _compare(expected: dict[str, Any], found: dict[str, Any], who: str) -> None:
    for name in {**expected, **found}:
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{who} do not fit: {name} is {expected.get(name)!r} here and {found.get(name)!r} there. A cache works "
                "with the kind of model that filled it; start a new XLCache(model.config)."
            )
