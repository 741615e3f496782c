"""Public bug reports about memory between calls and generation. The ids are those of the reports."""

import copy

import pytest
import torch
from reference import dense_pass
from report_helpers import (
    EXACT,
    HEADS,
    accepts,
    every_head,
    every_memory,
    every_pair,
    every_scheme,
    greedy,
    greedy_by_hand,
    ids_for,
    make,
    off,
    padded,
)
from transformers import DynamicCache, StaticCache

from modeling_xl import XLCache

CACHE_NAMES = ("cache", "past_key_values", "mems")
every_name = pytest.mark.parametrize("name", CACHE_NAMES)


def step(model, ids, cache):
    """Logits of `ids` a token at a time, and the cache."""
    steps = []
    for column in range(ids.shape[1]):
        output = model(ids[:, column : column + 1], cache=cache)
        cache = output.cache
        steps.append(output.logits)
    return torch.cat(steps, 1), cache


def frozen(cache) -> dict:
    """What a cache holds, as plain tensors and values of its own."""
    return copy.deepcopy(cache.state_dict())


def same(a: dict, b: dict) -> bool:
    return all(a[name] == b[name] for name in ("fingerprint", "values")) and all(
        torch.equal(a["tensors"][name], b["tensors"][name]) for name in a["tensors"] | b["tensors"]
    )


