"""XLConfig: what is refused says which field, which value, which rule; what is accepted survives a round trip."""

import json
import re

import pytest
import torch
from helpers import ids_for, tiny_config, tiny_model
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES

REFUSED = [
    ({"vocab_size": 0}, "vocab_size=0 must be an integer >= 1"),
    ({"hidden_size": -4}, "hidden_size"),
    ({"hidden_size": 25}, "hidden_size=25 is not a multiple of num_attention_heads=4"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
    ({"head_dim": 0}, "head_dim=0"),
    ({"intermediate_size": 0}, "intermediate_size=0"),
    ({"hidden_act": "sillu"}, "hidden_act='sillu'"),
    ({"norm_type": "batchnorm"}, "norm_type='batchnorm' is not one of rmsnorm, layernorm"),
    ({"norm_position": "middle"}, "norm_position='middle'"),
    ({"norm_eps": 0}, "norm_eps=0"),
    ({"use_parallel_residual": True, "norm_position": "post"}, "use_parallel_residual"),
    ({"embedding_scale": float("nan")}, "embedding_scale=nan"),
    ({"embedding_size": 0}, "embedding_size=0"),
    ({"hidden_dropout": 1.0}, "hidden_dropout=1.0"),
    ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
    ({"embedding_dropout": 2}, "embedding_dropout=2"),
    ({"position_type": "rotary"}, "position_type='rotary' is not one of xl, t5, rope, alibi, none"),
    ({"memory_type": "infinite"}, "memory_type='infinite' is not one of none, recurrence"),
    ({"memory_type": ["none", "recurrence"]}, "memory_type=.* has 2 entries but num_hidden_layers=3"),
    ({"memory_type": ["none", "recurrence", "lstm"]}, "memory_type=.* is not one of"),
    ({"segment_len": 0}, "segment_len=0"),
    ({"mem_len": -1}, "mem_len=-1"),
    ({"attention_window": 0}, "attention_window=0"),
    ({"num_sink_tokens": -1}, "num_sink_tokens=-1"),
    ({"initial_memory": "ones"}, "initial_memory='ones' is not one of empty, zeros"),
    ({"initial_memory": "zeros", "memory_type": "none"}, "initial_memory"),
    ({"bptt_segments": -1}, "bptt_segments=-1"),
    ({"bptt_segments": 1, "segment_len": None}, "bptt_segments=1 needs a segment_len"),
    ({"clamp_len": 0}, "clamp_len=0"),
    ({"cutoffs": [60, 20]}, "cutoffs=.* must rise"),
    ({"cutoffs": [20, 97]}, "cutoffs=.* vocab_size=97"),
    ({"div_val": 2}, "div_val=2 needs cutoffs"),
    ({"div_val": 5, "cutoffs": [20, 60]}, "div_val=5 gives the last of 3 clusters a width of 0"),
    ({"tie_projs": [True], "cutoffs": [20]}, "tie_projs"),
    ({"tie_projs": [False, True], "cutoffs": [20], "tie_word_embeddings": False}, "tie_projs=.* tie_word_embeddings=False"),
    ({"pad_token_id": 97}, "pad_token_id=97"),
    ({"position_type": "t5", "relative_attention_num_buckets": 5}, "relative_attention_num_buckets=5"),
    ({"position_type": "t5", "relative_attention_max_distance": 16}, "relative_attention_max_distance=16"),
    ({"position_type": "alibi", "alibi_slopes": [0.5]}, "alibi_slopes"),
    ({"position_type": "rope", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*yarn"),
    ({"position_type": "rope", "rope_parameters": {"rope_type": "longrope"}}, "'longrope'.*yarn"),
    ({"position_type": "rope", "rope_parameters": {"rope_type": "yarn"}}, "factor"),
    ({"position_type": "rope", "rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
    ({"position_type": "rope", "rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor"),
    ({"position_type": "rope", "head_dim": 7}, "head_dim=7"),
    ({"memory_type": "compressive", "mem_len": 4}, "mem_len=4 must be at least segment_len=5"),
    ({"memory_type": "compressive", "segment_len": None}, "segment_len=None must be set"),
    ({"memory_type": "compressive", "attention_window": 6}, "attention_window=6 means nothing to .*only to none, recurrence"),
    ({"memory_type": "compressive", "compressed_mem_len": 1}, "compressed_mem_len=1 must be at least .* = 2"),
    ({"memory_type": "compressive", "compressed_mem_len": 0}, "compressed_mem_len=0"),
    ({"memory_type": "compressive", "compression_rate": 0}, "compression_rate=0"),
    ({"memory_type": "compressive", "compression_fn": "median"}, "compression_fn='median' is not one of mean, max, conv"),
    ({"memory_type": "compressive", "compression_dilation": 0}, "compression_dilation=0"),
    ({"memory_type": "compressive", "compression_loss": "bptt"}, "compression_loss='bptt'"),
    ({"memory_type": "compressive", "compression_fn": "mean"}, "compression_loss='attention' has nothing to train"),
    ({"memory_type": "compressive", "compression_loss_coef": -1}, "compression_loss_coef=-1"),
    ({"memory_type": "linear", "feature_map": "softplus"}, "feature_map='softplus' is not one of elu, relu, favor"),
    ({"memory_type": "linear", "attention_window": 6}, "attention_window=6 means nothing to"),
    ({"memory_type": "linear", "num_sink_tokens": 1}, "num_sink_tokens=1 means nothing to"),
    ({"memory_type": "linear", "initial_memory": "zeros"}, "initial_memory='zeros' means nothing to"),
    ({"memory_type": "linear", "attention_dropout": 0.1}, "attention_dropout=0.1 means nothing to"),
    ({"memory_type": "linear", "clamp_len": None}, "position_type='xl' needs a distance .* Set clamp_len"),
    ({"memory_type": "linear", "num_random_features": 0}, "num_random_features=0"),
    ({"memory_type": "linear", "redraw_interval": 0}, "redraw_interval=0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[json.dumps(changes) for changes, _ in REFUSED])
def test_refused(changes, message):
    with pytest.raises((ValueError, StrictDataclassError)) as caught:
        tiny_config(**changes)
    text = " ".join(str(e) for e in (caught.value, caught.value.__cause__) if e is not None)
    assert re.search(message, text, re.DOTALL), text


@pytest.mark.parametrize("wrong", [{"mem_len": "7"}, {"hidden_size": 24.5}, {"gated_mlp": "yes"}, {"memory_type": 3}], ids=str)
def test_wrong_types_name_the_field(wrong):
    with pytest.raises((ValueError, TypeError, StrictDataclassError), match=next(iter(wrong))):
        tiny_config(**wrong)


@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize(
    "memory",
    [*MEMORY_MECHANISMS, ["none", "recurrence", "none"], ["linear", "compressive", "recurrence"]],
    ids=[*MEMORY_MECHANISMS, "mixture", "mixture_of_three"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_round_trip(memory, position, tied, tmp_path):
    """Every field, every weight and the logits after save and load through the Auto classes."""
    model = tiny_model(
        dtype=torch.float32,
        position_type=position,
        memory_type=memory,
        tie_word_embeddings=tied,
        untie_r=tied,
        bptt_segments=2,
        feature_map="favor",
        **({"num_sink_tokens": 1} if memory != "linear" else {}),
        **({"attention_window": 9} if memory not in ("linear", "compressive") else {}),
    )
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    saved, loaded = model.config.to_dict(), config.to_dict()
    assert {k: v for k, v in loaded.items() if k != "_name_or_path"} == {k: v for k, v in saved.items() if k != "_name_or_path"}
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert isinstance(again, XLForCausalLM) and again.config.memory_type == memory
    ids = ids_for(model, 2, 23)
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_default_is_the_documented_one():
    config = XLConfig()
    assert (config.num_key_value_heads, config.head_dim, config.embedding_size) == (8, 64, 512)
    assert config.rope_parameters is None
    rope = XLConfig(position_type="rope").rope_parameters
    assert rope["rope_type"] == "default" and rope["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, ids: m(), "input_ids or inputs_embeds"),
        (lambda m, ids: m(ids, inputs_embeds=m.model.embed(ids)), "input_ids or inputs_embeds"),
        (lambda m, ids: m(ids[0]), r"input_ids has shape \(9,\)"),
        (lambda m, ids: m(ids[:, :0]), "at least one row and one token"),
        (lambda m, ids: m(ids[:0]), "at least one row and one token"),
        (lambda m, ids: m(inputs_embeds=m.model.embed(ids)[..., :5]), "hidden_size=24"),
        (lambda m, ids: m(ids + 90), "vocab_size - 1 = 96"),
        (lambda m, ids: m(ids - 97), "ids from -"),
        (lambda m, ids: m(ids, attention_mask=torch.ones(2, 5)), r"attention_mask has shape \(2, 5\)"),
        (lambda m, ids: m(ids, attention_mask=torch.ones(1, 9)), r"attention_mask has shape \(1, 9\)"),
        (lambda m, ids: m(ids, attention_mask=torch.ones(2, 1, 9, 9)), "attention_mask has shape"),
        (lambda m, ids: m(ids, document_ids=torch.zeros(2, 8)), "document_ids has shape"),
        (lambda m, ids: m(ids, position_ids=torch.zeros(3, 9)), "position_ids has shape"),
        (lambda m, ids: m(ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 3, 4, 5, 6]])), "positions must rise"),
        (lambda m, ids: m(ids, labels=ids[:, 1:]), "labels has shape"),
        (lambda m, ids: m(ids, shift_labels=ids[:1]), "shift_labels has shape"),
        (lambda m, ids: m(ids, output_attentions=True), "attn_implementation='eager'"),
    ],
)
def test_bad_calls(call, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        call(model, ids_for(model, 2, 9))


def test_documentation_of_the_class_holds():
    assert XLConfig(position_type="rope", memory_type="recurrence", segment_len=128, mem_len=256).max_context == 3199
