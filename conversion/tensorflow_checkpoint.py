"""Reads the variables of a TensorFlow checkpoint (`PREFIX.index` and `PREFIX.data-0000i-of-0000n`), without TensorFlow.

Not a reader of TensorFlow's models or graphs: it runs nothing and knows only numbers, their names and their shapes. It
is here because no light, maintained package reads this format.

The format is the "tensor bundle" of TensorFlow's tensor_bundle.proto and tensor_bundle.cc (Saver V2). The index is a
LevelDB table (LevelDB's table_format.md) from names to protobuf entries; an entry says where in a data file, also
called a shard, the variable's plain little-endian bytes lie.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PureWindowsPath

import numpy as np
import torch

from modeling_xl.text import InputError

FOOTER_SIZE = 48
MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
BLOCK_TRAILER_SIZE = 5  # the compression type, and a checksum of the block and that type
# A key may repeat the start of the one before, so that without a limit a small file could ask for any amount of memory.
MAX_KEY_SIZE = 4096
# The checksum runs at some ten megabytes a second here: too slow for the tables of a large model.
MAX_CHECKED_SIZE = 2**20
# The key of a part of a partitioned variable starts with this byte, which no variable's name may hold.
SLICE_KEY = b"\0"

# By their number in TensorFlow's types.proto.
DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}


class TensorFlowCheckpoint:
    """The variables of the checkpoint `prefix`, e.g. `run/model.ckpt-0`, each read from disk when it is asked for.

    Raises InputError for an index that is missing or damaged; for what is wrong with one variable, when it is read.
    """

    def __init__(self, prefix: str | Path):
        self._prefix = prefix
        self._index = _index_of(prefix)
        if not os.path.isfile(self._index):
            raise _missing_index(prefix)
        with _open(self._index) as file:
            entries = dict(_Table(file, self._index).entries())
        self._num_shards = self._read_header(entries.pop(b"", None))
        self._entries = {
            self._decode(key): _Entry.parse(value, self._index)
            for key, value in entries.items()
            if not key.startswith(SLICE_KEY)
        }

    def names(self) -> list[str]:
        """All variables, sorted; an optimizer's are among them."""
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        """The variable in its stored dtype. The checksum is verified up to 1 MiB."""
        entry = self._entry(name)
        dtype = self._checked_dtype(name, entry)
        path = Path(f"{self._prefix}.data-{entry.shard:05d}-of-{self._num_shards:05d}")
        raw = np.frombuffer(_read_data(path, name, entry), np.uint8)
        return torch.from_numpy(raw).view(dtype).reshape(entry.shape)

    def _read_header(self, header: bytes | None) -> int:
        if header is None:
            raise _damaged(self._index, "it has no header")
        message = _Message(header, self._index)
        if message.number(2) != 0:
            raise InputError(
                f"{self._index}: written on a big-endian machine; only little-endian checkpoints are read; "
                "load it in TensorFlow and save it on a little-endian machine"
            )
        if message.number(1) == 0:
            raise _damaged(self._index, "its header counts no data file")
        return message.number(1)

    def _decode(self, key: bytes) -> str:
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise _damaged(self._index, f"the name {key!r} is not UTF-8") from None

    def _entry(self, name: str) -> "_Entry":
        if name not in self._entries:
            raise InputError(f"{self._index}: holds no variable {name!r}; ask for one of its {len(self._entries)} names")
        return self._entries[name]

    def _checked_dtype(self, name: str, entry: "_Entry") -> torch.dtype:
        if entry.is_sliced:
            raise InputError(
                f"{self._index}: the variable {name!r} is partitioned; only whole variables are read; "
                "load it in TensorFlow without a partitioner and save it again"
            )
        if entry.dtype not in DTYPES:
            raise InputError(
                f"{self._index}: the variable {name!r} has TensorFlow's dtype number {entry.dtype}; only integers, floats "
                "and booleans are read; leave it out or save it as float32"
            )
        dtype = DTYPES[entry.dtype]
        if entry.size != math.prod(entry.shape) * dtype.itemsize:
            raise _damaged(self._index, f"{name!r} of shape {list(entry.shape)} and {dtype} cannot have {entry.size} bytes")
        if entry.shard >= self._num_shards:
            raise _damaged(self._index, f"{name!r} lies in data file {entry.shard}, counted from 0, of {self._num_shards}")
        return dtype


def checkpoint_prefix(source: Path) -> Path | None:
    """The prefix of the checkpoint that `source` names, or None if it is nothing of the kind.

    `source` is a prefix, its index, TensorFlow's text file `checkpoint`, or a folder. In a folder the file `checkpoint`
    decides, else the only index, or the one of the last step. For a file of the old V1 format it is that file: opening
    it says what to do.
    """
    if os.path.isfile(_index_of(source)):
        return source
    if os.path.isdir(source):
        return _prefix_in_folder(source)
    if not os.path.isfile(source):
        return None
    if source.suffix == ".index":
        return source.with_suffix("")
    if source.name == "checkpoint" and (named := _prefix_in_text(source)):
        return named
    return source if _is_table(source) else None


