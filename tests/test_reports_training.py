"""Public bug reports about training: accumulation, checkpointing, unused parameters, resume, Trainer, adapters."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from report_helpers import (
    CLOSE,
    EXACT,
    HEADS,
    SCHEMES,
    every_head,
    every_memory,
    every_pair,
    every_scheme,
    grads_of,
    greedy,
    ids_for,
    make,
    memory_and,
    off,
    worst,
)
from transformers import Trainer, TrainingArguments

from modeling_xl import XLCache, XLForCausalLM

# Names that PEFT still calls and Transformers has renamed.
ignore_old_names = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def two_calls(model, use_reentrant=None, pads=0) -> dict[str, torch.Tensor]:
    """Gradients of two training calls of three segments, the second with the first one's memory."""
    model = copy.deepcopy(model).train()
    if use_reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        assert model.is_activation_checkpointing
    ids = ids_for(model, 2, 30)
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[1, :pads] = 0
    torch.manual_seed(4)
    cache = None
    for part in ids.chunk(2, 1):
        output = model(part, mask, labels=part, cache=cache)
        cache = output.cache
        output.loss.backward()
    return grads_of(model)


class TestCheckpointing:
    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
    @every_pair
    def test_keeps_the_memory(self, scheme, memory, use_reentrant):
        """report H03: gradients with activation checkpointing and memory are those without it."""
        model = make(scheme, memory)
        assert worst(two_calls(model, use_reentrant), two_calls(model)) < EXACT

    @pytest.mark.parametrize(("bptt_segments", "pads"), [(2, 0), (0, 4), (1, 4)], ids=["bptt", "pads", "bptt_pads"])
    @every_scheme
    def test_keeps_the_gradient_through_memory(self, scheme, bptt_segments, pads):
        """report H03: a gradient that flows through memory is kept too; reentrant, which cannot, says so."""
        model = make(scheme, bptt_segments=bptt_segments)
        assert worst(two_calls(model, False, pads), two_calls(model, pads=pads)) < EXACT
        with pytest.raises(ValueError, match="use_reentrant"):
            two_calls(model, True, pads)

    @pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout", "embedding_dropout"])
    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_draws_the_same_dropout_again(self, attention, use_reentrant, name):
        """report H03: what is dropped in the forward pass is dropped in its repetition."""
        model = make("t5", attn_implementation=attention, **{name: 0.3})
        assert worst(two_calls(model, use_reentrant), two_calls(model)) < EXACT

    @pytest.mark.parametrize("scheme", ["xl", "rope"])
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_dropout_does_not_depend_on_gradient(self, attention, scheme):
        """report H03: in training mode attention drops without gradient too, as reentrant checkpointing runs it."""
        model = make(scheme, attn_implementation=attention, attention_dropout=0.5).train()
        with torch.no_grad():
            assert off(model(ids_for(model, 1, 20)).logits, model(ids_for(model, 1, 20)).logits) > 1e-3


