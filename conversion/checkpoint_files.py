"""Tensors of a checkpoint, one at a time: read from safetensors and torch files, written to safetensors shards."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from modeling_xl.text import InputError

from .restricted_pickle import LazyTensor, RestrictedFile

# In order of preference; each may lie in shards, which NAME.index.json lists.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


class TensorFiles(Protocol):
    """Where the tensors of a checkpoint come from."""

    where: str

    def names(self) -> list[str]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def close(self) -> None: ...


class SafetensorsFiles:
    """Tensors of safetensors files. Files are mapped: what is not asked for is not read."""

    def __init__(self, where: str, paths: Iterable[Path]):
        self.where = where
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        for path in paths:
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self.close()
                raise InputError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error
            self._handles |= dict.fromkeys(handle.keys(), handle)

    def names(self) -> list[str]:
        return sorted(self._handles)

    def read(self, name: str) -> torch.Tensor:
        return self._handles[name].get_tensor(name).clone()  # read twice it would be one tensor, which no file may hold twice

    def close(self) -> None:
        self._stack.close()


class TorchFiles:
    """Tensors of torch files that hold a state dict (a mapping of names to tensors)."""

    def __init__(self, where: str, paths: Iterable[Path]):
        self.where = where
        self._stack = ExitStack()
        self._tensors: dict[str, LazyTensor] = {}
        for path in paths:
            root = self._stack.enter_context(RestrictedFile(path)).root
            if not isinstance(root, dict) or not all(
                isinstance(name, str) and isinstance(value, LazyTensor) for name, value in root.items()
            ):
                self.close()
                raise InputError(f"{path}: holds no mapping of names to tensors, which a file of weights must")
            self._tensors |= root

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].load()

    def close(self) -> None:
        self._stack.close()


def open_weights(folder: Path) -> TensorFiles:
    """The weights in a folder as Transformers writes it, in one file or in shards."""
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        paths = [folder / name]
        if not paths[0].is_file():
            if not index.is_file():
                continue
            paths = sorted({folder / Path(shard).name for shard in _weight_map(index).values()})
        if missing := [path.name for path in paths if not path.is_file()]:
            raise InputError(
                f"{folder}: {', '.join(missing)} missing, which {index.name} names; fetch the rest of the checkpoint"
            )
        return (SafetensorsFiles if name.endswith("safetensors") else TorchFiles)(str(folder), paths)
    raise InputError(f"{folder}: holds no weights; {' or '.join(WEIGHT_FILES)} (or its shards with their index) must lie there")


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    found = content.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(shard, str) for shard in found.values()):
        raise InputError(f"{index}: has no weight_map of names to files, as an index of shards must")
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold one JSON object, got {type(values).__name__}")
    return values


def write_weights(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int) -> None:
    """Writes `model.safetensors`, or shards of at most `max_shard_bytes` (of a single tensor, if it is larger) and their
    index; in memory is one shard at a time."""
    held: dict[str, torch.Tensor] = {}
    size = total = 0
    shards: list[list[str]] = []

    def write() -> None:
        save_file(held, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > max_shard_bytes:
            write()
            size = 0
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
