"""`torch.export` of one step: ids and the state as plain tensors in, logits and the new state out, every shape fixed.

The step is the model's own layers on a piece whose integers are tensors: what a call decides by looking at them becomes a
mask. The graph holds no operator of this package, so a process with torch alone can run it.

Legend: B rows of the batch, t tokens of a step, V vocabulary, n rows that a layer keeps, D head size.
"""

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from .cache_xl import BEFORE_ALL, LayerState, XLCache
from .configuration_xl import XLConfig
from .generation_xl import check_cache
from .grid_xl import Piece
from .memories import MEMORY_MECHANISMS
from .memory_base import MemoryMechanism
from .modeling_xl import XLForCausalLM
from .position_base import GatheredDistances, PositionContext, float64_device

LENGTHS = "lengths"


@dataclass
class ExportedStep:
    """A step as a graph, and the state that goes through it: a dict of tensors, new ones after each step.

    program: `program.module()(input_ids, state)` with integers (B, t) returns logits (B, t or fewer, V) and the next state.
    start: the state of B rows without any token: `lengths` (B,), tokens of each row, integers; of layer i
    `layers.<i>.rows.<name>` (B, heads, n, D), the newest token last, and `layers.<i>.fixed.<name>` (B, ...). All begin with
    the rows of the batch: where the start's numbers are put in place of a row's, that row begins anew. All lie on the model's
    device (lengths on the CPU for Apple's), where a step makes and copies nothing on the CPU: a CUDA graph can hold it.
    """

    program: torch.export.ExportedProgram
    start: dict[str, torch.Tensor]
    config: XLConfig
    mem_len: int

    def state_of(self, cache: XLCache) -> dict[str, torch.Tensor]:
        """The state that goes on where the cache stands, in tensors of its own. Raises ValueError where no state can."""
        check_cache(cache, self.config)
        for name, found, needed, mend in (
            ("mem_len", cache.mem_len, self.mem_len, "export the step with the mem_len of the cache"),
            ("batch_size", cache.batch_size, len(self.start[LENGTHS]), "select rows of it, or export with its batch_size"),
            ("form", cache.form, "key_value", "fill the cache under torch.no_grad()"),
        ):
            if found != needed and (name == "mem_len" or cache.is_initialized):
                raise ValueError(f"The cache has {name}={found!r}, the exported step {needed!r}: {mend}.")
        ids_differ = (cache.next_position_id >= 0) & (cache.next_position_id != cache.lengths)
        told = cache.has_document_id | (cache.document_start > BEFORE_ALL) | ids_differ
        if told.any() or cache.row_positions is not None:
            raise ValueError(
                "The cache was fed document_ids, or position_ids that do not count its tokens, of which an exported step knows "
                "nothing: feed texts without them, each document with a cache of its own."
            )
        state = {name: tensor.clone() for name, tensor in self.start.items()}
        if not cache.lengths.any():
            return state
        state[LENGTHS] = cache.lengths.to(state[LENGTHS].device)
        for name, tensor in _tensors_of(cache.states, _sizes(self.config, self.mem_len)).items():
            if tensor.dtype != state[name].dtype:
                raise ValueError(
                    f"The cache keeps {name} as {tensor.dtype}, the exported step as {state[name].dtype}: leave out the dtype "
                    "of the XLCache."
                )
            begun = (cache.lengths > 0).to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
            state[name] = torch.where(begun, tensor, state[name])
        return state

    def cache_of(self, state: dict[str, torch.Tensor]) -> XLCache:
        """A cache with which the model goes on where the state stands. What lies before it counts as fed without padding."""
        for name in {**self.start, **state}:
            needed, found = (_described(tensors.get(name)) for tensors in (self.start, state))
            if found != needed:
                raise ValueError(f"The state is not this step's: {name} must be {needed}, and is {found}.")
        cache = XLCache(self.config, mem_len=self.mem_len, form="key_value")
        if state[LENGTHS].any():
            cache.start(len(state[LENGTHS]))
            cache._lengths = state[LENGTHS].to("cpu", copy=True)
            cache.columns = int(cache.lengths.max())
            cache.states = [layer._map(torch.clone) for layer in _layers_of(state, len(cache))]
        return cache


