"""TensorFlow's checkpoint format without TensorFlow: `conversion/tensorflow_checkpoint.py`.

Most tests read what the small writer below makes; the last compare with files that TensorFlow itself wrote.
"""

import random
from pathlib import Path

import pytest
import torch
from oracles import oracle
from safetensors.torch import load_file

from modeling_xl.conversion.tensorflow_checkpoint import DTYPES, TensorFlowCheckpoint, checkpoint_prefix, crc32c, masked_crc32c
from modeling_xl.text import InputError

NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4)]
BIG = "big"  # the name of one variable above the size whose checksum is read


def varint(number):
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*low, number])


def message(fields):
    """A protobuf message: integers become varints, four bytes fixed32, a list of bytes as many parts."""
    parts = []
    for number, value in fields.items():
        if isinstance(value, int):
            parts += [varint(number << 3), varint(value)] if value else []
        elif isinstance(value, bytes):
            parts += [varint(number << 3 | 5), value]
        else:
            for part in value:
                parts += [varint(number << 3 | 2), varint(len(part)), part]
    return b"".join(parts)


def crc_bytes(data):
    return masked_crc32c(data).to_bytes(4, "little")


def block(entries, interval=3):
    """A LevelDB block: keys share their start with the one before, but for every `interval`-th."""
    content, restarts, last = b"", [], b""
    for i, (key, value) in enumerate(entries):
        shared = 0
        if i % interval == 0:
            restarts.append(len(content))
        else:
            while key[: shared + 1] == last[: shared + 1] and shared < len(last):
                shared += 1
        content += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return content + b"".join(number.to_bytes(4, "little") for number in [*restarts, len(restarts)])


def index_file(entries, per_block=7, change=lambda number, content: content, compression=0):
    """The bytes of an index. `change` alters a block before its checksum is taken."""
    content, handles = b"", []

    def add(entries):
        nonlocal content
        changed = change(len(handles), block(entries))
        begin = len(content)
        content += changed + bytes([compression])
        content += crc_bytes(content[begin:])
        return varint(begin) + varint(len(changed))

    entries = sorted(entries.items())
    for i in range(0, len(entries), per_block):
        handles.append((entries[min(i + per_block, len(entries)) - 1][0], add(entries[i : i + per_block])))
    footer = add([]) + add(handles)
    return content + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def write(prefix, tensors, num_shards=2, header=None, entry=None, **index_options):
    """`header` and `entry` replace fields of the header and of the variable `w`."""
    shards = [b"" for _ in range(num_shards)]
    entries = {b"": message({1: num_shards, 3: [message({1: 1})], **(header or {})})}
    for i, (name, tensor) in enumerate(tensors.items()):
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shard = i % num_shards
        fields = {
            1: NUMBERS[tensor.dtype],
            2: [message({2: [message({1: size}) for size in tensor.shape]})],
            3: shard,
            4: len(shards[shard]),
            5: len(data),
            6: crc_bytes(data) if name != BIG else bytes(4),
        }
        entries[name.encode()] = message({**fields, **(entry or {})} if name == "w" else fields)
        shards[shard] += data
    for i, data in enumerate(shards):
        Path(f"{prefix}.data-{i:05d}-of-{num_shards:05d}").write_bytes(data)
    Path(f"{prefix}.index").write_bytes(index_file(entries, **index_options))


def random_tensors():
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in NUMBERS:
        for shape in SHAPES:
            values = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator)
            tensors[f"transformer/{str(dtype).removeprefix('torch.')}/é_{'x'.join(map(str, shape))}"] = values.to(dtype)
    return tensors


def one(**fields):
    return {"w": torch.arange(6.0).reshape(2, 3), **fields}


def read_all(prefix):
    checkpoint = TensorFlowCheckpoint(prefix)
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


@pytest.fixture
def prefix(tmp_path):
    return tmp_path / "model.ckpt-0"


