"""Corpora that may be larger than memory: tokenised piece by piece into a file, and read there through a memory map.

Letters: N tokens of the text, D documents in it.
"""

import hashlib
import io
import json
import multiprocessing
import os
import re
import uuid
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from tqdm import tqdm
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from .text import CHUNK_BYTES, InputError, encode_each, read_chunks, warn_of_unknown

if TYPE_CHECKING:  # the library takes a second to import, and most runs need none of it
    from datasets import Dataset, IterableDataset

CACHE_FORMAT = 1  # to be raised when files made by older code must not be found any more
PIECE_TOKENS = 2**18  # handed out at once where a corpus is read from its beginning to its end
LEAST_PIECE = 2**19  # characters of a document before it is cut, and those that a process gets at once
# A cut must leave the tokens of this many characters on both sides as they are; so many places are tried in a chunk.
WINDOW = 256
TRIES = 16
LONG_PIECE = 2**24  # characters without a place to cut after which the user is told
WORTH_PROCESSES = 2**25  # bytes of text below which starting processes takes longer than tokenising


class _Place(NamedTuple):
    """Where on disk the tokens of a corpus lie: entries `begin` to `stop` of a file of `dtype`."""

    path: Path
    dtype: str
    begin: int
    stop: int

    def map(self) -> np.ndarray:
        return np.asarray(np.memmap(self.path, self.dtype, "r", shape=(self.stop,)))[self.begin :]


