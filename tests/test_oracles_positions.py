"""Position schemes against NumPy in float64 by plain indexing: no shift, no blocks, no tables kept.

Each golden value is looked at through the class of its scheme and through every way from scores to an output.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from oracles import golden
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from modeling_xl import XLConfig, softmax_xl
from modeling_xl.attention_xl import XLAttention
from modeling_xl.position_alibi import alibi_slopes
from modeling_xl.position_base import GatheredDistances, PositionContext
from modeling_xl.position_rope import RopePosition
from modeling_xl.position_t5 import T5Position, relative_bucket
from modeling_xl.position_xl import XLPosition, sinusoid
from modeling_xl.positions import POSITION_SCHEMES
from modeling_xl.softmax_xl import (
    blocked_attention,
    causal_mask,
    gather_bias,
    plain_attention,
    shift_by_query,
    trained_attention,
)

CASE = "g01_positions"
# Golden values are exact. float64: sums of some ten products; float32: the same in seven digits, on scores up to 15.
EXACT = {"rtol": 0, "atol": 1e-12}
CLOSE = {torch.float64: EXACT, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}
# Angles at distance 100,000 in float64 are off by 1e5 times the rounding of a frequency.
ANGLES = {torch.float64: {"rtol": 0, "atol": 1e-10}, torch.float32: {"rtol": 0, "atol": 6e-8}}
# bfloat16 has 8 digits: half a step is 2^-9 for numbers below 1. A rounded position (257 -> 256) would be off by 0.8.
ANGLES[torch.bfloat16] = {"rtol": 0, "atol": 2**-9 + 1e-6}

per_precision = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
per_dtype = pytest.mark.parametrize("dtype", list(ANGLES), ids=["float64", "float32", "bfloat16"])


def part(prefix: str) -> dict[str, torch.Tensor]:
    """Golden values whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): v for name, v in golden(CASE).items() if name.startswith(prefix)}


def make_attention(position_type, heads, head_dim, hidden_size=8, implementation="eager", dtype=torch.float64, **fields):
    """An `XLAttention` (its `position` is the scheme), and the context that a model would hand to it."""
    config = XLConfig(
        position_type=position_type,
        num_attention_heads=heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        num_hidden_layers=1,
        attn_implementation=implementation,
        **fields,
    )
    shared = POSITION_SCHEMES[position_type].shared_module(config)
    shared = None if shared is None else shared.to(dtype)
    return XLAttention(config, 0, nn.Identity()).to(dtype), PositionContext(shared=shared)


def falling(num_keys: int) -> torch.Tensor:
    """Distances of the last query to its keys."""
    return torch.arange(num_keys - 1, -1, -1)


def distance_grid(num_queries: int, num_keys: int) -> torch.Tensor:
    """(1, Q, K): distance of each query to each key, 0 for keys after it."""
    ahead = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    return ahead.clamp(min=0)[None]


# Every form of softmax attention: (encoded query, key, value, bias as factors, mask or None, scaling) -> output.
def plain(query, key, value, bias, mask, scaling):
    mask = causal_mask(query.shape[2], key.shape[2], None) if mask is None else mask
    full = None if bias is None else shift_by_query(bias.by_distance(), query.shape[2])
    return plain_attention(query, key, value, full, mask, scaling)[0]


def trained(query, key, value, bias, mask, scaling):
    return trained_attention(query, key, value, bias, mask, scaling, 0.0)


FORMS = {"plain": plain, "blocked": blocked_attention, "trained": trained}
per_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(params=[1, 2, 128], ids=lambda size: f"blocks_of_{size}")
def block(request, monkeypatch):
    """Query blocks shorter than, unlike and longer than the golden query lengths."""
    monkeypatch.setattr(softmax_xl, "BLOCK", request.param)
    return request.param


# Transformer-XL


