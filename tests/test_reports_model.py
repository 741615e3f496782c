"""Public bug reports about numbers of one call: loss, heads, masks, positions, precision. Ids are the reports'."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from reference import dense_pass
from report_helpers import (
    CLOSE,
    EXACT,
    HEADS,
    TOKENWISE,
    WEIGHTED,
    alone,
    every_head,
    every_memory,
    every_pair,
    every_scheme,
    grads_of,
    greedy,
    ids_for,
    make,
    make_other,
    off,
    padded,
    worst,
)
from torch.nn import functional
from transformers.models.t5.modeling_t5 import T5Attention

from modeling_xl import (
    XLConfig,
    XLForCausalLM,
    XLForQuestionAnswering,
    XLForSequenceClassification,
    XLForTokenClassification,
    XLModel,
)
from modeling_xl.position_base import PositionContext
from modeling_xl.position_rope import ROPE_TYPES, RopePosition, rope_frequencies

ROPE = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
every_rope_type = pytest.mark.parametrize("rope_type", ROPE)


def rope_parameters(rope_type: str) -> dict:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE[rope_type]}


def show_bias_only(model):
    """Queries and keys of zeros: attention weights are then the softmax of the position bias alone."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            size = (attention.num_heads + attention.num_key_value_heads) * attention.head_dim
            attention.qkv_proj.weight[:size] = 0
    return model


class TestLoss:
    @every_head
    def test_labels_are_shifted_inside(self, head):
        """report A01: loss(labels=ids) is the cross entropy of logits[:, :-1] against ids[:, 1:]."""
        model = make(**HEADS[head])
        ids = ids_for(model, 2, 13)
        expected = -model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
        for mode in (model.eval(), model.train()):
            assert off(mode(ids, labels=ids).loss, expected) < EXACT

    @every_head
    def test_row_of_one_token_has_no_target(self, head):
        """report A01: a one-token row adds nothing to the loss, and alone gives 0 with zero gradient, no crash."""
        model = make(**HEADS[head]).train()
        ids = ids_for(model, 2, 13)
        mask = torch.ones_like(ids)
        mask[1, :-1] = 0
        assert off(model(ids, mask, labels=ids).loss, model(ids[:1], labels=ids[:1]).loss) < EXACT
        loss = model(ids[:, :1], labels=ids[:, :1]).loss
        loss.backward()
        assert loss == 0
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())

    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    @every_head
    def test_loss_comes_first_and_is_a_scalar(self, head, training):
        """report A02: out.loss, out["loss"], out[0] and the tuple's first entry are one 0-dim tensor with gradient."""
        model = make(**HEADS[head]).train(training)
        ids = ids_for(model, 2, 13)
        output = model(ids, labels=ids)
        assert output.loss is output["loss"]
        assert output.loss is output[0]
        assert output.loss.shape == ()
        assert output.loss.requires_grad
        assert off(model(ids, labels=ids, return_dict=False)[0], output.loss) == 0

    @pytest.mark.parametrize(
        ("model_class", "labels"),
        [
            (XLForSequenceClassification, {"labels": torch.tensor([0, 1])}),
            (XLForTokenClassification, {"labels": torch.tensor([[0, 1, -100, 1, 0, 1, 0]] * 2)}),
            (XLForQuestionAnswering, {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 6])}),
        ],
    )
    def test_loss_of_other_heads(self, model_class, labels):
        """report A02: every head returns a scalar `.loss` first, with gradient for every parameter."""
        model = make_other(model_class)
        output = model(ids_for(model, 2, 7), **labels)
        assert output.loss is output[0]
        assert output.loss.shape == ()
        output.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    @every_head
    def test_mean_is_over_valid_labels(self, head):
        """report A04: a target whose loss is 0 counts in the mean, -100 does not; no target at all gives 0."""
        model = make(**HEADS[head])
        with torch.no_grad():
            model.model.norm.weight.mul_(300)
            logits = model(ids_for(model, 2, 13)).logits
        ids = ids_for(model, 2, 13)
        labels = ids.clone()
        labels[:, 4:9] = -100
        labels[0, 1], labels[1, -1] = logits[0, 0].argmax(), logits[1, -2].argmax()
        each = functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        valid = labels[:, 1:] != -100
        assert float(each[0, 0]) < 1e-3
        assert int(valid.sum()) == 14
        assert off(model(ids, labels=labels).loss, each[valid].sum() / 14) < 1e-6  # losses of size 300 here
        assert model(ids, labels=torch.full_like(ids, -100)).loss == 0

    @every_head
    def test_loss_of_a_batch_split_for_accumulation(self, head):
        """report H01: 8 rows at once and 2 rows 4 times, unevenly padded, give one loss and one gradient."""
        model = make(**HEADS[head]).train()
        ids = ids_for(model, 8, 17)
        lengths = torch.tensor([17, 3, 9, 2, 14, 1, 16, 5])
        mask = (torch.arange(17) < lengths[:, None]).long()
        mask[2:4] = mask[2:4].flip(1)
        labels = ids.masked_fill(mask == 0, -100)
        whole = model(ids, mask, labels=labels).loss
        whole.backward()
        expected = grads_of(model)
        model.zero_grad()
        items = (lengths - 1).sum()
        total = 0.0
        for rows in torch.arange(8).view(4, 2):
            loss = model(ids[rows], mask[rows], labels=labels[rows], num_items_in_batch=items).loss
            loss.backward()
            total += float(loss.detach())
        assert abs(total - float(whole.detach())) < EXACT
        assert worst(grads_of(model), expected) < EXACT


