"""`generate` of Transformers with this model's memory: every way of decoding gives what recomputing everything gives."""

import copy

import pytest
import torch
from helpers import biggest, ids_for, tiny_model
from transformers import DynamicCache

from modeling_xl import XLCache
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES

NEW = 17
MODELS = [
    pytest.param({"position_type": position, "memory_type": memory}, id=f"{position}-{memory}")
    for position in POSITION_SCHEMES
    for memory in MEMORY_MECHANISMS
] + [
    pytest.param({"num_sink_tokens": 2, "attention_window": 4, "position_type": "rope"}, id="rope-sinks_window"),
    pytest.param({"initial_memory": "zeros"}, id="xl-zeros"),
    pytest.param({"cutoffs": [20, 60], "div_val": 2}, id="xl-adaptive"),
    pytest.param({"memory_type": ["linear", "linear", "recurrence"], "feature_map": "favor"}, id="xl-mixture"),
]


@pytest.fixture(params=MODELS)
def model(request):
    return tiny_model(**request.param)


@torch.no_grad()
def greedy(model, ids, count=NEW):
    """Recomputes the whole text for every token: no cache, no generate."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def generate(model, *args, **kwargs):
    return model.generate(*args, do_sample=False, max_new_tokens=kwargs.pop("max_new_tokens", NEW), pad_token_id=0, **kwargs)


def test_greedy_equals_recomputing(model):
    ids = ids_for(model, 2, 13)
    expected = greedy(model, ids)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)
    assert torch.equal(generate(model, ids, prefill_chunk_size=4), expected)
    assert torch.equal(generate(model, inputs_embeds=model.model.embed(ids)), expected[:, 13:])


def test_left_padded_batch_equals_each_prompt_alone(model):
    prompts = [ids_for(model, 1, n, seed=n) for n in (4, 11, 7)]
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    for extra in ({}, {"prefill_chunk_size": 3}):
        batched = generate(model, ids, attention_mask=mask, **extra)
        for row, prompt in enumerate(prompts):
            assert torch.equal(batched[row, width:], greedy(model, prompt)[0, prompt.shape[1] :])


def test_continuing_from_a_cache(model):
    """Whole text, new ids with a long mask, and new ids alone: the three ways of naming what is new."""
    ids = ids_for(model, 2, 19)
    expected = greedy(model, ids)
    with torch.no_grad():
        cache = model(ids[:, :12]).cache
    for name in ("cache", "past_key_values", "mems"):
        assert torch.equal(generate(model, ids, **{name: copy.deepcopy(cache)}), expected)
    long_mask = torch.ones_like(ids)
    assert torch.equal(generate(model, ids[:, 12:], attention_mask=long_mask, cache=copy.deepcopy(cache)), expected[:, 12:])
    assert torch.equal(generate(model, ids[:, 12:], cache=copy.deepcopy(cache), new_tokens_only=True), expected[:, 12:])
    # A stream: the caller's cache moves on with what generate fed, all but the last token.
    streamed = copy.deepcopy(cache)
    first = generate(model, ids[:, 12:], cache=streamed, new_tokens_only=True, max_new_tokens=5)
    assert streamed.get_seq_length() == 19 + 5 - 1
    second = generate(model, first[:, -1:], cache=streamed, new_tokens_only=True, max_new_tokens=NEW - 5)
    assert torch.equal(second[:, 1:], expected[:, 19 + 5 :])
    fresh = XLCache(model.config)
    assert torch.equal(generate(model, ids, cache=fresh, new_tokens_only=True), expected)


def test_new_tokens_only_with_padding():
    model = tiny_model()
    ids = ids_for(model, 2, 20)
    with torch.no_grad():
        cache = model(ids[:, :12]).cache
    new = ids[:, 12:].clone()
    mask = torch.ones_like(new)
    mask[1, :5] = 0
    found = generate(model, new, attention_mask=mask, cache=cache, new_tokens_only=True)
    for row, text in enumerate((ids[:1], torch.cat([ids[1:, :12], ids[1:, 17:]], 1))):
        assert torch.equal(found[row, 8:], greedy(model, text)[0, text.shape[1] :])
    with pytest.raises(ValueError, match="new_tokens_only"):
        generate(model, new, attention_mask=mask[:, 1:], cache=cache, new_tokens_only=True)


def test_beams_and_returned_sequences(model):
    ids = ids_for(model, 2, 9)
    for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        with_cache = generate(model, ids, **options)
        assert torch.equal(with_cache, generate(model, ids, use_cache=False, **options))
        # From a cache of one row for each prompt, and of one row for all.
        for rows in (ids, ids[:1]):
            with torch.no_grad():
                cache = model(rows[:, :6]).cache
            before = copy.deepcopy(cache)
            expected = generate(model, rows, use_cache=False, **options)
            assert torch.equal(generate(model, rows, cache=cache, **options), expected)
            assert cache.lengths.tolist() == [6] * len(rows)
            after, same = model_logits(model, cache, ids), model_logits(model, before, ids)
            assert torch.equal(after, same), "the caller's cache changed"


@torch.no_grad()
def model_logits(model, cache, ids):
    return model(ids[: cache.batch_size, 6:], cache=cache).logits


def test_sampling_is_the_same_with_and_without_cache(model):
    ids = ids_for(model, 2, 9)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(4)
        drawn.append(
            model.generate(
                ids, do_sample=True, top_k=20, num_return_sequences=3, max_new_tokens=9, pad_token_id=0, use_cache=use_cache
            )
        )
    assert drawn[0].shape == (6, 18) and torch.equal(*drawn)


def test_assisted_and_prompt_lookup(model):
    if not model.config.can_roll_back:
        with pytest.raises(ValueError, match="folds tokens into its state"):
            generate(model, ids_for(model, 1, 9), prompt_lookup_num_tokens=3)
        return
    ids = torch.cat([ids_for(model, 1, 6)] * 4, 1)  # repeats, so that look-up finds candidates
    expected = greedy(model, ids)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=4), expected)
    config = {k: v for k, v in model.config.to_diff_dict().items() if k in ("position_type", "memory_type")}
    assistant = tiny_model(seed=5, **config)
    assert torch.equal(generate(model, ids, assistant_model=assistant), expected)
    assert torch.equal(generate(model, ids, assistant_model=model), expected)
    with torch.no_grad():
        cache = model(ids[:, :10]).cache
    options = {"prompt_lookup_num_tokens": 4}
    assert torch.equal(generate(model, ids, cache=copy.deepcopy(cache), **options), expected)
    found = generate(model, ids[:, 10:], cache=cache, new_tokens_only=True, **options)
    assert torch.equal(found, expected[:, 10:])


def test_roll_back_is_refused_where_memory_cannot():
    model = tiny_model(segment_len=None)
    with pytest.raises(ValueError, match="segment_len=None"):
        generate(model, ids_for(model, 1, 9), prompt_lookup_num_tokens=3)
    windowed = tiny_model(segment_len=None, attention_window=5)
    ids = ids_for(windowed, 1, 9)
    assert torch.equal(generate(windowed, ids, prompt_lookup_num_tokens=3), generate(windowed, ids))


def test_documents_in_the_prompt(model):
    """Generated tokens belong to the prompt's last document."""
    ids = ids_for(model, 2, 13)
    documents = torch.tensor([[0] * 9 + [1] * 4, [0] * 2 + [1] * 11])
    for extra in ({}, {"prefill_chunk_size": 4}, {"use_cache": False}):
        found = generate(model, ids, document_ids=documents, **extra)
        text, names = ids, documents
        with torch.no_grad():
            for _ in range(NEW):
                text = torch.cat([text, model(text, document_ids=names).logits[:, -1:].argmax(-1)], 1)
                names = torch.cat([names, names[:, -1:]], 1)
        assert torch.equal(found, text)


