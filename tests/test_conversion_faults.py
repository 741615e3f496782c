"""Faults of conversion that wrong, odd and hostile input once brought to light.

Each case either converts to a model that gives the source's numbers, or is refused with an error that names the reason, and
leaves nothing behind.
"""

import contextlib
import copy
import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_conversion_families import (
    FLOAT32,
    SIZES,
    TIED,
    TINY,
    YARN,
    assert_same,
    edit_config,
    load,
    logits,
    part,
    save_source,
    some_ids,
    tensors_of,
)
from transformers import GPTNeoXForCausalLM

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.conversion import convert as convert_module
from modeling_xl.conversion.convert import convert, convert_back
from modeling_xl.text import InputError

CHECKED = pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
XL = {"vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
XL |= {"position_type": "rope", "memory_type": "none", "tie_word_embeddings": False}
PLAIN_BLOCK = {"norm_type": "layernorm", "gated_mlp": False, "mlp_bias": True}
NEOX_LIKE = {**PLAIN_BLOCK, "hidden_size": 32, "attention_bias": True, "hidden_act": "gelu", "use_parallel_residual": True}
BLOOM_LIKE = {**PLAIN_BLOCK, "intermediate_size": 96, "attention_bias": True, "position_type": "alibi", "embedding_norm": True}
TRANSFO_XL_LIKE = {**PLAIN_BLOCK, "position_type": "xl", "norm_position": "post", "final_norm": False, "lm_head_bias": True}
TRANSFO_XL_LIKE |= {"hidden_act": "relu", "embedding_scale": 24**0.5, "tie_word_embeddings": True}
TRANSFO_XL_LIKE |= {"memory_type": "recurrence", "mem_len": 6, "segment_len": None, "initial_memory": "zeros"}
XLNET = {"vocab_size": 53, "d_model": 24, "n_head": 4, "n_layer": 2, "d_inner": 20, "attn_type": "uni"}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def save_xl(folder, **values):
    """A model of this package with weights away from where they begin."""
    torch.manual_seed(1)
    model = XLForCausalLM(XLConfig(**{**XL, **values}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def source_of(folder, name: str, number: int = 0, **values):
    """A folder of the family, with further fields in its config.json."""
    save_source(folder, name, TINY[name][number])
    edit_config(folder, **values)
    return folder


def edit_tensors(folder, changes: dict):
    """changes: name -> what becomes of its tensor, or a tensor."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, change in changes.items():
        tensors[name] = (change if isinstance(change, torch.Tensor) else change(tensors[name])).clone()
    save_file(tensors, file, metadata={"format": "pt"})


def as_bin(folder, content):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


@contextlib.contextmanager
def refused(tmp_path, message: str):
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        yield
    assert set(tmp_path.iterdir()) == before


def assert_same_numbers(one, other):
    assert_same(logits(load(one), some_ids()), logits(load(other), some_ids()))


def assert_same_tensors(found: dict, expected: dict):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


# What is fused, shared or at a default of the other class.


class TestToGPTNeoX:
    """Its class rotates a quarter of each head where the config says nothing, and completes the values it is given."""

    @pytest.mark.parametrize("values", [{}, {"use_parallel_residual": False}], ids=["parallel", "serial"])
    def test_whole_heads(self, tmp_path, values):
        save_xl(tmp_path / "xl", **{**NEOX_LIKE, **values})
        assert "partial_rotary_factor" not in XLConfig.from_pretrained(tmp_path / "xl").rope_parameters
        assert convert_back(tmp_path / "xl", tmp_path / "back", "gpt-neox").difference < FLOAT32
        model = load(tmp_path / "back")
        assert type(model) is GPTNeoXForCausalLM and model.config.rope_parameters["partial_rotary_factor"] == 1
        assert_same_numbers(tmp_path / "xl", tmp_path / "back")

    def test_our_config_stays_as_it_was(self, tmp_path, monkeypatch):
        own = XLConfig.from_pretrained(save_xl(tmp_path / "xl", **NEOX_LIKE))
        before = copy.deepcopy(own.to_dict())
        monkeypatch.setattr(convert_module, "_own_config", lambda path: own)
        convert_back(tmp_path / "xl", tmp_path / "back", "gpt-neox", check=False)
        assert own.to_dict() == before


@pytest.mark.parametrize("truncate", [None, False, True], ids=["null", "false", "true"])
def test_yarn_truncates_as_the_class_does(tmp_path, truncate):
    source_of(tmp_path / "source", "llama", rope_parameters={**YARN, "truncate": truncate})
    convert(tmp_path / "source", tmp_path / "target", dtype="float64")
    expected = logits(load(tmp_path / "source"), some_ids())
    assert_same(logits(load(tmp_path / "target"), some_ids()), expected)
    edit_config(tmp_path / "source", rope_parameters={**YARN, "truncate": not truncate})
    assert not torch.allclose(logits(load(tmp_path / "source"), some_ids()), expected, atol=1e-3)


FUSED = {
    "gpt-neox": "gpt_neox.layers.0.attention.query_key_value.",
    "bloom": "transformer.h.0.self_attention.query_key_value.",
    "falcon": "transformer.h.0.self_attention.query_key_value.",
}


class TestFusedRows:
    """An order of rows takes its rows from whatever tensor it is given, also from one that is too long."""

    @CHECKED
    @pytest.mark.parametrize("part_name", ["weight", "bias"])
    @pytest.mark.parametrize(
        "change",
        [lambda t: torch.cat([t, t]), lambda t: torch.cat([t, t[:1]]), lambda t: t[:-1]],
        ids=["doubled", "one_more", "one_fewer"],
    )
    @pytest.mark.parametrize("name", FUSED)
    def test_number(self, tmp_path, name, change, part_name, check):
        number = {"falcon": 2 if part_name == "bias" else 0}.get(name, 0)
        source_of(tmp_path / "source", name, number)
        edit_tensors(tmp_path / "source", {f"{FUSED[name]}{part_name}": change})
        with refused(tmp_path, "query_key_value"):
            convert(tmp_path / "source", tmp_path / "target", check=check)

    @pytest.mark.parametrize(
        ("number", "values"),
        [(0, {"multi_query": False}), (3, {"multi_query": True}), (1, {"num_kv_heads": 1}), (1, {"num_kv_heads": 4})],
        ids=["multi_query_of_file", "multi_query_of_config", "fewer_kv_heads", "more_kv_heads"],
    )
    def test_config_of_falcon_against_its_file(self, tmp_path, number, values):
        source_of(tmp_path / "source", "falcon", number, **values)
        with refused(tmp_path, "query_key_value"):
            convert(tmp_path / "source", tmp_path / "target", check=False)


@CHECKED
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", lambda t: torch.cat([t, t[:3]]), "has shape"),
        ("model.layers.1.self_attn.qkv_proj.weight", lambda t: t[:-1], "has shape"),
        (EMBEDDING, lambda t: t[:-1], "has shape"),
        (EMBEDDING, lambda t: t[:, :-1], "has shape"),
        ("model.layers.1.mlp.up_proj.bias", lambda t: t[0], "has shape"),
        (UP_PROJ, lambda t: t.to(torch.int8), "quantised"),
        (UP_PROJ, lambda t: t.to(torch.float8_e4m3fn), "quantised"),
    ],
    ids=["rows_more", "row_fewer", "words_fewer", "narrower", "0d", "int8", "float8"],
)
def test_tensors_that_do_not_run_back(tmp_path, name, change, message, check):
    save_xl(tmp_path / "xl", **NEOX_LIKE)
    edit_tensors(tmp_path / "xl", {name: change})
    with refused(tmp_path, f"{name} .*{message}|{name} {message}"):
        convert_back(tmp_path / "xl", tmp_path / "back", "gpt-neox", check=check)


# Heads that are tied to the embedding, and yet lie in the file: (head, embedding).
HEADS = {
    "llama": ("lm_head.weight", EMBEDDING),
    "gemma": ("lm_head.weight", EMBEDDING),
    "gpt-neox": ("embed_out.weight", "gpt_neox.embed_in.weight"),
    "bloom": ("lm_head.weight", "transformer.word_embeddings.weight"),
    "falcon": ("lm_head.weight", "transformer.word_embeddings.weight"),
    "mpt": ("lm_head.weight", "transformer.wte.weight"),
    "xlnet": ("lm_loss.weight", "transformer.word_embedding.weight"),
    "transfo-xl": ("crit.out_layers.0.weight", "transformer.word_emb.emb_layers.0.weight"),
    "transfo-xl shared bias": ("transformer.layers.1.dec_attn.r_w_bias", "transformer.r_w_bias"),
}


class TestTiedHeadInTheFile:
    @pytest.fixture(params=HEADS)
    def tied(self, request, tmp_path):
        name = request.param
        if name.startswith("transfo-xl"):
            save_xl(tmp_path / "xl", **TRANSFO_XL_LIKE, untie_r="bias" not in name)
            convert_back(tmp_path / "xl", tmp_path / "source", "transfo-xl", check=False)
        else:
            values = XLNET if name == "xlnet" else TINY[name][0]
            save_source(tmp_path / "source", name, {**values, **TIED})
        head, embedding = HEADS[name]
        tensors = tensors_of(tmp_path / "source")
        assert head not in tensors
        return tmp_path / "source", head, embedding, tensors[embedding]

    def test_equal(self, tmp_path, tied):
        source, head, _, table = tied
        convert(source, tmp_path / "expected", check=False)
        edit_tensors(source, {head: table})
        convert(source, tmp_path / "target")
        assert_same_tensors(tensors_of(tmp_path / "target"), tensors_of(tmp_path / "expected"))

    @CHECKED
    def test_other(self, tmp_path, tied, check):
        source, head, embedding, table = tied
        edit_tensors(source, {head: 2 * table})
        with refused(tmp_path, f"{head} is tied to {embedding}"):
            convert(source, tmp_path / "target", check=check)

    def test_other_shape(self, tmp_path, tied):
        source, head, embedding, table = tied
        edit_tensors(source, {head: table[:1]})
        with refused(tmp_path, f"{head} is tied to {embedding}"):
            convert(source, tmp_path / "target", check=False)


PROPORTIONAL = part(0.34, rope_type="proportional")


@CHECKED
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
        ("falcon", part(0.34), "partial_rotary_factor"),
        ("phi", PROPORTIONAL, "proportional"),
        ("stablelm", PROPORTIONAL, "proportional"),
    ],
    ids=["bloom", "falcon", "phi", "stablelm"],
)
def test_what_the_class_does_not_compute_is_refused(tmp_path, name, values, message, check):
    source_of(tmp_path / "source", name, **values)
    with refused(tmp_path, message):
        convert(tmp_path / "source", tmp_path / "target", check=check)


@pytest.mark.parametrize("values", [{"slow_but_exact": True}, {"pretraining_tp": 4}], ids=["slow_but_exact", "pretraining_tp"])
def test_bloom_with_one_of_two_fields(tmp_path, values):
    source_of(tmp_path / "source", "bloom", **values)
    assert convert(tmp_path / "source", tmp_path / "target").difference < FLOAT32


class TestPrecision:
    @CHECKED
    def test_too_large_for_float16(self, tmp_path, check):
        source_of(tmp_path / "source", "llama")
        large = tensors_of(tmp_path / "source")[EMBEDDING]
        large[52, 3] = 1e6
        edit_tensors(tmp_path / "source", {EMBEDDING: large})
        with refused(tmp_path, rf"{EMBEDDING} holds numbers too large for torch\.float16"):
            convert(tmp_path / "source", tmp_path / "target", dtype="float16", check=check)
        convert(tmp_path / "source", tmp_path / "target", dtype="bfloat16", check=check)

    @CHECKED
    def test_too_large_for_float16_on_the_way_back(self, tmp_path, check):
        save_xl(tmp_path / "xl")
        edit_tensors(tmp_path / "xl", {UP_PROJ: lambda t: t.clone().fill_(-1e6)})
        with refused(tmp_path, rf"{UP_PROJ} holds numbers too large for torch\.float16"):
            convert_back(tmp_path / "xl", tmp_path / "back", "llama", dtype="float16", check=check)

    @CHECKED
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
    @pytest.mark.parametrize("names", [[UP_PROJ], None], ids=["one", "all"])
    def test_float8(self, tmp_path, names, dtype, check):
        source_of(tmp_path / "source", "llama")
        names = names or list(tensors_of(tmp_path / "source"))
        edit_tensors(tmp_path / "source", {name: lambda t: t.to(dtype) for name in names})
        with refused(tmp_path, "quantised weights"):
            convert(tmp_path / "source", tmp_path / "target", check=check)

    @pytest.mark.parametrize("first", [torch.bfloat16, torch.float16], ids=["bfloat16_first", "float16_first"])
    def test_two_half_precisions_load_as_float32(self, tmp_path, first):
        source_of(tmp_path / "source", "llama")
        (second,) = {torch.bfloat16, torch.float16} - {first}
        names = tensors_of(tmp_path / "source")
        edit_tensors(
            tmp_path / "source",
            {name: lambda t: t.to(first) for name in names} | {name: lambda t: t.to(second) for name in names if "mlp" in name},
        )
        convert(tmp_path / "source", tmp_path / "target")
        assert {tensor.dtype for tensor in tensors_of(tmp_path / "target").values()} == {first, second}
        assert XLConfig.from_pretrained(tmp_path / "target").dtype == torch.float32
        convert_back(tmp_path / "target", tmp_path / "back", "llama")
        assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


class TestSettings:
    @CHECKED
    @pytest.mark.parametrize(
        "settings", [{"rms_norm_eps": 0.1}, {"model_type": "mistral"}, {"hidden_act": "gelu"}], ids=lambda s: next(iter(s))
    )
    def test_contradiction(self, tmp_path, settings, check):
        source_of(tmp_path / "source", "llama")
        with refused(tmp_path, f"says {next(iter(settings))}="):
            convert(tmp_path / "source", tmp_path / "target", settings=settings, check=check)

    def test_agreement(self, tmp_path):
        source_of(tmp_path / "source", "llama")
        convert(tmp_path / "source", tmp_path / "target", settings={"model_type": "llama", "num_hidden_layers": 3})


# The way back.


class TestGeluOfBloom:
    @CHECKED
    @pytest.mark.parametrize(("to", "values"), [("llama", {}), ("gpt-neox", NEOX_LIKE)], ids=["llama", "gpt-neox"])
    def test_is_no_activation_of_others(self, tmp_path, to, values, check):
        save_xl(tmp_path / "xl", **{**values, "hidden_act": "gelu_bloom"})
        with refused(tmp_path, "hidden_act='gelu_bloom'"):
            convert_back(tmp_path / "xl", tmp_path / "back", to, check=check)

    def test_is_that_of_bloom(self, tmp_path):
        save_xl(tmp_path / "xl", **BLOOM_LIKE, hidden_act="gelu_bloom")
        convert_back(tmp_path / "xl", tmp_path / "back", "bloom")
        assert_same_numbers(tmp_path / "xl", tmp_path / "back")


@pytest.mark.parametrize(
    "values",
    [{}, {"cutoffs": [10], "div_val": 2}, {"tie_word_embeddings": False, "cutoffs": [10], "div_val": 2}],
    ids=["one_table", "clusters", "untied_clusters"],
)
def test_transfo_xl_with_tie_projs_left_out(tmp_path, values):
    save_xl(tmp_path / "xl", **{**TRANSFO_XL_LIKE, **values})
    assert XLConfig.from_pretrained(tmp_path / "xl").tie_projs is None
    convert_back(tmp_path / "xl", tmp_path / "back", "transfo-xl")
    convert(tmp_path / "back", tmp_path / "again")
    assert_same_tensors(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "xl"))
    assert_same_numbers(tmp_path / "xl", tmp_path / "again")


class TestMemoryIsDropped:
    @pytest.mark.parametrize(
        ("to", "values", "memory"),
        [
            ("llama", {}, {"memory_type": "compressive", "segment_len": 8, "mem_len": 8, "compressed_mem_len": 4}),
            ("llama", {}, {"memory_type": "recurrence", "segment_len": 5, "mem_len": 7, "initial_memory": "zeros"}),
            (
                "mistral",
                {"attention_window": 4},
                {"memory_type": "recurrence", "segment_len": 5, "mem_len": 7, "num_sink_tokens": 2},
            ),
        ],
        ids=["compressive", "zeros", "window_and_sinks"],
    )
    @CHECKED
    def test_numbers_are_those_without_it(self, tmp_path, to, values, memory, check):
        save_xl(tmp_path / "xl", **values, **memory)
        report = convert_back(tmp_path / "xl", tmp_path / "back", to, drop_memory=True, check=check)
        assert not check or report.difference < FLOAT32
        weights = {name: tensor for name, tensor in tensors_of(tmp_path / "xl").items() if ".memory." not in name}
        plain = XLForCausalLM(XLConfig(**XL, **values))
        plain.load_state_dict(weights)
        plain.save_pretrained(tmp_path / "plain")
        assert_same_numbers(tmp_path / "plain", tmp_path / "back")

    def test_not_unless_said(self, tmp_path):
        save_xl(tmp_path / "xl", memory_type="compressive", segment_len=8, mem_len=8, compressed_mem_len=4)
        with refused(tmp_path, "--memory none converts the weights alone"):
            convert_back(tmp_path / "xl", tmp_path / "back", "llama")


@pytest.mark.parametrize("is_bin", [False, True], ids=["safetensors", "bin"])
def test_tied_head_in_a_file_of_ours(tmp_path, is_bin):
    source_of(tmp_path / "source", "llama", 1)
    convert(tmp_path / "source", tmp_path / "xl", check=False)
    tensors = tensors_of(tmp_path / "xl")
    edit_tensors(tmp_path / "xl", {"lm_head.weight": tensors[EMBEDDING]})
    if is_bin:
        as_bin(tmp_path / "xl", {**tensors, "lm_head.weight": tensors[EMBEDDING]})
    convert_back(tmp_path / "xl", tmp_path / "back", "llama")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "source"))


@CHECKED
def test_other_head_in_a_tied_file_of_ours(tmp_path, check):
    """Transformers loads it with the file's head, which a tied model of the other family has no place for."""
    source_of(tmp_path / "source", "llama", 1)
    convert(tmp_path / "source", tmp_path / "xl", check=False)
    edit_tensors(tmp_path / "xl", {"lm_head.weight": 2 * tensors_of(tmp_path / "xl")[EMBEDDING]})
    with refused(tmp_path, r"lm_head\.weight"):
        convert_back(tmp_path / "xl", tmp_path / "back", "llama", check=check)


def test_gptj_of_whole_heads(tmp_path):
    """Nothing about a part of the head is said where all of it is rotated."""
    save_source(tmp_path / "source", "gptj", {**TINY["gptj"][0], "rotary_dim": 16})
    convert(tmp_path / "source", tmp_path / "xl", check=False)
    edit_config(tmp_path / "xl", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert convert_back(tmp_path / "xl", tmp_path / "back", "gptj").difference < FLOAT32
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "source"))
    assert_same_numbers(tmp_path / "xl", tmp_path / "back")


# Damaged files, and places that cannot be written to.


@CHECKED
@pytest.mark.parametrize(
    ("name", "key", "tensor"),
    [
        ("llama", Q_PROJ, torch.tensor(1.0)),
        ("llama", Q_PROJ, torch.ones(24)),
        ("llama", Q_PROJ, torch.ones(24, 23)),
        ("llama", Q_PROJ, torch.ones(24, 24, 1)),
        ("llama", EMBEDDING, torch.tensor(1.0)),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", torch.tensor(1.0)),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", torch.ones(1, 24)),
        ("gpt-neox", "gpt_neox.layers.0.attention.query_key_value.weight", torch.tensor(1.0)),
        ("gptj", "transformer.h.0.attn.q_proj.weight", torch.tensor(1.0)),
    ],
    ids=["q_0d", "q_1d", "q_width", "q_3d", "words_0d", "gate_up_0d", "gate_up_row", "neox_qkv_0d", "gptj_q_0d"],
)
def test_shapes_that_do_not_fit(tmp_path, name, key, tensor, check):
    source_of(tmp_path / "source", name)
    edit_tensors(tmp_path / "source", {key: tensor})
    with refused(tmp_path, key):
        convert(tmp_path / "source", tmp_path / "target", check=check)


@pytest.mark.parametrize("key", [0, ("a",), None], ids=["int", "tuple", "none"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "among_others"])
def test_keys_of_a_torch_file(tmp_path, key, is_alone):
    source_of(tmp_path / "source", "llama")
    others = {} if is_alone else tensors_of(tmp_path / "source")
    as_bin(tmp_path / "source", {**others, key: torch.ones(1)})
    with refused(tmp_path, "holds no mapping of names to tensors"):
        convert(tmp_path / "source", tmp_path / "target")


@pytest.mark.parametrize("in_file", [True, False], ids=["in_file", "not_in_file"])
def test_activation_with_weights(tmp_path, in_file):
    if in_file:
        save_source(tmp_path / "source", "llama", {**SIZES, "hidden_act": "prelu"})
    else:
        source_of(tmp_path / "source", "llama", hidden_act="prelu")
    with refused(tmp_path, r"mlp\.act.*\.weight"):
        convert(tmp_path / "source", tmp_path / "target")


@pytest.mark.parametrize(("name", "field"), [("llama", "num_hidden_layers"), ("mpt", "n_layers")], ids=["llama", "mpt"])
def test_countless_layers_are_refused_at_once(tmp_path, name, field):
    """Before anything is made that has a part for each of them; more layers would fill the memory where that fails."""
    source_of(tmp_path / "source", name, **{field: 3 * 10**7})
    begin = time.perf_counter()
    with refused(tmp_path, "layers"):
        convert(tmp_path / "source", tmp_path / "target")
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_nested_too_deep(tmp_path, file):
    source_of(tmp_path / "source", "llama")
    (tmp_path / "source" / "model.safetensors").unlink()
    (tmp_path / "source" / file).write_text(f'{{"model_type": {"[" * 100_000}{"]" * 100_000}}}')
    with refused(tmp_path, f"{file}: not readable as JSON"):
        convert(tmp_path / "source", tmp_path / "target")


class TestTarget:
    @pytest.fixture
    def source(self, tmp_path):
        return source_of(tmp_path / "source", "llama")

    def test_the_working_directory(self, tmp_path, source, monkeypatch):
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        convert(source, ".")
        assert {path.name for path in tmp_path.iterdir()} == {"source", "empty"}
        assert XLForCausalLM.from_pretrained(tmp_path / "empty").config.num_hidden_layers == 3

    def test_the_working_directory_is_not_empty(self, tmp_path, source, monkeypatch):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine").touch()
        monkeypatch.chdir(tmp_path / "full")
        with refused(tmp_path, "is not an empty folder"):
            convert(source, ".")

    @pytest.mark.parametrize(
        "name",
        ["x" * 300, "a\0b", "sub\0folder/a", "\ud800", "source/config.json/a"],
        ids=["long", "nul", "nul_above", "surrogate", "file"],
    )
    def test_no_such_folder_can_be(self, tmp_path, source, name):
        with refused(tmp_path, "no folder can be made there"):
            convert(source, tmp_path / name)

    @pytest.mark.parametrize("exists", [True, False], ids=["empty_before", "new_before"])
    def test_is_filled_meanwhile(self, tmp_path, source, monkeypatch, exists):
        target, write_weights = tmp_path / "target", convert_module.write_weights
        if exists:
            target.mkdir()

        def write(*args):
            write_weights(*args)
            target.mkdir(exist_ok=True)
            (target / "theirs").write_text("of another")

        monkeypatch.setattr(convert_module, "write_weights", write)
        with pytest.raises(InputError, match="was filled meanwhile"):
            convert(source, target, check=False)
        assert [(path.name, path.read_text()) for path in target.iterdir()] == [("theirs", "of another")]
        assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


# Files as they are published, once refused.


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mpt", {"tokenizer_name": "some/tokenizer"}),
        ("llama", {"max_sequence_length": 64}),
        ("llama", {"pruned_heads": {}}),
    ],
    ids=["mpt-tokenizer_name", "llama-max_sequence_length", "llama-pruned_heads"],
)
def test_fields_that_change_nothing(tmp_path, name, values):
    source_of(tmp_path / "source", name, **values)
    convert(tmp_path / "source", tmp_path / "target", dtype="float64")
    assert_same_numbers(tmp_path / "target", tmp_path / "source")


