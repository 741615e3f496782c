"""Linear attention by blocks: its cost, its kernel on CUDA, and the numbers at the edges of its range."""

import pytest
import torch
from helpers import biggest, feed, ids_for, tiny_model

from modeling_xl import linear_xl
from modeling_xl.positions import POSITION_SCHEMES

every_scheme = pytest.mark.parametrize("position", POSITION_SCHEMES)


def bytes_for_backward(model, length):
    """Bytes of the storages that a training pass keeps for its backward pass."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(ids_for(model, 1, length), use_cache=False)
        total = sum(size for size, _ in kept.values())
        del output
    return total


@every_scheme
def test_memory_of_training_grows_with_the_length_and_not_its_square(position):
    """Four times the text, four times the memory; all pairs would be sixteen times."""
    model = tiny_model(dtype=torch.float32, position_type=position, memory_type="linear").train()
    short, long = (bytes_for_backward(model, length) for length in (400, 1600))
    assert long < 4.2 * short  # blocks at the beginning are smaller where tokens are kept as rows


@every_scheme
def test_a_long_call_leaves_no_more_than_its_state(position):
    """No part of a larger tensor: what the cache says it holds is what the process holds."""
    model = tiny_model(position_type=position, memory_type="linear").requires_grad_(False)
    for state in model(ids_for(model, 1, 200)).cache.states:
        tensors = list(state.fixed.values())
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        assert sum(held.values()) == sum(tensor.nbytes for tensor in tensors)


@every_scheme
def test_blocks_of_any_length_give_the_same_numbers(position, monkeypatch):
    model = tiny_model(position_type=position, memory_type="linear")
    ids = ids_for(model, 2, 90)
    found = []
    for block, run in ((1, 16), (7, 2), (7, 16), (64, 1), (1000, 16)):
        monkeypatch.setattr(linear_xl, "BLOCK", block)
        monkeypatch.setattr(linear_xl, "RUN", run)
        found.append(model(ids).logits)
        found.append(feed(model, ids, [3, 50, 1, 36])[0])
    for logits in found[1:]:
        assert biggest(logits, found[0]) < 1e-9


def chunk_simple_gla(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
    """What the kernel of flash-linear-attention documents, token by token: (B, t, H, size) in and out, scale 1/sqrt(K) if
    not given, S_t = exp(g_t) S_t-1 + k_t v_t^T, o_t = scale q_t S_t, states (B, H, K, V)."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    state = q.new_zeros(q.shape[0], q.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * g[:, t].exp()[..., None, None]
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(scale * (q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1), state if output_final_state else None


@every_scheme
@pytest.mark.parametrize("feature_map", ["elu", "favor"])
def test_kernel_serves_what_it_covers(position, feature_map, monkeypatch):
    """Whole rows in one document without a band go to the kernel and give the same numbers; all else does not."""
    model = tiny_model(position_type=position, memory_type="linear", feature_map=feature_map)
    ids = ids_for(model, 2, 70)
    expected = model(ids)
    documents = torch.zeros_like(ids)
    documents[1, 20:] = 1
    apart = model(ids, document_ids=documents).logits
    calls = []

    def kernel(*args, **kwargs):
        calls.append(args[0].shape)
        return chunk_simple_gla(*args, **kwargs)

    monkeypatch.setattr(linear_xl, "kernel_for", lambda query: kernel)
    found = model(ids[:, :41])
    again = model(ids[:, 41:], cache=found.cache)
    covered = position in ("none", "alibi", "rope")
    assert bool(calls) == covered
    assert biggest(torch.cat([found.logits, again.logits], 1), expected.logits) < 1e-9
    for state, other in zip(again.cache.states, expected.cache.states, strict=True):
        for name in state.fixed:
            assert biggest(state.fixed[name], other.fixed[name]) < 1e-9 * float(1 + other.fixed[name].detach().abs().max())
    calls.clear()
    assert biggest(model(ids, document_ids=documents).logits, apart) < 1e-9 and not calls


def test_no_kernel_where_a_bias_is_left(monkeypatch):
    """clamp_len 1 leaves nothing to keep as rows, but a bias at distance 0 that is not that of the state."""
    model = tiny_model(position_type="xl", memory_type="linear", clamp_len=1)
    ids = ids_for(model, 2, 70)
    expected = model(ids).logits
    monkeypatch.setattr(linear_xl, "kernel_for", lambda query: chunk_simple_gla)
    assert biggest(model(ids).logits, expected) < 1e-9


def test_no_kernel_on_a_cpu():
    assert linear_xl.kernel_for(torch.zeros(1, 2, 100, 8)) is None


@pytest.mark.parametrize("far", [-30.0, 30.0])
def test_a_bias_far_from_the_others_keeps_its_range(far):
    """The largest exponent that counts is subtracted: not that of a distance nobody has yet, and not only the near ones."""
    model = tiny_model(dtype=torch.float32, position_type="t5", memory_type="linear")
    exact = tiny_model(position_type="t5", memory_type="linear")
    with torch.no_grad():
        for m in (model, exact):
            m.model.shared_position.table[-1] = far
            m.model.shared_position.table[1] = -far
        for length in (12, 60):
            ids = ids_for(model, 1, length)
            found = model(ids).logits
            assert found.isfinite().all()
            # float32 against float64 over three layers; logits are of size 5.
            assert biggest(found.double(), exact(ids).logits) < 1e-3


def test_clamp_len_can_be_changed_for_evaluation():
    """As `evaluate` does: the kept rows follow, and the numbers are those of a model made with it."""
    model, longer = (tiny_model(memory_type="linear", clamp_len=n) for n in (4, 9))
    ids = ids_for(model, 1, 40)
    model.config.clamp_len = 9
    assert biggest(feed(model, ids, [7, 1, 32])[0], longer(ids).logits) < 1e-9


def test_keys_of_any_size_stay_finite():
    """FAVOR+ has no stabiliser for keys that looks at other keys; a constant one keeps exp in range for large heads."""
    model = tiny_model(dtype=torch.float32, memory_type="linear", feature_map="favor", head_dim=300, position_type="none")
    features = model.model.layers[0].self_attn.memory.feature_map
    along = features.features[:4]  # keys along a feature: the largest that an exponent gets
    key = (along * features.features.shape[1] ** 0.25)[None, None]
    assert features.key(key).isfinite().all() and float((key @ key.transpose(-1, -2)).max()) > 300
    plain = features.double()
    scaled = key.double() / 300**0.25
    exponents = scaled @ plain.features.T - (scaled**2).sum(-1, keepdim=True) / 2
    direct = (exponents.exp() / 11**0.5) @ (exponents - exponents.amax(-1, keepdim=True)).exp().transpose(-1, -2)
    ours = plain.key(key.double()) @ plain.query(key.double()).transpose(-1, -2)
    # The constant cancels: the same products up to one factor for each query.
    ratio = ours / direct
    assert biggest(ratio, ratio[..., :1, :].expand_as(ratio)) < 1e-9 * float(ratio.max())