@dataclass
class XLCase:
    """Golden values of the four-term attention, and an attention layer with the golden weights."""

    values: dict
    attention: XLAttention
    context: PositionContext
    visible: torch.Tensor  # (1, 1, Q, K)

    @property
    def position(self) -> XLPosition:
        return self.attention.position

    @property
    def scaling(self) -> float:
        return self.values["q"].shape[-1] ** -0.5

    def masks(self):
        """The golden mask, and None (causal) where it says the same."""
        causal = causal_mask(*self.visible.shape[2:], None)
        return [self.visible, None] if bool((causal == self.visible).all()) else [self.visible]

    def encoded(self, query=None):
        query = self.values["q"] if query is None else query
        return self.position.encode(query, self.values["k"], None, None, self.context)[0]

    def bias(self, query=None, distances=None):
        query = self.values["q"] if query is None else query
        distances = falling(self.values["k"].shape[2]) if distances is None else distances
        return self.position.bias(query, distances, self.context)


def xl_case(number, dtype=torch.float64, implementation="eager", untie_r=True) -> XLCase:
    values = part(f"xl{number}.")
    clamp_len = int(values["mlen_clamp_same_memlen"][1])
    visible = values["visible"].bool()[None, None]
    values = {name: value.to(dtype) for name, value in values.items() if value.is_floating_point()}
    heads, head_dim = values["u"].shape
    attention, context = make_attention(
        "xl",
        heads,
        head_dim,
        values["w_r"].shape[1],
        implementation,
        dtype,
        clamp_len=clamp_len if clamp_len > 0 else None,
        untie_r=untie_r,
    )
    biases = attention.position.biases if untie_r else context.shared
    for parameter, name in ((biases.u, "u"), (biases.v, "v"), (attention.position.r_proj.weight, "w_r")):
        parameter.data.copy_(values[name])
    return XLCase(values, attention, context, visible)


per_xl = pytest.mark.parametrize(
    "number", range(4), ids=["memory", "clamp_len", "clamp_len_and_window_over_batch", "no_memory"]
)