def test_phi3_with_the_part_at_the_top(tmp_path):
    save_source(tmp_path / "source", "phi3", {**SIZES, **part(0.34)})
    path = tmp_path / "source" / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    path.write_text(json.dumps({**values, "partial_rotary_factor": 0.34, "rope_theta": 100.0}))
    convert(tmp_path / "source", tmp_path / "target", dtype="float64")
    assert XLConfig.from_pretrained(tmp_path / "target").rope_parameters["partial_rotary_factor"] == 0.34
    assert_same_numbers(tmp_path / "target", tmp_path / "source")


def test_gpt_neox_tied_in_a_torch_file(tmp_path):
    """Its state dict calls the head by two names, of which neither is the embedding's."""
    model = save_source(tmp_path / "source", "gpt-neox", {**TINY["gpt-neox"][0], **TIED})
    convert(tmp_path / "source", tmp_path / "expected", check=False)
    as_bin(tmp_path / "source", model.state_dict())
    assert convert(tmp_path / "source", tmp_path / "target").difference < FLOAT32
    assert_same_tensors(tensors_of(tmp_path / "target"), tensors_of(tmp_path / "expected"))


def test_xlnet_that_uses_its_memory_in_training_only(tmp_path):
    save_source(tmp_path / "source", "xlnet", XLNET)
    edit_config(tmp_path / "source", use_mems_eval=False, mem_len=7)
    assert convert(tmp_path / "source", tmp_path / "target").difference < FLOAT32
    assert XLConfig.from_pretrained(tmp_path / "target").mem_len == 0