class TestHeads:
    @every_head
    def test_logits_are_always_scores_over_the_vocabulary(self, head):
        """report A12: `.logits` are [B, T, V] and their softmax sums to 1; those of clusters are log-probabilities."""
        model = make(**HEADS[head])
        ids = ids_for(model, 2, 13)
        outputs = [model(ids), model(ids, labels=ids), model.train()(ids)]
        for output in outputs:
            assert output.logits.shape == (2, 13, 97)
            assert off(output.logits, outputs[0].logits) < EXACT
            assert off(output.logits.softmax(-1).sum(-1), torch.ones(2, 13)) < EXACT
        if model.config.cutoffs:
            assert off(outputs[0].logits.exp().sum(-1), torch.ones(2, 13)) < EXACT

    @pytest.mark.parametrize("change", [3, -4])
    @every_head
    def test_resize_of_embeddings(self, head, change, tmp_path):
        """report A06: after a resize logits, last cluster, tie and a reload agree, and old scores have stayed."""
        model = make(**HEADS[head])
        ids = ids_for(model, 2, 9) % 90
        kept = min(97, 97 + change)
        with torch.no_grad():  # Transformers swaps a table's data, which a graph that is still alive does not survive
            before = model(ids).logits
            model.resize_token_embeddings(97 + change)
            after = model(ids).logits
        assert model.config.vocab_size == after.shape[-1] == 97 + change
        if model.config.cutoffs:
            # Scores of the last cluster are normalised over its new size: their differences stay.
            last = model.config.cutoffs[-1]
            assert off(after[..., :last], before[..., :last]) < EXACT
            before, after = (scores - scores[..., last : last + 1] for scores in (before, after))
            assert off(after[..., last:kept], before[..., last:kept]) < EXACT
            assert list(model.config.cutoffs) == [20, 51]
            assert model.lm_head.edges == [0, 20, 51, 97 + change]
        else:
            assert off(after[..., :kept], before[..., :kept]) < EXACT
        names = {name for name, _ in model.named_parameters(remove_duplicate=True)}
        tied = len(list(model.named_parameters(remove_duplicate=False))) - len(names)
        fresh = make(**HEADS[head], vocab_size=97 + change)
        assert names == {name for name, _ in fresh.named_parameters()}
        assert tied == len(list(fresh.named_parameters(remove_duplicate=False))) - len(names)
        newest = torch.full((1, 2), 97 + change - 1)
        model(newest, labels=newest).loss.backward()
        model.save_pretrained(tmp_path)
        again = XLForCausalLM.from_pretrained(tmp_path).eval()
        assert off(again(newest).logits, model(newest).logits) == 0

    @pytest.mark.parametrize("model_class", [XLModel, XLForSequenceClassification, XLForTokenClassification])
    @pytest.mark.parametrize("head", ["dense", "projected", "adaptive"])
    def test_resize_without_language_head(self, model_class, head):
        """report A06: models without scores over the vocabulary resize too, to a multiple if asked."""
        model = make_other(model_class, **HEADS[head])
        before = model(ids_for(model, 1, 5) % 97)[0]
        model.resize_token_embeddings(98, pad_to_multiple_of=8)
        assert model.config.vocab_size == 104
        assert off(model(ids_for(make(), 1, 5))[0], before) == 0
        model(torch.full((1, 3), 103))

    def test_resize_below_the_last_cutoff_is_refused(self):
        """report A06: a vocabulary that ends before the last cluster is an error that names the cutoffs."""
        with pytest.raises(ValueError, match="cutoffs"):
            make(**HEADS["adaptive"]).resize_token_embeddings(51)

    @pytest.mark.parametrize("div_val", [1, 2])
    def test_any_vocabulary(self, div_val):
        """report A16: a vocabulary of 53 with 3 odd cutoffs trains for 20 steps and generates."""
        torch.manual_seed(0)
        model = XLForCausalLM(
            XLConfig(
                vocab_size=53,
                cutoffs=(7, 19, 31),
                div_val=div_val,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                segment_len=5,
                mem_len=7,
            )
        )
        ids = ids_for(model, 2, 16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        for _ in range(20):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] - 1
        assert int(greedy(model.eval(), ids, 9).max()) < 53


