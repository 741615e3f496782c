"""The machinery of conversion, without a family's knowledge: rules, shards, dtypes, memories, the command."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedTokenizerFast,
)

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.cli import main
from modeling_xl.conversion.checkpoint_files import write_weights
from modeling_xl.conversion.convert import Memory, convert, convert_back
from modeling_xl.conversion.weight_map import Rule, apply_back, apply_forth, rows_by_half, rows_by_kind
from modeling_xl.text import InputError, byte_tokenizer

SIZES = {"vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    "rules",
    [
        [Rule("t", ("a", "b", "c"), (2, 3, 1), rows=torch.tensor([3, 0, 5, 1, 4, 2]))],
        [Rule("t", ("a",), transpose=True)],
        [Rule("t.1", ("a",), share=(1, 2)), Rule("t.0", ("a",), share=(0, 2))],
        [Rule("t", ("a",)), Rule("same", ("a",)), Rule("none", constant=0.0)],
    ],
    ids=["joined_and_ordered", "transposed", "shared_out", "twice_and_constant"],
)
def test_rules_run_both_ways(rules):
    rows = {"a": 2, "b": 3, "c": 1} if len(rules[0].sources) == 3 else {"a": 4}
    sources = {name: torch.randn(n, 7) for name, n in rows.items()}
    shapes = {"t": torch.Size([6, 7] if len(sources) == 3 else [4, 7]), "t.0": torch.Size([2, 7]), "t.1": torch.Size([2, 7])}
    shapes |= {"same": torch.Size([4, 7]), "none": torch.Size([5])}
    if rules[0].transpose:
        shapes["t"] = torch.Size([7, 4])
    made = dict(apply_forth("here", rules, sources.__getitem__, shapes))
    assert {name: tensor.shape for name, tensor in made.items()} == {rule.target: shapes[rule.target] for rule in rules}
    back = dict(apply_back("here", rules, made.__getitem__))
    assert back.keys() == sources.keys() and all(torch.equal(back[name], sources[name]) for name in back)


def test_what_has_changed_does_not_run_back():
    rules = [Rule("t", ("a",)), Rule("same", ("a",)), Rule("none", constant=0.0)]
    made = {"t": torch.ones(3), "same": torch.ones(3), "none": torch.zeros(2)}
    for name, message in (("same", "same and t differ"), ("none", "none is not 0 everywhere")):
        changed = {**made, name: made[name] + 0.5}
        with pytest.raises(InputError, match=message):
            list(apply_back("here", rules, changed.__getitem__))


def test_rows_by_kind():
    """Two groups of two query heads of 3 dimensions: q q k v, q q k v."""
    fused = torch.tensor([0, 0, 0, 1, 1, 1, 4, 4, 4, 6, 6, 6, 2, 2, 2, 3, 3, 3, 5, 5, 5, 7, 7, 7])
    assert torch.equal(fused[rows_by_kind(2, 2, 3)], torch.arange(8).repeat_interleave(3))


def test_rows_by_half():
    assert rows_by_half(2, 5, 4).tolist() == [0, 2, 1, 3, 4, 5, 7, 6, 8, 9]


def test_one_shard_is_in_memory_at_a_time(tmp_path):
    alive: list[weakref.ref] = []

    def tensors():
        for i in range(12):
            tensor = torch.full((256,), float(i))  # 1 KiB
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor
            del tensor
            assert sum(ref() is not None for ref in alive) <= 3, "3 KiB to a shard"

    write_weights(tmp_path, tensors(), max_shard_bytes=3 * 1024)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 12 * 1024
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)),
        "model.safetensors.index.json",
    ]
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name][0] == float(name[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_so(tmp_path, dtype):
    """Also what is filled in, for a family without biases."""
    model = MptForCausalLM(MptConfig(vocab_size=53, d_model=24, n_layers=2, n_heads=4, max_seq_len=64)).to(dtype)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "target")
    assert {tensor.dtype for tensor in load_file(tmp_path / "target" / "model.safetensors").values()} == {dtype}
    assert XLForCausalLM.from_pretrained(tmp_path / "target").dtype == dtype
    convert(tmp_path / "source", tmp_path / "wide", dtype="float32")
    assert XLForCausalLM.from_pretrained(tmp_path / "wide").dtype == torch.float32


class TestMemory:
    def config(self, llama, tmp_path, *args, **kwargs):
        convert(llama, tmp_path / "target", memory=Memory(*args, **kwargs))
        return XLConfig.from_pretrained(tmp_path / "target")

    def test_none_is_the_default(self, llama, tmp_path):
        assert self.config(llama, tmp_path).memory_type == "none"

    def test_all_of_it_is_in_the_saved_config(self, llama, tmp_path):
        """Report B07: a converted config had lost its memory length."""
        self.config(llama, tmp_path, "recurrence", mem_len=9, segment_len=5, sink_tokens=3)
        AutoModelForCausalLM.from_pretrained(tmp_path / "target").save_pretrained(tmp_path / "again")
        config = AutoConfig.from_pretrained(tmp_path / "again")
        found = (config.memory_type, config.mem_len, config.segment_len, config.num_sink_tokens)
        assert found == ("recurrence", 9, 5, 3)

    def test_sinks_are_given_with_a_memory(self, llama, tmp_path):
        config = self.config(llama, tmp_path, "recurrence", mem_len=9, segment_len=5)
        assert (config.mem_len, config.segment_len, config.num_sink_tokens) == (9, 5, 4)

    def test_sinks_may_be_left_out(self, llama, tmp_path):
        assert self.config(llama, tmp_path, "compressive", sink_tokens=0).num_sink_tokens == 0

    def test_compressions_are_new(self, llama, tmp_path):
        report = convert(llama, tmp_path / "target", memory=Memory("compressive", mem_len=8, segment_len=4))
        assert "2 layers" not in report.notes[0] and "4 tensors of the memory are new" in report.notes[0]
        model, info = XLForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
        assert not info["missing_keys"] and report.difference < 1e-5
        assert model.model.layers[1].self_attn.memory.compression.weight.std() > 0

    def test_linear_attention_is_not_compared(self, llama, tmp_path):
        report = convert(llama, tmp_path / "target", memory=Memory("linear"))
        assert report.difference is None and "another function" in report.notes[0]

    @pytest.mark.parametrize(
        ("memory", "message"),
        [
            (Memory("recurrent"), "is not one of none, recurrence"),
            (Memory(mem_len=4), "mean nothing without a memory"),
            (Memory("linear", sink_tokens=2), "num_sink_tokens=2 means nothing"),
            (Memory("compressive", mem_len=4, segment_len=8), "mem_len=4"),
        ],
        ids=["unknown", "none", "sinks", "short"],
    )
    def test_what_cannot_be(self, llama, tmp_path, memory, message):
        with pytest.raises(InputError, match=message):
            convert(llama, tmp_path / "target", memory=memory)
        assert not (tmp_path / "target").exists()

    def test_it_is_lost_on_the_way_back_only_if_said_so(self, llama, tmp_path):
        self.config(llama, tmp_path, "recurrence", mem_len=9, segment_len=5)
        with pytest.raises(InputError, match="--memory none converts the weights alone"):
            convert_back(tmp_path / "target", tmp_path / "back", "llama")
        convert_back(tmp_path / "target", tmp_path / "back", "llama", drop_memory=True)
        expected, found = (load_file(folder / "model.safetensors") for folder in (llama, tmp_path / "back"))
        assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_what_another_format_cannot_express(tmp_path):
    config = XLConfig(**SIZES, position_type="rope", memory_type="none", norm_type="layernorm")
    XLForCausalLM(config).save_pretrained(tmp_path / "xl")
    with pytest.raises(InputError, match="norm_type='layernorm' cannot be expressed in llama"):
        convert_back(tmp_path / "xl", tmp_path / "back", "llama")
    with pytest.raises(InputError, match=r"position_type='rope'.* cannot be expressed in bloom"):
        convert_back(tmp_path / "xl", tmp_path / "back", "bloom")
    with pytest.raises(InputError, match="is not one of transfo-xl, llama"):
        convert_back(tmp_path / "xl", tmp_path / "back", "gemma")


class TestCommand:
    def test_there_and_back(self, llama, tmp_path, capsys):
        target, back = tmp_path / "target", tmp_path / "back"
        memory = ["--memory", "recurrence", "--mem-len", "8", "--segment-len", "4", "--sink-tokens", "2"]
        assert main(["convert", str(llama), str(target), *memory, "--dtype", "float64", "--max-shard-size", "1"]) == 0
        assert "converted llama" in (printed := capsys.readouterr().out) and "largest difference of logits" in printed
        config = XLConfig.from_pretrained(target)
        assert (config.mem_len, config.segment_len, config.num_sink_tokens, config.dtype) == (8, 4, 2, torch.float64)
        assert main(["convert", str(target), str(back), "--to", "llama", "--memory", "none", "--no-check"]) == 0
        assert LlamaForCausalLM.from_pretrained(back).dtype == torch.float64

    @pytest.mark.parametrize(
        "options", [["--memory", "linear"], ["--mem-len", "3"], ["--settings", "x"]], ids=["memory", "mem_len", "settings"]
    )
    def test_options_of_the_other_direction(self, llama, tmp_path, capsys, options):
        assert main(["convert", str(llama), str(tmp_path / "target"), "--to", "llama", *options]) == 2
        assert "--to takes no option of memory but --memory none" in capsys.readouterr().err

    def test_chained_outputs_join_where_words_begin_with_a_space(self, llama, tmp_path, capsys):
        """Tokenizers of Llama's kind take the space off what they decode first."""
        words = {word: i for i, word in enumerate(["<unk>", *(f"▁{chr(97 + i)}" for i in range(26)), *map(str, range(26))])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(llama)
        assert main(["convert", str(llama), str(tmp_path / "xl"), "--memory", "recurrence"]) == 0
        capsys.readouterr()
        generate = ["generate", str(tmp_path / "xl"), "--max-new-tokens"]
        assert main([*generate, "12", "--prompt", "a b c"]) == 0
        whole = capsys.readouterr().out
        assert main([*generate, "5", "--prompt", "a b c", "--cache-out", str(tmp_path / "cache")]) == 0
        assert main([*generate, "7", "--cache-in", str(tmp_path / "cache")]) == 0
        assert capsys.readouterr().out == whole and " " in whole

    def test_training_goes_on_from_converted_weights(self, tmp_path, capsys):
        config = LlamaConfig(**{**SIZES, "vocab_size": 259}, num_key_value_heads=2)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
        byte_tokenizer().save_pretrained(tmp_path / "llama")
        xl, text = tmp_path / "xl", tmp_path / "text.txt"
        text.write_text("to be or not to be, that is the question. " * 40)
        memory = ["--memory", "recurrence", "--mem-len", "8", "--segment-len", "8"]
        assert main(["convert", str(tmp_path / "llama"), str(xl), *memory]) == 0
        options = ["--train-file", str(text), "--max-steps", "3", "--batch-size", "2", "--learning-rate", "1e-9"]
        options += ["--warmup-steps", "0", "--weight-decay", "0"]
        assert main(["train", str(xl), "--weights", str(xl), "--output-dir", str(tmp_path / "tuned"), *options]) == 0
        before, after = (load_file(folder / "model.safetensors") for folder in (xl, tmp_path / "tuned"))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.allclose(after[name], tensor, atol=1e-7), name  # three steps of 1e-9 away

        XLConfig(**{**SIZES, "vocab_size": 259, "num_hidden_layers": 3}, segment_len=8).save_pretrained(tmp_path / "other")
        capsys.readouterr()
        assert (
            main(["train", str(tmp_path / "other"), "--weights", str(xl), "--output-dir", str(tmp_path / "no"), *options]) == 2
        )
        assert "its weights are of another model than the config" in capsys.readouterr().err
