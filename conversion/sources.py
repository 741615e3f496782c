"""Which family a checkpoint is of, its config and its tensors: recognised by its files, none of which is run."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError
from modeling_xl.transfo_xl_loader import TransfoXLConfig

from .checkpoint_files import TensorFiles, open_weights, read_json
from .families import BY_FILES, BY_MODEL_TYPE
from .family import Family, SourceFields


@dataclass
class Source:
    """A checkpoint that was recognised.

    folder: where files that go with it lie. names: as the family's rules call a tensor -> as the file does. has_class:
    whether Transformers has the class that the checkpoint is of.
    """

    family: Family
    fields: SourceFields
    tensors: TensorFiles
    folder: Path
    names: dict[str, str]
    has_class: bool = False

    def read(self, name: str) -> torch.Tensor:
        return self.tensors.read(self.names[name])

    def close(self) -> None:
        self.tensors.close()


def open_source(source: str | Path, settings: dict[str, Any] | None = None) -> Source:
    """Recognises a folder, a file, or a repository of the Hub. settings: fields that the files do not show."""
    path = Path(source)
    found = {family.name: family.find(path) for family in BY_FILES}
    if not path.exists() and not any(found.values()):
        path = _download(str(source))
    config = path / "config.json"
    beside = read_json(config) if path.is_dir() and config.is_file() else {}
    kind = beside.get("model_type")
    if kind is not None:
        if not isinstance(kind, str):
            raise InputError(f"{config}: model_type {kind!r} must be a string")
        if kind == XLConfig.model_type:
            raise InputError(f"{path}: is a model of this package already; --to FAMILY makes one of another family of it")
        if kind not in BY_MODEL_TYPE:
            raise InputError(f"{config}: model_type {kind!r} is of no family known here; known are {', '.join(BY_MODEL_TYPE)}")
        given = settings or {}
        for name in beside.keys() & given.keys():
            if beside[name] != given[name]:
                raise InputError(f"{config}: says {name}={beside[name]!r}, and the settings {given[name]!r}; correct one")
        return _open_folder(path, BY_MODEL_TYPE[kind], beside | given)
    for family in BY_FILES:
        file = found[family.name]
        if file is not None:
            config = file.parent / "config.json"
            given = (read_json(config) if config.is_file() else {}) | (settings or {})
            tensors = family.open(file)
            try:
                fields = family.joined(tensors, given)
            except BaseException:
                tensors.close()
                raise
            return Source(family, fields, tensors, file.parent, _names(tensors))
    raise InputError(
        f"{path}: no checkpoint of a known family; give a folder with config.json and weights, a model.pt or state_dict.pt of "
        "the original PyTorch code, or the folder or prefix of a TensorFlow checkpoint (model.ckpt-N)"
    )


def transformers_fields(where: str, config: PreTrainedConfig) -> SourceFields:
    """The fields of a config that Transformers has read, whatever its file called them, with the defaults of its class."""
    return SourceFields(where, config.to_dict(), type(config)().to_dict())


def _open_folder(folder: Path, family: Family, values: dict[str, Any]) -> Source:
    where, kind = str(folder / "config.json"), values["model_type"]
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # several classes of error, according to which check of the config failed
        raise InputError.about(where, error) from error
    tensors = open_weights(folder)
    has_class = kind != TransfoXLConfig.model_type
    return Source(family, transformers_fields(where, config), tensors, folder, _names(tensors, family.base_prefix), has_class)


def _names(tensors: TensorFiles, prefix: str = "") -> dict[str, str]:
    """Names with the prefix that a model with a head has, and as they are."""
    names: Iterable[str] = tensors.names()
    if any(name.startswith(prefix) for name in names):
        prefix = ""
    return {f"{prefix}{name}": name for name in names}


def _download(repository: str) -> Path:
    patterns = ["*.json", "*.safetensors", "*.bin", "*.pkl", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{repository}: no such file or folder, and no repository of the Hub could be fetched ({reason})"
        ) from error