class TestEveryParameterLearns:
    @memory_and(
        {},
        {"untie_r": False},
        {"num_sink_tokens": 2},
        {"attention_bias": True, "embedding_norm": True},
        ids=["plain", "shared_biases", "sinks", "biases"],
    )
    @every_scheme
    def test_in_a_first_segment(self, scheme, memory, changes):
        """report H05, F15: with empty memory, and with sinks, every parameter gets a gradient, as DDP expects."""
        model = make(scheme, memory, **changes).train()
        ids = ids_for(model, 2, 5)
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.any() or "compression" in name, name  # nothing has been compressed yet

    @every_head
    def test_of_the_head_without_a_target_in_each_cluster(self, head):
        """report H05: parameters of clusters that no target falls into take part too."""
        model = make(**HEADS[head]).train()
        ids = ids_for(model, 2, 5) % 20
        model(ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_after_a_pass_without_gradient(self):
        """report H05: a memory filled without gradient, in hidden form, does not leave a parameter out."""
        model = make().train()
        ids = ids_for(model, 2, 10)
        with torch.no_grad():
            cache = model(ids, cache=XLCache(model.config, form="hidden")).cache
        model(ids, labels=ids, cache=cache).loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


class TestResume:
    @memory_and({}, {"segment_len": None}, {"bptt_segments": 1}, {"num_sink_tokens": 2})
    def test_equals_a_straight_run(self, memory, changes, tmp_path):
        """report H07: 4 steps, save model, optimizer and memory, load, 4 more = 8 steps straight, bit for bit."""
        ids = ids_for(make(), 2, 8 * 10)

        def steps(model, optimizer, cache, blocks):
            losses = []
            for block in blocks:
                output = model(block, labels=block, cache=cache)
                cache = output.cache
                optimizer.zero_grad()
                output.loss.backward()
                optimizer.step()
                losses.append(float(output.loss.detach()))
            return losses, cache

        def begin(model):
            return torch.optim.AdamW(model.parameters(), 1e-3)

        blocks = ids.chunk(8, 1)
        model = make(memory=memory, dtype=torch.float32, **changes).train()
        straight, _ = steps(model, begin(model), None, blocks)
        first = make(memory=memory, dtype=torch.float32, **changes).train()
        optimizer = begin(first)
        losses, cache = steps(first, optimizer, None, blocks[:4])
        first.save_pretrained(tmp_path / "model")
        cache.save_pretrained(tmp_path / "cache")
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        second = XLForCausalLM.from_pretrained(tmp_path / "model").train()
        optimizer = begin(second)
        optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
        cache = XLCache.from_pretrained(tmp_path / "cache", second.config)
        more, _ = steps(second, optimizer, cache, blocks[4:])
        assert losses + more == straight
        assert worst(dict(second.named_parameters()), dict(model.named_parameters())) == 0
        forgetful, _ = steps(copy.deepcopy(first), begin(first), None, blocks[4:5])
        assert forgetful[0] != straight[4]


class TestTrainer:
    def trainer(self, model, path, dataset, **settings):
        arguments = TrainingArguments(
            output_dir=str(path),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            save_strategy="no",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
            **settings,
        )
        return Trainer(model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset)

    def run(self, model, path, dataset, **settings):
        trainer = self.trainer(model, path, dataset, **settings)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    @pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
    @every_memory
    def test_long_samples_use_memory(self, memory, checkpointing, tmp_path):
        """report H01, H03: Trainer as it is, on samples of many segments, trains with the memory inside a sample."""
        model = make("rope", memory, dtype=torch.float32)
        ids = ids_for(model, 4, 43)
        dataset = [{"input_ids": row, "labels": row} for row in ids]
        # In training, where compression adds a loss of its own.
        first = float(model.train()(ids[:2], labels=ids[:2]).loss.detach())
        segment = (torch.arange(43) // model.config.segment_len).expand(2, -1)  # as documents, they see only themselves
        without = float(model(ids[:2], labels=ids[:2], document_ids=segment).loss.detach())
        losses = self.run(
            model,
            tmp_path,
            dataset,
            per_device_train_batch_size=2,
            num_train_epochs=4,
            activation_checkpointing=checkpointing,
        )
        assert len(losses) == 8
        assert losses[0] == pytest.approx(first, abs=1e-3)  # the log rounds to 4 digits
        assert losses[-1] < losses[0] - 0.1
        assert abs(without - first) > 0.01

    @pytest.mark.parametrize("head", ["dense", "adaptive"])
    def test_evaluation_finds_labels_and_logits(self, head, tmp_path):
        """report A02, A12: Trainer as it is evaluates to a loss and predicts logits, the cache left out."""
        model = make(dtype=torch.float32, **HEADS[head])
        ids = ids_for(model, 4, 23)
        dataset = [{"input_ids": row, "labels": row} for row in ids]
        trainer = self.trainer(model, tmp_path, dataset, per_device_eval_batch_size=2)
        expected = model(ids, labels=ids)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected.loss.detach()), abs=1e-5)
        found = trainer.predict(dataset)
        assert off(torch.tensor(found.predictions), expected.logits) < CLOSE
        assert torch.equal(torch.tensor(found.label_ids), ids)

    @pytest.mark.parametrize("head", ["dense", "adaptive"])
    def test_accumulation_is_weighted_by_tokens(self, head, tmp_path):
        """report H01: Trainer with 8 rows at once and with 2 rows 4 times makes the same step, logs the same loss."""
        lengths = [17, 3, 9, 2, 14, 1, 16, 5]
        results = []
        for size in (8, 2):
            model = make(dtype=torch.float32, **HEADS[head])
            ids = ids_for(model, 8, 17)
            mask = (torch.arange(17) < torch.tensor(lengths)[:, None]).long()
            labels = ids.masked_fill(mask == 0, -100)
            dataset = [{"input_ids": i, "attention_mask": m, "labels": t} for i, m, t in zip(ids, mask, labels, strict=True)]
            losses = self.run(
                model,
                tmp_path,
                dataset,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=8 // size,
                max_steps=2,
                optim="sgd",
            )
            results.append((losses, dict(model.named_parameters())))
        (whole, parameters), (parts, others) = results
        assert parts == pytest.approx(whole, abs=2e-4)  # the log rounds to 4 digits
        assert worst(parameters, others) < 1e-6  # float32 sums in another order