@torch.no_grad()
def export_step(
    model: XLForCausalLM, batch_size: int = 1, tokens: int = 1, mem_len: int | None = None, logits_to_keep: int = 0
) -> ExportedStep:
    """One step of the model, `tokens` for each of `batch_size` rows, as a `torch.export.ExportedProgram`.

    Steps give the logits of calls with an `XLCache` of this mem_len (None: the config's). All tokens are real ones: a step
    knows neither padding nor documents. Exports with other `tokens` take the same state. logits_to_keep: logits of how many
    last tokens; 0: of all. Raises ValueError where a layer's state has no size that serves from the first token on.
    """
    if not isinstance(model, XLForCausalLM):
        raise TypeError(f"model is a {type(model).__name__}; a step gives logits over the vocabulary: pass an XLForCausalLM.")
    for name, value, least in (("batch_size", batch_size, 1), ("tokens", tokens, 1), ("logits_to_keep", logits_to_keep, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be an integer >= {least}.")
    if model.training:
        raise ValueError("The model is in training mode, where calls draw random numbers: call model.eval() before the export.")
    cache = XLCache(model.config, mem_len=mem_len)
    step = _Step(model, tokens, cache.mem_len, logits_to_keep)
    ids = torch.zeros(batch_size, tokens, dtype=torch.long, device=model.device)
    # What is kept of one token shows every tensor of a state; without that token it is the start.
    model(ids[:, :1], cache=cache, use_cache=True)
    start = {LENGTHS: torch.zeros(batch_size, dtype=torch.long, device=float64_device(model.device))}
    first = [LayerState(s.rows, s._map(torch.zeros_like).fixed, s.end - 1, s.size - 1) for s in cache.states if s is not None]
    start |= {name: tensor.clone() for name, tensor in _tensors_of(first, step.sizes).items()}
    step.prepare(ids, start)
    program = torch.export.export(step, (ids, start), strict=False)
    return ExportedStep(program, start, model.config, cache.mem_len)


class _Step(nn.Module):
    """What is exported: (ids, state) -> (logits, state)."""

    def __init__(self, model: XLForCausalLM, tokens: int, mem_len: int, logits_to_keep: int):
        super().__init__()
        self.model = model
        self.tokens, self.mem_len, self.logits_to_keep = tokens, mem_len, logits_to_keep
        self.sizes = _sizes(model.config, mem_len)
        self.context = PositionContext(model.model.shared_position, derived={})
        self.runs: dict[int, torch.Tensor] = {}

    def prepare(self, input_ids, state) -> None:
        """Runs once, so that what the position schemes make of distances alone is there: a constant of the graph."""
        base = self.model.model
        hidden_states, piece = base.embed(input_ids), self._piece(state[LENGTHS])
        for layer, kept in zip(base.layers, _layers_of(state, len(base.layers)), strict=True):
            cast(MemoryMechanism, layer.self_attn.memory).prepare(layer.self_attn, hidden_states, kept, piece)
        self(input_ids, state)
        # Saved programs hold tensors as they lie in memory, and no views of them.
        derived = self.context.derived or {}
        self.context.derived = {key: (stamp, tensor.contiguous()) for key, (stamp, tensor) in derived.items()}

    def forward(self, input_ids, state):
        base = self.model.model
        layers, piece = _layers_of(state, len(base.layers), _FixedState), self._piece(state[LENGTHS])
        hidden_states = base.embed(input_ids)
        if base.embed_norm is not None:
            hidden_states = base.embed_norm(hidden_states)
        hidden_states, layers, *_ = base._run_layers(hidden_states, layers, piece, False)
        if base.norm is not None:
            hidden_states = base.norm(hidden_states)
        logits = self.model.lm_head(hidden_states[:, -self.logits_to_keep :])
        return logits, {LENGTHS: state[LENGTHS] + self.tokens, **_tensors_of(layers, self.sizes)}

    def _piece(self, lengths) -> "_FixedPiece":
        positions = lengths[:, None] + torch.arange(self.tokens, device=lengths.device)
        return _FixedPiece(
            start=0,
            stop=self.tokens,
            positions=positions,
            encode_positions=positions,
            document_start=torch.full_like(positions, BEFORE_ALL),
            in_document=positions,
            call_start=lengths,
            lengths=lengths + self.tokens,
            fillers=None,
            fresh=None,
            cut=None,
            device=self.model.device,
            mem_len=self.mem_len,
            form="key_value",
            state_dtype=None,
            undo=0,
            history=None,
            context=self.context,
            wants_weights=True,  # the one form of attention that holds no operator of this package
            runs=self.runs,
        )


@dataclass
class _FixedPiece(Piece):
    """A piece of which no number is known, so that nothing can be left out. runs: the falling distances asked for so far."""

    runs: dict[int, torch.Tensor] = field(default_factory=dict)

    def holds(self, condition):
        return False

    def most(self, counts, limit):
        return int(limit)

    def falling(self, count):
        if count not in self.runs:
            self.runs[count] = super().falling(count)
        return self.runs[count]  # the same tensor at each run: schemes know by it what they have made

    def gathered(self, distances, limit):
        distances, count = distances.clamp(min=0).to(self.device), distances.numel()
        if count > limit:
            return GatheredDistances(torch.arange(int(limit) + 1, device=self.device), distances)
        return GatheredDistances(distances.flatten(), torch.arange(count, device=self.device).view_as(distances))


class _FixedState(LayerState):
    """A state in a graph: rows are joined in new tensors, there being no storage to write behind."""

    def append(self, keep, has_slack, dtype=None, **rows):
        kept = min(self.size, keep)
        joined = {name: torch.cat([self.last(name, kept), row], -2) for name, row in rows.items()}
        size = kept + next(iter(rows.values())).shape[-2]
        return LayerState(joined, self.fixed, size, size)


def _sizes(config: XLConfig, mem_len: int) -> list[int]:
    """Rows that each layer keeps: those a token looks back to, and itself. Raises ValueError where none are enough."""
    sizes = []
    for name in config.layer_memory_types:
        mechanism = MEMORY_MECHANISMS[name]
        rows = mechanism.kept_rows(config, mem_len)
        if mechanism.needs_row_lines:
            raise ValueError(
                f"memory_type={config.memory_type!r}: {name} rebuilds its memory where a segment of a row closes, which is no "
                "step of fixed shape. Use the model with an XLCache and torch.compile."
            )
        if rows == math.inf:
            raise ValueError(
                f"memory_type={config.memory_type!r} without an attention_window keeps every token, for which no fixed size is "
                "enough: set attention_window."
            )
        sizes.append(int(rows) + 1)
    return sizes


def _tensors_of(layers, sizes: list[int]) -> dict[str, torch.Tensor]:
    """Named tensors of the layers' states; of rows the newest `sizes[i]`, zeros where there are fewer."""
    tensors = {}
    for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        for name in layer.rows:
            rows = layer.last(name, min(layer.size, size)).contiguous()
            missing = size - rows.shape[-2]
            tensors[f"layers.{index}.rows.{name}"] = functional.pad(rows, (0, 0, missing, 0)) if missing else rows
        for name, tensor in layer.fixed.items():
            tensors[f"layers.{index}.fixed.{name}"] = tensor
    return tensors


def _layers_of(state: dict[str, torch.Tensor], count: int, kind: type[LayerState] = LayerState) -> list[LayerState | None]:
    """The states of the layers that `_tensors_of` named."""
    layers: list[LayerState | None] = [kind() for _ in range(count)]
    for path, tensor in state.items():
        if path != LENGTHS:
            _, index, part, name = path.split(".")
            layer = layers[int(index)]
            getattr(layer, part)[name] = tensor
            if part == "rows":
                layer.end = layer.size = tensor.shape[-2]
    return layers


def _described(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
