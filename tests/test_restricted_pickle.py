"""Pickled files of the original code: the same tensors as torch reads, and no file that gets anything run."""

import collections
import copyreg
import functools
import inspect
import itertools
import os
import pickle
import struct
import sys
import types
import zipfile

import pytest
import torch
from oracles import oracle
from safetensors.torch import load_file
from torch import nn

from modeling_xl.conversion import restricted_pickle
from modeling_xl.conversion.restricted_pickle import LazyTensor, RefusedGlobalError, RestrictedFile, Stub, is_stub
from modeling_xl.text import InputError

KIMI = [
    "b01_kimi_same_as_a02",
    "b02_kimi_adaptive_cluster_order",
    "b03_kimi_pre_lnorm_ext2",
    "b04_kimi_attn1_shaw",
    "b05_kimi_attn1_clamp_longer",
    "b06_kimi_attn2_abs_nomem",
    "b07_kimi_attn2_abs_mem",
    "b08_kimi_attn3_abs_deep",
    "b09_kimi_ext2_postln_nomem",
    "b11_kimi_pre_lnorm_attn2",
]
CONTAINERS = ["zip", "old", "plain"]


def named_tensors(module: Stub, prefix: str = ""):
    """(name, tensor) of every parameter and buffer, named and repeated as in torch's state_dict."""
    for group in ("_parameters", "_buffers"):
        for name, tensor in vars(module)[group].items():
            if tensor is not None and name not in vars(module).get("_non_persistent_buffers_set", ()):
                yield prefix + name, tensor
    for name, child in vars(module)["_modules"].items():
        yield from named_tensors(child, f"{prefix}{name}.")


def assert_same_tensors(found: dict[str, LazyTensor], expected: dict[str, torch.Tensor]):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        loaded = tensor.load()
        assert loaded.dtype == tensor.dtype == expected[name].dtype
        assert loaded.shape == tensor.shape
        assert loaded.is_contiguous() and torch.equal(loaded, expected[name]), name


class TestOracles:
    @pytest.mark.parametrize(("case", "file"), [*((case, "model.pt") for case in KIMI), (KIMI[0], "model_legacy.pt")])
    def test_a_pickled_model_holds_the_tensors_of_its_state_dict(self, case, file):
        folder = oracle(case)
        with RestrictedFile(folder / file) as opened:
            assert is_stub(opened.root, "MemTransformerLM")
            assert_same_tensors(dict(named_tensors(opened.root)), load_file(folder / "model.safetensors"))

    @pytest.mark.parametrize("case", KIMI)
    def test_settings_are_attributes(self, case):
        with RestrictedFile(oracle(case) / "model.pt") as opened:
            assert type(opened.root.n_layer) is int and opened.root.n_layer > 0
            assert opened.root._modules["crit"].cutoffs[-1] == opened.root.n_token

    @pytest.mark.parametrize("file", ["model.pt", "model_legacy.pt"])
    def test_tied_parameters_are_one_object(self, file):
        with RestrictedFile(oracle(KIMI[0]) / file) as opened:
            tensors = dict(named_tensors(opened.root))
            assert tensors["word_emb.emb_layers.0.weight"] is tensors["crit.out_layers.0.weight"]
            assert len(set(map(id, tensors.values()))) == len(tensors) - 1

    @pytest.mark.parametrize(
        ("case", "file"),
        [(case, "state_dict.pt") for case in KIMI]
        + [("a01_hf_mem_gt_seg_untie", "pytorch_model.bin"), ("a05_hf_adaptive_wt103", "pytorch_model.bin")],
    )
    def test_state_dicts(self, case, file):
        folder = oracle(case)
        with RestrictedFile(folder / file) as opened:
            found, expected = opened.root, load_file(folder / "model.safetensors")
            assert expected.keys() <= found.keys()
            assert_same_tensors({name: found[name] for name in expected}, expected)
            # What safetensors leaves out is tied to what it holds.
            assert all(found[name] in [found[other] for other in expected] for name in found.keys() - expected.keys())


