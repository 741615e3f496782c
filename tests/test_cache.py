"""XLCache: what users and `generate` do with a state, and that nothing they do changes the numbers."""

import copy
import json
import os

import pytest
import torch
from helpers import KEPT_STATES, biggest, feed, ids_for, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from modeling_xl import XLCache, XLForCausalLM
from modeling_xl.positions import POSITION_SCHEMES

FORMS = pytest.mark.parametrize("gradient", [False, True], ids=["key_value", "hidden"])


@pytest.fixture(params=KEPT_STATES)
def model(request):
    return tiny_model(**request.param)


def filled(model, lengths=(13, 6, 20)):
    """Ids (B, T), and the cache after feeding rows of different lengths."""
    ids = ids_for(model, len(lengths), 40)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return ids, model(ids[:, : max(lengths)], attention_mask=mask).cache


def alone(model, ids, length, more):
    """Logits of `more` tokens of one row fed after its first `length`."""
    cache = model(ids[None, :length]).cache
    return model(ids[None, length : length + more], cache=cache).logits[0]


@FORMS
def test_rows_can_be_taken_joined_and_reset(model, gradient):
    lengths = (13, 6, 20)
    with torch.set_grad_enabled(gradient):
        ids, cache = filled(model, lengths)
        expected = torch.stack([alone(model, ids[row], n, 9) for row, n in enumerate(lengths)])
        new = torch.stack([ids[row, n : n + 9] for row, n in enumerate(lengths)])

        def go_on(cache, rows):
            return model(new[rows], cache=cache).logits

        assert biggest(go_on(copy.deepcopy(cache), [0, 1, 2]), expected) < 1e-9
        assert biggest(go_on(cache.select([2, 0]), [2, 0]), expected[[2, 0]]) < 1e-9
        assert biggest(go_on(cache.select(torch.tensor([False, True, True])), [1, 2]), expected[1:]) < 1e-9
        single = cache.split()
        assert [part.lengths.tolist() for part in single] == [[13], [6], [20]]
        joined = XLCache.cat([single[1], cache.select([0, 2])])
        assert biggest(go_on(joined, [1, 0, 2]), expected[[1, 0, 2]]) < 1e-9
        moved = copy.deepcopy(cache)
        moved.reorder_cache(torch.tensor([2, 2, 1]))
        assert biggest(go_on(moved, [2, 2, 1]), expected[[2, 2, 1]]) < 1e-9
        widened = copy.deepcopy(cache)
        widened.batch_repeat_interleave(2)
        assert biggest(go_on(widened, [0, 0, 1, 1, 2, 2]), expected[[0, 0, 1, 1, 2, 2]]) < 1e-9
        fresh = copy.deepcopy(cache)
        fresh.reset_rows(torch.tensor([False, True, False]))
        assert fresh.lengths.tolist() == [13, 0, 20]
        restarted = go_on(fresh, [0, 1, 2])
        assert biggest(restarted[[0, 2]], expected[[0, 2]]) < 1e-9
        assert biggest(restarted[1], model(new[1:2]).logits[0]) < 1e-9
        assert biggest(go_on(cache, [0, 1, 2]), expected) < 1e-9, "the original changed"


@FORMS
def test_saved_and_loaded_equals_never_stopped(model, gradient, tmp_path):
    """Bit for bit: the buffers lie in the file as they lay in memory."""
    with torch.set_grad_enabled(gradient):
        ids, cache = filled(model)
        cache.save_pretrained(tmp_path)
        loaded = XLCache.from_pretrained(tmp_path, model.config)
        assert sorted(os.listdir(tmp_path)) == ["cache.json", "cache.safetensors"]
        assert loaded.nbytes == cache.nbytes - sum(table.nbytes for _, table in cache.derived.values())
        for part in ids[:, 20:33].split(4, 1):
            assert torch.equal(model(part, cache=cache).logits, model(part, cache=loaded).logits)
        assert torch.equal(cache.lengths, loaded.lengths)
        again = XLCache(model.config)
        again.load_state_dict(cache.state_dict())
        assert torch.equal(model(ids[:, :3], cache=cache).logits, model(ids[:, :3], cache=again).logits)


