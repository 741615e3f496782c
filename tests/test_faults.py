"""Faults that were found by trying to break the package, each as the smallest case that showed it."""

import copy
import math

import pytest
import torch
from helpers import biggest, feed, ids_for, tiny_config, tiny_model
from reference import dense_pass

from modeling_xl import XLCache, XLForSequenceClassification
from modeling_xl.feature_maps_xl import EluFeatures
from modeling_xl.positions import POSITION_SCHEMES


def ends_at(lengths, columns):
    return (torch.arange(columns)[None] < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("position", POSITION_SCHEMES)
def test_autocast_without_gradient(position, implementation):
    """bfloat16 autocast near float32, also on a cache that was filled without it, and the other way round."""
    model = tiny_model(dtype=torch.float32, position_type=position, attn_implementation=implementation)
    ids = ids_for(model, 2, 40)
    with torch.no_grad():
        expected = model(ids).logits
        for first in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=first):
                cache = model(ids[:, :17]).cache
            with torch.autocast("cpu", torch.bfloat16, enabled=not first):
                found = [model(ids[:, 17:39], cache=cache).logits, model(ids[:, 39:], cache=cache).logits]
            assert biggest(torch.cat(found, 1).float(), expected[:, 17:]) < 0.6  # 8 bits, weights far from initialisation


@pytest.mark.parametrize("window", [None, 2])
def test_zeros_before_positions_that_skip(window):
    model = tiny_model(initial_memory="zeros", attention_window=window)
    positions = torch.tensor([[0, 1, 2, 3, 4, 9, 10, 11, 12, 13, 14, 15, 16, 40, 41, 42, 43, 44, 45, 46]])
    ids = ids_for(model, 1, 20)
    reference, _ = dense_pass(model, ids[0], positions=positions[0])
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            for parts in ([20], [3, 9, 8], [1] * 20):
                assert biggest(feed(model, ids, parts, position_ids=positions)[0][0], reference) < 1e-9


@pytest.mark.parametrize("start", ["empty", "zeros"])
@torch.no_grad()
def test_reset_after_positions_that_skip(start):
    model = tiny_model(initial_memory=start)
    ids = ids_for(model, 2, 50)
    skipping = torch.cat([torch.arange(7), torch.arange(7, 20) + 100])[None].expand(2, -1)
    cache = model(ids[:, :20], position_ids=skipping).cache
    cache.reset_rows(torch.tensor([True, False]))
    logits, _ = feed(model, ids[:, 20:], [11, 19], cache=cache)
    assert biggest(logits[:1], model(ids[:1, 20:]).logits) < 1e-9
    going_on = torch.cat([skipping[1], skipping[1, -1] + 1 + torch.arange(30)])
    assert biggest(logits[1], dense_pass(model, ids[1], positions=going_on)[0][20:]) < 1e-9


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({"segment_len": 3, "mem_len": 0}, [(0, 2, 4), (4, 1, 2)]),
        ({"segment_len": 8, "mem_len": 7, "initial_memory": "zeros"}, [(2, 6, 1), (9, 2, 7)]),
        ({"segment_len": 4, "mem_len": 6}, [(7, 0, 3), (1, 11, 6), (9, 2, 10)]),
    ],
    ids=["no_memory", "zeros", "three_calls"],
)
@pytest.mark.parametrize("gradient", [True, False])
def test_rows_that_end_apart(changes, calls, gradient):
    """Rows that ended in a piece ask for nothing there; each stays the row alone."""
    model = tiny_model(**changes)
    ids = ids_for(model, 3, 40)
    cache, fed, found = XLCache(model.config, form="hidden"), [0, 0, 0], [[], [], []]
    with torch.set_grad_enabled(gradient):
        for lengths in calls:
            width = max(lengths)
            part = torch.stack([ids[row].roll(-fed[row])[:width] for row in range(3)])
            logits = model(part, attention_mask=ends_at(lengths, width), cache=cache).logits
            for row, length in enumerate(lengths):
                found[row].append(logits[row, :length])
                fed[row] += length
        for row in range(3):
            assert biggest(torch.cat(found[row]), dense_pass(model, ids[row, : fed[row]])[0]) < 1e-9


