"""Public bug reports about compressive memory and linear attention. Ids are the reports'."""

import copy
import weakref
from functools import partial

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from report_helpers import CLOSE, EXACT, MEMORIES, accepts, every_pair, grads_of, ids_for, make, off, padded, worst
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from modeling_xl import XLCache, XLConfig, XLModel, linear_xl, modeling_xl

# Texts here have some 20 tokens: what a scheme no longer tells apart, and what leaves a memory, begins well inside them.
SCHEMES = {
    "none": {},
    "alibi": {},
    "rope": {},
    "t5": {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 9},
    "xl": {"clamp_len": 4},
}
MAPS = ("elu", "relu", "favor")
FUNCTIONS = ("mean", "max", "conv", "dilated", "most_used")


def linear(scheme: str, feature_map: str, **fields):
    settings = {"feature_map": feature_map, "num_random_features": 20, **SCHEMES[scheme]}
    return make(scheme, "linear", **{**settings, **fields})


def compressive(scheme: str = "xl", fn: str = "conv", **fields):
    settings = {
        "compression_fn": fn,
        "compression_loss": "attention" if fn in ("conv", "dilated") else None,
        "compression_rate": 2,
        "compressed_mem_len": 3,
        **SCHEMES[scheme],
    }
    return make(scheme, "compressive", **{**settings, **fields})


# Name -> what makes the model; every scheme with every feature map, and every scheme and function of a compressive memory.
LINEAR = {f"linear-{scheme}-{name}": partial(linear, scheme, name) for name in MAPS for scheme in SCHEMES}
LINEAR["linear-xl_1-elu"] = partial(linear, "xl", "elu", clamp_len=1)  # one bias for every distance but 0, and no rows
COMPRESSIVE = {f"compressive-{scheme}-conv": partial(compressive, scheme, "conv") for scheme in SCHEMES}
COMPRESSIVE |= {f"compressive-xl-{fn}": partial(compressive, "xl", fn) for fn in FUNCTIONS}
KINDS = {**LINEAR, **COMPRESSIVE}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_linear = pytest.mark.parametrize("kind", LINEAR)
every_compressive = pytest.mark.parametrize("kind", COMPRESSIVE)
per_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def build(kind: str, **fields):
    return KINDS[kind](**fields)


def is_compressor(name: str) -> bool:
    return ".compression." in name or ".decompression." in name


class TestC01:
    """report C01: the auxiliary loss trains nothing, and a training step freezes parameters for good."""

    # With bptt_segments gradient flows through the memory: to rows that were compressed, and from slots, if it may.
    @pytest.mark.parametrize("bptt_segments", [0, 4])
    @pytest.mark.parametrize("loss", ["attention", "autoencode"])
    @pytest.mark.parametrize("fn", ["conv", "dilated"])
    def test_trains_the_compression_only(self, fn, loss, bptt_segments):
        """report C01: the auxiliary loss alone gives gradient to the compression and to nothing else."""
        model = compressive(fn=fn, compression_loss=loss, bptt_segments=bptt_segments).train()
        ids = ids_for(model, 2, 25)
        model(ids).aux_loss.backward()
        found = {name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()}
        assert found == {name for name, _ in model.named_parameters() if is_compressor(name)}
        assert len(found) == 2 * (3 if loss == "autoencode" else 2)  # two layers

    @pytest.mark.parametrize("bptt_segments", [0, 4])
    @pytest.mark.parametrize("loss", ["attention", "autoencode"])
    @pytest.mark.parametrize("fn", ["conv", "dilated"])
    def test_main_loss_leaves_the_compression_alone(self, fn, loss, bptt_segments):
        """report C01: the loss of the text gives gradient to everything but the compression."""
        fields = {"compression_loss": loss, "compression_loss_coef": 0.0, "bptt_segments": bptt_segments}
        model = compressive(fn=fn, **fields).train()
        ids = ids_for(model, 2, 25)
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            assert bool(parameter.grad.any()) != is_compressor(name), name

    @pytest.mark.parametrize("loss", ["attention", "autoencode"])
    def test_the_loss_falls(self, loss):
        """report C01: steps on the auxiliary loss alone lower it, and move no other parameter."""
        model = compressive(compression_loss=loss).train()
        ids = ids_for(model, 2, 25)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), 3e-2, weight_decay=0.0)
        losses = []
        for _ in range(20):
            aux_loss = model(ids).aux_loss
            optimizer.zero_grad()
            aux_loss.backward()
            optimizer.step()
            losses.append(float(aux_loss.detach()))
        assert losses[-1] < losses[0] / 2
        for name, parameter in model.named_parameters():
            assert (off(parameter, before[name]) > 0) == is_compressor(name), name

    @pytest.mark.parametrize("loss", ["attention", "autoencode", None])
    def test_a_step_freezes_nothing(self, loss):
        """report C01: after a training step every parameter still requires gradient, and gets it in the next."""
        model = compressive(compression_loss=loss).train()
        ids = ids_for(model, 2, 25)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
            for name, parameter in model.named_parameters():
                if loss is not None or not is_compressor(name):
                    assert parameter.grad.any(), name


