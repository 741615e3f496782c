"""Converted checkpoints against golden values of the implementations that they come from, in float32 and in float64; the way
back; and what cannot be converted.

Folders of `transfo-xl` (a01 to a09) are run segment by segment in `test_oracles_transfo_xl.py`, converted too.
"""

import functools
import io
import json
import os
import pickle
import re
import shutil
from types import MappingProxyType

import pytest
import torch
from oracles import FORMER, LOG_PROBS, STATES, converted, golden, load_converted, log_probs_of, oracle, trained_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from modeling_xl import XLCache, XLForCausalLM, XLModel
from modeling_xl.cache_xl import LayerState
from modeling_xl.cli import main
from modeling_xl.conversion import checkpoint_files
from modeling_xl.conversion.convert import convert, convert_back
from modeling_xl.text import InputError

FORMER_WITH_BIN = ["a01_hf_mem_gt_seg_untie", "a05_hf_adaptive_wt103"]
ORIGINAL = [
    "b01_kimi_same_as_a02",
    "b02_kimi_adaptive_cluster_order",
    "b03_kimi_pre_lnorm_ext2",
    "b09_kimi_ext2_postln_nomem",
]
ORIGINAL_FILES = [
    pytest.param(case, file, id=f"{case}-{file}")
    for case in ORIGINAL
    for file in ("model.pt", "state_dict.pt", *(["model_legacy.pt"] if case == "b01_kimi_same_as_a02" else []))
]
# attn_type of those that are refused.
ABLATIONS = {
    "b04_kimi_attn1_shaw": 1,
    "b05_kimi_attn1_clamp_longer": 1,
    "b06_kimi_attn2_abs_nomem": 2,
    "b07_kimi_attn2_abs_mem": 2,
    "b08_kimi_attn3_abs_deep": 3,
    "b11_kimi_pre_lnorm_attn2": 2,
}
TENSORFLOW = ["t01_tf_plain", "t02_tf_adaptive_wt103", "t03_tf_shared_r_d_embed"]
# Today's checkpoints, and the family of each.
TODAY = {
    "c01_llama_gqa": "llama",
    "c02_llama3_rope_scaling_head_dim": "llama",
    "c03_neox_partial_parallel": "gpt-neox",
    "c04_neox_sequential_half": "gpt-neox",
    "c05_mistral_sliding": "mistral",
    "c06_bloom": "bloom",
    "c07_bloom_6heads": "bloom",
    "c08_mpt": "mpt",
    "c09_gptj_interleaved": "gptj",
}
GPTJ = "c09_gptj_interleaved"
XLNET = "c11_xlnet_uni_mems"
# One case of each family, for the command.
FAMILY_OF = {
    "a05_hf_adaptive_wt103": "transfo-xl",
    "b02_kimi_adaptive_cluster_order": "transfo-xl-pytorch",
    "t02_tf_adaptive_wt103": "transfo-xl-tensorflow",
    **{case: TODAY[case] for case in {family: case for case, family in TODAY.items()}.values()},
    XLNET: "xlnet",
}

per_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
per_former = pytest.mark.parametrize("case", FORMER)
per_bin = pytest.mark.parametrize("case", FORMER_WITH_BIN)
per_original = pytest.mark.parametrize("case", ORIGINAL)
per_tensorflow = pytest.mark.parametrize("case", TENSORFLOW)
per_today = pytest.mark.parametrize("case", TODAY)


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(found, expected):
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def settings_of(case) -> dict:
    return json.loads((oracle(case) / "config.json").read_text())


def some_files(case, target, *names):
    """A new folder with copies of the named files of a case."""
    target.mkdir()
    for name in names:
        shutil.copyfile(oracle(case) / name, target / name)
    return target


def hidden_rows(cache) -> list[torch.Tensor]:
    """What each layer keeps, (B, rows, E)."""
    return [state.last("hidden", min(state.size, cache.mem_len))[:, 0] for state in cache.states]


@functools.cache
def load(case, dtype, file=""):
    """The folder of a case, or one file of it. Not to be changed: tests share it."""
    return load_converted(oracle(case) / file, dtype)


