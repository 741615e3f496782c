"""Loss over a whole text, read as streams with memory: one number with every setting it depends on.

The loss is summed over tokens, not averaged over batches, and every token but the first of the text is scored once.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .configuration_xl import XLConfig
from .data import InputError, Streams, byte_tokenizer, count_bytes

# Logits of one call, in elements: long calls are fast, and 2^24 of them are 64 MB in float32.
MAX_LOGITS = 2**24


@dataclass(frozen=True)
class EvaluationResult:
    """What was measured, and all that the number depends on."""

    bits_per_byte: float
    perplexity: float  # per token
    loss: float  # nats per token
    num_tokens: int  # tokens scored
    num_bytes: int  # UTF-8 bytes of the tokens scored
    segment_len: int
    mem_len: int | None  # None: the model's layers keep no bounded memory
    clamp_len: int | None
    attention_window: int | None
    initial_memory: str
    streams: int
    batch_size: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.bits_per_byte:.4f} bits per byte, perplexity {self.perplexity:.4f} per token "
            f"({self.num_tokens} tokens, {self.num_bytes} bytes, {self.seconds:.1f} s)\n{self.settings}"
        )

    @property
    def settings(self) -> str:
        clamp, window = self.clamp_len or "none", self.attention_window or "none"
        return (
            f"segment {self.segment_len}, memory {self.mem_len}, clamp {clamp}, window {window}, "
            f"start {self.initial_memory}, streams {self.streams}, batch {self.batch_size}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def carries_memory(config: XLConfig) -> bool:
    """Whether the state of a stream is bounded and so can be carried through a text of any length.

    False for plain attention over everything (memory type `none` without a window): its blocks are read one by one.
    """
    return config.attention_window is not None or "none" not in config.layer_memory_types


@contextlib.contextmanager
def overridden(model: PreTrainedModel, **overrides: Any) -> Iterator[None]:
    """Sets fields of a model's config for a while; those given as None stay. Values are checked as a config's are."""
    config = model.config
    overrides = {name: value for name, value in overrides.items() if value is not None}
    try:
        type(config).from_dict({**config.to_dict(), **overrides})
    except Exception as error:  # several classes of error, according to which check of the config failed
        raise InputError.about(", ".join(f"{name}={value}" for name, value in overrides.items()), error) from error
    before = {name: getattr(config, name) for name in overrides}
    try:
        for name, value in overrides.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def evaluate(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    segment_len: int | None = None,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    attention_window: int | None = None,
    streams: int = 1,
    batch_size: int | None = None,
    progress: bool = False,
) -> EvaluationResult:
    """Scores `tokens` [N] under `model`, in order, with memory carried along each of `streams` contiguous parts.

    Lengths that are None are the model's own; its config is as before when the call returns. `tokenizer` says how many
    bytes the tokens stand for (default: bytes). `batch_size` is how many streams run at once (default: all) and does
    not change the result. More streams are faster on short texts, but each starts from an empty memory.
    """
    tokenizer = tokenizer or byte_tokenizer()
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size={batch_size}: must be at least 1, or None for all streams at once")
    batch_size = min(batch_size or streams, streams)
    config, was_training = model.config, model.training
    begin = time.perf_counter()
    with overridden(
        model,
        segment_len=segment_len,
        mem_len=mem_len,
        clamp_len=clamp_len,
        attention_window=attention_window,
    ):
        if config.segment_len is None:
            raise InputError("the model has segment_len=None (every call is one segment); give a segment length")
        carry = carries_memory(config)
        calls = max(1, MAX_LOGITS // (batch_size * config.vocab_size * config.segment_len)) if carry else 1
        parts = Streams(tokens, streams, config.segment_len * calls)
        bar = tqdm(total=len(tokens) - 1, unit="tok", desc=f"memory {config.mem_len}", disable=None if progress else True)
        model.eval()
        try:
            nats = sum(
                _score(model, parts, slice(first, first + batch_size), carry, bar) for first in range(0, streams, batch_size)
            )
        finally:
            model.train(was_training)
            bar.close()
        num_tokens = len(tokens) - 1
        num_bytes = count_bytes(tokens[1:], tokenizer)
        loss = nats / num_tokens
        return EvaluationResult(
            bits_per_byte=nats / math.log(2) / num_bytes,
            perplexity=math.exp(min(loss, 700)),  # beyond 700 a double overflows
            loss=loss,
            num_tokens=num_tokens,
            num_bytes=num_bytes,
            segment_len=config.segment_len,
            mem_len=config.mem_len if config.uses_grid else None,
            clamp_len=config.clamp_len,
            attention_window=config.attention_window,
            initial_memory=config.initial_memory,
            streams=streams,
            batch_size=batch_size,
            seconds=time.perf_counter() - begin,
        )


@torch.no_grad()
def _score(model: PreTrainedModel, streams: Streams, rows: slice, carry: bool, bar: tqdm) -> float:
    """The summed loss, in nats, of the streams `rows`."""
    cache, nats = None, 0.0
    for block in streams.blocks(rows):
        output = model(**block.model_inputs(model.device), cache=cache, use_cache=carry)
        cache = output.cache
        nats += float(output.loss) * block.num_targets
        bar.update(block.num_targets)
    return nats


def plot(results: Mapping[str, Sequence[EvaluationResult]], path: str | Path) -> None:
    """Draws bits per byte against memory length, a line for each named list of results, into a PNG file."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which would touch the caller's backend
    except ImportError:
        raise InputError("a plot needs matplotlib; install it with `pip install modeling-xl[train]`") from None

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, line in results.items():
        axes.plot([str(r.mem_len) for r in line], [r.bits_per_byte for r in line], marker="o", label=name)
    axes.set_xlabel("memory length at evaluation (tokens)")
    axes.set_ylabel("bits per byte (lower is better)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, format="png")
