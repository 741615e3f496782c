"""Corpora on disk, documents, the two layouts of streams, and the loader that goes on where it was."""

import copy
import functools
import json
import mmap
import os
import random
import subprocess
import sys
import threading
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from oracles import golden
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl import corpus as corpus_module
from modeling_xl import text as text_module
from modeling_xl.corpus import Corpus
from modeling_xl.data import Blocks, StreamLoader, Streams
from modeling_xl.text import InputError, byte_tokenizer, encode, read_text

CPU = torch.device("cpu")
PARTS = [
    "Tell me, O Muse,",
    "of the man — ὁ πολύτροπος —",
    "    indented twice",
    "who wandered full many ways",
    "a",
    "„Häuser“",
]


def make_text(num_lines: int, seed: int = 0) -> str:
    """Lines of many kinds, with all sorts of space between them, and no end to the last."""
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(PARTS, k=rng.randint(0, 4))) + rng.choice(["\n", "\n", "\r\n", "\n\n", "\n\n\n", " \n"])]
    lines += [" ".join(rng.choices(PARTS, k=rng.randint(0, 4))) + rng.choice(["\n", "\n", "\n\n"]) for _ in range(num_lines)]
    return "".join(lines) + "the end"


TEXT = make_text(150)


def byte_level(pattern: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits text as GPT-2 does, or by a pattern, so that several line ends may be one token."""
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def word_level(split: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    words = sorted(set(TEXT.split()))[:-2]
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0} | {word: i for i, word in enumerate(words, 1)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def with_dummy_prefix() -> PreTrainedTokenizerFast:
    """As Llama's of SentencePiece: a space before every text, no splitting into words, line ends that join with nothing."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def reversing() -> PreTrainedTokenizerFast:
    """No cut leaves its tokens as they are: what stands at the end of a text becomes another token."""
    tokenizer = Tokenizer(models.WordLevel({"end": 0, "word": 1}, unk_token="word"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\S+\s*\z"), "end"), normalizers.Replace("\n", " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "gpt2": byte_level,
    "line-ends-joined": lambda: byte_level(r"\s*[\r\n]+|\s+(?!\S)|\s?\S+"),
    "words": lambda: word_level(pre_tokenizers.WhitespaceSplit()),
    "unknown-line-ends": lambda: word_level(pre_tokenizers.Split(Regex(r"\n|[^\S\n]+"), "isolated")),
    "dummy-prefix": with_dummy_prefix,
}


@pytest.fixture(scope="module")
def tokenizers():
    """Makes a tokenizer by its name, once."""
    return functools.cache(lambda name: TOKENIZERS[name]())


@pytest.fixture
def small_pieces(monkeypatch):
    """Texts of some thousand characters are read and cut as large ones are."""
    monkeypatch.setattr(text_module, "CHUNK_BYTES", 301)
    monkeypatch.setattr(corpus_module, "CHUNK_BYTES", 301)
    monkeypatch.setattr(corpus_module, "LEAST_PIECE", 211)
    monkeypatch.setattr(corpus_module, "WINDOW", 40)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


def write(path, content: str):
    path.write_bytes(content.encode())
    return path


def is_mapped(array: np.ndarray) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def documents_of(corpus: Corpus) -> list[list[int]]:
    bounds = [*corpus.document_starts.tolist(), len(corpus)]
    return [corpus.tokens[begin:stop].tolist() for begin, stop in pairwise(bounds)]


class TestReading:
    def test_files_are_joined_byte_for_byte(self, tmp_path, small_pieces):
        paths = [write(tmp_path / "a", TEXT), write(tmp_path / "b", "zwölf\r\n"), write(tmp_path / "c", TEXT)]
        assert read_text(paths) == TEXT + "zwölf\r\n" + TEXT

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "no such file"),
            (b"", "is empty"),
            (b"x" * 300 + "öz".encode() + "zwölf".encode("latin-1"), r"not UTF-8 text \(byte 0xf6 at offset 305\)"),
            (b"x" * 400 + "ö".encode()[:1], r"not UTF-8 text \(byte 0xc3 at offset 400\)"),
            (b"x" * 300 + "ö".encode() + b"\0", r"not text \(NUL byte at offset 302\)"),
        ],
        ids=["missing", "empty", "latin-1", "cut-off", "binary"],
    )
    @pytest.mark.parametrize(
        "read", [read_text, lambda paths: Corpus.from_files(paths, byte_tokenizer())], ids=["text", "corpus"]
    )
    def test_offsets_count_from_the_beginning_of_the_file(self, tmp_path, small_pieces, read, content, message):
        path = tmp_path / "book.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=rf"book\.txt: .*{message}"):
            read([write(tmp_path / "first.txt", "a text\n"), path])

    def test_a_pipe_is_read_once(self, tmp_path, small_pieces):
        path = tmp_path / "pipe"
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_text, args=(TEXT, "utf-8"))
        writer.start()
        corpus = Corpus.from_files([path], byte_tokenizer())
        writer.join()
        assert corpus.tokens.tolist() == encode(TEXT, byte_tokenizer()).tolist()
        with pytest.raises(InputError, match="pipe: is a pipe, which is read only once"):
            Corpus.from_files([path], byte_tokenizer(), tmp_path)

    def test_a_folder_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="is a folder"):
            Corpus.from_files([tmp_path], byte_tokenizer())