def _prefix_in_folder(folder: Path) -> Path | None:
    text = folder / "checkpoint"
    if os.path.isfile(text) and (named := _prefix_in_text(text)):
        return named
    prefixes = sorted(path.with_suffix("") for path in folder.glob("*.index") if os.path.isfile(path))
    if len(prefixes) < 2:
        return prefixes[0] if prefixes else None
    steps = [re.fullmatch(r"(.+)-(\d+)", prefix.name) for prefix in prefixes]
    if None in steps or len({step[1] for step in steps if step}) > 1:
        names = ", ".join(f"{prefix.name}.index" for prefix in prefixes)
        raise InputError(
            f"{folder}: holds several checkpoints ({names}); a folder must hold one, or steps NAME-<step> of one; "
            "name the index of the one to use"
        )
    return max(prefixes, key=lambda prefix: int(prefix.name.rpartition("-")[2]))


def _prefix_in_text(path: Path) -> Path | None:
    """The checkpoint that TensorFlow's text file names as the latest; None if the file is of another kind."""
    with _open(path) as file:
        start = file.read(2**16)  # another program's file of this name may be large; the line wanted is the first
    line = re.search(rb'^\s*model_checkpoint_path:\s*"((?:[^"\\\n]|\\.)*)"', start, re.MULTILINE)
    if not line:
        return None
    written = os.fsdecode(re.sub(rb"\\(.)", rb"\1", line[1]))
    # A folder that was moved since still has the old absolute path in it, and that may be one of another system.
    for prefix in (path.parent / written, path.parent / PureWindowsPath(written).name):
        if os.path.isfile(_index_of(prefix)) or os.path.isfile(prefix):
            return prefix
    raise InputError(
        f"{path}: names the checkpoint {written!r}, whose index is neither there nor beside this file; "
        "the file must name a checkpoint that exists; put it there, or name the index of the one to use"
    )


def crc32c(data: bytes | bytearray) -> int:
    """CRC-32 with Castagnoli's polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes | bytearray) -> int:
    """The checksum as LevelDB and TensorFlow store it: turned and shifted, since they may checksum a checksum."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]


class _Cursor:
    """Reads bytes of the index that are not to be trusted, front to back; what runs past their end is an InputError."""

    def __init__(self, data: bytes, path: Path):
        self.data = data
        self.path = path
        self.position = 0

    def at_end(self) -> bool:
        return self.position == len(self.data)

    def take(self, size: int) -> bytes:
        begin, end = self.position, self.position + size
        if end > len(self.data):
            raise _damaged(self.path, "a field runs past the end of what holds it")
        self.position = end
        return self.data[begin:end]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise _damaged(self.path, "a number has more than ten bytes")


class _Message:
    """A protobuf message's fields by number. Of a field given twice the last number counts, but every part of bytes."""

    def __init__(self, data: bytes, path: Path):
        self._numbers: dict[int, int] = {}
        self._parts: dict[int, list[bytes]] = {}
        cursor = _Cursor(data, path)
        while not cursor.at_end():
            field, wire_type = divmod(cursor.varint(), 8)
            if wire_type == 0:
                self._numbers[field] = cursor.varint()
            elif wire_type == 2:
                self._parts.setdefault(field, []).append(cursor.take(cursor.varint()))
            elif wire_type in (1, 5):
                self._numbers[field] = int.from_bytes(cursor.take(8 if wire_type == 1 else 4), "little")
            else:
                raise _damaged(path, f"a field has wire type {wire_type}")

    def number(self, field: int) -> int:
        """0 where the field is absent, which is how protobuf stores 0. A negative number reads as one of 2⁶³ at least."""
        return self._numbers.get(field, 0)

    def parts(self, field: int) -> list[bytes]:
        return self._parts.get(field, [])