class TestPadding:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @every_pair
    def test_padded_rows_equal_rows_alone(self, scheme, memory, attention):
        """report A07, H12, F08: pads on any side, in a batch of 3 or of 1, leave the numbers of a row alone."""
        model = make(scheme, memory, attn_implementation=attention)
        lengths = [23, 4, 12]
        ids = ids_for(model, 3, 23)
        expected = alone(model, ids, lengths)
        for side in ("left", "right", "inside"):
            filled, mask = padded(ids, lengths, side)
            for rows in (slice(0, 3), slice(1, 2)):
                with torch.set_grad_enabled(rows.start == 0):
                    logits = model(filled[rows], mask[rows]).logits
                for row, real, own in zip(logits, mask[rows].bool(), expected[rows], strict=True):
                    assert off(row[real], own) < EXACT, side

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @every_pair
    def test_row_without_any_token(self, scheme, memory, dtype, attention):
        """report F13, H14, H16: a fully masked row gives exact zeros, and no NaN to others or to any gradient."""
        model = make(scheme, memory, dtype=dtype, attn_implementation=attention).train()
        ids = ids_for(model, 3, 12)
        mask = torch.ones_like(ids)
        mask[1] = 0
        mask[2, :6] = 0
        output = model.model(ids, mask)
        assert not output.last_hidden_state[mask == 0].any()
        assert output.last_hidden_state.isfinite().all()
        model(ids, mask, labels=ids).loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        with torch.no_grad():
            logits = model.eval()(ids, mask, cache=None).logits
            own = model(ids[:1]).logits
        # Half precision: other kernels for a batch of one round otherwise, at logits of size 10.
        assert off(logits[:1], own) < (CLOSE if dtype == torch.float32 else 0.05)

    @pytest.mark.parametrize("memory", WEIGHTED)
    @every_scheme
    def test_masked_keys_weigh_exactly_nothing(self, scheme, memory):
        """report H15: with scores of size 1e5 a pad, a later token and a far segment still have the weight 0."""
        model = make(scheme, memory, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.norm.weight.mul_(300)
        ids = ids_for(model, 2, 19)
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
        with torch.no_grad():
            output = model(ids, mask, output_attentions=True)
        for weights in output.attentions:
            assert weights.isfinite().all()
            sums = weights.sum(-1)
            assert off(sums, mask[:, None].expand_as(sums).float()) < 1e-5
            assert not weights[0, :, :, :6].any()
            assert not weights.triu(1).any()
            if memory == "recurrence":
                assert not weights[1, :, 15:, : 15 - 7].any()  # segments of 5, memory of 7

    @every_pair
    def test_later_tokens_and_pads_change_nothing_at_large_scores(self, scheme, memory):
        """report H15: with scores of size 1e5 the content of masked columns does not move one bit."""
        model = make(scheme, memory, dtype=torch.float32)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.norm.weight.mul_(300)
            ids = ids_for(model, 2, 19)
            mask = torch.ones_like(ids)
            mask[0, :6] = 0
            other = ids.clone()
            other[0, :6] = 5
            other[:, 12:] = 6
            assert off(model(ids, mask).logits[:, 6:12], model(other, mask).logits[:, 6:12]) == 0

    @pytest.mark.parametrize("name", ["document_ids", "position_ids"])
    @every_pair
    def test_packed_documents_stay_apart(self, scheme, memory, name):
        """report H08: in packed rows a token before a border cannot change logits after it."""
        model = make(scheme, memory)
        ids = ids_for(model, 1, 23)
        numbers = torch.tensor([[0] * 4 + [1] * 9 + [2] * 10])
        starts = torch.tensor([[*range(4), *range(9), *range(10)]])
        given = {name: numbers if name == "document_ids" else starts}
        before = model(ids, **given).logits
        for token, border in ((3, 4), (0, 4), (12, 13)):
            changed = ids.clone()
            changed[0, token] = (changed[0, token] + 1) % 97
            after = model(changed, **given).logits
            assert off(after[:, border:], before[:, border:]) < EXACT
            assert off(after[:, token], before[:, token]) > 1e-3


class TestPositions:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("position", [15962, 10_000_000])
    @every_rope_type
    def test_rope_far_out(self, rope_type, position, dtype):
        """report E01: cosines and sines far out are those of exact angles, rounded once, in half precision too."""
        model = make("rope", dtype=dtype, rope_parameters=rope_parameters(rope_type))
        scheme, size = model.model.layers[0].self_attn.position, model.config.head_dim
        angles = [position * frequency for frequency in rope_frequencies(scheme.parameters_of_rope, size).tolist()]
        ones, where = torch.ones(1, 1, 1, size, dtype=dtype), torch.tensor([[position]])
        turned, _ = scheme.encode(ones, ones, where, where, PositionContext())
        assert turned.dtype == dtype
        for pair, angle in enumerate(angles):
            # (1, 1) turned by the angle; YaRN's factor is on both.
            factor = 0.1 * math.log(4) + 1 if rope_type == "yarn" else 1.0
            first, second = factor * (math.cos(angle) - math.sin(angle)), factor * (math.sin(angle) + math.cos(angle))
            limit = 1e-6 if dtype == torch.float32 else 1e-2
            assert abs(float(turned[..., pair]) - first) < limit
            assert abs(float(turned[..., pair + len(angles)]) - second) < limit

    @pytest.mark.parametrize("jump", [1, 15962, 10_000_000])
    @every_pair
    def test_far_positions(self, scheme, memory, jump):
        """report E01: after a jump to position 10,000,000 a float32 model still has the numbers of exact positions."""
        exact = make(scheme, memory)
        ids = ids_for(exact, 1, 14)
        positions = torch.arange(14) + (torch.arange(14) > 2) * jump
        expected, _ = dense_pass(exact, ids[0], positions=positions)
        for model, limit in ((exact, EXACT), (make(scheme, memory, dtype=torch.float32), 1e-4)):
            assert off(model(ids, position_ids=positions[None]).logits[0], expected) < limit
            # Where a text begins is no distance.
            assert off(model(ids, position_ids=positions[None] + jump).logits[0], expected) < limit

    @pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
    def test_rope_that_changes_with_the_length_is_refused(self, rope_type):
        """report E03: a base that depends on the running length contradicts rotated keys: refused, naming yarn."""
        with pytest.raises(StrictDataclassError, match="yarn"):
            XLConfig(position_type="rope", rope_parameters={"rope_type": rope_type, "factor": 2.0})

    @every_rope_type
    @every_memory
    def test_rope_beyond_the_trained_length(self, memory, rope_type):
        """report E03, E05: far beyond the trained length cache on = off, and a row in a long batch = the row alone."""
        model = make("rope", memory, rope_parameters=rope_parameters(rope_type), max_position_embeddings=8)
        ids = ids_for(model, 2, 27)
        whole = model(ids).logits
        cache, steps = None, []
        with torch.no_grad():
            for column in range(27):
                output = model(ids[:, column : column + 1], cache=cache)
                cache = output.cache
                steps.append(output.logits)
        assert off(torch.cat(steps, 1), whole) < EXACT
        filled, mask = padded(ids, [27, 6], "left")
        assert off(model(filled, mask).logits[1, -6:], model(ids[1:, :6]).logits[0]) < EXACT

    def test_every_rope_type_is_tested(self):
        """report E05: the scaled types of these tests are those of the package."""
        assert set(ROPE) == set(ROPE_TYPES)

    def test_alibi_distance_form_equals_key_form(self):
        """report E06: under causal softmax -slope * distance and +slope * key position are the same weights."""
        model = show_bias_only(make("alibi", "none", attn_implementation="eager"))
        weights = model(ids_for(model, 1, 11), output_attentions=True).attentions[0][0]
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / 4) for head in range(4)], dtype=torch.float64)
        by_key = (slopes[:, None, None] * torch.arange(11)).expand(-1, 11, -1)
        hidden = torch.ones(11, 11, dtype=torch.bool).triu(1)
        assert off(weights, by_key.masked_fill(hidden, -math.inf).softmax(-1)) < EXACT

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("memory", WEIGHTED)
    def test_alibi_of_a_step_begins_at_zero(self, memory, dtype):
        """report E08: a token at a time the bias of the newest key is 0, of the one before -slope."""
        model = show_bias_only(make("alibi", memory, dtype=dtype, attn_implementation="eager"))
        ids = ids_for(model, 1, 9)
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / 4) for head in range(4)])
        cache = None
        with torch.no_grad():
            for column in range(9):
                output = model(ids[:, column : column + 1], cache=cache, output_attentions=True)
                cache = output.cache
                bias = output.attentions[0][0, :, 0].log()
                distances = torch.arange(bias.shape[-1] - 1, -1, -1)
                # A weight is rounded to 2^-9 of itself, its logarithm and the difference (up to 4) to 2^-8 each.
                limit = 3e-2 if dtype == torch.bfloat16 else EXACT
                assert off(bias - bias[:, -1:], (-slopes[:, None] * distances).to(dtype)) < limit

    @pytest.mark.parametrize("memory", TOKENWISE)
    @every_scheme
    def test_bias_of_a_step_is_the_last_row_of_a_pass(self, scheme, memory):
        """report E11: the bias counts the tokens before a call: a step's weights are the whole pass's last row."""
        model = show_bias_only(make(scheme, memory, attn_implementation="eager"))
        ids = ids_for(model, 2, 18)
        whole = model(ids, output_attentions=True).attentions
        cache = None
        with torch.no_grad():
            for column in range(18):
                output = model(ids[:, column : column + 1], cache=cache, output_attentions=True)
                cache = output.cache
                for layer, weights in enumerate(output.attentions):
                    row = whole[layer][:, :, column : column + 1, : column + 1]
                    seen = weights.shape[-1]
                    assert off(weights, row[..., -seen:]) < EXACT
                    assert not row[..., :-seen].any()

    def test_t5_buckets_are_those_of_t5(self):
        """report E11: the bias of each distance is the table's entry for T5's own bucket."""
        model = show_bias_only(make("t5", "none", attn_implementation="eager"))
        weights = model(ids_for(model, 1, 200), output_attentions=True).attentions[0][0, :, -1].log()
        distances = torch.arange(199, -1, -1)
        bucket = T5Attention._relative_position_bucket(-distances, bidirectional=False, num_buckets=32, max_distance=128)
        bias = model.model.shared_position.table[bucket].T
        assert off(weights - weights[:, -1:], bias - bias[:, -1:]) < EXACT

    @pytest.mark.parametrize("has_gradient", [True, False], ids=["grad", "no_grad"])
    @every_pair
    def test_sdpa_equals_eager(self, scheme, memory, has_gradient):
        """report E10, E15: every scheme runs on sdpa with memory, pads and bias, and gives eager's numbers."""
        logits = {}
        with torch.set_grad_enabled(has_gradient):
            for attention in ("eager", "sdpa"):
                model = make(scheme, memory, attn_implementation=attention)
                filled, mask = padded(ids_for(model, 2, 20), [20, 9], "left")
                first = model(filled, mask)
                logits[attention] = first.logits, model(filled, cache=first.cache).logits
        assert off(logits["sdpa"][0], logits["eager"][0]) < EXACT
        assert off(logits["sdpa"][1], logits["eager"][1]) < EXACT

    @pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
    @every_scheme
    def test_flash_is_refused(self, scheme, name):
        """report E10, E15: flash attention knows no bias; asking for it is an error that says so."""
        with pytest.raises((ValueError, ImportError), match=r"(?i)flash"):
            make(scheme, attn_implementation=name)

    def test_unknown_attention_is_refused(self):
        """report E15: a name that is no attention function is an error that names it."""
        with pytest.raises((ValueError, ImportError), match="no_such_attention"):
            make(attn_implementation="no_such_attention")

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about its own parts
    @every_pair
    def test_flex_attention(self, scheme, memory):
        """report E13, E15: flex gives eager's numbers, and trains its bias or falls back: gradients are eager's."""
        torch.compiler.reset()  # the compiler gives up on a function after some shapes, those of other tests included
        models = [make(scheme, memory, dtype=torch.float32, attn_implementation=name) for name in ("eager", "flex_attention")]
        filled, mask = padded(ids_for(models[0], 2, 20), [20, 9], "left")
        with torch.no_grad():
            assert off(*(model(filled, mask).logits for model in models)) < 1e-4
        for model in models:
            model(filled, mask, labels=filled).loss.backward()
        assert worst(*(grads_of(model) for model in models)) < 1e-4

    @every_pair
    def test_gradients_of_sdpa_equal_eager(self, scheme, memory):
        """report E13: gradients of the bias's own parameters, and of all others, are eager's on the trained path."""
        grads = []
        for attention in ("eager", "sdpa"):
            model = make(scheme, memory, attn_implementation=attention, bptt_segments=2).train()
            filled, mask = padded(ids_for(model, 2, 20), [20, 9], "right")
            model(filled, mask, labels=filled).loss.backward()
            grads.append(grads_of(model))
        assert worst(*grads) < EXACT

    @every_rope_type
    def test_rotation_knows_where_a_call_begins(self, rope_type):
        """report E14: calls of one length at positions 0 and 64 are rotated differently, each by its own angles."""
        scheme = RopePosition(make("rope", rope_parameters=rope_parameters(rope_type)).config, 0)
        states = torch.randn(1, 1, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        context = PositionContext()
        found = [scheme.encode(states, states, *[torch.arange(5)[None] + start] * 2, context)[0] for start in (0, 64)]
        assert off(*found) > 0.1
        single = [
            scheme.encode(states[:, :, i : i + 1], states, torch.tensor([[64 + i]]), torch.arange(5)[None], PositionContext())[
                0
            ]
            for i in range(5)
        ]
        assert off(found[1], torch.cat(single, 2)) == 0

    @every_pair
    def test_calls_of_one_length_at_other_places(self, scheme, memory):
        """report E14: the 14th call of 5 tokens equals that part of the dense pass, as the first does."""
        model = make(scheme, memory)
        ids = ids_for(model, 1, 70)
        expected, _ = dense_pass(model, ids[0])
        cache = None
        with torch.no_grad():
            for start in range(0, 70, 5):
                output = model(ids[:, start : start + 5], cache=cache)
                cache = output.cache
                assert off(output.logits[0], expected[start : start + 5]) < EXACT


class TestPrecision:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @every_pair
    def test_half_precision_is_near_float32(self, scheme, memory, dtype, attention):
        """report H14, H16: causal, pad and memory masks together stay finite in half precision, near float32."""
        model = make(scheme, memory, dtype=dtype, attn_implementation=attention)
        exact = make(scheme, memory, dtype=torch.float32)
        exact.load_state_dict(model.state_dict())
        filled, mask = padded(ids_for(model, 3, 21), [21, 2, 13], "left")
        with torch.no_grad():
            first, expected = model(filled, mask), exact(filled, mask)
            second, after = model(filled, mask, cache=first.cache), exact(filled, mask, cache=expected.cache)
        for found, right in ((first, expected), (second, after)):
            assert found.logits.isfinite().all()
            assert found.logits.dtype == dtype
            distance = (found.logits.float() - right.logits)[mask.bool()].square().mean().sqrt()
            # A rounding is 2^-11 or 2^-8 of a number; three layers of sums make it some times that.
            limit = {torch.float16: 0.005, torch.bfloat16: 0.04}[dtype]
            assert distance < limit * right.logits[mask.bool()].square().mean().sqrt()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @every_pair
    def test_autocast_trains(self, scheme, memory, dtype):
        """report H16: a training step under autocast has a finite loss near float32's, and finite gradients."""
        model = make(scheme, memory, dtype=torch.float32).train()
        ids = ids_for(model, 2, 20)
        expected = model(ids, labels=ids).loss
        with torch.autocast("cpu", dtype):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.dtype == torch.float32
        assert off(loss, expected) < 0.05 * float(expected.detach())
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    @pytest.mark.parametrize("norm_position", ["pre", "post"])
    @pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
    @every_scheme
    def test_large_activations_in_float16(self, scheme, norm_type, norm_position):
        """report H17: activations 100 times as large give no NaN and no infinity in float16."""
        model = make(
            scheme,
            dtype=torch.float16,
            embedding_scale=300.0,
            norm_type=norm_type,
            norm_position=norm_position,
        )
        ids = ids_for(model, 2, 20)
        assert model.model.embed(ids).abs().max() > 300
        output = model(ids, labels=ids)
        output.loss.backward()
        assert output.logits.isfinite().all()
        assert output.loss.isfinite()
        with torch.no_grad():
            assert model(ids).logits.isfinite().all()

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @every_scheme
    def test_large_scores_in_float16(self, scheme, attention):
        """report H17: the softmax is taken in float32: scores beyond the range of float16 give no NaN."""
        model = make(scheme, dtype=torch.float16, attn_implementation=attention)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.norm.weight.mul_(200)
            assert model(ids_for(model, 2, 20)).logits.isfinite().all()
        model(ids_for(model, 2, 20), labels=ids_for(model, 2, 20)).loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
