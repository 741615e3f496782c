"""`modeling-xl push` and what it is made of: the model card, the bundle, one commit to a Hub that runs beside the test."""

import ast
import contextlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import transformers
from helpers import tiny_config
from hub_server import HubServer
from huggingface_hub import HfApi, ModelCard, constants
from load_bundles import BUNDLE, results
from report_helpers import PAIRS, make, make_other, off
from safetensors.torch import load_file
from test_bundles import SMALL, check_whole, run_hidden
from test_cli import run
from test_structure import TRAVELS

from modeling_xl import XLForCausalLM, cli
from modeling_xl.hub import TASKS, CardFacts, load_bundle, make_card, push, read_evaluations
from modeling_xl.modeling_xl import AUTO_CLASSES
from modeling_xl.text import SAMPLE_TEXT, InputError, byte_tokenizer

CHECKOUT = Path(__file__).resolve().parents[1]
CODE = {f"{name}.py" for name in TRAVELS}
SAVED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json", "README.md"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model's folder with its tokenizer, and what `modeling-xl evaluate --json` prints of it, in a file beside it."""
    path = tmp_path_factory.mktemp("hub")
    model = make(**SMALL)
    model.generation_config.max_new_tokens = 11
    model.save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    (path / "text.txt").write_text(SAMPLE_TEXT.read_text()[:300])
    command = ["evaluate", str(path / "model"), str(path / "text.txt"), "--json", "--mem-len", "0", "7"]
    with (path / "results.json").open("w") as file, contextlib.redirect_stdout(file):
        assert cli.main(command) == 0
    return path


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub for this process, whose token is that of "me"."""
    tokens = {"token-of-me": "me", "reading-token-of-me": "me", "token-of-them": "them"}
    with HubServer(tokens, readers=("reading-token-of-me",)).running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", "token-of-me")
        yield server


class TestCard:
    @pytest.mark.parametrize(("scheme", "memory"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
    def test_states_what_the_model_is(self, scheme, memory):
        model = make(scheme, memory)
        card = make_card(model, "me/small")
        assert not re.search(r"{{|{%|Undefined|\bNone\b.*\|", card.text)
        data = card.data.to_dict()
        assert data["pipeline_tag"] == "text-generation" and data["library_name"] == "transformers"
        assert {f"position-{scheme}", f"memory-{memory}"} <= set(data["tags"])
        rows = dict(re.findall(r"^\| (.+?) \| (.*) \|$", card.text, re.MULTILINE))
        assert rows["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
        reach = rows["reach: largest distance at which a token can change a logit"]
        assert reach == ("no limit" if memory in ("none", "linear") else str(model.config.max_context))
        figure = {"recurrence": "14", "compressive": "30"}.get(memory)  # 2 layers of 7 rows, and of 4 slots of 2 more
        assert rows.get("layers times memory, the figure papers give") == figure
        for code in re.findall(r"```python\n(.*?)```", card.text, re.DOTALL):
            ast.parse(code)
            assert 'AutoModelForCausalLM.from_pretrained("me/small"' in code
        assert "No licence of the weights was stated" in card.text and "license" not in data
        assert ModelCard(str(card)).data.to_dict() == data

    def test_says_where_calls_are_segments(self):
        texts = [make_card(make(segment_len=length), "me/small").text for length in (5, None)]
        assert ["the same numbers as one call" in text for text in texts] == [True, False]
        assert ["every call is one segment. `generate` makes" in text for text in texts] == [False, True]

    @pytest.mark.parametrize("auto", TASKS)
    def test_names_the_class_that_loads_it(self, auto):
        card = make_card(make_other(AUTO_CLASSES[auto]), "me/small", has_tokenizer=False)
        assert f"import {auto}\n" in card.text and "Tokenizer" not in card.text
        assert ("generate" in card.text) == (auto == "AutoModelForCausalLM")

    def test_takes_what_only_its_maker_knows(self):
        facts = CardFacts("mit", ["en", "de"], ["them/novels"], "them/large", "Novels, read twice: {{ as they are }}.")
        card = make_card(make(), "me/small", facts)
        data = card.data.to_dict()
        assert data["license"] == "mit" and data["language"] == ["en", "de"]
        assert data["datasets"] == ["them/novels"] and data["base_model"] == "them/large"
        assert "Weights: mit." in card.text and "Novels, read twice: {{ as they are }}." in card.text

    def test_layers_times_memory(self):
        assert tiny_config().layers_times_memory == 3 * 7
        assert tiny_config(memory_type="compressive").layers_times_memory == 3 * (7 + 2 * 4)
        assert tiny_config(memory_type=["recurrence", "compressive", "recurrence"]).layers_times_memory == 7 + 15 + 7
        assert tiny_config(memory_type=["linear", "recurrence", "recurrence"]).layers_times_memory is None

    def test_holds_what_was_measured(self, saved):
        """The numbers of the command's JSON, as metadata with the settings that they depend on, and in a table."""
        printed = json.loads((saved / "results.json").read_text())
        model, _ = load_bundle(saved / "model")
        found = read_evaluations(saved / "results.json", saved / "model", model.config)
        card = make_card(model, "me/small", CardFacts(evaluations=[("a|b", result) for result in found]))
        measured = ModelCard(str(card)).data.eval_results
        assert measured is not None and len(measured) == 2 * 3
        for entry in printed:
            own = [result for result in measured if result.metric_args["mem_len"] == entry["mem_len"]]
            assert {result.metric_type: result.metric_value for result in own} == {
                name: entry[name] for name in ("bits_per_byte", "bits_per_character", "perplexity")
            }
            assert all(result.metric_args["segment_len"] == 5 and result.dataset_name == "a|b" for result in own)
            assert f"| a\\|b | {entry['mem_len']} | {entry['bits_per_byte']:.4f} |" in card.text
        assert card.data.to_dict()["model-index"][0]["name"] == "small"

    def test_refuses_what_was_not_measured_of_it(self, saved, tmp_path):
        config = make().config
        good = json.loads((saved / "results.json").read_text())
        path = tmp_path / "results.json"
        with pytest.raises(InputError, match="cannot be read"):
            read_evaluations(path, "m", config)
        for content in ("{", "{}x", '["a"]', '{"a": 1}', '[{"model": "m"}]', json.dumps([{**good[0], "lengths": []}])):
            path.write_text(content)
            with pytest.raises(InputError, match="is not what `modeling-xl evaluate --json` prints"):
                read_evaluations(path, "m", config)
        for entries, message in (
            ([], "holds no result of m"),
            ([{**good[0], "model": "a"}, {**good[0], "model": "b"}], "holds no result of m"),
            ([{**good[0], "position_type": "rope"}], "position_type='rope', and m has 'xl'"),
            ([{**good[0], "perplexity": float("inf")}], "perplexity=inf is not a finite number"),
        ):
            path.write_text(json.dumps(entries))
            with pytest.raises(InputError, match=re.escape(message)):
                read_evaluations(path, "m", config)
        path.write_text(json.dumps([{**good[0], "model": "a"}, {**good[1], "model": "m"}]))
        assert [result.mem_len for result in read_evaluations(path, tmp_path / ".." / Path.cwd() / "m", config)] == [7]


