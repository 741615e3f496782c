"""The attention functions on their own: blocked forms against the plain one, queries that see nothing, half precision."""

import math

import pytest
import torch
from helpers import biggest, ids_for, tiny_model

from modeling_xl import softmax_xl
from modeling_xl.position_base import SPARE, DistanceBias, PositionContext
from modeling_xl.positions import POSITION_SCHEMES
from modeling_xl.softmax_xl import BLOCK, blocked_attention, plain_attention, shift_by_query, trained_attention

# Unequal sizes, and more queries than one block holds.
B, H, Q, K, D = 2, 3, 150, 211, 8


def inputs(dtype=torch.float64, product=True, groups=1, queries=Q, keys=K):
    torch.manual_seed(0)
    query = torch.randn(B, H * groups, queries, D, dtype=dtype)
    key, value = torch.randn(2, B, H, keys, D, dtype=dtype)
    table = torch.randn(H * groups, keys, D, dtype=dtype) if product else torch.randn(H * groups, keys, dtype=dtype)
    bias = DistanceBias(torch.randn_like(query) if product else None, table)
    mask = torch.rand(B, 1, queries, keys) < 0.7
    mask &= torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    mask[0, 0, 3] = False  # one query of one row sees nothing
    return query, key, value, bias, mask


def reference(query, key, value, bias, mask, scaling=0.3):
    """Bias by explicit distance, softmax written out."""
    queries, keys = query.shape[2], key.shape[2]
    place = torch.arange(keys)[None] + (queries - 1 - torch.arange(queries))[:, None]  # column of the falling distances
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scaling
    table = bias.table[:, place.clamp(max=keys - 1)]
    scores = scores + (table if bias.query is None else torch.einsum("bhqd,hqkd->bhqk", bias.query, table))
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
    return weights @ value


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "causal"])
@pytest.mark.parametrize("product", [True, False], ids=["product", "table"])
@pytest.mark.parametrize("groups", [1, 2])
def test_blocked_forms_equal_the_plain_one(product, groups, masked):
    query, key, value, bias, mask = inputs(product=product, groups=groups)
    if not masked:
        mask = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)[None, None]
    expected = reference(query, key, value, bias, mask)
    full = shift_by_query(bias.by_distance(), Q)
    given = mask if masked else None
    assert biggest(plain_attention(query, key, value, full, mask, 0.3)[0], expected) < 1e-12
    assert biggest(blocked_attention(query, key, value, bias, given, 0.3), expected) < 1e-12
    assert biggest(trained_attention(query, key, value, bias, given, 0.3, 0.0), expected) < 1e-12
    if product:  # what is spare is never seen
        nothing = torch.full((H * groups, SPARE, D), math.nan, dtype=torch.float64)
        spared = DistanceBias(bias.query, torch.cat([bias.table, nothing], 1), SPARE)
        assert torch.equal(spared.by_distance(), bias.by_distance())
        assert biggest(blocked_attention(query, key, value, spared, given, 0.3), expected) < 1e-12


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "causal"])
@pytest.mark.parametrize("product", [True, False], ids=["product", "table"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_the_blocked_form(product, dropout, masked):
    """Against automatic differentiation of the reference, or of a fixed draw of dropout by finite differences."""
    query, key, value, bias, mask = inputs(product=product)
    if not masked:
        mask = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)[None, None]
    leaves = [t for t in (query, key, value, bias.query, bias.table) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    weight = torch.randn(B, H, Q, D, dtype=torch.float64)

    def loss():
        torch.manual_seed(3)
        return (trained_attention(query, key, value, bias, mask if masked else None, 0.3, dropout) * weight).sum()

    found = torch.autograd.grad(loss(), leaves)
    assert all(torch.isfinite(grad).all() for grad in found)
    if not dropout:
        expected = torch.autograd.grad((reference(query, key, value, bias, mask).nan_to_num(0.0) * weight).sum(), leaves)
        if not masked:
            for grad, true in zip(found, expected, strict=True):
                assert biggest(grad, true) < 1e-10
    for leaf, grad in zip(leaves, found, strict=True):
        direction = torch.randn_like(leaf)
        with torch.no_grad():
            leaf.add_(direction, alpha=1e-6)
            above = loss()
            leaf.add_(direction, alpha=-2e-6)
            below = loss()
            leaf.add_(direction, alpha=1e-6)
        slope = float((grad * direction).sum())
        assert abs(float(above - below) / 2e-6 - slope) < 1e-5 * max(1.0, abs(slope))  # differences of sums of 7,200 terms


@pytest.mark.parametrize("product", [True, False], ids=["product", "table"])
@pytest.mark.parametrize("groups", [1, 2])
def test_numbers_do_not_depend_on_the_blocks(monkeypatch, product, groups):
    """Long or short blocks, of all heads or of one head that is a key's: outputs, gradients, and the draws of dropout."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    query, key, value, bias, mask = inputs(product=product, groups=groups)
    leaves = [t for t in (query, key, value, bias.query, bias.table) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()

    def numbers(entries, many_keys, given, dropout):
        monkeypatch.setattr(softmax_xl, "ENTRIES", entries)
        monkeypatch.setattr(softmax_xl, "MANY_KEYS", many_keys)
        torch.manual_seed(3)
        trained = trained_attention(query, key, value, bias, given, 0.3, dropout)
        with torch.no_grad():
            read = blocked_attention(query, key, value, bias, given, 0.3)
        return [trained, read, *torch.autograd.grad(trained.square().sum(), leaves)]

    for given in (None, mask, mask[1:]):
        expected = numbers(2**30, 10**6, given, 0.0)
        for entries, many_keys in ((1, 10**6), (1, 0), (2**30, 0), (K * 200, 0)):
            for found, true in zip(numbers(entries, many_keys, given, 0.0), expected, strict=True):
                assert biggest(found, true) < 1e-11 * max(1.0, float(true.detach().abs().max()))
    for found, true in zip(numbers(1, 0, mask, 0.3), numbers(2**30, 0, mask, 0.3), strict=True):
        assert biggest(found, true) < 1e-11 * max(1.0, float(true.detach().abs().max()))


def test_a_steep_bias_makes_no_subnormal_numbers():
    """A bias like ALiBi's, 8 a token: gradients of float32 are those of float64, and none lies below the normal numbers."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        leaves = [t.to(dtype).requires_grad_() for t in inputs()[:3]]
        bias = DistanceBias(None, (-8.0 * torch.arange(K - 1, -1, -1, dtype=dtype)).expand(H, -1))
        output = trained_attention(*leaves, bias, None, 0.3, 0.0)
        found[dtype] = torch.autograd.grad((output * torch.linspace(-1, 1, D, dtype=dtype)).sum(), leaves)
    for exact, grad in zip(found[torch.float64], found[torch.float32], strict=True):
        assert biggest(exact, grad.double()) < 1e-5 and exact.abs().max() > 0.01
        assert not ((grad != 0) & (grad.abs() < torch.finfo(torch.float32).tiny)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_reading_under_a_steep_bias(dtype, masked):
    """As above without gradient, with fewer heads of keys: reading, too, leaves out what weighs next to nothing."""
    query, key, value, bias, mask = inputs(product=False, groups=2)
    if not masked:
        mask = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)[None, None]
    bias = DistanceBias(None, (-8.0 * torch.arange(K - 1, -1, -1, dtype=torch.float64)).expand_as(bias.table))
    exact = reference(query, key, value, bias, mask)
    query, key, value, table = (tensor.to(dtype) for tensor in (query, key, value, bias.table))
    found = blocked_attention(query, key, value, DistanceBias(None, table), mask if masked else None, 0.3)
    assert found.dtype == dtype
    assert biggest(exact, found.double()) < (1e-5 if dtype == torch.float32 else 0.05)  # 0.05: three digits of inputs of size 3


def test_dropout_is_unbiased_and_drawn_anew_for_each_block():
    """Uniform weights over 211 keys: the mean output is the value, and blocks do not repeat one another's pattern."""
    query, key, value = torch.zeros(1, 1, 2 * BLOCK, D), torch.zeros(1, 1, 3 * BLOCK, D), torch.ones(1, 1, 3 * BLOCK, D)
    bias = DistanceBias(None, torch.zeros(1, 3 * BLOCK))
    mask = torch.ones(1, 1, 2 * BLOCK, 3 * BLOCK, dtype=torch.bool)
    torch.manual_seed(0)
    output = trained_attention(query, key, value, bias, mask, 1.0, 0.5)[0, 0, :, 0]
    assert abs(float(output.mean()) - 1) < 0.02  # 256 means of up to 384 draws of 0 or 2
    assert not torch.equal(output[:BLOCK], output[BLOCK:])
    last = trained_attention(query, key, value, bias, mask, 1.0, 0.5)[0, 0, :, 0]
    assert not torch.equal(output, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", [True, False], ids=["product", "table"])
def test_query_that_sees_nothing_gives_zeros(product, dtype):
    """Zeros and no gradient in every form and precision; nothing undefined anywhere."""
    query, key, value, bias, mask = inputs(dtype, product)
    mask[1] = False  # and a whole row
    full = shift_by_query(bias.by_distance(), Q)
    for leaf in (query, key, value):
        leaf.requires_grad_()
    outputs = {
        "plain": plain_attention(query, key, value, full, mask, 0.3)[0],
        "trained": trained_attention(query, key, value, bias, mask, 0.3, 0.0),
    }
    for output in outputs.values():
        assert output.isfinite().all() and not output[0, :, 3].any() and not output[1].any()
        grads = torch.autograd.grad(output.float().square().sum(), (query, key, value), retain_graph=True)
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[0][0, :, 3].any() and not grads[0][1].any() and not grads[1][1].any() and not grads[2][1].any()
    with torch.no_grad():
        blocked = blocked_attention(query, key, value, bias, mask, 0.3)
    assert blocked.isfinite().all() and not blocked[0, :, 3].any() and not blocked[1].any()
    assert biggest(blocked.float(), outputs["plain"].float()) < {torch.float32: 1e-5}.get(dtype, 0.1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision(dtype, position, implementation):
    """Finite logits and gradients near float32's, with padding and memory; activations are of size 10."""
    changes = {"position_type": position, "attn_implementation": implementation}
    exact, model = tiny_model(dtype=torch.float32, **changes), tiny_model(dtype=dtype, **changes)
    ids = ids_for(model, 2, 23)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    expected = exact(ids, attention_mask=mask).logits[mask.bool()]
    tolerance = 0.6 if dtype == torch.bfloat16 else 0.08  # 8 and 11 bits, 3 layers of weights far from initialisation
    with torch.no_grad():
        assert biggest(model(ids, attention_mask=mask).logits[mask.bool()].float(), expected) < tolerance
    output = model(ids, attention_mask=mask, labels=ids)
    assert biggest(output.logits[mask.bool()].float(), expected) < tolerance
    assert output.loss.dtype == torch.float32
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_rotation_far_away_is_that_at_the_start():
    """At position 10,000,000 in float32 to 1e-4: angles are made in float64 and rounded once."""
    model = tiny_model(dtype=torch.float32, position_type="rope", head_dim=64)
    scheme = model.model.layers[0].self_attn.position
    query, key = torch.randn(2, 1, 4, 9, 64)
    near, far = torch.arange(9)[None], torch.arange(9)[None] + 10_000_000
    scores = []
    for positions in (near, far):
        q, k = scheme.encode(query, key, positions, positions, PositionContext())
        scores.append(q @ k.transpose(-1, -2))
    assert biggest(*scores) < 1e-4


def test_unknown_attention_function_is_named():
    model = tiny_model()
    with pytest.raises((ValueError, KeyError, ImportError), match="nonsense"):
        model.set_attn_implementation("nonsense")
    with pytest.raises((ValueError, ImportError), match=r"(?i)flash"):
        model.set_attn_implementation("flash_attention_2")


@pytest.mark.slow  # compiling takes half a minute a scheme
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about its own parts
@pytest.mark.parametrize("position", POSITION_SCHEMES)
def test_flex_attention(position):
    """Logits without gradient by the compiled kernel; with gradient on a CPU, where it has no backward pass, by sdpa's."""
    changes = {"position_type": position, "dtype": torch.float32, "head_dim": 16}
    eager, flex = (tiny_model(attn_implementation=name, **changes) for name in ("eager", "flex_attention"))
    ids = ids_for(eager, 2, 23)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with torch.no_grad():
        assert biggest(eager(ids, attention_mask=mask).logits, flex(ids, attention_mask=mask).logits) < 1e-4
    losses = [model(ids, attention_mask=mask, labels=ids).loss for model in (eager, flex)]
    for loss in losses:
        loss.backward()
    for a, b in zip(eager.parameters(), flex.parameters(), strict=True):
        assert biggest(a.grad, b.grad) < 1e-4
