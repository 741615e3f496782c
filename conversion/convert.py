"""Foreign checkpoint to model of this package, and back: tensor by tensor, checked, and whole or not at all.

Everything is written into a folder beside the target and renamed at the very end: what fails leaves no target.
"""

import contextlib
import copy
import functools
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.feedforward_xl import OWN_ACTIVATIONS
from modeling_xl.head_xl import tied_weights
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.modeling_xl import XLForCausalLM
from modeling_xl.text import InputError

from .checkpoint_files import open_weights, read_json, write_weights
from .families import FAMILIES
from .family import Family, SourceFields
from .sources import Source, open_source, transformers_fields
from .vocabulary import find_vocabulary, make_tokenizer, read_symbols
from .weight_map import apply_back, apply_forth, check_names, check_precision, check_rules, listed

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SINKS = 4  # for models trained to see everything: much of their attention goes to the first tokens
MAX_SHARD_BYTES = 2 * 1024**3
COMPARED_TOKENS = 64
# Beside the weights, and of use to the result as they are.
COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
)
# What a model keeps of the past; the rest of a config says what it computes.
MEMORY_FIELDS = (
    *("memory_type", "segment_len", "mem_len", "num_sink_tokens", "initial_memory", "bptt_segments"),
    *("compressed_mem_len", "compression_rate", "compression_fn", "compression_dilation", "compression_loss"),
    *("compression_loss_coef", "feature_map", "num_random_features", "redraw_interval"),
)
MEMORY_TENSORS = r".*\.self_attn\.memory\..*"
# Fields that only one position scheme reads.
FIELDS_OF_SCHEMES = {
    "xl": ("clamp_len", "untie_r"),
    "t5": ("relative_attention_num_buckets", "relative_attention_max_distance"),
    "alibi": ("alibi_slopes",),
}


@dataclass(frozen=True)
class Memory:
    """What the result is to keep of the past; None: what the source does, and else the default of `XLConfig`."""

    memory: str | None = None
    mem_len: int | None = None
    segment_len: int | None = None
    sink_tokens: int | None = None


@dataclass
class Report:
    """What was done. difference: the largest between a logit of the result and of the source's own class, in float32; None
    where they were not compared."""

    family: str
    num_parameters: int
    difference: float | None = None
    notes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """A folder to write into, which takes the target's place, new or empty, if nothing fails."""
    path = Path(target).absolute()
    try:
        if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise InputError(f"{path}: exists and is not an empty folder; give a new one")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # the second for names that no folder can have
        raise InputError(f"{target}: no folder can be made there ({error}); give another") from None
    with beside as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        yield folder
        try:
            folder.replace(path)  # also of a folder that is empty
        except OSError as error:
            raise InputError(f"{path}: was filled meanwhile ({error.strerror}); give another folder") from None


def target_config(source: Source, memory: Memory) -> XLConfig:
    """The config of the result: the source's, with the memory that is asked for."""
    try:
        values = source.family.config(source.fields)
    except (TypeError, AttributeError) as error:  # a field of a type that no such config has
        raise InputError.about(source.fields.where, error) from error
    source.fields.check_all_understood()
    if values["num_hidden_layers"] > len(source.names):  # before anything is made for each of them
        raise InputError(f"{source.fields.where}: speaks of {values['num_hidden_layers']} layers, and there are fewer tensors")
    own = values.get("memory_type", "none")
    kind = memory.memory or own
    if kind not in MEMORY_MECHANISMS:
        raise InputError(f"--memory {kind}: is not one of {', '.join(MEMORY_MECHANISMS)}")
    given = {"mem_len": memory.mem_len, "segment_len": memory.segment_len, "num_sink_tokens": memory.sink_tokens}
    given = {name: value for name, value in given.items() if value is not None}
    if kind == "none" and given:
        raise InputError(f"{listed(given)}: mean nothing without a memory; give --memory recurrence, or another")
    if kind != own:
        values = {name: value for name, value in values.items() if name not in MEMORY_FIELDS}
        sees_everything = source.family.has_full_attention and values.get("attention_window") is None
        if sees_everything and kind != "none" and MEMORY_MECHANISMS[kind].uses_sinks:
            values["num_sink_tokens"] = DEFAULT_SINKS
    try:
        return XLConfig(**{**values, "memory_type": kind, **given})
    except Exception as error:  # several classes of error, according to which check of the config failed
        raise InputError.about(source.fields.where, error) from error