@pytest.fixture
def original(monkeypatch):
    """A module named like the original's with two classes, and their source code, which the older container copies."""
    module = types.ModuleType("mem_transformer")

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.r_w_bias = nn.Parameter(torch.randn(2, 3))
            self.net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.LayerNorm(5))
            self.register_buffer("inv_freq", torch.arange(4.0).double())

    class MemTransformerLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_layer, self.cutoffs, self.shape = 2, [3, 7], torch.Size([4, 2])
            self.emb_projs = nn.ParameterList([nn.Parameter(torch.randn(3, 2).t())])
            self.layers = nn.ModuleList([Layer(), Layer()])
            self.word_emb = nn.Embedding(7, 3)
            self.out = nn.Linear(3, 7)
            self.out.weight = self.word_emb.weight

    for cls in (Layer, MemTransformerLM):
        cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(inspect, "getsourcefile", lambda _: "mem_transformer.py")
    monkeypatch.setattr(inspect, "getsourcelines", lambda _: (["class Left: out\n"], 0))
    return module


def save(value, path, container: str):
    if container == "plain":
        path.write_bytes(pickle.dumps(value, protocol=2))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=container == "zip")
    return path


class TestReading:
    @pytest.mark.parametrize("container", ["zip", "old"])
    def test_a_module(self, original, tmp_path, container):
        model = original.MemTransformerLM()
        path = save(model, tmp_path / "model.pt", container)
        del sys.modules[original.__name__]
        with RestrictedFile(path) as opened:
            root = opened.root
            assert is_stub(root, "MemTransformerLM") and not is_stub(root, "Layer") and not is_stub(root.n_layer, "int")
            assert (type(root).module, type(root).name) == ("mem_transformer", "MemTransformerLM")
            assert (root.n_layer, root.cutoffs, root.shape, root.training) == (2, [3, 7], (4, 2), True)
            assert is_stub(root._modules["layers"], "ModuleList")
            tensors = dict(named_tensors(root))
            assert tensors["word_emb.weight"] is tensors["out.weight"]
            assert_same_tensors(tensors, model.state_dict())

    @pytest.mark.parametrize("container", ["zip", "old"])
    @pytest.mark.parametrize("dtype", restricted_pickle.ITEM_TYPES.values(), ids=str)
    def test_every_type_of_item(self, tmp_path, container, dtype):
        expected = {"a": (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype), "scalar": torch.ones((), dtype=dtype)}
        with RestrictedFile(save(expected, tmp_path / "t.pt", container)) as opened:
            assert_same_tensors(opened.root, expected)

    @pytest.mark.parametrize("container", ["zip", "old"])
    def test_views_and_empty_tensors(self, tmp_path, container):
        whole = torch.arange(60.0).reshape(3, 4, 5)
        expected = {
            "whole": whole,
            "part": whole[1, 1:3],
            "transposed": whole.permute(2, 0, 1)[1:],
            "steps": whole.flatten()[3::7],
            "empty": torch.empty(0, 4),
            "empty part": whole[3:],
        }
        with RestrictedFile(save(expected, tmp_path / "t.pt", container)) as opened:
            assert_same_tensors(opened.root, expected)
            assert opened.root["part"].storage == opened.root["whole"].storage
            assert opened.root["part"] != opened.root["whole"]

    def test_a_compressed_member(self, tmp_path):
        expected = {"a": torch.zeros(50, 3), "b": torch.arange(9)}
        source = save(expected, tmp_path / "t.pt", "zip")
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        with RestrictedFile(tmp_path / "c.pt") as opened:
            assert_same_tensors(opened.root, expected)

    @pytest.mark.parametrize("protocol", range(6))
    def test_plain_containers_of_every_protocol(self, tmp_path, protocol):
        value = {
            "idx2sym": ["<eos>", "the", "ü"],
            "sym2idx": collections.OrderedDict([("<eos>", 0), ("the", 1)]),
            "counter": collections.Counter("banana"),
            "sets": [{1, 2}, frozenset("ab"), set()],
            "bytes": [b"", b"\x00\xff"],
            "plain": (None, True, 1 << 80, -1.5, (), ((1,), 2)),
        }
        (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(value, protocol))
        with RestrictedFile(tmp_path / "vocab.pkl") as opened:
            assert opened.root == value

    @pytest.mark.parametrize("protocol", range(6))
    def test_a_corpus_with_arrays(self, tmp_path, monkeypatch, protocol):
        np = pytest.importorskip("numpy")
        for name in ("data_utils", "vocabulary"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        corpus, vocab, words = (
            type(name, bases, {"__module__": module})
            for name, module, bases in [
                ("Corpus", "data_utils", ()),
                ("Vocab", "vocabulary", ()),
                ("Words", "vocabulary", (list,)),
            ]
        )
        sys.modules["data_utils"].Corpus, sys.modules["vocabulary"].Vocab = corpus, vocab
        sys.modules["vocabulary"].Words = words
        made = corpus()
        made.vocab, made.train, made.last = vocab(), np.arange(5), np.int64(3)
        made.vocab.idx2sym, made.words = ["a", "b"], words("xy") if protocol >= 2 else None
        (tmp_path / "cache.pkl").write_bytes(pickle.dumps(made, protocol))
        with RestrictedFile(tmp_path / "cache.pkl") as opened:
            assert is_stub(opened.root, "Corpus") and is_stub(opened.root.vocab, "Vocab")
            assert opened.root.vocab.idx2sym == ["a", "b"]
            assert isinstance(opened.root.train, Stub)
            assert opened.root.words is None or opened.root.words.items == ["x", "y"]

    def test_text_of_python_2(self, tmp_path):
        (tmp_path / "vocab.pkl").write_bytes(b"\x80\x02]q\x01(U\x02\xc3\xbcq\x02U\x01\xffq\x03e.")
        with RestrictedFile(tmp_path / "vocab.pkl") as opened:
            assert opened.root == ["ü", "\udcff"]

    def test_names_of_early_torch(self, tmp_path):
        """A parameter that is its class called, and the backend that every module of torch before 1.2 names."""
        tensor = b"ctorch._utils\n_rebuild_tensor\n((S'storage'\nctorch\nFloatStorage\nS'7'\nS'cpu'\nI2\nNtQI0\n(I2\nt(I1\nttR"
        parameter = b"\x80\x02}(X\x01\x00\x00\x00pctorch.nn.parameter\nParameter\n" + tensor + b"\x88\x86R"
        backend = b"X\x01\x00\x00\x00bctorch.nn.backends.thnn\n_get_thnn_function_backend\n)Ru."
        path = old_container(tmp_path, parameter + backend, storages=[("7", 2, struct.pack("<2f", 0.5, -3))])
        with RestrictedFile(path) as opened:
            assert opened.root["p"].load().tolist() == [0.5, -3]
            assert is_stub(opened.root["b"], "_get_thnn_function_backend")

    def test_a_part_of_an_old_storage(self, tmp_path):
        pickled = b"\x80\x02" + rebuild(persistent(numel=5, view=("v", 2, 3)), offset=1, shape=(2,), stride=(1,)) + b"."
        path = old_container(tmp_path, pickled, storages=[("0", 5, struct.pack("<5f", *range(5)))])
        with RestrictedFile(path) as opened:
            assert opened.root.load().tolist() == [3, 4]

    def test_a_closed_file_gives_no_tensors(self, tmp_path):
        for container in ("zip", "old"):
            with RestrictedFile(save({"a": torch.ones(3)}, tmp_path / f"{container}.pt", container)) as opened:
                tensor = opened.root["a"]
            with pytest.raises(InputError, match="closed"):
                tensor.load()


def op(value) -> bytes:
    """The opcodes that put a plain value on the stack."""
    return pickle.dumps(value, protocol=2)[2:-1]


def persistent(kind: str = "FloatStorage", key="0", numel=4, view=None, head="storage") -> bytes:
    """The opcodes of a reference to a storage, in the form of the older container."""
    return b"(" + op(head) + f"ctorch\n{kind}\n".encode() + op(key) + op("cpu") + op(numel) + op(view) + b"tQ"


def rebuild(storage: bytes, offset=0, shape=(4,), stride=(1,), rest=(False, None)) -> bytes:
    arguments = storage + op(offset) + op(shape) + op(stride) + b"".join(map(op, rest))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def old_container(tmp_path, pickled: bytes, storages=(), version=1001, little_endian=True):
    parts = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, version, {"little_endian": little_endian})]
    parts += [pickled, pickle.dumps([key for key, *_ in storages], protocol=2)]
    parts += [struct.pack("<q", numel) + content for _, numel, content in storages]
    path = tmp_path / "old.pt"
    path.write_bytes(b"".join(parts))
    return path