class TestGenerate:
    @every_pair
    def test_only_new_tokens_after_the_first_step(self, scheme, memory):
        """report A09: generate feeds the prompt once, then one token a step; the text is that of whole passes."""
        model = make(scheme, memory)
        ids = ids_for(model, 2, 12)
        expected = greedy_by_hand(model, ids, 14)
        fed = []
        hook = model.model.register_forward_pre_hook(
            lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        with_cache = greedy(model, ids, 14)
        assert fed == [12] + [1] * 13
        fed.clear()
        without = greedy(model, ids, 14, use_cache=False)
        assert fed == list(range(12, 26))
        hook.remove()
        assert torch.equal(with_cache, expected)
        assert torch.equal(without, expected)

    @every_memory
    def test_no_end_but_the_asked_one(self, memory):
        """report A11: without an end token 200 new tokens are 200, id 0 among them ends nothing."""
        model = make(memory=memory, dtype=torch.float32, lm_head_bias=True)
        ids = ids_for(model, 1, 3)
        with torch.no_grad():
            model.lm_head.bias[0] = 4.0
        found = greedy(model, ids, 200)
        assert found.shape == (1, 200)
        assert 0 in found[:, :-1]
        assert greedy(model, ids, 200, eos_token_id=0, pad_token_id=0).shape[1] < 200

    @every_head
    def test_every_head_generates(self, head):
        """report A12: generate works with every head, sampling too, and stays in the vocabulary."""
        model = make(**HEADS[head])
        ids = ids_for(model, 2, 12)
        assert torch.equal(greedy(model, ids, 9), greedy_by_hand(model, ids, 9))
        torch.manual_seed(0)
        sampled = model.generate(ids, max_new_tokens=9, do_sample=True, top_k=5, temperature=0.7)
        assert sampled.shape == (2, 21)
        assert int(sampled.max()) < 97

    @every_pair
    def test_rows_of_a_batch_generate_like_each_alone(self, scheme, memory):
        """report B09: greedy text of a left-padded batch is that of each prompt alone."""
        model = make(scheme, memory)
        lengths = [13, 2, 7]
        ids = ids_for(model, 3, 13)
        filled, mask = padded(ids, lengths, "left")
        together = greedy(model, filled, 11, attention_mask=mask)
        for row, length in enumerate(lengths):
            assert torch.equal(together[row : row + 1], greedy(model, ids[row : row + 1, :length], 11))

    @every_pair
    def test_state_under_every_name(self, scheme, memory):
        """report X01: greedy text with the cache on = off, with `cache=`, `past_key_values=` and `mems=`."""
        model = make(scheme, memory)
        ids = ids_for(model, 2, 13)
        expected = greedy_by_hand(model, ids, 12)
        with torch.no_grad():
            cache = model(ids[:, :8]).cache
        for name in CACHE_NAMES:
            assert torch.equal(greedy(model, ids, 12, **{name: XLCache(model.config)}), expected), name
            # Continued: with the whole text, and with the new ids alone.
            whole, new = copy.deepcopy(cache), copy.deepcopy(cache)
            assert torch.equal(greedy(model, ids, 12, **{name: whole}), expected), name
            assert torch.equal(greedy(model, ids[:, 8:], 12, **{name: new}, new_tokens_only=True), expected), name

    @every_name
    def test_output_of_generate_answers_to_every_name(self, name):
        """report X01: the state that generate returns is found under the three names and continues the text."""
        model = make()
        ids = ids_for(model, 2, 13)
        output = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        whole = greedy_by_hand(model, ids, 12)
        newest = output.sequences[:, output.cache.get_seq_length() :]
        assert torch.equal(greedy(model, newest, 6, **{name: output.cache}, new_tokens_only=True), whole[:, 6:])

    @every_pair
    def test_beams_keep_their_own_memory(self, scheme, memory):
        """report B09, B10: beam search with memory finds what it finds by whole passes, a cache of one row expanded."""
        model = make(scheme, memory)
        ids = ids_for(model, 1, 13)
        settings = {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
        expected = model.generate(ids, use_cache=False, **settings)
        assert torch.equal(model.generate(ids, **settings), expected)
        with torch.no_grad():
            cache = model(ids[:, :8]).cache
        before = frozen(cache)
        assert torch.equal(model.generate(ids, cache=cache, **settings), expected)
        assert same(frozen(cache), before)


class TestMemory:
    @pytest.mark.parametrize("mem_len", [0, 1, 3, 7, 20])
    def test_last_states_are_kept(self, mem_len):
        """report B01: after calls of mlen and qlen tokens the memory is the last mem_len layer inputs, in order."""
        for segment_len in (None, 3):
            for first in (3, 6, 9):
                for second in (3, 12):
                    model = make(segment_len=segment_len, mem_len=mem_len)
                    ids = ids_for(model, 2, first + second)
                    cache = XLCache(model.config, form="hidden")
                    one = model(ids[:, :first], cache=cache, output_hidden_states=True)
                    two = model(ids[:, first:], cache=cache, output_hidden_states=True)
                    kept = min(mem_len, first + second)
                    for layer, state in enumerate(cache.states):
                        inputs = torch.cat([one.hidden_states[layer], two.hidden_states[layer]], 1)
                        right = inputs[:, first + second - kept :]
                        if kept:
                            assert off(state.last("hidden", kept)[:, 0], right) == 0
                        assert state.size == kept
                        assert not any(tensor.requires_grad for tensor in state.tensors())

    @every_pair
    def test_sentences_of_different_length_are_scored_together(self, scheme, memory):
        """report B04: log-probabilities of 5 sentences in one batch are those one by one, each with a fresh memory."""
        model = make(scheme, memory)
        lengths = [19, 1, 8, 12, 5]
        ids = ids_for(model, 5, 19)
        mask = (torch.arange(19) < torch.tensor(lengths)[:, None]).long()
        with torch.no_grad():
            model(ids)  # leaves nothing behind
            scores = model(ids, mask).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
            for row, length in enumerate(lengths):
                own = ids[row : row + 1, :length]
                alone = model(own).logits.log_softmax(-1)[:, :-1].gather(-1, own[:, 1:, None]).sum()
                assert off(scores[row].sum(), alone) < EXACT

    @every_scheme
    def test_order_of_what_is_attended_to(self, scheme):
        """report B12: in which order stand memory and the tokens all see? Sinks, memory, segment, each in the order of time."""
        model = make(scheme, num_sink_tokens=2, attn_implementation="eager")  # segments of 5, memory of 7
        ids = ids_for(model, 2, 27)
        cache = None
        with torch.no_grad():
            whole = model(ids, output_attentions=True).attentions
            for column in range(27):
                output = model(ids[:, column : column + 1], cache=cache, output_attentions=True)
                cache, oldest = output.cache, max(0, column // 5 * 5 - 7)
                for of_call, of_step in zip(whole, output.attentions, strict=True):
                    expected = torch.cat([of_call[:, :, column, :2], of_call[:, :, column, 2 + oldest : 3 + column]], -1)
                    assert off(of_step[:, :, 0], expected) < EXACT
        for weights in whole:
            assert weights[:, :, 10:, :2].all(), "a sink is visible to all who no longer see it in its place"
            assert not weights[..., 2:].triu(1).any()

    @every_memory
    def test_memory_off_gives_nothing_to_feed_back(self, memory):
        """report B06: use_cache=False returns None, which can be fed back; the second call stands alone."""
        model = make(memory=memory)
        ids = ids_for(model, 2, 12)
        first = model(ids, use_cache=False)
        assert first.cache is None
        assert first.past_key_values is None
        assert first.mems is None
        for name in CACHE_NAMES:
            assert off(model(ids, **{name: first.cache}).logits, first.logits) == 0

    @pytest.mark.parametrize("where", ["config", "cache"])
    @every_scheme
    def test_memory_of_length_0_is_no_memory(self, scheme, where):
        """report D09, A14, B06: mem_len=0 is a model built without memory, each segment alone, call after call."""
        model = make(scheme, mem_len=0 if where == "config" else 7)
        plain = make(scheme, "none")
        ids = ids_for(model, 2, 20)
        cache = XLCache(model.config, mem_len=0)
        with torch.no_grad():
            for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:]):
                start = cache.get_seq_length()
                found = model(part, cache=cache).logits
                expected = torch.cat([plain(segment).logits for segment in ids.split(5, 1)], 1)
                assert off(found, expected[:, start : start + part.shape[1]]) < EXACT
        assert cache.max_context == 4

    @every_scheme
    def test_no_memory_is_a_plain_decoder(self, scheme):
        """report D09: memory_type none is the model whose memory covers the whole text; segment_len has no effect."""
        ids = ids_for(make(), 2, 23)
        plain = make(scheme, "none")
        expected = make(scheme, mem_len=64)(ids).logits
        assert off(plain(ids).logits, expected) < EXACT
        assert off(make(scheme, "none", segment_len=3, mem_len=0)(ids).logits, expected) < EXACT

    @every_pair
    def test_cache_on_equals_cache_off(self, scheme, memory):
        """report B10: a token at a time with the cache gives the logits of whole passes without it."""
        model = make(scheme, memory)
        ids = ids_for(model, 2, 23)
        with torch.no_grad():
            steps, _ = step(model, ids, None)
            for length in (1, 5, 6, 12, 23):
                assert off(steps[:, length - 1], model(ids[:, :length], use_cache=False).logits[:, -1]) < EXACT

    @pytest.mark.parametrize(
        "changes",
        [
            {"segment_len": 3, "mem_len": 2},
            {"segment_len": 2, "mem_len": 5},
            {"segment_len": 4, "mem_len": 9, "attention_window": 4},
            {"memory_type": "none", "attention_window": 5},
        ],
        ids=str,
    )
    def test_reach_is_stated_exactly(self, changes):
        """report B14: a change max_context before a token can alter its logits, by any split; one farther never."""
        changes = dict(changes)
        model = make("rope", changes.pop("memory_type", "recurrence"), **changes)
        length = 30
        ids = ids_for(model, 1, length)
        variants = ids.repeat(length, 1)
        variants[torch.arange(length), torch.arange(length)] = (ids[0] + 1) % 97
        with torch.no_grad():
            right, _ = step(model, ids, None)
            changed, cache = step(model, variants, None)
        moved = (changed - right).abs().amax(-1) > 1e-12  # (changed token, token)
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        assert int(distance[moved].max()) == model.config.max_context == cache.max_context
        assert not moved[distance < 0].any()


class TestCacheClass:
    @pytest.mark.parametrize(
        "changes",
        [
            {"memory_type": "none", "attention_window": 8},
            {"attention_window": 8},
            {"attention_window": 8, "mem_len": 3},
            {},
        ],
        ids=str,
    )
    @every_scheme
    def test_exact_at_the_edge_of_the_window(self, scheme, changes):
        """report D04: texts of M - 1, M, M + 1 and 2M + 1 tokens equal a masked dense pass, whole and by the token."""
        changes = dict(changes)
        model = make(scheme, changes.pop("memory_type", "recurrence"), **changes)
        edge = model.config.attention_window or model.config.mem_len
        with torch.no_grad():
            for length in (edge - 1, edge, edge + 1, 2 * edge + 1):
                ids = ids_for(model, 1, length)
                expected, _ = dense_pass(model, ids[0])
                assert off(model(ids).logits[0], expected) < EXACT
                steps, _ = step(model, ids, None)
                assert off(steps[0], expected) < EXACT
            # The calls after one of exactly that length.
            ids = ids_for(model, 1, 3 * edge + 1)
            expected, _ = dense_pass(model, ids[0])
            cache = model(ids[:, :edge]).cache
            found = [model(part, cache=cache).logits for part in ids[:, edge:].split(edge, 1)]
            assert off(torch.cat(found, 1)[0], expected[edge:]) < EXACT

    @pytest.mark.parametrize("pads", [0, 4])
    @every_pair
    def test_mask_of_the_whole_history(self, scheme, memory, pads):
        """report D06: with a history of 50 columns, a memory of 16 and a mask of 51, the newest column is read."""
        model = make(scheme, memory, mem_len=16)
        ids = ids_for(model, 2, 51)
        mask = torch.ones_like(ids)
        mask[1, :pads] = 0
        with torch.no_grad():
            cache = model(ids[:, :50], mask[:, :50]).cache
            found = model(ids[:, 50:], mask, cache=cache).logits
            assert off(found, model(ids, mask).logits[:, 50:]) < EXACT
            skipped = torch.cat([mask[:, :50], torch.tensor([[0], [1]])], 1)
            cache = model(ids[:, :50], mask[:, :50]).cache
            model(ids[:, 50:], skipped, cache=cache)
        assert cache.lengths.tolist() == [50, 51 - pads]

    @pytest.mark.parametrize("gradient", [False, True], ids=["key_value", "hidden"])
    @every_pair
    def test_copy_is_independent(self, scheme, memory, gradient):
        """report D07: generating on copies leaves the original bit for bit, and each branch is that of a fresh run."""
        model = make(scheme, memory)
        ids = ids_for(model, 1, 12)
        branches = ids_for(model, 2, 6, seed=9).split(1)
        with torch.set_grad_enabled(gradient):
            cache = model(ids).cache
        before = frozen(cache)
        for copied, branch in zip((copy.deepcopy(cache), copy.copy(cache)), branches, strict=True):
            text = torch.cat([ids, branch], 1)
            expected = greedy_by_hand(model, text, 5)
            with torch.no_grad():
                model(branch, cache=copied.select([0]))
            assert torch.equal(greedy(model, text, 5, cache=copied), expected)
            assert same(frozen(cache), before)
        # The branches and their origin run on at the same time.
        caches = [cache, copy.deepcopy(cache), copy.copy(cache)]
        texts = torch.cat([ids.expand(3, -1), ids_for(model, 3, 4, seed=10)], 1)
        expected = model(texts).logits
        for column in range(12, 16):
            for row, branch in enumerate(caches):
                with torch.set_grad_enabled(gradient):
                    found = model(texts[row : row + 1, column : column + 1], cache=branch).logits
                assert off(found[0, 0], expected[row, column]) < EXACT

    @pytest.mark.parametrize("kind", [DynamicCache, StaticCache, tuple])
    @every_name
    def test_generic_caches_are_refused(self, kind, name):
        """report D11: a cache of another kind is an error that names XLCache, in forward and generate; None is none."""
        model = make()
        ids = ids_for(model, 1, 6)
        other = {"DynamicCache": DynamicCache, "StaticCache": lambda: StaticCache(model.config, max_cache_len=16)}.get(
            kind.__name__, lambda: ((torch.zeros(1, 4, 2, 6),) * 2,) * 2
        )()
        with pytest.raises(TypeError, match="XLCache"):
            model(ids, **{name: other})
        with pytest.raises(TypeError, match="XLCache"):
            greedy(model, ids, 3, **{name: other})
        assert off(model(ids, **{name: None}).logits, model(ids).logits) == 0
        assert torch.equal(greedy(model, ids, 3, **{name: None}), greedy(model, ids, 3))

    @pytest.mark.parametrize("implementation", ["static", "offloaded", "quantized", "sliding_window"])
    def test_generic_implementations_are_refused(self, implementation):
        """report D11: `cache_implementation` of generate names XLCache in its refusal."""
        model = make()
        with pytest.raises(ValueError, match="XLCache"):
            greedy(model, ids_for(model, 1, 6), 3, cache_implementation=implementation)

    @every_name
    @every_memory
    def test_forward_takes_and_returns_every_name(self, memory, name):
        """report X01: forward takes the state under three names, and its output answers to them in every way."""
        model = make(memory=memory)
        ids = ids_for(model, 2, 17)
        whole = model(ids).logits
        first = model(ids[:, :8])
        state = getattr(first, name)
        assert state is first[name]
        assert state is first.cache
        assert name in first
        assert off(model(ids[:, 8:], **{name: state}).logits, whole[:, 8:]) < EXACT
        base = model.model(ids[:, :8], **{name: XLCache(model.config)})
        assert base[name].get_seq_length() == 8

    def test_two_names_at_once_are_refused(self):
        """report X01: two states in one call are an error that names both."""
        model = make()
        with pytest.raises(ValueError, match="mems"):
            model(ids_for(model, 1, 6), cache=XLCache(model.config), mems=XLCache(model.config))

    @pytest.mark.parametrize("gradient", [False, True], ids=["key_value", "hidden"])
    @every_pair
    def test_plain_tensors_and_back(self, scheme, memory, gradient, tmp_path):
        """report D12: a cache written as plain tensors and read back continues with equal logits."""
        model = make(scheme, memory, num_sink_tokens=2 if accepts(memory, num_sink_tokens=2) else 0)
        ids = ids_for(model, 2, 17)
        with torch.set_grad_enabled(gradient):
            cache = model(ids[:, :12]).cache
        torch.save(cache.state_dict(), tmp_path / "cache.pt")
        again = XLCache(model.config)
        again.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
        with torch.no_grad():
            assert off(model(ids[:, 12:], cache=again).logits, model(ids[:, 12:], cache=cache).logits) == 0

    @pytest.mark.slow
    @every_memory
    def test_compiled_model_is_not_stuck_on_a_first_text(self, memory):
        """report D03: two texts through one compiled model, prompt then tokens, equal the plain model."""
        model = make("rope", memory)
        compiled = torch.compile(model, backend="eager", dynamic=False)
        with torch.no_grad():
            for seed in (1, 2):
                ids = ids_for(model, 2, 9, seed=seed)
                first, expected = compiled(ids[:, :6]), model(ids[:, :6])
                assert off(first.logits, expected.logits) < EXACT
                found, right = step(compiled, ids[:, 6:], first.cache), step(model, ids[:, 6:], expected.cache)
                assert off(found[0], right[0]) < EXACT