def test_other_caches_are_refused():
    model = tiny_model()
    ids = ids_for(model, 1, 5)
    with pytest.raises(TypeError, match="XLCache"):
        generate(model, ids, cache=DynamicCache())
    for implementation in ("static", "quantized", "offloaded"):
        with pytest.raises(ValueError, match=implementation):
            generate(model, ids, cache_implementation=implementation)
    with torch.no_grad():
        cache = model(ids_for(model, 2, 5)).cache
    with pytest.raises(ValueError, match="2 rows"):
        generate(model, ids_for(model, 3, 9), cache=cache)


def test_nothing_stays_on_the_model():
    model = tiny_model()

    def attributes():
        return {id(m): set(vars(m)) | set(m._buffers) | set(m._parameters) for m in model.modules()}

    ids = ids_for(model, 2, 21)
    before = attributes()
    first = generate(model, ids)
    model(ids, labels=ids).loss.backward()
    assert attributes() == before
    assert torch.equal(generate(model, ids), first)
    assert not any(name for name, _ in model.named_buffers())


def test_returned_cache_continues():
    model = tiny_model()
    ids = ids_for(model, 2, 11)
    output = generate(model, ids, return_dict_in_generate=True, output_scores=True, output_hidden_states=True)
    assert isinstance(output.cache, XLCache) and output.cache.lengths.tolist() == [11 + NEW - 1] * 2
    more = generate(model, output.sequences, cache=output.cache)
    assert torch.equal(more, greedy(model, ids, 2 * NEW))
    assert biggest(output.scores[0].double(), model(ids).logits[:, -1]) < 1e-5  # generate keeps scores in float32


def test_continuous_batching_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"pages of its own.*call generate"):
        model.generate_batch([[5, 6, 7]], max_new_tokens=2)
