"""Linear layers on the few rows that decoding has: the numbers of the plain layer, and only where they may be taken so."""

import pytest
import torch
from helpers import biggest, tiny_model
from torch import nn

from modeling_xl import XLCache, few_rows_xl
from modeling_xl.few_rows_xl import MOST_ROWS, apply_linear, dot_products, for_dot_products, linear


@pytest.fixture
def by_parts(monkeypatch):
    """Counts how often weights are taken by parts, as on AMD's processors."""
    monkeypatch.setattr(few_rows_xl, "VECTORS_ARE_SLOW", True)
    calls, original = [], few_rows_xl._by_parts
    monkeypatch.setattr(few_rows_xl, "_by_parts", lambda *arguments: calls.append(1) or original(*arguments))
    return calls


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 2), (2, 2), ()], ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(24, 40), (7, 42), (5, 3)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_equals_the_layer(by_parts, shape, inner, outer, bias):
    """float32, sums in another order; sizes that parts do not divide, and fewer outputs than parts."""
    torch.manual_seed(0)
    layer, states = nn.Linear(inner, outer, bias=bias), torch.randn(*shape, inner)
    expected = layer.double()(states.double())
    found = apply_linear(layer.float(), states)
    assert found.shape == expected.shape and biggest(found.double(), expected) < 1e-6
    assert biggest(linear(states, layer.weight, layer.bias).double(), expected) < 1e-6
    assert len(by_parts) == 2


@torch.no_grad()
def test_where_vectors_are_fast_they_are_left_alone(by_parts, monkeypatch):
    monkeypatch.setattr(few_rows_xl, "VECTORS_ARE_SLOW", False)
    layer, states = nn.Linear(6, 8), torch.randn(1, 6)
    assert torch.equal(apply_linear(layer, states), layer(states))
    assert by_parts == []


@pytest.mark.parametrize("are_slow", [False, True])
def test_dot_products_of_one_query(monkeypatch, are_slow):
    """float64: equal but for the order of sums, on every processor."""
    monkeypatch.setattr(few_rows_xl, "VECTORS_ARE_SLOW", are_slow)
    queries, keys = (torch.randn(3, 2, n, 5, dtype=torch.float64) for n in (1, 7))
    expected = torch.einsum("bhqd,bhkd->bhqk", queries, keys)
    assert biggest(dot_products(queries, keys), expected) < 1e-12
    assert torch.equal(for_dot_products(keys), keys) and for_dot_products(keys).mT.is_contiguous() != are_slow
    assert biggest(dot_products(queries, for_dot_products(keys)), expected) < 1e-12


def test_other_layers_are_called(by_parts):
    layer, states = nn.Linear(6, 8), torch.randn(1, 6)
    apply_linear(layer, states)  # gradient
    with torch.no_grad():
        apply_linear(layer, torch.randn(MOST_ROWS + 1, 6))
        assert apply_linear(layer, torch.randn(0, 6)).shape == linear(torch.randn(0, 6), layer.weight, None).shape == (0, 8)
        apply_linear(nn.Linear(6, 8).double(), states.double())
        with torch.autocast("cpu"):
            assert apply_linear(layer, states).dtype == torch.bfloat16
        seen = []
        layer.register_forward_hook(lambda *_: seen.append(1))
        apply_linear(layer, states)
        assert seen == [1]
        subclass = type("Quantised", (nn.Linear,), {"forward": lambda self, x: x * 0})(6, 6)
        assert not apply_linear(subclass, states).any()
    assert by_parts == []


@pytest.mark.parametrize(
    "fields", [{}, {"cutoffs": [20, 30], "div_val": 2}, {"gated_mlp": False, "lm_head_bias": True}], ids=str
)
def test_a_model_decodes_with_it(by_parts, fields):
    """Each token of two rows on its own, against both rows' text in one call. float32: seven digits."""
    model = tiny_model(dtype=torch.float32, **fields)
    ids = torch.randint(0, model.config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
        assert by_parts == []
        cache = XLCache(model.config)
        found = torch.cat([model(token, cache=cache).logits for token in ids.split(1, 1)], 1)
    layers = 4 if fields.get("gated_mlp", True) is False else 5
    assert len(by_parts) >= 19 * (layers * model.config.num_hidden_layers + 1)
    assert biggest(found, expected) < 1e-4