@per_half
@every_kind
def test_c08_state_stays_bounded(kind, dtype):
    """report C08: after two rounds the memory and its normaliser are infinite and outputs NaN. Here: 128 segments."""
    model = build(kind, dtype=dtype)
    ids = ids_for(model, 1, 128 * 5)
    cache, first, largest = None, {}, {}
    with torch.no_grad():
        for part in ids.split([5, 15] + [20] * 31, 1):
            output = model(part, cache=cache)
            cache = output.cache
            assert output.logits.isfinite().all()
            for layer, state in enumerate(cache.states):
                kept = {name: state.last(name, state.size) for name in state.rows} | state.fixed
                assert kept
                for name, tensor in kept.items():
                    if tensor.is_floating_point():
                        assert tensor.isfinite().all(), name
                        size = float(tensor.abs().max())
                        largest[layer, name] = max(size, largest.get((layer, name), 0.0))
                        if size:  # tokens that are still kept as rows are in no sum yet
                            first.setdefault((layer, name), size)
                if "norm" in state.fixed:
                    # In half precision a sum of 640 numbers would no longer notice the next one.
                    assert state.fixed["state"].dtype == state.fixed["norm"].dtype == torch.float32
    # What is summed without decay grows with the text, so 128 times; other numbers only differ by chance.
    assert {name for name in largest if name[1] != "usage"} == first.keys()  # that begins anew with each segment
    assert all(largest[name] < 1e4 * size for name, size in first.items())