class Corpus:
    """The tokens of a text, one after the other, and where its documents begin.

    `tokens`: an integer array [N], in memory or mapped from a file, of which only what is indexed is read.
    `document_starts`: int64 [D], rising, the first 0; None for one text without documents.
    `num_bytes`: UTF-8 bytes of the text; None where they were not counted.

    Sent to another process, a mapped corpus travels as the name of its file.
    """

    def __init__(
        self,
        tokens: torch.Tensor | np.ndarray,
        document_starts: np.ndarray | Sequence[int] | None = None,
        num_bytes: int | None = None,
    ):
        array = tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(f"tokens must be one sequence [N] of integers, got shape {list(array.shape)} of {array.dtype}")
        self.tokens = array
        self.document_starts = None if document_starts is None else _checked_starts(document_starts, len(array))
        self.num_bytes = num_bytes
        self._place: _Place | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({} if self._place is None else {"tokens": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._place is not None:
            self.tokens = self._place.map()

    @property
    def num_documents(self) -> int:
        """A text without documents is one."""
        return 1 if self.document_starts is None else len(self.document_starts)

    @property
    def num_targets(self) -> int:
        """Tokens that have another of their document before them."""
        return max(0, len(self) - self.num_documents)

    def pieces(self, begin: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """The tokens from `begin` to `stop` (None: the end) in their order, int64 [n], n at most 2^18."""
        stop = len(self) if stop is None else stop
        for place in range(begin, stop, PIECE_TOKENS):
            yield torch.from_numpy(self.tokens[place : min(place + PIECE_TOKENS, stop)].astype(np.int64))

    def split(self, fraction: float) -> tuple["Corpus", "Corpus"]:
        """Cuts off the last `fraction` (0 to 1) of the tokens: (the corpus before, the held-out one), as views.

        Documents stay whole: the cut moves to the beginning of the nearest. The bytes of the two are not counted.
        """
        if not 0 <= fraction <= 1:
            raise InputError(f"fraction={fraction}: must be from 0 to 1")
        cut = len(self) - int(fraction * len(self))
        if self.document_starts is not None and 0 < cut < len(self):
            if len(self.document_starts) < 2:
                raise InputError("a corpus of one document cannot be split; give more documents, or a text without them")
            cut = int(self.document_starts[1 + np.abs(self.document_starts[1:] - cut).argmin()])
        return self._part(0, cut), self._part(cut, len(self))

    def _part(self, begin: int, stop: int) -> "Corpus":
        starts = self.document_starts
        if starts is not None:
            starts = starts[(starts >= begin) & (starts < stop)] - begin
        whole = stop - begin == len(self)
        part = Corpus(self.tokens[begin:stop], starts, self.num_bytes if whole else 0 if begin == stop else None)
        if self._place is not None and begin < stop:
            part._place = self._place._replace(begin=self._place.begin + begin, stop=self._place.begin + stop)
        return part

    @classmethod
    def from_files(
        cls,
        paths: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        cache_dir: str | Path | None = None,
        separator: str | None = None,
        num_workers: int | None = None,
        progress: bool = False,
    ) -> "Corpus":
        """The tokens of UTF-8 text files, joined in the given order as `read_text` joins them.

        They are written into `cache_dir`, in 2 or 4 bytes a token, and found there again as long as the text, the tokenizer
        and the separator are the same, which takes a reading of its own. None: they are held in memory, and the files, which
        then may be pipes, are read once. A line that equals `separator` ends a document and is not part of the text; each
        document is tokenised on its own.

        A document is tokenised in pieces of about 1 MiB, cut behind line ends, each after a line end whose tokens are then
        dropped, so that a prefix that the tokenizer puts before a text does not come into it. A cut is made only where it
        leaves the tokens of the 256 characters before and after as they are, so that the tokens are those of `encode` on
        the whole. That is certain for bytes and for tokenizers that split text at line ends before anything else; a
        tokenizer that looks further than 256 characters could differ. Where no place is found the text is held in memory and
        tokenised in longer pieces, with a warning.

        `num_workers`: processes (None: the cores of the machine, or none for bytes and for little text). They are spawned,
        so a script must guard its main part with `if __name__ == "__main__"`. Warns as `encode` does, once.
        Raises InputError as `read_text` does, and where the separator divides nothing.
        """
        if separator is not None and ("\n" in separator or "\r" in separator):
            raise InputError(f"separator={separator!r}: must be one line, without its end")
        recipe: dict[str, Any] = {"separator": separator}
        if cache_dir is not None:
            if pipes := [path for path in paths if Path(path).is_fifo()]:
                raise InputError(f"{pipes[0]}: is a pipe, which is read only once; give a file, or no folder for the cache")
            digest = hashlib.sha256()
            for chunk in read_chunks(paths):
                digest.update(chunk.encode())
            recipe["text"] = digest.hexdigest()
        num_bytes = sum(path.stat().st_size for path in map(Path, paths) if path.is_file())
        if num_workers is None:
            cheap = isinstance(tokenizer, ByT5Tokenizer) or num_bytes < WORTH_PROCESSES
            num_workers = 0 if cheap else os.cpu_count() or 1

        def make() -> Iterator[_Encoded]:
            jobs = _jobs(_pieces(read_chunks(paths), tokenizer, separator))
            with tqdm(
                total=num_bytes or None, unit="B", unit_scale=True, desc="tokens", disable=None if progress else True
            ) as progress_bar:
                for encoded in _encoded(jobs, _JobEncoder(tokenizer), num_workers):
                    progress_bar.update(encoded.num_bytes)
                    yield encoded

        corpus = _made_once(cache_dir, recipe, tokenizer, make)
        starts = corpus.document_starts
        if separator is None:
            corpus.document_starts = None
        elif starts is None or len(starts) < 2:
            raise InputError(f"separator={separator!r}: no line that equals it divides the text; give the line that does")
        return corpus

    @classmethod
    def from_dataset(
        cls,
        dataset: "Dataset | IterableDataset",
        tokenizer: PreTrainedTokenizerBase,
        column: str = "text",
        cache_dir: str | Path | None = None,
        append_eos: bool = True,
        num_proc: int | None = None,
    ) -> "Corpus":
        """The tokens of a dataset of the library `datasets`: each row of `column` is a document.

        `append_eos` puts the tokenizer's end token, if it has one, behind each document. Empty rows are left out. Rows are
        tokenised by `dataset.map`, with `num_proc` processes where it is no iterable one, and written into `cache_dir` as
        `from_files` does. They are found again by the dataset's fingerprint; an iterable one is read twice, once for that of
        its text. Raises InputError for anything but one dataset, a column that it lacks, and rows that are no text.
        """
        import datasets

        if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
            raise InputError(f"dataset is a {type(dataset).__name__}; give one Dataset or IterableDataset, such as a split")
        names = dataset.column_names or list(next(iter(dataset), {}))
        if column not in names:
            raise InputError(f"column={column!r}: the dataset has {', '.join(map(repr, names)) or 'no rows'}")
        texts = dataset.select_columns([column])
        eos = tokenizer.eos_token_id if append_eos else None

        def make() -> Iterator[_Encoded]:
            options: dict[str, Any] = {"num_proc": num_proc} if isinstance(dataset, datasets.Dataset) else {}
            dtype = _dtype(tokenizer)
            arguments = {"column": column, "tokenizer": tokenizer, "eos": eos, "dtype": dtype}
            rows = texts.map(_encode_rows, batched=True, remove_columns=[column], fn_kwargs=arguments, **options)
            for batch in rows.with_format("arrow").iter(batch_size=1000):
                ids = batch["ids"].combine_chunks()
                lengths = ids.value_lengths().to_numpy(zero_copy_only=False)
                yield _Encoded(
                    ids.flatten().to_numpy(zero_copy_only=False).astype(dtype),
                    np.cumsum(lengths) - lengths,
                    sum(batch["num_bytes"].to_pylist()),
                    sum(batch["unknown"].to_pylist()),
                )

        recipe: dict[str, Any] = {"column": column, "eos": eos}
        if cache_dir is not None:
            recipe["dataset"] = _dataset_fingerprint(texts, column)
        return _made_once(cache_dir, recipe, tokenizer, make)


def as_corpus(tokens: torch.Tensor | Corpus) -> Corpus:
    return tokens if isinstance(tokens, Corpus) else Corpus(tokens)


def _checked_starts(document_starts: np.ndarray | Sequence[int], num_tokens: int) -> np.ndarray:
    starts = np.asarray(document_starts, np.int64)
    bounds = np.append(starts, num_tokens)
    if starts.ndim != 1 or bounds[0] != 0 or (np.diff(bounds) <= 0).any():
        raise InputError(f"document_starts must rise from 0 and stay below the number of tokens, {num_tokens}")
    return starts


class _Piece(NamedTuple):
    text: str
    begins: bool  # a document; else a line end stands before


class _Encoded(NamedTuple):
    """Tokens that follow those before."""

    ids: np.ndarray  # (n,)
    starts: np.ndarray  # of documents, counted from the first of these tokens
    num_bytes: int  # of their text
    unknown: int


def _pieces(chunks: Iterable[str], tokenizer: PreTrainedTokenizerBase, separator: str | None) -> Iterator[_Piece]:
    """Documents, long ones cut where that leaves their tokens as they are."""
    line = None
    if separator is not None:
        line = re.compile(rf"^{re.escape(separator)}\r?(?:\n|(?<!\n)\Z)", re.MULTILINE)
        chunks = _whole_lines(chunks)
    text, begins, told = "", True, False
    for chunk in chunks:
        more, *documents = [chunk] if line is None else line.split(chunk)
        text += more
        for document in documents:
            yield _Piece(text, begins)
            text, begins = document, True
        if cut := _last_cut(text, tokenizer):
            yield _Piece(text[:cut], begins)
            text, begins = text[cut:], False
        elif len(text) > LONG_PIECE and not told:
            warnings.warn(
                "no line end was found where a cut leaves the tokens as they are; the text is held in memory up to the next",
                stacklevel=2,
            )
            told = True
    yield _Piece(text, begins)


def _whole_lines(chunks: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    for chunk in chunks:
        cut = chunk.rfind("\n") + 1
        if cut:
            yield "".join([*held, chunk[:cut]])
            held = []
        held.append(chunk[cut:])
    yield "".join(held)


def _last_cut(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The last place of the last chunk of `text` where it can be cut; 0 where none is found, or the text is short."""
    if len(text) < LEAST_PIECE:
        return 0
    if isinstance(tokenizer, ByT5Tokenizer):
        return len(text)
    # No piece is shorter than what is looked at around a cut, so that no cut changes what was seen at another.
    first, place = max(WINDOW, len(text) - CHUNK_BYTES - WINDOW), max(0, len(text) - WINDOW)
    for _ in range(TRIES):
        place = text.rfind("\n", first, place)
        if place < 0:
            break
        if _is_seam(text[place + 1 - WINDOW : place + 1], text[place + 1 : place + 1 + WINDOW], tokenizer):
            return place + 1
    return 0


def _is_seam(before: str, after: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    (whole, first, second, line_end), _ = encode_each([before + after, before, "\n" + after, "\n"], tokenizer)
    return _begins_with(second, line_end) and np.array_equal(whole, np.append(first, second[len(line_end) :]))


def _begins_with(ids: np.ndarray, prefix: np.ndarray) -> bool:
    return np.array_equal(ids[: len(prefix)], prefix)


def _jobs(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces together, as there may be many short documents: what one process does at once."""
    job: list[_Piece] = []
    size = 0
    for piece in pieces:
        job.append(piece)
        size += len(piece.text)
        if size >= LEAST_PIECE:
            yield job
            job, size = [], 0
    if job:
        yield job


class _JobEncoder:
    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.dtype = _dtype(tokenizer)

    def __call__(self, job: list[_Piece]) -> _Encoded:
        texts = ["\n", *(piece.text if piece.begins else "\n" + piece.text for piece in job)]
        (line_end, *found), (unknown_line_end, *unknown) = encode_each(texts, self.tokenizer)
        for i, piece in enumerate(job):
            if not piece.begins:
                if not _begins_with(found[i], line_end):
                    raise InputError("the tokenizer joins line ends with what follows; use encode(read_text(...)) instead")
                found[i] = found[i][len(line_end) :]
                unknown[i] -= unknown_line_end
        lengths = np.array([len(ids) for ids in found])
        starts = (np.cumsum(lengths) - lengths)[[piece.begins for piece in job]]
        num_bytes = sum(len(piece.text.encode()) for piece in job)
        return _Encoded(np.concatenate(found, dtype=self.dtype, casting="unsafe"), starts, num_bytes, sum(unknown))


def _dtype(tokenizer: PreTrainedTokenizerBase) -> str:
    return "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "int32"


def _encoded(jobs: Iterable[list[_Piece]], encoder: _JobEncoder, num_workers: int) -> Iterator[_Encoded]:
    """The jobs done, in their order; with processes a few of them are ahead, and never the whole text."""
    if not num_workers:
        yield from map(encoder, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (encoder,)) as pool:
        ahead: deque[Future[_Encoded]] = deque()
        for job in jobs:
            ahead.append(pool.submit(_encode_in_worker, job))
            if len(ahead) > 2 * num_workers:
                yield ahead.popleft().result()
        yield from (future.result() for future in ahead)


_worker: dict[str, _JobEncoder] = {}


def _start_worker(encoder: _JobEncoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _worker["encoder"] = encoder


def _encode_in_worker(job: list[_Piece]) -> _Encoded:
    return _worker["encoder"](job)


def _encode_rows(
    rows: dict[str, list[Any]], column: str, tokenizer: PreTrainedTokenizerBase, eos: int | None, dtype: str
) -> dict[str, list[Any]]:
    texts = rows[column]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"column={column!r}: a row holds {text!r}, which is no text")
    texts = [text for text in texts if text]
    ids, unknown = encode_each(texts, tokenizer) if texts else ([], [])
    if eos is not None:
        ids = [np.append(row, eos) for row in ids]
    return {
        "ids": [row.astype(dtype) for row in ids],
        "num_bytes": [len(text.encode()) for text in texts],
        "unknown": unknown,
    }


def _dataset_fingerprint(dataset: "Dataset | IterableDataset", column: str) -> str:
    known = getattr(dataset, "_fingerprint", None)
    if known is not None:
        return known
    digest = hashlib.sha256()
    for row in dataset:
        content = str(row[column]).encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _made_once(
    cache_dir: str | Path | None,
    recipe: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    make: Callable[[], Iterator[_Encoded]],
) -> Corpus:
    """The corpus that `make` gives: from the cache, where what it is made from has left it there."""
    if cache_dir is None:
        buffer = io.BytesIO()
        facts = _write(make(), buffer)
        content = buffer.getbuffer()
        tokens = np.frombuffer(content, facts["dtype"], facts["num_tokens"])
        corpus = Corpus(tokens, np.frombuffer(content, np.int64, offset=tokens.nbytes), facts["num_bytes"])
    else:
        key = {"format": CACHE_FORMAT, "tokenizer": _tokenizer_fingerprint(tokenizer), **recipe}
        fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        path = Path(cache_dir) / f"{fingerprint}.tokens"
        facts = _read_facts(path) or _write_file(make(), path)
        corpus = _opened(path, facts)
    warn_of_unknown(facts["unknown"], facts["num_tokens"], tokenizer)
    return corpus


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    known = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    return hashlib.sha256(f"{type(tokenizer).__name__} {known}".encode()).hexdigest()


def _write(made: Iterable[_Encoded], file: BinaryIO) -> dict[str, Any]:
    """Writes the tokens, then the beginnings of the documents as int64. Returns what is needed to read them again."""
    num_tokens = num_bytes = unknown = check = 0
    dtype, starts = "", []
    for encoded in made:
        starts.append(encoded.starts + num_tokens)
        num_tokens += len(encoded.ids)
        num_bytes += encoded.num_bytes
        unknown += encoded.unknown
        dtype = encoded.ids.dtype.str
        file.write(encoded.ids.data)
        check = zlib.crc32(encoded.ids.data, check)
    if not num_tokens:
        raise InputError("the tokenizer makes no token of this text; give another text, or another tokenizer")
    # Of a document without a token the next one, or the end, takes the place.
    document_starts = np.unique(np.concatenate(starts)).astype(np.int64)
    document_starts = document_starts[document_starts < num_tokens]
    file.write(document_starts.data)
    check = zlib.crc32(document_starts.data, check)
    return {"num_tokens": num_tokens, "num_bytes": num_bytes, "unknown": unknown, "dtype": dtype, "crc32": check}


def _write_file(made: Iterable[_Encoded], path: Path) -> dict[str, Any]:
    """Both files take their names when they are whole; that of the facts comes last."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path.parent}: cannot be made ({error.strerror}); give another folder for the cache") from None
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            facts = _write(made, file)
        temporary.replace(path)
        temporary.write_text(json.dumps(facts))
        temporary.replace(path.with_suffix(".json"))
    finally:
        temporary.unlink(missing_ok=True)
    return facts


def _read_facts(path: Path) -> dict[str, Any] | None:
    """What was written about a file of tokens; None unless the file is there and whole."""
    check = 0
    try:
        facts = json.loads(path.with_suffix(".json").read_bytes())
        with path.open("rb") as file:
            while content := file.read(CHUNK_BYTES):
                check = zlib.crc32(content, check)
        return facts if facts["crc32"] == check else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _opened(path: Path, facts: dict[str, Any]) -> Corpus:
    place = _Place(path.absolute(), facts["dtype"], 0, facts["num_tokens"])
    tokens = place.map()
    corpus = Corpus(tokens, np.fromfile(path, np.int64, offset=tokens.nbytes), facts["num_bytes"])
    corpus._place = place
    return corpus
