"""What is saved stands alone: every folder holds the code of its model, and loads by it where the package is not installed."""

import builtins
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from helpers import tiny_config
from load_bundles import BUNDLE, results
from oracles import oracle
from report_helpers import HEADS, PAIRS, make, make_other, off
from safetensors.torch import load_file
from test_structure import PACKAGE, TRAVELS
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import modeling_xl
from modeling_xl import XLConfig, XLForCausalLM, cli
from modeling_xl.configuration_xl import FORMAT_VERSION
from modeling_xl.conversion.convert import convert, convert_back
from modeling_xl.modeling_xl import AUTO_CLASSES
from modeling_xl.text import SAMPLE_TEXT
from modeling_xl.trainer import XLTrainer, XLTrainingArguments

TESTS = Path(__file__).parent
AUTO_MAP = {"AutoConfig": "configuration_xl.XLConfig"} | {
    auto: f"modeling_xl.{model.__name__}" for auto, model in AUTO_CLASSES.items()
}
CODE = {name: (PACKAGE / f"{name}.py").read_bytes() for name in TRAVELS}
# Models saved in the first format, with the code of that day and what they said: see fixtures/README.md.
OLD = TESTS / "fixtures" / "format_1"
OLD_MODELS = sorted(path.name for path in (OLD / "models").iterdir())
# float64, of size 10: products in another order, as another processor adds them up.
OTHER_MACHINE = 1e-10
SMALL = {"vocab_size": 259, "num_hidden_layers": 2, "dtype": torch.float32}


