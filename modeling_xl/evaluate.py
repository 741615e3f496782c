"""Loss over a whole text, read as streams with memory: numbers with every setting they depend on.

Two measurements: the loss of a text (`evaluate`, or `evaluate_pieces` for text that is not held whole), by memory length and
by position; and the loss of an evaluation set in `Trainer` (`compute_metrics`, `preprocess_logits_for_metrics`). A loss is
summed over tokens, not averaged over batches.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from .configuration_xl import XLConfig
from .corpus import Corpus, as_corpus
from .data import IGNORE_INDEX, Block, Streams
from .extent import Extent
from .generation_xl import MAX_LOGITS
from .text import InputError, byte_tokenizer
from .text_pieces import encode_pieces


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What a model's numbers depend on beside its weights. None: the model knows no such setting."""

    model_type: str
    segment_len: int | None = None
    mem_len: int | None = None  # None: the model's layers keep no bounded memory
    clamp_len: int | None = None
    attention_window: int | None = None
    window_follows_memory: bool = False  # the window moved with the memory length, as `same_length` means it
    initial_memory: str | None = None
    num_sink_tokens: int | None = None
    position_type: str | None = None
    memory_type: str | list[str] | None = None
    dtype: str  # of the parameters

    @property
    def settings(self) -> str:
        if self.model_type != XLConfig.model_type:
            return f"model type {self.model_type}, dtype {self.dtype}"
        window = f"{self.attention_window or 'none'}{' (follows memory)' if self.window_follows_memory else ''}"
        kinds = self.memory_type if isinstance(self.memory_type, str) else " ".join(self.memory_type or ())
        return (
            f"segment {self.segment_len}, memory {self.mem_len}, clamp {self.clamp_len or 'none'}, window {window}, "
            f"start {self.initial_memory}, {self.of_the_run}, sinks {self.num_sink_tokens}, "
            f"positions {self.position_type}, memory type {kinds}, dtype {self.dtype}"
        )

    @property
    def of_the_run(self) -> str:
        """Settings of the measurement, in words."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PositionBin:
    """The scored tokens that have `first` to `last` tokens of their stream or document before them."""

    first: int
    last: int
    num_tokens: int
    loss: float  # nats per token


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(ModelSettings):
    """What was measured, and all that the number depends on."""

    bits_per_byte: float
    bits_per_character: float  # characters are Unicode code points
    perplexity: float  # per token
    loss: float  # nats per token
    num_tokens: int  # tokens scored
    num_bytes: int  # UTF-8 bytes of the tokens scored
    num_characters: int
    num_documents: int
    streams: int
    batch_size: int
    seconds: float
    position_curve: tuple[PositionBin, ...]  # in bins of powers of two, those without a token left out

    def __str__(self) -> str:
        return (
            f"{self.bits_per_byte:.4f} bits per byte, perplexity {self.perplexity:.4f} per token, "
            f"{self.bits_per_character:.4f} bits per character, {self.loss:.4f} nats per token\n"
            f"({self.num_tokens} tokens, {self.num_bytes} bytes, {self.num_characters} characters, {self.seconds:.1f} s)\n"
            f"{self.settings}"
        )

    @property
    def of_the_run(self) -> str:
        documents = "" if self.num_documents == 1 else f", documents {self.num_documents}"
        return f"streams {self.streams}, batch {self.batch_size}{documents}"


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


def following_window(config: XLConfig, mem_len: int) -> int | None:
    """The window that goes with another memory length; None where the config's does not follow its own.

    One that equals the memory length (`same_length` of the original PyTorch code), or exceeds it by one (TensorFlow), lets
    every query see the memory and itself; kept as it is it would hide what a longer memory holds.
    """
    window = config.attention_window
    if window is None or not config.uses_grid or window - config.mem_len not in (0, 1):
        return None
    followed = window + mem_len - config.mem_len
    if followed < 1:
        raise InputError(f"mem_len={mem_len}: attention_window={window} follows memory and would be {followed}; give a window")
    return followed


@contextlib.contextmanager
def measured(model: PreTrainedModel, **overrides: int | None) -> Iterator[dict[str, Any]]:
    """Puts the model into eval mode with these fields of its config for a while; gives the fields of `ModelSettings`."""
    config, was_training = model.config, model.training
    given = {name: value for name, value in overrides.items() if value is not None}
    described: dict[str, Any] = {"model_type": config.model_type, "dtype": str(model.dtype).removeprefix("torch.")}
    if not isinstance(config, XLConfig):
        if given:
            raise InputError(
                f"{', '.join(f'{name}={value}' for name, value in given.items())}: a model of type "
                f"{config.model_type!r} has no such setting, only one of type 'xl'; leave it out"
            )
        changed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    else:
        if "attention_window" not in given and "mem_len" in given:
            followed = following_window(config, given["mem_len"])
            if followed is not None:
                given["attention_window"] = followed
                described["window_follows_memory"] = True
        changed = overridden(model, **given)
    with changed:
        if isinstance(config, XLConfig):
            names = {field.name for field in fields(ModelSettings)} - {"window_follows_memory", *described}
            described |= {name: getattr(config, name) for name in names}
            if not config.uses_grid:
                described["mem_len"] = None
        model.eval()
        try:
            yield described
        finally:
            model.train(was_training)


def evaluate(
    model: PreTrainedModel,
    tokens: torch.Tensor | Corpus,
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
    """Scores `tokens`, [N] or a corpus, in order, with memory carried along each of `streams` contiguous parts.

    Every token is scored once, but the first of the text. Each document of a corpus sees only itself, and its first token is
    not scored. Of a mapped corpus no more is held at once than a call needs, or 2^18 tokens where their bytes are counted.
    Lengths that are None are the model's own; its config is as before when the call returns. A window that equals the
    config's memory length, or exceeds it by one, moves with `mem_len` unless it is given. `tokenizer` says how many bytes
    and characters the tokens stand for (default: bytes). `batch_size` is how many streams run at once (default: all) and
    does not change the result. More streams are faster on short texts, but each starts from an empty memory. Raises
    InputError for what cannot be used.
    """
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size={batch_size}: must be at least 1, or None for all streams at once")
    batch_size = min(batch_size or streams, streams)
    begin, tally, corpus = time.perf_counter(), _Tally(), as_corpus(tokens)
    with measured(
        model, segment_len=segment_len, mem_len=mem_len, clamp_len=clamp_len, attention_window=attention_window
    ) as described:
        block_len = _block_len(model.config, batch_size)
        parts = Streams(corpus, streams, block_len)
        with _progress_bar(corpus.num_targets, model.config, progress) as bar:
            for first in range(0, streams, batch_size):
                _score(model, _placed_blocks(parts, slice(first, first + batch_size)), tally, bar)
        extent = _scored_extent(corpus, tokenizer or byte_tokenizer())
        run = {"streams": streams, "batch_size": batch_size, "num_documents": corpus.num_documents}
        return _result(described, tally, extent, begin, **run)


def evaluate_pieces(
    model: PreTrainedModel,
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    segment_len: int | None = None,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    attention_window: int | None = None,
    progress: bool = False,
) -> EvaluationResult:
    """As `evaluate` on the joined `texts`, as one stream, holding no more of them than a call needs.

    The pieces are tokenized one by one: cut them where the tokenizer begins a new token anyway, as `read_pieces` does.
    """
    tokenizer = tokenizer or byte_tokenizer()
    begin, tally, extent = time.perf_counter(), _Tally(), Extent(tokenizer)

    def counted() -> Iterator[torch.Tensor]:
        unscored = 1
        for ids in encode_pieces(texts, tokenizer):
            extent.add(ids[unscored:])
            unscored -= min(unscored, len(ids))
            yield ids

    with measured(
        model, segment_len=segment_len, mem_len=mem_len, clamp_len=clamp_len, attention_window=attention_window
    ) as described:
        blocks = _blocks_of_pieces(counted(), _block_len(model.config, 1))
        with _progress_bar(None, model.config, progress) as bar:
            _score(model, ((block, None) for block in blocks), tally, bar)
        return _result(described, tally, extent, begin, streams=1, batch_size=1, num_documents=1)


def _placed_blocks(parts: Streams, rows: slice) -> Iterator[tuple[Block, torch.Tensor | None]]:
    """Each block, and how many tokens of its document stand before each target (B, T); None without documents."""
    starts = parts.corpus.document_starts
    first = parts.starts[rows, None] + 1  # where in the text the targets of the first column stand
    for block in parts.blocks(rows):
        if starts is None or block.document_ids is None:
            yield block, None
            continue
        num_columns = block.targets.shape[1]
        # Of a target that counts, the document is that of its input.
        yield block, first + torch.arange(num_columns) - torch.from_numpy(starts[block.document_ids.numpy()])
        first = first + num_columns


def _scored_extent(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> Extent:
    """Each document but its first token, decoded on its own."""
    extent = Extent(tokenizer)
    starts = [0] if corpus.document_starts is None else corpus.document_starts
    for first, stop in itertools.pairwise(np.append(starts, len(corpus)).tolist()):
        extent.begin()
        for piece in corpus.pieces(first + 1, stop):
            extent.add(piece)
    return extent


def _blocks_of_pieces(pieces: Iterable[torch.Tensor], block_len: int) -> Iterator[Block]:
    """The blocks that `Streams` with one stream makes of the joined pieces."""
    rest = torch.empty(0, dtype=torch.long)
    for piece in pieces:
        rest = torch.cat([rest, piece])
        while len(rest) > block_len:
            yield Block(rest[None, :block_len], None, rest[None, 1 : block_len + 1], is_last=False)
            rest = rest[block_len:]
    if len(rest) > 1:
        yield Block(rest[None, :-1], None, rest[None, 1:], is_last=True)


def segment_len_of(config: XLConfig) -> int:
    """The segment length; raises InputError where there is none, and so none by which a text could be cut."""
    if config.segment_len is None:
        raise InputError("the model has segment_len=None (every call is one segment); give a segment length")
    return config.segment_len


def _block_len(config: XLConfig, batch_size: int) -> int:
    segment_len = segment_len_of(config)
    if not carries_memory(config):
        return segment_len
    return segment_len * max(1, MAX_LOGITS // (batch_size * config.vocab_size * segment_len))


def _progress_bar(total: int | None, config: XLConfig, progress: bool) -> tqdm:
    return tqdm(total=total, unit="tok", desc=f"memory {config.mem_len}", disable=None if progress else True)


class _Tally:
    """Nats, summed in float64, and numbers of tokens, for each power of two of the number of tokens before."""

    def __init__(self) -> None:
        self.nats = torch.zeros(64, dtype=torch.float64)
        self.tokens = torch.zeros(64, dtype=torch.long)

    def add(self, nats: torch.Tensor, before: torch.Tensor) -> None:
        """Adds tokens, nats (n,), with `before` (n,) >= 1 tokens before each."""
        bins = (torch.frexp(before.double()).exponent - 1).long()  # exact, where a logarithm rounds
        self.nats.index_add_(0, bins, nats.double().cpu())
        self.tokens += torch.bincount(bins, minlength=64)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def curve(self) -> tuple[PositionBin, ...]:
        counted = enumerate(zip(self.nats.tolist(), self.tokens.tolist(), strict=True))
        return tuple(PositionBin(2**i, 2 ** (i + 1) - 1, tokens, nats / tokens) for i, (nats, tokens) in counted if tokens)


@torch.no_grad()
def _score(
    model: PreTrainedModel, placed_blocks: Iterable[tuple[Block, torch.Tensor | None]], tally: _Tally, bar: tqdm
) -> None:
    """Adds the scored tokens of some streams, block after block as `_placed_blocks` gives them, to the tally."""
    carry, cache, begin = carries_memory(model.config), None, 1
    for block, before_in_document in placed_blocks:
        output = model(
            input_ids=block.input_ids.to(model.device),
            attention_mask=None if block.attention_mask is None else block.attention_mask.to(model.device),
            document_ids=block.document_ids,
            cache=cache,
            use_cache=carry,
        )
        cache = output.cache
        before = torch.arange(begin, begin + block.targets.shape[1]).expand_as(block.targets)
        scored = block.targets != IGNORE_INDEX
        if before_in_document is not None:
            before = torch.minimum(before, before_in_document)
        nats = token_nats(output.logits, block.targets.to(model.device)).cpu()
        tally.add(nats[scored], before[scored])
        begin += block.targets.shape[1] if carry else 0
        bar.set_postfix_str(f"{tally.loss / math.log(2):.3f} bits/token", refresh=False)
        bar.update(block.num_targets)


def token_nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log P of each target, in float32 at least: logits (..., V) and targets (...) -> (...); 0 at -100.

    Log-probabilities, as of adaptive heads, are logits too.
    """
    raised = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    nats = torch.nn.functional.cross_entropy(raised, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return nats.view_as(targets)


def _result(described: dict[str, Any], tally: _Tally, extent: Extent, begin: float, **run: Any) -> EvaluationResult:
    num_tokens = int(tally.tokens.sum())
    if not num_tokens:
        raise InputError("no token has another before it that could predict it; give a text of 2 tokens at least")
    bits = float(tally.nats.sum()) / math.log(2)
    return EvaluationResult(
        **described,
        bits_per_byte=_ratio(bits, extent.num_bytes),
        bits_per_character=_ratio(bits, extent.num_characters),
        perplexity=_perplexity(tally.loss),
        loss=tally.loss,
        num_tokens=num_tokens,
        num_bytes=extent.num_bytes,
        num_characters=extent.num_characters,
        seconds=time.perf_counter() - begin,
        position_curve=tally.curve,
        **run,
    )


def _ratio(amount: float, count: int) -> float:
    return amount / count if count else math.nan  # special tokens stand for no text


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))  # beyond 700 a double overflows


def preprocess_logits_for_metrics(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """For `Trainer(preprocess_logits_for_metrics=...)`: logits (B, T, V) and labels (B, T) -> nats (B, T - 1) of labels 1 on.

    So a number a token is kept of an evaluation set, and not one for each entry of the vocabulary.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    return token_nats(logits[:, :-1], labels[:, 1:])


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """For `Trainer(compute_metrics=...)`, beside `preprocess_logits_for_metrics`: loss (nats), bits and perplexity per token.

    Means over all tokens of the evaluation set. The loss takes the place of Trainer's, a mean over batches. Labels are
    shifted by one column, as models shift them; those of -100 count for nothing. Where a row begins with pads, the model
    leaves its first token out and this does not: pad to the right. `shift_labels` are not looked at, and
    `batch_eval_metrics` does not go with it.
    """
    chosen = prediction.label_ids[:, 1:] != IGNORE_INDEX
    nats = prediction.predictions[chosen].astype("float64")
    loss = float(nats.sum() / max(1, len(nats)))
    return {"loss": loss, "bits_per_token": loss / math.log(2), "perplexity": _perplexity(loss)}
