"""`torch.export` of one step: the model's numbers, plain tensors in and out, and a graph that needs torch alone."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from helpers import biggest, feed, ids_for, memory_cases, tiny_config, tiny_model
from torch.utils import _pytree as pytree

from modeling_xl import XLCache, XLForTokenClassification
from modeling_xl.export import _Step, export_step
from modeling_xl.positions import POSITION_SCHEMES

EXACT = 1e-10  # float64: the same sums in another order
LENGTH = 20  # 4 segments of 5 tokens with a memory of 7, which is full after 2
CASES = [
    ("xl", "recurrence", {}, 1),
    ("xl", "recurrence", {"num_sink_tokens": 2, "untie_r": False}, 4),
    ("rope", "recurrence", {"initial_memory": "zeros", "num_sink_tokens": 2}, 1),
    ("t5", "none", {"attention_window": 6}, 4),
    ("xl", "linear", {}, 4),
    ("rope", "linear", {"feature_map": "favor"}, 1),
    ("alibi", ["recurrence", "linear", "none"], {"attention_window": 4}, 3),
]
names = [f"{p}-{m if isinstance(m, str) else 'mixed'}-{'-'.join(map(str, s))}-{t}" for p, m, s, t in CASES]


def run(step, state, ids, tokens):
    """Logits (B, T, V) of the steps over ids (B, T), and the state after them."""
    graph, logits = step.program.module(), []
    for part in ids.split(tokens, 1):
        found, state = graph(part, state)
        logits.append(found)
    return torch.cat(logits, 1), state


def check_steps(model, tokens, tolerance=EXACT):
    step = export_step(model, batch_size=2, tokens=tokens)
    assert_plain(step.program)
    count = -(-LENGTH // tokens)
    ids = ids_for(model, 2, count * tokens)
    with torch.no_grad():
        expected, _ = feed(model, ids, [tokens] * count)
        found, state = run(step, step.start, ids, tokens)
    assert biggest(found, expected) < tolerance
    assert {name: tensor.shape for name, tensor in state.items()} == {name: t.shape for name, t in step.start.items()}
    assert state["lengths"].tolist() == [ids.shape[1]] * 2


def assert_plain(program):
    """No operator of this package is in the graph."""
    for graph_module in program.graph_module.modules():
        for node in graph_module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                assert node.target.namespace == "aten", node.target


@pytest.mark.parametrize(("position", "memory", "setting", "tokens"), CASES, ids=names)
def test_steps_equal_calls(position, memory, setting, tokens):
    layers = 2 if isinstance(memory, str) else len(memory)
    check_steps(tiny_model(position_type=position, memory_type=memory, num_hidden_layers=layers, **setting), tokens)


BOUNDED = [
    case for case in memory_cases() if case.values[0] in ("recurrence", "linear") or case.values[1].get("attention_window")
]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize(("memory", "setting"), BOUNDED)
def test_every_setting(memory, setting, position, tokens):
    check_steps(tiny_model(position_type=position, memory_type=memory, num_hidden_layers=2, **setting), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize(
    "fields",
    [
        {"segment_len": None, "mem_len": 6},
        {
            "norm_position": "post",
            "norm_type": "layernorm",
            "embedding_norm": True,
            "final_norm": False,
            "embedding_scale": 3.0,
        },
        {"qk_norm": True, "clip_qkv": 1.5, "use_parallel_residual": True, "attention_bias": True},
        {"cutoffs": [20, 50], "div_val": 2, "tie_projs": [True, False, True]},
        {"embedding_size": 12, "embedding_scale": 3.0, "lm_head_bias": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_block(position, fields):
    check_steps(tiny_model(position_type=position, **fields), 3)


@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize(
    ("memory", "setting"),
    [
        ("recurrence", {"num_sink_tokens": 2}),
        ("none", {"attention_window": 6}),
        ("linear", {}),
        ("linear", {"feature_map": "favor"}),
    ],
)
def test_nothing_leaves_the_device(position, memory, setting, monkeypatch):
    """A step on an accelerator makes and copies nothing on the CPU, so that a CUDA graph can hold it: torch's meta device
    refuses products with tensors of the CPU, too."""
    model = tiny_model(torch.float32, position_type=position, memory_type=memory, num_hidden_layers=2, **setting)
    start = {name: tensor.to("meta") for name, tensor in export_step(model, batch_size=2).start.items()}
    step, ids = _Step(model.to("meta"), 1, model.config.mem_len, 0), torch.zeros(2, 1, dtype=torch.long, device="meta")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # there is none for meta tensors
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    with torch.no_grad():
        step.prepare(ids, start)
        graph = torch.export.export(step, (ids, start), strict=False).graph
    for node in graph.nodes:
        assert node.target not in (torch.ops.aten.detach_.default, torch.ops.aten.lift_fresh_copy.default)  # of torch.tensor
        for tensor in pytree.tree_leaves(node.meta.get("val")):
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta", node.target


def test_float32():
    """As in float64, to the rounding of float32 over two layers."""
    check_steps(tiny_model(torch.float32, num_hidden_layers=2), 1, tolerance=1e-5)


class TestPlainTensors:
    """report D12: a cache becomes plain tensors and the other way round, and every continuation has equal logits."""

    @pytest.mark.parametrize(
        ("position", "memory", "setting"),
        [
            ("xl", "recurrence", {"num_sink_tokens": 2}),
            ("rope", "recurrence", {"initial_memory": "zeros"}),
            ("xl", "linear", {}),
        ],
    )
    def test_to_a_step_and_back(self, position, memory, setting):
        """report D12: at every point of a segment, rows of different lengths, one of which has no token yet."""
        model = tiny_model(position_type=position, memory_type=memory, num_hidden_layers=2, **setting)
        step = export_step(model, batch_size=3)
        ids, mask = ids_for(model, 3, 40), torch.ones(3, 40, dtype=torch.bool)
        mask[1, :4], mask[2] = False, False
        with torch.no_grad():
            for before in (1, 3, 11, 13, 21):
                cache, whole = XLCache(model.config), XLCache(model.config)
                for each in (cache, whole):
                    model(ids[:, :before], attention_mask=mask[:, :before], cache=each)
                kept = cache.state_dict()
                found, state = run(step, step.state_of(cache), ids[:, before : before + 7], 1)
                back = step.cache_of(state)
                assert all(torch.equal(tensor, cache.state_dict()["tensors"][name]) for name, tensor in kept["tensors"].items())
                after = model(ids[:, before + 7 :], cache=back).logits
                assert biggest(found, model(ids[:, before : before + 7], cache=whole).logits) < EXACT
                assert biggest(after, model(ids[:, before + 7 :], cache=whole).logits) < EXACT
                assert back.lengths.equal(whole.lengths)

    def test_an_unused_cache_is_the_start(self):
        model = tiny_model(num_hidden_layers=1)
        step = export_step(model)
        state = step.state_of(XLCache(model.config))
        assert all(torch.equal(state[name], tensor) for name, tensor in step.start.items())
        assert step.cache_of(state).batch_size == -1

    def test_one_state_for_steps_of_any_length(self):
        """A text is read segment by segment, and decoded from there by another graph; a row begins anew meanwhile."""
        model = tiny_model(position_type="xl", num_hidden_layers=2)
        reads, decodes = (export_step(model, 2, tokens, logits_to_keep=1) for tokens in (5, 1))
        ids = ids_for(model, 2, 19)
        with torch.no_grad():
            last, state = run(reads, reads.start, ids[:, :15], 5)
            assert last.shape[1] == 3
            for name, tensor in state.items():
                tensor[1] = decodes.start[name][1]
            found, state = run(decodes, state, ids[:, 15:], 1)
            assert biggest(found[:1], model(ids[:1]).logits[:, 15:]) < EXACT
            assert biggest(found[1:], model(ids[1:, 15:]).logits) < EXACT


def test_a_process_with_torch_alone(tmp_path):
    """What was exported is saved, and runs where neither this package nor Transformers can be imported."""
    model = tiny_model(position_type="xl", num_hidden_layers=2, num_sink_tokens=1)
    step = export_step(model, batch_size=2)
    ids = ids_for(model, 2, 18)
    torch.export.save(step.program, tmp_path / "step.pt2")
    torch.save({"ids": ids, "start": step.start}, tmp_path / "inputs.pt")
    code = """
