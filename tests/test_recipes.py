"""The two recipes of CONTRIBUTING.md, followed: a scheme and a mechanism from outside join the indexes and work everywhere."""

import pytest
import torch
from helpers import biggest, feed, ids_for, random_splits, tiny_config, tiny_model

from modeling_xl import XLCache, XLConfig, XLForCausalLM
from modeling_xl.cache_xl import LayerState
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.memory_base import Attended, MemoryMechanism
from modeling_xl.position_base import DistanceBias, PositionScheme
from modeling_xl.positions import POSITION_SCHEMES


class KerplePosition(PositionScheme):
    """Logarithmic penalty with a learned rate: bias[h, d] = -softplus(rate[h]) * log(1 + d) (Chi et al. 2022, eq. 6)."""

    name = "kerple"
    has_bias = True

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.rate = torch.nn.Parameter(torch.empty(self.num_heads))

    def init_parameters(self, std):
        torch.nn.init.normal_(self.rate, std=std)

    def bias(self, query, distances, context):
        rate = torch.nn.functional.softplus(self.rate)
        return DistanceBias(None, -rate[:, None] * torch.log1p(distances.to(rate.dtype)))


class RunningMean(MemoryMechanism):
    """Each token attends to nothing but the mean of the values so far, by a gate: the smallest state there is."""

    name = "mean"
    uses_grid = False

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gate = torch.nn.Parameter(torch.empty(config.num_attention_heads))

    def init_parameters(self, std):
        torch.nn.init.normal_(self.gate, std=std)

    def attend(self, attention, hidden_states, state, piece):
        _, _, value = attention.project(hidden_states)
        value = value.repeat_interleave(attention.num_key_value_groups, 1)  # (B, H, t, D)
        real = torch.ones(value.shape[0], piece.width)
        if piece.fillers is not None:
            real = (torch.arange(piece.width)[None] < piece.width - piece.fillers[:, None]).to(real.dtype)
        real = real.to(value)[:, None, :, None]
        begins = piece.document_start.clamp(min=0)[:, None, :, None]
        assert not begins.any(), "this toy knows no documents"
        total = state.fixed["total"] if state else value.new_zeros(*value.shape[:2], value.shape[-1])
        sums = total[:, :, None] + (value * real).cumsum(2)
        counts = (piece.positions + 1).to(value)[:, None, :, None]
        output = sums / counts * torch.sigmoid(self.gate)[:, None, None]
        return Attended(output.transpose(1, 2).flatten(2), LayerState(fixed={"total": sums[:, :, -1]}))


@pytest.fixture
def scheme(monkeypatch):
    monkeypatch.setitem(POSITION_SCHEMES, "kerple", KerplePosition)
    return {"position_type": "kerple"}


@pytest.fixture
def mechanism(monkeypatch):
    monkeypatch.setitem(MEMORY_MECHANISMS, "mean", RunningMean)
    return {"memory_type": "mean"}


@pytest.fixture(params=["scheme", "mechanism", "both", "mixture"])
def changes(request):
    chosen = {"scheme": ["scheme"], "mechanism": ["mechanism"]}.get(request.param, ["scheme", "mechanism"])
    joined = {}
    for name in chosen:
        joined |= request.getfixturevalue(name)
    if request.param == "mixture":
        joined["memory_type"] = ["mean", "recurrence", "mean"]
    return joined


def test_any_feeding_padding_and_gradient(changes):
    model = tiny_model(**changes)
    ids = ids_for(model, 3, 31)
    lengths = [31, 12, 20]
    mask = (torch.arange(31)[None] < torch.tensor(lengths)[:, None]).long()
    generator = torch.Generator().manual_seed(2)
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            alone = [model(ids[row : row + 1, :n]).logits[0] for row, n in enumerate(lengths)]
            for way in (mask, mask.flip(1)):
                text = ids if way is mask else torch.stack([ids[row].roll(31 - n) for row, n in enumerate(lengths)])
                for parts in ([31], random_splits(31, 6, generator), [1] * 31):
                    logits, _ = feed(model, text, parts, attention_mask=way)
                    for row in range(3):
                        assert biggest(logits[row, way[row].bool()], alone[row]) < 1e-9
    output = model(ids, labels=ids)
    output.loss.backward()
    # A mechanism that uses no queries leaves what only they need untouched.
    unused = [name for name, p in model.named_parameters() if p.grad is None and "position" not in name]
    assert not unused


def test_save_load_cache_and_generate(changes, tmp_path):
    model = tiny_model(dtype=torch.float32, **changes)
    model.save_pretrained(tmp_path)
    again = XLForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.to_dict()["memory_type"] == model.config.memory_type
    ids = ids_for(model, 2, 13)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        cache = model(ids[:, :9]).cache
        cache.save_pretrained(tmp_path / "cache")
        loaded = XLCache.from_pretrained(tmp_path / "cache", again.config)
        assert torch.equal(again(ids[:, 9:], cache=loaded).logits, model(ids[:, 9:], cache=cache).logits)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    assert torch.equal(
        model.generate(ids, num_beams=3, **options), model.generate(ids, use_cache=False, num_beams=3, **options)
    )


def test_members_that_left_the_index_are_unknown():
    with pytest.raises(Exception, match="not one of"):
        tiny_config(position_type="kerple")
    with pytest.raises(Exception, match="not one of"):
        XLConfig(memory_type="mean")
