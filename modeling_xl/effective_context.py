"""Relative effective context length: how far back a model's predictions still gain.

Dai et al., "Transformer-XL", ACL 2019, appendix C.
"""

import contextlib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .configuration_xl import XLConfig
from .evaluate import ModelSettings, measured, token_nats
from .text import InputError

# Tokens of one call that measures the effect of context.
MAX_WINDOW_TOKENS = 2**14


@dataclass(frozen=True)
class ContextLength:
    """The relative effective context length of one model in its group, at one ratio of hard positions."""

    ratio: float
    length: int  # tokens
    is_lower_bound: bool  # the longest context measured still gained as much as the threshold

    def __str__(self) -> str:
        return f"{'>= ' if self.is_lower_bound else ''}{self.length}"


@dataclass(frozen=True, kw_only=True)
class ReclResult(ModelSettings):
    """The relative effective context lengths of one model, and all that they depend on."""

    lengths: tuple[ContextLength, ...]
    context_losses: dict[int, float]  # context length: nats per token over all positions
    group: tuple[str, ...]  # names of the models compared, this one among them
    step: int
    longest: int
    threshold: float
    num_positions: int

    @property
    def of_the_run(self) -> str:
        return f"a fresh state for each window, {self.measurement}"

    @property
    def measurement(self) -> str:
        return (
            f"step {self.step}, contexts up to {self.longest}, {self.num_positions} positions, threshold {self.threshold}, "
            f"group of {len(self.group)}"
        )


def relative_effective_context_length(
    losses: Mapping[str, Mapping[int, torch.Tensor]], ratio: float = 0.1, threshold: float = 0.01
) -> dict[str, ContextLength]:
    """The relative effective context length (RECL) of each model of a group (Dai et al. 2019, Transformer-XL, appendix C).

    losses: for each model, for each context length c, l(c, t) [P]: -log P of the same P tokens given exactly the c tokens
    before. b(c, t) is the least over the models, T the share `ratio` of positions where b(c, t) is largest. From the
    shortest context on, a model goes to the next longer one, c', as long as its relative gain
    (exp f(c, c) - exp f(c, c')) / exp f(c, c) is at least `threshold`, where f(c, c') is the mean over T of
    min(b(c, t), l(c', t)). Raises InputError where the models were not measured alike.
    """
    if not 0 < ratio <= 1:
        raise InputError(f"ratio={ratio}: must be above 0 and at most 1")
    shapes = {name: {c: values.shape for c, values in sorted(by_context.items())} for name, by_context in losses.items()}
    first = next(iter(shapes.values()), {})
    if not first or any(shape != first for shape in shapes.values()) or len(set(first.values())) != 1:
        raise InputError("losses must hold the same context lengths and the same number of positions for every model")
    least = {c: torch.stack([by_context[c].double() for by_context in losses.values()]).amin(0) for c in first}

    def gain(by_context: Mapping[int, torch.Tensor], context: int, longer: int) -> float:
        baseline = least[context]
        hardest = baseline.sort(descending=True, stable=True).indices[: max(1, round(ratio * len(baseline)))]
        reached = torch.minimum(baseline, by_context[longer].double())[hardest].mean()
        return float(-torch.expm1(reached - baseline[hardest].mean()))

    found = {}
    for name, by_context in losses.items():
        stops = (c for c, longer in pairwise(first) if gain(by_context, c, longer) < threshold)
        length = next(stops, None)
        found[name] = ContextLength(ratio, max(first) if length is None else length, length is None)
    return found


def spread_positions(num_tokens: int, longest: int, num_positions: int) -> torch.Tensor:
    """Places [P] of tokens to predict, evenly spread over those with `longest` tokens before them; all, if they are fewer."""
    room = num_tokens - longest
    if room < 1:
        raise InputError(f"{num_tokens} tokens are too few for contexts of {longest}; give a longer text or a smaller maximum")
    count = min(num_positions, room)
    return longest + torch.arange(count) * room // count