class PeakMemory(TorchDispatchMode):
    """Bytes of tensors alive at once among those that operators return meanwhile."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known[storage] = True
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.now -= size


def peak(model: XLModel, ids, parts, has_gradient: bool = False) -> int:
    cache = None
    with torch.set_grad_enabled(has_gradient), PeakMemory() as memory:
        for part in ids.split(parts, 1):
            output = model(part, cache=cache)
            cache = output.cache
    return memory.most


WIDE = {"hidden_size": 16, "intermediate_size": 900, "segment_len": 32, "mem_len": 32, "dtype": torch.float32}


class TestC10:
    """report C10: a loop over segments inside a layer keeps the activations of all of them."""

    @pytest.mark.parametrize("feeding", ["whole", "segments"])
    @every_kind
    def test_memory_is_flat_in_segments(self, kind, feeding, monkeypatch):
        """report C10: without gradient, 16 segments need less than 1.5 times the memory of 2."""
        monkeypatch.setattr(modeling_xl, "LONGEST_PIECE", 32)  # what stands for a segment where there are none
        model = build(kind, **WIDE, **({"compressed_mem_len": 20} if kind in COMPRESSIVE else {})).model
        ids = ids_for(model, 1, 16 * 32)
        most = [peak(model, ids[:, : n * 32], n * 32 if feeding == "whole" else 32) for n in (2, 16)]
        # The feed-forward part of a piece: 3 tensors of 32 x 900 numbers. Less would be no measure of activations.
        assert most[0] > 2 * 32 * 900 * 4
        assert most[1] < 1.5 * most[0]

    @pytest.mark.parametrize("kind", ["linear-rope-elu", "compressive-xl-conv"])
    def test_the_measure_sees_what_is_kept(self, kind):
        """report C10: with gradient one call keeps the activations of all its segments, and the measure says so."""
        model = build(kind, **WIDE, **({"compressed_mem_len": 20} if kind in COMPRESSIVE else {})).model
        ids = ids_for(model, 1, 16 * 32)
        most = [peak(model, ids[:, : n * 32], n * 32, has_gradient=True) for n in (2, 16)]
        assert most[1] > 4 * most[0]

    @every_kind
    def test_state_is_flat_in_segments(self, kind):
        """report C10: the state between calls does not grow beyond what 8 segments fill."""
        model = build(kind)
        cache, sizes = None, []
        with torch.no_grad():
            for part in ids_for(model, 1, 40 * 5).split(5, 1):
                cache = model(part, cache=cache).cache
                sizes.append(cache.nbytes)
        # Buffers are written to their end and then made anew with some room, so they swing; they do not grow.
        assert max(sizes[8:]) <= 2 * max(sizes[:8])
        assert max(sizes[24:]) <= max(sizes[:24])


class TestC13:
    """report C13: gradient through the memory, back to old segments."""

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_equals_backpropagation_through_the_whole_text(self, scheme):
        """report C13: while nothing is compressed, gradients through memory are those of one pass over everything."""
        fields = {"bptt_segments": 4, "mem_len": 25, "compression_loss": None}
        model = compressive(scheme, "mean", **fields).train()
        whole = make(scheme, "none", **SCHEMES[scheme]).train()
        whole.load_state_dict(model.state_dict())
        ids = ids_for(model, 2, 25)
        for each in (model, whole):
            each(ids, labels=ids).loss.backward()
        assert worst(grads_of(model), grads_of(whole)) < EXACT
        cut = compressive(scheme, "mean", **{**fields, "bptt_segments": 3}).train()
        cut(ids, labels=ids).loss.backward()
        assert worst(grads_of(cut), grads_of(whole)) > 1e-4

    @pytest.mark.parametrize("has_reach", [True, False], ids=["bptt", "no_bptt"])
    def test_what_was_compressed_gets_no_gradient(self, has_reach):
        """report C13: rows in memory get gradient for `bptt_segments`; slots are read, and pass none on."""
        model = compressive(num_hidden_layers=1, bptt_segments=9 if has_reach else 0).train()
        embeds = model.model.embed(ids_for(model, 1, 30)).detach().requires_grad_()
        logits = model(inputs_embeds=embeds).logits[:, 25:]
        logits.square().sum().backward()
        reached = embeds.grad[0].abs().sum(-1) > 0
        # 25 tokens and a memory of 7: 18 rows have left, all in pairs.
        assert reached.tolist() == [False] * 18 + [has_reach] * 7 + [True] * 5
        changed = embeds.detach().clone()
        changed[:, 15] += 1
        assert off(model(inputs_embeds=changed).logits[:, 25:], logits) > 1e-4

    @pytest.mark.parametrize("fn", FUNCTIONS)
    @pytest.mark.parametrize("scheme", ["xl", "rope"])
    def test_is_the_derivative_at_constant_slots(self, scheme, fn, monkeypatch):
        """report C13: the gradient is the derivative of the loss while what the slots hold stays as it is."""
        model = compressive(scheme, fn, bptt_segments=9, compression_loss=None).train()
        parameters = [parameter for name, parameter in model.named_parameters() if not is_compressor(name)]
        ids = ids_for(model, 2, 30)
        kept: list[torch.Tensor] = []
        replayed: list[torch.Tensor] = []

        def watch(memory):
            close = type(memory)._with_slots

            def with_slots(attention, state, piece, closing, made):
                if replayed:
                    made = [(replayed.pop(0), number) for _, number in made]
                else:
                    kept.extend(new for new, _ in made)
                return close(memory, attention, state, piece, closing, made)

            monkeypatch.setattr(memory, "_with_slots", with_slots)

        for layer in model.model.layers:
            watch(layer.self_attn.memory)
        loss = model(ids, labels=ids).loss
        grads = torch.autograd.grad(loss, parameters)
        slots = list(kept)
        assert len(slots) >= 8  # two layers, four segments with something that leaves
        generator = torch.Generator().manual_seed(5)
        directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        expected = float(sum((grad * direction).sum() for grad, direction in zip(grads, directions, strict=True)))

        def slope(is_constant: bool) -> float:
            losses = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    for parameter, direction in zip(parameters, directions, strict=True):
                        parameter += step * direction
                    replayed.extend(slots if is_constant else [])
                with torch.enable_grad():
                    losses.append(float(model(ids, labels=ids).loss.detach()))
                assert not replayed
                with torch.no_grad():
                    for parameter, direction in zip(parameters, directions, strict=True):
                        parameter -= step * direction
            return (losses[0] - losses[1]) / 2e-6

        # A difference of two losses of size 10, rounded to 1e-15, over 2e-6, is off by 1e-8; its curvature by as much.
        assert abs(slope(True) - expected) < 1e-5 * max(1.0, abs(expected))
        assert abs(slope(False) - expected) > 1e-3


class TestF01:
    """report F01: outputs in eval mode differ from pass to pass, since features are drawn anew."""

    @pytest.mark.parametrize("interval", [None, 1], ids=["kept", "redrawn"])
    @every_linear
    def test_eval_is_deterministic(self, kind, interval):
        """report F01: two passes in eval are equal to the last bit, with gradient and without."""
        model = build(kind, redraw_interval=interval)
        ids = ids_for(model, 2, 13)
        first = model(ids).logits
        assert torch.equal(first, model(ids).logits)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, model(ids).logits)
            assert off(model(ids).logits, first) < EXACT

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_features_are_drawn_again_in_training_only(self, scheme):
        """report F01: `redraw_interval` changes outputs in training, and eval afterwards is steady again."""
        model = linear(scheme, "favor", redraw_interval=1)
        ids = ids_for(model, 2, 13)
        before = model(ids).logits
        model.train()
        for _ in range(3):
            model(ids)
        model.eval()
        assert off(model(ids).logits, before) > 1e-3
        assert torch.equal(model(ids).logits, model(ids).logits)


def relative(found, right) -> float:
    """Root mean square of a difference over that of what is right."""
    right = right.detach().double()
    return float((found.detach().double() - right).square().mean().sqrt() / right.square().mean().sqrt())


# A rounding is 2^-11 or 2^-8 of a number, and two layers of sums make some times that. The products of relu features are
# small where few are above zero in both, and a sum of few products loses more when it is divided by.
def limit_of(kind: str, dtype: torch.dtype) -> float:
    limit = {torch.float16: 0.005, torch.bfloat16: 0.04}[dtype]
    return 2 * limit if kind.endswith("relu") else limit


class TestF03:
    """report F03: half precision is not supported."""

    @per_half
    @every_linear
    def test_half_models(self, kind, dtype):
        """report F03: .half() and .bfloat16() are finite and near float32, with pads, in two calls, and train."""
        exact = build(kind, dtype=torch.float32)
        model = copy.deepcopy(exact)
        model = model.half() if dtype == torch.float16 else model.bfloat16()
        exact.load_state_dict(model.state_dict())  # rounded weights
        filled, mask = padded(ids_for(model, 2, 18), [18, 7], "left")
        with torch.no_grad():
            found, right = model(filled, mask), exact(filled, mask)
            after, right_after = model(filled, mask, cache=found.cache), exact(filled, mask, cache=right.cache)
        for half, full in ((found, right), (after, right_after)):
            assert half.logits.dtype == dtype
            assert half.logits.isfinite().all()
            assert relative(half.logits[mask.bool()], full.logits[mask.bool()]) < limit_of(kind, dtype)
        loss = model.train()(filled, mask, labels=filled).loss
        loss.backward()
        assert loss.isfinite()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    @per_half
    @every_linear
    def test_autocast(self, kind, dtype):
        """report F03: under autocast outputs and gradients are finite, and outputs near float32."""
        model = build(kind, dtype=torch.float32).train()
        ids = ids_for(model, 2, 18)
        with torch.no_grad():
            right = model(ids)
            with torch.autocast("cpu", dtype):
                found = model(ids)
                assert found.cache.states[0].fixed["norm"].dtype == torch.float32
                after = model(ids, cache=found.cache)
            right_after = model(ids, cache=right.cache)
        for half, full in ((found, right), (after, right_after)):
            assert half.logits.isfinite().all()
            assert relative(half.logits, full.logits) < limit_of(kind, dtype)
        with torch.autocast("cpu", dtype):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.isfinite()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("has_documents", [False, True], ids=["one_document", "documents"])
@pytest.mark.parametrize("has_gradient", [True, False], ids=["grad", "no_grad"])
@every_linear
def test_f05_three_forms_are_equal(kind, has_gradient, has_documents, monkeypatch):
    """report F05: is the recurrent form the same? Whole text, blocks of 1, 3 and 16, and single tokens with state."""
    model = build(kind)
    ids = ids_for(model, 2, 23)
    documents = torch.zeros_like(ids)
    documents[1, 9:] = has_documents

    results = {}
    for size in (1000, 1, 3, 16):
        monkeypatch.setattr(linear_xl, "BLOCK", size)
        for parts in ([23], [7, 1, 13, 2], [1] * 23)[: 3 if size == 1000 else 2]:  # a single token is one block anyhow
            cache, logits = None, []
            with torch.set_grad_enabled(has_gradient):
                for part, numbers in zip(ids.split(parts, 1), documents.split(parts, 1), strict=True):
                    output = model(part, cache=cache, document_ids=numbers)
                    cache = output.cache
                    logits.append(output.logits)
            states = [state.fixed[name] for state in cache.states for name in ("state", "norm")]
            results[size, len(parts)] = [torch.cat(logits, 1), *states]
        if has_gradient:
            model.zero_grad()
            model(ids, labels=ids, document_ids=documents).loss.backward()
            results[size, "gradient"] = list(grads_of(model).values())
    for (size, parts), found in results.items():
        expected = results[1000, "gradient" if parts == "gradient" else 1]
        for a, b in zip(found, expected, strict=True):
            assert off(a, b) < EXACT * max(1.0, float(b.detach().abs().max())), (size, parts)


def kept_of(cache: XLCache, row: int) -> list[dict[str, torch.Tensor]]:
    """What each layer keeps for a row of the batch."""
    return [
        {name: state.last(name, state.size)[row] for name in state.rows} | {n: t[row] for n, t in state.fixed.items()}
        for state in cache.states
    ]


def same_kept(found, expected) -> bool:
    """Whether two rows keep the same; the newest rows are compared, for a longer row beside it makes room for more."""
    for a, b in zip(found, expected, strict=True):
        assert a.keys() - {"place"} == b.keys() - {"place"}  # there once any row beside it has a slot
        for name, right in b.items():
            left = a[name]
            if name in ("key", "value", "hidden", "content_key"):
                count = min(left.shape[-2], right.shape[-2])
                left, right = left[..., left.shape[-2] - count :, :], right[..., right.shape[-2] - count :, :]
            if not torch.equal(left, right) and off(left, right) > EXACT * max(1.0, float(right.abs().max())):
                return False
    return True


@pytest.mark.parametrize("has_gradient", [True, False], ids=["grad", "no_grad"])
@every_kind
def test_f06_pads_inside_are_no_tokens(kind, has_gradient):
    """report F06: pads inside a row still decay the state. Random pads: state, normaliser and later logits unchanged."""
    model = build(kind)
    lengths = [21, 9]
    ids, more = ids_for(model, 2, 21), ids_for(model, 2, 6, seed=4)
    filled, mask = padded(ids, lengths, "inside")
    other = torch.where(mask.bool(), filled, (filled + 1 + torch.arange(filled.shape[1])) % 97)
    assert (other != filled).any()
    with torch.set_grad_enabled(has_gradient):
        for content in (filled, other):
            output = model(content, mask)
            states = [kept_of(output.cache, row) for row in range(2)]
            later = model(more, cache=output.cache).logits
            for row, length in enumerate(lengths):
                own = model(ids[row : row + 1, :length])
                assert off(output.logits[row][mask[row].bool()], own.logits[0]) < EXACT
                assert same_kept(states[row], kept_of(own.cache, 0))
                assert off(later[row], model(more[row : row + 1], cache=own.cache).logits[0]) < EXACT
        # And a token more is not the same state.
        assert not same_kept(states[0], kept_of(model(ids[:1, :20]).cache, 0))


@pytest.mark.parametrize("has_gradient", [True, False], ids=["grad", "no_grad"])
@every_kind
def test_f08_one_padded_row(kind, has_gradient):
    """report F08: a batch of one is not masked. One row with pads on its left has the numbers it has without them."""
    model = build(kind)
    ids, more = ids_for(model, 1, 17), ids_for(model, 1, 8, seed=4)
    filled, mask = padded(ids, [17], "left")
    assert not mask[0, 0]
    with torch.set_grad_enabled(has_gradient):
        output, own = model(filled, mask), model(ids)
        assert off(output.logits[:, -17:], own.logits) < EXACT
        assert off(model(more, cache=output.cache).logits, model(more, cache=own.cache).logits) < EXACT
        assert off(model(filled).logits[:, -17:], own.logits) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@every_kind
def test_f13_row_without_any_token(kind, dtype):
    """report F13: NaN where a row is wholly masked. It gives zeros, and no NaN to other rows or to any gradient."""
    model = build(kind, dtype=dtype).train()
    ids, more = ids_for(model, 3, 16), ids_for(model, 3, 9, seed=4)
    mask = torch.ones_like(ids)
    mask[1] = 0
    mask[2, :6] = 0
    output = model.model(ids, mask)
    assert not output.last_hidden_state[mask == 0].any()
    assert output.last_hidden_state.isfinite().all()
    first = model(ids, mask, labels=ids)
    first.loss.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    assert any(parameter.grad.any() for name, parameter in model.named_parameters() if "qkv_proj" in name)
    # The row has a state as good as none: what it says later is what a new row says.
    model.eval()
    with torch.no_grad():
        output = model(ids, mask)
        own = model(ids[:1])
        later = model(more, cache=output.cache).logits
        fresh, after = model(more[1:2]).logits, model(more[:1], cache=own.cache).logits
    # float16: other kernels for a batch of one round otherwise, at logits of size 10.
    limit = CLOSE if dtype == torch.float32 else 0.05
    assert off(output.logits[:1], own.logits) < limit
    assert off(later[1:2], fresh) < limit
    assert off(later[:1], after) < limit


@pytest.mark.parametrize("scheme", SCHEMES)
def test_f13_query_that_sees_nothing(scheme):
    """report F13: 0 / 0 where no key weighs anything. Features that all vanish give zeros and finite gradients."""
    model = linear(scheme, "elu", dtype=torch.float32, attention_bias=True, num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    size = (attention.num_heads + attention.num_key_value_heads) * attention.head_dim
    with torch.no_grad():
        attention.qkv_proj.weight[:size] = 0
        attention.qkv_proj.bias[:size] = -200  # exp(-200) is 0 in float32
    outputs = []
    attention.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    ids = ids_for(model, 2, 13)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
    assert not outputs[0].any()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@every_pair
def test_f10_nothing_leaks_from_later_tokens(scheme, memory):
    """report F10: a causal low-rank attention leaks. A changed token changes no logits before it, by so much as a bit."""
    model = make(scheme, memory)
    length = 23
    ids = ids_for(model, 1, length)
    variants = ids.repeat(length + 1, 1)
    variants[torch.arange(length), torch.arange(length)] = (ids[0] + 1) % 97
    logits = model(variants).logits
    moved = (logits[:-1] != logits[-1:]).any(-1)  # (changed token, token)
    assert not moved.tril(-1).any()
    assert moved.diagonal().all() and moved[:-1].diagonal(1).all()


@every_pair
def test_f11_any_length_will_do(scheme, memory):
    """report F11: only one fixed length works. 1, n / 2, n and n + 1 tokens do, n being the length trained for."""
    model = make(scheme, memory, max_position_embeddings=12)
    ids = ids_for(model, 2, 13)
    expected = model(ids).logits
    for length in (1, 6, 12):
        assert off(model(ids[:, :length]).logits, expected[:, :length]) < EXACT


@pytest.mark.parametrize("memory", [memory for memory in MEMORIES if accepts(memory, num_sink_tokens=3)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_f14_sinks_row_by_row(scheme, memory):
    """report F14: tokens that all see must be as many in each row. Rows with 0, 1, 3 and more so far are each as alone."""
    model = make(scheme, memory, num_sink_tokens=3, **SCHEMES[scheme])
    first = [0, 1, 3, 11]
    ids = ids_for(model, 4, 30)
    mask = (torch.arange(11) >= 11 - torch.tensor(first)[:, None]).long()
    with torch.no_grad():
        cache = model(ids[:, :11], mask).cache
        found = model(ids[:, 11:], cache=cache).logits
        for row, number in enumerate(first):
            alone = model(ids[row : row + 1, 11 - number :]).logits
            assert off(found[row], alone[0, number:]) < EXACT


@pytest.mark.parametrize("name", ["knn", "rmt", "infini", "linformer", "sparse"])
def test_mechanisms_that_are_not_there_are_refused(name):
    """report C03, C04 (entries found again, and how fast), C06, C11 (memory tokens read and written), F10 (low rank): these
    mechanisms are not offered, and asking for one names those that are."""
    for memory_type in (name, [name, "recurrence"]):
        with pytest.raises(StrictDataclassError, match=f"memory_type=.*{name}.* is not one of {', '.join(MEMORIES)}"):
            XLConfig(memory_type=memory_type, num_hidden_layers=2)
