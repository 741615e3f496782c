"""The published sizes in `configs`: they load, train, and have the parameters and settings that their README states."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.train import load_config, training_settings

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NAMES = sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))
PUBLISHED_NAMES = [name for name in NAMES if name != "demo"]

# Parameters as the papers print them, and a unit of the last digit. They cut digits off: 0.469 billion is "0.46B".
PUBLISHED = {
    "transfo-xl-wt103-base": (151_000_000, 1_000_000),
    "transfo-xl-wt103-large": (257_000_000, 1_000_000),
    "transfo-xl-enwik8-base": (41_000_000, 1_000_000),
    "transfo-xl-enwik8-large": (277_000_000, 1_000_000),
    "transfo-xl-text8-large": (277_000_000, 1_000_000),
    "transfo-xl-lm1b-base": (460_000_000, 10_000_000),
    "transfo-xl-lm1b-large": (800_000_000, 100_000_000),
}
# "257M" is what 16 layers of this size have; the authors' script and released checkpoint have 18, which makes 285M.
LAYERS_COUNTED = {"transfo-xl-wt103-large": 16}


def rows_of_readme(title: str = "name") -> dict[str, dict[str, str]]:
    """Name of a config -> its row in the README's tables whose first column has this title, without marks of footnotes."""
    rows, header = {}, []
    for line in (CONFIGS / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [re.sub(r" \(\d\)$", "", cell.strip()) for cell in line.strip().strip("|").split("|")]
        if cells[0] in ("name", "sizes"):
            header = cells
        elif line.startswith("| `") and header[0] == title:
            assert len(cells) == len(header), line
            rows |= {key: dict(zip(header, cells, strict=True)) for key in re.findall("`(.+?)`", cells[0])}
    return rows


def numbers(cell: str) -> list[float | None]:
    """'128 / 1,600 / none' -> [128, 1600, None]."""
    return [None if word == "none" else float(word) for word in re.findall(r"none|\d+(?:\.\d+)?", cell.replace(",", ""))]


def values(config: XLConfig) -> dict:
    return {field: value for field, value in config.to_dict().items() if field not in ("_name_or_path", "auto_map")}


def count_parameters(config: XLConfig) -> int:
    """Parameters of the model, each tied one once; nothing is allocated."""
    with torch.device("meta"):
        model = XLForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_readme_names_what_is_there():
    assert sorted(rows_of_readme()) == sorted(rows_of_readme("sizes")) == PUBLISHED_NAMES
    assert len(PUBLISHED_NAMES) == 10
    assert sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name[0] not in "._") == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_loads_and_survives_a_round_trip(name, tmp_path):
    config = XLConfig.from_pretrained(CONFIGS / name)
    assert config.architectures == ["XLForCausalLM"]
    config.save_pretrained(tmp_path)
    for folder in (CONFIGS / name, tmp_path):
        assert values(AutoConfig.from_pretrained(folder)) == values(XLConfig.from_pretrained(folder)) == values(config)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_finds_it_by_name(name, tmp_path):
    config, stored = load_config(name)
    assert values(config) == values(XLConfig.from_pretrained(CONFIGS / name))
    settings = training_settings(stored)
    assert {"max_steps", "batch_size", "learning_rate", "warmup_steps", "weight_decay", "max_grad_norm"} <= stored.keys()
    assert settings.warmup_steps < settings.max_steps / 2  # training shortens a longer warm-up
    assert settings.arguments(tmp_path).adam_beta2 == (0.99 if name == "demo" else 0.999)


@pytest.mark.parametrize("name", NAMES)
def test_has_no_misspelt_field(name):
    """What is no field would be kept as an attribute that nothing reads."""
    known = set(XLConfig().to_dict())
    written = XLConfig.get_config_dict(CONFIGS / name)[0]
    assert set(written) - known - {"architectures", "_commit_hash"} == set()


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_readme_states_its_numbers(name):
    config, stored = load_config(name)
    row = rows_of_readme()[name]
    assert numbers(row["layers"]) == [config.num_hidden_layers]
    assert numbers(row["width"]) == [config.hidden_size] == [config.embedding_size]
    assert numbers(row["heads"]) == [config.num_attention_heads, config.head_dim]
    assert numbers(row["inner"]) == [config.intermediate_size]
    assert numbers(row["segment"]) == [config.segment_len]
    memory = [config.mem_len]
    if config.memory_type == "compressive":
        memory.append(config.compressed_mem_len)
        assert numbers(row["c"]) == [config.compression_rate]
    assert numbers(row["memory"]) == memory
    assert numbers(row["dropout"]) == [config.hidden_dropout, config.attention_dropout]
    assert config.embedding_dropout == config.hidden_dropout
    assert numbers(row["vocabulary"]) == [config.vocab_size]
    assert numbers(row["batch"])[0] == stored["batch_size"]
    columns = ("peak rate", "warm-up", "steps", "clip", "weight decay")
    settings = ("learning_rate", "warmup_steps", "max_steps", "max_grad_norm", "weight_decay")
    row_of_training = rows_of_readme("sizes")[name]
    assert [numbers(row_of_training[column]) for column in columns] == [[stored[setting]] for setting in settings]
    assert config.embedding_scale == config.hidden_size**0.5
    assert numbers(row["parameters"]) == [count_parameters(config)]


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_settings_of_the_evaluation_are_accepted(name):
    cell = rows_of_readme()[name]["evaluation"]
    if cell == "not stated":
        return
    options = ("segment_len", "mem_len", "clamp_len", "attention_window")
    if name.startswith("compressive"):
        options = ("segment_len", "mem_len", "compressed_mem_len")
    values = [None if number is None else int(number) for number in numbers(cell)]
    settings = dict(zip(options, values, strict=True))
    config, _ = load_config(name, **settings)
    assert {field: getattr(config, field) for field in settings} == settings


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_paper(name):
    """Up to the digits that the paper prints."""
    changes = {"num_hidden_layers": LAYERS_COUNTED[name]} if name in LAYERS_COUNTED else {}
    published, unit = PUBLISHED[name]
    assert published <= count_parameters(XLConfig.from_pretrained(CONFIGS / name, **changes)) < published + unit


def test_vocabulary_for_bytes():
    """The README's way to train on bytes, which have more ids than the symbols of enwik8."""
    config = XLConfig.from_pretrained(CONFIGS / "transfo-xl-enwik8-base", vocab_size=259)
    assert config.vocab_size == 259 and config.hidden_size == 512


@pytest.mark.parametrize("name", NAMES)
def test_small_copy_runs_and_learns(name):
    """Its structure at a small size, over a text that leaves the memory and, where there are slots, fills them."""
    config = XLConfig.from_pretrained(CONFIGS / name)
    changes = {
        "vocab_size": 60,
        "hidden_size": 32,
        "embedding_size": 32,
        "embedding_scale": 32**0.5,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "segment_len": 8,
        "mem_len": 8,
        "compressed_mem_len": 4,
        "cutoffs": [20, 30, 50] if config.cutoffs else [],
        "div_val": min(config.div_val, 2),  # 4 would leave the last of four clusters no width
    }
    torch.manual_seed(0)
    model = XLForCausalLM(XLConfig.from_dict({**config.to_dict(), **changes})).train()
    ids = torch.randint(60, (2, 45))
    output = model(input_ids=ids, labels=ids)
    assert (output.aux_loss is not None) == (config.memory_type == "compressive")
    output.loss.backward()
    assert torch.isfinite(output.loss)
    without = [
        key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.isfinite().all()
    ]
    assert not without, f"no finite gradient: {without}"