def test_cache_of_another_kind_is_refused(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        ids, cache = filled(model)
    cache.save_pretrained(tmp_path)
    folding = tiny_model(memory_type="compressive")
    for field, value in {"compressed_mem_len": 9, "compression_rate": 3, "compression_fn": "dilated"}.items():
        with pytest.raises(ValueError, match=field):
            folding(ids).cache.check_config(tiny_config(memory_type="compressive", **{field: value}))
    summing = tiny_model(memory_type="linear")
    with pytest.raises(ValueError, match="feature_map"):
        summing(ids).cache.check_config(tiny_config(memory_type="linear", feature_map="relu"))
    for field, value in {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "position_type": "rope",
        "segment_len": 6,
        "attention_window": 3,
        "memory_type": "none",
        "initial_memory": "zeros",
    }.items():
        other = tiny_config(**{field: value})
        with pytest.raises(ValueError, match=field):
            XLCache.from_pretrained(tmp_path, other)
        with torch.no_grad(), pytest.raises(ValueError, match=field):
            XLForCausalLM(other)(ids[:, :3], cache=cache)
    with torch.no_grad(), pytest.raises(ValueError, match="3 rows but the call has batch size 2"):
        model(ids[:2], cache=cache)
    with pytest.raises(ValueError, match="mem_len"):
        XLCache.cat([cache, XLCache(model.config, mem_len=3)])
    for wrong in (DynamicCache(), (1, 2), {"mems": 1}):
        with pytest.raises(TypeError, match="XLCache"):
            model(ids, cache=wrong)


def test_damaged_files_are_refused_and_nothing_is_lost(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        ids, cache = filled(model)
    cache.save_pretrained(tmp_path / "good")
    path, described = tmp_path / "good" / "cache.safetensors", tmp_path / "good" / "cache.json"
    whole, description = path.read_bytes(), described.read_text()

    def load():
        return XLCache.from_pretrained(tmp_path / "good", model.config)

    for damage in (whole[: len(whole) // 2], b"", b"not tensors", whole[:8]):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="whole cache"):
            load()
    path.write_bytes(whole)
    described.write_text(description[:-9])
    with pytest.raises(ValueError, match="whole cache"):
        load()
    described.write_text(description.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="format_version 2"):
        load()
    described.unlink()
    with pytest.raises(FileNotFoundError, match=r"cache\.json"):
        load()
    # A process killed between the two renames leaves new tensors beside an old description: the newer state loads.
    described.write_text(description)
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
    cache.save_pretrained(tmp_path / "newer")
    path.write_bytes((tmp_path / "newer" / "cache.safetensors").read_bytes())
    assert torch.equal(load().lengths, cache.lengths)
    # Tensors that do not belong together.
    tensors = load_file(path)
    metadata = {"cache": json.dumps({**json.loads(description), "save_id": "x"})}
    save_file({name: t for name, t in tensors.items() if "layers.1" not in name}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"damaged|incomplete"):
        load()


def test_a_failed_call_leaves_the_cache_as_it_was(model):
    with torch.no_grad():
        ids, cache = filled(model)
        untouched = copy.deepcopy(cache)
        broken = model.model.layers[-1].mlp
        count = 0

        def fail(*args):
            nonlocal count
            count += 1
            if count == pieces:
                raise RuntimeError("broken")

        # In the middle of a call where it has several pieces: by then earlier pieces have written to the buffers.
        has_lines = {"recurrence", "compressive"} & set(model.config.layer_memory_types) and model.config.segment_len
        pieces = 2 if has_lines else 1
        handle = broken.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="broken"):
            model(ids[:, :30], cache=cache)
        handle.remove()
        assert torch.equal(model(ids[:, 20:31], cache=cache).logits, model(ids[:, 20:31], cache=untouched).logits)


@pytest.mark.parametrize("position", POSITION_SCHEMES)
def test_forms_agree_and_gradient_refuses_keys_and_values(position):
    model = tiny_model(position_type=position)
    ids = ids_for(model, 2, 30)
    hidden = model(ids[:, :17]).cache
    with torch.no_grad():
        kept = model(ids[:, :17]).cache
        assert (hidden.form, kept.form) == ("hidden", "key_value")
        assert biggest(model(ids[:, 17:], cache=hidden).logits, model(ids[:, 17:], cache=kept).logits) < 1e-9
    with pytest.raises(ValueError, match=r"no_grad.*form='hidden'"):
        model(ids[:, :3], cache=kept)
    chosen = XLCache(model.config, form="hidden")
    with torch.no_grad():
        model(ids[:, :17], cache=chosen)
    assert biggest(model(ids[:, 17:], cache=chosen).logits, model(ids).logits[:, 17:]) < 1e-9


def test_own_memory_length_wins_and_is_saved(tmp_path):
    long, short = tiny_model(mem_len=11), tiny_model(mem_len=7)
    ids = ids_for(long, 1, 40)
    with torch.no_grad():
        cache = XLCache(short.config, mem_len=11)
        assert biggest(feed(short, ids, [9, 12, 19], cache=cache)[0], long(ids).logits) < 1e-9
        cache.save_pretrained(tmp_path)
        loaded = XLCache.from_pretrained(tmp_path, short.config)
        assert loaded.mem_len == 11 and loaded.max_context == long.config.max_context
        assert torch.equal(short(ids[:, :9], cache=cache).logits, short(ids[:, :9], cache=loaded).logits)
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match="mem_len"):
            XLCache(short.config, mem_len=wrong)
    with pytest.raises(ValueError, match="form"):
        XLCache(short.config, form="kv")
    with pytest.raises(ValueError, match="dtype"):
        XLCache(short.config, dtype=torch.int8)


def test_dtype_halves_the_state():
    model = tiny_model(dtype=torch.float32)
    ids = ids_for(model, 2, 40)
    with torch.no_grad():
        whole, half = XLCache(model.config), XLCache(model.config, dtype=torch.bfloat16)
        logits, _ = feed(model, ids, [11, 9, 20], cache=whole)
        rounded, _ = feed(model, ids, [11, 9, 20], cache=half)
    states = [sum(t.nbytes for state in cache.states for t in state.tensors()) for cache in (whole, half)]
    assert states[0] == 2 * states[1]
    assert 0 < biggest(logits, rounded) < 0.3  # bfloat16 keeps 8 bits: 0.4 % of keys and values
    moved = whole.to(torch.float64)
    assert all(t.dtype == torch.float64 for state in moved.states for t in state.tensors())


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_window": 6},
        {},
        {"segment_len": None},
        {"num_sink_tokens": 3},
        {"memory_type": "compressive"},
        {"memory_type": "linear"},
        {"memory_type": ["linear", "linear", "recurrence"]},
    ],
    ids=str,
)
def test_size_does_not_grow_with_the_text(changes):
    model = tiny_model(dtype=torch.float32, **changes)
    ids = ids_for(model, 1, 900)
    with torch.no_grad():
        cache = model(ids[:, :300]).cache
        sizes = []
        for part in (*ids[:, :40].split(1, 1), *ids.split(97, 1), ids):
            cache = model(part, cache=cache).cache
            sizes.append(cache.nbytes)
    assert max(sizes) <= max(sizes[:40]) + 4 * 3 * 2 * 2 * 6 * 200  # room for one piece in each of 3 layers


