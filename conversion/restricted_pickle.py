"""Reads pickled files of the original Transformer-XL code without running code from them: tensors, containers and stubs.

It is no general unpickler: a file may name only what the tables here list, and every class of a model or of a
vocabulary becomes an inert stub that keeps what the file says of it. What the listed names stand for is written here;
nothing is imported or looked up for a file.

Sources: CPython's pickletools (the opcodes); torch.serialization (the zip container of torch 1.6 and later, and the
older one of consecutive pickles).
"""

import io
import math
import os
import pickle
import pickletools
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from modeling_xl.text import InputError

# The token arrays of a WikiText-103 cache.pkl, 0.9 GiB, lie inside the pickle.
MAX_PICKLE_BYTES = 2 << 30
MAX_DIMENSIONS = 64
MAX_TUPLE_DEPTH = 200
ZIP_START = b"PK\x03\x04"
OLD_MAGIC = 0x1950A86A20F9469CFC6C
OLD_VERSION = 1001
MEND = "get the file again, or save it again with the code that made it"

ITEM_TYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
ORIGINAL_MODULES = (
    "adaptive_softmax",
    "data_parallel",
    "data_utils",
    "log_uniform_sampler",
    "mem_transformer",
    "proj_adaptive_softmax",
    "vocabulary",
)
STUB_MODULES = {
    *ORIGINAL_MODULES,
    *(f"utils.{module}" for module in ORIGINAL_MODULES),
    "torch.nn.parameter",
}
STUB_PACKAGES = (
    "torch.nn.modules.",
    "torch.nn.parallel.",
    "torch.nn.backends.",  # a module of torch before 1.2 names its backend
    "transformers.",  # the former tokenizer saved all its attributes, its Moses rules included
    "pytorch_transformers.",
    "pytorch_pretrained_bert.",
    "sacremoses.",
)
NUMPY_NAMES = ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
STUB_NAMES = {
    "collections.defaultdict",
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.{name}" for core in ("core", "_core") for name in NUMPY_NAMES),
    "re._compile",
    "tokenizers.AddedToken",
    "torch.device",
}


class RefusedGlobalError(InputError):
    """The file names something that no such file needs."""


class _Inert:
    """What a file gets hold of besides stubs and containers; the opcode BUILD cannot change it."""

    def __setstate__(self, state: object) -> NoReturn:
        raise pickle.UnpicklingError(f"state for a {type(self).__name__.strip('_')}, which has none")


@dataclass(frozen=True)
class _Function(_Inert):
    """A name that a file may call. The opcode BUILD could set the defaults of a plain function."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


@dataclass(frozen=True)
class _StorageType(_Inert):
    dtype: torch.dtype


class _Object(_Inert):
    """`object`, which the protocols 0 and 1 name as the base of a class."""


class StateOrderedDict(OrderedDict):
    """An OrderedDict; `state` is what the file would set on it (torch: the version of every module of a state dict)."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class Stub:
    """Stands for an object of a class that is not loaded; `vars(stub)` is the object's `__dict__`.

    `module` and `name` of the class are those in the file; `args` and `kwargs` are what it was made with, `state` what
    the file set on it, `items` and `entries` what it appended and put under keys.
    """

    __slots__ = ("__dict__", "args", "entries", "items", "kwargs", "state")
    module: str
    name: str
    args: tuple
    kwargs: dict
    items: list
    entries: dict
    state: object

    def __new__(cls, *args: Any, **kwargs: Any) -> "Stub":
        stub = super().__new__(cls)
        stub.args, stub.kwargs = args, kwargs
        stub.items, stub.entries, stub.state = [], {}, None
        return stub

    def __repr__(self) -> str:
        return f"<stub of {type(self).module}.{type(self).name}>"

    def __setstate__(self, state: object) -> None:
        self.state = state
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):  # a pair: what slots hold is second
            if isinstance(part, dict):
                self._set_attributes(part)

    def _set_attributes(self, attributes: dict) -> None:
        for key in attributes:
            if not isinstance(key, str) or (key.startswith("__") and key.endswith("__")):
                raise pickle.UnpicklingError(f"{_shown(key)} is no attribute to set")
        self.__dict__.update(attributes)

    def append(self, value: object) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)

    add = append

    def __setitem__(self, key: Any, value: object) -> None:
        self.entries[key] = value


