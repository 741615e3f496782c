"""What the package promises of its own files: one direction of imports, complete indexes, nothing the Hub cannot carry."""

import ast
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import modeling_xl
import modeling_xl.conversion
from modeling_xl.conversion.families import FAMILIES
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES

PACKAGE = Path(modeling_xl.__file__).parent
# From left to right; a file imports files of later groups, or of its own where the group says so.
ORDER = [
    {"modeling_xl"},
    {"configuration_xl", "generation_xl", "grid_xl", "head_xl", "layer_xl"},
    {"attention_xl"},
    {"feedforward_xl"},
    {"positions", "memories", "softmax_xl", "heads_xl"},
    {"position_*", "memory_*"},
    {"compression_xl", "feature_maps_xl", "linear_xl"},
    {"memory_base"},
    {"position_base"},
    {"few_rows_xl", "outputs_xl"},
    {"cache_xl"},
]
# Against the order, in a function: a config that is saved names the models, and Transformers copies files by that line.
LATE = ("configuration_xl", "modeling_xl")
TRAVELS = {path.stem for path in PACKAGE.glob("*_xl.py")} | {
    path.stem for path in [*PACKAGE.glob("position*.py"), *PACKAGE.glob("memor*.py")]
}


def rank(name: str) -> int:
    exact = [i for i, group in enumerate(ORDER) if name in group]
    if exact:
        return exact[0]
    return next(i for i, group in enumerate(ORDER) if any(re.fullmatch(g.replace("*", ".+"), name) for g in group))


def imports(path: Path):
    """(name of the module, level of a relative import, whether it is a `from` import) of each import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module, node.level, True
        elif isinstance(node, ast.Import):
            yield from ((alias.name, 0, False) for alias in node.names)


@pytest.mark.parametrize("name", sorted(TRAVELS))
def test_imports_point_one_way(name):
    for module, level, _ in imports(PACKAGE / f"{name}.py"):
        if level and (name, module) != LATE:
            assert module in TRAVELS, f"{name} travels to the Hub but imports {module}, which does not"
            assert rank(module) > rank(name), f"{name} imports {module}, which stands left of it or beside it"


@pytest.mark.parametrize("name", sorted(TRAVELS))
def test_the_hub_can_carry_the_file(name):
    """Flat `from .name import X` only, nothing but torch, Transformers and what these bring, and no look-alikes in text."""
    allowed = {"torch", "transformers", "huggingface_hub", "safetensors"} | set(sys.stdlib_module_names)
    for module, level, is_from in imports(PACKAGE / f"{name}.py"):
        if level:
            assert level == 1 and is_from and module and "." not in module
        else:
            assert module.split(".")[0] in allowed, module
    followed = re.findall(r"^\s*from\s+\.(\S+)\s+import", (PACKAGE / f"{name}.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(followed) == {module for module, level, _ in imports(PACKAGE / f"{name}.py") if level}


@pytest.mark.parametrize(
    ("index", "prefix"), [(POSITION_SCHEMES, "position_"), (MEMORY_MECHANISMS, "memory_")], ids=["positions", "memories"]
)
def test_indexes_name_every_file(index, prefix):
    files = {path.stem.removeprefix(prefix) for path in PACKAGE.glob(f"{prefix}*.py")} - {"base"}
    assert files == set(index)
    for name, member in index.items():
        assert member.name == name and member.__module__.endswith(f"{prefix}{name}")


CONVERSION = Path(modeling_xl.conversion.__file__).parent
# From left to right, as above.
CONVERSION_ORDER = [
    {"convert"},
    {"sources"},
    {"families"},
    {"from_*"},
    {"family", "vocabulary", "checkpoint_files"},
    {"weight_map", "restricted_pickle", "tensorflow_checkpoint"},
]


def test_families_name_every_file():
    files = {path.stem for path in CONVERSION.glob("from_*.py")}
    assert files == {type(family).__module__.rsplit(".", 1)[1] for family in FAMILIES.values()}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONVERSION.glob("*.py") if path.stem != "__init__"))
def test_imports_of_conversion_point_one_way(name):
    """One family may build on another, as what is named like Llama does."""

    def place(module: str) -> int:
        return next(i for i, group in enumerate(CONVERSION_ORDER) if any(fnmatch(module, pattern) for pattern in group))

    for module, level, _ in imports(CONVERSION / f"{name}.py"):
        if level:
            both_are_families = name.startswith("from_") and module.startswith("from_")
            assert place(module) > place(name) or both_are_families, f"{name} imports {module}"


def test_no_code_runs_from_a_loaded_file():
    """Report A15: no pickle on any load path. One file reads those of the original code, by a reader that calls nothing."""
    for path in PACKAGE.parent.rglob("*.py"):
        if any(part in {"build", "tests"} or part.startswith(".venv") for part in path.relative_to(PACKAGE.parent).parts):
            continue
        text = path.read_text(encoding="utf-8")
        if path.name == "restricted_pickle.py":
            assert not re.search(r"pickle\.(load|loads|Unpickler\()", text), "only the class that restricts may read"
            text = text.replace("pickle", "")
        assert not re.search(r"\bpickle\b|\bdill\b|joblib|(?<![.\w])(eval|exec)\(", text), path
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, path