class TestReading:
    @pytest.mark.parametrize(
        ("data", "crc"),
        [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
        ids=["empty", "digits", "zeros", "ones"],
    )
    def test_crc32c_of_known_bytes(self, data, crc):
        assert crc32c(data) == crc

    @pytest.mark.parametrize("num_shards", [1, 2])
    @pytest.mark.parametrize("per_block", [1, 7, 1000])
    def test_every_dtype_and_shape_comes_back(self, prefix, num_shards, per_block):
        tensors = random_tensors()
        write(prefix, tensors, num_shards, per_block=per_block)
        checkpoint = TensorFlowCheckpoint(str(prefix))
        assert checkpoint.names() == sorted(tensors)
        for name, tensor in tensors.items():
            assert checkpoint.shape(name) == tensor.shape
            torch.testing.assert_close(checkpoint.tensor(name), tensor, rtol=0, atol=0)

    def test_a_tensor_may_be_written_to(self, prefix):
        write(prefix, one())
        tensor = TensorFlowCheckpoint(prefix).tensor("w")
        tensor += 1
        assert torch.equal(TensorFlowCheckpoint(prefix).tensor("w") + 1, tensor)

    def test_the_checksum_of_a_large_variable_is_not_read(self, prefix):
        large = torch.arange(2**18 + 1.0)
        write(prefix, {BIG: large})
        assert torch.equal(TensorFlowCheckpoint(prefix).tensor(BIG), large)

    def test_data_files_are_opened_only_for_a_tensor(self, prefix):
        write(prefix, one(), num_shards=1)
        Path(f"{prefix}.data-00000-of-00001").unlink()
        assert TensorFlowCheckpoint(prefix).shape("w") == (2, 3)


class TestFaults:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"header": {2: 1}}, "big-endian"),
            ({"header": {1: 0}}, "counts no data file"),
            ({"compression": 1}, "compressed"),
            ({"entry": {7: [b""]}}, "'w' is partitioned"),
            ({"entry": {1: 7}}, "'w' has TensorFlow's dtype number 7"),
            ({"entry": {1: 2}}, r"'w' of shape \[2, 3\] and torch.float64 cannot have 24 bytes"),
            ({"entry": {5: 2**64 - 4}}, "cannot have"),
            ({"entry": {2: [message({2: [message({1: size}) for size in (2**64 - 1, 2**64 - 6)]})]}}, "negative or too large"),
            ({"entry": {2: [message({2: [message({1: size}) for size in (0, 2**62, 2)]})], 5: 0}}, "negative or too large"),
            ({"entry": {3: 2}}, "lies in data file 2, counted from 0, of 2"),
            ({"entry": {4: 1}}, "has 24 bytes, but 'w' is the 24 bytes from 1 on"),
            ({"entry": {4: 2**64 - 1}}, "has 24 bytes"),
            ({"entry": {6: b"\1\2\3\4"}}, "checksum of 'w' does not match"),
        ],
        ids=[
            "big-endian",
            "no shards",
            "compressed",
            "partitioned",
            "string",
            "size",
            "negative size",
            "negative shape",
            "huge empty shape",
            "shard",
            "offset",
            "negative offset",
            "checksum",
        ],
    )
    def test_what_cannot_be_read_is_refused_by_name(self, prefix, options, error):
        write(prefix, one(), **options)
        with pytest.raises(InputError, match=rf"^.*model\.ckpt-0\.(index|data-0000\d-of-00002): .*{error}.*; .*; .*$"):
            read_all(prefix)

    def test_a_variable_that_cannot_be_read_leaves_the_others(self, prefix):
        write(prefix, one(v=torch.ones(2)), entry={1: 7})
        checkpoint = TensorFlowCheckpoint(prefix)
        assert checkpoint.names() == ["v", "w"]
        assert checkpoint.tensor("v").tolist() == [1, 1]

    def test_parts_of_partitioned_variables_are_no_names(self, prefix):
        write(prefix, one(**{"\0w": torch.zeros(1)}))
        assert TensorFlowCheckpoint(prefix).names() == ["w"]

    def test_an_unknown_name_is_refused(self, prefix):
        write(prefix, one())
        with pytest.raises(InputError, match="no variable 'v'"):
            TensorFlowCheckpoint(prefix).tensor("v")

    def test_a_missing_data_file_is_named(self, prefix):
        write(prefix, one())
        Path(f"{prefix}.data-00000-of-00002").unlink()
        with pytest.raises(InputError, match=r"ckpt-0\.data-00000-of-00002: no such file"):
            read_all(prefix)

    def test_a_data_file_cut_short_is_named(self, prefix):
        write(prefix, one())
        Path(f"{prefix}.data-00000-of-00002").write_bytes(bytes(23))
        with pytest.raises(InputError, match=r"ckpt-0\.data-00000-of-00002: has 23 bytes"):
            read_all(prefix)

    def test_a_missing_index_is_named(self, prefix):
        with pytest.raises(InputError, match=r"ckpt-0\.index: no such file"):
            TensorFlowCheckpoint(prefix)

    def test_the_old_format_is_told_from_a_missing_file(self, prefix):
        prefix.write_bytes(index_file({b"": b""}))
        assert checkpoint_prefix(prefix) == prefix
        with pytest.raises(InputError, match=r"format V1.*write_version=SaverDef\.V2"):
            TensorFlowCheckpoint(prefix)

    @pytest.mark.parametrize(
        ("entries", "error"),
        [
            ({}, "no header"),
            ({b"": message({1: 1}), b"\xff": b""}, "not UTF-8"),
            ({b"": message({1: 1}), b"w" * 5000: b""}, "too long"),
            ({b"": b"\xff" * 11}, "more than ten bytes"),
            ({b"": b"\x0b"}, "wire type 3"),
            ({b"": b"\x0a\x05"}, "runs past the end"),
        ],
        ids=["empty", "not UTF-8", "long name", "long number", "wire type", "long field"],
    )
    def test_a_sound_table_of_nonsense_is_refused(self, prefix, entries, error):
        Path(f"{prefix}.index").write_bytes(index_file(entries))
        with pytest.raises(InputError, match=error):
            TensorFlowCheckpoint(prefix)

    def test_a_block_is_read_once(self, prefix):
        def repeat_the_first(number, content):
            handle = varint(0) + varint(len(block([(b"", b"")])))
            return block([(bytes([i]), handle) for i in range(9)]) if number == 1 else content

        Path(f"{prefix}.index").write_bytes(index_file({b"": b""}, change=repeat_the_first))
        with pytest.raises(InputError, match="overlap"):
            TensorFlowCheckpoint(prefix)

    def test_an_index_cut_short_is_refused_at_every_length(self, prefix):
        write(prefix, one(b=torch.zeros(3)))
        index = Path(f"{prefix}.index")
        content = index.read_bytes()
        for size in range(len(content)):
            index.write_bytes(content[:size])
            with pytest.raises(InputError, match="cut short"):
                TensorFlowCheckpoint(prefix)