def convert(
    source: str | Path,
    target: str | Path,
    *,
    memory: Memory | None = None,
    dtype: str | None = None,
    settings: dict[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    check: bool = True,
    progress: bool = False,
) -> Report:
    """Makes of a foreign checkpoint a model of this package, in the folder `target`, which must be new or empty.

    dtype: one of DTYPES, of the floating-point tensors; None: the source's. check: load the result, and compare its logits
    with those of the source's own class where Transformers has it. Raises InputError for what cannot be converted.
    """
    with new_folder(target) as folder, contextlib.closing(open_source(source, settings)) as opened:
        config = target_config(opened, memory or Memory())
        with torch.device("meta"):
            model = XLForCausalLM(config)
        tied = tied_weights(config) if config.tie_word_embeddings else {}
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
        fresh = [name for name in shapes if ".self_attn.memory." in name]
        rules = opened.family.rules(config, opened.fields, opened.names)
        drops = opened.family.dropped(config)
        check_rules(opened.fields.where, rules, opened.names, drops, shapes.keys() - set(fresh))
        _check_ties(opened.fields.where, opened.family.ties(config), opened.names, opened.read)
        made = apply_forth(opened.fields.where, rules, opened.read, shapes)
        constant = [rule.target for rule in rules if rule.constant is not None]
        tensors = _Stored(chain(made, _fresh_tensors(model, fresh)), dtype, len(shapes), progress, {*fresh, *constant})
        write_weights(folder, iter(tensors), max_shard_bytes)
        config.dtype = tensors.widest
        config.architectures = [XLForCausalLM.__name__]
        config.save_pretrained(folder)
        _copy_companions(opened.folder, folder)
        if opened.family.has_word_vocabulary:
            _convert_vocabulary(opened, folder)
        report = Report(opened.family.name, sum(shape.numel() for shape in shapes.values()), notes=opened.fields.notes)
        if fresh:
            report.notes.append(f"{len(fresh)} tensors of the memory are new and have to be trained: {listed(fresh)}")
        if check:
            theirs = opened.folder if opened.has_class else None
            _check(report, opened.fields, folder, theirs, config, _tolerance(opened.family, config, dtype))
    return report


def convert_back(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    drop_memory: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    check: bool = True,
    progress: bool = False,
) -> Report:
    """Makes of a model of this package a checkpoint of the family `to`, if nothing of it is lost that changes its numbers.

    drop_memory: convert as if memory_type were none: the weights, without what the model keeps of the past.
    """
    family = FAMILIES.get(to)
    if family is None or not family.runs_back:
        raise InputError(f"--to {to}: is not one of {', '.join(name for name, f in FAMILIES.items() if f.runs_back)}")
    path = Path(source)
    own = _own_config(path)
    config = _without_memory(own) if drop_memory else own
    kind = family.model_types[0]
    try:
        # A copy: some classes complete the values that they are given.
        values = copy.deepcopy(family.fields(config))
        foreign = CONFIG_MAPPING[kind].from_dict({"model_type": kind, **values})
        fields = transformers_fields(str(path / "config.json"), foreign)
        again = XLConfig(**{"memory_type": "none", **family.config(fields)})
    except Exception as error:  # several classes of error, according to which check of either config failed
        raise InputError(f"{path}: its config cannot be expressed in {to} ({(error.__cause__ or error)})") from error
    _check_nothing_lost(path, to, config, again)
    if config.hidden_act in OWN_ACTIVATIONS and config.hidden_act in values.values():
        raise InputError(f"{path}: hidden_act={config.hidden_act!r} is known to this package and bloom only")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in XLForCausalLM(config).state_dict().items()}
    rules = family.rules(again, fields, [])
    tied = tied_weights(config) if config.tie_word_embeddings else {}
    drops = [*map(re.escape, tied), *([MEMORY_TENSORS] if drop_memory else [])]
    with new_folder(target) as folder, contextlib.closing(open_weights(path)) as tensors:
        check_names(str(path), tensors.names(), [rule.target for rule in rules], drops)
        _check_ties(str(path), tied, tensors.names(), tensors.read)

        def read(name: str) -> torch.Tensor:
            tensor = tensors.read(name)
            check_precision(str(path), [name], [tensor])
            if tensor.shape != shapes[name]:
                raise InputError(f"{path}: {name} has shape {list(tensor.shape)}; its config asks for {list(shapes[name])}")
            return tensor

        count = len({name for rule in rules for name in rule.sources})
        stored = _Stored(apply_back(str(path), rules, read), dtype, count, progress)
        write_weights(folder, iter(stored), max_shard_bytes)
        foreign.dtype = stored.widest
        foreign.architectures = foreign.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
        foreign.save_pretrained(folder)
        _copy_companions(path, folder)
        report = Report(to, stored.num_parameters, notes=fields.notes)
        if check:
            _check(report, fields, path, folder, config, _tolerance(family, config, dtype))
    return report


