"""Where a model looks: the share of each layer's attention that falls on memory, and at what distance it falls.

The text is read once, a part of a segment a call, with the cache handed on; of the weights of a call only sums are kept.
Letters: H heads, t tokens of a call, K keys of a layer in it, s sink tokens.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from .cache_xl import XLCache
from .evaluate import ModelSettings, carries_memory, measured, segment_len_of
from .memories import MEMORY_MECHANISMS
from .text import InputError

# What a weight can fall on. slots: rows that stand for several tokens. segment: the query's own, itself included.
KINDS = ("sinks", "slots", "memory", "segment")
# Most queries of a call: eager attention holds the weights (H, t, K) of all layers at once.
LONGEST_CALL = 128


@dataclass(frozen=True)
class DistanceBin:
    """The keys that stand `first` to `last` tokens before a query, and the share of attention that falls on them."""

    first: int
    last: int
    mass: float


@dataclass(frozen=True)
class LayerMass:
    """One layer's attention in shares of 1: by kind of key, mean over heads and of each head, and by distance.

    A slot stands at the newest token in it. Sinks have no distance of their own (they stand in the places just before the
    oldest visible key) and are left out of the curve.
    """

    layer: int
    memory_type: str
    shares: dict[str, float]  # by KINDS
    by_head: dict[str, list[float]]
    curve: tuple[DistanceBin, ...]  # 0, 1, 2-3, 4-7, ..., as far as there is any


@dataclass(frozen=True, kw_only=True)
class AttentionMass(ModelSettings):
    """What was seen, mean over the tokens of the text, and all that it depends on."""

    num_tokens: int
    layers: tuple[LayerMass, ...]
    without_weights: tuple[int, ...]  # numbers of the layers that have none to look at

    @property
    def of_the_run(self) -> str:
        return f"{self.num_tokens} tokens as one stream"


def inspect_attention(
    model: PreTrainedModel,
    pieces: Iterable[torch.Tensor],
    *,
    segment_len: int | None = None,
    mem_len: int | None = None,
    attention_window: int | None = None,
    progress: bool = False,
) -> AttentionMass:
    """Reads a text, ids [n] piece by piece, as one stream, and adds up each layer's attention weights.

    However the text is cut, the numbers are the same, and what is held does not grow with it. Lengths that are None are the
    model's own. As `evaluate` does, it reads a model that attends to everything (memory type `none` without a window) in
    separate segments. A layer without segments counts all that it sees as its own. Layers of linear attention have no
    weights and are left out. Raises InputError where no layer has any, where the config has no segment length and none is
    given, and for a text without tokens.
    """
    with (
        measured(model, segment_len=segment_len, mem_len=mem_len, attention_window=attention_window) as described,
        _eager(model),
    ):
        types = model.config.layer_memory_types
        sums = {
            layer: _Sums(model.config.num_attention_heads)
            for layer, name in enumerate(types)
            if MEMORY_MECHANISMS[name].has_weights
        }
        if not sums:
            raise InputError(
                f"memory_type={model.config.memory_type!r} has no attention weights: its layers keep sums over the past and "
                "compare no query with a single token; inspect a model with layers of another memory"
            )
        num_tokens = 0
        with tqdm(unit="tok", desc="inspect", disable=None if progress else True) as bar:
            for count in _read(model, pieces, sums):
                num_tokens += count
                bar.update(count)
        if not num_tokens:
            raise InputError("the text has no tokens; give a longer one")
        return AttentionMass(
            **described,
            num_tokens=num_tokens,
            layers=tuple(found.result(layer, types[layer], num_tokens) for layer, found in sums.items()),
            without_weights=tuple(layer for layer in range(len(types)) if layer not in sums),
        )


@contextlib.contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Attention that holds its weights, for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def _read(model: PreTrainedModel, pieces: Iterable[torch.Tensor], sums: dict[int, "_Sums"]) -> Iterator[int]:
    """Adds the weights of the whole text to the sums of each layer; gives the number of tokens read, call by call."""
    config, length = model.config, segment_len_of(model.config)
    is_carried = carries_memory(config)
    cache, start = XLCache(config), 0
    for ids in _calls(pieces, length):
        if not is_carried and start % length == 0:
            cache, start = XLCache(config), 0
        slots = {
            layer: model.model.layers[layer].self_attn.memory.slot_positions(cache.states[layer], cache.mem_len, start)
            for layer in sums
        }
        output = model(ids.to(model.device), cache=cache, use_cache=True, logits_to_keep=1, output_attentions=True)
        for layer, found in sums.items():
            has_segments = MEMORY_MECHANISMS[config.layer_memory_types[layer]].uses_grid
            line = start - start % length if has_segments else 0
            found.add(output.attentions[layer][0], start, line, config.num_sink_tokens, slots[layer])
        start += ids.shape[1]
        yield ids.shape[1]


def _calls(pieces: Iterable[torch.Tensor], segment_len: int) -> Iterator[torch.Tensor]:
    """The joined pieces as ids (1, t), t at most LONGEST_CALL, none of them across the end of a segment."""
    rest, read = torch.empty(0, dtype=torch.long), 0
    for piece in pieces:
        rest = torch.cat([rest, piece])
        while len(rest) >= (size := min(LONGEST_CALL, segment_len - read % segment_len)):
            yield rest[None, :size]
            rest, read = rest[size:], read + size
    if len(rest):
        yield rest[None]


class _Sums:
    """Weights of one layer, summed over queries in float64: by kind (H, 4), and by distance (H, 64) in powers of two."""

    def __init__(self, num_heads: int):
        self.by_kind = torch.zeros(num_heads, len(KINDS), dtype=torch.float64)
        self.by_distance = torch.zeros(num_heads, 64, dtype=torch.float64)

    def add(self, weights: torch.Tensor, start: int, line: int, num_sinks: int, slots: torch.Tensor) -> None:
        """weights (H, t, K), of the columns [sinks ; slots ; rows ; the call]. start: position of the call's first token;
        line: where its segment begins. slots (n,): the position at which each slot stands."""
        weights = weights.to("cpu", torch.float64)
        length = weights.shape[1]
        held = weights.shape[2] - num_sinks - length  # slots and rows
        own = max(len(slots), held - (start - line))  # of these, as far as the first of the segment's own
        edges = [0, num_sinks, num_sinks + len(slots), num_sinks + own, weights.shape[2]]
        by_key = weights.sum(1)  # (H, K)
        for kind, (first, last) in enumerate(pairwise(edges)):
            self.by_kind[:, kind] += by_key[:, first:last].sum(1)
        keys = torch.cat([slots, torch.arange(start - held + len(slots), start + length)])
        distances = (torch.arange(start, start + length)[:, None] - keys).clamp(min=0)  # (t, K - s); ahead weighs nothing
        bins = torch.frexp(distances.double()).exponent.long()  # 0 at 0, then 1 + floor(log2), exact
        self.by_distance.index_add_(1, bins.flatten(), weights[..., num_sinks:].flatten(1))

    def result(self, layer: int, memory_type: str, num_tokens: int) -> LayerMass:
        by_head, curve = self.by_kind / num_tokens, (self.by_distance / num_tokens).mean(0).tolist()
        while curve and not curve[-1]:
            curve.pop()
        return LayerMass(
            layer,
            memory_type,
            dict(zip(KINDS, by_head.mean(0).tolist(), strict=True)),
            dict(zip(KINDS, by_head.T.tolist(), strict=True)),
            tuple(DistanceBin(2**i // 2, max(0, 2**i - 1), mass) for i, mass in enumerate(curve)),
        )
