"""Tensor parallelism: a model spread over processes has the numbers of the whole one, and gives the whole one back."""

import copy

import pytest
import torch
from helpers import biggest, feed, ids_for, random_splits, tiny_config, tiny_model
from huggingface_hub.errors import StrictDataclassError
from processes import as_processes
from test_recipes import KerplePosition, RunningMean
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from modeling_xl import XLCache, XLForCausalLM, XLModel
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES
from modeling_xl.trainer import XLTrainer, XLTrainingArguments

# float64, sums in another order over three layers.
EXACT = 1e-9
# float32: logits here are of size 10 to 30, so this is some roundings, and sums are in another order.
CLOSE = 1e-4
LENGTH = 23

VARIANTS = {
    "as_many_key_heads": {"num_key_value_heads": 4},
    "one_key_head": {"num_key_value_heads": 1},
    "shared_biases": {"untie_r": False},
    "qk_norm": {"qk_norm": True, "position_type": "rope"},
    "biases": {"attention_bias": True, "mlp_bias": True, "lm_head_bias": True, "norm_type": "layernorm", "clip_qkv": 1.5},
    "plain_mlp": {"gated_mlp": False, "intermediate_size": 21, "norm_position": "post", "final_norm": False},
    "untied": {"tie_word_embeddings": False, "embedding_norm": True},
    "projected": {"embedding_size": 10},
    "adaptive": {"cutoffs": (20, 51), "div_val": 2},
    "slopes": {"position_type": "alibi", "alibi_slopes": [0.7, 0.2, 0.05, 0.4]},
    "sinks": {"num_sink_tokens": 3, "bptt_segments": 2},
    "zeros": {"initial_memory": "zeros", "position_type": "alibi"},
    "window": {"memory_type": "none", "attention_window": 6, "position_type": "t5"},
    "most_used": {"memory_type": "compressive", "compression_fn": "most_used", "compression_loss": None},
    "mean": {"memory_type": "compressive", "compression_fn": "mean", "compression_loss": None},
    "autoencode": {"memory_type": "compressive", "compression_loss": "autoencode"},
    "favor": {"memory_type": "linear", "feature_map": "favor", "position_type": "rope"},
    "mixture": {"memory_type": ["recurrence", "linear", "compressive"], "position_type": "alibi"},
}


def load(folder, tp_size=None, kind=XLForCausalLM, dtype=torch.float64, **options):
    distributed = None if tp_size is None else DistributedConfig(tp_size=tp_size)
    return kind.from_pretrained(folder, distributed_config=distributed, dtype=dtype, **options).eval()