class TestDamage:
    """Every single byte of an index of several blocks is changed; no block is longer than the 120 bytes tried."""

    TENSORS = one(**{"w/Adam": torch.zeros(2, 3), "w/Adam_1": torch.ones(3), "v": torch.tensor(7)})

    def test_a_changed_byte_is_noticed(self, prefix):
        write(prefix, self.TENSORS, per_block=2)
        index = Path(f"{prefix}.index")
        content = index.read_bytes()
        rng = random.Random(0)
        refused = 0
        for position in range(len(content)):
            changed = bytearray(content)
            changed[position] ^= rng.randrange(1, 256)
            index.write_bytes(changed)
            try:
                tensors = read_all(prefix)
            except InputError:
                refused += 1
            else:  # the metaindex (4 + 4 + 5 bytes), where it lies (2 or 3) and the footer's padding do not matter
                assert all(torch.equal(tensors[name], tensor) for name, tensor in self.TENSORS.items())
        assert refused >= len(content) - (13 + 3 + 40)

    @pytest.mark.parametrize("number", range(4), ids=["first block", "second block", "third block", "metaindex and index"])
    def test_a_changed_byte_with_a_sound_checksum_is_refused_or_read(self, prefix, number):
        rng = random.Random(number)
        errors = []
        for position in range(120):
            for _ in range(2):
                write(prefix, self.TENSORS, per_block=2, change=self.change_of(number, position, rng))
                try:
                    read_all(prefix)
                except InputError as error:
                    errors.append(str(error))
        assert errors and not any("\n" in error for error in errors)

    @staticmethod
    def change_of(number, position, rng):
        def change(current, content):
            if current != number:
                return content
            changed = bytearray(content)
            changed[position % len(content)] ^= rng.randrange(1, 256)
            return bytes(changed)

        return change