class _Stored:
    """Tensors as they are to be written, one at a time, with a progress bar; it knows afterwards what they were.

    dtype: of DTYPES; None: each keeps its own. made_up: names of those that came from no file, and take the others' dtype.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: str | None,
        count: int,
        progress: bool,
        made_up: Collection[str] = (),
    ):
        self.tensors = tqdm(tensors, total=count, desc="convert", unit="tensor", disable=not progress)
        self.dtype = None if dtype is None else DTYPES[dtype]
        self.made_up = made_up
        self.found: set[torch.dtype] = set()
        self.num_parameters = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            if tensor.is_floating_point():
                own = self.widest if name in self.made_up and self.found else tensor.dtype
                stored = tensor.to(self.dtype or own)
                if bool((stored.isfinite() != tensor.isfinite()).any()):
                    raise InputError(f"{name} holds numbers too large for {stored.dtype}; choose bfloat16 or float32")
                tensor = stored
                self.found.add(tensor.dtype)
            self.num_parameters += tensor.numel()
            yield name, tensor

    @property
    def widest(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, self.found)


def _fresh_tensors(model: XLForCausalLM, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a memory mechanism brings with it and no source has, as a new model would have it."""
    made: dict[str, dict[str, torch.Tensor]] = {}
    for name in names:
        layer, within = name.split(".self_attn.memory.")
        if layer not in made:
            index = int(layer.rsplit(".", 1)[1])
            mechanism = MEMORY_MECHANISMS[model.config.layer_memory_types[index]](model.config, index)
            for module in mechanism.modules():
                model._init_weights(module)
            made = {layer: mechanism.state_dict()}
        yield name, made[layer][within]


