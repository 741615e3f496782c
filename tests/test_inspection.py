"""Where attention falls: shares and distances against the dense pass, however the text is cut."""

import math

import pytest
import torch
from helpers import ids_for, memory_cases, random_splits, tiny_model
from matplotlib.figure import Figure
from reference import dense_pass

from modeling_xl import inspection
from modeling_xl.evaluation_report import attention_table, distance_table, plot_attention
from modeling_xl.inspection import KINDS, AttentionMass, inspect_attention
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES
from modeling_xl.text import InputError

TEXT = 43  # eight segments of 5 and part of one
# float64, means of sums in another order.
EXACT = 1e-9
CASES = [case for case in memory_cases() if MEMORY_MECHANISMS[case.values[0]].has_weights]


def expected(model, ids):
    """Of each layer the mean weight (H,) by kind, and by power of two of the distance (0: the token itself)."""
    seen: list = []
    # A model that sees everything is read in segments that stand alone.
    is_whole = model.config.memory_type != "none" or model.config.attention_window is not None
    for part in [ids] if is_whole else ids.split(model.config.segment_len):
        here: list = []
        dense_pass(model, part, seen=here)
        seen = here if not seen else [a + b for a, b in zip(seen, here, strict=True)]
    has_segments = model.config.memory_type != "none"
    found = []
    for layer in seen:
        kinds = {kind: torch.zeros(model.config.num_attention_heads, dtype=torch.float64) for kind in KINDS}
        curve: dict[int, torch.Tensor] = {}
        for part in layer:
            for row, query in enumerate(part.queries.tolist()):
                line = query - query % model.config.segment_len if has_segments else 0
                for column, key in enumerate(part.keys.tolist()):
                    weight = part.weights[:, row, column]
                    if column < part.num_sinks:
                        kinds["sinks"] += weight
                        continue
                    is_slot = column < part.num_sinks + part.num_slots
                    kinds["slots" if is_slot else "memory" if key < line else "segment"] += weight
                    if key <= query:
                        bin_ = 0 if key == query else 1 + int(math.log2(query - key))
                        curve[bin_] = curve.get(bin_, 0) + weight.mean()
        found.append(({kind: weight / len(ids) for kind, weight in kinds.items()}, {k: v / len(ids) for k, v in curve.items()}))
    return found


def numbers(result: AttentionMass) -> torch.Tensor:
    return torch.tensor(
        [[*(layer.by_head[kind][0] for kind in KINDS), *(place.mass for place in layer.curve)] for layer in result.layers],
        dtype=torch.float64,
    )


@pytest.mark.parametrize(("memory", "setting"), CASES)
@torch.no_grad()
def test_shares_are_those_of_the_dense_pass(memory, setting):
    model = tiny_model(memory_type=memory, **setting)
    ids = ids_for(model, TEXT)
    result = inspect_attention(model, [ids])
    for layer, (kinds, curve) in zip(result.layers, expected(model, ids), strict=True):
        for kind in KINDS:
            assert torch.tensor(layer.by_head[kind], dtype=torch.float64).sub(kinds[kind]).abs().max() < EXACT, kind
            assert layer.shares[kind] == pytest.approx(float(kinds[kind].mean()), abs=EXACT)
        if memory == "compressive" and setting.get("initial_memory") == "zeros":
            continue  # a slot of nothing stands nowhere
        for number, place in enumerate(layer.curve):
            assert place.mass == pytest.approx(float(curve.get(number, 0)), abs=EXACT), place
    # Something was there to look at.
    first = result.layers[0].shares
    sees_none = memory == "none" or setting.get("mem_len") == 0 or setting.get("attention_window") == 1
    assert (first["memory"] > 0) != sees_none and (first["slots"] > 0) == (memory == "compressive")


@pytest.mark.parametrize("scheme", POSITION_SCHEMES)
@pytest.mark.parametrize("memory", [name for name in MEMORY_MECHANISMS if MEMORY_MECHANISMS[name].has_weights])
@torch.no_grad()
def test_all_attention_is_counted_for_every_scheme(scheme, memory):
    model = tiny_model(position_type=scheme, memory_type=memory, num_sink_tokens=2)
    for layer in inspect_attention(model, [ids_for(model, TEXT)]).layers:
        for head in range(model.config.num_attention_heads):
            assert sum(layer.by_head[kind][head] for kind in KINDS) == pytest.approx(1, abs=EXACT)
        assert sum(place.mass for place in layer.curve) + layer.shares["sinks"] == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("memory", ["none", "recurrence", "compressive"])