@pytest.mark.filterwarnings("ignore:.*unknown to the tokenizer")
class TestFromFiles:
    @pytest.mark.parametrize("name", TOKENIZERS)
    def test_pieces_give_the_tokens_of_the_whole(self, file, tmp_path, tokenizers, small_pieces, name):
        tokenizer = tokenizers(name)
        paths = [file, write(tmp_path / "b", "\n\nsecond file" + TEXT)]
        pieces = list(corpus_module._pieces(text_module.read_chunks(paths), tokenizer, None))
        assert len(pieces) > 5 and "".join(piece.text for piece in pieces) == read_text(paths)
        corpus = Corpus.from_files(paths, tokenizer)
        assert corpus.tokens.tolist() == encode(read_text(paths), tokenizer).tolist()
        assert corpus.num_bytes == sum(path.stat().st_size for path in paths)
        assert corpus.tokens.dtype == np.uint16 and corpus.document_starts is None

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("name", ["gpt2", "line-ends-joined", "dummy-prefix"])
    def test_any_text_and_size_of_piece(self, tmp_path, tokenizers, small_pieces, monkeypatch, name, seed):
        monkeypatch.setattr(text_module, "CHUNK_BYTES", 97 + 61 * seed)
        monkeypatch.setattr(corpus_module, "LEAST_PIECE", 83 + 70 * seed)
        text = make_text(60, seed)
        corpus = Corpus.from_files([write(tmp_path / "a", text)], tokenizers(name))
        assert corpus.tokens.tolist() == encode(text, tokenizers(name)).tolist()

    def test_without_a_place_to_cut_the_text_is_one_piece(self, tmp_path, small_pieces, monkeypatch):
        monkeypatch.setattr(corpus_module, "LONG_PIECE", 1000)
        tokenizer, text = reversing(), "some words\n" * 300
        with pytest.warns(UserWarning, match="held in memory") as caught:
            corpus = Corpus.from_files([write(tmp_path / "a", text)], tokenizer)
        assert len(caught) == 1
        assert corpus.tokens.tolist() == encode(text, tokenizer).tolist() == [1] * 599 + [0]

    def test_a_line_longer_than_a_chunk(self, tmp_path, tokenizers, small_pieces):
        text = "word " * 500 + "\nnext line\n" + "word " * 90
        corpus = Corpus.from_files([write(tmp_path / "a", text)], tokenizers("gpt2"))
        assert corpus.tokens.tolist() == encode(text, tokenizers("gpt2")).tolist()

    def test_processes_give_the_same_in_order(self, file, tokenizers, small_pieces):
        alone = Corpus.from_files([file], tokenizers("gpt2"))
        assert np.array_equal(Corpus.from_files([file], tokenizers("gpt2"), num_workers=2).tokens, alone.tokens)

    @pytest.mark.parametrize("name", ["words", "unknown-line-ends"])
    def test_unknown_words_are_told_once_and_again_from_the_cache(self, file, tmp_path, tokenizers, small_pieces, name):
        with pytest.warns(UserWarning, match="unknown to the tokenizer") as expected:
            encode(TEXT, tokenizers(name))
        for _ in range(2):
            with pytest.warns(UserWarning, match="unknown to the tokenizer") as caught:
                Corpus.from_files([file], tokenizers(name), tmp_path / "cache")
            assert [str(w.message) for w in caught] == [str(w.message) for w in expected]

    def test_a_text_without_tokens_is_refused(self, tmp_path, tokenizers):
        with pytest.raises(InputError, match="makes no token"):
            Corpus.from_files([write(tmp_path / "a", " \n \n")], tokenizers("words"), tmp_path / "cache")
        assert not list((tmp_path / "cache").iterdir())


class TestSeparator:
    @pytest.mark.parametrize("name", ["bytes", "gpt2", "dummy-prefix"])
    @pytest.mark.parametrize("separator", ["<|end|>", "(*)", ""])
    @pytest.mark.parametrize("last", ["", "\n", "\nlast one\n"])
    def test_each_document_is_tokenised_on_its_own(self, tmp_path, tokenizers, small_pieces, separator, name, last):
        tokenizer = tokenizers(name)
        lines = [line for line in TEXT.splitlines() if line.strip()]
        documents = ["\n".join(lines[i : i + 7 + i % 40]) + "\n" for i in range(0, 90, 9)]
        text = f"{separator}\n".join(documents[:5]) + f"{separator}\r\n" + f"{separator}\n".join(documents[5:])
        text = f"{separator}\n" + text + f"{separator}\n{separator}" + last  # before the first, and two at the end
        corpus = Corpus.from_files([write(tmp_path / "a", text)], tokenizer, separator=separator)
        if last.strip():
            documents.append("last one\n")
        assert documents_of(corpus) == [encode(document, tokenizer).tolist() for document in documents]
        assert corpus.num_bytes == len("".join(documents).encode())

    def test_only_whole_lines_divide(self, tmp_path):
        text = "one\nEND\ntwo END\nEND \n END\nEND"
        corpus = Corpus.from_files([write(tmp_path / "a", text)] * 2, byte_tokenizer(), separator="END")
        # Between the files stands "END" + "one", which is no line that equals it.
        assert [bytes(number - 3 for number in ids) for ids in documents_of(corpus)] == [
            b"one\n",
            b"two END\nEND \n END\nENDone\n",
            b"two END\nEND \n END\n",
        ]

    def test_a_separator_that_divides_nothing_is_refused(self, file):
        with pytest.raises(InputError, match="separator='THE END': no line"):
            Corpus.from_files([file], byte_tokenizer(), separator="THE END")
        with pytest.raises(InputError, match="must be one line"):
            Corpus.from_files([file], byte_tokenizer(), separator="a\nb")