class TestPush:
    def test_uploads_all_in_one_commit(self, hub, saved, capsys, tmp_path):
        """report G12: create, push, list; what lies there loads with equal numbers, and is what is told."""
        code, out, err = run(
            capsys, "push", saved / "model", "me/small", "--license", "mit", "--message", "First try", "--evaluation",
            f"novel={saved / 'results.json'}",
        )  # fmt: skip
        assert (code, err) == (0, "")
        there = hub.repositories["me/small"]
        commit = there.find("main")
        assert f"{hub.url}/me/small, commit {commit.oid}" in out
        assert [each.title for each in there.commits.values()] == ["initial commit", "First try"] and not there.is_private
        assert commit.files.keys() - {".gitattributes"} == CODE | SAVED
        assert b"license: mit" in commit.files["README.md"] and b"| novel | 7 |" in commit.files["README.md"]
        folder = Path(HfApi(endpoint=hub.url).snapshot_download("me/small", local_dir=tmp_path / "there"))
        check_whole(folder)
        model, tokenizer = load_bundle(folder)
        assert model.generation_config.max_new_tokens == 11 and len(tokenizer) == 259
        expected = results(XLForCausalLM.from_pretrained(saved / "model"))
        assert all(off(value, expected[name]) == 0 for name, value in results(model).items())

    def test_loads_by_name(self, hub, saved, tmp_path):
        """In a process without the package: by name, at a revision, with a token; a private one only with the right token."""
        one, two = XLForCausalLM.from_pretrained(saved / "model"), make("rope", **SMALL)
        pinned = push(one, "me/open").oid
        push(two, "me/open", overwrite_card=True)
        push(two, "me/secret", byte_tokenizer(), private=True)
        assert hub.repositories["me/secret"].is_private
        common = {"auto": "AutoModelForCausalLM"}
        secret = {**common, "source": "me/secret"}
        report = run_hidden(
            {
                "newest": {**common, "source": "me/open"},
                "pinned": {**common, "source": "me/open", "options": {"revision": pinned}},
                "no_token": secret,
                "wrong_token": {**secret, "options": {"token": "made-up"}},
                "token_of_them": {**secret, "options": {"token": "token-of-them"}},
                "right_token": {**secret, "options": {"token": "reading-token-of-me"}, "tokenizer": True},
                "cached": {**secret, "options": {"local_files_only": True}, "tokenizer": True},
            },
            tmp_path / "out",
            HF_ENDPOINT=hub.url,
            HF_HUB_OFFLINE="0",
        )
        for name, model in (("newest", two), ("pinned", one), ("right_token", two), ("cached", two)):
            assert "error" not in report[name], report[name]
            expected = results(model)
            said = load_file(tmp_path / "out" / name / "said.safetensors")
            assert all(off(said[key], value) == 0 for key, value in expected.items())
            check_whole(tmp_path / "out" / name / BUNDLE)
        for name in ("no_token", "wrong_token", "token_of_them"):
            assert "me/secret" in report[name]["error"], report[name]

    def test_replaces_weights_and_leaves_other_files(self, hub, saved):
        """What of an earlier push would be loaded in place of the new weights goes; what others put there stays."""
        push(make(**SMALL), "me/small")
        there = hub.repositories["me/small"]
        files = there.find("main").files
        stale = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
        files |= dict.fromkeys(stale, b"old") | {"handler.py": b"theirs", "model.fp16.safetensors": b"theirs"}
        push(make("alibi", **SMALL), "me/small", overwrite_card=True)
        assert there.find("main").files.keys() == {*files} - {*stale}
        assert b"position-alibi" in there.find("main").files["README.md"]

    @pytest.mark.filterwarnings("default:.*README.md stays")
    def test_keeps_a_card_that_is_there(self, hub, saved, capsys):
        run(capsys, "push", saved / "model", "me/small")
        there = hub.repositories["me/small"]
        there.find("main").files["README.md"] = b"# Mine"
        code, _, err = run(capsys, "push", saved / "model", "me/small", "--message", "again")
        assert code == 0 and "me/small: its README.md stays as it is" in err
        assert there.find("main").files["README.md"] == b"# Mine"
        code, _, err = run(capsys, "push", saved / "model", "me/small", "--overwrite-card")
        assert (code, err) == (0, "") and b"# small" in there.find("main").files["README.md"]

    def test_takes_the_card_beside_the_model(self, hub, saved, capsys, tmp_path):
        shutil.copytree(saved / "model", tmp_path / "model")
        own = b"---\nlicense: mit\n---\r\n# Mine, to the byte"
        (tmp_path / "model" / "README.md").write_bytes(own)
        assert run(capsys, "push", tmp_path / "model", "me/small")[0] == 0
        assert hub.repositories["me/small"].find("main").files["README.md"] == own
        code, _, err = run(capsys, "push", tmp_path / "model", "me/small", "--license", "mit")
        assert code == 2 and "--license: belong on a new card" in err
        (tmp_path / "model" / "README.md").write_text("---\nlicense: [mit\n---\n")
        before = hub.repositories["me/small"].refs["main"]
        code, _, err = run(capsys, "push", tmp_path / "model", "me/small", "--overwrite-card")
        assert code == 2 and "me/small: Invalid metadata in README.md" in err
        assert hub.repositories["me/small"].refs["main"] == before

    def test_branch_and_pull_request(self, hub, saved, capsys):
        run(capsys, "push", saved / "model", "me/small")
        there = hub.repositories["me/small"]
        main = there.refs["main"]
        code, out, _ = run(capsys, "push", saved / "model", "me/small", "--revision", "next", "--card", saved / "text.txt",
                           "--overwrite-card")  # fmt: skip
        assert code == 0 and there.refs["next"] in out and there.refs["main"] == main
        code, out, _ = run(capsys, "push", saved / "model", "me/small", "--create-pr", "--card", saved / "text.txt",
                           "--overwrite-card")  # fmt: skip
        assert code == 0 and f"{hub.url}/me/small/discussions/1" in out
        assert there.refs.keys() == {"main", "next", "refs/pr/1"} and there.refs["main"] == main
        assert run(capsys, "push", saved / "model", "me/small", "--create-pr", "--revision", "next")[0] == 2

    def test_an_upload_that_breaks_leaves_the_last_revision(self, hub, saved, capsys, tmp_path):
        run(capsys, "push", saved / "model", "me/small")
        there = hub.repositories["me/small"]
        before = there.refs["main"]
        hub.breaks_off = True
        model = make("alibi", **SMALL)
        model.save_pretrained(tmp_path / "model")
        code, _, err = run(capsys, "push", tmp_path / "model", "me/small")
        assert code == 1 and "push: failed" in err
        assert there.refs == {"main": before} and len(there.commits) == 2
        hub.breaks_off = False
        assert run(capsys, "push", tmp_path / "model", "me/small", "--overwrite-card")[0] == 0
        assert len(there.commits) == 3 and b'"alibi"' in there.find("main").files["config.json"]

    @pytest.mark.parametrize(
        ("token", "repo", "status"),
        [
            ("made-up", "me/small", 401),
            ("reading-token-of-me", "me/small", 403),
            ("token-of-them", "me/small", 403),
            ("", "me/new", 401),
        ],
        ids=["wrong", "reads", "of_another", "none"],
    )
    def test_tokens_that_do_not_fit(self, hub, saved, capsys, monkeypatch, token, repo, status):
        run(capsys, "push", saved / "model", "me/small")
        before = hub.repositories["me/small"].refs["main"]
        monkeypatch.delenv("HF_TOKEN")
        options = ("--overwrite-card",)
        if token:
            monkeypatch.setenv("OTHER_TOKEN", token)
            options = (*options, "--token-env", "OTHER_TOKEN")
        code, _, err = run(capsys, "push", saved / "model", repo, *options)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{repo}: refused by the Hub (HTTP {status}); give a token that may write there" in err
        assert token not in err or not token
        assert hub.repositories.keys() == {"me/small"} and hub.repositories["me/small"].refs == {"main": before}

    @pytest.mark.parametrize("name", [*AUTO_CLASSES, "AutoConfig"])
    def test_push_to_hub_of_every_class(self, hub, name):
        """report G12: the method of Transformers, without registering anything, uploads all code that the class needs."""
        made = tiny_config() if name == "AutoConfig" else make_other(AUTO_CLASSES[name])
        made.push_to_hub("me/small")
        files = hub.repositories["me/small"].find("main").files
        assert {file for file in files if file.endswith(".py")} == CODE
        assert set(json.loads(files["config.json"])["auto_map"]) == {*AUTO_CLASSES, "AutoConfig"}

    def test_push_to_hub_fills_the_card_once(self, hub):
        """A card that was edited since stays, as it does for `modeling-xl push`."""
        model = make()
        model.push_to_hub("me/small", tags=["mine"])
        card = ModelCard(hub.repositories["me/small"].find("main").files["README.md"].decode())
        assert card.text == make_card(model, "me/small", has_tokenizer=False).text
        assert {"modeling_xl", "mine"} <= set(card.data.tags)
        HfApi().upload_file(path_or_fileobj=b"---\nlicense: mit\n---\nBy hand.\n", path_in_repo="README.md", repo_id="me/small")
        model.push_to_hub("me/small")
        assert b"By hand." in hub.repositories["me/small"].find("main").files["README.md"]