def test_any_cutting_gives_the_same_numbers(memory, monkeypatch):
    model = tiny_model(memory_type=memory, segment_len=6, mem_len=8)
    ids = ids_for(model, 50)
    whole = inspect_attention(model, [ids])
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        pieces = ids.split(random_splits(50, 9, generator))
        again = inspect_attention(model, [pieces[0], pieces[0][:0], *pieces[1:]])
        assert again == whole  # the calls are the same
    monkeypatch.setattr(inspection, "LONGEST_CALL", 4)
    assert (numbers(inspect_attention(model, [ids])) - numbers(whole)).abs().max() < EXACT


def test_calls_are_short_whatever_the_text(monkeypatch):
    """No call crosses the end of a segment, so what is held is bounded by sizes of the config."""
    model, lengths = tiny_model(segment_len=6, mem_len=8), []
    monkeypatch.setattr(inspection, "LONGEST_CALL", 4)
    forward = model.forward

    def counted(ids, *args, **kwargs):
        lengths.append(ids.shape[1])
        return forward(ids, *args, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    inspect_attention(model, [ids_for(model, 40)])
    assert lengths == [4, 2] * 6 + [4]


def test_lengths_can_be_given_and_the_model_stays_as_it_was():
    model = tiny_model(attn_implementation="sdpa").train()
    ids = ids_for(model, TEXT)
    before = model.config.to_dict()
    changed = inspect_attention(model, [ids], segment_len=8, mem_len=3, attention_window=6)
    assert (changed.segment_len, changed.mem_len, changed.attention_window) == (8, 3, 6)
    assert model.training and model.config.to_dict() == before and model.config._attn_implementation == "sdpa"
    other = tiny_model(segment_len=8, mem_len=3, attention_window=6)
    assert changed.layers == inspect_attention(other, [ids]).layers
    assert changed.num_tokens == TEXT and "43 tokens as one stream" in changed.settings


def test_a_config_without_a_cache_changes_nothing():
    """Trainer saves models with use_cache=False."""
    results = [inspect_attention(model, [ids_for(model, TEXT)]) for model in (tiny_model(), tiny_model(use_cache=False))]
    assert results[0].layers == results[1].layers


def test_linear_layers_are_left_out_or_refused():
    model = tiny_model(memory_type=["linear", "recurrence", "linear"])
    result = inspect_attention(model, [ids_for(model, 20)])
    assert [layer.layer for layer in result.layers] == [1] and result.without_weights == (0, 2)
    model = tiny_model(memory_type="linear")
    with pytest.raises(InputError, match=r"memory_type='linear' has no attention weights: its layers keep sums"):
        inspect_attention(model, [ids_for(model, 20)])


def test_what_cannot_be_cut_or_is_empty_is_refused():
    model = tiny_model(segment_len=None)
    with pytest.raises(InputError, match="give a segment length"):
        inspect_attention(model, [ids_for(model, 20)])
    assert inspect_attention(model, [ids_for(model, 20)], segment_len=5).num_tokens == 20
    with pytest.raises(InputError, match="no tokens"):
        inspect_attention(tiny_model(), [])


@pytest.fixture(scope="module")
def result():
    model = tiny_model(memory_type=["recurrence", "compressive", "linear"], num_sink_tokens=2)
    return inspect_attention(model, [ids_for(model, TEXT)])


class TestReport:
    def test_tables(self, result):
        lines = [line.split() for line in attention_table(result).splitlines()]
        assert lines[0] == ["layer", "type", *KINDS]
        assert lines[2] == ["1", "compressive", *(f"{result.layers[1].shares[kind]:.1%}" for kind in KINDS)]
        lines = [line.split() for line in distance_table(result).splitlines()]
        assert lines[0] == ["tokens", "back", "layer", "0", "layer", "1"]
        assert [line[0] for line in lines[1:4]] == ["0", "1", "2-3"]
        assert lines[3][1:] == [f"{layer.curve[2].mass:.1%}" for layer in result.layers]

    def test_plot_is_a_png_or_nothing(self, result, tmp_path, monkeypatch):
        plot_attention(result, tmp_path / "plot.png")
        whole = (tmp_path / "plot.png").read_bytes()
        assert whole.startswith(b"\x89PNG")

        def fail(self, path, **options):
            path.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(Figure, "savefig", fail)
        with pytest.raises(OSError, match="no space"):
            plot_attention(result, tmp_path / "plot.png")
        assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
        assert (tmp_path / "plot.png").read_bytes() == whole