class TestFormerTransfoXL:
    """a01 to a09, folders of Transformers' former class: from the older file, and loaded without converting."""

    @staticmethod
    def check_golden(model, case, dtype, is_base=False):
        values = golden(case)
        cache, lengths = XLCache(model.config, form="hidden"), values["seg_lens"].tolist()
        for number, ids in enumerate(values["input_ids"].split(lengths, 1)):
            expected = {
                name.removeprefix(f"seg{number}."): value.to(dtype)
                for name, value in values.items()
                if name.startswith(f"seg{number}.")
            }
            with torch.no_grad():
                output = model(ids, cache=cache, output_hidden_states=True)
            assert_close(output.hidden_states[-1], expected["last_hidden"], **STATES[dtype])
            if not is_base:
                assert_close(log_probs_of(model, output.logits), expected["log_probs"], **LOG_PROBS[dtype])
            if cache.mem_len:
                for i, rows in enumerate(hidden_rows(cache)):
                    assert_close(rows, expected[f"mems.{i}"].transpose(0, 1), **STATES[dtype])

    @per_bin
    def test_from_pytorch_model_bin(self, case, tmp_path):
        source = some_files(case, tmp_path / "source", "config.json", "pytorch_model.bin")
        for dtype in (torch.float32, torch.float64):
            found = converted(source, dtype)
            assert_same_tensors(tensors_of(found), tensors_of(converted(oracle(case), dtype)))
            assert config_of(found) == config_of(converted(oracle(case), dtype))
            self.check_golden(load_converted(source, dtype), case, dtype)

    @per_dtype
    @per_former
    def test_loads_without_converting(self, case, dtype):
        folder = oracle(case)
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        assert type(model) is XLForCausalLM and model.dtype == dtype and not model.training
        assert not any(info.values()), info
        assert model.config.model_type == "xl" and model.generation_config.eos_token_id == 0
        self.check_golden(model, case, dtype)
        mine, other = model.config.to_dict(), load_converted(folder, dtype).config.to_dict()
        of_the_file = ("_name_or_path", "transformers_version", "architectures", "auto_map")
        assert all(mine[name] == other[name] for name in mine.keys() | other.keys() if name not in of_the_file)

        base = AutoModel.from_pretrained(folder, dtype=dtype)
        assert type(base) is XLModel
        self.check_golden(base, case, dtype, is_base=True)

    @per_dtype
    @per_former
    def test_what_was_loaded_is_saved_as_a_model_of_this_package(self, case, dtype, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(oracle(case), dtype=dtype)
        model.save_pretrained(tmp_path / "saved")
        assert config_of(tmp_path / "saved")["model_type"] == "xl"
        again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype, output_loading_info=True)
        assert not any(info.values()), info
        assert type(again) is XLForCausalLM
        assert_same_tensors(dict(again.state_dict()), dict(model.state_dict()))
        self.check_golden(again, case, dtype)

    @per_bin
    def test_loads_pytorch_model_bin_without_converting(self, case, tmp_path):
        source = some_files(case, tmp_path / "source", "config.json", "pytorch_model.bin")
        model, info = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, output_loading_info=True)
        self.check_golden(model, case, torch.float64)
        assert not any(info.values()), info

    def test_fields_given_while_loading_win(self):
        case = "a04_hf_same_length"
        model = AutoModelForCausalLM.from_pretrained(oracle(case), mem_len=5)
        expected = load_converted(oracle(case), torch.float32, mem_len=5, attention_window=5)
        assert model.config.mem_len == model.config.attention_window == 5
        ids = golden(case)["input_ids"]
        caches = None, None
        for piece in ids.split(4, 1):
            with torch.no_grad():
                outputs = [one(piece, cache=cache) for one, cache in zip((model, expected), caches, strict=True)]
            assert torch.equal(outputs[0].logits, outputs[1].logits)
            caches = [output.cache for output in outputs]

    @pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
    def test_attention_given_while_loading_wins(self, implementation):
        folder = oracle("a01_hf_mem_gt_seg_untie")
        for auto in (AutoModel, AutoModelForCausalLM):
            model = auto.from_pretrained(folder, attn_implementation=implementation)
            assert model.config._attn_implementation == implementation

    def test_outputs_given_while_loading_win(self):
        model = AutoModelForCausalLM.from_pretrained(oracle("a01_hf_mem_gt_seg_untie"), output_hidden_states=True)
        with torch.no_grad():
            assert model(torch.tensor([[1, 2]])).hidden_states is not None


