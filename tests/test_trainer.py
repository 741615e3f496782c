"""`XLTrainer`: memory carried from step to step, checkpoints that hold it, resumed and killed runs, several processes."""

import copy
import gc
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import DistributedType, PartialState
from helpers import biggest
from peft import LoraConfig, get_peft_model
from processes import as_processes, end
from torch.distributed.tensor import DTensor
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

from modeling_xl import (
    XLCache,
    XLConfig,
    XLForCausalLM,
    XLForQuestionAnswering,
    XLForSequenceClassification,
    XLForTokenClassification,
)
from modeling_xl.corpus import Corpus
from modeling_xl.data import Streams
from modeling_xl.evaluate import evaluate
from modeling_xl.text import InputError, byte_tokenizer
from modeling_xl.trainer import XLTrainer, XLTrainingArguments, is_whole, last_checkpoint

ROWS, SEGMENT = 3, 8


@pytest.fixture(autouse=True, scope="module")
def cheap_collections():
    """Each run begins with a collection, which else looks at every object of the libraries: most of a small run's time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make_model(seed=0, dtype=torch.float32, **fields) -> XLForCausalLM:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "segment_len": SEGMENT,
        "mem_len": 11,
        "compressed_mem_len": 4,
        "compression_rate": 2,
        "initializer_range": 0.2,  # weights large enough for memory to show in the loss
    }
    kinds = fields.get("memory_type", "recurrence")
    if "linear" in (kinds if isinstance(kinds, list) else [kinds]):
        sizes["clamp_len"] = 6
    torch.manual_seed(seed)
    return XLForCausalLM(XLConfig(**{**sizes, **fields})).to(dtype)


def text(length: int, seed=0) -> torch.Tensor:
    """A walk of steps 1 to 3 around the vocabulary: something that can be learnt, down to log 3 nats a token."""
    steps = torch.randint(1, 4, (length,), generator=torch.Generator().manual_seed(seed))
    return steps.cumsum(0) % 50


def blocks_of(number: int) -> torch.Tensor:
    """A text that ROWS streams read in so many blocks; the last is short, and a token shorter in some rows."""
    return text(ROWS * (SEGMENT * number - 2))


def arguments(path, **settings) -> XLTrainingArguments:
    common = {
        "per_device_train_batch_size": ROWS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return XLTrainingArguments(output_dir=str(path), **{**common, **settings})


def run(path, tokens, resume=None, model=None, fields=None, eval_dataset=None, **settings) -> XLTrainer:
    model = make_model(**(fields or {})) if model is None else model
    trainer = XLTrainer(model, arguments(path, **settings), train_dataset=tokens, eval_dataset=eval_dataset)
    trainer.train(resume)
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trace(trainer, after=0) -> list[dict[str, float]]:
    """What a run logged after a step, without what a clock says."""
    clock = ("runtime", "per_second", "total_flos", "train_loss")
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in clock)}
        for entry in trainer.state.log_history
        if entry["step"] > after and "train_runtime" not in entry
    ]


def same(tensor, other) -> bool:
    """To the bit; of parts that lie on several processes, those here."""
    return torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (tensor, other)))


def assert_same_weights(model, other) -> None:
    found, expected = model.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []


def assert_same_end(trainer, other, after=0) -> None:
    """Weights, optimizer, schedule, losses since then, memory: all equal, bit for bit."""
    assert_same_weights(trainer.model, other.model)
    ours, theirs = (t.optimizer.state_dict()["state"] for t in (trainer, other))
    assert ours.keys() == theirs.keys() and ours
    for number, state in ours.items():
        assert all(same(value, theirs[number][name]) for name, value in state.items()), number
    assert trainer.lr_scheduler.get_last_lr() == other.lr_scheduler.get_last_lr()
    assert trace(trainer, after) == trace(other, after) != []
    assert (trainer._memory is None) == (other._memory is None) and trainer._carried == other._carried
    if trainer._memory is not None:
        assert torch.equal(trainer._memory.lengths, other._memory.lengths)
        tensors = (torch.cat([t.flatten() for s in t._memory.states for t in s.tensors()]) for t in (trainer, other))
        assert torch.equal(*tensors)


class Calls:
    """Fills up with what the model is called with."""

    def __init__(self, model):
        self.kwargs: list[dict] = []
        self.lengths: list[list[int]] = []  # tokens that the memory of each row comes from
        self.mem_lens: list[int | None] = []

        def before_call(_, args, kwargs):
            self.kwargs.append(kwargs)
            cache = kwargs["cache"]
            self.mem_lens.append(None if cache is None else cache.mem_len)
            is_empty = cache is None or cache.batch_size == -1
            self.lengths.append([0] * len(kwargs["input_ids"]) if is_empty else cache.lengths.tolist())

        model.register_forward_pre_hook(before_call, with_kwargs=True)

    @property
    def widths(self) -> list[int]:
        return [kwargs["input_ids"].shape[1] for kwargs in self.kwargs]


DROPOUT = {"hidden_dropout": 0.1, "embedding_dropout": 0.1}
# (number of blocks in a pass, fields of the config, settings); all with dropout and memory dropout, 20 steps, resumed at 10.
RESUMED = {
    "inside_a_pass": (40, {}, {}),
    "end_of_a_pass": (10, {}, {}),
    "end_of_the_second_pass": (5, {}, {}),
    "third_pass": (4, {}, {}),
    "pass_of_one_block": (1, {}, {}),
    "accumulation_2": (50, {}, {"gradient_accumulation_steps": 2}),
    "accumulation_2_odd_passes": (7, {}, {"gradient_accumulation_steps": 2}),  # the last step of a pass has one call
    "accumulation_2_end_of_a_pass": (20, {}, {"gradient_accumulation_steps": 2}),
    "attention_dropout": (13, {"attention_dropout": 0.1}, {}),
    "checkpointing": (13, {}, {"activation_checkpointing": True}),
    "checkpointing_accumulation_2": (13, {}, {"activation_checkpointing": True, "gradient_accumulation_steps": 2}),
    "workers_2": (13, {}, {"dataloader_num_workers": 2}),
    "workers_2_accumulation_2": (13, {}, {"dataloader_num_workers": 2, "gradient_accumulation_steps": 2}),
    "stream_len": (13, {}, {"stream_len": 4 * SEGMENT}),
    "stream_len_begins_anew_there": (20, {}, {"stream_len": 5 * SEGMENT}),
    "stream_len_accumulation_2": (13, {}, {"stream_len": 3 * SEGMENT, "gradient_accumulation_steps": 2}),
    "compressive": (13, {"memory_type": "compressive"}, {}),
    "compressive_accumulation_2": (13, {"memory_type": "compressive"}, {"gradient_accumulation_steps": 2}),
    "linear": (13, {"memory_type": "linear"}, {}),
    "linear_accumulation_2": (13, {"memory_type": "linear"}, {"gradient_accumulation_steps": 2}),
    "mixture": (13, {"memory_type": ["compressive", "linear", "recurrence"], "num_hidden_layers": 3}, {}),
    "none": (13, {"memory_type": "none"}, {"memory_dropout": 0.0}),
    "window_of_none": (13, {"memory_type": "none", "attention_window": 13}, {}),
    "bptt": (13, {"bptt_segments": 1}, {}),
    "sinks_zeros": (13, {"num_sink_tokens": 2, "initial_memory": "zeros"}, {}),
    "bf16": (13, {}, {"bf16": True}),
    "schedule_changes_there": (40, {}, {"mem_len_schedule": {0: 5, 10: 9}}),
    "schedule_changes_before_and_after": (13, {}, {"mem_len_schedule": {0: 0, 7: 5, 14: 11}, "stream_len": 3 * SEGMENT}),
    "schedule_changes_there_accumulation_2": (
        13,
        {"memory_type": "compressive"},
        {"mem_len_schedule": {0: 8, 10: 11}, "gradient_accumulation_steps": 2},
    ),
    "evaluation": (13, {}, {"eval_strategy": "steps", "eval_steps": 3, "eval_streams": 2}),
}


class TestResume:
    @pytest.mark.parametrize("case", RESUMED)
    def test_ten_and_ten_steps_are_twenty(self, case, tmp_path):
        blocks, fields, settings = RESUMED[case]
        fields = {**DROPOUT, **fields}
        settings = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10, "memory_dropout": 0.1, **settings}
        evaluated = text(70, seed=1) if "eval_strategy" in settings else None
        whole = run(tmp_path, blocks_of(blocks), fields=fields, eval_dataset=evaluated, **settings)
        shutil.rmtree(tmp_path / "checkpoint-20")
        # Other weights at first, so that nothing is equal by chance; `True` and a path by turns.
        resume = True if len(case) % 2 else str(tmp_path / "checkpoint-10")
        model = make_model(seed=5, **fields)
        again = run(tmp_path, blocks_of(blocks), resume, model, eval_dataset=evaluated, **settings)
        assert len(losses(whole)) == len(losses(again)) == 20
        assert_same_end(again, whole, after=10)

    def test_every_step_can_be_resumed_at(self, tmp_path):
        """Passes of 5 blocks, 2 to a step, memory anew after 3 blocks: steps end at every kind of place."""
        settings = {"max_steps": 8, "save_strategy": "steps", "gradient_accumulation_steps": 2, "stream_len": 3 * SEGMENT}
        settings |= {"memory_dropout": 0.2, "mem_len_schedule": {0: 11, 4: 0, 6: 3}}
        whole = run(tmp_path / "a", blocks_of(5), fields=DROPOUT, save_steps=1, **settings)
        for step in range(1, 8):
            model = make_model(seed=step, **DROPOUT)
            resume = tmp_path / "a" / f"checkpoint-{step}"
            again = run(tmp_path / "b", blocks_of(5), str(resume), model, save_steps=100, **settings)
            assert_same_end(again, whole, after=step)

    def test_a_resumed_run_is_resumed(self, tmp_path):
        settings = {"save_strategy": "steps", "save_steps": 3, "memory_dropout": 0.1}
        # A constant rate, for a schedule depends on the number of steps.
        settings |= {"lr_scheduler_type": "constant"}
        whole = run(tmp_path / "a", blocks_of(5), fields=DROPOUT, max_steps=12, **settings)
        run(tmp_path / "b", blocks_of(5), fields=DROPOUT, max_steps=6, **settings)
        run(tmp_path / "b", blocks_of(5), True, fields=DROPOUT, max_steps=9, **settings)
        again = run(tmp_path / "b", blocks_of(5), True, fields=DROPOUT, max_steps=12, **settings)
        assert_same_end(again, whole)

    def test_a_trainer_trains_again_from_an_empty_memory(self, tmp_path):
        """A rate of 0, so that the second run must log what the first did."""
        fields = {"memory_type": "compressive"}
        trainer = run(tmp_path, blocks_of(9), fields=fields, max_steps=6, logging_steps=2, learning_rate=0.0)
        first = trace(trainer)
        calls = Calls(trainer.model)
        trainer.train()
        assert calls.lengths == [[SEGMENT * n] * ROWS for n in range(6)]
        assert trace(trainer) == first and all(entry["aux_loss"] > 0 for entry in first[1:])

    def test_a_run_that_skips_no_data_begins_with_an_empty_memory(self, tmp_path):
        """`ignore_data_skip` begins the pass anew, so the memory of its middle is not what comes before."""
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        run(tmp_path, blocks_of(9), **settings)
        model = make_model()
        calls = Calls(model)
        run(tmp_path, blocks_of(9), str(tmp_path / "checkpoint-3"), model, ignore_data_skip=True, **settings)
        assert torch.equal(calls.kwargs[0]["input_ids"], Streams(blocks_of(9), ROWS, SEGMENT).block(0).input_ids)
        assert calls.lengths[0] == [0] * ROWS

    def test_memory_matters_to_what_follows(self, tmp_path):
        """Were the memory not in the checkpoint, the tests above would see it."""
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        whole = run(tmp_path, blocks_of(9), **settings)
        place = tmp_path / "checkpoint-3" / "memory-0" / "position.json"
        position = json.loads(place.read_text())
        assert (position["carried"], position["has_memory"]) == (3 * SEGMENT, True)
        place.write_text(json.dumps({**position, "has_memory": False}))
        again = run(tmp_path, blocks_of(9), str(tmp_path / "checkpoint-3"), **settings)
        assert abs(losses(again)[3] - losses(whole)[3]) > 1e-4

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_aux_loss_in_the_log_is_a_mean_over_steps(self, accumulation, tmp_path):
        """Logged every 3 steps: the mean of what is logged every step, also of a run resumed in between."""
        settings = {"max_steps": 9, "gradient_accumulation_steps": accumulation, "save_strategy": "steps", "save_steps": 6}
        fields = {"memory_type": "compressive", "compression_loss_coef": 0.5}
        means = []
        for every in (1, 3):
            trainer = run(tmp_path, blocks_of(30), fields=fields, logging_steps=every, **settings)
            means.append([entry["aux_loss"] for entry in trainer.state.log_history if "aux_loss" in entry])
        expected = [sum(means[0][i : i + 3]) / 3 for i in (0, 3, 6)]
        assert means[1] == pytest.approx(expected, rel=1e-6) and min(means[1]) > 0  # float32 sums
        again = run(tmp_path, blocks_of(30), str(tmp_path / "checkpoint-6"), fields=fields, logging_steps=3, **settings)
        assert trace(again, after=6) == trace(trainer, after=6)


def by_hand(model, tokens, steps, accumulation, stream_len=None, clip=1.0, schedule=None):
    """What XLTrainer is to do, in a loop: (loss of each step, aux loss of each step)."""
    mem_len = None
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    found, aux = [], []
    while True:
        cache, carried = None, 0
        blocks = list(Streams(tokens, ROWS, SEGMENT * (model.config.bptt_segments + 1)).blocks())
        for first in range(0, len(blocks), accumulation):
            chosen = blocks[first : first + accumulation]
            num_targets = sum(block.num_targets for block in chosen)
            found.append(0.0)
            aux.append(0.0)
            if schedule and len(found) - 1 in schedule:
                mem_len, cache, carried = schedule[len(found) - 1], None, 0
            for block in chosen:
                if cache is None:
                    cache = XLCache(model.config, mem_len=mem_len)
                carried += block.input_ids.shape[1]
                output = model.train()(block.input_ids, attention_mask=block.attention_mask, cache=cache)
                cache = output.cache
                if stream_len is not None and carried >= stream_len:
                    cache, carried = None, 0
                loss = F.cross_entropy(output.logits.flatten(0, 1), block.targets.flatten(), reduction="sum") / num_targets
                if output.aux_loss is not None:
                    own = output.aux_loss * model.config.compression_loss_coef * block.num_targets / num_targets
                    loss = loss + own
                    aux[-1] += float(own.detach())
                loss.backward()
                found[-1] += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if len(found) == steps:
                return found, aux


class TestAgainstALoop:
    @pytest.mark.parametrize("accumulation", [1, 2])
    @pytest.mark.parametrize(
        "fields",
        [{}, {"bptt_segments": 1}, {"memory_type": "compressive"}, {"memory_type": "linear"}, {"num_sink_tokens": 2}],
        ids=str,
    )
    def test_losses_and_weights_are_those_of_a_loop(self, fields, accumulation, tmp_path):
        """Two passes and more, the last block of each uneven. float64, to 1e-10; what is logged is summed in float32."""
        tokens, clip = blocks_of(7), 0.3  # below most norms, so that it is seen
        model, other = (make_model(dtype=torch.float64, **fields) for _ in range(2))
        expected, aux = by_hand(other, tokens, 12, accumulation, clip=clip)
        settings = {"weight_decay": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": clip, "max_steps": 12}
        trainer = run(tmp_path, tokens, model=model, gradient_accumulation_steps=accumulation, **settings)
        assert losses(trainer) == pytest.approx(expected, rel=1e-6)
        found = [entry["aux_loss"] for entry in trainer.state.log_history if "aux_loss" in entry]
        assert found == pytest.approx(aux if fields.get("memory_type") == "compressive" else [], rel=1e-6, abs=1e-9)
        for (name, parameter), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
            assert biggest(parameter, wanted) < 1e-10, name

    @pytest.mark.parametrize(
        ("fields", "schedule"),
        [({}, {0: 0, 3: 5, 7: 11}), ({"bptt_segments": 1}, {0: 6, 4: 0}), ({"memory_type": "compressive"}, {0: 8, 5: 10})],
        ids=str,
    )
    def test_memory_of_scheduled_lengths(self, fields, schedule, tmp_path):
        """Two calls a step and two passes; where memory's length changes, it begins anew. To 1e-9: the gradient of the
        compression is small, and Adam divides by it."""
        model, other = (make_model(dtype=torch.float64, **fields) for _ in range(2))
        tokens = blocks_of(18)
        expected, _ = by_hand(other, tokens, 10, 2, schedule=schedule)
        settings = {"weight_decay": 0.1, "lr_scheduler_type": "constant", "max_steps": 10, "gradient_accumulation_steps": 2}
        trainer = run(tmp_path, tokens, model=model, mem_len_schedule=schedule, **settings)
        assert losses(trainer) == pytest.approx(expected, rel=1e-6)
        for (name, parameter), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
            assert biggest(parameter, wanted) < 1e-9, name

    @pytest.mark.parametrize("stream_len", [20, 24])  # memory begins anew with a block: 20 tokens are 3 blocks too
    def test_streams_that_begin_anew(self, stream_len, tmp_path):
        tokens = blocks_of(8)
        model, other = (make_model(dtype=torch.float64) for _ in range(2))
        expected, _ = by_hand(other, tokens, 10, 1, stream_len)
        settings = {"weight_decay": 0.1, "lr_scheduler_type": "constant", "max_steps": 10, "stream_len": stream_len}
        assert losses(run(tmp_path, tokens, model=model, **settings)) == pytest.approx(expected, rel=1e-6)

    def test_accumulated_calls_are_one_step(self, tmp_path):
        """Two calls of a segment, accumulated: the gradient is that of both sums, over all their targets."""
        tokens = text(ROWS * SEGMENT * 2 - 1)
        model, other = (make_model(dtype=torch.float64) for _ in range(2))
        calls = Calls(model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        settings = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}
        run(tmp_path, tokens, model=model, gradient_accumulation_steps=2, **settings)
        first, second = Streams(tokens, ROWS, SEGMENT).blocks()
        assert [int(kwargs["num_items_in_batch"]) for kwargs in calls.kwargs] == [len(tokens) - 1] * 2
        assert not calls.kwargs[1]["attention_mask"].all() and second.num_targets < first.num_targets
        cache, total = None, 0.0
        for block in (first, second):
            output = other.train()(block.input_ids, attention_mask=block.attention_mask, cache=cache)
            cache = output.cache
            total = total + F.cross_entropy(output.logits.flatten(0, 1), block.targets.flatten(), reduction="sum")
        (total / (len(tokens) - 1)).backward()
        for (name, parameter), like in zip(model.named_parameters(), other.parameters(), strict=True):
            assert biggest(before[name] - parameter, 1e-2 * like.grad) < 1e-12, name

    def test_a_loss_that_is_no_number_is_shown(self, tmp_path):
        """Transformers' filter puts an average there."""
        shown = []
        for settings in ({}, {"logging_nan_inf_filter": True}):
            model = make_model()
            with torch.no_grad():
                model.get_input_embeddings().weight.fill_(math.nan)
            shown += losses(run(tmp_path, blocks_of(3), model=model, max_steps=1, **settings))
        assert math.isnan(shown[0]) and shown[1] == 0