def run_hidden(requests: dict[str, dict], folder: Path, **environment: str) -> dict[str, dict[str, str]]:
    """`load_bundles` in a process without the package; everything it leaves lies in `folder`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON", "TRANSFORMERS_"))}
    clean |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    folder.mkdir(exist_ok=True)
    asked = folder / "requests.json"
    asked.write_text(json.dumps(requests))
    command = [sys.executable, str(TESTS / "load_bundles.py"), str(asked), str(folder)]
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((folder / "report.json").read_text())
    assert report.keys() == requests.keys()
    return report


def check_whole(folder: Path) -> None:
    """All files that travel, as they are in the package (`test_structure` says what they may import), no other code, and
    every Auto class named."""
    assert {path.stem: path.read_bytes() for path in folder.glob("*.py")} == CODE
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    assert config["format_version"] == FORMAT_VERSION


def save_trained(folder: Path) -> dict[str, XLForCausalLM]:
    """Checkpoints of both trainers and what the command makes, with a tokenizer each; the models that lie there."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    ids = tokenizer(SAMPLE_TEXT.read_text()[:200], add_special_tokens=False, return_tensors="pt").input_ids[0]
    common = {"max_steps": 1, "save_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    rows = [{"input_ids": ids[:30], "labels": ids[:30]}] * 2
    made = {}
    runs = folder / "runs"
    for name, trainer_class, arguments, dataset in (
        ("trainer", Trainer, TrainingArguments(str(runs / "trainer"), **common), rows),
        ("xl_trainer", XLTrainer, XLTrainingArguments(str(runs / "xl_trainer"), **common), ids),
    ):
        trainer = trainer_class(make(**SMALL), arguments, train_dataset=dataset, processing_class=tokenizer)
        trainer.train()
        made[name] = trainer.model.eval()
        (folder / name).mkdir()
        (runs / name / "checkpoint-1").rename(folder / name / BUNDLE)
    make(**SMALL).config.save_pretrained(runs / "config")
    (runs / "text.txt").write_text(SAMPLE_TEXT.read_text()[:400])
    command = ["train", str(runs / "config"), "--train-file", str(runs / "text.txt"), "--max-steps", "1", "--batch-size", "2"]
    assert cli.main([*command, "--output-dir", str(folder / "command" / BUNDLE)]) == 0
    made["command"] = XLForCausalLM.from_pretrained(folder / "command" / BUNDLE)
    return made


def old_bundle(name: str, folder: Path) -> Path:
    """A bundle as it was saved then, put together of the code and a model."""
    folder.mkdir(parents=True)
    for path in [*(OLD / "code").glob("*.py"), *(OLD / "models" / name).iterdir()]:
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_bundles_stand_alone(tmp_path):
    """report G07, G09, G12: whatever was saved loads in a process without the package, by its own code, with equal numbers;
    so does what that process saves and trains elsewhere, in a further one; all are whole. Bundles of the first format too."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    models = {f"{scheme}-{memory}": make(scheme, memory) for scheme, memory in PAIRS}
    models |= {f"head-{head}": make(**changes) for head, changes in HEADS.items()}
    models |= {model_class.__name__: make_other(model_class) for model_class in AUTO_CLASSES.values()}
    for name, model in models.items():
        model.save_pretrained(first / name / BUNDLE)
    models |= save_trained(first)
    tiny_config().save_pretrained(first / "config" / BUNDLE)
    for name in OLD_MODELS:
        old_bundle(name, first / f"old-{name}" / BUNDLE)

    auto_of = {model_class: auto for auto, model_class in reversed(AUTO_CLASSES.items())}
    requests = {name: {"source": str(first / name / BUNDLE), "auto": auto_of[type(model)]} for name, model in models.items()}
    for name in (f"old-{name}" for name in OLD_MODELS):
        requests[name] = {"source": str(first / name / BUNDLE), "auto": "AutoModelForCausalLM"}
    requests["config"] = {"source": str(first / "config" / BUNDLE), "auto": "AutoConfig"}
    for name in ("trainer", "xl_trainer", "command"):
        requests[name]["tokenizer"] = True
    # Of one bundle, the other classes that it names. Their heads are new, but for the language model's.
    requests |= {f"as-{auto}": {"source": str(first / "rope-none" / BUNDLE), "auto": auto} for auto in AUTO_CLASSES}
    requests["tuned"] = {**requests["xl_trainer"], "tune": True}

    expected = {name: results(model) for name, model in models.items()}
    expected |= {f"old-{name}": load_file(OLD / "models" / name / "expected.safetensors") for name in OLD_MODELS}
    for name in (*models, "config"):
        check_whole(first / name / BUNDLE)
    for target in (second, third):
        report = run_hidden(requests, target)
        for name, found in report.items():
            assert "error" not in found, (name, found)
            assert found["module"].startswith("transformers_modules"), name
            auto = requests[name]["auto"]
            assert found["class"] == AUTO_MAP[auto].split(".")[1], name
            if auto == "AutoConfig":
                continue
            said = load_file(target / name / "said.safetensors")
            if name in expected:
                assert said.keys() == expected[name].keys(), name
                bound = OTHER_MACHINE if name.startswith("old-") else 0
                assert max(off(said[key], value) for key, value in expected[name].items()) <= bound, name
            else:
                expected[name] = said
        for name in report:
            if not name.startswith("old-"):
                check_whole(target / name / BUNDLE)
            if requests[name].get("tokenizer"):
                files = {path.name for path in (target / name / BUNDLE).iterdir()}
                assert {"tokenizer_config.json", "generation_config.json"} <= files
        # What the third process loads the second one made; nothing is trained there, so its numbers are the second's.
        for name, request in requests.items():
            request |= {"source": str(target / name / BUNDLE), "tune": False}


@pytest.mark.parametrize("name", OLD_MODELS)
def test_this_package_reads_the_first_format(name, tmp_path):
    """A bundle that was saved when there was no format_version gives the numbers that it gave then."""
    model = AutoModelForCausalLM.from_pretrained(old_bundle(name, tmp_path / name))
    assert type(model) is XLForCausalLM
    expected, said = load_file(OLD / "models" / name / "expected.safetensors"), results(model)
    assert said.keys() == expected.keys()
    assert all(off(said[key], value) <= OTHER_MACHINE for key, value in expected.items())
    model.save_pretrained(tmp_path / "again")
    check_whole(tmp_path / "again")


@pytest.mark.parametrize("trust_remote_code", [None, False, True])
def test_the_package_wins_where_it_is_installed(trust_remote_code, tmp_path, monkeypatch):
    """With or without trust_remote_code, nobody is asked and no code of the folder is run."""
    make_other(modeling_xl.XLModel).save_pretrained(tmp_path)
    for path in tmp_path.glob("*.py"):
        path.write_text("raise AssertionError('this code must not run')")
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("was asked"))
    options = {} if trust_remote_code is None else {"trust_remote_code": trust_remote_code}
    assert type(AutoConfig.from_pretrained(tmp_path, **options)) is XLConfig
    for auto, model_class in AUTO_CLASSES.items():
        assert type(getattr(transformers, auto).from_pretrained(tmp_path, **options)) is model_class


@pytest.mark.slow
def test_former_transfo_xl_becomes_a_bundle(tmp_path):
    """A folder of Transformers' former Transformer-XL, loaded as it is and saved, is a model of this package with its code."""
    model = AutoModelForCausalLM.from_pretrained(oracle("a01_hf_mem_gt_seg_untie"))
    model.save_pretrained(tmp_path / "saved")
    check_whole(tmp_path / "saved")
    report = run_hidden({"saved": {"source": str(tmp_path / "saved"), "auto": "AutoModelForCausalLM"}}, tmp_path / "out")
    assert report["saved"]["class"] == "XLForCausalLM"
    said = load_file(tmp_path / "out" / "saved" / "said.safetensors")
    assert all(torch.equal(said[key], value) for key, value in results(model).items())


def test_conversion_makes_bundles(tmp_path):
    """`modeling-xl convert` saves the code beside its result, and none beside what is converted back."""
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 97}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "ours", check=False)
    check_whole(tmp_path / "ours")
    convert_back(tmp_path / "ours", tmp_path / "again", "llama", check=False)
    assert not list((tmp_path / "again").glob("*.py"))
    assert not {"auto_map", "format_version"} & json.loads((tmp_path / "again" / "config.json").read_text()).keys()