def test_derived_tables_follow_the_weights():
    """A hidden cache outlives a step of the optimizer; a table projected before the step, or with dropout, does not."""
    model = tiny_model(hidden_dropout=0.5)
    ids = ids_for(model, 1, 60)
    cache = XLCache(model.config, form="hidden")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(ids[:, :30], cache=cache)
    model(ids[:, 30:40], labels=ids[:, 30:40], cache=cache).loss.backward()
    optimizer.step()
    model.train()
    with torch.no_grad():
        model(ids[:, 40:45], cache=cache)
    model.eval()
    with torch.no_grad():
        fresh = copy.deepcopy(cache)
        fresh.derived = {}
        assert biggest(model(ids[:, 45:], cache=cache).logits, model(ids[:, 45:], cache=fresh).logits) < 1e-12


def test_rows_and_prompts_must_match():
    model = tiny_model()
    ids = ids_for(model, 6, 12)
    with torch.no_grad():
        cache = model(ids[:2, :6]).cache
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "new_tokens_only": True}
    for prompts, beams in ((4, 1), (3, 2)):
        with pytest.raises(ValueError, match=f"2 rows for {prompts} prompts"):
            model.generate(ids[:prompts, 6:], cache=cache, num_beams=beams, **options)


def test_text_with_nothing_new_is_refused():
    model = tiny_model()
    ids = ids_for(model, 1, 12)
    with torch.no_grad():
        cache = model(ids).cache
    for text in (ids, ids[:, :7]):
        with pytest.raises(ValueError, match="new_tokens_only"):
            model.generate(text, cache=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
    cache.reset_rows(torch.tensor([True]))
    again = model.generate(ids, cache=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(again, model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize(
    "changes", [{}, {"mem_len": 0}, {"mem_len": 0, "num_sink_tokens": 2}, {"memory_type": "none"}], ids=str
)
@pytest.mark.parametrize("gradient", [True, False])
def test_join_with_rows_that_hold_nothing(changes, gradient):
    model = tiny_model(**changes)
    ids = ids_for(model, 3, 20)
    with torch.set_grad_enabled(gradient):
        parts = [
            model(ids[:1, :5]).cache,
            model(ids[1:2, :3], attention_mask=torch.zeros(1, 3)).cache,
            model(ids[2:, :8]).cache,
        ]
        for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
            joined = XLCache.cat([copy.deepcopy(parts[i]) for i in order])
            logits = model(ids[:, 8:], cache=joined).logits
            for place, i in enumerate(order):
                alone = model(ids[place : place + 1, 8:], cache=copy.deepcopy(parts[i])).logits[0]
                assert biggest(logits[place], alone) < 1e-9
        nothing = XLCache.cat(XLCache.cat([parts[1], parts[1]]).split())
        assert biggest(model(ids[:2, 8:], cache=nothing).logits, model(ids[:2, 8:]).logits) < 1e-9


@torch.no_grad()
def test_roll_back_over_positions_that_skip():
    model = tiny_model(memory_type="none")
    ids = ids_for(model, 1, 20)
    positions = torch.arange(20)[None] * 2
    for back in (5, 12):
        cache = model(ids[:, :12], position_ids=positions[:, :12]).cache
        cache.crop(-back)
        rest = 12 - back
        logits = model(ids[:, rest:], position_ids=positions[:, rest:], cache=cache).logits
        assert biggest(logits[0], dense_pass(model, ids[0], positions=positions[0])[0][rest:]) < 1e-9


@torch.no_grad()
def test_roll_back_into_an_earlier_segment():
    """A hidden memory that was trimmed at a line still holds what a token before the line looks back to."""
    model = tiny_model()
    ids = ids_for(model, 1, 100)
    for form in ("hidden", "key_value"):
        cache = XLCache(model.config, form=form)
        cache.activate_past_recording()
        model(ids[:, :13], cache=cache)
        for back in (1, 7, 64):
            start = cache.get_seq_length()
            model(ids_for(model, 1, back, seed=back), cache=cache)
            cache.crop(-back)
            logits = model(ids[:, start : start + 6], cache=cache).logits
            assert biggest(logits, model(ids[:, : start + 6]).logits[:, start:]) < 1e-9


def test_many_candidates():
    model = tiny_model()
    ids = torch.cat([ids_for(model, 1, 6)] * 40, 1)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=70, **options), model.generate(ids, **options))


def test_smaller_refusals():
    adaptive = tiny_model(cutoffs=[20, 60], div_val=2)
    with pytest.raises(IndexError, match=r"0 \.\.\. 96"):
        adaptive(torch.tensor([[500]]))
    classifier = XLForSequenceClassification(tiny_config(cutoffs=[20, 60]))
    with pytest.raises(ValueError, match="cutoffs"):
        classifier.resize_token_embeddings(30)
    model = tiny_model()
    ids = ids_for(model, 1, 5)
    with pytest.raises(ValueError, match="negative numbers"):
        model(ids, attention_mask=torch.tensor([[0.0, 0.0, 0.0, -1e9, -1e9]]))
    with pytest.raises(ValueError, match="labels has shape"):
        model(inputs_embeds=model.model.embed(ids), labels=ids[:, 1:])
    assert tiny_config(position_type="alibi", alibi_slopes=[1, 0.5, 0.25, 0]).alibi_slopes == [1, 0.5, 0.25, 0]
    for wrong in (
        {"rope_theta": float("nan")},
        {"rope_theta": 1.0},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "proportional", "factor": 0.0},
        {"partial_rotary_factor": "x"},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4,
            "high_freq_factor": 1,
            "original_max_position_embeddings": 9,
        },
    ):
        with pytest.raises(Exception, match="rope_parameters"):
            tiny_config(position_type="rope", rope_parameters=wrong)
    for wrong in (97, -1, [1, 97]):
        with pytest.raises(Exception, match="eos_token_id"):
            tiny_config(eos_token_id=wrong)