@torch.no_grad()
def context_losses(model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor, context_len: int) -> torch.Tensor:
    """-log P(tokens[t] | the `context_len` tokens before it), in nats [P] as float64, for the places t in `positions` [P].

    Each window is read from a fresh state, by any causal language model of Transformers in eval mode.
    """
    windows = positions[:, None] + torch.arange(-context_len, 1)  # (P, context_len + 1)
    found = []
    for rows in tokens[windows].split(max(1, MAX_WINDOW_TOKENS // context_len)):
        output = model(rows[:, :-1].to(model.device), use_cache=False, logits_to_keep=1)
        found.append(token_nats(output.logits[:, -1], rows[:, -1].to(model.device)).double().cpu())
    return torch.cat(found)


def grid_step(configs: Iterable[Any]) -> int:
    """The least number of tokens after which all models stand at the same place of their segments; 1 if none shows a grid."""
    grids = [
        config.segment_len
        for config in configs
        if isinstance(config, XLConfig)
        and config.uses_grid
        and config.segment_len is not None
        and (config.attention_window is None or config.attention_window - 1 > config.mem_len)  # else it hides the grid
    ]
    return math.lcm(*grids)


def measure_recl(
    models: Mapping[str, PreTrainedModel],
    tokens: torch.Tensor,
    *,
    step: int | None = None,
    longest: int | None = None,
    num_positions: int = 500,
    ratios: Sequence[float] = (0.1, 0.5, 1.0),
    threshold: float = 0.01,
    segment_len: int | None = None,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    attention_window: int | None = None,
    progress: bool = False,
) -> dict[str, ReclResult]:
    """The relative effective context length of a group of models on `tokens` [N], which all of them read as the same text.

    Contexts of `step` (None: a segment, or 64 tokens without segments), 2 `step`, ... tokens are measured until none gains
    any more, or up to `longest` (None: 16 steps), on the same `num_positions` places. Lengths given are those of all models,
    which then must be of this package. Warns where a step is no whole number of segments: the place of a window's last
    token in its segment then changes with the context, and what it sees with it, which counts as gain.
    """
    for name, model in models.items():
        if int(tokens.max()) >= model.config.vocab_size:
            raise InputError(f"{name}: has {model.config.vocab_size} ids and the text needs {int(tokens.max()) + 1}")
    losses: dict[str, dict[int, torch.Tensor]] = {name: {} for name in models}
    lengths: list[dict[str, ContextLength]] = []
    with contextlib.ExitStack() as stack:
        given = {"segment_len": segment_len, "mem_len": mem_len, "clamp_len": clamp_len, "attention_window": attention_window}
        described = {name: stack.enter_context(measured(model, **given)) for name, model in models.items()}
        grid = grid_step(model.config for model in models.values())
        step = step or (grid if grid > 1 else 64)
        longest = longest or 16 * step
        if longest < 2 * step:
            raise InputError(f"longest={longest}: two steps of {step} must fit; give {2 * step} at least, or a smaller step")
        if step % grid:
            warnings.warn(
                f"a step of {step} is no multiple of the segment, {grid}: lengths may come out too long", stacklevel=2
            )
        positions = spread_positions(len(tokens), longest, num_positions)
        for context in tqdm(range(step, longest + 1, step), unit="context", desc="RECL", disable=None if progress else True):
            for name, model in models.items():
                losses[name][context] = context_losses(model, tokens, positions, context)
            lengths = [relative_effective_context_length(losses, ratio, threshold) for ratio in ratios]
            if not any(found.is_lower_bound for by_model in lengths for found in by_model.values()):
                break
    return {
        name: ReclResult(
            **described[name],
            lengths=tuple(by_model[name] for by_model in lengths),
            context_losses={context: float(values.mean()) for context, values in losses[name].items()},
            group=tuple(models),
            step=step,
            longest=longest,
            threshold=threshold,
            num_positions=len(positions),
        )
        for name in models
    }


def check_same_vocabulary(tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> None:
    """Raises InputError unless all have the same tokens with the same ids, so that losses of tokens can be compared."""
    (first, tokenizer), *others = tokenizers.items()
    vocabulary = tokenizer.get_vocab()
    for name, other in others:
        if other.get_vocab() != vocabulary:
            raise InputError(f"{name}: its vocabulary is not that of {first}; compare models that share a tokenizer")