class TestCache:
    def test_the_file_is_found_again(self, file, tmp_path, monkeypatch):
        cache = tmp_path / "new" / "cache"
        made = Corpus.from_files([file], byte_tokenizer(), cache)
        names = sorted(path.suffix for path in cache.iterdir())
        assert names == [".json", ".tokens"]
        monkeypatch.setattr(corpus_module, "_pieces", None)  # would be called to tokenise
        found = Corpus.from_files([file], byte_tokenizer(), cache)
        assert np.array_equal(made.tokens, found.tokens) and found.num_bytes == made.num_bytes == len(TEXT.encode())
        assert is_mapped(found.tokens) and not found.tokens.flags.writeable

    def test_another_text_tokenizer_or_separator_is_another_file(self, file, tmp_path, tokenizers):
        cache = tmp_path / "cache"
        changed = write(tmp_path / "b", TEXT[:-1] + "D")
        corpora = [
            Corpus.from_files([file], byte_tokenizer(), cache),
            Corpus.from_files([changed], byte_tokenizer(), cache),
            Corpus.from_files([file], tokenizers("gpt2"), cache),
            Corpus.from_files([file], tokenizers("line-ends-joined"), cache),
            Corpus.from_files([file], byte_tokenizer(), cache, separator=""),
        ]
        assert len(list(cache.glob("*.tokens"))) == 5
        assert corpora[1].tokens[-1] == 3 + ord("D") and corpora[4].document_starts is not None
        file.rename(tmp_path / "other name.txt")
        Corpus.from_files([tmp_path / "other name.txt"], byte_tokenizer(), cache)
        assert len(list(cache.glob("*.tokens"))) == 5

    @pytest.mark.parametrize(
        "damage",
        [
            lambda tokens, facts: tokens.write_bytes(tokens.read_bytes()[:-1]),
            lambda tokens, facts: tokens.write_bytes(b"x" + tokens.read_bytes()[1:]),
            lambda tokens, facts: tokens.unlink(),
            lambda tokens, facts: facts.unlink(),
            lambda tokens, facts: facts.write_text(facts.read_text()[:-3]),
            lambda tokens, facts: facts.write_text("[]"),
            lambda tokens, facts: facts.write_text("{}"),
        ],
        ids=["short", "flipped", "no-tokens", "no-facts", "half-facts", "list", "empty"],
    )
    def test_what_is_damaged_is_made_again(self, file, tmp_path, damage):
        expected = Corpus.from_files([file], byte_tokenizer(), tmp_path / "cache", separator="")
        tokens, facts = (next((tmp_path / "cache").glob(f"*.{suffix}")) for suffix in ("tokens", "json"))
        before, read = json.loads(facts.read_text()), tokens.read_bytes()
        damage(tokens, facts)
        again = Corpus.from_files([file], byte_tokenizer(), tmp_path / "cache", separator="")
        assert documents_of(again) == [encode(part, byte_tokenizer()).tolist() for part in documents_text()]
        assert json.loads(facts.read_text()) == before and tokens.read_bytes() == read
        assert len(again) == len(expected)

    def test_a_run_that_fails_leaves_nothing(self, file, tmp_path, monkeypatch):
        monkeypatch.setattr(corpus_module._JobEncoder, "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Corpus.from_files([file], byte_tokenizer(), tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_large_vocabularies_take_four_bytes(self, tmp_path, file):
        words = {f"w{i}": i for i in range(2**16)} | {"a": 2**16}
        tokenizer = Tokenizer(models.WordLevel(words))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        corpus = Corpus.from_files(
            [write(tmp_path / "a", "w1 a")], PreTrainedTokenizerFast(tokenizer_object=tokenizer), tmp_path
        )
        assert corpus.tokens.dtype == np.int32 and corpus.tokens.tolist() == [1, 2**16]


def documents_text() -> list[str]:
    """TEXT, whose documents end at each empty line."""
    documents, lines = [], []
    for line in [*TEXT.splitlines(keepends=True), "\n"]:
        if line.strip("\r\n"):
            lines.append(line)
        elif lines:
            documents.append("".join(lines))
            lines = []
    return documents


class TestFromDataset:
    rows = ("first one", "", "zweiter — Text\n", "x", "the last of them")

    def expected(self, tokenizer, eos: list[int]) -> list[list[int]]:
        return [encode(row, tokenizer).tolist() + eos for row in self.rows if row]

    @pytest.mark.parametrize("name", ["bytes", "gpt2"])
    @pytest.mark.parametrize("append_eos", [True, False])
    @pytest.mark.parametrize("iterable", [False, True], ids=["dataset", "iterable"])
    @pytest.mark.parametrize("cached", [False, True], ids=["memory", "file"])
    def test_each_row_is_a_document(self, tmp_path, tokenizers, name, append_eos, iterable, cached):
        tokenizer = tokenizers(name)
        dataset = datasets.Dataset.from_dict({"id": list(range(5)), "story": self.rows})
        dataset = dataset.to_iterable_dataset() if iterable else dataset
        cache = tmp_path / "cache" if cached else None
        for _ in range(2):
            corpus = Corpus.from_dataset(dataset, tokenizer, "story", cache, append_eos=append_eos)
            assert documents_of(corpus) == self.expected(tokenizer, [tokenizer.eos_token_id] if append_eos else [])
            assert corpus.num_bytes == len("".join(self.rows).encode()) and corpus.tokens.dtype == np.uint16
        assert not cached or len(list(cache.glob("*.tokens"))) == 1

    def test_a_generator_and_many_rows(self, tmp_path, tokenizers):
        def generate():
            yield from ({"text": f"row {i}" * (i % 3)} for i in range(2501))

        tokenizer = tokenizers("gpt2")
        expected = [[*encode(f"row {i}" * (i % 3), tokenizer).tolist(), tokenizer.eos_token_id] for i in range(2501) if i % 3]
        iterable = datasets.IterableDataset.from_generator(generate)
        assert documents_of(Corpus.from_dataset(iterable, tokenizer, cache_dir=tmp_path)) == expected
        rows = datasets.Dataset.from_list(list(generate()))
        assert documents_of(Corpus.from_dataset(rows, tokenizer, num_proc=2)) == expected

    def test_another_dataset_is_another_file(self, tmp_path):
        for rows in (["one"], ["two"], ["on", "e"]):
            dataset = datasets.Dataset.from_dict({"text": rows})
            for kind in (dataset, dataset.to_iterable_dataset()):
                corpus = Corpus.from_dataset(kind, byte_tokenizer(), cache_dir=tmp_path)
                assert [byte_tokenizer().decode(ids[:-1]) for ids in documents_of(corpus)] == rows

    def test_what_cannot_be_used_is_refused(self):
        dataset = datasets.Dataset.from_dict({"text": ["a"], "number": [1]})
        with pytest.raises(InputError, match="column='story': the dataset has 'text', 'number'"):
            Corpus.from_dataset(dataset, byte_tokenizer(), "story")
        with pytest.raises(InputError, match="a row holds 1, which is no text"):
            Corpus.from_dataset(dataset, byte_tokenizer(), "number")
        with pytest.raises(InputError, match="is a DatasetDict; give one"):
            Corpus.from_dataset(datasets.DatasetDict(train=dataset), byte_tokenizer())
        with pytest.raises(InputError, match="makes no token"):
            Corpus.from_dataset(datasets.Dataset.from_dict({"text": [""]}), byte_tokenizer())


class TestCorpus:
    def test_a_split_is_two_views(self, file, tmp_path):
        for corpus in (Corpus(torch.arange(10)), Corpus.from_files([file], byte_tokenizer(), tmp_path)):
            size = len(corpus)
            before, held_out = corpus.split(0.25)
            assert len(held_out) == size // 4 and len(before) + len(held_out) == size
            assert np.array_equal(np.concatenate([before.tokens, held_out.tokens]), corpus.tokens)
            assert all(np.shares_memory(part.tokens, corpus.tokens) for part in (before, held_out))
            assert before.num_bytes is held_out.num_bytes is None
        everything, nothing = corpus.split(0)
        assert len(everything) == size and everything.num_bytes == corpus.num_bytes
        assert len(nothing) == nothing.num_bytes == 0

    @pytest.mark.parametrize(("fraction", "cut"), [(0, 20), (0.01, 20), (0.3, 13), (0.4, 13), (0.5, 8), (0.9, 3), (1, 0)])
    def test_a_split_keeps_documents_whole(self, fraction, cut):
        before, held_out = Corpus(np.arange(20), [0, 3, 8, 13], num_bytes=40).split(fraction)
        assert (before.tokens.tolist(), held_out.tokens.tolist()) == (list(range(cut)), list(range(cut, 20)))
        assert before.document_starts.tolist() == [start for start in (0, 3, 8, 13) if start < cut]
        assert held_out.document_starts.tolist() == [start - cut for start in (0, 3, 8, 13) if cut <= start < 20]

    @pytest.mark.parametrize("starts", [[1, 3], [0, 3, 3], [0, 20], [[0, 3]], [0, 5, 4], []], ids=str)
    def test_beginnings_that_cannot_be_are_refused(self, starts):
        with pytest.raises(InputError, match="document_starts must rise from 0"):
            Corpus(np.arange(20), starts)

    def test_other_errors_name_the_rule(self):
        with pytest.raises(InputError, match=r"one sequence \[N\] of integers, got shape \[2, 3\]"):
            Corpus(torch.zeros(2, 3, dtype=torch.long))
        with pytest.raises(InputError, match="of float32"):
            Corpus(torch.zeros(3))
        with pytest.raises(InputError, match=r"fraction=1\.5"):
            Corpus(np.arange(20)).split(1.5)
        with pytest.raises(InputError, match="one document cannot be split"):
            Corpus(np.arange(20), [0]).split(0.5)

    def test_a_mapped_corpus_travels_as_the_name_of_its_file(self, file, tmp_path):
        corpus = Corpus.from_files([file], byte_tokenizer(), tmp_path, separator="")
        for part in (corpus, *corpus.split(0.3), corpus.split(0.5)[1].split(0.4)[0]):
            assert part.__getstate__()["tokens"] is None
            copied = copy.deepcopy(part)
            assert is_mapped(copied.tokens) and not np.shares_memory(copied.tokens, part.tokens)
            assert np.array_equal(copied.tokens, part.tokens)
            assert np.array_equal(copied.document_starts, part.document_starts)


def random_corpus(rng: random.Random, with_documents: bool) -> Corpus:
    size = rng.randint(2, 90)
    starts = sorted({0, *rng.sample(range(size), rng.randint(0, size // 2))}) if with_documents else None
    return Corpus(np.arange(500, 500 + size, dtype=np.uint16), starts)


def targets_of(streams: Streams, rows: slice = slice(None)) -> list[torch.Tensor]:
    """For each row (2, n): inputs and targets, where there are targets; all that stands in the blocks is checked."""
    blocks = list(streams.blocks(rows))
    assert [block.is_last for block in blocks] == [False] * (len(blocks) - 1) + [True]
    assert all(block.input_ids.shape[1] == streams.block_len for block in blocks[:-1])
    rows_of = [torch.cat([getattr(block, name) for block in blocks], 1) for name in ("input_ids", "targets")]
    masks = torch.cat([torch.ones_like(b.targets) if b.attention_mask is None else b.attention_mask for b in blocks], 1)
    assert torch.equal(masks.sum(1), streams.lengths[rows])
    assert not masks.diff(dim=1).clamp(min=0).any()  # pads stand at the end
    assert not rows_of[0][masks == 0].any() and (rows_of[1][masks == 0] == -100).all()
    if (starts := streams.corpus.document_starts) is not None:
        ids = torch.cat([block.document_ids for block in blocks], 1)
        places = rows_of[0] - 500
        assert torch.equal(ids[masks == 1], torch.from_numpy(np.searchsorted(starts, places[masks == 1].numpy(), "right") - 1))
    else:
        assert all(block.document_ids is None for block in blocks)
    found = []
    for inputs, targets in zip(*rows_of, strict=True):
        is_target = targets != -100
        assert torch.equal(inputs[is_target] + 1, targets[is_target])  # the token before
        found.append(targets[is_target])
    assert sum(block.num_targets for block in blocks) == sum(map(len, found))
    return found


def expected_targets(corpus: Corpus) -> list[int]:
    starts = {0} if corpus.document_starts is None else set(corpus.document_starts.tolist())
    return [int(token) for place, token in enumerate(corpus.tokens) if place not in starts]


class TestStreams:
    @pytest.mark.parametrize("seed", range(60))
    def test_every_token_is_a_target_once_but_the_first_of_each_document(self, seed):
        rng = random.Random(seed)
        corpus = random_corpus(rng, with_documents=seed % 3 > 0)
        num_streams, block_len = rng.randint(1, min(9, len(corpus) - 1)), rng.randint(1, 30)
        streams = Streams(corpus, num_streams, block_len)
        rows = targets_of(streams)
        assert torch.cat(rows).tolist() == expected_targets(corpus)
        assert int(streams.lengths.max() - streams.lengths.min()) <= 1
        assert int(streams.lengths.sum()) == len(corpus) - 1

    @pytest.mark.parametrize("seed", range(60))
    def test_packed_documents_are_whole_and_balanced(self, seed):
        rng = random.Random(seed)
        corpus = random_corpus(rng, with_documents=True)
        starts = corpus.document_starts.tolist()
        num_streams, block_len = rng.randint(1, min(7, len(starts))), rng.randint(1, 30)
        streams = Streams(corpus, num_streams, block_len, layout="documents")
        assert sorted(torch.cat(targets_of(streams)).tolist()) == expected_targets(corpus)
        rows: list[list[int]] = [[] for _ in range(num_streams)]
        for begin, stop in pairwise([*starts, len(corpus)]):
            min(rows, key=len).extend(range(500 + begin, 500 + stop))
        blocks = list(streams.blocks())
        read = torch.cat([block.input_ids for block in blocks], 1)
        assert [row[row > 0].tolist() for row in read] == rows

    @pytest.mark.parametrize("layout", ["streams", "documents"])
    @pytest.mark.parametrize("seed", range(8))
    def test_rows_are_read_alone_as_together(self, layout, seed):
        rng = random.Random(100 + seed)
        corpus = Corpus(np.arange(500, 591), sorted({0, *rng.sample(range(91), 20)}))
        streams = Streams(corpus, 7, rng.randint(1, 20), layout)
        for first in range(0, 7, 3):
            rows = slice(first, first + 3)
            assert all(map(torch.equal, targets_of(streams, rows), targets_of(streams)[rows]))
            for number, whole in enumerate(streams.blocks()):
                part = streams.block(number, rows)
                assert torch.equal(part.input_ids, whole.input_ids[rows]) and torch.equal(part.targets, whole.targets[rows])
                assert torch.equal(part.document_ids, whole.document_ids[rows]) and part.is_last == whole.is_last
                mask = torch.ones_like(part.targets) if part.attention_mask is None else part.attention_mask
                assert whole.attention_mask is None or torch.equal(mask, whole.attention_mask[rows])

    def test_hand_computed(self):
        corpus = Corpus(np.array([7, 8, 9, 11, 12, 13, 14, 21, 31, 32]), [0, 3, 7, 8])  # 3, 4, 1 and 2 tokens
        (block,) = Streams(corpus, 2, 9).blocks()
        assert block.input_ids.tolist() == [[7, 8, 9, 11, 12], [13, 14, 21, 31, 0]]
        assert block.targets.tolist() == [[8, 9, -100, 12, 13], [14, -100, -100, 32, -100]]
        assert block.document_ids[:, :4].tolist() == [[0, 0, 0, 1], [1, 1, 2, 3]]
        assert block.attention_mask.tolist() == [[1] * 5, [1, 1, 1, 1, 0]]
        assert block.num_targets == 6
        first, second = Streams(corpus, 2, 4, layout="documents").blocks()
        assert first.input_ids.tolist() == [[7, 8, 9, 21], [11, 12, 13, 14]]
        assert first.targets.tolist() == [[8, 9, -100, -100], [12, 13, 14, -100]]
        assert second.input_ids.tolist() == [[31, 32], [0, 0]] and second.targets.tolist() == [[32, -100], [-100, -100]]
        assert first.document_ids.tolist() == [[0, 0, 0, 2], [1, 1, 1, 1]] and first.attention_mask is None
        assert second.attention_mask.tolist() == [[1, 1], [0, 0]] and second.is_last

    def test_what_cannot_be_is_refused(self):
        corpus = Corpus(np.arange(9), [0, 4])
        with pytest.raises(InputError, match=r"2 document\(s\) are too few for 3 streams"):
            Streams(corpus, 3, 2, layout="documents")
        with pytest.raises(InputError, match="needs a corpus with documents"):
            Streams(torch.arange(9), 3, 2, layout="documents")
        with pytest.raises(InputError, match="layout='rows': must be"):
            Streams(corpus, 3, 2, layout="rows")
        with pytest.raises(InputError, match="9 tokens are too few for 9 stream"):
            Streams(corpus, 9, 2)

    def test_model_inputs_have_documents_where_the_corpus_has(self):
        tokens = np.arange(9)
        without = next(Streams(Corpus(tokens), 2, 4).blocks()).model_inputs(CPU)
        assert list(without) == ["input_ids", "attention_mask", "labels", "shift_labels"]
        block = next(Streams(Corpus(tokens, [0, 3]), 2, 4).blocks())
        assert torch.equal(block.model_inputs(CPU)["document_ids"], block.document_ids)


@pytest.mark.parametrize("layout", ["streams", "documents"])
class TestDocumentsInAModel:
    """Report H08: what stands before a border cannot change what comes after it."""

    def losses(self, corpus: Corpus, layout: str, block_len: int) -> dict[int, float]:
        """Nats of each target, by its place in the text."""
        numbered = Corpus(np.arange(len(corpus)), corpus.document_starts)
        places = [block.targets for block in Streams(numbered, 3, block_len, layout).blocks()]
        torch.manual_seed(0)
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
        model = XLForCausalLM(XLConfig(vocab_size=640, segment_len=5, mem_len=40, initializer_range=0.3, **sizes)).eval()
        losses, cache = {}, None
        for block, place in zip(Streams(corpus, 3, block_len, layout).blocks(), places, strict=True):
            with torch.no_grad():
                output = model(**block.model_inputs(CPU), cache=cache, use_cache=True)
            cache = output.cache
            nats = -output.logits.log_softmax(-1).gather(2, block.targets.clamp(min=0)[..., None])[..., 0]
            is_target = block.targets >= 0
            losses |= dict(zip(place[is_target].tolist(), nats[is_target].tolist(), strict=True))
            assert float(output.loss) == pytest.approx(float(nats[is_target].sum()) / max(1, block.num_targets), rel=1e-4)
        return losses

    @pytest.mark.parametrize("block_len", [4, 25])
    def test_a_document_is_scored_as_if_it_stood_alone(self, layout, block_len):
        starts = [0, 11, 12, 30, 43, 51, 70]
        corpus = Corpus(np.arange(500, 583), starts)
        losses = self.losses(corpus, layout, block_len)
        assert sorted(place + 500 for place in losses) == expected_targets(corpus)
        cuts = {0, *Streams(corpus, 3, block_len, layout).starts.tolist()}
        for begin, stop in pairwise([*starts, 83]):
            if cuts & set(range(begin + 1, stop)):
                continue  # a row begins inside
            changed = corpus.tokens.copy()
            changed[:begin] = 501
            changed[stop:] = 502
            other = self.losses(Corpus(changed, starts), layout, block_len)
            places = range(begin + 1, stop)
            assert [other[place] for place in places] == pytest.approx([losses[place] for place in places], abs=2e-5)


class TestStreamLoader:
    corpus = Corpus(np.arange(500, 577), [0, 9, 30, 31, 50, 66])

    def make(self, **options) -> StreamLoader:
        return StreamLoader(Streams(self.corpus, 3, 5), **options)

    def read(self, blocks) -> list[list]:
        return [[block.input_ids.tolist(), block.targets.tolist(), block.is_last] for block in blocks]

    def of_streams(self, rows: slice = slice(None)) -> list[list]:
        streams = Streams(self.corpus, 3, 5)
        return self.read(streams.block(number, rows) for number in range(len(streams)))

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_passes_in_order(self, num_workers):
        loader = self.make(num_workers=num_workers)
        assert self.read(loader) == self.read(loader) == self.of_streams()
        assert len(loader) == 6
        assert self.read(self.make(num_workers=num_workers, start=4)) == self.of_streams()[4:]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_it_goes_on_at_every_position(self, num_workers):
        """Report H18: blocks that workers have read ahead, but that were not handed out, come again."""
        expected = self.of_streams()
        for position in range(len(expected) + 1):
            first = self.make(num_workers=num_workers)
            iterator = iter(first)
            handed_out = self.read(next(iterator) for _ in range(position))
            state = json.loads(json.dumps(first.state_dict()))
            assert state["position"] == position
            del iterator
            second = self.make(num_workers=num_workers)
            second.load_state_dict(state)
            assert handed_out + self.read(second) == expected
            assert int(next(iter(second)).input_ids[0, 0]) == 500  # and then the next pass

    def test_a_loop_that_was_left_is_taken_up(self):
        loader = self.make()
        for block in loader:
            if int(block.input_ids[0, 0]) == 510:
                break
        assert [int(block.input_ids[0, 0]) for block in loader] == [515, 520, 525]

    def test_ranks_read_their_rows_and_make_the_same_steps(self):
        shards = [self.read(self.make(rows=slice(first, first + 1))) for first in range(3)]
        assert [len(shard) for shard in shards] == [6, 6, 6]
        assert [[inputs[0] for inputs, *_ in blocks] for blocks in zip(*shards, strict=True)] == [
            inputs for inputs, *_ in self.of_streams()
        ]

    def test_state_of_other_streams_is_refused(self):
        state = self.make().state_dict()
        for streams in (Streams(self.corpus, 2, 5), Streams(self.corpus, 3, 4), Streams(self.corpus, 3, 5, "documents")):
            with pytest.raises(InputError, match="that of other streams: "):
                StreamLoader(streams).load_state_dict(state)
        StreamLoader(Streams(self.corpus, 3, 5), rows=slice(1)).load_state_dict(state)
        with pytest.raises(InputError, match="start=7: must be from 0"):
            self.make(start=7)

    def test_randomness_outside_is_left_alone(self):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        self.read(self.make())
        assert torch.equal(torch.get_rng_state(), before)

    def test_blocks_come_by_number_too(self):
        blocks = Blocks(Streams(self.corpus, 3, 5), slice(1, 3))
        loader = DataLoader(blocks, batch_size=None, collate_fn=lambda block: block)
        assert [block.input_ids.tolist() for block in loader] == [inputs for inputs, *_ in self.of_streams(slice(1, 3))]

    @pytest.mark.slow
    def test_spawned_workers_read_a_mapped_corpus(self, file, tmp_path):
        corpus = Corpus.from_files([file], byte_tokenizer(), tmp_path)
        streams = Streams(corpus, 3, 1000)
        loader = DataLoader(
            Blocks(streams), batch_size=None, collate_fn=first_ids, num_workers=1, multiprocessing_context="spawn"
        )
        assert [ids.tolist() for ids in loader] == [block.input_ids[:, 0].tolist() for block in streams.blocks()]


def first_ids(block):
    return block.input_ids[:, 0].clone()


LIMIT = """
import resource, sys
import modeling_xl.evaluate
from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.corpus import Corpus
from modeling_xl.data import StreamLoader, Streams
from modeling_xl.text import byte_tokenizer

path, cache, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = byte_tokenizer()
with open("/proc/self/status") as file:
    used = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + room,) * 2)  # anonymous memory; maps of files do not count
corpus = Corpus.from_files([path], tokenizer, cache)
"""
READ = """
num_targets = sum(block.num_targets for block in StreamLoader(Streams(corpus, 16, 4096)))
print(len(corpus), num_targets)
"""
EVALUATE = """
modeling_xl.evaluate.MAX_LOGITS = 2**17
sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "segment_len": 64}
model = XLForCausalLM(XLConfig(vocab_size=16, mem_len=1, position_type="none", **sizes))
result = modeling_xl.evaluate.evaluate(model, corpus, tokenizer, streams=128)
print(len(corpus), result.num_tokens, result.num_bytes)
"""


def run_limited(code: str, path, num_mebibytes: int) -> list[int]:
    """The numbers that the code prints with so much memory on top of what the libraries take."""
    command = [sys.executable, "-c", LIMIT + code, str(path), str(path.parent), str(num_mebibytes * 2**20)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-2000:]
    return [int(number) for number in result.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="limits anonymous memory as Linux counts it")
class TestLargerThanMemory:
    @pytest.mark.parametrize(
        "num_megabytes", [64, pytest.param(1024, marks=pytest.mark.slow)], ids=lambda megabytes: f"{megabytes}MB"
    )
    def test_a_corpus(self, tmp_path, num_megabytes):
        """In 32 MiB, where the text alone has twice that, and its tokens four times."""
        line = ("0123456789abcdef" * 63 + "of a text end.\n").encode()
        assert len(line) == 1023
        path = tmp_path / "large.txt"
        with path.open("wb") as file:
            for _ in range(num_megabytes):
                file.write(line * 1025)
        size = path.stat().st_size
        assert run_limited(READ, path, 32) == [size, size - 1]

    def test_a_text_that_is_evaluated(self, tmp_path):
        """In 48 MiB, of which a call takes most; the tokens as a tensor would have 32 beside it."""
        path = tmp_path / "large.txt"  # of two characters, for a small vocabulary is evaluated faster
        path.write_bytes((b"\t" * 1023 + b"\n") * 2**12)
        assert run_limited(EVALUATE, path, 48) == [2**22, 2**22 - 1, 2**22 - 1]


class TestOriginalIterators:
    """Against the iterator of the original code: column b of its stream is our row b.

    It cuts off the tokens that do not fill all columns, and each column's first token is no target, so that its columns
    have N // B tokens and N // B - 1 targets; ours have (N - 1) / B targets, all of them. So ours over what it kept, with
    one token more a row, is a row longer by one target each, the first token of the next column.
    """

    @pytest.mark.parametrize("number", range(6))
    def test_ordered(self, number):
        case = {
            name.split(".", 1)[1]: value
            for name, value in golden("b10_kimi_iterators").items()
            if name.startswith(f"ordered{number}.")
        }
        stream, (bsz, bptt, ext_len) = case["stream"], case["bsz_bptt_ext"].tolist()
        n_step = len(stream) // bsz
        kept = stream[: n_step * bsz]
        streams = Streams(torch.cat([kept, kept.new_tensor([0])]), bsz, bptt)  # rows of n_step targets
        assert streams.starts.tolist() == [row * n_step for row in range(bsz)]
        inputs = torch.cat([block.input_ids for block in streams.blocks()], 1)
        assert torch.equal(inputs.t(), case["layout"])
        num_blocks = int(case["n_yielded"])
        blocks = [streams.block(i) for i in range(num_blocks)]
        for i, block in enumerate(blocks):
            seq_len = int(case[f"b{i}.seq_len"])
            columns = slice(max(0, i * bptt - ext_len), i * bptt + seq_len)
            assert torch.equal(inputs[:, columns].t(), case[f"b{i}.data"])  # ext_len repeats what memory carries here
            assert torch.equal(block.targets[:, :seq_len].t(), case[f"b{i}.target"])
        left = sum(block.num_targets for block in streams.blocks()) - sum(
            case[f"b{i}.target"].numel() for i in range(num_blocks)
        )
        assert left == bsz  # the targets at the borders of its columns
        assert len(streams) - num_blocks == int(n_step % bptt == 1)

    def test_the_tokens_it_cuts_off_are_targets_here(self):
        stream = golden("b10_kimi_iterators")["ordered0.stream"]
        assert len(stream) % 4 == 3
        assert torch.cat(targets_of_any(Streams(stream, 4, 8))).tolist() == stream[1:].tolist()

    def test_sentences_are_packed_in_another_way(self):
        """Its rows go on with the next sentence where one ends, without a border, and it drops the last incomplete batch."""
        case = golden("b10_kimi_iterators")
        lengths, stream = case["sentences0.lens"], case["sentences0.stream"]
        corpus = Corpus(stream, (lengths.cumsum(0) - lengths).numpy())
        streams = Streams(corpus, 2, 4, layout="documents")
        first, theirs = next(streams.blocks()), case["sentences0.b0.data"].t()
        assert torch.equal(first.input_ids, theirs)  # the first two sentences are longer than a segment
        assert sum(block.num_targets for block in streams.blocks()) == len(stream) - len(lengths)


def targets_of_any(streams: Streams) -> list[torch.Tensor]:
    rows = torch.cat([block.targets for block in streams.blocks()], 1)
    return [row[row != -100] for row in rows]