@ignore_old_names
class TestAdapters:
    def adapted(self, model):
        settings = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, lora_alpha=8)
        adapted = get_peft_model(model, settings)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(2))
        return adapted.to(torch.float64).eval()

    @every_pair
    def test_lora_trains_with_memory(self, scheme, memory):
        """report G14: LoRA on all linear layers trains every adapter and nothing else, memory on."""
        model = make(scheme, memory)
        frozen = copy.deepcopy(model.state_dict())
        adapted = self.adapted(model).train()
        ids = ids_for(model, 2, 20)
        optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.01)
        adapters = {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}
        assert adapters
        assert all("lora_" in name for name in adapters)
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        for name, parameter in adapted.named_parameters():
            if name in adapters:
                assert off(parameter, adapters[name]) > 0, name
            else:
                own = name.removeprefix("base_model.model.").replace(".base_layer", "")
                assert off(parameter, frozen[own]) == 0

    @pytest.mark.parametrize(
        ("scheme", "changes"),
        [
            *((scheme, {}) for scheme in SCHEMES),
            ("xl", {"initial_memory": "zeros", "attention_bias": True}),
            ("rope", {"num_sink_tokens": 2}),
        ],
        ids=str,
    )
    def test_lora_counts_in_memory_too(self, scheme, changes):
        """report G14: keys and values of remembered tokens carry the adapter: grad, no grad and merged agree."""
        adapted = self.adapted(make(scheme, **changes))
        ids = ids_for(adapted, 2, 23)
        with_gradient = adapted(input_ids=ids).logits
        with torch.no_grad():
            without = adapted(input_ids=ids).logits
            merged = adapted.merge_and_unload()(ids).logits
        assert off(without, merged) < EXACT
        assert off(with_gradient, merged) < EXACT

    @pytest.mark.parametrize("head", ["dense", "projected", "adaptive"])
    @every_memory
    def test_lora_generates_and_merges(self, memory, head, tmp_path):
        """report G13, G14: a PEFT model generates; saved and loaded, and merged into the base, it says the same."""
        adapted = self.adapted(make(memory=memory, **HEADS[head]))
        ids = ids_for(adapted, 2, 13)
        expected = greedy(adapted, ids, 12)
        assert not torch.equal(expected, greedy(make(memory=memory, **HEADS[head]), ids, 12))
        adapted.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(make(memory=memory, **HEADS[head]), tmp_path).to(torch.float64).eval()
        assert torch.equal(greedy(loaded, ids, 12), expected)
        assert torch.equal(greedy(adapted.merge_and_unload(), ids, 12), expected)

    @pytest.mark.parametrize("head", ["projected", "adaptive"])
    def test_no_adapter_is_dead(self, head):
        """report G14: every adapter that all-linear puts in gets a gradient, so none is put where it has no effect."""
        adapted = self.adapted(make(**HEADS[head])).train()
        ids = ids_for(adapted, 2, 20)
        adapted(input_ids=ids, labels=ids).loss.backward()
        dead = [n for n, p in adapted.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
        assert dead == []