def is_stub(value: object, name: str) -> bool:
    """Whether `value` stands for an object of the class `name`, e.g. "MemTransformerLM", of any module."""
    return isinstance(value, Stub) and type(value).name == name


class _Container:
    """Where the bytes of the storages lie."""

    def __init__(self, path: Path):
        self.path = path

    def declare(self, key: str, dtype: torch.dtype, num_items: int) -> None:
        """Takes note that the pickle names the storage; raises InputError where the container cannot hold it."""
        raise NotImplementedError

    def read(self, key: str, start: int, num_bytes: int) -> bytes:
        raise NotImplementedError


@dataclass(frozen=True)
class Storage(_Inert):
    """`num_items` items of one type, from the item `start` on of what the container holds under `key`."""

    container: _Container
    key: str
    dtype: torch.dtype
    num_items: int
    start: int = 0

    def read(self, offset: int, num_items: int) -> bytearray:
        size = self.dtype.itemsize
        with _input_errors(self.container.path):
            content = bytearray(self.container.read(self.key, (self.start + offset) * size, num_items * size))
        if len(content) != num_items * size:
            raise InputError(f"{self.container.path}: ends inside the storage {_shown(self.key)}; {MEND}")
        return content


@dataclass(frozen=True)
class LazyTensor(_Inert):
    """A tensor whose bytes are read by `load`. Its place in the storage is checked; `offset` and `stride` count items.

    One parameter in two places of the file is one object (`is`); equal (`==`) tensors lie on the same bytes of the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: Storage

    def load(self) -> torch.Tensor:
        """The tensor, contiguous, on the CPU; raises InputError where the file cannot be read any more."""
        extent = _extent(self.shape, self.stride)
        if not extent:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(self.storage.read(self.offset, extent), dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride).contiguous()


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The number of items from the first to the last of a tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_counts(values: object) -> bool:
    return isinstance(values, tuple) and len(values) <= MAX_DIMENSIONS and all(map(_is_count, values))


def _tensor(storage: object, offset: Any, shape: Any, stride: Any) -> LazyTensor:
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    if not (_is_count(offset) and _are_counts(shape) and _are_counts(stride) and len(shape) == len(stride)):
        raise pickle.UnpicklingError("a tensor whose shape, stride and offset are not numbers that fit each other")
    # More items than lie there would be a view that repeats them, small here and of any size once it is copied.
    if offset + _extent(shape, stride) > storage.num_items or math.prod(shape) > storage.num_items:
        raise pickle.UnpicklingError(
            f"a tensor of shape {list(shape)} reaches past the {storage.num_items} items of its storage"
        )
    return LazyTensor(storage.dtype, shape, stride, offset, storage)


def _rebuild_tensor_v2(
    storage: object, offset: object, shape: object, stride: object, grad: object, hooks: object, bits: object = None
) -> LazyTensor:
    if hooks or bits:
        raise pickle.UnpicklingError("a tensor with hooks, or stored negated or conjugated")
    return _tensor(storage, offset, shape, stride)


def _rebuild_parameter(tensor: object, requires_grad: object = True, hooks: object = None) -> LazyTensor:
    if not isinstance(tensor, LazyTensor) or hooks:
        raise pickle.UnpicklingError("a parameter that is no tensor, or has hooks")
    return tensor


def _reconstruct(stub_class: object, base: object, state: object) -> Stub:
    if not _is_stub_class(stub_class) or base is not OBJECT or state is not None:
        raise pickle.UnpicklingError("an object whose base is not `object`")
    return stub_class()  # type: ignore[operator]


def _is_stub_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Stub)


def _container_of(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """`make` for the arguments that a file has for it: none, or one built-in container."""

    def checked(content: Any = ()) -> Any:
        if type(content) not in (list, tuple, dict):
            raise pickle.UnpicklingError("a container made of something that is none")
        return make(content)

    return checked


def _size(lengths: object) -> object:
    if not _are_counts(lengths):
        raise pickle.UnpicklingError("a shape that is not made of numbers")
    return lengths


def _encode(text: object, encoding: object) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes that are not written as Latin-1 text")
    return text.encode("latin-1")


def _empty_bytes() -> bytes:
    return b""


OBJECT = _Object()
GLOBALS: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): _Function(_container_of(StateOrderedDict)),
    ("collections", "Counter"): _Function(_container_of(dict)),
    # Up to protocol 2 there are no opcodes for bytes.
    ("_codecs", "encode"): _Function(_encode),
    ("torch._utils", "_rebuild_tensor"): _Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_rebuild_tensor_v2),
    ("torch._utils", "_rebuild_parameter"): _Function(_rebuild_parameter),
    ("torch.nn.parameter", "Parameter"): _Function(_rebuild_parameter),
    ("torch", "Size"): _Function(_size),
    ("torch.storage", "UntypedStorage"): _StorageType(torch.uint8),
}
for _module in ("builtins", "__builtin__"):
    GLOBALS[_module, "set"] = _Function(_container_of(set))
    GLOBALS[_module, "frozenset"] = _Function(_container_of(frozenset))
    GLOBALS[_module, "bytes"] = _Function(_empty_bytes)
    GLOBALS[_module, "object"] = OBJECT
for _module in ("copyreg", "copy_reg"):
    GLOBALS[_module, "_reconstructor"] = _Function(_reconstruct)
for _module in ("torch", "torch.cuda"):
    GLOBALS.update({(_module, name): _StorageType(dtype) for name, dtype in ITEM_TYPES.items()})


class _Unpickler(pickle.Unpickler):
    """`container` is None where the pickle cannot name storages."""

    def __init__(self, file: BinaryIO, path: Path, container: _Container | None):
        # Python 2 wrote text and bytes alike: text comes out right, and bytes stay different from each other.
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self.path = path
        self.container = container
        self.stub_classes: dict[tuple[str, str], type[Stub]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        key = (module, name)
        if key in GLOBALS:
            return GLOBALS[key]
        is_known = module in STUB_MODULES or module.startswith(STUB_PACKAGES) or f"{module}.{name}" in STUB_NAMES
        if not is_known or not name.isidentifier():
            raise RefusedGlobalError(
                f"{self.path}: names {_shown(f'{module}.{name}')}, and a model or vocabulary holds only tensors, plain "
                "containers and classes of the original code; nothing of the file was run. Do not load it by other means "
                "unless you trust who made it; ask for a file of the weights alone"
            )
        if key not in self.stub_classes:
            self.stub_classes[key] = type(name, (Stub,), {"__slots__": (), "module": module, "name": name})
        return self.stub_classes[key]

    def persistent_load(self, pid: Any, /) -> Any:
        if self.container is None:
            raise pickle.UnpicklingError("a reference to data outside the pickle")
        if not isinstance(pid, tuple) or not pid:
            raise pickle.UnpicklingError("a reference that is no tuple")
        if pid[0] == "module" and len(pid) == 4 and _is_stub_class(pid[1]):
            return pid[1]  # the two others are the source code of the class
        if pid[0] == "storage" and len(pid) in (5, 6) and isinstance(pid[1], _StorageType):
            return self._storage(self.container, *pid[1:])
        raise pickle.UnpicklingError("a reference to something that is neither a storage nor a class")

    def _storage(
        self, container: _Container, kind: _StorageType, key: Any, location: object, num_items: Any, view: Any = None
    ) -> Storage:
        if not isinstance(key, str) or not _is_count(num_items):
            raise pickle.UnpicklingError("a storage without a name or a size")
        container.declare(key, kind.dtype, num_items)
        if view is None:
            return Storage(container, key, kind.dtype, num_items)
        if not (isinstance(view, tuple) and len(view) == 3 and _are_counts(view[1:]) and view[1] + view[2] <= num_items):
            raise pickle.UnpicklingError("a part of a storage that reaches past it")
        return Storage(container, key, kind.dtype, num_items=view[2], start=view[1])


def _shown(value: object) -> str:
    """A short one-line form of something that a file says."""
    text = value if isinstance(value, str) else f"a {type(value).__name__}"
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


@contextmanager
def _input_errors(path: Path) -> Iterator[None]:
    """A broken file can make the unpickler, zipfile and our own functions raise nearly anything."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; name the file in it") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: cannot be read ({type(error).__name__}: {reason}); {MEND}") from error