@per_xl
class TestXL:
    @pytest.mark.parametrize("term", "abcd")
    @torch.no_grad()
    def test_term(self, number, term):
        """(a) q . k, (b) q . W_R r, (c) u . k, (d) v . W_R r: each is left when the others are zeroed."""
        case = xl_case(number)
        biases, values = case.position.biases, case.values
        query = values["q"] if term in "ab" else torch.zeros_like(values["q"])
        if term == "a":
            biases.u.zero_()
        if term == "b":
            biases.v.zero_()
        if term in "ac":
            found = case.encoded(query) @ values["k"].transpose(-1, -2)
        else:
            found = shift_by_query(case.bias(query).by_distance(), query.shape[2]) / case.scaling
        found, expected = (t.masked_fill(~case.visible, 0) for t in (found, values[f"term_{term}"]))
        assert_close(found, expected, **EXACT)

    @pytest.mark.parametrize("untie_r", [True, False], ids=["untied", "shared"])
    @per_precision
    @torch.no_grad()
    def test_scores(self, number, dtype, untie_r):
        """Through shifting a bias by distance, and through distances that follow no pattern."""
        case = xl_case(number, dtype, untie_r=untie_r)
        query, key = case.values["q"], case.values["k"]
        bias = shift_by_query(case.bias().by_distance(), query.shape[2])
        shifted = softmax_xl.scaled_scores(case.encoded(), key, case.scaling) + bias
        grid = GatheredDistances.of(distance_grid(query.shape[2], key.shape[2]), "cpu")
        gathered = case.attention.scores(query, case.encoded(), key, grid, case.context)
        for scores in (shifted, gathered):
            assert_close(scores.masked_fill(~case.visible, 0), case.values["scores"], **CLOSE[dtype])

    @torch.no_grad()
    def test_scores_token_by_token(self, number):
        """A call a token, with the projected distances that a cache keeps and lets grow."""
        case = xl_case(number)
        case.context.derived = {}
        query, key = case.values["q"], case.values["k"]
        past = key.shape[2] - query.shape[2]
        for i in range(query.shape[2]):
            here = slice(i, i + 1)
            seen = past + i + 1
            content = softmax_xl.scaled_scores(case.encoded(query[:, :, here]), key[:, :, :seen], case.scaling)
            scores = content + case.bias(query[:, :, here], falling(seen)).by_distance()
            expected = case.values["scores"][:, :, here, :seen]
            assert_close(scores.masked_fill(~case.visible[:, :, here, :seen], 0), expected, **EXACT)

    @per_form
    @per_precision
    @torch.no_grad()
    def test_output(self, number, form, dtype, block):
        case = xl_case(number, dtype)
        values = case.values
        for mask in case.masks():
            output = FORMS[form](case.encoded(), values["k"], values["value"], case.bias(), mask, case.scaling)
            assert_close(output, values["out"], **CLOSE[dtype])

    @pytest.mark.parametrize("has_gradient", [False, True], ids=["frozen", "trained"])
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("distances", ["falling", "gathered"])
    def test_attention_layer(self, number, implementation, has_gradient, distances):
        case = xl_case(number, implementation=implementation)
        values = case.values
        query, key, value = values["q"], values["k"], values["value"]
        grid = GatheredDistances.of(distance_grid(query.shape[2], key.shape[2]), "cpu")
        asked = {"falling": {"distances": falling(key.shape[2])}, "gathered": {"gather_distances": grid}}[distances]
        for mask in case.masks():
            with torch.set_grad_enabled(has_gradient):
                output, weights = case.attention.softmax(
                    query,
                    case.encoded(),
                    key,
                    value,
                    case.context,
                    mask,
                    **asked,
                    wants_weights=implementation == "eager",
                )
            assert output.requires_grad == has_gradient
            assert_close(output.detach(), values["out"].transpose(1, 2).flatten(2), **EXACT)
            if implementation == "eager":
                assert_close(weights.detach(), values["probs"], **EXACT)

    @pytest.mark.parametrize("dropout", [0.0, 0.4], ids=["", "dropout"])
    def test_gradients(self, number, dropout, block):
        """Of q, k, v, u, v and W_R; dropout is drawn again in the backward pass, a block at a time."""

        def form(*args):
            torch.manual_seed(0)
            return trained_attention(*args, dropout)

        case = xl_case(number)
        states = [case.values[name] for name in ("q", "k", "value")]
        mask = case.masks()[-1]
        check_gradients(form, case.attention, case.context, states, mask, is_fast=number != 3)
        if not dropout:
            check_gradients_against_plain(form, case.attention, case.context, states, mask)


class _Softmax(nn.Module):
    """Encode, bias and one form of attention as a module, so that parameters can be exchanged."""

    def __init__(self, form, attention, context, mask):
        super().__init__()
        self.position, self.shared = attention.position, context.shared
        self.form, self.mask, self.scaling = form, mask, attention.scaling

    def forward(self, query, key, value):
        context = PositionContext(shared=self.shared)
        encoded, key = self.position.encode(query, key, None, None, context)
        bias = self.position.bias(query, falling(key.shape[2]), context)
        return self.form(encoded, key, value, bias, self.mask, self.scaling)