class TestOriginalPyTorch:
    """b01, b02, b03 and b09, files that the original PyTorch code saved; it starts from an empty memory."""

    @staticmethod
    def kept(memory, states, ext_len, mem_len):
        """What the original code keeps of its memory and a call's `states`, (B, ·, E).

        It calls `_update_mems` with two arguments swapped. Without tokens that are fed twice these are the newest rows.
        """
        end = states.shape[1] + max(0, memory.shape[1] - ext_len)
        return torch.cat([memory, states], 1)[:, max(0, end - mem_len) : end]

    @staticmethod
    def cache_of(model, memory):
        """A cache that holds exactly these rows, as if their tokens had been the only ones so far."""
        cache = XLCache(model.config, form="hidden")
        count = memory[0].shape[1]
        if count:
            with torch.no_grad():  # counts tokens, in every counter that a cache has
                model(torch.zeros(memory[0].shape[:2], dtype=torch.long), cache=cache)
            cache.states = [LayerState({"hidden": rows[:, None].clone()}, end=count, size=count) for rows in memory[:-1]]
        return cache

    @classmethod
    def run(cls, model, values, ext_len):
        """Of each segment: prefix of its golden names, log-probabilities of all that was fed, hidden states, memory, targets.

        The model has no ext_len: tokens are fed again here, and the memory is moved by the original's rule.
        """
        config, at = model.config, 0
        memory = [torch.zeros(2, 0, config.hidden_size, dtype=model.dtype)] * (config.num_hidden_layers + 1)
        own = XLCache(config, form="hidden")
        for number, length in enumerate(values["seg_lens"].tolist()):
            again = min(ext_len, at)
            ids, targets = values["data"][at - again : at + length].T, values["data"][at + 1 : at + 1 + length].T
            cache = None
            if config.mem_len:
                cache = cls.cache_of(model, memory) if ext_len else own
            with torch.no_grad():
                output = model(ids, cache=cache, use_cache=cache is not None, output_hidden_states=True)
            memory = [
                cls.kept(rows, states, ext_len, config.mem_len)
                for rows, states in zip(memory, output.hidden_states, strict=True)
            ]
            if cache is own:
                for mine, theirs in zip(hidden_rows(cache), memory[:-1], strict=True):
                    assert torch.equal(mine, theirs)
            yield f"seg{number}.", log_probs_of(model, output.logits), output.hidden_states, memory, targets
            at += length

    @per_dtype
    @pytest.mark.parametrize(("case", "file"), ORIGINAL_FILES)
    def test_golden(self, case, file, dtype):
        model, values = load(case, dtype, file), golden(case)
        ext_len = int(values["ext_len"])
        assert model.config.initial_memory == "empty" and bool(ext_len) == (case[:3] in ("b03", "b09"))
        for prefix, log_probs, hidden_states, memory, targets in self.run(model, values, ext_len):
            assert_close(hidden_states[-1].transpose(0, 1), values[f"{prefix}hidden_last"].to(dtype), **STATES[dtype])
            nll = -log_probs[:, -targets.shape[1] :].gather(2, targets[..., None])[..., 0].T
            expected = values[f"{prefix}nll"].to(dtype)
            assert_close(nll, expected, **LOG_PROBS[dtype])
            # As returned, the losses stand in the order of clusters though shaped (n, B).
            order = torch.bucketize(targets.T.flatten(), torch.tensor(model.config.cutoffs), right=True).argsort(stable=True)
            assert_close(nll.flatten()[order].view_as(nll), values[f"{prefix}loss"].to(dtype), **LOG_PROBS[dtype])
            assert (f"{prefix}mems.0" in values) == bool(model.config.mem_len)
            for i, rows in enumerate(memory if model.config.mem_len else []):
                assert_close(rows.transpose(0, 1), values[f"{prefix}mems.{i}"].to(dtype), **STATES[dtype])

    @pytest.mark.parametrize("case", ["b01_kimi_same_as_a02", "b02_kimi_adaptive_cluster_order"])
    def test_the_loss_of_a_segment(self, case):
        """Every token is scored, the last of a segment by the first of the next."""
        model, values = load(case, torch.float64), golden(case)
        ids = values["data"].T
        cache, at = XLCache(model.config), 0
        for number, length in enumerate(values["seg_lens"].tolist()):
            piece = slice(at, at + length)
            with torch.no_grad():
                loss = model(ids[:, :-1][:, piece], shift_labels=ids[:, 1:][:, piece].contiguous(), cache=cache).loss
            assert_close(loss, values[f"seg{number}.nll"].mean(), rtol=0, atol=1e-9)
            at += length

    @per_original
    def test_all_files_give_the_same_model(self, case, tmp_path):
        folder, settings = oracle(case), settings_of(case)
        expected = converted(folder, torch.float32)  # from model.pt
        tensors, config = tensors_of(expected), config_of(expected)
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        alone = some_files(case, tmp_path / "alone", "state_dict.pt")
        bare = some_files(case, tmp_path / "bare", "model.pt")
        for number, (source, given) in enumerate(
            [(folder / "state_dict.pt", None), (folder / "model.pt", None), (alone, settings), (bare, None)]
        ):
            target = tmp_path / f"target-{number}"
            convert(source, target, settings=given)
            assert_same_tensors(tensors_of(target), tensors)
            assert config_of(target) == config, source
        options = ["--settings", str(tmp_path / "settings.json"), "--no-check"]
        assert main(["convert", str(alone / "state_dict.pt"), str(tmp_path / "by-command"), *options]) == 0
        assert config_of(tmp_path / "by-command") == config

    @per_original
    def test_a_state_dict_without_settings(self, case, tmp_path):
        alone = some_files(case, tmp_path / "alone", "state_dict.pt")
        with pytest.raises(InputError, match=r"does not show mem_len, clamp_len, same_length, pre_lnorm; .*\"mem_len\": \d+"):
            convert(alone, tmp_path / "target")
        some = {name: value for name, value in settings_of(case).items() if name != "same_length"}
        with pytest.raises(InputError, match="does not show same_length; "):
            convert(alone, tmp_path / "target", settings=some)
        assert not (tmp_path / "target").exists()

    @pytest.mark.parametrize(("case", "attn_type"), ABLATIONS.items())
    def test_other_attention_is_refused(self, case, attn_type, tmp_path):
        for source in (oracle(case), oracle(case) / "model.pt", oracle(case) / "state_dict.pt"):
            with pytest.raises(InputError, match=rf"attn_type={attn_type} cannot be converted: .*no such position scheme"):
                convert(source, tmp_path / "target")
        alone = some_files(case, tmp_path / "alone", "state_dict.pt")  # told by its tensors alone
        with pytest.raises(InputError, match=f"attn_type={attn_type} cannot be converted"):
            convert(alone, tmp_path / "target")
        assert not (tmp_path / "target").exists()

    def test_weights_of_the_former_class(self):
        """The weights of b01 are those of a02."""
        found = tensors_of(converted(oracle("b01_kimi_same_as_a02"), torch.float32))
        assert_same_tensors(found, tensors_of(converted(oracle("a02_hf_mem_lt_seg_shared_r"), torch.float32)))

    def test_clusters_stand_in_reverse_order(self):
        case = "b02_kimi_adaptive_cluster_order"
        source = load_file(oracle(case) / "model.safetensors")
        found = tensors_of(converted(oracle(case), torch.float32))
        for name in ("cluster_weight", "cluster_bias"):
            rows = source[f"crit.{name}"]
            assert len(rows) == 3 and not torch.equal(rows, rows.flip(0))
            assert torch.equal(found[f"lm_head.{name}"], rows.flip(0))