def _check_opcodes(file: BinaryIO) -> None:
    """Reads one pickle to its end and refuses what the C unpickler would do before it asks us."""
    start = file.tell()
    depths = _TupleDepths()
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if opcode.name in ("EXT1", "EXT2", "EXT4"):
            raise pickle.UnpicklingError("a code of the extension registry in place of a name")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > count:
            raise pickle.UnpicklingError("a memo number out of order")  # the memo is made as long as the number says
        if file.tell() - start > MAX_PICKLE_BYTES:
            raise pickle.UnpicklingError(f"a pickle longer than {MAX_PICKLE_BYTES} bytes")
        depths.follow(opcode, argument)


class _TupleDepths:
    """How deep tuples lie in tuples: hashing, for a key of a dict, follows them, and very deep ones end the process.

    Only opcodes make tuples; no function that a file may call makes one.
    """

    MARK = -1

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.memo: dict[int, int] = {}

    def follow(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        name = opcode.name
        if name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name == "MARK":
            self.stack.append(self.MARK)
        elif opcode.stack_before:
            self._replace(opcode)
        else:
            self.stack += [0] * len(opcode.stack_after)

    def _replace(self, opcode: pickletools.OpcodeInfo) -> None:
        taken, below = [], opcode.stack_before
        if pickletools.markobject in below:
            while (depth := self.stack.pop()) != self.MARK:
                taken.append(depth)
            below = below[: below.index(pickletools.markobject)]
        taken += [self.stack.pop() for _ in below]
        depth = max(taken, default=0) + opcode.name.startswith("TUPLE")
        if depth > MAX_TUPLE_DEPTH:
            raise pickle.UnpicklingError(f"tuples in tuples, more than {MAX_TUPLE_DEPTH} deep")
        self.stack += [depth] * len(opcode.stack_after)


def _load(file: BinaryIO, path: Path, container: _Container | None = None) -> Any:
    """The object of the pickle that begins here; the file is then at its end."""
    start = file.tell()
    _check_opcodes(file)
    end = file.tell()
    file.seek(start)
    value = _Unpickler(file, path, container).load()
    file.seek(end)
    return value


def _check_byte_order(is_little: bool) -> None:
    if not is_little or sys.byteorder != "little":
        raise pickle.UnpicklingError("numbers are in big-endian order in the file or on this machine")


class _ZipContainer(_Container):
    def __init__(self, path: Path, file: BinaryIO):
        super().__init__(path)
        self.zip = zipfile.ZipFile(file)
        self.members = {member.filename: member for member in self.zip.infolist()}
        if len(self.members) != len(self.zip.infolist()):
            raise zipfile.BadZipFile("two members of one name")
        roots = [name.partition("/")[0] for name in self.members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise zipfile.BadZipFile(f"{len(roots)} members `<name>/data.pkl` where torch writes one")
        self.root = roots[0]
        self.types: dict[str, torch.dtype] = {}

    def read_object(self) -> Any:
        byte_order = self.members.get(f"{self.root}/byteorder")
        _check_byte_order(byte_order is None or (byte_order.file_size == 6 and self.zip.read(byte_order) == b"little"))
        member = self.members[f"{self.root}/data.pkl"]
        if member.file_size > MAX_PICKLE_BYTES:
            raise pickle.UnpicklingError(f"a pickle longer than {MAX_PICKLE_BYTES} bytes")
        file = io.BytesIO(self.zip.read(member))
        value = _load(file, self.path, self)
        if file.read(1):
            raise pickle.UnpicklingError("more data after the pickle")
        return value

    def declare(self, key: str, dtype: torch.dtype, num_items: int) -> None:
        member = self.members.get(f"{self.root}/data/{key}")
        if member is None:
            raise InputError(f"{self.path}: the storage {_shown(key)} is missing from the file; {MEND}")
        if self.types.setdefault(key, dtype) != dtype:
            raise pickle.UnpicklingError(f"the storage {_shown(key)} has two types")
        if member.file_size != num_items * dtype.itemsize:
            raise pickle.UnpicklingError(f"the storage {_shown(key)} holds {member.file_size} bytes for {num_items} of {dtype}")

    def read(self, key: str, start: int, num_bytes: int) -> bytes:
        with self.zip.open(self.members[f"{self.root}/data/{key}"]) as file:
            file.seek(start)
            return file.read(num_bytes)


class _OldContainer(_Container):
    """The file is after the magic number."""

    def __init__(self, path: Path, file: BinaryIO):
        super().__init__(path)
        self.file = file
        self.declared: dict[str, tuple[torch.dtype, int]] = {}
        self.places: dict[str, int] = {}

    def read_object(self) -> Any:
        version, machine = _load(self.file, self.path), _load(self.file, self.path)
        if version != OLD_VERSION or not isinstance(machine, dict):
            raise pickle.UnpicklingError("not the version of torch's older container that is known")
        _check_byte_order(machine.get("little_endian") is True)
        value = _load(self.file, self.path, self)
        keys = _load(self.file, self.path)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise pickle.UnpicklingError("no list of storages after the object")
        missing, unknown = self.declared.keys() - set(keys), set(keys) - self.declared.keys()
        if missing or unknown or len(set(keys)) != len(keys):
            raise InputError(f"{self.path}: {len(missing)} storage(s) are missing, {len(unknown)} belong to no tensor; {MEND}")
        self._find_places(keys)
        return value

    def _find_places(self, keys: list[str]) -> None:
        size = os.fstat(self.file.fileno()).st_size
        for key in keys:
            dtype, num_items = self.declared[key]
            (found,) = struct.unpack("<q", self.file.read(8))
            if found != num_items:
                raise pickle.UnpicklingError(f"the storage {_shown(key)} holds {found} items, not {num_items}")
            self.places[key] = self.file.tell()
            end = self.places[key] + num_items * dtype.itemsize
            if end > size:
                raise InputError(f"{self.path}: ends inside the storage {_shown(key)}; {MEND}")
            self.file.seek(end)
        if self.file.tell() != size:
            raise pickle.UnpicklingError("more data after the storages")

    def declare(self, key: str, dtype: torch.dtype, num_items: int) -> None:
        if self.declared.setdefault(key, (dtype, num_items)) != (dtype, num_items):
            raise pickle.UnpicklingError(f"the storage {_shown(key)} has two types or sizes")

    def read(self, key: str, start: int, num_bytes: int) -> bytes:
        self.file.seek(self.places[key] + start)
        return self.file.read(num_bytes)


class RestrictedFile:
    """A pickled file, open: `root` is its object, made of stubs, plain containers and `LazyTensor`s.

    The tensors read from the file, so it stays open until `close`, or the end of the `with` statement. Raises
    InputError where the file is missing, broken, of no known container, or names what it has no need to name.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with _input_errors(self.path):
            self._file = self.path.open("rb")
            try:
                self.root = self._read()
            except BaseException:
                self._file.close()
                raise

    def _read(self) -> Any:
        if self._file.read(len(ZIP_START)) == ZIP_START:
            return _ZipContainer(self.path, self._file).read_object()
        if not self._file.tell():
            raise InputError(f"{self.path}: the file is empty; {MEND}")
        self._file.seek(0)
        value = _load(self._file, self.path)
        if type(value) is int and value == OLD_MAGIC:
            return _OldContainer(self.path, self._file).read_object()
        if self._file.read(1):
            raise pickle.UnpicklingError("more data after the pickle")
        return value

    def close(self) -> None:
        """Closes the file; tensors not yet loaded are lost."""
        self._file.close()

    def __enter__(self) -> "RestrictedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
