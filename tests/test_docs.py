"""The README and the pages of docs: their Python blocks run in order, their commands parse, their links lead somewhere."""

import importlib.util
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import tiny_model
from test_conversion_faults import TRANSFO_XL_LIKE, save_xl

from modeling_xl import cli
from modeling_xl.conversion.convert import convert_back
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.position_rope import ROPE_TYPES
from modeling_xl.positions import POSITION_SCHEMES
from modeling_xl.text import SAMPLE_TEXT, byte_tokenizer
from modeling_xl.trainer import XLTrainer

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
LINKED = {**PAGES, **{name: ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")}}
FENCE = re.compile(
    r"(?:^ *<!-- needs: (?P<needs>[^>]+?) -->\n\s*)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
# What a block may need beside a package: of these the tests have none.
NEVER_HERE = {"network", "torchrun"}


class Fence(NamedTuple):
    language: str
    text: str
    line: int  # of its first line in the page
    needs: list[str]


def fences(path: Path) -> list[Fence]:
    content = path.read_text(encoding="utf-8")
    assert content.count("```") == 2 * len(FENCE.findall(content)), f"{path.name}: a fence is not closed, or not understood"
    return [
        Fence(
            found["language"],
            textwrap.dedent(found["text"]),
            content.count("\n", 0, found.start("text")) + 1,
            re.split(r",\s*", found["needs"]) if found["needs"] else [],
        )
        for found in FENCE.finditer(content)
    ]


def is_here(need: str) -> bool:
    if need == "cuda":
        return torch.cuda.is_available()
    return need not in NEVER_HERE and importlib.util.find_spec(need) is not None


def run_blocks(path: Path, namespace: dict) -> None:
    for block in fences(path):
        if block.language == "python" and all(map(is_here, block.needs)):
            # Line numbers in a traceback are those of the page.
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all that the examples name: models, texts."""
    path = tmp_path_factory.mktemp("docs")
    sizes = {"vocab_size": 259, "segment_len": 16, "mem_len": 24}
    for name in ("demo_output/model", "my_model"):
        tiny_model(torch.float32, **sizes).save_pretrained(path / name)
        byte_tokenizer().save_pretrained(path / name)
    save_xl(path / "former", **TRANSFO_XL_LIKE)
    convert_back(path / "former", path / "transfo-xl-wt103", "transfo-xl", check=False)
    text = SAMPLE_TEXT.read_text()[:60_000]
    (path / "my.txt").write_text(text)
    for name in ("a.txt", "b.txt"):
        (path / name).write_text("\n<|endoftext|>\n".join(text[:2000].split("\n\n")))
    return path


@pytest.fixture(scope="module")
def after_readme(folder):
    """What the README's examples leave behind: the pages of docs go on from there."""
    namespace: dict = {"__name__": "docs"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_blocks(PAGES["README.md"], namespace)
    return namespace


@pytest.fixture
def short_training(monkeypatch):
    """Two steps of two streams, and little to evaluate on, are enough to see that an example trains."""
    train = XLTrainer.train

    def short(self, *args, **kwargs):
        self.args.max_steps, self.args.per_device_train_batch_size = 2, 2
        self.eval_dataset = self.eval_dataset[:500]
        return train(self, *args, **kwargs)

    monkeypatch.setattr(XLTrainer, "train", short)


def test_readme_runs(after_readme):
    assert "cache" in after_readme


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of Trainer's default, where there is no GPU
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # a name that PEFT still calls
@pytest.mark.parametrize("page", [name for name in PAGES if name != "README.md"])
def test_examples_run(page, folder, after_readme, short_training, monkeypatch):
    monkeypatch.chdir(folder)
    run_blocks(PAGES[page], dict(after_readme))


def commands(content: str):
    """Each `modeling-xl …` line, as words."""
    for line in content.splitlines():
        found = re.search(r"(?:^|\| )(?:torchrun .*|accelerate .*)?(?:modeling-xl|-m modeling_xl\.cli) (.*)", line.strip())
        if found:
            yield shlex.split(found[1], comments=True)


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page, capsys):
    parser = cli.build_parser()
    for block in fences(PAGES[page]):
        for words in commands(block.text) if block.language != "python" else ():
            try:
                parser.parse_args(words)
            except SystemExit:
                pytest.fail(f"{page}: modeling-xl {' '.join(words)}: {capsys.readouterr().err}")


@pytest.mark.parametrize("page", LINKED)
def test_options_in_running_text_exist(page):
    """`modeling-xl COMMAND --option` in a sentence names a command and options of it."""
    parser = cli.build_parser()
    subparsers = next(action.choices for action in parser._actions if action.dest == "command")
    for span in re.findall(r"`modeling-xl ([^`\n]+)`", LINKED[page].read_text(encoding="utf-8")):
        command, *words = span.split()
        assert command in subparsers, f"{page}: modeling-xl {span}"
        unknown = [word for word in words if word.startswith("--") and word not in subparsers[command]._option_string_actions]
        assert not unknown, f"{page}: modeling-xl {span}"


def slugs(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    outside = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", outside, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page):
    path = LINKED[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{page}: {target}"
        assert not anchor or anchor in slugs(found), f"{page}: {target}"


def table_rows(path: Path) -> str:
    return "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|"))


def test_tables_name_all_there_is():
    """What an index holds stands in the README's table of choices and on its page."""
    for index, page in ((POSITION_SCHEMES, "positions.md"), (MEMORY_MECHANISMS, "memory.md")):
        for name in index:
            assert f"| `{name}` |" in table_rows(PAGES["README.md"]), name
            assert f"| `{name}` |" in table_rows(PAGES[page]), name
    for name in ROPE_TYPES:
        assert f"| `{name}` |" in table_rows(PAGES["positions.md"]), name
