"""Families of foreign checkpoints against the classes of Transformers that they belong to.

Every number is compared in float64. The foreign classes force parts of their work into float32 (norms, the softmax of eager
attention, rotary angles), which would leave 1e-6 and hide a small fault; `InDouble` lifts these parts into float64, so that
nothing but the rounding of other kernels is left.
"""

import functools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from modeling_xl.conversion.convert import DEFAULT_SINKS, Memory, convert, convert_back
from modeling_xl.conversion.families import FAMILIES
from modeling_xl.text import InputError

LENGTH = 23
FLOAT32 = 5e-4  # what rounding may leave in logits of up to about 10
SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "attention_dropout": 0.3,
    "initializer_range": 0.03,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "pad_token_id": None,
}
THREE = {"num_attention_heads": 3, "num_key_value_heads": 1}  # heads of 8
HEAD_10 = {**THREE, "head_dim": 10}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}


def part(factor: float, **others) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": factor, **others}}


_COMMON = {name: SIZES[name] for name in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")}
_LONG = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")}
NEOX = {**_COMMON, **_LONG, "intermediate_size": 20, "attention_dropout": 0.3}
# The class keeps the square root of the head size in float32; those of 16 and 4 are exact.
GPTJ = {**_COMMON, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.3, "embd_pdrop": 0.2}
BLOOM = {**_COMMON, "hidden_size": 24, "n_layer": 3, "n_head": 4, "attention_dropout": 0.3, "hidden_dropout": 0.1}
MPT = {**_COMMON, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}
FALCON = {**_COMMON, **_LONG, "ffn_hidden_size": 20, "attention_dropout": 0.3, "hidden_dropout": 0.1}


# Variants of each family's config. What is equal here has to be far from the defaults, or a field could be left out unseen.
TINY: dict[str, list[dict]] = {
    "llama": [
        SIZES,
        {**SIZES, **HEAD_10, **TIED, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2},
        {**SIZES, "rope_parameters": LLAMA3, "hidden_act": "gelu"},
    ],
    "mistral": [
        {**SIZES, **HEAD_10, "sliding_window": 6, "rope_parameters": YARN},
        {**SIZES, **TIED, "sliding_window": None},
    ],
    "qwen2": [
        SIZES,
        {**SIZES, **HEAD_10, **TIED, **SLIDING, "rms_norm_eps": 1e-2},
        {**SIZES, **UNTIED, "rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3},
    ],
    "qwen3": [
        {**SIZES, "head_dim": 6},
        {**SIZES, **HEAD_10, **TIED, **SLIDING, "attention_bias": True, "rms_norm_eps": 1e-2},
    ],
    "phi": [
        {**SIZES, **part(0.34)},
        {**SIZES, **HEAD_10, **TIED, **part(0.6), "resid_pdrop": 0.1, "embd_pdrop": 0.2, "layer_norm_eps": 1e-2},
        {**SIZES, **THREE, **part(1.0), "hidden_act": "relu"},
    ],
    "phi3": [
        SIZES,
        {**SIZES, **THREE, **TIED, **part(0.75), "sliding_window": 6, "resid_pdrop": 0.1, "rms_norm_eps": 1e-2},
    ],
    "stablelm": [
        {**SIZES, **part(0.34)},
        {**SIZES, **THREE, **TIED, **part(0.25), "use_qkv_bias": True, "hidden_dropout": 0.1, "layer_norm_eps": 1e-2},
        {**SIZES, **THREE, **part(1.0), "use_qkv_bias": True, "use_parallel_residual": True},
    ],
    "olmo": [
        SIZES,
        {**SIZES, **HEAD_10, **TIED, "attention_bias": True, "clip_qkv": 0.7, "rope_parameters": LLAMA3},
    ],
    "starcoder2": [
        {**SIZES, "embedding_dropout": 0.2},
        {**SIZES, **HEAD_10, **UNTIED, "use_bias": False, "sliding_window": 6, "residual_dropout": 0.1, "norm_epsilon": 1e-2},
    ],
    "gemma": [
        {**SIZES, "head_dim": 10},
        {**SIZES, **THREE, **UNTIED, "head_dim": 8, "attention_bias": True, "rms_norm_eps": 1e-2},
    ],
    "nemotron": [
        {**SIZES, **part(0.34)},
        {**SIZES, **HEAD_10, **TIED, **part(0.6), "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-2},
    ],
    "gpt-neox": [
        {**NEOX, **part(0.34)},
        {**NEOX, **part(1.0), **TIED, "num_attention_heads": 3, "use_parallel_residual": False, "layer_norm_eps": 1e-2},
        {**NEOX, **part(0.67), "attention_bias": False, "hidden_dropout": 0.1, "hidden_act": "relu"},
    ],
    "gptj": [
        {**GPTJ, "rotary_dim": 4},
        {**GPTJ, "rotary_dim": 2, "n_head": 8, "n_inner": 20, "layer_norm_epsilon": 1e-2, "activation_function": "relu"},
    ],
    "bloom": [
        BLOOM,
        {**BLOOM, **UNTIED, "n_head": 3, "apply_residual_connection_post_layernorm": True, "layer_norm_epsilon": 1e-2},
    ],
    "mpt": [
        MPT,
        {**MPT, **UNTIED, "n_heads": 3, "layer_norm_epsilon": 1e-2, "attn_config": {"clip_qkv": 0.7}},
    ],
    "falcon": [
        {**FALCON, "multi_query": True, "parallel_attn": True},
        {**FALCON, **UNTIED, "num_kv_heads": 2, "new_decoder_architecture": True, "rope_parameters": LLAMA3},
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True},
        # Heads are a power of two, so that slopes and products with them are exact in the bfloat16 that the class puts them in.
        {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True, "layer_norm_epsilon": 1e-2},
    ],
}
VARIANTS = [pytest.param(name, values, id=f"{name}-{i}") for name, all_of in TINY.items() for i, values in enumerate(all_of)]
FIRST = [pytest.param(name, all_of[0], id=name) for name, all_of in TINY.items()]


class InDouble(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def save_source(folder, name: str, values: dict, **options):
    """A model of the family with weights far from where they begin, exact in float32 even where 1 is added to them."""
    kind = FAMILIES[name].model_types[0]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                values *= 1.5 / math.sqrt(parameter.shape[1])
            else:
                # Weights of some norms are what is added to 1; whether this is one is told by how it began.
                begin = 1.0 if key.endswith("weight") and bool((parameter == 1).all()) else 0.0
                values = begin + 0.3 * values
            parameter.copy_((values * 4096).round() / 4096)
    model.save_pretrained(folder, **options)
    return model.eval()


def load(folder):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    # Eager attention of Falcon adds ALiBi twice: to the scores, and with the mask.
    attention = "sdpa" if kind == "falcon" else "eager"
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=attention)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def some_ids(length: int = LENGTH):
    return torch.randint(3, 53, (2, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids, **options):
    with torch.no_grad(), InDouble():
        return model(ids, **options).logits


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def class_fields(folder) -> dict:
    """What the config's class reads in the file."""
    values = json.loads((folder / "config.json").read_text())
    fields = CONFIG_MAPPING[values["model_type"]].from_dict(values).to_dict()
    if set(fields.get("layer_types") or ()) == {"full_attention"}:  # a window that no layer has
        fields |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": None}
    return fields


def assert_same(found, expected, tolerance: float = 1e-9):
    assert found.shape == expected.shape and float(expected.abs().max()) > 0.5
    assert float((found - expected).abs().max()) <= tolerance


def test_every_family_with_a_class_is_tried():
    names = {name for name, family in FAMILIES.items() if set(family.model_types) & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()}
    assert names == {*TINY, "xlnet"}, "XLNet, with a memory of its own and no cache, is in tests/test_conversion_oracles.py"


@pytest.mark.parametrize(("name", "values"), VARIANTS)
def test_same_numbers(tmp_path, name, values):
    save_source(tmp_path / "source", name, values)
    report = convert(tmp_path / "source", tmp_path / "target", dtype="float64")
    assert report.family == name and report.difference < FLOAT32
    theirs, ours, ids = load(tmp_path / "source"), load(tmp_path / "target"), some_ids()
    expected = logits(theirs, ids)
    assert_same(logits(ours, ids), expected)

    cache, pieces = None, []
    for piece in ids.split([9, 1, 1, 7, 5], 1):
        with torch.no_grad():
            output = ours(piece, cache=cache, use_cache=True)
        cache = output.cache
        pieces.append(output.logits)
    assert_same(torch.cat(pieces, 1), expected)

    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :8] = 0
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(0)} if ours.config.position_type == "rope" else {}
    expected = logits(theirs, ids, attention_mask=mask, **positions)
    found = logits(ours, ids, attention_mask=mask)
    assert_same(found[0], expected[0])
    assert_same(found[1, 8:], expected[1, 8:])


@pytest.mark.parametrize("heads", [3, 4])
def test_mpt_heeds_alibi_bias_max(tmp_path, monkeypatch, heads):
    """As its authors' code does; the class of Transformers computes as with 8 whatever its config says."""
    save_source(tmp_path / "source", "mpt", {**MPT, "n_heads": heads, "attn_config": {"alibi_bias_max": 5}})
    report = convert(tmp_path / "source", tmp_path / "target", dtype="float64")
    assert report.difference is None and "alibi_bias_max=5" in report.notes[0]
    theirs, ours, ids = load(tmp_path / "source"), load(tmp_path / "target"), some_ids()
    as_with_8 = logits(theirs, ids)
    alibi = theirs.transformer.build_mpt_alibi_tensor
    monkeypatch.setattr(theirs.transformer, "build_mpt_alibi_tensor", functools.partial(alibi, alibi_bias_max=5))
    expected = logits(theirs, ids)
    assert not torch.allclose(as_with_8, expected, atol=1e-3)
    assert_same(logits(ours, ids), expected)
    assert convert_back(tmp_path / "target", tmp_path / "back", "mpt").difference is None
    assert class_fields(tmp_path / "back")["attn_config"] == class_fields(tmp_path / "source")["attn_config"]


@pytest.mark.parametrize(("name", "values"), [param for param in VARIANTS if FAMILIES[param.values[0]].runs_back])
def test_there_and_back(tmp_path, name, values):
    save_source(tmp_path / "source", name, values)
    convert(tmp_path / "source", tmp_path / "target")
    report = convert_back(tmp_path / "target", tmp_path / "back", name)
    assert report.difference < FLOAT32
    expected, found = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    assert class_fields(tmp_path / "back") == class_fields(tmp_path / "source")


@pytest.mark.parametrize(("name", "values"), FIRST)
def test_shards_and_torch_files(tmp_path, name, values):
    model = save_source(tmp_path / "one", name, values)
    model.save_pretrained(tmp_path / "shards", max_shard_size="6KB")
    (tmp_path / "bin").mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path / "bin")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    convert(tmp_path / "one", tmp_path / "from-one", check=False)
    expected = tensors_of(tmp_path / "from-one")
    for source in ("shards", "bin"):
        convert(tmp_path / source, tmp_path / f"from-{source}", max_shard_bytes=5000)
        assert (tmp_path / f"from-{source}" / "model.safetensors.index.json").is_file()
        found = tensors_of(tmp_path / f"from-{source}")
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize(("name", "values"), [param for param in VARIANTS if param.values[1].get("tie_word_embeddings")])
def test_a_model_without_a_head(tmp_path, name, values):
    model = save_source(tmp_path / "whole", name, values)
    model.base_model.save_pretrained(tmp_path / "base")
    convert(tmp_path / "whole", tmp_path / "from-whole", check=False)
    expected = tensors_of(tmp_path / "from-whole")
    if "lm_head.bias" in expected:
        with pytest.raises(InputError, match=r"lacks lm_head\.bias"):
            convert(tmp_path / "base", tmp_path / "from-base")
        return
    convert(tmp_path / "base", tmp_path / "from-base")
    found = tensors_of(tmp_path / "from-base")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize(("name", "values"), VARIANTS)
