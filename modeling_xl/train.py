"""Training from a config and a text: settings by short names, a progress bar, and the saving of what was made.

How memory is carried from step to step is `XLTrainer`'s.
"""

import json
import math
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from .configuration_xl import XLConfig
from .corpus import Corpus, as_corpus
from .extent import Extent
from .modeling_xl import XLForCausalLM
from .text import InputError, byte_tokenizer, write_json
from .trainer import XLTrainer, XLTrainingArguments, last_checkpoint

SHOW_EVERY = 20  # steps between two readings of the loss, which wait for the device

# Arguments of the Trainer that the settings, or the command itself, decide: no second way to give them.
DECIDED = {
    "output_dir": "--output-dir",
    "per_device_train_batch_size": "batch_size",
    "num_train_epochs": "max_steps or max_bytes",
    "bf16": "mixed_precision",
    "fp16": "mixed_precision",
    "save_strategy": "save_steps",
    "eval_strategy": "--eval-file, which is read at the end",
}

NONE_MEANS_NO_LIMIT = ("max_steps", "max_bytes", "stream_len", "save_steps")

# `configs` lies inside the package once installed from a wheel, and beside it in a checkout.
CONFIG_FOLDERS = (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs")


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; `training.json` beside a `config.json` holds the same names, and those of `XLTrainingArguments`, which
    `others` takes. Whichever of `max_steps` and `max_bytes` (of text read) comes first ends the run; with neither it is one
    pass over the text."""

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
    save_steps: int | None = None  # steps from one checkpoint to the next (None: none are made)
    others: dict[str, Any] = field(default_factory=dict)  # further fields of XLTrainingArguments

    def __post_init__(self) -> None:
        counts, numbers = (int, "an integer"), ((int, float), "a number")
        rules: list[tuple[tuple[Any, str], str, Callable[[Any], bool], list[str]]] = [
            (counts, "of at least 1", lambda x: x >= 1, ["batch_size", *NONE_MEANS_NO_LIMIT]),
            (counts, "of at least 0", lambda x: x >= 0, ["warmup_steps", "seed"]),
            (numbers, "above 0", lambda x: x > 0, ["learning_rate", "max_grad_norm"]),
            (numbers, "of at least 0", lambda x: x >= 0, ["weight_decay"]),
        ]
        for (kind, word), rule, holds, names in rules:
            for name in names:
                value = getattr(self, name)
                if value is None and name in NONE_MEANS_NO_LIMIT:
                    continue
                if not isinstance(value, kind) or isinstance(value, bool) or not holds(value):
                    raise InputError(f"{name}={value!r}: must be {word} {rule}")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise InputError(f"mixed_precision={self.mixed_precision!r}: must be no, bf16 or fp16")
        self._check_others()

    def _check_others(self) -> None:
        own = {item.name for item in fields(self)}
        defaults = {item.name: item.default for item in fields(XLTrainingArguments) if item.init}
        for name, value in self.others.items():
            if name in DECIDED:
                raise InputError(f"{name}={value!r}: give {DECIDED[name]} instead")
            if name in own or name not in defaults:
                raise InputError(
                    f"{name}={value!r}: no training setting; known: {', '.join(sorted(own - {'others'}))}, and the fields of "
                    "Transformers' TrainingArguments"
                )
            default = defaults[name]
            if isinstance(default, bool) and not isinstance(value, bool):
                raise InputError(f"{name}={value!r}: must be true or false")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if isinstance(default, int | float) and not isinstance(default, bool) and not is_number:
                raise InputError(f"{name}={value!r}: must be a number")

    def arguments(self, output_dir: str | Path) -> XLTrainingArguments:
        """As Trainer has them; how many steps there are depends on the text too. Raises InputError for what it refuses."""
        arguments: dict[str, Any] = {
            "output_dir": str(output_dir),
            "per_device_train_batch_size": self.batch_size,
            "stream_len": self.stream_len,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "cosine",
            "optim": "adamw_torch_fused",
            "adam_beta2": 0.99,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "bf16": self.mixed_precision == "bf16",
            "fp16": self.mixed_precision == "fp16",
            "seed": self.seed,
            "logging_steps": SHOW_EVERY,
            "save_strategy": "steps" if self.save_steps else "no",
            "save_steps": self.save_steps or 1,
            "save_total_limit": 2,
            "report_to": "none",
            "disable_tqdm": True,
        }
        try:
            return XLTrainingArguments(**arguments | self.others)
        except (ValueError, TypeError, ImportError) as error:
            if not self.others:
                raise
            given = ", ".join(f"{name}={value!r}" for name, value in self.others.items())
            raise InputError.about(given, error) from error


@dataclass(frozen=True)
class TrainingResult:
    """What a run was. After a run that went on from a checkpoint `steps` counts those before it too."""

    steps: int
    num_bytes: int  # read in this run, over all processes
    bits_per_byte: float  # mean over the last steps shown by the progress bar
    seconds: float


def load_config(source: str | Path, **overrides: Any) -> tuple[XLConfig, dict[str, Any]]:
    """The model config and the stored training settings (or none) of a folder, a JSON file or a published name.

    `overrides` are config fields; those given as None stay as they are. Raises InputError where there is no config, and for
    one that is of another model type or that `XLConfig` refuses.
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
    """Settings from a `training.json`, with the overrides that are not None in their place. Raises InputError for what is
    no setting, or cannot be."""
    values = stored | {name: value for name, value in overrides.items() if value is not None}
    own = {item.name for item in fields(TrainingSettings)} - {"others"}
    return TrainingSettings(
        **{name: value for name, value in values.items() if name in own},
        others={name: value for name, value in values.items() if name not in own},
    )


def new_model(config: XLConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> XLForCausalLM:
    """A model with fresh weights, the same for the same seed. Raises InputError where the tokenizer has more ids than it."""
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
    tokens: torch.Tensor | Corpus,
    settings: TrainingSettings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    progress: bool = False,
    description: str = "train",
    checkpoints: str | Path | None = None,
) -> TrainingResult:
    """Trains `model` in place on `tokens`, [N] or a corpus, with `XLTrainer`. Only what `settings.save_steps` asks for is
    saved, in the folder `checkpoints`; a run that finds a whole checkpoint there goes on from it as if it had never stopped.

    `tokenizer` says how many bytes the tokens stand for (default: bytes), where the corpus does not.
    Raises InputError where `checkpoints` holds those of a run with another text, model, first weights or setting.
    """
    if settings.save_steps and checkpoints is None:
        raise InputError(f"save_steps={settings.save_steps}: name a folder for the checkpoints, or leave it out")
    corpus = as_corpus(tokens)
    begin = time.perf_counter()
    bytes_per_token = _num_bytes(corpus, tokenizer or byte_tokenizer()) / len(corpus)
    with tempfile.TemporaryDirectory() as unused:  # Trainer makes its output folder even if nothing goes there
        arguments = settings.arguments(checkpoints or unused)
        if checkpoints is not None:
            _check_same_run(Path(checkpoints), model, corpus, settings, arguments)
        progress_bar = _Progress(bytes_per_token, description, progress)
        trainer = XLTrainer(model, arguments, train_dataset=corpus, callbacks=[progress_bar])
        trainer.remove_callback(PrinterCallback)
        accumulated = arguments.gradient_accumulation_steps
        step_targets = settings.batch_size * arguments.world_size * trainer.block_len * accumulated
        num_blocks = len(trainer.get_train_dataloader())
        limits = [settings.max_steps, settings.max_bytes and math.ceil(settings.max_bytes / step_targets / bytes_per_token)]
        num_steps = min((limit for limit in limits if limit is not None), default=math.ceil(num_blocks / accumulated))
        arguments.max_steps, arguments.warmup_steps = num_steps, min(settings.warmup_steps, num_steps // 2)
        trainer.train(last_checkpoint(checkpoints, arguments.world_size) if checkpoints else None)
    # Mixed precision wraps the forward pass.
    trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    num_bytes = round(trainer.num_targets * arguments.world_size * bytes_per_token)
    last_logs = next((logs for logs in reversed(trainer.state.log_history) if "loss" in logs), {"loss": math.nan})
    bits_per_byte = _text_loss(last_logs) / math.log(2) / bytes_per_token
    return TrainingResult(num_steps, num_bytes, bits_per_byte, time.perf_counter() - begin)


def _text_loss(logs: dict[str, float]) -> float:
    """Nats per token of the text: the memory's own loss left out."""
    return logs["loss"] - logs.get("aux_loss", 0.0)


def _num_bytes(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> int:
    if corpus.num_bytes is not None:
        return corpus.num_bytes
    extent = Extent(tokenizer)
    for piece in corpus.pieces():
        extent.add(piece)
    return extent.num_bytes


def _check_same_run(
    checkpoints: Path, model: PreTrainedModel, corpus: Corpus, settings: TrainingSettings, arguments: XLTrainingArguments
) -> None:
    """Keeps beside the checkpoints what the run is made of, and refuses to go on with those of another."""
    facts = asdict(settings) | settings.others | model.config.to_diff_dict()
    # These change nothing of what comes out.
    for name in ("save_steps", "others", "transformers_version", "auto_map", "format_version"):
        facts.pop(name, None)
    starts = corpus.document_starts
    documents = None if starts is None else _checksum([torch.tensor(starts)])
    facts |= {"text": [_checksum(corpus.pieces()), documents], "first weights": _checksum(model.parameters())}
    facts = json.loads(json.dumps(facts))  # as they are read again
    path = checkpoints / "run.json"
    if path.is_file() and last_checkpoint(checkpoints, arguments.world_size):
        known = _read_json(path)
        if changed := sorted(name for name in {*facts, *known} if facts.get(name) != known.get(name)):
            raise InputError(
                f"{checkpoints}: holds checkpoints of a run with other {', '.join(changed)}; give what that had, to go on, or "
                "remove the folder, to begin anew"
            )
    elif arguments.process_index == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
        write_json(path, facts)


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, value)
    return value


class _Progress(TrainerCallback):
    """A bar that shows bits per byte of the text, the memory's own loss left out, and ends a run whose loss is lost."""

    def __init__(self, bytes_per_token: float, description: str, is_shown: bool):
        self.bytes_per_token = bytes_per_token
        self.bar = tqdm(desc=description, unit="step", disable=None if is_shown else True)

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar.reset(state.max_steps)
        if not state.is_world_process_zero:
            self.bar.disable = True

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = control.should_log or state.global_step == state.max_steps

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:
            return
        loss = _text_loss(logs)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {state.global_step}; lower the learning rate")
        shown = f"{loss / math.log(2) / self.bytes_per_token:.3f} bits/byte, {logs['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(state.global_step - self.bar.n)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


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
