"""A plain training loop over Accelerate that carries memory along contiguous streams, and the saving of what it made.

Each row of the batch reads one part of the text from beginning to end; a new pass starts from a fresh memory. Over
several processes every process has rows of its own, and the memory of a row never travels.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_cosine_schedule_with_warmup

from .configuration_xl import XLConfig
from .data import Block, InputError, Streams, byte_tokenizer, count_bytes
from .evaluate import carries_memory
from .modeling_xl import XLForCausalLM

SHOW_EVERY = 20  # steps between two readings of the loss, which wait for the device

# `configs` lies inside the package once installed from a wheel, and beside it in a checkout.
CONFIG_FOLDERS = (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs")


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; `training.json` beside a `config.json` holds the same names. Whichever of `max_steps` and
    `max_bytes` (of text read) comes first ends the run; with neither it is one pass over the text."""

    max_steps: int | None = None
    max_bytes: int | None = None
    batch_size: int = 16  # streams a process
    stream_len: int | None = None  # tokens after which streams go on from an empty memory (None: a pass)
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01  # on matrices only
    max_grad_norm: float = 1.0
    mixed_precision: str = "no"
    seed: int = 0

    def __post_init__(self) -> None:
        counts, numbers = (int, "an integer"), ((int, float), "a number")
        rules: list[tuple[tuple[Any, str], str, Callable[[Any], bool], list[str]]] = [
            (counts, "of at least 1", lambda x: x >= 1, ["max_steps", "max_bytes", "batch_size", "stream_len"]),
            (counts, "of at least 0", lambda x: x >= 0, ["warmup_steps", "seed"]),
            (numbers, "above 0", lambda x: x > 0, ["learning_rate", "max_grad_norm"]),
            (numbers, "of at least 0", lambda x: x >= 0, ["weight_decay"]),
        ]
        for (kind, word), rule, holds, names in rules:
            for name in names:
                value = getattr(self, name)
                if value is None and name in ("max_steps", "max_bytes", "stream_len"):
                    continue
                if not isinstance(value, kind) or isinstance(value, bool) or not holds(value):
                    raise InputError(f"{name}={value!r}: must be {word} {rule}")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise InputError(f"mixed_precision={self.mixed_precision!r}: must be no, bf16 or fp16")


@dataclass(frozen=True)
class TrainingResult:
    steps: int
    num_bytes: int  # read, over all processes
    bits_per_byte: float  # mean over the last steps shown by the progress bar
    seconds: float


def load_config(source: str | Path, **overrides: Any) -> tuple[XLConfig, dict[str, Any]]:
    """The model config and the stored training settings (or none) of a folder, a JSON file or a published name.

    `overrides` are config fields; those given as None stay as they are.
    """
    path = Path(source)
    if not path.exists() and path.name == str(source):
        path = next((folder / path for folder in CONFIG_FOLDERS if (folder / path / "config.json").is_file()), path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        names = sorted({p.parent.name for folder in CONFIG_FOLDERS for p in folder.glob("*/config.json")})
        raise InputError(
            f"{source}: no config there; give a folder with a config.json, a JSON file, or one of: {', '.join(names)}"
        )
    values = _read_json(path)
    if values.get("model_type", XLConfig.model_type) != XLConfig.model_type:
        raise InputError(f"{path}: model_type is {values['model_type']!r}, not {XLConfig.model_type!r}")
    values |= {name: value for name, value in overrides.items() if value is not None}
    try:
        config = XLConfig.from_dict(values)
    except Exception as error:  # several classes of error, according to which check of the config failed
        raise InputError.about(path, error) from error
    training = path.parent / "training.json"
    return config, _read_json(training) if training.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold one JSON object, got {type(values).__name__}")
    return values


def training_settings(stored: dict[str, Any], **overrides: Any) -> TrainingSettings:
    """Settings from a `training.json`, with the overrides that are not None in their place."""
    values = stored | {name: value for name, value in overrides.items() if value is not None}
    known = [field.name for field in fields(TrainingSettings)]
    if unknown := sorted(set(values) - set(known)):
        raise InputError(f"training.json: unknown setting(s) {', '.join(unknown)}; known: {', '.join(known)}")
    return TrainingSettings(**values)


def new_model(config: XLConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> XLForCausalLM:
    """A model with fresh weights, the same for the same seed."""
    _check_vocabulary(config, tokenizer)
    set_seed(seed)
    model = XLForCausalLM(config)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def pretrained_model(source: str | Path, config: XLConfig, tokenizer: PreTrainedTokenizerBase) -> XLForCausalLM:
    """The model in the folder `source` with another memory, or other dropout, as `config` says. All weights are those there."""
    _check_vocabulary(config, tokenizer)
    try:
        model, info = XLForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # several classes of error, according to which file is wrong and how
        raise InputError.about(source, error) from error
    others = {*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])}
    if others:
        names = ", ".join(sorted(others)[:4])
        raise InputError(
            f"{source}: its weights are of another model than the config ({names}, ...); give the config beside them"
        )
    return model