class TestSubclasses:
    """Classes that others derive: their code travels if they say so, as in Transformers, and ours stays whole beside it."""

    CODE = """
from modeling_xl import XLConfig, XLForCausalLM

class OwnModel(XLForCausalLM):
    pass

class OwnConfig(XLConfig):
    model_type = "own"
"""

    @pytest.fixture
    def own(self, tmp_path, monkeypatch):
        (tmp_path / "own_package").mkdir()
        (tmp_path / "own_package" / "own_code.py").write_text(self.CODE)
        monkeypatch.syspath_prepend(str(tmp_path))
        yield importlib.import_module("own_package.own_code")
        for name in ("own_package.own_code", "own_package"):
            del sys.modules[name]

    def test_not_registered(self, own, tmp_path):
        """The model is ours to any reader; a config of another type carries no code of ours that would not read it."""
        own.OwnModel(tiny_config()).save_pretrained(tmp_path / "saved")
        check_whole(tmp_path / "saved")
        own.OwnConfig(vocab_size=97).save_pretrained(tmp_path / "config")
        assert [path.name for path in (tmp_path / "config").iterdir()] == ["config.json"]
        assert "auto_map" not in json.loads((tmp_path / "config" / "config.json").read_text())

    def test_registered(self, own, tmp_path):
        own.OwnModel.register_for_auto_class("AutoModelForCausalLM")
        own.OwnModel(tiny_config()).save_pretrained(tmp_path / "saved")
        assert {path.stem for path in (tmp_path / "saved").glob("*.py")} == TRAVELS | {"own_code"}
        written = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
        assert written == {**AUTO_MAP, "AutoModelForCausalLM": "own_code.OwnModel"}
        # Loaded as ours, and saved without that file: nothing names it any more.
        XLForCausalLM.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "again")
        check_whole(tmp_path / "again")


class TestFormatVersion:
    @pytest.fixture
    def newer(self, tmp_path):
        make().save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        # A newer format may say anything in a field, which must not be what the error is about.
        config |= {"format_version": FORMAT_VERSION + 1, "memory_type": {"kind": "of tomorrow"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    @pytest.mark.parametrize("loader", [XLConfig, AutoConfig, XLForCausalLM, AutoModelForCausalLM])
    def test_a_newer_one_is_refused(self, newer, loader):
        with pytest.raises(ValueError, match=rf"format_version={FORMAT_VERSION + 1} must be .* a newer version of the package"):
            loader.from_pretrained(newer)

    def test_commands_refuse_it(self, newer, capsys):
        assert cli.main(["train", str(newer), "--train-file", str(SAMPLE_TEXT), "--output-dir", str(newer / "out")]) == 2
        assert f"format_version={FORMAT_VERSION + 1} must be" in capsys.readouterr().err

    @pytest.mark.parametrize("value", [0, "1", None])
    def test_what_is_no_version_is_refused(self, value):
        with pytest.raises(ValueError, match="format_version"):
            XLConfig.from_dict({**tiny_config().to_dict(), "format_version": value})

    def test_it_cannot_be_chosen(self):
        with pytest.raises(Exception, match="format_version=7"):
            tiny_config(format_version=7)


def test_everything_else_is_saved_as_before(tmp_path):
    """The code comes beside what Transformers writes."""
    model = make()
    model.generation_config = GenerationConfig(max_new_tokens=3)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 3
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path), ByT5Tokenizer)
    check_whole(tmp_path)
