"""The command `modeling-xl`: what it writes, its exit codes and its one-line errors."""

import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_xl import XLForCausalLM, cli, train
from modeling_xl import corpus as corpus_module
from modeling_xl.text import SAMPLE_TEXT, byte_tokenizer, encode

CONFIG = {
    "model_type": "xl",
    "vocab_size": 259,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "segment_len": 8,
    "mem_len": 16,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module", autouse=True)
def cache_of_datasets(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config, a text and a model trained on it by the command itself."""
    path = tmp_path_factory.mktemp("cli")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "training.json").write_text(json.dumps({"learning_rate": 0.01, "batch_size": 8, "warmup_steps": 5}))
    # Little text, often: a small model soon knows it well enough to write something that is not one letter repeated.
    (path / "text.txt").write_bytes(SAMPLE_TEXT.read_bytes()[:240] * 25)
    (path / "held_out.txt").write_bytes(SAMPLE_TEXT.read_bytes()[:1000])
    (path / "latin.txt").write_bytes("zwölf".encode("latin-1"))
    (path / "other" / "model").mkdir(parents=True)
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes)).save_pretrained(path / "llama")
    byte_tokenizer().save_pretrained(path / "llama")
    LlamaConfig().save_pretrained(path / "other" / "model")
    rows = [{"text": text, "number": number} for number, text in enumerate(SAMPLE_TEXT.read_text()[:2000].split("\n\n"))]
    (path / "rows").mkdir()
    for split, part in (("train", rows[:12]), ("test", rows[12:])):
        (path / "rows" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    datasets.Dataset.from_list(rows[:12]).save_to_disk(path / "saved")
    datasets.DatasetDict(first=datasets.Dataset.from_list(rows[:12])).save_to_disk(path / "saved_splits")
    (path / "broken").mkdir()
    (path / "broken" / "train.jsonl").write_text('{"text')
    command = ["train", str(path), "--train-file", str(path / "text.txt"), "--output-dir", str(path / "model")]
    assert cli.main([*command, "--max-steps", "120"]) == 0
    shutil.copytree(path / "model", path / "twin")
    return path


def run(capsys, *arguments):
    """(exit code, stdout, stderr) of the command."""
    capsys.readouterr()
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", [[], ["train"], ["evaluate"], ["inspect"], ["memory"], ["generate"], ["push"]], ids=str)
def test_help(capsys, command):
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert "usage: modeling-xl" in out


def test_module_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "modeling_xl.cli"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_train_reports_and_saves(capsys, folder, tmp_path):
    code, out, _ = run(
        capsys, "train", folder, "--train-file", folder / "text.txt", folder / "held_out.txt", "--output-dir",
        tmp_path / "new", "--eval-file", folder / "held_out.txt", "--max-bytes", 300, "--mem-len", 4, "--batch-size", 2,
    )  # fmt: skip
    assert code == 0
    assert "trained 19 steps on 304 bytes" in out
    assert "segment 8, memory 4, clamp none, window none, start empty, streams 2" in out
    assert XLForCausalLM.from_pretrained(tmp_path / "new").config.mem_len == 4


def test_train_takes_the_arguments_of_transformers(capsys, folder, tmp_path):
    """A pass over 5,700 bytes in calls of 8 rows of 8, two of them a step: 90 calls, the last of 2 columns."""
    command = ("train", folder, "--train-file", folder / "text.txt", "--output-dir", tmp_path / "new")
    settings = ("lr_scheduler_type=inverse_sqrt", "adam_beta2=0.999", "gradient_accumulation_steps=2")
    code, out, _ = run(capsys, *command, "--set", *settings)
    assert code == 0
    assert "trained 45 steps on 5699 bytes" in out
    code, _, err = run(capsys, *command[:-1], tmp_path / "other", "--set", "mixed_precision=high")
    assert (code, err.count("\n")) == (2, 1) and "mixed_precision='high': must be no, bf16 or fp16" in err
    code, _, err = run(capsys, *command[:-1], tmp_path / "other", "--set", "adam_beta2")
    assert code == 2 and "'adam_beta2' is not NAME=VALUE" in err


class TestTexts:
    """Which text the commands read, and that files, datasets and caches of the same text give the same numbers."""

    rows = SAMPLE_TEXT.read_text()[:2000].split("\n\n")
    command = ("--max-steps", 3, "--batch-size", 2)

    def result(self, capsys, folder, output, *options):
        """What `train` prints of the run and of the held-out part, but for times and the folder."""
        code, out, err = run(capsys, "train", folder, *self.command, "--output-dir", output, *options)
        assert (code, err) == (0, "")
        return re.sub(r"[\d.]+ s\b|saved in \S+", "", out)

    def test_a_dataset_of_any_form(self, capsys, folder, tmp_path):
        """Documents are its rows, each with the end token behind it; the last of them are held out."""
        sources = {
            "folder": ("--dataset", folder / "rows"),
            "file": ("--dataset", folder / "rows" / "train.jsonl"),
            "saved": ("--dataset", folder / "saved"),
            "splits": ("--dataset", folder / "saved_splits", "--dataset-split", "first"),
            "cached": ("--dataset", folder / "saved", "--cache-dir", tmp_path / "cache"),
        }
        found = {name: self.result(capsys, folder, tmp_path / name, *options) for name, options in sources.items()}
        assert len(set(found.values())) == 1
        held_out = self.rows[11]
        assert f"({len(held_out)} tokens, {len(held_out) - 1} bytes" in found["folder"]
        assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".json", ".tokens"]

    def test_a_split_of_its_own_is_evaluated_on(self, capsys, folder, tmp_path):
        options = ("--dataset", folder / "rows", "--eval-dataset-split", "test")
        found = self.result(capsys, folder, tmp_path / "new", *options)
        rows = self.rows[12:]
        assert f"({sum(map(len, rows))} tokens, {sum(len(row) - 1 for row in rows)} bytes" in found
        assert f"documents {len(rows)}" in found
        command = ("evaluate", tmp_path / "new", "--dataset", folder / "rows", "--dataset-split", "test", "--streams", 2)
        code, out, _ = run(capsys, *command)
        assert code == 0
        assert f"held out: {out.splitlines()[0]}\n" in found

    def test_files_with_documents(self, capsys, folder, tmp_path):
        (tmp_path / "text.txt").write_text("\n\n".join(self.rows))
        files = ("--train-file", tmp_path / "text.txt", "--eval-file", folder / "held_out.txt", "--separator", "")
        found = self.result(capsys, folder, tmp_path / "a", *files)
        assert "documents 10," in found
        assert self.result(capsys, folder, tmp_path / "b", *files, "--cache-dir", tmp_path / "cache") == found
        model = XLForCausalLM.from_pretrained(tmp_path / "a").state_dict()
        other = XLForCausalLM.from_pretrained(tmp_path / "b").state_dict()
        assert all(torch.equal(model[name], other[name]) for name in model)

    def test_tokens_in_the_cache_are_not_made_again(self, capsys, folder, tmp_path, monkeypatch):
        evaluated = ("evaluate", folder / "model", folder / "held_out.txt", "--cache-dir", tmp_path / "cache")
        _, first, _ = run(capsys, *evaluated, "--json")
        made = sorted((tmp_path / "cache").iterdir())
        assert len(made) == 2
        monkeypatch.setattr(corpus_module, "_write_file", None)
        code, again, _ = run(capsys, *evaluated, "--json")
        assert code == 0 and sorted((tmp_path / "cache").iterdir()) == made
        assert [result["loss"] for result in json.loads(again)] == [result["loss"] for result in json.loads(first)]

    def test_one_document_is_not_split(self, capsys, folder, tmp_path):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a row with some text"}))
        command = ("train", folder, *self.command, "--dataset", tmp_path / "rows.jsonl", "--output-dir", tmp_path / "new")
        code, _, err = run(capsys, *command)
        assert code == 2
        assert "--eval-fraction 0.05: a corpus of one document cannot be split; " in err and "0 holds out nothing" in err
        code, out, _ = run(capsys, *command, "--eval-fraction", 0)
        assert code == 0 and "held out" not in out


def test_train_takes_a_schedule_of_memory_lengths(capsys, folder, tmp_path):
    """From the command line and from training.json: the weights are the same, and others than without one."""
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "training.json").write_text(json.dumps({"mem_len_schedule": {"0": 0, "4": 16}}))
    given = {"set": (folder, "--set", 'mem_len_schedule={"0": 0, "4": 16}'), "stored": (tmp_path,), "without": (folder,)}
    for name, (config, *more) in given.items():
        command = ("train", config, "--train-file", folder / "text.txt", "--output-dir", tmp_path / name, "--max-steps", 8)
        assert run(capsys, *command, "--learning-rate", 0.01, "--batch-size", 8, "--warmup-steps", 2, *more)[0] == 0
    models = [XLForCausalLM.from_pretrained(tmp_path / name) for name in given]
    weights = [torch.cat([parameter.flatten() for parameter in model.parameters()]) for model in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert models[0].config.mem_len == 16


class TestGoingOn:
    def command(self, folder, output, *more):
        files = ("--train-file", folder / "text.txt", "--output-dir", output)
        schedule = 'mem_len_schedule={"0": 0, "3": 8, "10": 16}'
        return ("train", folder, *files, "--max-steps", 12, "--save-steps", 5, "--set", schedule, *more)

    @pytest.fixture
    def ended(self, capsys, folder, tmp_path, monkeypatch):
        """A run ended after step 8; its last checkpoint is of step 5."""

        def end(self, args, state, control, **kwargs):
            if state.global_step == 8:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(train._Progress, "on_step_end", end)
            assert run(capsys, *self.command(folder, tmp_path / "ended"))[0] == 130
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ended.checkpoints"]
        assert train.last_checkpoint(tmp_path / "ended.checkpoints").endswith("checkpoint-5")
        return tmp_path / "ended"

    def test_one_ended_before_it_was_saved_makes_no_step_more(self, capsys, folder, tmp_path, monkeypatch):
        """Its last checkpoint is of the last step; a rate that does not fall to 0 would show one step more."""
        command = self.command(folder, tmp_path / "new", "lr_scheduler_type=constant", "--save-steps", 6)

        def end(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(train, "save", end)
            assert run(capsys, *command)[0] == 130
        checkpoint = XLForCausalLM.from_pretrained(tmp_path / "new.checkpoints" / "checkpoint-12").state_dict()
        code, out, _ = run(capsys, *command)
        assert code == 0 and "trained 12 steps on 0 bytes" in out and "nan" not in out
        model = XLForCausalLM.from_pretrained(tmp_path / "new").state_dict()
        assert all(torch.equal(model[name], checkpoint[name]) for name in model)

    def test_the_same_command_ends_with_the_same_weights(self, capsys, folder, ended):
        code, out, _ = run(capsys, *self.command(folder, ended, "--save-steps", 4))
        assert code == 0
        assert "trained 12 steps on 448 bytes" in out  # 7 steps of 8 rows of 8, those after the checkpoint
        assert not Path(f"{ended}.checkpoints").exists()
        straight = ended.with_name("straight")
        assert run(capsys, *self.command(folder, straight))[0] == 0
        first, second = (XLForCausalLM.from_pretrained(path).state_dict() for path in (ended, straight))
        assert all(torch.equal(first[name], second[name]) for name in second)

    @pytest.mark.parametrize(
        ("more", "names"),
        [
            (("--learning-rate", 0.02, "--mem-len", 3), "learning_rate, mem_len"),
            (("--seed", 1), "first weights, seed"),
            (("--set", 'mem_len_schedule={"0": 8}'), "mem_len_schedule"),
            (("--train-file", "{}/held_out.txt"), "text"),
            (("--separator", ""), "text"),
        ],
    )
    def test_another_run_is_refused(self, capsys, folder, ended, more, names):
        more = [str(part).replace("{}/", f"{folder}/") for part in more]
        code, _, err = run(capsys, *self.command(folder, ended, *more))
        assert code == 2
        assert f"{ended}.checkpoints: holds checkpoints of a run with other {names}; give what that had" in err
        assert run(capsys, *self.command(folder, ended))[0] == 0


DOCS = (Path(__file__).parent.parent / "docs" / "training.md").read_text(encoding="utf-8")


def launch(script: str, launcher: str, where: Path, *more: str) -> subprocess.CompletedProcess:
    """Runs the command of the docs that starts `script` with the launcher, in a folder."""
    (found,) = (line for line in DOCS.splitlines() if line.startswith(launcher) and f"{script} " in f"{line} ")
    words = shlex.split(found, comments=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = ["--master_port" if launcher == "torchrun" else "--main_process_port", str(free.getsockname()[1])]
    first = next(index for index, word in enumerate(words) if word.startswith("--"))
    words = [*words[:first], *port, *words[first:], *more]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, timeout=240, env=environment, cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_train_as_one_with_twice_the_batch(capsys, folder, launcher, tmp_path):
    shutil.copy(folder / "text.txt", tmp_path / "my.txt")
    shutil.copytree(folder, tmp_path / "demo", ignore=lambda *_: ["model", "other", "llama", "twin"])
    done = launch("modeling_xl.cli", launcher, tmp_path, "--max-steps", "20", "--batch-size", "4", "--cache-dir", "cache")
    assert "trained 20 steps on 1280 bytes" in done.stdout and "s by 2 processes: " in done.stdout
    command = ("train", folder, "--train-file", folder / "text.txt", "--output-dir", tmp_path / "one")
    code, out, _ = run(capsys, *command, "--max-steps", 20, "--batch-size", 8)
    assert code == 0 and "trained 20 steps on 1280 bytes" in out and " processes: " not in out
    two, one = (XLForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("my_model", "one"))
    # Sums in another order, through 20 steps of an optimizer that divides by small numbers.
    assert all(torch.allclose(two[key], one[key], atol=2e-3) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_script_of_the_docs_in_two_processes(launcher, tmp_path):
    """Made small, and asked for the number of processes."""
    script = DOCS.split("```python\n")[1].split("```")[0]
    for word, other in {
        'output_dir="run",': 'output_dir="run", use_cpu=True,',
        "hidden_size=256": "hidden_size=24",
        "intermediate_size=1024": "intermediate_size=24",
        "max_steps=1000": "max_steps=2",
        "50_000": "500",
        "segment_len=128": "segment_len=8",
    }.items():
        assert word in script
        script = script.replace(word, other)
    (tmp_path / "my_training.py").write_text(f"{script}print('processes', trainer.args.world_size)\n")
    (tmp_path / "my.txt").write_bytes(SAMPLE_TEXT.read_bytes()[:5000])
    assert launch("my_training.py", launcher, tmp_path).stdout.count("processes 2") == 2


def test_output_that_nobody_reads_is_no_traceback(folder):
    command = [sys.executable, "-m", "modeling_xl.cli", "generate", str(folder / "model"), "--prompt", "a"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


class TestEvaluate:
    def test_result_names_its_settings(self, capsys, folder):
        code, out, _ = run(capsys, "evaluate", folder / "model", folder / "held_out.txt", "--clamp-len", 9, "--window", 7)
        assert code == 0
        assert "bits per byte, perplexity" in out
        assert "(999 tokens, 999 bytes" in out
        assert "segment 8, memory 16, clamp 9, window 7, start empty, streams 1" in out

    def test_json_and_plot_of_several_memory_lengths(self, capsys, folder, tmp_path):
        code, out, _ = run(
            capsys, "evaluate", folder / "model", folder / "held_out.txt", folder / "text.txt", "--mem-len", 0, 8, 32,
            "--json", "--plot", tmp_path / "plot.png", "--streams", 4, "--batch-size", 2,
        )  # fmt: skip
        assert code == 0
        results = json.loads(out)
        assert [result["mem_len"] for result in results] == [0, 8, 32]
        assert {result["num_tokens"] for result in results} == {6999}
        assert {result["model"] for result in results} == {str(folder / "model")}
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    def test_several_models_in_one_table_and_by_position(self, capsys, folder, tmp_path):
        code, out, _ = run(
            capsys, "evaluate", folder / "model", folder / "held_out.txt", "--compare", folder / "twin", "--mem-len", 0, 8,
            "--by-position", "--plot", tmp_path / "plot.png", "--separator", "", "--streams", 2,
        )  # fmt: skip
        assert code == 0
        settings, memory, positions = out.split("\n\n")
        assert settings.count("documents 10") == 4  # each ends at a blank line
        lines = [line.split() for line in memory.splitlines()]
        assert [line[:2] for line in lines[1:]] == [[str(folder / name), m] for name in ("model", "twin") for m in "08"]
        assert lines[1][2:] == lines[3][2:] != lines[2][2:]
        assert f"{folder / 'twin'}, memory 8" in positions.splitlines()[0]
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    def test_standard_input_gives_what_the_file_gives(self, capsys, folder, monkeypatch):
        command = ["evaluate", folder / "model", "--mem-len", 8, "--json"]
        _, from_file, _ = run(capsys, *command, folder / "held_out.txt")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((folder / "held_out.txt").read_bytes())))
        code, from_pipe, _ = run(capsys, *command, "-")
        assert code == 0
        (from_file,), (from_pipe,) = json.loads(from_file), json.loads(from_pipe)
        assert {**from_file, "seconds": 0} == {**from_pipe, "seconds": 0}

    def test_recl_of_models_of_several_types(self, capsys, folder, tmp_path):
        command = [
            "evaluate", folder / "model", folder / "held_out.txt", "--compare", folder / "llama", "--recl", "--recl-max", 24,
            "--recl-positions", 20,
        ]  # fmt: skip
        code, out, _ = run(capsys, *command, "--plot", tmp_path / "plot.png")
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()[1:3]] == [str(folder / "model"), str(folder / "llama")]
        assert "step 8, contexts up to 24, 20 positions, threshold 0.01, group of 2" in out
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        code, out, _ = run(capsys, *command, "--json")
        results = json.loads(out)
        assert [result["model_type"] for result in results] == ["xl", "llama"]
        assert [found["ratio"] for found in results[0]["lengths"]] == [0.1, 0.5, 1.0]


class TestInspect:
    def test_tables_and_plot(self, capsys, folder, tmp_path):
        command = ["inspect", folder / "model", folder / "held_out.txt", "--mem-len", 4, "--plot", tmp_path / "plot.png"]
        code, out, _ = run(capsys, *command)
        assert code == 0
        by_kind, by_distance, settings = out.split("\n\n")
        lines = [line.split() for line in by_kind.splitlines()]
        assert lines[0] == ["layer", "type", "memory", "segment"] and [line[0] for line in lines[1:]] == ["0", "1"]
        # What no query can see has no line: 4 tokens of memory, and 7 of the segment.
        assert [line.split()[0] for line in by_distance.splitlines()[1:]] == ["0", "1", "2-3", "4-7", "8-15"]
        assert "segment 8, memory 4, clamp none, window none, start empty, 1000 tokens as one stream" in settings
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    def test_standard_input_gives_what_the_file_gives(self, capsys, folder, monkeypatch):
        command = ["inspect", folder / "model", "--json"]
        _, from_file, _ = run(capsys, *command, folder / "held_out.txt")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((folder / "held_out.txt").read_bytes())))
        assert run(capsys, *command, "-") == (0, from_file, "")
        found = json.loads(from_file)
        assert found["model"] == str(folder / "model") and len(found["layers"][0]["by_head"]["memory"]) == 3


class TestGenerate:
    prompt = "First Citizen:\nWe are "

    def test_greedy_text_is_that_of_the_model(self, capsys, folder):
        model = XLForCausalLM.from_pretrained(folder / "model").eval()
        ids = encode(self.prompt, byte_tokenizer())[None]
        expected = byte_tokenizer().decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :])
        code, out, _ = run(
            capsys, "generate", folder / "model", "--prompt", self.prompt, "--max-new-tokens", 40, "--temperature", 0
        )
        assert (code, out) == (0, expected)
        assert len(set(out)) > 5

    def test_a_prompt_file_read_in_pieces(self, capsys, folder, monkeypatch):
        command = ["generate", folder / "model", "--prompt-file", folder / "held_out.txt", "--max-new-tokens", 10]
        _, whole, _ = run(capsys, *command)
        monkeypatch.setattr(cli, "PROMPT_CHUNK", 13)
        assert run(capsys, *command)[:2] == (0, whole)

    def test_runs_chained_by_the_cache_equal_one_long_run(self, capsys, folder, tmp_path):
        model, cache = folder / "model", tmp_path / "cache"
        _, whole, _ = run(capsys, "generate", model, "--prompt", self.prompt, "--max-new-tokens", 60)
        parts = [
            ["--prompt", self.prompt, "--max-new-tokens", 25, "--cache-out", cache],
            ["--cache-in", cache, "--max-new-tokens", 20, "--cache-out", cache],
            ["--cache-in", cache, "--max-new-tokens", 15],
        ]
        assert "".join(run(capsys, "generate", model, *part)[1] for part in parts) == whole
        assert len(whole) == 60

    def test_a_prompt_goes_on_from_the_cache(self, capsys, folder, tmp_path):
        model = folder / "model"
        start = ["generate", model, "--prompt", self.prompt, "--max-new-tokens", 9]
        _, said, _ = run(capsys, *start, "--cache-out", tmp_path / "cache")
        _, whole, _ = run(capsys, "generate", model, "--prompt", self.prompt + said + " Speak!\n", "--max-new-tokens", 20)
        code, out, _ = run(
            capsys, "generate", model, "--cache-in", tmp_path / "cache", "--prompt", " Speak!\n", "--max-new-tokens", 20
        )
        assert (code, out) == (0, whole)

    def test_samples_repeat_with_their_seed(self, capsys, folder):
        command = ["generate", folder / "model", "--prompt", self.prompt, "--temperature", 0.9, "--max-new-tokens", 30]
        texts = [run(capsys, *command, "--top-p", 0.95, "--seed", seed)[1] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train {} --train-file {}/text.txt", "--output-dir"),
        ("train {}/nothing --train-file {}/text.txt --output-dir {}/new", "no config there"),
        ("train {} --train-file {}/nothing.txt --output-dir {}/new", "nothing.txt: no such file"),
        ("train {} --train-file {}/latin.txt --output-dir {}/new", "latin.txt: not UTF-8 text"),
        ("train {} --train-file {}/text.txt --output-dir {}/model", "is not empty"),
        (
            "train {} --train-file {}/text.txt --output-dir {}/new --max-steps 0",
            "--max-steps: 0 is not an integer of at least 1",
        ),
        (
            """train {} --train-file {}/text.txt --output-dir {}/new --set mem_len_schedule={"0":17}""",
            "mem_len_schedule={0: 17}: 17 must be at most the config's mem_len=16",
        ),
        (
            """train {} --train-file {}/text.txt --output-dir {}/new --set mem_len_schedule={"9":1}""",
            "must say how long memory is at the beginning; add step 0",
        ),
        ("train {} --train-file {}/text.txt --output-dir {}/new --batch-size 9000", "too few for 9000 stream"),
        ("train {} --train-file {}/text.txt --output-dir {}/new --tokenizer {}/other", "no tokenizer could be loaded"),
        ("train {} --train-file {}/nothing.txt --output-dir {}/new --set optim=none", "optim='none'"),
        ("train {} --output-dir {}/new", "no text is named; give --train-file or --dataset"),
        ("train {} --train-file {}/text.txt --dataset {}/rows --output-dir {}/new", "that of --train-file already"),
        ("train {} --train-file {}/text.txt --text-column a --output-dir {}/new", "--text-column: belongs to --dataset"),
        ("train {} --dataset {}/rows --separator a --output-dir {}/new", "--separator: divides text files"),
        (
            "train {} --dataset {}/rows --text-column a --output-dir {}/new",
            "--text-column a: column='a': the dataset has",
        ),
        ("train {} --dataset {}/rows --text-column number --output-dir {}/new", "a row holds 0, which is no text"),
        ("train {} --dataset {}/nothing --output-dir {}/new", "nothing: could not be loaded"),
        ("train {} --dataset {}/broken --output-dir {}/new", "broken: could not be loaded: JSON parse error"),
        ("train {} --dataset {}/rows --dataset-split a --output-dir {}/new", "rows: could not be loaded: Unknown split"),
        ("train {} --dataset {}/rows --eval-dataset-split a --output-dir {}/new", "rows: could not be loaded: Unknown split"),
        ("train {} --dataset {}/saved --dataset-split a --output-dir {}/new", "saved: was saved without splits"),
        ("train {} --dataset {}/saved_splits --output-dir {}/new", "saved_splits: has no split 'train', but first"),
        (
            "train {} --train-file {}/text.txt --cache-dir {}/text.txt --output-dir {}/new",
            "text.txt: cannot be made (File",
        ),
        ("evaluate {}/model", "FILE"),
        ("evaluate {}/nothing {}/text.txt", "nothing: no model could be loaded"),
        ("evaluate {}/other/model {}/text.txt", "is a model of type 'llama'"),
        ("evaluate {}/model {}/text.txt --mem-len -3", "--mem-len: -3 is not an integer of at least 0"),
        ("evaluate {}/model {}/text.txt --plot {}/plot.png", "give several values to --mem-len"),
        ("evaluate {}/model {}/text.txt --streams 6000", "too few for 6000 stream"),
        ("evaluate {}/model {}/text.txt --compare {}/twin {}/model", "model: is named twice"),
        ("evaluate {}/model {}/text.txt --separator <doc>", "separator='<doc>': no line that equals it divides the text"),
        ("evaluate {}/model {}/text.txt --dataset {}/rows", "that of FILE already"),
        ("evaluate {}/model --dataset {}/rows --recl", "--dataset: --recl measures"),
        ("evaluate {}/model - --cache-dir {}/new", "--cache-dir: standard input is read once"),
        ("evaluate {}/model {}/text.txt -", "standard input is read alone"),
        ("evaluate {}/model - --mem-len 0 4", "several --mem-len: standard input is read once"),
        ("evaluate {}/model - --compare {}/twin --recl", "--recl, --compare: standard input is read once"),
        ("evaluate {}/model {}/text.txt --recl --by-position --streams 2", "--streams, --by-position: --recl measures"),
        ("evaluate {}/model {}/text.txt --recl --recl-step 600 --recl-max 900", "longest=900: two steps of 600 must fit"),
        ("evaluate {}/model {}/held_out.txt --recl --recl-max 1024", "1000 tokens are too few for contexts of 1024"),
        ("evaluate {}/llama {}/text.txt --recl --mem-len 4", "mem_len=4: a model of type 'llama' has no such setting"),
        ("evaluate {}/model {}/text.txt --compare {}/llama", "is a model of type 'llama'"),
        ("evaluate {}/other/model {}/text.txt --recl", "other/model: no model could be loaded"),
        ("inspect {}/model", "required: FILE"),
        ("inspect {}/model {}/nowhere.txt", "nowhere.txt: no such file"),
        ("inspect {}/model {}/text.txt -", "standard input is read alone"),
        ("inspect {}/model {}/text.txt --plot {}/nowhere/plot.png", "its folder does not exist; make it first"),
        ("inspect {}/other/model {}/text.txt", "is a model of type 'llama'"),
        ("generate {}/model", "nothing to continue"),
        ("generate {}/model --prompt a --prompt-file {}/text.txt", "not allowed with"),
        ("generate {}/model --prompt a --top-p 1.5", "--top-p: 1.5 is not a number above 0 and at most 1"),
        ("generate {}/model --prompt a --cache-in {}/nothing", "no cache of this model"),
        ("generate {}/model --prompt a --cache-out {}/other", "is not empty and holds no cache"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, folder, arguments, message):
    code, out, err = run(capsys, *arguments.replace("{}", str(folder)).split())
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("modeling-xl")
    assert err.count("\n") == 1
    assert not (folder / "new").exists()


def test_a_cache_of_another_model_is_refused(capsys, folder, tmp_path):
    run(capsys, "generate", folder / "model", "--prompt", "a", "--max-new-tokens", 1, "--cache-out", tmp_path / "cache")
    torch.manual_seed(0)
    other = XLForCausalLM.from_pretrained(folder / "model").config
    other.num_hidden_layers = 1
    XLForCausalLM(other).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    code, _, err = run(capsys, "generate", tmp_path / "model", "--cache-in", tmp_path / "cache")
    assert code == 2
    assert "no cache of this model" in err


@pytest.mark.parametrize("damaged", ["model.safetensors", "cache/cache.safetensors", "cache/pending.json"])
def test_a_damaged_file_is_bad_input(capsys, folder, tmp_path, damaged):
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    run(capsys, "generate", model, "--prompt", "a", "--max-new-tokens", 1, "--cache-out", model / "cache")
    whole = (model / damaged).read_bytes()
    (model / damaged).write_bytes(whole[: len(whole) // 2])
    code, out, err = run(capsys, "generate", model, "--cache-in", model / "cache")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_a_failure_is_exit_code_1(capsys, folder, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(XLForCausalLM, "generate", fail)
    code, _, err = run(capsys, "generate", folder / "model", "--prompt", "a")
    assert code == 1
    assert err.splitlines()[-1] == "modeling-xl generate: failed: RuntimeError: out of memory"