class TestTensorFlow:
    """t01 to t03, files that TensorFlow wrote; its code starts from zeros and keeps one key more."""

    SHARDS = ("model.ckpt-0.index", "model.ckpt-0.data-00000-of-00001")

    @per_dtype
    @per_tensorflow
    def test_golden(self, case, dtype):
        model, values, settings = load(case, dtype), golden(case), settings_of(case)
        config = model.config
        assert config.initial_memory == "zeros" and config.norm_eps == 1e-12
        assert config.attention_window == (settings["mem_len"] + 1 if settings["same_length"] else None)
        cache, at = XLCache(config, form="hidden"), 0
        for number, length in enumerate(values["seg_lens"].tolist()):
            prefix = f"seg{number}."
            ids, targets = values["data"][at : at + length].T, values["data"][at + 1 : at + 1 + length].T
            with torch.no_grad():
                output = model(ids, shift_labels=targets.contiguous(), cache=cache)
            expected = values[f"{prefix}nll"].to(dtype)
            nll = -log_probs_of(model, output.logits).gather(2, targets[..., None])[..., 0].T
            assert_close(nll, expected, **LOG_PROBS[dtype])
            assert_close(output.loss, expected.mean(), **LOG_PROBS[dtype])
            for i, rows in enumerate(hidden_rows(cache)):
                assert_close(rows.transpose(0, 1), values[f"{prefix}mems.{i}"].to(dtype), **STATES[dtype])
            at += length

    @per_tensorflow
    def test_every_name_of_a_checkpoint(self, case, tmp_path):
        expected = converted(oracle(case), torch.float32)
        copy = some_files(case, tmp_path / "copy", "config.json", *self.SHARDS)
        text = 'model_checkpoint_path: "model.ckpt-0"\nall_model_checkpoint_paths: "model.ckpt-0"\n'
        (copy / "checkpoint").write_text(text)
        sources = [oracle(case) / "model.ckpt-0", oracle(case) / "model.ckpt-0.index", copy, copy / "checkpoint"]
        for number, source in enumerate(sources):
            target = tmp_path / f"target-{number}"
            convert(source, target)
            assert_same_tensors(tensors_of(target), tensors_of(expected))
            assert config_of(target) == config_of(expected)

    @per_tensorflow
    def test_settings(self, case, tmp_path):
        bare = some_files(case, tmp_path / "bare", *self.SHARDS)
        asked = r"does not show mem_len, clamp_len, same_length; .*such as (\{.*\}), and give it with --settings"
        with pytest.raises(InputError, match=asked) as found:
            convert(bare, tmp_path / "target")
        shown = json.loads(re.search(asked, str(found.value))[1])
        assert shown.keys() == {"mem_len", "clamp_len", "same_length"}
        assert not (tmp_path / "target").exists()
        convert(bare, tmp_path / "with-shown", settings=shown)  # what it says to write is what it reads

        settings = settings_of(case)
        convert(bare, tmp_path / "target", settings={name: settings[name] for name in shown})
        assert config_of(tmp_path / "target") == config_of(converted(oracle(case), torch.float32))
        for name, wrong in (("n_layer", 7), ("n_token", 99), ("cutoffs", [3])):
            right, shown_as = settings.get(name, 2), {"n_token": "vocab_size"}.get(name, name)
            both = re.escape(f"shows {shown_as}={right!r}, but the settings beside it say {wrong!r}")
            with pytest.raises(InputError, match=both):
                convert(bare, tmp_path / "wrong", settings={**settings, name: wrong})
        assert not (tmp_path / "wrong").exists()

    @pytest.mark.parametrize(("name", "value"), [("mem_len", "8"), ("mem_len", -1), ("clamp_len", None), ("same_length", "no")])
    def test_settings_of_a_wrong_type(self, name, value, tmp_path):
        bare = some_files("t01_tf_plain", tmp_path / "bare", *self.SHARDS)
        with pytest.raises(InputError, match=name):
            convert(bare, tmp_path / "target", settings={**settings_of("t01_tf_plain"), name: value})