class TestInput:
    def test_writes_a_folder_in_place_of_uploading(self, saved, capsys, tmp_path):
        """Offline, as the tests are: nothing but the folder is touched."""
        command = ("push", saved / "model", "me/small", "--output-dir", tmp_path / "out", "--language", "en", "de")
        code, out, err = run(capsys, *command)
        assert (code, err) == (0, "") and str(tmp_path / "out") in out
        assert {path.name for path in (tmp_path / "out").iterdir()} == CODE | SAVED
        check_whole(tmp_path / "out")
        assert ModelCard.load(tmp_path / "out" / "README.md").data.language == ["en", "de"]
        code, _, err = run(capsys, *command)
        assert code == 2 and "exists and is not an empty folder" in err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("model", "small"), "small: must be OWNER/NAME"),
            (("model", "me/a b"), "me/a b: "),
            (("nowhere", "me/small"), "has no config.json"),
            (("model", "me/small", "--token-env", "NOT_SET"), "--token-env NOT_SET: this environment variable is not set"),
            (("model", "me/small", "--output-dir", "out", "--private"), "--private: mean nothing with --output-dir"),
            (("model", "me/small", "--evaluation", "text.txt"), "'text.txt' is not NAME=FILE"),
            (("model", "me/small", "--evaluation", "a=nowhere.json"), "nowhere.json: cannot be read"),
            (("model", "me/small", "--output-dir", "out", "--card", "nowhere.md"), "nowhere.md: cannot be read"),
            (("model", "me/small"), "HF_HUB_OFFLINE is set"),
        ],
        ids=lambda value: None if isinstance(value, str) else " ".join(value),
    )
    def test_refusals(self, saved, capsys, monkeypatch, options, message):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.chdir(saved)
        code, _, err = run(capsys, "push", *options)
        assert (code, err.count("\n")) == (2, 1) and message in err
        assert not (saved / "out").exists()

    def test_private_is_never_pushed_into_a_public_repository(self, hub, saved, capsys):
        run(capsys, "push", saved / "model", "me/small")
        before = hub.repositories["me/small"].refs["main"]
        code, _, err = run(capsys, "push", saved / "model", "me/small", "--private")
        assert code == 2 and "exists and is public" in err
        assert hub.repositories["me/small"].refs["main"] == before

    def test_models_that_are_not_whole(self, saved, capsys, tmp_path):
        """Weights that are not there would be pushed as they were drawn."""
        shutil.copytree(saved / "model", tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        for change, message in (
            ({"architectures": ["XLForTokenClassification"]}, "its weights are of another model than its config says"),
            ({"architectures": ["LlamaForCausalLM"]}, "is none of XLModel"),
            ({"model_type": "llama"}, "not 'xl'"),
        ):
            (tmp_path / "model" / "config.json").write_text(json.dumps(config | change))
            code, _, err = run(capsys, "push", tmp_path / "model", "me/small")
            assert (code, err.count("\n")) == (2, 1) and message in err


@pytest.mark.slow
def test_an_installed_wheel_holds_the_template(tmp_path):
    """The wheel, made of a copy of the checkout and unpacked elsewhere, makes cards by itself."""
    source, target = tmp_path / "source", tmp_path / "installed"
    ignored = shutil.ignore_patterns(".*", "tests", "benchmarks", "build", "*_output", "*.egg-info", "__pycache__")
    shutil.copytree(CHECKOUT, source, ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from modeling_xl import XLConfig, XLModel, hub\n"
        "assert hub.__file__.startswith(sys.argv[1]), hub.__file__\n"
        "print(hub.make_card(XLModel(XLConfig(hidden_size=16, num_hidden_layers=1, vocab_size=5)), 'me/small'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(target)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert "# small" in done.stdout