def zip_container(tmp_path, pickled: bytes, storages=(), byteorder=b"little", root="model"):
    path = tmp_path / "zip.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{root}/data.pkl", pickled)
        file.writestr(f"{root}/byteorder", byteorder)
        for key, _, content in storages:
            file.writestr(f"{root}/data/{key}", content)
    return path


def contained(tmp_path, pickled: bytes, container: str):
    if container == "plain":
        (tmp_path / "vocab.pkl").write_bytes(pickled)
        return tmp_path / "vocab.pkl"
    return {"zip": zip_container, "old": old_container}[container](tmp_path, pickled)


def refused(path, match: str, error: type = InputError):
    with pytest.raises(error, match=match) as caught:
        RestrictedFile(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


COMMAND = "open({marker!r}, 'w').close()"
# What a file could name to get code run, with arguments that would leave a file behind.
PAYLOADS = {
    "os.system": lambda marker: Call(os.system, f"touch {marker}"),
    "subprocess.Popen": lambda marker: Call(__import__("subprocess").Popen, ["touch", marker]),
    "builtins.eval": lambda marker: Call(eval, COMMAND.format(marker=marker)),
    "builtins.exec": lambda marker: Call(exec, COMMAND.format(marker=marker)),
    "builtins.open": lambda marker: Call(open, marker, "w"),
    "builtins.getattr": lambda marker: Call(getattr, "a", "upper"),
    "builtins.__import__": lambda marker: Call(__import__, "antigravity"),
    "builtins.map": lambda marker: Call(map, str, [1]),
    "functools.partial": lambda marker: Call(functools.partial(os.system, f"touch {marker}")),
    "operator.methodcaller": lambda marker: Call(__import__("operator").methodcaller, "upper"),
    "operator.attrgetter": lambda marker: Call(__import__("operator").attrgetter, "system"),
    "numpy.load": lambda marker: Call(__import__("numpy").load, marker, None, True),
    "torch.load": lambda marker: Call(torch.load, marker),
    "torch.serialization.load": lambda marker: Call(torch.serialization._load, marker),
    "torch.storage._load_from_bytes": lambda marker: Call(torch.storage._load_from_bytes, b""),
    "torch.hub.load": lambda marker: Call(torch.hub.load, "somewhere"),
    "pickle.loads": lambda marker: Call(pickle.loads, pickle.dumps(Call(os.system, f"touch {marker}"))),
    "types.CodeType": lambda marker: types.SimpleNamespace(a=1),
    "copyreg.add_extension": lambda marker: Call(copyreg.add_extension, "os", "system", 1),
    "torch._utils._rebuild_tensor_v3": lambda marker: Call(torch._utils._rebuild_tensor_v3),
}


class TestAttacks:
    @pytest.fixture
    def marker(self, tmp_path):
        marker = tmp_path / "ran"
        yield str(marker)
        assert not marker.exists(), "code of the file was run"

    @pytest.mark.parametrize("container", CONTAINERS)
    @pytest.mark.parametrize("protocol", range(6))
    @pytest.mark.parametrize("name", PAYLOADS)
    def test_a_name_of_python_or_torch(self, tmp_path, marker, name, protocol, container):
        payload = pickle.dumps({"a": [PAYLOADS[name](marker)]}, protocol)
        refused(contained(tmp_path, payload, container), "nothing of the file was run", RefusedGlobalError)

    @pytest.mark.parametrize("container", CONTAINERS)
    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("os", "system"),
            ("posix", "system"),
            ("nt", "system"),
            ("__builtin__", "eval"),
            ("__builtin__", "apply"),
            ("builtins", "exec"),
            ("sys", "modules"),
            ("torch", "nn.Module"),
            ("torch.nn.modules.linear", "torch.os.system"),
            ("mem_transformer", "os.system"),
            ("collections", "OrderedDict.fromkeys"),
            ("torch.nn.modules", "Module"),  # the package, not a module in it
            ("modeling_xl.conversion.restricted_pickle", "GLOBALS"),
            ("numpy.f2py", "compile"),
            ("numpy.core", "multiarray"),
            ("numpy.core.multiarray", "fromfile"),
            ("numpy.core", "multiarray._reconstruct"),
            ("numpy", "core.multiarray._reconstruct"),
        ],
    )
    def test_every_opcode_that_names(self, tmp_path, marker, module, name, container):
        argument, text = op(f"touch {marker}"), f"{module}\n{name}\n".encode()
        global_, stacked = b"c" + text, op(module) + op(name) + b"\x93"
        for pickled in [
            b"\x80\x04" + stacked + argument + b"\x85R.",
            b"\x80\x04" + stacked + argument + b"\x85\x81.",
            b"\x80\x04" + stacked + argument + b"\x85}\x92.",
            b"\x80\x02" + global_ + argument + b"\x85R.",
            b"\x80\x02" + global_ + argument + b"\x85\x81.",
            b"(" + global_ + argument + b"o.",
            b"(" + argument + b"i" + text + b".",
            global_ + b"}" + op("a") + op("b") + b"sb.",
            b"\x80\x02" + global_ + b".",
        ]:
            refused(contained(tmp_path, pickled, container), "names '", RefusedGlobalError)

    @pytest.mark.parametrize("code", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])
    def test_the_extension_registry(self, tmp_path, marker, code):
        copyreg.add_extension("os", "system", 1)
        try:
            pickle.loads(b"\x80\x02\x82\x01.")  # the registry's cache now holds the function, and would give it to anyone
            refused(contained(tmp_path, b"\x80\x02" + code + op(f"touch {marker}") + b"\x85R.", "plain"), "extension registry")
        finally:
            copyreg.remove_extension("os", "system", 1)

    ALLOWED = (
        b"ccollections\nCounter\n",
        b"ccollections\nOrderedDict\n",
        b"c__builtin__\nset\n",
        b"c__builtin__\nobject\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch\nFloatStorage\n",
        b"cmem_transformer\nMemTransformerLM\n",
        b"cmem_transformer\nMemTransformerLM\n)\x81",
    )

    SPECIAL = ("__class__", "__dict__", "__setstate__", "__init__", "__call__", "__defaults__")

    @pytest.mark.parametrize(
        ("target", "key"),
        [*itertools.product(ALLOWED, SPECIAL), *((target, "function") for target in ALLOWED[:-1])],  # on a stub any attribute
    )
    @pytest.mark.parametrize("slots", [False, True])
    def test_state_changes_nothing_it_should_not(self, tmp_path, target, key, slots):
        """BUILD on what a file gets hold of: our functions, types and stub classes; and special names on a stub."""
        state = b"}" + op(key) + b"c__builtin__\nset\ns"
        before = {
            name: vars(value).copy() if hasattr(value, "__dict__") else None
            for name, value in restricted_pickle.GLOBALS.items()
        }
        pickled = b"\x80\x02" + target + (b"N" + state + b"\x86" if slots else state) + b"b."
        refused(contained(tmp_path, pickled, "plain"), "cannot be read")
        after = {
            name: vars(value).copy() if hasattr(value, "__dict__") else None
            for name, value in restricted_pickle.GLOBALS.items()
        }
        assert after == before

    @pytest.mark.parametrize("target", ALLOWED[:-1])
    @pytest.mark.parametrize("use", [b"(NNe", b"Na", b"NNs", b"(Ntb", b"(N\x90"])
    def test_names_are_not_containers(self, tmp_path, target, use):
        refused(contained(tmp_path, b"\x80\x04" + target + use + b".", "plain"), "cannot be read")

    def test_a_tensor_cannot_be_moved(self, tmp_path):
        storage = [("0", 4, bytes(16))]
        for state in ({"offset": 999}, (None, {"offset": 999}), {"__class__": 1}, ()):
            for target in (rebuild(persistent()), persistent()):
                refused(old_container(tmp_path, b"\x80\x02" + target + op(state) + b"b.", storage), "has none")

    @pytest.mark.parametrize(
        "arguments",
        [
            b"ccollections\nCounter\nX\x03\x00\x00\x00abc\x85R",
            b"c__builtin__\nset\ncmem_transformer\nA\n)\x81\x85R",
            b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R",
            b"c__builtin__\nset\n]]a\x85R",
            b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00base64\x86R",
            b"c_codecs\nencode\nX\x02\x00\x00\x00\xc4\x80X\x06\x00\x00\x00latin1\x86R",
            b"ccopyreg\n_reconstructor\nc__builtin__\nset\nc__builtin__\nobject\nN\x87R",
            b"ccopyreg\n_reconstructor\ncmem_transformer\nA\ncmem_transformer\nB\nN\x87R",
            b"ctorch._utils\n_rebuild_parameter\nN\x85R",
            b"ctorch._utils\n_rebuild_tensor\n(NK\x00))tR",
            b"ctorch\nFloatStorage\n)R",
            b"ctorch\nSize\n]\x85R",
            b"ctorch\nSize\n))\x85\x85R",
        ],
    )
    def test_listed_functions_take_only_what_files_give_them(self, tmp_path, arguments):
        refused(contained(tmp_path, b"\x80\x02" + arguments + b".", "plain"), "cannot be read")

    def test_code_inside_a_reference(self, tmp_path, marker):
        call = b"cos\nsystem\n" + op(f"touch {marker}") + b"\x85R"
        for reference in [
            call,
            b"(" + op("storage") + call + op("0") + op("cpu") + op(4) + b"NtQ",
            b"(" + op("module") + b"cos\nsystem\nNNtQ",
            b"(" + op("storage") + b"ctorch\nFloatStorage\n" + call + op("cpu") + op(4) + b"NtQ",
        ]:
            for make in (old_container, zip_container):
                path = make(tmp_path, b"\x80\x02" + reference + b".", [("0", 4, bytes(16))])
                refused(path, "os.system", RefusedGlobalError)
        refused(old_container(tmp_path, b"\x80\x02(" + op("module") + b"c__builtin__\nset\nNNtQ."), "neither a storage nor")

    def test_code_around_the_object_of_an_old_container(self, tmp_path, marker):
        call = b"\x80\x02cos\nsystem\n" + op(f"touch {marker}") + b"\x85R."
        path = old_container(tmp_path, b"\x80\x02}.")
        good = path.read_bytes()
        ends = [i + 1 for i in range(len(good)) if good[i : i + 1] == b"."]
        assert len(ends) == 5
        for begin, end in zip([0, *ends], ends, strict=False):
            path.write_bytes(good[:begin] + call + good[end:])
            refused(path, "os.system", RefusedGlobalError)

    def test_long_and_strange_names_stay_one_short_line(self, tmp_path):
        for name in ["a\nb\r\x1b[31m", "x" * 100_000, "é\u2028"]:
            pickled = b"\x80\x04" + op("os") + op(name) + b"\x93."
            with pytest.raises(RefusedGlobalError) as caught:
                RestrictedFile(contained(tmp_path, pickled, "plain"))
            assert len(str(caught.value)) < 600 and str(caught.value).isprintable()

    @pytest.mark.parametrize(
        "pickled",
        [
            b"\x80\x02Nr\xff\xff\xff\xff.",  # a memo of 2**32 places
            b"\x80\x04\x8e" + b"\xff" * 8 + b".",  # 2**64 bytes announced
            b"\x80\x04\x8d" + b"\xff\xff\xff\xff\xff\x00\x00\x00.",
            b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
            b"\x80\x02\x8b\xff\xff\xff\x7f.",
            b"I" + b"9" * 100_000 + b"\n.",
        ],
    )
    def test_announced_sizes_are_not_believed(self, tmp_path, pickled):
        refused(contained(tmp_path, pickled, "plain"), "cannot be read")

    def test_the_length_of_a_pickle_is_limited(self, tmp_path, monkeypatch):
        monkeypatch.setattr(restricted_pickle, "MAX_PICKLE_BYTES", 100)
        for container in CONTAINERS:
            refused(contained(tmp_path, b"\x80\x02]" + op(list("abcdefghijklmnop") * 9) + b"a.", container), "longer than 100")