def logits_tolerance(case, dtype):
    """In the golden values of GPT-J the rotary frequency 0.01 was rounded to float32, by 2e-8 of it: off by up to 1.8e-9."""
    if case == GPTJ and dtype == torch.float64:
        return {"rtol": 0, "atol": 4e-9}
    return LOG_PROBS[dtype]


class TestToday:
    """c01 to c09, folders of today's Transformers."""

    @staticmethod
    def states_tolerance(case, dtype):
        return logits_tolerance(case, dtype) if dtype == torch.float64 else STATES[dtype]

    @per_dtype
    @per_today
    def test_one_call(self, case, dtype):
        model, values = load(case, dtype), golden(case)
        ids = values["input_ids"]
        with torch.no_grad():
            output = model(ids, labels=ids, output_hidden_states=True)
        assert_close(output.logits, values["logits"].to(dtype), **logits_tolerance(case, dtype))
        assert_close(output.loss, values["loss"][0].to(dtype), **logits_tolerance(case, dtype))
        assert sum(name.startswith("hidden.") for name in values) == len(output.hidden_states)
        for i, states in enumerate(output.hidden_states):
            assert_close(states, values[f"hidden.{i}"].to(dtype), **self.states_tolerance(case, dtype))

    @per_dtype
    @per_today
    def test_in_pieces(self, case, dtype):
        model, values = load(case, dtype), golden(case)
        cache = None
        for number, ids in enumerate(values["input_ids"].split(values["seg_lens"].tolist(), 1)):
            with torch.no_grad():
                output = model(ids, cache=cache, use_cache=True)
            cache = output.cache
            assert_close(output.logits, values[f"seg{number}.logits"].to(dtype), **logits_tolerance(case, dtype))

    @per_dtype
    @per_today
    def test_left_padding(self, case, dtype):
        """Positions count real tokens here, so padding on the left never matters, whatever positions the source was given."""
        model, values = load(case, dtype), golden(case)
        mask = values["leftpad_mask"]
        with torch.no_grad():
            found = model(values["leftpad_ids"], attention_mask=mask).logits
        is_rotary = model.config.position_type == "rope"
        assert not mask.all() and ("leftpad_default_positions.logits" in values) >= is_rotary
        for name in ("leftpad.logits", "leftpad_default_positions.logits"):
            if name in values:
                expected = values[name].to(dtype)
                assert_close(found[mask.bool()], expected[mask.bool()], **logits_tolerance(case, dtype))

    @per_dtype
    @per_today
    def test_greedy_text(self, case, dtype):
        model, values = load(case, dtype), golden(case)
        prompt, text = values["prompt"], values["greedy"]
        found = model.generate(prompt, max_new_tokens=text.shape[1], do_sample=False, pad_token_id=0)
        assert found[:, prompt.shape[1] :].tolist() == text.tolist()

    def test_windows_and_limits(self):
        assert load("c05_mistral_sliding", torch.float32).config.attention_window == 5  # the token itself is one of them
        assert load("c08_mpt", torch.float32).config.max_position_embeddings == 64

    def test_one_frequency_in_float32_is_all_that_differs_in_gptj(self):
        values = golden(GPTJ)
        rope = load(GPTJ, torch.float64).config.rope_parameters
        frequency = float(torch.tensor(0.01, dtype=torch.float32))  # the other is 1
        # Of four rotated dimensions the frequencies are theta**0 and theta**-0.5.
        model = load_converted(oracle(GPTJ), torch.float64, rope_parameters={**rope, "rope_theta": frequency**-2})
        for one, least, most in ((load(GPTJ, torch.float64), 1e-10, 4e-9), (model, 0, 1e-13)):
            with torch.no_grad():
                difference = (one(values["input_ids"]).logits - values["logits"]).abs().max()
            assert least < difference < most