def leaves_of(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def check_gradients(form, attention, context, states, mask=None, is_fast=True):
    """Against finite differences, by the states and by the scheme's parameters. Fast: of a random projection, to which
    every entry of the Jacobian adds."""
    layer = _Softmax(form, attention, context, mask)
    names = [name for name, _ in layer.named_parameters()]

    def function(*tensors):
        return functional_call(layer, dict(zip(names, tensors[3:], strict=True)), tensors[:3])

    assert torch.autograd.gradcheck(function, leaves_of([*states, *layer.parameters()]), fast_mode=is_fast)


def check_gradients_against_plain(form, attention, context, states, mask=None):
    """Against autograd through the plain form: entry by entry, in all digits."""
    found = []
    for either in (form, plain):
        layer = _Softmax(either, attention, context, mask)
        leaves = leaves_of(states)
        output = layer(*leaves)
        weight = torch.arange(output.numel()).double().cos().view_as(output)
        found.append(torch.autograd.grad((output * weight).sum(), [*leaves, *layer.parameters()]))
    for ours, reference in zip(*found, strict=True):
        assert_close(ours, reference, **EXACT)


@pytest.mark.parametrize("size", [16, 64])
@per_dtype
class TestSinusoids:
    def expected(self, size):
        values = next(v for v in (part("sin0."), part("sin1.")) if v["r"].shape[1] == size)
        return values["distance"], values["r"]

    def test_near_and_far(self, size, dtype):
        """To distance 100,000, the halves not interleaved, rounded once."""
        distances, expected = self.expected(size)
        assert_close(sinusoid(distances, size, dtype).double(), expected, **ANGLES[dtype])

    @torch.no_grad()
    def test_through_the_scheme(self, size, dtype):
        """With W_R = 1 the table holds the sinusoids; kept in a cache it is the same."""
        distances, expected = self.expected(size)
        attention, context = make_attention("xl", 2, size // 2, size, dtype=dtype)
        nn.init.eye_(attention.position.r_proj.weight)
        query = torch.zeros(1, 2, 1, size // 2, dtype=dtype)
        for derived in (None, {}):
            context.derived = derived
            table = attention.position.bias(query, distances, context).table  # (H, K, D)
            assert_close(table.transpose(0, 1).flatten(1).double(), expected, **ANGLES[dtype])


# Schemes whose bias is a number for each distance and head


def table_case(name, dtype=torch.float64):
    """An attention layer with the golden table, and the golden bias (H, Q, K) of a block over its memory."""
    if name == "alibi":
        (values,) = part("alibi.bias.").values()
        attention, context = make_attention("alibi", 6, 4, dtype=dtype)
        return attention, context, values
    values = part(f"{name}.")
    num_buckets, max_distance, is_bidirectional = values["buckets_max_bi"].tolist()
    # What looks back in a bidirectional table is its first half, and has the buckets of a table of half the size.
    num_buckets //= 1 + is_bidirectional
    attention, context = make_attention(
        "t5",
        values["table"].shape[1],
        4,
        dtype=dtype,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
    )
    context.shared.table.data.copy_(values["table"][:num_buckets])
    return attention, context, values["bias_7_over_147"]


def random_states(heads, num_queries, num_keys, dtype=torch.float64, size=4):
    generator = torch.Generator().manual_seed(0)
    lengths = (num_queries, num_keys, num_keys)
    return [torch.randn(2, heads, n, size, generator=generator, dtype=torch.float64).to(dtype) for n in lengths]


def expected_output(query, key, value, bias):
    """softmax(q k / sqrt(D) + bias) v over the past, in float64."""
    scores = query.double() @ key.double().transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ value.double()


@pytest.mark.parametrize("name", ["t5_0", "t5_1", "t5_2", "alibi"], ids=["t5-32", "t5-two_sided", "t5-16", "alibi"])
class TestTables:
    @per_dtype
    @torch.no_grad()
    def test_bias_of_a_block(self, name, dtype):
        """ALiBi's numbers are in float32 at least; a T5 table is the checkpoint's, rounded to its dtype."""
        attention, context, expected = table_case(name, dtype)
        heads, num_queries, num_keys = expected.shape
        query = torch.zeros(1, heads, num_queries, 4, dtype=dtype)
        bias = attention.position.bias(query, falling(num_keys), context)
        assert bias.query is None
        shifted = shift_by_query(bias.by_distance(), num_queries)
        grid = GatheredDistances.of(distance_grid(num_queries, num_keys), "cpu")
        gathered = gather_bias(attention.position.bias(query, grid.values, context), grid)
        if name == "alibi":
            assert shifted.dtype == torch.promote_types(dtype, torch.float32)
        else:
            expected = expected.to(dtype)
        visible = causal_mask(num_queries, num_keys, None)[0]
        tolerance = {"rtol": 1e-7, "atol": 0} if name == "alibi" else {"rtol": 0, "atol": 0}
        for found in (shifted, gathered):
            found, wanted = (t.double().masked_fill(~visible, 0) for t in (found[0], expected))
            assert_close(found, wanted, **tolerance)

    @per_form
    @per_precision
    @torch.no_grad()
    def test_output(self, name, form, dtype, block):
        attention, context, expected = table_case(name, dtype)
        heads, num_queries, num_keys = expected.shape
        query, key, value = random_states(heads, num_queries, num_keys, dtype)
        bias = attention.position.bias(query, falling(num_keys), context)
        output = FORMS[form](query, key, value, bias, None, attention.scaling)
        assert_close(output.double(), expected_output(query, key, value, expected), **CLOSE[dtype])

    def test_gradients(self, name, block):
        """Of q, k, v and of the table, whose entries many distances share."""
        attention, context, _ = table_case(name)
        states = random_states(attention.num_heads, 3, 30, size=2)
        check_gradients(trained, attention, context, states)
        check_gradients_against_plain(trained, attention, context, states)


@pytest.mark.parametrize("number", range(3), ids=["32_128", "32_128_two_sided", "16_64"])
class TestT5:
    def test_buckets_to_100_000(self, number):
        values = part(f"t5_{number}.")
        num_buckets, max_distance, is_bidirectional = values["buckets_max_bi"].tolist()
        past = values["distance"] >= 0
        found = relative_bucket(values["distance"][past], num_buckets // (1 + is_bidirectional), max_distance)
        assert found.tolist() == values["bucket"][past].tolist()

    @torch.no_grad()
    def test_bias_to_100_000(self, number):
        values = part(f"t5_{number}.")
        attention, context, _ = table_case(f"t5_{number}")
        past = values["distance"] >= 0
        bias = attention.position.bias(torch.zeros(1, 3, 1, 4), values["distance"][past], context)
        assert_close(bias.table, values["table"][values["bucket"][past]].T, rtol=0, atol=0)

    def test_far_distance_is_the_first_of_the_last_bucket(self, number):
        values = part(f"t5_{number}.")
        attention, *_ = table_case(f"t5_{number}")
        far = T5Position.far_distance(attention.config)
        last = values["distance"][values["bucket"] == attention.position.num_buckets - 1]
        assert far == last[last >= 0].min()


class TestAlibi:
    @pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 32, 40, 112])
    def test_slopes(self, heads):
        """The bias at distance 1 is minus the slope."""
        expected = golden(CASE)[f"alibi.slopes.{heads}"]
        attention, context = make_attention("alibi", heads, 2)
        bias = attention.position.bias(torch.zeros(1, heads, 1, 2).double(), torch.tensor([1]), context)
        for found in (torch.tensor(alibi_slopes(heads), dtype=torch.float64), -bias.table[:, 0]):
            assert_close(found, expected, rtol=1e-15, atol=0)

    @per_dtype
    def test_bias_to_100_000(self, dtype):
        """In float32 at least, whatever the model's dtype: one rounding of 24 bits."""
        (expected,) = part("alibi.bias_at_100000.").values()
        attention, context = make_attention("alibi", 6, 4, dtype=dtype)
        distances = 100_000 - torch.arange(0, 100_001, 12_500)
        bias = attention.position.bias(torch.zeros(1, 6, 1, 4, dtype=dtype), distances, context)
        rtol = 1e-15 if dtype == torch.float64 else 2e-7
        assert_close(bias.table.double(), expected, rtol=rtol, atol=0)


# Rotary


def rope_case(number, dtype=torch.float64, implementation="eager"):
    values = part(f"rope{number}.")
    head_dim, rotated, base = values["dim_rotary_base"].tolist()
    parameters = {"rope_theta": base, "partial_rotary_factor": rotated / head_dim}
    attention, context = make_attention(
        "rope", 2, int(head_dim), implementation=implementation, dtype=dtype, rope_parameters=parameters
    )
    assert isinstance(attention.position, RopePosition)
    return values, attention, context


@pytest.mark.parametrize("number", range(3), ids=["whole", "half", "half_of_24_base_500000"])
class TestRope:
    def rotate(self, attention, states, positions):
        """states (B, K, D) -> rotated, as query and as key."""
        positions = positions[None]
        states = states[:, None]
        return [t[:, 0] for t in attention.encode(states, states, positions, positions, PositionContext())]

    def test_rotation_near_and_far(self, number):
        """To position 100,000; pairs (k, k + r / 2), the rest as it was."""
        values, attention, _ = rope_case(number)
        for found in self.rotate(attention, values["x"], values["positions"]):
            assert_close(found, values["half"], rtol=0, atol=1e-9)

    @per_dtype
    def test_cosine_and_sine(self, number, dtype):
        """What unit vectors become; half precision is raised, so the angles are those of float32, rounded once more."""
        values, attention, _ = rope_case(number, dtype)
        half = values["cos"].shape[1]
        for first, second in ((0, half), (half, 0)):
            states = torch.zeros(1, len(values["positions"]), attention.head_dim, dtype=dtype)
            states[..., first : first + half] = 1
            sine = values["sin"] if first == 0 else -values["sin"]
            for found in self.rotate(attention, states, values["positions"]):
                assert_close(found[0, :, first : first + half].double(), values["cos"], **ANGLES[dtype])
                assert_close(found[0, :, second : second + half].double(), sine, **ANGLES[dtype])
                assert not found[..., 2 * half :].any()

    def test_interleaved_pairs_after_permuting_the_head(self, number):
        values, attention, _ = rope_case(number)
        order = values["permutation"]
        for found in self.rotate(attention, values["x"][..., order], values["positions"]):
            assert_close(found, values["interleaved"][..., order], rtol=0, atol=1e-9)

    @pytest.mark.parametrize("shift", [0, 1_000, 100_000, 10_000_000])
    @per_precision
    @pytest.mark.parametrize("pairs", ["half", "interleaved"])
    def test_scores_over_memory(self, number, pairs, shift, dtype):
        """Only differences of positions count: at position 10,000,000 as at 0."""
        values, attention, context = rope_case(number, dtype)
        query, key = values["mem.q"].to(dtype), values["mem.k"].to(dtype)
        if pairs == "interleaved":
            query, key = query[..., values["permutation"]], key[..., values["permutation"]]
        num_queries, num_keys = query.shape[2], key.shape[2]
        positions = shift + torch.arange(num_keys)[None]
        encoded, key = attention.encode(query, key, positions[:, -num_queries:], positions, context)
        grid = GatheredDistances.of(distance_grid(num_queries, num_keys), "cpu")
        found = attention.scores(query, encoded, key, grid, context) / attention.scaling
        # float64: 1e7 times the rounding of a frequency, on scores up to 20; float32: seven digits of such scores.
        tolerance = {"rtol": 0, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-5}
        assert_close(found, values[f"mem.scores_{pairs}"], **tolerance, check_dtype=False)

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("has_mask", [False, True], ids=["causal", "masked"])
    def test_attention_layer(self, number, has_mask, implementation):
        """Rotated states through the attention functions of Transformers: there is no bias of this scheme."""
        values, attention, context = rope_case(number, implementation=implementation)
        query, key = values["mem.q"], values["mem.k"]
        value = random_states(2, 1, key.shape[2], size=attention.head_dim)[2][:1]
        positions = torch.arange(key.shape[2])[None]
        encoded, encoded_key = attention.encode(query, key, positions[:, -query.shape[2] :], positions, context)
        mask = causal_mask(query.shape[2], key.shape[2], None)
        if has_mask:
            mask[..., :3] = False
        output, _ = attention.softmax(
            query, encoded, encoded_key, value, context, mask if has_mask else None, falling(key.shape[2])
        )
        scores = (values["mem.scores_half"] * attention.scaling).masked_fill(~mask, -math.inf)
        assert_close(output, (scores.softmax(-1) @ value).transpose(1, 2).flatten(2), **EXACT)