def test_tampered_state_is_refused():
    model = tiny_model(num_sink_tokens=2)
    with torch.no_grad():
        cache = model(ids_for(model, 2, 12)).cache
    whole = cache.state_dict()

    def tampered(change):
        state = copy.deepcopy(whole)
        change(state)
        return state

    changes = [
        lambda s: s["tensors"].pop("layers.0.fixed.sink_key"),
        lambda s: s["tensors"].pop("layers.1.rows.value"),
        lambda s: s["tensors"].update({"layers.0.rows.zzz": torch.zeros(1)}),
        lambda s: s["tensors"].update({"layers.0.rows.key": torch.zeros(2, 2, 3, 6)}),
        lambda s: s["tensors"].update({"_lengths": torch.zeros(2)}),
        lambda s: s["values"]["layout"][0].update(size=999),
        lambda s: s["values"]["layout"].pop(),
        lambda s: s["values"].update(columns="x"),
        lambda s: s["values"].update(dtype="foo"),
        lambda s: s.pop("values"),
        lambda s: s.pop("fingerprint"),
        lambda s: s.update(fingerprint=None),
        lambda s: s.update(format_version=99),
    ]
    for change in changes:
        fresh = XLCache(model.config)
        with pytest.raises(ValueError, match=r"damaged|fingerprint|format_version"):
            fresh.load_state_dict(tampered(change))
        assert fresh.batch_size == -1


# Faults of compressive memory and linear attention, found by random use.


@pytest.mark.parametrize("position", ["rope", "xl"])
@pytest.mark.parametrize("start", ["empty", "zeros"])
def test_compressed_rows_stand_before_positions_that_skip(position, start):
    """Slots were encoded in the wrong columns, and rows of zeros that fill the slots too had no positions."""
    model = tiny_model(memory_type="compressive", position_type=position, initial_memory=start)
    ids = ids_for(model, 2, 33)
    steps = torch.ones(2, 33, dtype=torch.long)
    steps[0, 9], steps[1, 2], steps[1, 20] = 7, 3, 50
    positions = steps.cumsum(1) - 1
    with torch.no_grad():
        for parts in ([33], [4, 11, 1, 1, 16]):
            logits, _ = feed(model, ids, parts, position_ids=positions)
            for row in range(2):
                assert biggest(logits[row], dense_pass(model, ids[row], positions=positions[row])[0]) < 1e-9