def _check_vocabulary(config: XLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if len(tokenizer) > config.vocab_size:
        raise InputError(f"vocab_size={config.vocab_size} is less than the tokenizer's {len(tokenizer)} ids; raise it")


def train(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    settings: TrainingSettings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    progress: bool = False,
    description: str = "train",
) -> TrainingResult:
    """Trains `model` in place on `tokens` [N], read in order by `settings.batch_size` streams a process.

    A call covers `bptt_segments + 1` segments, so that gradient reaches as far back as the config says; the model
    detaches the memory it hands on. With plain attention over everything, which has no bounded memory, segments are
    separate samples. `tokenizer` says how many bytes the tokens stand for (default: bytes).
    """
    config = model.config
    if config.segment_len is None:
        raise InputError("the config has segment_len=None (every call is one segment); give a segment length")
    set_seed(settings.seed)
    accelerator = Accelerator(mixed_precision=settings.mixed_precision)
    block_len = config.segment_len * (config.bptt_segments + 1)
    streams = Streams(tokens, settings.batch_size * accelerator.num_processes, block_len)
    first = settings.batch_size * accelerator.process_index
    rows = slice(first, first + settings.batch_size)
    bytes_per_token = count_bytes(tokens, tokenizer or byte_tokenizer()) / len(tokens)
    step_bytes = bytes_per_token * block_len * settings.batch_size * accelerator.num_processes
    limits = [settings.max_steps, settings.max_bytes and math.ceil(settings.max_bytes / step_bytes)]
    num_steps = min((limit for limit in limits if limit is not None), default=len(streams))

    groups = _parameter_groups(model, settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, settings.learning_rate, betas=(0.9, 0.99), fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(settings.warmup_steps, num_steps // 2), num_steps)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    prepared.train()
    carry = carries_memory(config)
    begin, num_bytes, bits = time.perf_counter(), 0.0, math.nan
    recent: list[torch.Tensor] = []
    cache = None
    shown = progress and accelerator.is_main_process
    bar = tqdm(total=num_steps, desc=description, unit="step", disable=None if shown else True)
    carried = 0  # tokens of each row that the memory comes from
    for step, block in zip(range(1, num_steps + 1), _passes(streams, rows), strict=False):
        carried += block_len
        is_last = block.is_last or (settings.stream_len is not None and carried >= settings.stream_len)
        output = prepared(
            **block.model_inputs(accelerator.device),
            cache=cache,
            use_cache=carry and not is_last,  # no memory is left over
        )
        cache, carried = output.cache, 0 if is_last else carried
        accelerator.backward(output.loss)
        accelerator.clip_grad_norm_(prepared.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        num_bytes += bytes_per_token * block.num_targets * accelerator.num_processes
        text_loss = output.loss.detach()
        if output.aux_loss is not None:
            text_loss = text_loss - config.compression_loss_coef * output.aux_loss.detach()
        recent.append(text_loss)
        if step % SHOW_EVERY == 0 or step == num_steps:
            loss = accelerator.gather(torch.stack(recent)).mean()
            bits = float(loss) / math.log(2) / bytes_per_token
            recent = []
            if not math.isfinite(bits):
                raise FloatingPointError(f"the loss is {bits} at step {step}; lower the learning rate")
            bar.set_postfix_str(f"{bits:.3f} bits/byte", refresh=False)
            bar.update(step - bar.n)
    bar.close()
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    return TrainingResult(num_steps, round(num_bytes), bits, time.perf_counter() - begin)


def _passes(streams: Streams, rows: slice) -> Iterator[Block]:
    """The blocks of pass after pass over the text."""
    while True:
        yield from streams.blocks(rows)


def _parameter_groups(model: PreTrainedModel, weight_decay: float) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def check_output_dir(output_dir: str | Path, overwrite: bool) -> None:
    """Raises InputError where `save` would have to write over something, before a long run rather than after it."""
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; give a folder")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise InputError(f"{path}: is not empty; give another folder, or --overwrite to replace a model in it")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path, overwrite: bool = False) -> None:
    """Writes model, tokenizer and generation config into `output_dir`.

    All files are complete under a temporary name before the first takes its place, so that a run that fails while
    saving leaves what was there. Other files in a folder that is written over stay.
    """
    check_output_dir(output_dir, overwrite)
    path = Path(output_dir).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        # A folder of its own inside: the temporary one is private to the user, the result has the user's own rights.
        complete = Path(temporary) / "model"
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        if not path.exists():
            complete.rename(path)
            return
        new = {file.name for file in complete.iterdir()}
        for name in sorted(new):
            (complete / name).replace(path / name)
        for stale in set(path.glob("model*.safetensors*")) - {path / name for name in new}:
            stale.unlink()  # from a model cut into another number of files, which would be loaded instead