import sys
sys.modules["modeling_xl"] = sys.modules["transformers"] = None
import torch
graph = torch.export.load("step.pt2").module()
inputs = torch.load("inputs.pt", weights_only=True)
state, logits = inputs["start"], []
with torch.no_grad():
    for token in inputs["ids"].split(1, 1):
        found, state = graph(token, state)
        logits.append(found)
torch.save(torch.cat(logits, 1), "logits.pt")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert biggest(torch.load(tmp_path / "logits.pt", weights_only=True), model(ids).logits) < EXACT


class TestRefused:
    def test_models(self):
        with pytest.raises(ValueError, match="compressive rebuilds"):
            export_step(tiny_model(memory_type="compressive"))
        with pytest.raises(ValueError, match="set attention_window"):
            export_step(tiny_model(memory_type=["recurrence", "none", "linear"]))
        with pytest.raises(ValueError, match=r"model\.eval"):
            export_step(tiny_model().train())
        with pytest.raises(TypeError, match="XLForCausalLM"):
            export_step(XLForTokenClassification(tiny_config()))

    @pytest.mark.parametrize("name", ["batch_size", "tokens", "logits_to_keep"])
    @pytest.mark.parametrize("value", [-1, True, 1.0])
    def test_numbers(self, name, value):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            export_step(tiny_model(), **{name: value})

    def test_states(self):
        model = tiny_model(num_hidden_layers=1)
        step, ids = export_step(model), ids_for(model, 1, 9)

        def filled(ids=ids, gradient=False, cache=None, **more):
            with torch.set_grad_enabled(gradient):
                return model(ids, cache=cache, **more).cache

        for cache, words in (
            (filled(cache=XLCache(model.config, mem_len=9)), "mem_len=9"),
            (filled(ids.expand(2, -1)), "batch_size=2"),
            (filled(gradient=True), "form='hidden'"),
            (filled(cache=XLCache(model.config, dtype=torch.bfloat16)), "bfloat16"),
            (filled(document_ids=torch.ones_like(ids)), "document_ids"),
            (filled(position_ids=torch.arange(9)[None] * 2), "position_ids"),
        ):
            with pytest.raises(ValueError, match=words):
                step.state_of(cache)
        assert step.state_of(filled(position_ids=torch.arange(9)[None]))["lengths"].tolist() == [9]
        other = tiny_model(num_hidden_layers=1, mem_len=3)
        with pytest.raises(ValueError, match="mem_len"):
            step.state_of(XLCache(other.config))
        with pytest.raises(TypeError, match="XLCache"):
            step.state_of(None)
        state = step.state_of(filled())
        with pytest.raises(ValueError, match=r"layers\.0\.rows\.key must be .* and is absent"):
            step.cache_of({name: tensor for name, tensor in state.items() if name != "layers.0.rows.key"})
        with pytest.raises(ValueError, match="lengths must be"):
            step.cache_of({**state, "lengths": torch.zeros(2, dtype=torch.long)})