@pytest.mark.parametrize("function", ["conv", "mean", "most_used"])
def test_compressive_memory_in_another_precision(function):
    """Rows were compressed in the precision they are stored in, which the weights may not have."""
    loss = "attention" if function == "conv" else None
    model = tiny_model(
        dtype=torch.float32,
        memory_type="compressive",
        position_type="rope",
        compression_fn=function,
        compression_loss=loss,
    )
    ids = ids_for(model, 1, 43)
    with torch.no_grad():
        exact = model(ids).logits
        for dtype in (torch.bfloat16, torch.float64):
            cache = XLCache(model.config, dtype=dtype)
            found = feed(model, ids, [20, 1, 22], cache=cache)[0]
            # bfloat16 keeps 8 bits: 0.4 % of keys and values. Another row may then be the most used one.
            assert function == "most_used" or biggest(found, exact) < 0.5
            again, _ = feed(model, ids, [7, 13], cache=cache.to(torch.float32))
            assert again.isfinite().all()


def test_favor_with_keys_beyond_its_range_has_finite_gradients():
    """A normaliser that is denormal made them infinite."""
    for scale in (3, 6, 20):
        model = tiny_model(
            memory_type="linear",
            position_type="alibi",
            feature_map="favor",
            num_hidden_layers=1,
            alibi_slopes=[50.0, 0.0, 3.0, 1e-6],
        )
        with torch.no_grad():
            model.model.layers[0].self_attn.qkv_proj.weight.mul_(scale)
        model = model.float()
        ids = ids_for(model, 1, 50)
        model(ids, labels=ids).loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_max_context_where_a_rate_does_not_divide_a_segment():
    """What leaves at a line then differs from line to line; one segment's queries do not show the farthest."""
    for length, memory, rate, slots in ((1, 2, 2, 2), (1, 2, 2, 1), (5, 8, 3, 4)):
        model = tiny_model(
            segment_len=length,
            mem_len=memory,
            compression_rate=rate,
            compressed_mem_len=slots,
            memory_type="compressive",
            compression_fn="mean",
            compression_loss=None,
            num_hidden_layers=1,
        )
        reach = model.config.max_context
        total = reach + 4 * length * rate
        embedded = model.model.embed(ids_for(model, 1, total)).detach()
        changed = embedded.expand(total, -1, -1).clone()
        changed[torch.arange(total), torch.arange(total)] += 3.0
        with torch.no_grad():
            differs = (model(inputs_embeds=changed).logits - model(inputs_embeds=embedded).logits).abs().amax(-1) > 1e-9
        apart = torch.arange(total)[None] - torch.arange(total)[:, None]
        assert int(apart[differs].max()) == reach


def test_document_after_positions_that_skipped_is_itself_alone():
    """FAVOR+ with rope counts from the first token of a document, skips before it left out."""
    model = tiny_model(memory_type="linear", feature_map="favor", position_type="rope")
    ids = ids_for(model, 1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.arange(12)
    positions[3:] += 9
    alone = model(ids[:, 5:]).logits
    for parts in ([12], [5, 7], [4, 1, 1, 6]):
        found, _ = feed(model, ids, parts, document_ids=documents, position_ids=positions[None])
        assert biggest(found[:, 5:], alone) < 1e-9


def test_small_features_of_elu_are_kept():
    """elu(x) + 1 rounds exp(x) away below -37 in float64; a query that meets only such keys then saw nothing."""
    states = torch.tensor([-100.0, -40.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    expected = torch.tensor([math.exp(-100), math.exp(-40), math.exp(-1), 1.0, 3.0], dtype=torch.float64)
    assert ((EluFeatures().query(states) - expected).abs() / expected).max() < 1e-12


def test_a_document_that_begins_with_a_call_does_not_see_the_state():
    """Without kept rows the state was taken for the document's own."""
    for position in ("none", "alibi", "rope"):
        model = tiny_model(memory_type="linear", position_type=position)
        ids = ids_for(model, 1, 14)
        found, _ = feed(model, ids, [9, 2, 3], document_ids=torch.tensor([[0] * 9 + [1] * 5]))
        assert biggest(found[:, 9:], model(ids[:, 9:]).logits) < 1e-9