@pytest.mark.parametrize("memory", ["none", "recurrence"])
@FORMS
def test_roll_back(memory, gradient):
    """crop takes the tokens of the last call back; what follows is as if they had never been fed."""
    model = tiny_model(memory_type=memory, num_sink_tokens=2)
    ids = ids_for(model, 1, 60)
    with torch.set_grad_enabled(gradient):
        reference = model(ids).logits
        cache = XLCache(model.config)
        cache.activate_past_recording()
        model(ids[:, :23], cache=cache)
        for back in (4, 1, 9, 0):
            start = cache.get_seq_length()
            model(torch.cat([ids[:, start : start + 2], ids_for(model, 1, back, seed=back)], 1), cache=cache)
            cache.crop(-back)
            assert cache.get_seq_length() == start + 2 and cache.lengths.tolist() == [start + 2]
        start = cache.get_seq_length()
        assert biggest(model(ids[:, start:], cache=cache).logits, reference[:, start:]) < 1e-9
        with pytest.raises(ValueError, match="number <= 0"):
            cache.crop(2)
        with pytest.raises(ValueError, match="take back"):
            cache.crop(-1000)
    if memory == "recurrence":
        plain = model(ids).cache
        with pytest.raises(ValueError, match="activate_past_recording"):
            plain.crop(-3)
        whole_calls = tiny_model(segment_len=None)
        with pytest.raises(ValueError, match="segment_len=None"):
            whole_calls(ids).cache.crop(-1)