def _copy_companions(source: Path, folder: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _convert_vocabulary(source: Source, folder: Path) -> None:
    """A tokenizer of the Transformer-XL vocabulary that lies beside the weights, if one does."""
    path = find_vocabulary(source.folder)
    if path is None:
        source.fields.notes.append(f"no vocabulary lies in {source.folder}: the result has no tokenizer")
        return
    vocabulary, size = read_symbols(path), source.fields("vocab_size")
    if len(vocabulary.symbols) != size:
        raise InputError(
            f"{path}: has {len(vocabulary.symbols)} symbols and the model {size}; put the vocabulary there that the model was "
            "trained with, or none"
        )
    make_tokenizer(vocabulary).save_pretrained(folder)


def _own_config(path: Path) -> XLConfig:
    values = read_json(path / "config.json")
    if values.get("model_type") != XLConfig.model_type:
        raise InputError(f"{path}: is of model_type {values.get('model_type')!r}; --to needs a model of this package, 'xl'")
    try:
        return XLConfig.from_dict(values)
    except Exception as error:  # several classes of error, according to which check of the config failed
        raise InputError.about(path / "config.json", error) from error


def _without_memory(config: XLConfig) -> XLConfig:
    values = {name: value for name, value in config.to_dict().items() if name not in MEMORY_FIELDS}
    return XLConfig.from_dict({**values, "memory_type": "none"})


def _check_nothing_lost(path: Path, to: str, config: XLConfig, again: XLConfig) -> None:
    """again: what the foreign config would be converted to. Fields that change no number may differ."""
    if config.layer_memory_types != again.layer_memory_types:
        mend = "" if again.memory_type != "none" else "; --memory none converts the weights alone"
        raise InputError(f"{path}: memory_type={config.memory_type!r} has no counterpart in {to}{mend}")
    unused = {"bptt_segments", "use_cache"}
    if again.memory_type == "none":
        unused.update(MEMORY_FIELDS)
    for scheme, names in FIELDS_OF_SCHEMES.items():
        if scheme != config.position_type:
            unused.update(names)
    lost = [
        f"{name}={getattr(config, name)!r}"
        for name in XLConfig.__annotations__
        if name not in unused and _comparable(config, name) != _comparable(again, name)
    ]
    if lost:
        raise InputError(f"{path}: {listed(lost)} cannot be expressed in {to}; the model cannot be converted without loss")


def _comparable(config: XLConfig, name: str) -> Any:
    """A field's value, the same for two ways to say the same."""
    value = getattr(config, name)
    if name == "tie_projs" and value is None:
        return [config.tie_word_embeddings] * (len(config.cutoffs) + 1)
    if name == "rope_parameters" and value is not None:
        return {"partial_rotary_factor": 1.0, **value}
    return value


def _check_ties(where: str, ties: Mapping[str, str], names: Collection[str], read: Callable[[str], torch.Tensor]) -> None:
    """A tensor that is there a second time, for it is tied, must be equal to its partner: only that is converted."""
    for name, partner in ties.items():
        if name in names and not torch.equal(read(name), read(partner)):
            raise InputError(
                f"{where}: says that {name} is tied to {partner}, and the file holds two that differ; set "
                "tie_word_embeddings to false if both are meant"
            )


def _tolerance(family: Family, config: XLConfig, dtype: str | None) -> float:
    """Weights that were rounded may give any other numbers."""
    return math.inf if dtype in ("bfloat16", "float16") else family.tolerance(config)


def _check(report: Report, fields: SourceFields, ours: Path, theirs: Path | None, config: XLConfig, tolerance: float) -> None:
    """Loads the model of this package, and compares it with the other where Transformers has its class.

    Only the first segment is compared: in it a memory changes nothing yet.
    """
    length = min(COMPARED_TOKENS, config.max_position_embeddings)
    if config.uses_grid and config.segment_len is not None:
        length = min(length, config.segment_len)
    ids = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    found = _logits(ours, ids, config=config)
    if not bool(torch.isfinite(found).all()):
        raise InputError(f"{fields.where}: its weights give logits that are not finite, being damaged or too large")
    why = fields.not_compared
    if theirs is None:
        why = "Transformers has no class of the source"
    elif "linear" in config.layer_memory_types:
        why = "linear attention is another function than the source's softmax"
    if theirs is None or why is not None:
        report.notes.append(f"not compared: {why}")
        return
    expected = _logits(theirs, ids)
    report.difference = float((found - expected).abs().max())
    limit = tolerance * float(expected.abs().max()) + 1e-6
    if not report.difference <= limit:
        raise RuntimeError(
            f"logits differ by up to {report.difference:.2g} from those of the other model, where {limit:.2g} is the most that "
            "rounding explains; nothing was written"
        )


def _logits(folder: Path, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """In float32, by the class that the folder's config names."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    if problems := {name: found for name, found in info.items() if found and name != "unexpected_keys"}:
        raise RuntimeError(f"{folder.name} does not load whole: {problems}; nothing was written")
    with torch.no_grad():
        return model.eval()(ids).logits