def test_a_memory_is_added(tmp_path, name, values):
    save_source(tmp_path / "source", name, values)
    memory = Memory("recurrence", mem_len=7, segment_len=5)
    report = convert(tmp_path / "source", tmp_path / "target", memory=memory, dtype="float64")
    assert report.difference < FLOAT32
    ours, theirs, ids = load(tmp_path / "target"), load(tmp_path / "source"), some_ids()
    has_window = ours.config.attention_window is not None
    assert ours.config.num_sink_tokens == (0 if has_window else DEFAULT_SINKS)
    assert (ours.config.mem_len, ours.config.segment_len) == (7, 5)
    assert_same(logits(ours, ids)[:, :5], logits(theirs, ids)[:, :5])


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


REFUSED = [
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "do not mix"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "layer_types": None}, "do not mix"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_window=None"),
    ("llama", part(0.5), "rotates whole heads"),
    ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ("mpt", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln=True"),
    ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "needs parallel_attn"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True"),
    ("stablelm", {"head_dim": 10}, "head_dim=10"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 3,
                "long_factor": [2.0] * 3,
                "rope_theta": 100.0,
            }
        },
        "longrope",
    ),
    ("starcoder2", {"some_new_field": 3}, "some_new_field=3"),
    ("starcoder2", {"norm_type": "rms_norm"}, "norm_type='rms_norm'"),
    ("nemotron", {"kv_channels": 7}, "kv_channels=7"),
]