@pytest.mark.parametrize("memory", ["compressive", "linear", ["recurrence", "recurrence", "linear"]], ids=str)
def test_folded_tokens_cannot_be_taken_back(memory):
    model = tiny_model(memory_type=memory)
    cache = model(ids_for(model, 1, 9)).cache
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="folds tokens into its state"):
        cache.crop(-2)


def test_sums_keep_their_precision():
    """A state that sums over the whole past is float32 at least, whatever the dtype of the model and of the rows."""
    for position in ("rope", "t5"):
        model = tiny_model(dtype=torch.bfloat16, position_type=position, memory_type="linear")
        ids = ids_for(model, 2, 40)
        with torch.no_grad():
            cache = XLCache(model.config, dtype=torch.bfloat16)
            model(ids, cache=cache)
            for state in [*cache.states, *cache.to(torch.float16).states]:
                assert {t.dtype for t in state.fixed.values()} == {torch.float32}
            assert {t.dtype for state in cache.states for t in state.rows.values()} <= {torch.float16}
            assert model(ids, cache=cache).logits.isfinite().all()


def test_outputs_answer_to_three_names():
    model = tiny_model()
    with torch.no_grad():
        output = model(ids_for(model, 1, 9))
        for name in ("cache", "past_key_values", "mems"):
            assert getattr(output, name) is output.cache and output[name] is output.cache and name in output
            again = model(ids_for(model, 1, 4), **{name: copy.deepcopy(output.cache)})
            assert again.cache.lengths.tolist() == [13]
        with pytest.raises(ValueError, match="mems"):
            model(ids_for(model, 1, 4), cache=output.cache, mems=output.cache)
        assert model(ids_for(model, 1, 4), use_cache=False).cache is None


def test_inference_mode_and_gradient_mix():
    """A state made in inference mode goes on outside of it, and into training."""
    model = tiny_model()
    ids = ids_for(model, 2, 30)
    expected = model(ids).logits
    with torch.inference_mode():
        cache = XLCache(model.config, form="hidden")
        kept = model(ids[:, :13]).cache
        model(ids[:, :13], cache=cache)
    with torch.no_grad():
        assert biggest(model(ids[:, 13:], cache=kept).logits, expected[:, 13:]) < 1e-9
    output = model(ids[:, 13:], cache=cache, labels=ids[:, 13:])
    assert biggest(output.logits, expected[:, 13:]) < 1e-9
    output.loss.backward()
    with torch.inference_mode():
        assert model(ids[:, :3], cache=output.cache).cache.lengths.tolist() == [33, 33]