class TestPrefix:
    def test_a_prefix_and_its_index_name_it(self, prefix):
        write(prefix, one())
        assert checkpoint_prefix(prefix) == prefix
        assert checkpoint_prefix(Path(f"{prefix}.index")) == prefix

    @pytest.mark.parametrize("name", ["absent", "notes.txt", "empty", "checkpoint"])
    def test_what_is_no_checkpoint_is_none(self, tmp_path, name):
        (tmp_path / "notes.txt").write_text("notes")
        (tmp_path / "empty").mkdir()
        (tmp_path / "checkpoint").write_bytes(b"\x80\2another program's")
        assert checkpoint_prefix(tmp_path / name) is None
        assert checkpoint_prefix(tmp_path) is None

    @pytest.mark.parametrize(
        ("names", "chosen"),
        [(["model"], "model"), (["m-9", "m-10", "m-2"], "m-10"), (["a-b-9", "a-b-10"], "a-b-10")],
        ids=["one", "steps", "dashes"],
    )
    def test_of_a_folder_the_last_step_is_chosen(self, tmp_path, names, chosen):
        for name in names:
            write(tmp_path / name, one())
        assert checkpoint_prefix(tmp_path) == tmp_path / chosen

    @pytest.mark.parametrize("names", [["a-1", "b-2"], ["a", "a-2"], ["a", "b"]], ids="-".join)
    def test_a_folder_of_several_checkpoints_is_refused(self, tmp_path, names):
        for name in names:
            write(tmp_path / name, one())
        with pytest.raises(InputError, match=rf"\({names[0]}\.index, {names[1]}\.index\)"):
            checkpoint_prefix(tmp_path)

    @pytest.mark.parametrize(
        ("written", "expected"),
        [
            ("m-1", "m-1"),
            ("sub/m-3", "sub/m-3"),
            ("{folder}/m-1", "m-1"),
            ("/no/such/folder/m-1", "m-1"),
            (r"C:\\no\\such\\folder\\m-1", "m-1"),
            (r"a \"quoted\"", 'a "quoted"'),
        ],
        ids=["relative", "in a subfolder", "absolute", "moved", "from Windows", "escaped"],
    )
    def test_the_text_file_decides(self, tmp_path, written, expected):
        (tmp_path / "sub").mkdir()
        for name in ("m-1", "m-2", "sub/m-3", 'a "quoted"'):
            write(tmp_path / name, one())
        text = f'model_checkpoint_path: "{written.format(folder=tmp_path)}"\nall_model_checkpoint_paths: "m-2"\n'
        (tmp_path / "checkpoint").write_text(text)
        assert checkpoint_prefix(tmp_path) == tmp_path / expected
        assert checkpoint_prefix(tmp_path / "checkpoint") == tmp_path / expected

    def test_a_text_file_that_names_nothing_is_refused(self, tmp_path):
        write(tmp_path / "m-2", one())
        (tmp_path / "checkpoint").write_text('model_checkpoint_path: "m-1"\n')
        with pytest.raises(InputError, match="checkpoint: names the checkpoint 'm-1'"):
            checkpoint_prefix(tmp_path)


@pytest.mark.parametrize("case", ["t01_tf_plain", "t02_tf_adaptive_wt103", "t03_tf_shared_r_d_embed"])
def test_what_tensorflow_wrote(case):
    folder = oracle(case)
    prefix = checkpoint_prefix(folder)
    assert prefix == folder / "model.ckpt-0"
    tensors = read_all(prefix)
    expected = load_file(folder / "tf_weights.safetensors")
    slots = {name for name in tensors if name == "global_step" or "/Adam" in name}
    assert slots and tensors.keys() - slots == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