class TestXLNet:
    @per_dtype
    def test_golden(self, dtype):
        model, values = load(XLNET, dtype), golden(XLNET)
        assert model.config.initial_memory == "empty" and model.config.mem_len == 8
        cache = XLCache(model.config, form="hidden")
        for number, ids in enumerate(values["input_ids"].split(values["seg_lens"].tolist(), 1)):
            prefix = f"seg{number}."
            with torch.no_grad():
                output = model(ids, cache=cache, output_hidden_states=True)
            assert_close(output.logits, values[f"{prefix}logits"].to(dtype), **LOG_PROBS[dtype])
            assert_close(output.hidden_states[-1], values[f"{prefix}last_hidden"].to(dtype), **STATES[dtype])
            for i, rows in enumerate(hidden_rows(cache)):
                assert_close(rows.transpose(0, 1), values[f"{prefix}mems.{i}"].to(dtype), **STATES[dtype])

    def test_attention_to_both_sides_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="attn_type='bi' cannot be converted: attention to both sides"):
            convert(oracle("c12_xlnet_bi"), tmp_path / "target")
        assert not (tmp_path / "target").exists()


class TestCommand:
    @pytest.mark.parametrize(("case", "family"), FAMILY_OF.items())
    def test_says_what_it_did(self, case, family, tmp_path, capsys):
        target = tmp_path / "target"
        assert main(["convert", str(oracle(case)), str(target)]) == 0
        count = sum(tensor.numel() for tensor in tensors_of(target).values())
        *notes, last = capsys.readouterr().out.splitlines()
        compared = "" if family.startswith("transfo-xl") else r"; largest difference of logits [\d.e-]+"
        assert re.fullmatch(rf"converted {family}, {count:,} parameters{compared}; saved in {re.escape(str(target))}", last)
        assert all(note.startswith("note: ") for note in notes)
        assert_same_tensors(tensors_of(target), tensors_of(converted(oracle(case), torch.float32)))
        assert config_of(target) == config_of(converted(oracle(case), torch.float32))
        assert [path.name for path in tmp_path.iterdir()] == ["target"]

    def test_the_way_back(self, tmp_path, capsys):
        case = "a01_hf_mem_gt_seg_untie"
        source, target = converted(oracle(case), torch.float32), tmp_path / "back"
        assert main(["convert", str(source), str(target), "--to", "transfo-xl"]) == 0
        assert re.match(r"converted transfo-xl, [\d,]+ parameters; largest", capsys.readouterr().out.splitlines()[-1])
        assert config_of(target)["model_type"] == "transfo-xl"


class TestThereAndBack:
    # What changes no number and is not kept: MPT's class ignores its field and is always 4 wide, as the tensors are; ids that
    # are out of the vocabulary.
    NOT_KEPT = MappingProxyType(
        {"c08_mpt": {"expansion_ratio": 4}, "c09_gptj_interleaved": {"bos_token_id": None, "eos_token_id": None}}
    )

    @staticmethod
    def fields(folder) -> dict:
        """The config as its class reads it, without where it lay and what wrote it."""
        values = AutoConfig.from_pretrained(folder).to_dict()
        return {n: v for n, v in values.items() if n not in ("_name_or_path", "transformers_version", "dtype", "torch_dtype")}

    @pytest.mark.parametrize(("case", "family"), [*((case, "transfo-xl") for case in FORMER), *TODAY.items()])
    def test_bit_for_bit(self, case, family, tmp_path):
        convert_back(converted(oracle(case), torch.float32), tmp_path / "back", family)
        source = load_file(oracle(case) / "model.safetensors")
        source.pop("transformer.pos_emb.inv_freq", None)  # follows from d_model
        assert_same_tensors(tensors_of(tmp_path / "back"), source)
        assert self.fields(tmp_path / "back") == self.fields(oracle(case)) | self.NOT_KEPT.get(case, {})