@dataclass(frozen=True)
class _Entry:
    """Where and what a variable is (BundleEntryProto)."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    is_sliced: bool

    @classmethod
    def parse(cls, data: bytes, path: Path) -> "_Entry":
        message = _Message(data, path)
        dims = _Message(b"".join(message.parts(2)), path).parts(2)
        shape = tuple(_Message(dim, path).number(1) for dim in dims)
        # Also where another dimension is 0: torch computes strides of it.
        if math.prod(max(dim, 1) for dim in shape) >= 2**63:
            raise _damaged(path, "a shape has a negative or too large dimension")
        shard, offset, size, crc = (message.number(field) for field in (3, 4, 5, 6))
        return cls(message.number(1), shape, shard, offset, size, crc, bool(message.parts(7)))


class _Table:
    """A LevelDB table: blocks of sorted entries, an index block that says where they lie, and a footer."""

    def __init__(self, file: BufferedReader, path: Path):
        self.file = file
        self.path = path
        self.end = _size(file) - FOOTER_SIZE  # of all blocks

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        footer = self._read(self.end, FOOTER_SIZE) if self.end >= 0 else b""
        if not footer.endswith(MAGIC):
            raise InputError(
                f"{self.path}: does not end in the magic number of a LevelDB table, so it is cut short or no checkpoint's "
                "index; the index must be the whole file that TensorFlow wrote; copy it again"
            )
        handles = _Cursor(footer, self.path)
        _handle(handles)  # the metaindex, which TensorFlow leaves empty
        blocks_end = 0
        for _, value in self._block_entries(*_handle(handles)):
            offset, size = _handle(_Cursor(value, self.path))
            if offset < blocks_end:  # else a small file could have the same block read without end
                raise _damaged(self.path, "its blocks overlap")
            blocks_end = offset + size
            yield from self._block_entries(offset, size)

    def _read(self, offset: int, size: int) -> bytes:
        self.file.seek(offset)
        return self.file.read(size)

    def _block_entries(self, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
        """Each entry keeps only the part of its key that differs from the key before."""
        cursor = _Cursor(self._without_restarts(self._block(offset, size)), self.path)
        key = b""
        while not cursor.at_end():
            num_shared, num_own, value_size = (cursor.varint() for _ in range(3))
            if num_shared > len(key) or num_shared + num_own > MAX_KEY_SIZE:
                raise _damaged(self.path, "a key does not follow from the one before or is too long")
            key = key[:num_shared] + cursor.take(num_own)
            yield key, cursor.take(value_size)

    def _block(self, offset: int, size: int) -> bytes:
        if offset + size + BLOCK_TRAILER_SIZE > self.end:
            raise _damaged(self.path, f"a block at byte {offset} runs past its end")
        block = self._read(offset, size + BLOCK_TRAILER_SIZE)
        if masked_crc32c(block[:-4]) != int.from_bytes(block[-4:], "little"):
            raise _damaged(self.path, f"the checksum of the block at byte {offset} does not match")
        if block[size] != 0:
            raise InputError(
                f"{self.path}: the block at byte {offset} is compressed (type {block[size]}; 1 is Snappy), which "
                "TensorFlow's writer never does; only plain blocks are read; load it in TensorFlow and save it again"
            )
        return block[:size]

    def _without_restarts(self, block: bytes) -> bytes:
        """The block without the array at its end, which serves only to search in it."""
        array_size = 4 + 4 * int.from_bytes(block[-4:], "little")
        if array_size > len(block):
            raise _damaged(self.path, "a block is too short for the array at its end")
        return block[: len(block) - array_size]


def _handle(cursor: _Cursor) -> tuple[int, int]:
    """Offset and size of a block."""
    return cursor.varint(), cursor.varint()


def _read_data(path: Path, name: str, entry: _Entry) -> bytearray:
    """The bytes of a variable, in memory that its tensor may write to."""
    if not os.path.isfile(path):
        raise InputError(
            f"{path}: no such file, but {name!r} lies in it; a checkpoint is its index and all its data files; "
            "put them into one folder"
        )
    with _open(path) as file:
        if entry.offset + entry.size > _size(file):
            raise InputError(
                f"{path}: has {_size(file)} bytes, but {name!r} is the {entry.size} bytes from {entry.offset} on; "
                "the file must be whole and belong to this index; copy both again"
            )
        data = bytearray(entry.size)
        file.seek(entry.offset)
        file.readinto(data)
    if entry.size <= MAX_CHECKED_SIZE and masked_crc32c(data) != entry.crc:
        raise InputError(
            f"{path}: the checksum of {name!r} does not match; the file must be whole and belong to this index; copy both again"
        )
    return data


def _index_of(prefix: str | Path) -> Path:
    return Path(f"{prefix}.index")


def _is_table(path: Path) -> bool:
    """Whether the file is a LevelDB table: if it is no `.index`, a checkpoint of the old format V1."""
    with _open(path) as file:
        file.seek(max(_size(file) - len(MAGIC), 0))
        return file.read() == MAGIC


def _size(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a readable file") from None


def _missing_index(prefix: str | Path) -> InputError:
    if os.path.isfile(prefix):
        return InputError(
            f"{prefix}: a single file without an index beside it, as TensorFlow's Saver wrote in its old format V1; "
            "only V2 is read; load it in TensorFlow and save it again with Saver(write_version=SaverDef.V2)"
        )
    return InputError(
        f"{_index_of(prefix)}: no such file; a TensorFlow checkpoint is named by what its .index and .data files have in "
        "common, e.g. model.ckpt-0; check the path"
    )


def _damaged(path: Path, what: str) -> InputError:
    return InputError(
        f"{path}: the index is damaged ({what}); it must be the whole file that TensorFlow wrote; copy it again or save it anew"
    )