def off(a, b) -> float:
    return biggest(a.detach().double(), b.detach().double())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(folder: str, tp_size: int, dtype, tolerance: float) -> None:
    """Logits and caches of any feeding, text, losses and gradients, and files, of the spread model and of the whole one."""
    one, spread = load(folder, dtype=dtype), load(folder, tp_size, dtype=dtype)
    ids = ids_for(one, 2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    splits = random_splits(LENGTH, 8, torch.Generator().manual_seed(0))
    for gradient in (False, True):
        with torch.set_grad_enabled(gradient):
            logits, cache = feed(spread, ids, splits, attention_mask=mask)
            assert off(logits, feed(one, ids, [LENGTH], attention_mask=mask)[0]) < tolerance
        with torch.no_grad():
            copied = copy.deepcopy(cache)
            assert torch.equal(spread(ids[:, :3], cache=copied).logits, spread(ids[:, :3], cache=cache).logits)
    heads = [rows.shape[1] for state in cache.states if state for name, rows in state.rows.items() if name in ("key", "value")]
    assert all(number == max(one.config.num_key_value_heads // tp_size, 1) for number in heads)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    for more in ({}, {"num_beams": 3}):
        assert torch.equal(spread.generate(ids, **options, **more), one.generate(ids, **options, **more))

    losses = [model.train()(ids, labels=ids, attention_mask=mask).loss for model in (one, spread)]
    assert off(*losses) < tolerance
    for loss in losses:
        loss.backward()
    wanted = {name: parameter.grad for name, parameter in one.named_parameters()}
    found = {name: parameter.grad for name, parameter in spread.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient is None) == (wanted[name] is None), name
        if gradient is not None:
            assert off(whole(gradient), wanted[name]) < tolerance * (1 + float(wanted[name].abs().max())), name

    held = sum(whole(p).numel() if not isinstance(p, DTensor) else p.to_local().numel() for p in spread.parameters())
    assert held < sum(p.numel() for p in one.parameters())
    # What the scheme and the projections have for each head is spread over the processes.
    per_head = ("qkv_proj", "o_proj", "r_proj", "biases", "shared_position", "up_proj", "down_proj", "gate_proj")
    for name, parameter in spread.named_parameters():
        if any(part in name for part in per_head) and not (name.endswith("bias") and ("o_proj" in name or "down_proj" in name)):
            assert parameter.to_local().numel() <= -(-parameter.numel() // tp_size) + parameter.shape[-1] * tp_size, name
    spread.save_pretrained(f"{folder}/saved")
    torch.distributed.barrier()
    again, before = load(f"{folder}/saved", dtype=dtype).state_dict(), load(folder, dtype=dtype).state_dict()
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in before)


def compare_all(folder: str, names: list[str], tp_size: int, dtype, tolerance: float, say) -> None:
    for name in names:
        say(name)
        compare(f"{folder}/{name}", tp_size, dtype, tolerance)


def check(forks, folder, cases: dict[str, dict], tp_size: int = 2, dtype=torch.float64, tolerance: float = EXACT) -> None:
    for name, changes in cases.items():
        tiny_model(dtype=dtype, **changes).save_pretrained(folder / name)
    as_processes(forks, tp_size, compare_all, str(folder), list(cases), tp_size, dtype, tolerance)


def test_one_scheme_in_two_processes(forks, tmp_path):
    """In float32, where what is equal is so but for rounding."""
    check(forks, tmp_path, {"xl": {}}, dtype=torch.float32, tolerance=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORY_MECHANISMS)
def test_every_scheme(forks, memory, tmp_path):
    check(forks, tmp_path, {scheme: {"position_type": scheme, "memory_type": memory} for scheme in POSITION_SCHEMES})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_every_variant(forks, part, tmp_path):
    check(forks, tmp_path, dict(list(VARIANTS.items())[part::3]))


@pytest.mark.slow
def test_more_processes_than_key_heads(forks, tmp_path):
    check(forks, tmp_path, {scheme: {"position_type": scheme} for scheme in POSITION_SCHEMES}, tp_size=4)


def refusals(folder: str, say) -> None:
    for number, name in ((3, "num_attention_heads=3"), (6, "num_key_value_heads=3")):
        with pytest.raises(ValueError, match=rf"{name} cannot be dealt out to tp_size=2 processes: it must be a multiple"):
            load(f"{folder}/{number}", 2)
    spread, other = load(f"{folder}/4", 2), load(f"{folder}/4")
    ids = ids_for(other, 1, 13)
    with torch.no_grad():
        cache = spread(ids).cache
    own = f"{folder}/cache{torch.distributed.get_rank()}"
    cache.save_pretrained(own)
    torch.distributed.barrier()
    with torch.no_grad():
        loaded = XLCache.from_pretrained(own, spread.config)
        assert torch.equal(spread(ids, cache=loaded).logits, spread(ids, cache=cache).logits)
        for path, config in ((own, other.config), (f"{folder}/cache{1 - torch.distributed.get_rank()}", spread.config)):
            with pytest.raises(ValueError, match="tensor_parallel is"):
                XLCache.from_pretrained(path, config)
        with pytest.raises(ValueError, match="tensor_parallel is"):
            other(ids, cache=cache)
    settings = {"output_dir": folder, "use_cpu": True, "report_to": "none"}
    with pytest.raises(ValueError, match="spread over tp_size=2 processes, which must read the same rows"):
        XLTrainer(spread, XLTrainingArguments(**settings), train_dataset=ids[0])


@pytest.mark.slow
def test_what_cannot_be_is_refused(forks, tmp_path):
    """report H10: a head count that does not divide; caches of another share of the heads; streams dealt out by process."""
    for number, heads in ((3, 3), (6, 3), (4, 2)):
        changes = {"num_attention_heads": number, "num_key_value_heads": heads}
        tiny_model(**changes).save_pretrained(tmp_path / str(number))
    as_processes(forks, 2, refusals, str(tmp_path))


@pytest.mark.parametrize(("index", "member"), [(POSITION_SCHEMES, KerplePosition), (MEMORY_MECHANISMS, RunningMean)])
def test_what_says_nothing_of_its_heads_has_no_plan(index, member, monkeypatch):
    monkeypatch.setitem(index, member.name, member)
    field = "position_type" if index is POSITION_SCHEMES else "memory_type"
    model = XLModel(tiny_config(**{field: member.name}))
    assert model.config.base_model_tp_plan is None
    with pytest.raises(ValueError, match=f"{field}='{member.name}'.* does not say how it is spread"):
        XLModel.maybe_distribute_model(model, DistributedConfig(tp_size=2), mesh_manager=object())


def test_pipelines_are_refused():
    with pytest.raises(ValueError, match="pp_size=2: pipeline parallelism is not offered"):
        XLModel.maybe_distribute_model(XLModel(tiny_config()), DistributedConfig(pp_size=2), mesh_manager=object())


@pytest.mark.parametrize("memory", MEMORY_MECHANISMS)
@pytest.mark.parametrize("scheme", POSITION_SCHEMES)
def test_every_rule_names_something(scheme, memory):
    """And what a scheme has for each head is named: no parameter of it is left out."""
    for changes in ({}, *VARIANTS.values()):
        changes = {**changes, "position_type": scheme, "memory_type": memory}
        try:
            config = tiny_config(**changes)
        except StrictDataclassError:  # not for this memory
            continue
        model = XLForCausalLM(config)
        parameters = [name for name, _ in model.named_parameters()]
        names = {*parameters, *(name for name, _ in model.named_modules())}
        for plan in (model.tp_plan, model.fsdp_plan):
            assert plan and all(rule.replace(".*", ".0") in names for rule in plan)
        for name in parameters:
            if ".0.self_attn.position." in name or "shared_position" in name:
                own = name.replace(".0.", ".*.")
                assert own in model.tp_plan or own.rpartition(".")[0] in model.tp_plan