# What published files hold and the class does not read.
BESIDES = {
    "mistral": {"attention_bias": False},
    "qwen2": {"use_mrope": False},
    "phi": {"rope_scaling": None},
    "phi3": {"attention_bias": False, "auto_map": {"AutoConfig": "some.Config"}, "original_max_position_embeddings": 32},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm", "activation_function": "gelu", "layer_norm_epsilon": 1e-5},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "nemotron": {"kv_channels": 6},
}


@pytest.mark.parametrize("name", BESIDES)
def test_fields_of_published_files_are_understood(tmp_path, name):
    save_source(tmp_path / "source", name, TINY[name][0])
    edit_config(tmp_path / "source", **BESIDES[name])
    assert convert(tmp_path / "source", tmp_path / "target").difference < FLOAT32


@pytest.mark.parametrize(("name", "values", "message"), REFUSED)
def test_what_cannot_be_expressed_is_refused(tmp_path, name, values, message):
    save_source(tmp_path / "source", name, TINY[name][0])
    edit_config(tmp_path / "source", **values)
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "source", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    save_source(tmp_path / "source", "phi3", TINY["phi3"][0])
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    joined = "model.layers.1.mlp.gate_up_proj.weight"
    for name, changed in (
        ("holds model.layers.1.self_attn.extra", {**tensors, "model.layers.1.self_attn.extra": torch.ones(2)}),
        ("lacks model.norm.weight", {key: tensor for key, tensor in tensors.items() if key != "model.norm.weight"}),
        (joined, {**tensors, joined: tensors[joined][:-1].clone()}),
        (joined, {**tensors, joined: torch.cat([tensors[joined], tensors[joined][:1]])}),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(InputError, match=name):
            convert(tmp_path / "source", tmp_path / "target")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_shared_norms_that_were_trained_apart_do_not_run_back(tmp_path):
    save_source(tmp_path / "source", "phi", TINY["phi"][0])
    convert(tmp_path / "source", tmp_path / "target", check=False)
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp_norm.weight"][3] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"layers\.2\.mlp_norm\.weight and model\.layers\.2\.self_attn\.norm\.weight differ"):
        convert_back(tmp_path / "target", tmp_path / "back", "phi")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["gemma", "nemotron"])
def test_one_plus_weight_is_not_rounded_to_half_precision(tmp_path, name):
    """1 + w has more bits than w: norms become float32, whatever the rest is, and the numbers stay the same."""
    model = save_source(tmp_path / "float32", name, TINY[name][0])
    model.bfloat16().save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "target")
    tensors = tensors_of(tmp_path / "target")
    for key, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if key.endswith("norm.weight") else torch.bfloat16), key
    assert report.difference < FLOAT32


def test_dropout_at_other_places_is_noted(tmp_path):
    save_source(tmp_path / "source", "phi3", TINY["phi3"][1])
    report = convert(tmp_path / "source", tmp_path / "target", check=False)
    assert len(report.notes) == 1 and "resid_pdrop=0.1" in report.notes[0]
