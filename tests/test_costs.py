"""What a config costs, against a real cache and the products that a real model makes."""

import json

import pytest
import torch
from helpers import ids_for, memory_cases, tiny_config, tiny_model
from report_helpers import HEADS, PAIRS
from torch.utils.flop_counter import FlopCounterMode

from modeling_xl import XLCache, XLConfig, cli
from modeling_xl.costs import READ_TOKENS, count_costs
from modeling_xl.modeling_xl import XLForCausalLM
from modeling_xl.train import load_config


def macs(model, ids, cache) -> int:
    with FlopCounterMode(display=False) as counter:
        model(ids, cache=cache, use_cache=False)
    return counter.get_total_flops() // 2


@torch.no_grad()
def measure(tokens, dtype=torch.float32, **changes):
    """The same numbers of a real model that reads a real text."""
    model = tiny_model(dtype=dtype, attn_implementation="eager", **changes).requires_grad_(False)
    # Adaptive inputs of all clusters cost the same here as those of the first.
    ids = torch.zeros(1, tokens, dtype=torch.long)
    cache = model(ids).cache
    hidden = model(ids, cache=XLCache(model.config, form="hidden")).cache.nbytes
    length = model.config.segment_len or READ_TOKENS
    return {
        "num_parameters": model.num_parameters(),
        "cache_bytes": cache.nbytes,
        "hidden_cache_bytes": hidden if model.config.has_two_forms else None,
        "decoding_macs": macs(model, ids[:, :1], cache),
        "reading_macs": macs(model, torch.zeros(1, length, dtype=torch.long), cache) // length,
    }


NAMES = ("num_parameters", "cache_bytes", "hidden_cache_bytes", "decoding_macs", "reading_macs")


def counted(tokens, dtype=torch.float32, **changes):
    found = count_costs(tiny_config(**changes), tokens, dtype)
    return {name: getattr(found, name) for name in NAMES}


@pytest.mark.parametrize(("scheme", "memory"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_costs_are_those_of_a_real_model(scheme, memory):
    changes = {"position_type": scheme, "memory_type": memory}
    assert counted(26, torch.bfloat16, **changes) == measure(26, torch.bfloat16, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "setting"), memory_cases())
def test_costs_with_every_setting(memory, setting):
    changes = {"memory_type": memory, **setting}
    assert counted(57, **changes) == measure(57, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "memory"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_costs_of_short_and_long_texts(scheme, memory):
    changes = {"position_type": scheme, "memory_type": memory, "num_hidden_layers": 2}
    for tokens, dtype in ((3, torch.float32), (400, torch.float64)):
        assert counted(tokens, dtype, **changes) == measure(tokens, dtype, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_costs_with_every_head(head):
    assert counted(20, **HEADS[head]) == measure(20, **HEADS[head])


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_len": None},
        {"memory_type": ["linear", "recurrence", "compressive"], "position_type": "alibi"},
        {"memory_type": ["none", "recurrence", "none"], "attention_window": 4},
        {"use_parallel_residual": True, "attention_bias": True, "qk_norm": True, "gated_mlp": False},
    ],
    ids=["no_segments", "mixed", "mixed_window", "block"],
)
def test_costs_of_other_models(changes):
    assert counted(26, **changes) == measure(26, **changes)


def test_products_are_those_that_the_sizes_say():
    """E (H + 2 G) D + H D E of projections, 3 E I of the feed-forward, 2 H D K of attention in each layer; E V of the head."""
    config = tiny_config(position_type="rope")  # E 24, H 4, G 2, D 6, I 20, L 5, M 7, V 97, 3 layers
    projections, keys = 24 * (4 + 2 * 2) * 6 + 24 * 24 + 3 * 24 * 20, 7 + 3 + 1
    found = count_costs(config, 28)  # 3 tokens into a segment
    assert found.decoding_macs == 3 * (projections + 2 * 24 * keys) + 24 * 97
    assert count_costs(config, 25).reading_macs == 3 * (projections + 2 * 24 * (7 + 5)) + 24 * 97


def test_nothing_of_the_size_of_the_model_is_computed_or_held():
    """A model of 100 billion parameters: 200 GB of weights in bfloat16."""
    config = XLConfig(
        hidden_size=12288, num_hidden_layers=56, num_attention_heads=96, num_key_value_heads=8, intermediate_size=36864,
        position_type="rope", mem_len=4096,
    )  # fmt: skip
    found = count_costs(config, 8192, torch.bfloat16)
    assert 9e10 < found.num_parameters < 1.2e11
    rows = 4096 + 512 - 1  # keys and values, and room for some more of them
    assert rows <= found.cache_bytes / (56 * 2 * 8 * 128 * 2) < 2 * rows + 256
    assert found.layers_times_memory == 56 * 4096 and found.max_context == config.max_context


class TestCommand:
    def run(self, capsys, *arguments):
        code = cli.main(["memory", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def test_table(self, capsys):
        code, out, _ = self.run(capsys, "demo", "--mem-len", 0, 64, "--tokens", 10, 70)
        assert code == 0
        config, _ = load_config("demo")
        assert out.startswith(f"{XLForCausalLM(config).num_parameters():,} parameters, segment 32, dtype float32")
        rows = [line.split() for line in out.splitlines()[3:]]
        assert [(row[0], row[3]) for row in rows] == [("0", "10"), ("0", "70"), ("64", "10"), ("64", "70")]
        assert [row[1] for row in rows] == ["31", "31", "223", "223"] and rows[2][2] == "192"

    def test_json(self, capsys, tmp_path):
        model = tiny_model(torch.float32, memory_type="linear", position_type="alibi")
        model.save_pretrained(tmp_path)
        code, out, _ = self.run(capsys, tmp_path, "--tokens", 50, "--dtype", "bfloat16", "--json")
        (found,) = json.loads(out)
        assert code == 0 and found["max_context"] is None and found["mem_len"] is None
        with torch.no_grad():
            assert found["cache_bytes"] == model.bfloat16()(ids_for(model, 1, 50)).cache.nbytes

    def test_a_window_follows_memory(self, capsys, tmp_path):
        tiny_config(attention_window=8, mem_len=7).save_pretrained(tmp_path)
        _, out, _ = self.run(capsys, tmp_path, "--mem-len", 20, "--tokens", 9, "--json")
        assert json.loads(out)[0]["max_context"] == 3 * 20

    def test_bad_input(self, capsys, tmp_path):
        code, out, err = self.run(capsys, tmp_path / "nothing")
        assert (code, out) == (2, "") and "no config there" in err and err.count("\n") == 1
        code, _, err = self.run(capsys, "compressive-wt103", "--mem-len", 3)
        assert code == 2 and "mem_len=3" in err