IN_FIVE = {"eval_streams": 5, "per_device_eval_batch_size": 2}  # batches of 2, 2 and 1 streams


class TestEvaluation:
    @pytest.mark.parametrize(
        "fields", [{}, {"memory_type": "compressive"}, {"memory_type": "linear"}, {"memory_type": "none"}], ids=str
    )
    def test_training_does_not_notice(self, fields, tmp_path):
        """Evaluated after every step, before the first, and never: the same bits, and the numbers of `evaluate`."""
        held_out, common = text(103, seed=1), {"max_steps": 12, "memory_dropout": 0.1, "gradient_accumulation_steps": 2}
        without = run(tmp_path, blocks_of(9), fields={**DROPOUT, **fields}, **common)
        often = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
        trainer = run(tmp_path, blocks_of(9), fields={**DROPOUT, **fields}, eval_dataset=held_out, **common, **often, **IN_FIVE)
        assert_same_weights(trainer.model, without.model)
        assert losses(trainer) == losses(without)
        shown = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        assert [entry["step"] for entry in shown] == list(range(13))
        result = evaluate(trainer.model, held_out, streams=5, batch_size=2)
        for name in ("loss", "perplexity", "bits_per_byte"):
            assert shown[-1][f"eval_{name}"] == getattr(result, name), name

    def test_loss_is_a_mean_over_tokens(self, tmp_path):
        """Each stream in one call; a mean over batches or streams would weigh the shorter ones more."""
        held_out = text(104, seed=1)
        trainer = run(tmp_path, blocks_of(4), max_steps=2, eval_dataset=held_out, **IN_FIVE)
        streams = Streams(held_out, 5, 1000)
        nats = 0.0
        with torch.no_grad():
            for row in range(5):
                (block,) = streams.blocks(slice(row, row + 1))
                nats += float(
                    F.cross_entropy(trainer.model.eval()(block.input_ids).logits[0], block.targets[0], reduction="sum")
                )
        found = trainer.evaluate()
        assert sorted(map(int, streams.lengths)) == [20, 20, 21, 21, 21]
        assert found["eval_loss"] == pytest.approx(nats / 103, rel=1e-5)  # float32, in other batches
        assert found["eval_perplexity"] == pytest.approx(math.exp(nats / 103), rel=1e-4)
        other = text(50, seed=2)
        found = trainer.evaluate(other, metric_key_prefix="test")["test_loss"]
        assert found == evaluate(trainer.model, other, streams=5, batch_size=2).loss

    def test_several_texts_by_name(self, tmp_path):
        texts = {"short": text(40, seed=1), "long": text(170, seed=2)}
        trainer = run(tmp_path, blocks_of(4), max_steps=2, eval_dataset=texts, eval_strategy="epoch")
        entries = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
        for name, tokens in texts.items():
            assert entries[f"eval_{name}_loss"] == evaluate(trainer.model, tokens).loss

    def test_a_loss_is_logged_with_speed_and_memory(self, tmp_path):
        trainer = run(tmp_path, blocks_of(4), max_steps=4, logging_steps=2)
        first, second = (entry for entry in trainer.state.log_history if "loss" in entry)
        assert first["tokens_per_second"] > 0 and second["tokens_per_second"] > 0
        model, cache = make_model(), None
        for inputs in list(trainer.get_train_dataloader())[:-1]:  # the last call of a pass keeps no memory
            cache = model(input_ids=inputs["input_ids"], cache=cache, use_cache=True).cache
        assert second["memory_bytes"] == cache.nbytes > 0

    def test_tokenizer_says_what_a_byte_is(self, tmp_path):
        """Ids 0 to 2 are special and stand for no byte."""
        tokens = torch.tensor([1, 7, 8, 0, 9, 2, 30, 31, 32])
        model = make_model()
        settings = arguments(tmp_path, eval_streams=1)
        trainer = XLTrainer(model, settings, train_dataset=tokens, eval_dataset=tokens, processing_class=byte_tokenizer())
        found = trainer.evaluate()
        assert found["eval_bits_per_byte"] == pytest.approx(found["eval_loss"] * 8 / math.log(2) / 6)

    def test_best_model_is_loaded_at_the_end(self, tmp_path):
        """The rate is so large that the loss rises from the first evaluation on."""
        settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 8}
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
        settings |= {"learning_rate": 1.0, "lr_scheduler_type": "constant"}
        held_out = text(90, seed=1)
        trainer = run(tmp_path, blocks_of(9), eval_dataset=held_out, **settings)
        shown = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        best = min(shown, key=shown.get)
        assert best < 8  # else nothing is tested
        assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
        assert trainer.state.best_metric == shown[best] == evaluate(trainer.model, held_out).loss
        assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{best}"]

    def test_without_a_text_it_says_so(self, tmp_path):
        with pytest.raises(ValueError, match="requires an eval_dataset"):
            run(tmp_path, blocks_of(2), max_steps=1).evaluate()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with whole checkpoints at steps 2, 4 and 6 of a run on 9 blocks, to be copied."""
    folder = tmp_path_factory.mktemp("run")
    run(folder, blocks_of(9), max_steps=6, save_strategy="steps", save_steps=2)
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "no_trainer_state": lambda folder: (folder / "trainer_state.json").unlink(),
    "truncated_trainer_state": lambda folder: truncate(folder / "trainer_state.json"),
    "empty_trainer_state": lambda folder: (folder / "trainer_state.json").write_text(""),
    "no_position": lambda folder: (folder / "memory-0" / "position.json").unlink(),
    "truncated_position": lambda folder: truncate(folder / "memory-0" / "position.json"),
    "no_memory_folder": lambda folder: shutil.rmtree(folder / "memory-0"),
    "of_two_processes": lambda folder: shutil.copytree(folder / "memory-0", folder / "memory-1"),
    "empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


GOES_ON = {"max_steps": 8, "save_strategy": "steps", "save_steps": 100}


class TestCheckpoints:
    @pytest.fixture
    def folder(self, checkpoints, tmp_path):
        return shutil.copytree(checkpoints, tmp_path / "run")

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_one_that_is_not_whole_is_passed_over(self, folder, damage):
        assert last_checkpoint(folder) == str(folder / "checkpoint-6")
        DAMAGES[damage](folder / "checkpoint-6")
        assert last_checkpoint(folder) == str(folder / "checkpoint-4")
        with pytest.raises(ValueError, match=r"checkpoint-6 is no whole checkpoint of 1 process"):
            run(folder, blocks_of(9), str(folder / "checkpoint-6"), **GOES_ON)
        model = make_model()
        calls = Calls(model)
        run(folder, blocks_of(9), True, model, **GOES_ON)
        assert calls.lengths == [[SEGMENT * n] * ROWS for n in range(4, 8)]

    def test_none_that_is_whole(self, folder):
        for step in (2, 4, 6):
            DAMAGES["no_position"](folder / f"checkpoint-{step}")
        for place in (folder, folder / "nowhere"):
            with pytest.raises(ValueError, match="no whole checkpoint to go on from"):
                run(place, blocks_of(9), True, **GOES_ON)

    @pytest.mark.parametrize("resume", [True, "path"])
    def test_a_memory_that_does_not_load_is_named(self, folder, resume):
        truncate(folder / "checkpoint-6" / "memory-0" / "cache.safetensors")
        with pytest.raises(ValueError, match=r"checkpoint-6.memory-0 does not hold a whole cache"):
            run(folder, blocks_of(9), resume if resume is True else str(folder / "checkpoint-6"), **GOES_ON)

    def test_a_memory_of_another_model_is_refused(self, folder):
        with pytest.raises(ValueError, match="do not fit: initial_memory"):
            run(folder, blocks_of(9), True, fields={"initial_memory": "zeros"}, **GOES_ON)

    def test_newest_is_by_number(self, tmp_path, folder):
        os.rename(folder / "checkpoint-6", folder / "checkpoint-10")
        (folder / "checkpoint-final").mkdir()
        (folder / "checkpoint-99").write_text("a file")
        assert last_checkpoint(folder) == str(folder / "checkpoint-10")

    def test_number_of_processes_counts(self, folder):
        whole = folder / "checkpoint-6"
        assert [is_whole(whole, n) for n in (1, 2)] == [True, False]
        DAMAGES["of_two_processes"](whole)
        assert [is_whole(whole, n) for n in (1, 2, 3)] == [False, True, False]

    def test_model_in_it_loads_alone(self, folder):
        trainer = run(folder, blocks_of(9), str(folder / "checkpoint-4"), **{**GOES_ON, "max_steps": 6})
        loaded = XLForCausalLM.from_pretrained(folder / "checkpoint-6")
        assert_same_weights(loaded, trainer.model)
        assert loaded.config.mem_len == 11
        with torch.no_grad():
            ids = blocks_of(9)[None, :30]
            assert torch.equal(loaded.eval()(ids).logits, trainer.model.eval()(ids).logits)

    def test_only_the_newest_is_kept(self, tmp_path):
        trainer = run(tmp_path, blocks_of(9), max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=1)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]
        again = run(tmp_path, blocks_of(9), True, **GOES_ON)
        assert again.state.global_step == 8 and trainer.state.global_step == 6

    def test_without_memory_it_is_none_to_resume_from(self, tmp_path):
        run(tmp_path, blocks_of(9), max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True)
        with pytest.raises(ValueError, match="no whole checkpoint"):
            run(tmp_path, blocks_of(9), str(tmp_path / "checkpoint-2"), **GOES_ON)

    def test_no_pickle_is_read_by_this_package(self, folder, monkeypatch):
        """Transformers reads its own states with `weights_only`; the memory is JSON and safetensors."""
        load, callers = torch.load, []

        def watched(*args, **kwargs):
            callers.append((Path(sys._getframe(1).f_code.co_filename).parent.name, kwargs.get("weights_only")))
            return load(*args, **kwargs)

        monkeypatch.setattr(torch, "load", watched)
        run(folder, blocks_of(9), True, **GOES_ON)
        assert set(callers) == {("transformers", True)}
        names = {path.name for path in (folder / "checkpoint-6" / "memory-0").iterdir()}
        assert names == {"cache.json", "cache.safetensors", "position.json"}

    @pytest.mark.parametrize("stale", ["whole", "of_two_processes"])
    def test_what_an_earlier_run_left_does_not_make_a_half_one_whole(self, folder, stale, monkeypatch):
        """A run from scratch in the same folder, stopped while it writes its checkpoint over an older one."""
        if stale == "of_two_processes":
            DAMAGES[stale](folder / "checkpoint-2")
        settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
        with monkeypatch.context() as patch:
            patch.setattr(XLTrainer, "_save_optimizer_and_scheduler", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run(folder, blocks_of(9), model=make_model(seed=3), **settings)
        assert not is_whole(folder / "checkpoint-2", 1)
        run(folder, blocks_of(9), model=make_model(seed=3), **settings)
        assert is_whole(folder / "checkpoint-2", 1)

    def test_sigterm_checkpoint_is_of_one_moment(self, tmp_path):
        """Transformers can write a checkpoint at SIGTERM, also between a step's calls and the step; it resumes exactly."""
        common = {"max_steps": 8, "save_strategy": "steps", "save_steps": 100, "memory_dropout": 0.2}
        whole = run(tmp_path / "a", blocks_of(9), fields=DROPOUT, **common)

        class Signal(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 4:
                    manager.is_checkpoint_requested = True  # what the handler sets, after this step's calls began

        trainer = XLTrainer(
            make_model(**DROPOUT), arguments(tmp_path / "b", enable_jit_checkpoint=True, **common), train_dataset=blocks_of(9)
        )
        before = signal.getsignal(signal.SIGTERM)
        try:
            manager = next(c.jit_manager for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
            trainer.add_callback(Signal())
            trainer.train()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert trainer.state.global_step < 8
        again = run(tmp_path / "b", blocks_of(9), True, fields=DROPOUT, **common)
        assert_same_weights(again.model, whole.model)


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 is not supported"),
            ({"train_sampling_strategy": "group_by_length"}, "out of order, which memory needs"),
            ({"memory_dropout": 1.0}, "memory_dropout=1.0 must be a probability"),
            ({"memory_dropout": -0.1}, "memory_dropout=-0.1 must be a probability"),
            ({"stream_len": 0}, "stream_len=0 must be at least 1"),
            ({"eval_streams": 0}, "eval_streams=0 must be at least 1"),
            ({"mem_len_schedule": 64}, "mem_len_schedule=64 must be a dict"),
            ({"mem_len_schedule": {}}, r"mem_len_schedule=\{\} must say .* add step 0"),
            ({"mem_len_schedule": {"3": 4}}, "must say how long memory is at the beginning; add step 0"),
            ({"mem_len_schedule": {0: 1, "0": 2}}, "names step 0 twice"),
            ({"mem_len_schedule": {0: 1, -2: 2}}, "the step -2 must be an integer >= 0"),
            ({"mem_len_schedule": {0: 1, "x": 2}}, "the step 'x' must be an integer >= 0"),
            ({"mem_len_schedule": {0: 1, 2.0: 2}}, "the step 2.0 must be an integer >= 0"),
            ({"mem_len_schedule": {0: True}}, "the memory length True must be an integer >= 0"),
            ({"mem_len_schedule": {0: 1.5}}, "the memory length 1.5 must be an integer >= 0"),
        ],
        ids=str,
    )
    def test_settings(self, settings, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            arguments(tmp_path, **settings)

    def test_arguments_of_another_class(self, tmp_path):
        others = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
        with pytest.raises(ValueError, match="args is TrainingArguments; XLTrainer needs XLTrainingArguments"):
            XLTrainer(make_model(), others, train_dataset=blocks_of(2))
        with pytest.raises(ValueError, match="args is NoneType"):
            XLTrainer(make_model())

    def test_a_model_without_segments(self, tmp_path):
        with pytest.raises(InputError, match="segment_len=None"):
            XLTrainer(make_model(segment_len=None), arguments(tmp_path), train_dataset=blocks_of(2))

    @pytest.mark.parametrize(
        ("fields", "schedule", "message"),
        [
            ({}, {0: 4, 6: 12}, "12 must be at most the config's mem_len=11"),
            ({"memory_type": "compressive"}, {0: 7}, "mem_len=7 must be at least segment_len=8"),
            ({"memory_type": ["recurrence", "compressive"]}, {0: 11, 9: 0}, "mem_len=0 must be at least segment_len=8"),
            ({"memory_type": "none"}, {0: 4}, "memory_type='none' has no memory of a length; leave it out"),
            ({"memory_type": "linear"}, {0: 4}, "memory_type='linear' has no memory of a length"),
            ({"memory_type": ["none", "recurrence"]}, {0: 4}, r"memory_type=\['none', 'recurrence'\] has no memory"),
        ],
        ids=str,
    )
    def test_lengths_that_the_model_cannot_have(self, fields, schedule, message, tmp_path):
        with pytest.raises(InputError, match=message) as caught:
            XLTrainer(make_model(**fields), arguments(tmp_path, mem_len_schedule=schedule), train_dataset=blocks_of(2))
        assert str(caught.value).startswith(f"mem_len_schedule={schedule}: ")

    def test_processes_that_do_not_know_of_each_other(self, tmp_path, monkeypatch):
        """As torchrun starts them on CPUs, where Accelerate joins them only if it is told to."""
        settings = arguments(tmp_path)
        settings.device  # noqa: B018 (looks at the environment once)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(InputError, match=r"WORLD_SIZE=2 .* would train alone; on CPUs set use_cpu=True"):
            XLTrainer(make_model(), settings, train_dataset=blocks_of(2))

    @pytest.mark.parametrize("settings", [{"max_steps": 2}, {"num_train_epochs": 1}], ids=str)
    def test_a_text_too_short(self, settings, tmp_path):
        with pytest.raises(InputError, match="3 tokens are too few for 3 stream"):
            run(tmp_path, text(ROWS), **settings)
        assert run(tmp_path, text(ROWS + 1), **settings).state.global_step > 0

    def test_tokens_of_another_shape(self, tmp_path):
        with pytest.raises(InputError, match="must be one sequence"):
            run(tmp_path, text(64).view(2, -1), max_steps=2)


class TestCurriculum:
    def test_memory_grows_along_the_text_and_is_fresh_at_each_pass(self, tmp_path):
        model = make_model()
        calls = Calls(model)
        trainer = run(tmp_path, blocks_of(5), model=model, num_train_epochs=2)
        assert calls.lengths == [[SEGMENT * n] * ROWS for n in [0, 1, 2, 3, 4] * 2]
        assert calls.widths == [SEGMENT, SEGMENT, SEGMENT, SEGMENT, SEGMENT - 2] * 2
        assert trainer.num_targets == 2 * (len(blocks_of(5)) - 1)
        read = torch.cat([kwargs["input_ids"] for kwargs in calls.kwargs[:5]], 1)
        assert torch.equal(read[0], blocks_of(5)[: read.shape[1]])

    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_memory_of_scheduled_lengths(self, accumulation, tmp_path):
        """Its length changes with a step, also where calls are accumulated, and it begins anew then; so do streams."""
        model = make_model()
        calls = Calls(model)
        settings = {"stream_len": 5 * SEGMENT, "max_steps": 6, "logging_steps": 2, "gradient_accumulation_steps": accumulation}
        trainer = run(tmp_path, blocks_of(30), model=model, mem_len_schedule={"4": 7, "0": 0, "2": 0, "99": 1}, **settings)
        change = 4 * accumulation
        assert calls.mem_lens == [0] * change + [7] * 2 * accumulation
        assert [row[0] // SEGMENT for row in calls.lengths] == [n % 5 for n in [*range(change), *range(2 * accumulation)]]
        assert [entry["mem_len"] for entry in trainer.state.log_history if "loss" in entry] == [0, 0, 7]
        assert model.config.mem_len == 11
        assert {entry.get("mem_len") for entry in trace(run(tmp_path, blocks_of(3), max_steps=2))} == {None}

    @pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"stream_len": 3 * SEGMENT}], ids=str)
    @pytest.mark.parametrize(
        ("fields", "schedule"), [({}, {0: 3, 5: 11}), ({"memory_type": "compressive"}, {0: 11, 5: 8})], ids=str
    )
    def test_a_schedule_is_a_config_that_changes(self, fields, schedule, settings, tmp_path):
        """To the bit, with dropout of both kinds."""

        class Changed(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step in schedule:
                    changed.model.config.mem_len = schedule[state.global_step]
                    changed._forget()

        settings = {**settings, "max_steps": 9, "memory_dropout": 0.2}
        model = make_model(**DROPOUT, **fields)
        changed = XLTrainer(model, arguments(tmp_path, **settings), train_dataset=blocks_of(13), callbacks=[Changed()])
        changed.train()
        scheduled = run(tmp_path, blocks_of(13), fields={**DROPOUT, **fields}, mem_len_schedule=schedule, **settings)
        assert losses(scheduled) == losses(changed)
        assert_same_weights(scheduled.model, changed.model)

    def test_a_schedule_from_the_command_line(self):
        (args,) = HfArgumentParser(XLTrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", "unused", "--mem_len_schedule", '{"10": 64, "0": 0}']
        )
        assert list(args.mem_len_schedule.items()) == [(0, 0), (10, 64)]
        assert json.loads(args.to_json_string())["mem_len_schedule"] == {"0": 0, "10": 64}

    @pytest.mark.parametrize("accumulation", [1, 2, 3])
    def test_streams_begin_anew(self, accumulation, tmp_path):
        """After 20 tokens, so in the call that reaches them, 3 segments long; whatever is accumulated."""
        model = make_model()
        calls = Calls(model)
        run(tmp_path, blocks_of(8), model=model, stream_len=20, num_train_epochs=2, gradient_accumulation_steps=accumulation)
        assert [row[0] // SEGMENT for row in calls.lengths] == [0, 1, 2, 0, 1, 2, 0, 1] * 2

    def test_rows_begin_anew_at_random(self, tmp_path):
        """Each row for itself: 149 calls of 3 rows, p = 0.3; 0.08 is 3.7 standard deviations, and the seed is fixed."""
        model = make_model()
        calls = Calls(model)
        run(tmp_path, blocks_of(152), model=model, memory_dropout=0.3, max_steps=150)
        lengths = torch.tensor(calls.lengths)
        assert not lengths[0].any()
        emptied = lengths[1:] == 0
        assert abs(float(emptied.double().mean()) - 0.3) < 0.08
        assert (emptied.any(1) & ~emptied.all(1)).any()
        assert ((lengths[1:] == lengths[:-1] + SEGMENT) | emptied).all()

    def test_an_emptied_row_is_a_fresh_one(self, tmp_path):
        """The loss of the call is the mean of rows that go on and of one that starts."""
        model, other = (make_model(dtype=torch.float64) for _ in range(2))
        calls = Calls(model)
        trainer = run(tmp_path, blocks_of(30), model=model, memory_dropout=0.3, max_steps=29, learning_rate=0.0)
        number, row = next((n, r.index(0)) for n, r in enumerate(calls.lengths) if n > 1 and 0 in r and any(r))
        blocks = list(Streams(blocks_of(30), ROWS, SEGMENT).blocks())
        nats = torch.zeros(())
        with torch.no_grad():
            for place in range(ROWS):
                start = number - calls.lengths[number][place] // SEGMENT
                ids = torch.cat([block.input_ids[place : place + 1] for block in blocks[start : number + 1]], 1)
                nats = nats + F.cross_entropy(other(ids).logits[0, -SEGMENT:], blocks[number].targets[place])
        assert calls.lengths[number][row] == 0
        assert losses(trainer)[number] == pytest.approx(float(nats) / ROWS, rel=1e-6)  # logged in float32

    @pytest.mark.parametrize(("bptt", "widths"), [(0, [8] * 6 + [6]), (1, [16] * 3 + [6]), (2, [24, 24, 6]), (9, [54])])
    def test_calls_cover_the_segments_that_gradient_reaches(self, bptt, widths, tmp_path):
        model = make_model(bptt_segments=bptt)
        calls = Calls(model)
        run(tmp_path, blocks_of(7), model=model, num_train_epochs=1)
        assert calls.widths == widths
        assert [row[0] for row in calls.lengths] == [sum(widths[:n]) for n in range(len(widths))]

    def test_plain_attention_carries_nothing(self, tmp_path):
        model = make_model(memory_type="none")
        calls = Calls(model)
        trainer = run(tmp_path, blocks_of(4), model=model, max_steps=6, save_strategy="steps", save_steps=6)
        assert [(kwargs["cache"], kwargs["use_cache"]) for kwargs in calls.kwargs] == [(None, False)] * 6
        assert trainer._memory is None and is_whole(tmp_path / "checkpoint-6", 1)

    @pytest.mark.parametrize("counted", ["all", "non_padding"])
    def test_tokens_read_are_counted(self, counted, tmp_path):
        """Transformers' own count of inputs; the last block of a pass is uneven."""
        trainer = run(tmp_path, blocks_of(3), max_steps=3, include_num_input_tokens_seen=counted)
        wanted = ROWS * (3 * SEGMENT - 2) - (counted == "non_padding")
        assert trainer.state.num_input_tokens_seen == wanted


class TestPrecision:
    def test_bfloat16_learns(self, tmp_path):
        trainer = run(tmp_path, blocks_of(60), bf16=True, max_steps=60, lr_scheduler_type="constant")
        found = losses(trainer)
        assert all(map(math.isfinite, found))
        assert sum(found[-5:]) / 5 < found[0] - 1
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # the compiler looks at every attribute of a tensor, and torch warns of some
    def test_compiled(self, tmp_path):
        """Two steps, the second with memory: the losses are those of the model as it is, but for rounding."""
        expected = losses(run(tmp_path, blocks_of(9), max_steps=2))
        assert losses(run(tmp_path, blocks_of(9), max_steps=2, torch_compile=True)) == pytest.approx(expected, rel=1e-4)


def killable(folder: str, steps: int, say) -> None:
    """Trains, from the newest whole checkpoint if there is one, and says each step."""

    class Speaker(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            say(state.global_step)

    settings = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "memory_dropout": 0.2}
    settings |= {"gradient_accumulation_steps": 2, "stream_len": 5 * SEGMENT, "log_level": "error"}
    model = make_model(**DROPOUT)
    trainer = XLTrainer(model, arguments(folder, **settings), train_dataset=blocks_of(13), callbacks=[Speaker()])
    trainer.train(last_checkpoint(folder) is not None)
    trainer.save_model(f"{folder}/end")


class TestKilledRuns:
    """Killed some steps after they went on, and a moment later: in a step or in a checkpoint."""

    def check(self, forks, path, steps, signals, seed) -> None:
        chance = random.Random(seed)
        killed, straight = str(path / "killed"), str(path / "straight")
        for number in signals:
            process, receiver = forks(killable, killed, steps)
            for _ in range(chance.randint(2, 5)):
                assert isinstance(heard := receiver.recv(), int), heard
            time.sleep(chance.uniform(0, 0.03))
            os.kill(process.pid, number)
            process.join(60)
            receiver.close()
            assert process.exitcode == -number
        for folder in (killed, straight):
            end(forks(killable, folder, steps))
        models = [XLForCausalLM.from_pretrained(f"{folder}/end") for folder in (killed, straight)]
        assert_same_weights(*models)
        ours, theirs = (torch.load(f"{n}/checkpoint-{steps}/optimizer.pt")["state"] for n in (killed, straight))
        assert all(torch.equal(ours[n]["exp_avg_sq"], theirs[n]["exp_avg_sq"]) for n in theirs)

    def test_they_end_as_if_never_killed(self, forks, tmp_path):
        self.check(forks, tmp_path, 16, [signal.SIGKILL, signal.SIGTERM], seed=0)

    @pytest.mark.slow
    def test_they_end_as_if_never_killed_however_often(self, forks, tmp_path):
        self.check(forks, tmp_path, 90, [signal.SIGKILL] * 20, seed=1)


def distributed(folder: str, steps: int, fields: dict, settings: dict, resume_at: int, say=None) -> None:
    """Trains a model in float64, and again from a checkpoint unless `resume_at` is 0; rank 0 writes log and weights."""
    # Compression's loss is a mean over rows, weighed by the targets of a call: rows of unequal length would differ by that.
    tokens = text(2 * ROWS * (SEGMENT * 9 - 2) + (1 if "compressive" in str(fields) else -3))
    settings = {"max_steps": steps, "lr_scheduler_type": "constant", "log_level": "error", **settings}
    if resume_at:
        settings |= {"save_strategy": "steps", "save_steps": resume_at}

    def trained(seed, resume=None) -> XLTrainer:
        model = make_model(seed, torch.float64, **fields)
        return run(folder, tokens, resume, model, eval_dataset=text(90, seed=1), **settings)

    trainer = trained(seed=0)
    trainer.save_model(f"{folder}/end")
    if trainer.is_world_process_zero():
        Path(folder, "log.json").write_text(json.dumps(trace(trainer)))
    if resume_at:
        path = Path(folder, f"checkpoint-{resume_at}")
        assert [is_whole(path, number) for number in (1, 2, 3)] == [number == trainer.args.world_size for number in (1, 2, 3)]
        assert_same_end(trained(7, str(path)), trainer, after=resume_at)


def sharded(folder: str, fields: dict, settings: dict, resume_at: int, say=None) -> None:
    """Trains in float64, with FSDP2 and again from a checkpoint if there are several processes."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        settings = {"fsdp": True, "save_strategy": "steps", "save_steps": resume_at, **settings}
    else:
        settings = {**settings, "per_device_train_batch_size": 2 * ROWS, "fsdp_config": None}
    tokens = text(2 * ROWS * (SEGMENT * 9 - 2) + 1)
    warnings.filterwarnings("error", message="FSDP2-wrapped module")

    def trained(seed, resume=None, kind=XLTrainer) -> XLTrainer:
        made = arguments(folder, max_steps=6, lr_scheduler_type="constant", log_level="error", **settings)
        if several:
            assert made.device.type == "cpu"  # makes the state that is changed next
            # Accelerate leaves FSDP out where the processes have CPUs only, and says nothing.
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        model = make_model(seed, torch.float64, **fields)
        trainer = kind(model, made, train_dataset=tokens, eval_dataset=text(90, seed=1))
        trainer.train(resume)
        trainer.evaluate()
        assert all(isinstance(parameter, DTensor) == several for parameter in trainer.model.state_dict().values())
        return trainer

    trainer = trained(seed=0)
    is_main = trainer.is_world_process_zero()
    if is_main:
        Path(folder, f"log-{trainer.args.world_size}.json").write_text(json.dumps(trace(trainer)))
    if not several:
        return
    trainer.save_model(f"{folder}/end")
    gathered = {name: part.full_tensor() for name, part in trainer.model.state_dict().items()}
    if is_main:
        saved = XLForCausalLM.from_pretrained(f"{folder}/end", dtype=torch.float64).state_dict()
        assert saved.keys() == gathered.keys()
        assert all(torch.equal(saved[name], gathered[name]) for name in gathered)
    path = Path(folder, f"checkpoint-{resume_at}")
    assert [is_whole(path, number) for number in (1, 2, 3)] == [False, True, False]
    assert_same_end(trained(7, str(path)), trainer, after=resume_at)

    class Stopped(XLTrainer):
        def _save_rng_state(self, output_dir):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(7, kind=Stopped)
    assert not is_whole(path, 2) and last_checkpoint(folder, 2) != str(path)
    if "activation_checkpointing" in settings["fsdp_config"]:
        fields = {**fields, **DROPOUT}
        with pytest.raises(ValueError, match="dropout anew in the backward pass"):
            trained(7)


class TestProcesses:
    def both(self, forks, path, steps, fields, settings, resume_at):
        """Logs and models of two processes, and of one with the same batch."""
        two, one = str(path / "two"), str(path / "one")
        as_processes(forks, 2, distributed, two, steps, fields, settings, resume_at)
        distributed(one, steps, fields, {**settings, "per_device_train_batch_size": 2 * ROWS}, 0)
        logs = [json.loads(Path(folder, "log.json").read_text()) for folder in (two, one)]
        assert len(logs[0]) == len(logs[1]) >= steps
        return logs, [XLForCausalLM.from_pretrained(f"{folder}/end", dtype=torch.float64) for folder in (two, one)]

    def check(self, forks, path, steps, fields, settings, resume_at):
        """To 1e-6, for what is logged is summed in float32; the weights, in float64, to 1e-9 after sums in another order."""
        (two, one), models = self.both(forks, path, steps, fields, settings, resume_at)
        for ours, theirs in zip(two, one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)
        for parameter, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert biggest(parameter, wanted) < 1e-9

    def test_two_are_one_with_twice_the_batch(self, forks, tmp_path):
        """Calls of three segments, accumulated, with compression's loss and a memory that grows; resumed to the bit."""
        fields = {"bptt_segments": 2, "memory_type": "compressive"}
        settings = {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": False}
        settings["mem_len_schedule"] = {0: 8, 6: 11}
        self.check(forks, tmp_path, 8, fields, settings, resume_at=4)

    @pytest.mark.slow
    @pytest.mark.parametrize("accumulation", [1, 2])
    @pytest.mark.parametrize(
        "fields",
        [{}, {"memory_type": "linear"}, {"memory_type": "compressive"}, {"memory_type": ["recurrence", "compressive"]}],
        ids=str,
    )
    def test_fifty_steps(self, forks, fields, accumulation, tmp_path):
        """report H19: processes whose rows have fewer targets divide by the targets of all of them."""
        settings = {"gradient_accumulation_steps": accumulation, "ddp_find_unused_parameters": False, "eval_strategy": "steps"}
        self.check(forks, tmp_path, 50, fields, {**settings, "eval_steps": 10}, resume_at=25)

    @pytest.mark.slow
    def test_resume_is_exact_with_dropout(self, forks, tmp_path):
        settings = {"memory_dropout": 0.2, "stream_len": 5 * SEGMENT, "gradient_accumulation_steps": 2}
        settings["mem_len_schedule"] = {0: 0, 7: 5, 12: 11}
        as_processes(forks, 2, distributed, str(tmp_path), 20, DROPOUT, settings, 7)
        with pytest.raises(ValueError, match=r"no whole checkpoint of 1 process\(es\): .* another number of processes"):
            run(tmp_path, blocks_of(9), str(tmp_path / "checkpoint-7"), max_steps=20)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("fields", "fsdp", "settings"),
        [
            ({}, {}, {"mem_len_schedule": {0: 0, 3: 11}}),
            ({"memory_type": "compressive", "bptt_segments": 2}, {"state_dict_type": "SHARDED_STATE_DICT"}, {}),
            ({"memory_type": "linear", "bptt_segments": 2}, {}, {"gradient_accumulation_steps": 2}),
            ({"bptt_segments": 2}, {}, {"activation_checkpointing": True}),
            ({"bptt_segments": 2}, {"state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": True}, {}),
        ],
        ids=str,
    )
    def test_sharded(self, forks, fields, fsdp, settings, tmp_path):
        """FSDP2 on CPUs: steps and an evaluation log what one process does, but for rounding; resumed to the bit."""
        settings = {**settings, "fsdp_config": {"version": 2, **fsdp}}
        as_processes(forks, 2, sharded, str(tmp_path), fields, settings, 3)
        sharded(str(tmp_path), fields, settings, 0)
        two, one = (json.loads((tmp_path / f"log-{number}.json").read_text()) for number in (2, 1))
        assert [entry["step"] for entry in two] == [1, 2, 3, 4, 5, 6, 6]
        for ours, theirs in zip(two, one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
    def test_sharded_resume_is_exact_with_dropout(self, forks, kind, tmp_path):
        settings = {"memory_dropout": 0.2, "stream_len": 5 * SEGMENT, "activation_checkpointing": True}
        settings["fsdp_config"] = {"version": 2, "state_dict_type": f"{kind}_STATE_DICT"}
        as_processes(forks, 2, sharded, str(tmp_path), DROPOUT, settings, 4)


def one_step(folder: str, size: int, say=None) -> None:
    """A step of a plain Trainer on 8 unevenly padded rows, `size` of them in each process."""
    ours = TestOtherTrainers()
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
    arguments = ours.settings(folder, per_device_train_batch_size=size, **settings)
    rows = ours.dataset([37, 5, 22, 9, 30, 2, 17, 40])
    trainer = Trainer(make_model(dtype=torch.float64), arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(f"{folder}/{size}")


class TestOtherTrainers:
    """Trainers that know nothing of memory use it inside a sample. More of these: test_reports_training.py."""

    def dataset(self, lengths):
        """Samples of several segments, padded to the right."""
        longest = max(lengths)
        rows = []
        for number, length in enumerate(lengths):
            ids = F.pad(text(length, seed=number), (0, longest - length))
            mask = (torch.arange(longest) < length).long()
            rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
        return rows

    def settings(self, path, **settings):
        common = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
        common |= {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant", "dataloader_pin_memory": False}
        return TrainingArguments(output_dir=str(path), **common, **settings)

    @pytest.mark.parametrize("memory", ["recurrence", "compressive", "linear"])
    def test_accumulation_is_one_batch(self, memory, tmp_path):
        """report H01: loss and gradients of 2 x 4 rows are those of 8, unevenly padded. float64, sums in another order."""
        rows, found = self.dataset([37, 5, 22, 9, 30, 2, 17, 40]), []
        # Of the text alone: compression's own loss is a mean over evictions, so over other ones in other batches.
        fields = {"memory_type": memory} | ({"compression_loss_coef": 0.0} if memory == "compressive" else {})
        for size in (8, 4):
            model = make_model(dtype=torch.float64, **fields)
            before = [p.detach().clone() for p in model.parameters()]
            arguments = self.settings(
                tmp_path,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=8 // size,
                max_steps=1,
                optim="sgd",
                learning_rate=1.0,
                max_grad_norm=0.0,
            )
            trainer = Trainer(model, arguments, train_dataset=rows)
            trainer.train()
            found.append((losses(trainer), [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]))
        (whole, gradients), (parts, others) = found
        assert parts == pytest.approx(whole, rel=1e-6)  # logged in float32
        assert max(biggest(a, b) for a, b in zip(gradients, others, strict=True)) < 1e-9
        assert min(float(g.abs().max()) for g in gradients if g.dim() > 1) > 0 or memory == "compressive"

    @pytest.mark.parametrize("kind", [XLForSequenceClassification, XLForTokenClassification, XLForQuestionAnswering])
    def test_no_head_loses_the_mask(self, kind, tmp_path):
        """Trainer drops the columns that `forward` does not name."""
        rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in self.dataset([9, 5])]
        trainer = Trainer(kind(make_model().config), self.settings(tmp_path), train_dataset=rows)
        assert next(iter(trainer.get_train_dataloader()))["attention_mask"].sum() > 0

    @pytest.mark.slow
    def test_two_processes_are_one_batch(self, forks, tmp_path):
        """report H19: the loss of each of two processes is divided by the targets of both."""
        as_processes(forks, 2, one_step, str(tmp_path), 4)
        one_step(str(tmp_path), 8)
        two, one = (XLForCausalLM.from_pretrained(tmp_path / str(size), dtype=torch.float64) for size in (4, 8))
        for parameter, wanted, before in zip(two.parameters(), one.parameters(), make_model().parameters(), strict=True):
            assert biggest(parameter, wanted) < 1e-9 and biggest(parameter, before.to(parameter)) > 0

    def test_loss_falls_on_long_samples(self, tmp_path):
        rows = self.dataset([40] * 8)
        model = make_model()
        arguments = self.settings(tmp_path, per_device_train_batch_size=4, num_train_epochs=15, learning_rate=1e-2)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        found = losses(trainer)
        assert found[-1] < found[0] - 1


class TestAdapters:
    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # a name that PEFT still calls
    def test_lora_trains_with_memory(self, tmp_path):
        """The adapters see memory carried as the whole model does, the base stays, and a run goes on bit for bit."""

        def adapted():
            torch.manual_seed(3)
            return get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1))

        tokens, settings = blocks_of(12), {"max_steps": 9, "save_strategy": "steps", "save_steps": 4}
        model = adapted()
        calls = Calls(model.get_base_model())
        whole = run(tmp_path / "a", tokens, model=model, eval_dataset=text(100), **settings)
        assert calls.lengths[:3] == [[0] * ROWS, [SEGMENT] * ROWS, [2 * SEGMENT] * ROWS]
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        start = adapted().state_dict()
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
        assert changed == trained != set()
        resumed = run(tmp_path / "b", tokens, model=adapted(), resume=str(tmp_path / "a" / "checkpoint-4"), **settings)
        assert_same_end(whole, resumed, after=4)
        assert not (tmp_path / "a" / "checkpoint-4" / "model.safetensors").exists(), "adapters are saved, not the base"
        expected = evaluate(copy.deepcopy(model).merge_and_unload(), text(100))
        assert whole.evaluate()["eval_loss"] == pytest.approx(expected.loss, rel=1e-5)  # float32


class TestCorpus:
    """A text with documents, as a `Corpus`."""

    starts = (0, 13, 40, 41, 77)

    def corpus(self) -> Corpus:
        return Corpus(text(150), document_starts=list(self.starts))

    def test_documents_reach_the_model(self, tmp_path):
        model, seen = make_model(), []
        model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
        run(tmp_path, self.corpus(), model=model, max_steps=2)
        for kwargs, block in zip(seen, Streams(self.corpus(), ROWS, SEGMENT).blocks(), strict=False):
            assert torch.equal(kwargs["document_ids"], block.document_ids)
            assert torch.equal(kwargs["shift_labels"], block.targets)
        assert len(seen) == 2 and (seen[1]["shift_labels"] == -100).any(), "a document ends in the second block"

    def test_evaluation_keeps_documents_apart(self, tmp_path):
        corpus = self.corpus()
        trainer = run(tmp_path, corpus, max_steps=1, eval_dataset=corpus, eval_streams=1)
        expected = evaluate(trainer.model, corpus)
        assert trainer.evaluate()["eval_loss"] == expected.loss
        assert expected.num_tokens == 150 - len(self.starts)

    def test_resumed_in_the_middle_of_a_document(self, tmp_path):
        settings = {"max_steps": 9, "save_strategy": "steps", "save_steps": 4}
        whole = run(tmp_path / "a", self.corpus(), **settings)
        resumed = run(tmp_path / "b", self.corpus(), resume=str(tmp_path / "a" / "checkpoint-4"), **settings)
        assert_same_end(whole, resumed, after=4)

    def test_what_is_no_text_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="train_dataset is list"):
            run(tmp_path, [1, 2, 3])