class Shell:
    """Unpickling it runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def truncate(path, part=0.7):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def llama(folder):
    return some_files("c01_llama_gqa", folder, "config.json", "model.safetensors")


def truncated_safetensors(folder):
    truncate(llama(folder) / "model.safetensors")
    return folder


def truncated_model_pt(folder):
    truncate(some_files("b01_kimi_same_as_a02", folder, "config.json", "model.pt") / "model.pt")
    return folder


def truncated_legacy_model_pt(folder):
    some_files("b01_kimi_same_as_a02", folder, "model_legacy.pt")
    truncate(folder / "model_legacy.pt")
    return folder / "model_legacy.pt"


def truncated_tensorflow(folder):
    data = TestTensorFlow.SHARDS[1]
    truncate(some_files("t01_tf_plain", folder, "config.json", *TestTensorFlow.SHARDS) / data)
    return folder


def weights_of_another_family(folder):
    llama(folder)
    shutil.copyfile(oracle("c06_bloom") / "model.safetensors", folder / "model.safetensors")
    return folder


def missing_shard(folder):
    AutoModelForCausalLM.from_pretrained(oracle("c01_llama_gqa")).save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    return folder


def extra_tensor(folder):
    edit(llama(folder) / "model.safetensors", lambda tensors: tensors.update({"model.layers.1.extra": torch.ones(2)}))
    return folder


def missing_tensor(folder):
    edit(llama(folder) / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    return folder


def wrong_shape(folder):
    edit_config(llama(folder), intermediate_size=81)
    return folder


def config_is_no_json(folder):
    (llama(folder) / "config.json").write_text('{"model_type": "llama",')
    return folder


def config_is_a_list(folder):
    (llama(folder) / "config.json").write_text("[1, 2]")
    return folder


def unknown_model_type(folder):
    edit_config(llama(folder), model_type="lamas")
    return folder


def model_type_is_a_list(folder):
    edit_config(llama(folder), model_type=["llama"])
    return folder


def unknown_field(folder):
    edit_config(llama(folder), some_new_scale=0.3)
    return folder


def field_of_another_type(folder):
    edit_config(llama(folder), num_hidden_layers="three")
    return folder


def clusters_of_width_0(folder):
    # 64 // 5**3 is 0: a table that has no columns, which the former class accepted.
    some_files("a05_hf_adaptive_wt103", folder, "config.json", "model.safetensors")
    edit_config(folder, div_val=5)
    return folder


def shell_in_model_pt(folder):
    folder.mkdir()
    torch.save(Shell(f"touch {folder.parent / 'marker'}"), folder / "model.pt")
    return folder


def shell_in_legacy_model_pt(folder):
    folder.mkdir()
    torch.save(Shell(f"touch {folder.parent / 'marker'}"), folder / "model.pt", _use_new_zipfile_serialization=False)
    return folder


def shell_in_plain_pickle(folder):
    folder.mkdir()
    content = io.BytesIO()
    pickle.dump({"word_emb.emb_layers.0.weight": Shell(f"touch {folder.parent / 'marker'}")}, content)
    (folder / "state_dict.pt").write_bytes(content.getvalue())
    return folder


def shell_in_pytorch_model_bin(folder):
    some_files("a01_hf_mem_gt_seg_untie", folder, "config.json")
    torch.save({"x": Shell(f"touch {folder.parent / 'marker'}")}, folder / "pytorch_model.bin")
    return folder


def no_weights(folder):
    return some_files("c01_llama_gqa", folder, "config.json")


def nothing_known(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing")
    return folder


def absent(folder):
    return folder


BAD = {
    truncated_safetensors: r"model\.safetensors: not a whole safetensors file",
    truncated_model_pt: r"model\.pt: ",
    truncated_legacy_model_pt: r"model_legacy\.pt: ",
    truncated_tensorflow: r"model\.ckpt-0",
    weights_of_another_family: r"lacks lm_head\.weight, model\.embed_tokens\.weight",
    missing_shard: r"model-00002-of-\d+\.safetensors missing, which model\.safetensors\.index\.json names",
    extra_tensor: r"holds model\.layers\.1\.extra, which have no place",
    missing_tensor: r"lacks model\.norm\.weight; are all files",
    wrong_shape: r"gate_proj\.weight \[80, 48\] do not fit its config, which asks for \[81, 48\]",
    config_is_no_json: r"config\.json: not readable as JSON",
    config_is_a_list: r"config\.json: must hold one JSON object, got list",
    unknown_model_type: r"model_type 'lamas' is of no family known here",
    model_type_is_a_list: r"model_type \['llama'\]",
    unknown_field: r"some_new_scale=0\.3 is not understood here",
    field_of_another_type: r"config\.json: .*num_hidden_layers",
    clusters_of_width_0: r"width of 0",
    shell_in_model_pt: r"model\.pt: ",
    shell_in_legacy_model_pt: r"model\.pt: ",
    shell_in_plain_pickle: r"state_dict\.pt: ",
    shell_in_pytorch_model_bin: r"pytorch_model\.bin: ",
    no_weights: r"holds no weights; model\.safetensors or pytorch_model\.bin",
    nothing_known: r"no checkpoint of a known family",
    absent: r"no such file or folder",
}


class TestBadFiles:
    @pytest.mark.parametrize(("make", "message"), BAD.items(), ids=[make.__name__ for make in BAD])
    def test_one_line_and_nothing_left(self, make, message, tmp_path, capsys):
        source, beside = make(tmp_path / "source"), tmp_path / "out"
        beside.mkdir()
        with pytest.raises(InputError, match=message):
            convert(source, beside / "target")
        assert not list(beside.iterdir())
        capsys.readouterr()
        assert main(["convert", str(source), str(beside / "target")]) == 2
        lines = [line for line in re.split(r"[\r\n]", capsys.readouterr().err) if not line.startswith("convert: ")]
        (line,) = [line for line in lines if line]
        assert line.startswith("modeling-xl convert: error: ") and re.search(message, line)
        assert not list(beside.iterdir())
        assert not (tmp_path / "marker").exists()

    def test_the_marker_of_these_tests_works(self, tmp_path):
        """Python's own unpickler runs what the refused files ask for."""
        pickle.loads(pickle.dumps(Shell(f"touch {tmp_path / 'marker'}")))
        assert (tmp_path / "marker").exists()

    def test_a_target_that_is_not_empty(self, tmp_path, capsys):
        source, target = oracle("c01_llama_gqa"), tmp_path / "target"
        target.mkdir()
        (target / "mine.txt").write_text("mine")
        for taken in (target, target / "mine.txt"):
            with pytest.raises(InputError, match="exists and is not an empty folder"):
                convert(source, taken)
            assert main(["convert", str(source), str(taken)]) == 2
            assert "exists and is not an empty folder; give a new one" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["target"]
        assert [path.name for path in target.iterdir()] == ["mine.txt"] and (target / "mine.txt").read_text() == "mine"

    def test_a_target_below_a_file(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(InputError, match="file"):
            convert(oracle("c01_llama_gqa"), tmp_path / "file" / "target")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_an_empty_target_and_a_deep_one(self, tmp_path):
        (tmp_path / "empty").mkdir()
        for target in (tmp_path / "empty", tmp_path / "not" / "yet" / "there"):
            convert(oracle("c01_llama_gqa"), target, check=False)
            assert_same_tensors(tensors_of(target), tensors_of(converted(oracle("c01_llama_gqa"), torch.float32)))
            assert [path.name for path in target.parent.iterdir()] == [target.name]
            shutil.rmtree(target)

    @pytest.mark.parametrize("already", [False, True], ids=["new", "empty"])
    def test_interrupted_while_writing(self, already, tmp_path, monkeypatch, capsys):
        target = tmp_path / "target"
        if already:
            target.mkdir()
        written = []

        def interrupted(tensors, path, **options):
            if written:
                raise KeyboardInterrupt
            save_file(tensors, path, **options)
            written.append(path)

        monkeypatch.setattr(checkpoint_files, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(oracle("c01_llama_gqa"), target, max_shard_bytes=20_000)
        assert len(written) == 1
        assert [path.name for path in tmp_path.iterdir()] == (["target"] if already else [])
        assert not already or not list(target.iterdir())
        assert main(["convert", str(oracle("c01_llama_gqa")), str(target)]) == 130
        assert "modeling-xl convert: interrupted" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == (["target"] if already else [])


class TestTrainedModels:
    """200 tokens of models that were trained. float32, as they are used: the two best tokens are always further apart than the
    numbers of the two models."""

    NEW = 200
    MODELS = pytest.mark.parametrize("name", ["stories260K/hf", "selftrained/gpt_neox", "selftrained/bloom"])
    # The second, since the models of bytes soon write one word again and again.
    OPTIONS = pytest.mark.parametrize("ngram", [0, 4], ids=["plain", "no_repeats"])

    @classmethod
    @functools.cache
    def source_text(cls, name, ngram):
        """A prompt, how the source's own class goes on with it, and for each new token the logits, and the scores it was
        chosen by."""
        model = AutoModelForCausalLM.from_pretrained(trained_model(name), attn_implementation="eager").eval()
        model.generation_config.eos_token_id = None
        ids = list(b"The first of them said that he ") if model.config.vocab_size == 256 else [1, 403, 407, 261, 378]
        prompt = torch.tensor([ids])
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **cls.options(ngram),
            max_new_tokens=cls.NEW,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        return prompt, found.sequences, torch.stack(found.logits, 1), torch.stack(found.scores, 1)

    @staticmethod
    def options(ngram):
        return {"do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": ngram}

    @OPTIONS
    @MODELS
    def test_one_call(self, name, ngram):
        prompt, text, logits, scores = self.source_text(name, ngram)
        model = load_converted(trained_model(name), torch.float32)
        assert model.config.layer_memory_types == ["none"] * model.config.num_hidden_layers
        assert text.shape[1] == prompt.shape[1] + self.NEW and (not ngram or len(text.unique()) > 15)
        with torch.no_grad():
            found = model(text[:, :-1]).logits[:, prompt.shape[1] - 1 :]
        best = scores.topk(2).values
        assert 2 * (found - logits).abs().max() < (best[..., 0] - best[..., 1]).min()
        assert torch.equal(model.generate(prompt, max_new_tokens=self.NEW, **self.options(ngram)), text)

    @OPTIONS
    @MODELS
    def test_in_pieces(self, name, ngram):
        prompt, text, *_ = self.source_text(name, ngram)
        model = load_converted(trained_model(name), torch.float32)
        cache = XLCache(model.config)
        with torch.no_grad():
            for piece in prompt[:, :-1].split(3, 1):
                model(piece, cache=cache)
        found = prompt
        for _ in range(self.NEW // 50):
            found = model.generate(found, cache=cache, max_new_tokens=50, **self.options(ngram))
        assert torch.equal(found, text)
