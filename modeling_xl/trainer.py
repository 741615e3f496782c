"""`XLTrainer`: Transformers' Trainer, carrying the memory of each row from step to step along contiguous streams of text.

Transformers has no path for state between training steps. Here row r of the batch reads one stream, block after block; the
memory it leaves is handed to the next call, detached by the model. Over several processes each has rows of its own, and the
memory of a row never travels.
"""

import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from .cache_xl import XLCache
from .corpus import Corpus
from .data import Block, Blocks, Streams
from .evaluate import carries_memory, evaluate
from .text import InputError, byte_tokenizer, write_json

MEMORY_FOLDER = "memory"  # in a checkpoint, with the number of the process behind it
TRAINER_STATE = "trainer_state.json"  # what Trainer writes last into a checkpoint


@dataclass
class XLTrainingArguments(TrainingArguments):
    """`TrainingArguments`, and what belongs to memory. `per_device_train_batch_size` is the number of streams a process
    reads, `per_device_eval_batch_size` how many of `eval_streams` run at once."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "mem_len_schedule"]

    stream_len: int | None = field(default=None, metadata={"help": "tokens after which memory begins anew (None: a pass)"})
    memory_dropout: float = field(default=0.0, metadata={"help": "probability that a row begins a call with empty memory"})
    mem_len_schedule: dict | str | None = field(
        default=None,
        metadata={"help": "mem_len in training from each of these steps on, {0: 64, 1000: 256} (None: the config's)"},
    )
    eval_streams: int = field(default=1, metadata={"help": "parts of the evaluation text, each from an empty memory"})
    # Transformers' default puts an average in the place of a loss that is not a number, and so hides it.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "leave out losses that are not finite in logs"})

    def __post_init__(self):
        super().__post_init__()
        if self.stream_len is not None and self.stream_len < 1:
            raise ValueError(f"stream_len={self.stream_len} must be at least 1, or None for a pass over the text.")
        if not 0 <= self.memory_dropout < 1:
            raise ValueError(f"memory_dropout={self.memory_dropout} must be a probability, 0 <= p < 1.")
        if self.mem_len_schedule is not None:
            self.mem_len_schedule = _mem_len_schedule(self.mem_len_schedule)
        if self.eval_streams < 1:
            raise ValueError(f"eval_streams={self.eval_streams} must be at least 1.")
        if self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} is not supported: Transformers smooths labels that it "
                "shifts itself, and here a block's last token predicts the next block's first; set it to 0."
            )
        if self.train_sampling_strategy == "group_by_length":
            raise ValueError(
                "train_sampling_strategy='group_by_length' would put the text out of order, which memory needs; leave it out."
            )


def _mem_len_schedule(given: Any) -> dict[int, int]:
    """From each step on which memory length: its steps as integers, for JSON has only text there, and in order."""
    if not isinstance(given, dict):
        raise ValueError(
            f"mem_len_schedule={given!r} must be a dict of steps and memory lengths, such as {{0: 64, 1000: 256}}."
        )
    schedule: dict[int, int] = {}
    for key, mem_len in given.items():
        step = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key
        for name, value in (("step", step), ("memory length", mem_len)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"mem_len_schedule={given!r}: the {name} {value!r} must be an integer >= 0.")
        if step in schedule:
            raise ValueError(f"mem_len_schedule={given!r}: names step {step} twice; leave one out.")
        schedule[step] = mem_len
    if 0 not in schedule:
        raise ValueError(f"mem_len_schedule={given!r} must say how long memory is at the beginning; add step 0.")
    return dict(sorted(schedule.items()))


def _inputs(blocks: list[Block]) -> dict[str, Any]:
    """Of one block, which is a whole batch: what the model is called with, and what the trainer has to know of it."""
    (block,) = blocks
    inputs = block.model_inputs(torch.device("cpu"))
    given = {name: value for name, value in inputs.items() if value is not None}  # Trainer counts the tokens of a mask
    return {**given, "is_last": block.is_last, "num_targets": block.num_targets}


class XLTrainer(Trainer):
    """A Trainer whose `train_dataset` is a text, as tokens [N] or a `Corpus`, read as streams with memory.

    A call covers `bptt_segments + 1` segments, accumulated calls are consecutive, and each pass over the text begins with an
    empty memory. Checkpoints hold the memory too, so that training goes on from one as if it had never stopped, bit for bit.
    `eval_dataset` is another text, tokens or a `Corpus`; its loss is summed over tokens, with a memory of its own that starts
    empty. `tokenizer` (processing_class) says how many bytes tokens stand for (default: bytes).

    A model without bounded memory (plain attention over everything) is trained on blocks that stand alone.

    Raises ValueError for arguments and data sets of other kinds, several GPUs in one process, and activation checkpointing of
    FSDP with dropout; InputError for `segment_len=None`, for processes that do not know of each other, and for a
    `mem_len_schedule` that does not go with the config.
    """

    args: XLTrainingArguments
    control: TrainerControl

    def __init__(self, model=None, args: XLTrainingArguments | None = None, *others: Any, **options: Any):
        if not isinstance(args, XLTrainingArguments):
            raise ValueError(f"args is {type(args).__name__}; XLTrainer needs XLTrainingArguments.")
        tp_size = getattr(model, "tp_size", None) or 1
        if tp_size > 1:
            raise ValueError(
                f"The model is spread over tp_size={tp_size} processes, which must read the same rows; XLTrainer deals rows "
                "out to all processes. Load it without tensor parallelism (FSDP spreads weights too)."
            )
        super().__init__(model, args, *others, **options)
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs in one process would split the rows and not their memory; start one process a GPU: "
                "torchrun --nproc_per_node."
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > args.world_size:
            raise InputError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} processes were started but do not know of each other, and each would "
                "train alone; on CPUs set use_cpu=True"
            )
        config = self.model.config
        is_wrapped = self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.activation_checkpointing
        if is_wrapped and (config.hidden_dropout or config.attention_dropout):
            raise ValueError(
                "fsdp_config's activation_checkpointing=True would draw dropout anew in the backward pass, as Accelerate makes "
                "it, and so give wrong gradients; set activation_checkpointing=True of XLTrainingArguments in its place."
            )
        if self.train_dataset is not None and not isinstance(self.train_dataset, (torch.Tensor, Corpus)):
            raise ValueError(
                f"train_dataset is {type(self.train_dataset).__name__}; XLTrainer reads the tokens [N] of a text, or a Corpus: "
                "Corpus.from_dataset makes one of a dataset."
            )
        if config.segment_len is None:
            raise InputError("the config has segment_len=None (every call is one segment); give a segment length")
        self._carries = carries_memory(config)
        self._check_mem_lens()
        self.num_targets = 0  # targets of this process' rows so far
        self._aux_loss: torch.Tensor | float = 0.0  # what the losses since the last log hold of that of the memory's own
        self._aux_logged_at = 0
        self._memory_bytes = 0  # of this process' memory after the last call that kept one
        self._logged_at = (time.perf_counter(), 0)  # and num_targets then
        self._called_at: int | None = None  # the global step when the model was last called
        self._forget()

    def _check_mem_lens(self) -> None:
        schedule: Any = self.args.mem_len_schedule
        config = self.model.config
        if schedule is None:
            return
        if not (self._carries and config.uses_grid):
            raise InputError(
                f"mem_len_schedule={schedule}: memory_type={config.memory_type!r} has no memory of a length; leave it out"
            )
        for mem_len in schedule.values():
            if mem_len > config.mem_len:
                raise InputError(
                    f"mem_len_schedule={schedule}: {mem_len} must be at most the config's mem_len={config.mem_len}, which the "
                    "model is evaluated and saved with; lower it, or raise the config's"
                )
            try:
                config.check_mem_len(mem_len)
            except ValueError as error:
                raise InputError.about(f"mem_len_schedule={schedule}", error) from error

    def _mem_len_at(self, step: int) -> int | None:
        """What the schedule says of a step, counted from 0; None, the config's, without one."""
        schedule: Any = self.args.mem_len_schedule
        return None if schedule is None else next(schedule[first] for first in reversed(schedule) if first <= step)

    def _forget(self) -> None:
        self._memory: XLCache | None = None
        self._carried = 0  # tokens of each row that the memory comes from

    @property
    def block_len(self) -> int:
        """Columns of a call: gradient reaches through as many segments as the config says."""
        return self.model.config.segment_len * (self.model.config.bptt_segments + 1)

    def get_train_dataloader(self) -> DataLoader:
        """The blocks of this process' streams, in order."""
        size = self.args.per_device_train_batch_size
        streams = Streams(self.train_dataset, size * self.args.world_size, self.block_len)
        first = size * self.args.process_index
        # Not prepared by Accelerate, which would deal blocks out to the processes. One block is one batch; a batch sampler
        # lets Trainer skip what was read before a resumed run without reading it again.
        return DataLoader(
            Blocks(streams, slice(first, first + size)),
            batch_size=1,
            collate_fn=_inputs,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "is_last" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        is_last, num_targets = inputs.pop("is_last"), inputs.pop("num_targets")
        self.num_targets += num_targets
        self._called_at = self.state.global_step
        mem_len = self._mem_len_at(self.state.global_step)
        if self._memory is not None and mem_len not in (None, self._memory.mem_len):
            self._forget()  # what it keeps is of another shape
        self._carried += inputs["input_ids"].shape[1]
        is_last = is_last or (self.args.stream_len is not None and self._carried >= self.args.stream_len)
        if self._memory is not None and self.args.memory_dropout:
            self._memory.reset_rows(torch.rand(self._memory.batch_size) < self.args.memory_dropout)
        if self._memory is None and mem_len is not None:
            self._memory = XLCache(self.model.config, mem_len=mem_len)
        inputs["cache"], inputs["use_cache"] = self._memory, self._carries and not is_last
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._memory = outputs.cache
        if self._memory is not None:
            self._memory_bytes = self._memory.nbytes
        if outputs.aux_loss is not None:
            share = num_targets / num_items_in_batch if num_items_in_batch is not None else 1.0
            self._aux_loss += outputs.aux_loss.detach() * self.model.config.compression_loss_coef * share
        if is_last or not self._carries:
            self._forget()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds to a loss `tokens_per_second`, over all processes and the time since the last one; `memory_bytes`, what the
        memories of all of them hold; `mem_len` of the last step, with a schedule; and `aux_loss`, what of the loss is the
        memory's own, as compression has one."""
        if "loss" in logs and isinstance(self._aux_loss, torch.Tensor):
            steps = self.state.global_step - self._aux_logged_at
            logs["aux_loss"] = float(self.accelerator.reduce(self._aux_loss, "sum")) / max(1, steps)
            self._aux_loss = 0.0
        if "loss" in logs:
            self._aux_logged_at = self.state.global_step
            (begin, before), self._logged_at = self._logged_at, (time.perf_counter(), self.num_targets)
            num_targets = (self.num_targets - before) * self.args.world_size
            logs["tokens_per_second"] = round(num_targets / (self._logged_at[0] - begin), 1)
            if self._carries:
                logs["memory_bytes"] = self._memory_bytes * self.args.world_size
            mem_len = self._mem_len_at(self.state.global_step - 1)
            if mem_len is not None:
                logs["mem_len"] = mem_len
        super().log(logs, start_time)

    def get_decay_parameter_names(self, model) -> list[str]:
        """Weights of two dimensions and more; no norms, biases, or vectors."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss over every token but the first of a text, with `eval_streams`. The memory of training is not touched.

        eval_dataset: tokens [N], a `Corpus`, or a dict of them (None: that of the trainer). Returns `eval_loss` in nats per
        token, `eval_perplexity` per token, `eval_bits_per_byte` and times; the dict's names stand behind the prefix.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("XLTrainer: evaluation requires an eval_dataset, a text as tokens [N] or a Corpus.")
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        result = evaluate(
            self.model,
            dataset,
            self.processing_class or byte_tokenizer(),
            streams=self.args.eval_streams,
            batch_size=min(self.args.per_device_eval_batch_size, self.args.eval_streams),
        )
        names = ("loss", "perplexity", "bits_per_byte")
        metrics = {f"{metric_key_prefix}_{name}": getattr(result, name) for name in names}
        metrics[f"{metric_key_prefix}_runtime"] = round(result.seconds, 4)
        metrics[f"{metric_key_prefix}_tokens_per_second"] = round(result.num_tokens / result.seconds, 1)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """As `Trainer.train`. `True` goes on from the newest checkpoint that is whole: one that a killed run left half
        written is passed over."""
        self._forget()
        self._aux_loss, self._aux_logged_at = 0.0, 0
        self._memory_bytes, self._logged_at = 0, (time.perf_counter(), self.num_targets)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir, self.args.world_size)
            if resume_from_checkpoint is None:
                raise ValueError(f"{self.args.output_dir} holds no whole checkpoint to go on from.")
        elif resume_from_checkpoint and not is_whole(Path(resume_from_checkpoint), self.args.world_size):
            raise ValueError(
                f"{resume_from_checkpoint} is no whole checkpoint of {self.args.world_size} process(es): a run was killed "
                "while it was written, or ran with another number of processes; take an earlier one."
            )
        if resume_from_checkpoint and not self.is_fsdp_enabled:
            state = TrainerState.load_from_json(os.path.join(resume_from_checkpoint, TRAINER_STATE))
            if 0 < self.args.max_steps <= state.global_step:  # Trainer would make one step more
                self._load_from_checkpoint(resume_from_checkpoint)
                self.state = state
                return TrainOutput(state.global_step, 0.0, {})
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer: a folder for `from_pretrained`. Called on every process, also where their parts of the weights go
        into checkpoints by themselves (FSDP with SHARDED_STATE_DICT), and Trainer would write nothing."""
        is_in_parts = self.is_fsdp_enabled and "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type)
        if is_in_parts and not _internal_call:
            self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model, trial) -> None:
        if self._called_at == self.state.global_step:
            # Asked for inside a step, as Transformers does at SIGTERM: memory is ahead of the weights. Done at the step's end.
            self.control.should_save = True
            return
        if self.args.should_save:  # what an earlier run left there would make a half written one look whole, or never whole
            folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            for memory in folder.glob(f"{MEMORY_FOLDER}-*"):
                if int(memory.name.removeprefix(f"{MEMORY_FOLDER}-")) >= self.args.world_size:
                    shutil.rmtree(memory)
        self.accelerator.wait_for_everyone()  # so that none writes while the mark of that checkpoint is there
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Called on every process, before Trainer writes its own state, which so is the mark of a whole checkpoint."""
        super()._save_rng_state(output_dir)
        folder = Path(output_dir) / f"{MEMORY_FOLDER}-{self.args.process_index}"
        if self._memory is not None:
            self._memory.save_pretrained(folder)
        folder.mkdir(parents=True, exist_ok=True)
        position = {
            "carried": self._carried,
            "has_memory": self._memory is not None,
            "memory_bytes": self._memory_bytes,
        }
        write_json(folder / "position.json", position)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        self._aux_logged_at = self.state.global_step
        if checkpoint is None or self.args.ignore_data_skip:  # the latter begins the pass anew
            return
        folder = Path(checkpoint) / f"{MEMORY_FOLDER}-{self.args.process_index}"
        position = json.loads((folder / "position.json").read_bytes())
        self._forget()
        self._carried, self._memory_bytes = position["carried"], position["memory_bytes"]
        if position["has_memory"]:
            self._memory = XLCache.from_pretrained(folder, self.model.config).to(self.args.device)


def is_whole(checkpoint: Path, num_processes: int) -> bool:
    """Whether a checkpoint was written to its end, by so many processes."""
    try:
        json.loads((checkpoint / TRAINER_STATE).read_bytes())
        for number in range(num_processes):
            json.loads((checkpoint / f"{MEMORY_FOLDER}-{number}" / "position.json").read_bytes())
    except (OSError, ValueError):
        return False
    return not (checkpoint / f"{MEMORY_FOLDER}-{num_processes}").exists()


def last_checkpoint(output_dir: str | os.PathLike, num_processes: int = 1) -> str | None:
    """The newest whole checkpoint of a folder."""
    found = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdecimal() and is_whole(path, num_processes):
            found[int(step)] = str(path)
    return found[max(found)] if found else None