class TestBroken:
    @pytest.mark.parametrize("container", CONTAINERS)
    def test_truncated_anywhere(self, tmp_path, container):
        value = {"a": [1, "two", (3.0, None)], "b": {4}}
        if container != "plain":
            value |= {"t": torch.arange(7.0), "s": torch.arange(3)}
        content = save(value, tmp_path / "whole", container).read_bytes()
        path = tmp_path / "part.pt"
        steps = range(len(content)) if len(content) < 1500 else range(0, len(content), 7)
        for length in steps:
            path.write_bytes(content[:length])
            refused(path, "part.pt: ")

    @pytest.mark.parametrize("container", CONTAINERS)
    def test_one_byte_changed_is_read_or_refused(self, tmp_path, container):
        value = {"a": [1, "two", (3.0, None)], "b": {4}}
        if container != "plain":
            value |= {"t": torch.arange(7.0), "s": torch.arange(3)}
        content = save(value, tmp_path / "whole", container).read_bytes()
        path = tmp_path / "changed.pt"
        generator = torch.Generator().manual_seed(0)
        for place, byte in zip(
            torch.randint(len(content), (400,), generator=generator),
            torch.randint(256, (400,), generator=generator),
            strict=True,
        ):
            changed = bytearray(content)
            changed[place] = byte
            path.write_bytes(changed)
            try:
                with RestrictedFile(path) as opened:
                    for tensor in opened.root.values() if isinstance(opened.root, dict) else ():
                        if isinstance(tensor, LazyTensor):
                            tensor.load()
            except InputError:
                pass

    @pytest.mark.parametrize("container", ["zip", "old"])
    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            (rebuild(persistent(), shape=(5,)), "reaches past"),
            (rebuild(persistent(), offset=1), "reaches past"),
            (rebuild(persistent(), offset=5, shape=(0,)), "reaches past"),
            (rebuild(persistent(), shape=(2, 2), stride=(4, 1)), "reaches past"),
            (rebuild(persistent(), shape=(1 << 60,), stride=(0,)), "reaches past"),
            (rebuild(persistent(), shape=(2,), stride=(1 << 62,)), "reaches past"),
            (rebuild(persistent(), shape=(1,) * 65, stride=(1,) * 65), "fit each other"),
            (rebuild(persistent(), shape=(-1,)), "fit each other"),
            (rebuild(persistent(), offset=-1), "fit each other"),
            (rebuild(persistent(), offset=True), "fit each other"),
            (rebuild(persistent(), shape=(2.0,)), "fit each other"),
            (rebuild(persistent(), stride=()), "fit each other"),
            (rebuild(persistent(), shape=[4]), "fit each other"),
            (rebuild(persistent(), rest=(False, {1: 2})), "hooks"),
            (rebuild(persistent(), rest=(False, None, {"conj": True})), "conjugated"),
            (rebuild(persistent(numel=5)), "holds"),
            (rebuild(persistent(numel=3), shape=(3,)), "holds"),
            (rebuild(persistent(numel=-1), shape=(0,)), "without a name or a size"),
            (rebuild(persistent(key=0)), "without a name or a size"),
            (rebuild(persistent(key="1")), "missing"),
            (rebuild(persistent(key="../0")), "missing"),
            (rebuild(persistent(kind="LongStorage", numel=4)), "holds|ends inside"),
            (rebuild(persistent(view=("v", 3, 2)), shape=(2,)), "part of a storage"),
            (rebuild(persistent(view=("v", 1))), "part of a storage"),
            (rebuild(persistent(head="file")), "neither a storage nor"),
            (persistent() + b"0" + persistent(kind="IntStorage"), "two types"),
            (op("0") + b"Q", "no tuple"),
            (b")Q", "no tuple"),
            (b"(" + op("storage") + b"tQ", "neither a storage nor"),
            (rebuild(op(1)), "without a storage"),
        ],
    )
    def test_tensors_that_do_not_fit_their_storage(self, tmp_path, container, tensor, message):
        make = {"zip": zip_container, "old": old_container}[container]
        path = make(tmp_path, b"\x80\x02" + tensor + b".", [("0", 4, bytes(16))])
        refused(path, message)

    def test_references_outside_a_torch_container(self, tmp_path):
        for pickled in (b"\x80\x02" + persistent() + b".", b"P0\n."):
            refused(contained(tmp_path, pickled, "plain"), "outside the pickle")

    def test_big_endian_files(self, tmp_path, monkeypatch):
        for path in (
            zip_container(tmp_path, b"N.", byteorder=b"big"),
            old_container(tmp_path, b"N.", little_endian=False),
        ):
            refused(path, "big-endian")
        path = zip_container(tmp_path, b"N.")
        monkeypatch.setattr(sys, "byteorder", "big")
        refused(path, "big-endian")

    def test_containers_of_another_make(self, tmp_path):
        storages = [("0", 4, bytes(16))]
        tensor = b"\x80\x02" + rebuild(persistent()) + b"."
        refused(old_container(tmp_path, tensor, storages, version=1000), "not the version")
        refused(old_container(tmp_path, tensor, [*storages, ("1", 1, bytes(4))]), r"1 belong to no tensor")
        refused(old_container(tmp_path, tensor, storages * 2), "missing")
        path = old_container(tmp_path, tensor, storages)
        path.write_bytes(path.read_bytes() + b"\0")
        refused(path, "more data after the storages")
        refused(zip_container(tmp_path, tensor, storages, root="a/b"), "0 members")
        path = zip_container(tmp_path, tensor, storages)
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("other/data.pkl", tensor)
        refused(path, "2 members")
        path = zip_container(tmp_path, tensor, storages)
        with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("model/data/0", bytes(16))
        refused(path, "one name")
        refused(zip_container(tmp_path, tensor + b"N."), "missing")
        refused(zip_container(tmp_path, b"N.N."), "more data after the pickle")
        refused(contained(tmp_path, b"N.\n", "plain"), "more data after the pickle")

    def test_a_damaged_member_is_noticed_on_loading(self, tmp_path):
        path = save({"a": torch.full((8,), 1.5)}, tmp_path / "t.pt", "zip")
        content = path.read_bytes()
        path.write_bytes(content.replace(struct.pack("<f", 1.5) * 8, struct.pack("<f", 2.5) * 8))
        with RestrictedFile(path) as opened, pytest.raises(InputError, match="CRC"):
            opened.root["a"].load()

    def test_a_file_cut_after_opening(self, tmp_path):
        path = save({"a": torch.ones(3000)}, tmp_path / "t.pt", "old")
        with RestrictedFile(path) as opened:
            os.truncate(path, 9000)
            with pytest.raises(InputError, match="ends inside the storage"):
                opened.root["a"].load()

    def test_deep_nesting(self, tmp_path):
        """Building it takes no recursion; what does, ends in an error that is caught."""
        (tmp_path / "deep.pkl").write_bytes(b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".")
        with RestrictedFile(tmp_path / "deep.pkl") as opened:
            assert isinstance(opened.root, list)

    @pytest.mark.parametrize(
        "deeper",
        [
            b"\x85",
            b"N\x86",
            b"NN\x87",
            b"2\x86",
            b"q\x00(h\x00t",
            b"\x94h\x00\x86",
            b"(]0(1\x85",
            b"\x85(e",
            b"N\x85b",
            b"]\x94h\x00\x85b",
        ],
    )
    @pytest.mark.parametrize("start", [b"}", b"\x8f("])
    def test_deep_tuples_as_keys(self, tmp_path, deeper, start):
        """Hashed, they would end the process."""
        end = b"Ns." if start == b"}" else b"\x90."
        (tmp_path / "deep.pkl").write_bytes(b"\x80\x04" + start + b")" + deeper * 50_000 + end)
        refused(tmp_path / "deep.pkl", "cannot be read")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty"),
            (b"not a pickle\n", "cannot be read"),
            (b'{"json": 1}', "cannot be read"),
            (b"PK\x03\x04", "cannot be read"),
            (b"\x80\x09N.", "cannot be read"),
            (b"\x80\x02.", "cannot be read"),
            (b"\x80\x02h\x05.", "cannot be read"),
            (bytes(100), "cannot be read"),
        ],
    )
    def test_what_is_no_such_file(self, tmp_path, content, message):
        (tmp_path / "x.pt").write_bytes(content)
        refused(tmp_path / "x.pt", message)

    def test_no_file(self, tmp_path):
        refused(tmp_path / "x.pt", "no such file")
        refused(tmp_path, "is a folder")

    def test_the_file_is_closed_after_an_error(self, tmp_path, monkeypatch):
        path = contained(tmp_path, b"cos\nsystem\n.", "plain")
        file = path.open("rb")
        monkeypatch.setattr(type(path), "open", lambda *_: file)
        refused(path, "os.system")
        assert file.closed
