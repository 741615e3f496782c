"""Token streams: what `train` and `evaluate` read.

A stream is one part of the text, read by one row of the batch, segment after segment, so that the memory a row carries
is always the text just before. Letters: N tokens of the text, D documents in it, B streams, T columns of a block.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .corpus import Corpus, as_corpus
from .text import InputError

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Block:
    """One call's worth of the streams. `targets[b, t]` is the token after `input_ids[b, t]`, so it goes to the model as
    `shift_labels`. It is -100 where the stream has ended, and after the last token of a document, which tells nothing of the
    next. `attention_mask` is None where every column is real, `document_ids` where the text has no documents."""

    input_ids: torch.Tensor  # (B, T)
    attention_mask: torch.Tensor | None  # (B, T), 1 = real, 0 = the stream has ended
    targets: torch.Tensor  # (B, T)
    is_last: bool  # the streams end here
    document_ids: torch.Tensor | None = None  # (B, T), the number in the text of the document that the input is of

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORE_INDEX).sum())

    def model_inputs(self, device: torch.device) -> dict[str, torch.Tensor | None]:
        """What a model with a loss is called with, on the device. `document_ids` are among it where there are any."""
        mask, targets = self.attention_mask, self.targets.to(device)
        inputs = {
            "input_ids": self.input_ids.to(device),
            "attention_mask": None if mask is None else mask.to(device),
            "labels": targets,
            "shift_labels": targets,
        }
        return inputs if self.document_ids is None else {**inputs, "document_ids": self.document_ids.to(device)}


class Streams:
    """A text cut into streams, one for each row of a batch, read `block_len` columns at a time.

    `layout="streams"`: contiguous parts of equal length (to one token). A stream's first input is the token before its first
    target, also where the stream begins inside the text, so that every token but the first of the text is a target once.
    `layout="documents"`: whole documents, in their order, each behind those of the row that has the fewest tokens so far (of
    equal ones the first).

    A document's first token is no target in either. The last block holds what is left: it is shorter, and where one stream
    is shorter than another the missing columns are masked. The same arguments give the same blocks.

    tokens: a sequence [N], or a corpus. lengths, starts (B,): columns of each stream, and where in the text it begins.
    """

    def __init__(
        self,
        tokens: torch.Tensor | Corpus,
        num_streams: int,
        block_len: int,
        layout: Literal["streams", "documents"] = "streams",
    ):
        self.corpus = as_corpus(tokens)
        if num_streams < 1 or block_len < 1:
            raise InputError(f"num_streams ({num_streams}) and block_len ({block_len}) must be at least 1")
        self.tokens = self.corpus.tokens
        self.block_len = block_len
        self.layout = layout
        starts, num_tokens = self.corpus.document_starts, len(self.corpus)
        self._bounds = None if starts is None else np.append(starts, num_tokens)
        if layout == "streams":
            self._spans = _contiguous(num_tokens, num_streams)
        elif layout == "documents":
            self._spans = _packed(self._bounds, num_streams)
        else:
            raise InputError(f"layout={layout!r}: must be 'streams' or 'documents'")
        self.lengths = torch.tensor([int(span.ends[-1]) for span in self._spans])
        self.starts = torch.tensor([int(span.shifts[0]) for span in self._spans])
        self._longest = int(self.lengths.max())

    def __len__(self) -> int:
        return -(-self._longest // self.block_len)

    def blocks(self, rows: slice = slice(None)) -> Iterator[Block]:
        """The blocks of the streams `rows`, in reading order."""
        longest = int(self.lengths[rows].max())
        return (self.block(number, rows, longest) for number in range(-(-longest // self.block_len)))

    def block(self, number: int, rows: slice = slice(None), longest: int | None = None) -> Block:
        """The block `number` of the streams `rows`, which are read to the length `longest` (None: that of the longest of all,
        so that processes with different rows make the same calls)."""
        begin, longest = number * self.block_len, self._longest if longest is None else longest
        columns = np.arange(begin, min(begin + self.block_len, longest))
        places = np.stack([span.places(columns) for span in self._spans[rows]])  # (B, T)
        real = torch.from_numpy(columns) < self.lengths[rows, None]
        is_target, document_ids = real, None
        if self._bounds is not None:
            following = np.searchsorted(self._bounds, places, side="right")  # the number of the next document
            is_target = real & torch.from_numpy(self._bounds[following] != places + 1)
            document_ids = torch.from_numpy(following - 1)
        input_ids, targets = self._read(places), self._read(np.minimum(places + 1, len(self.tokens) - 1))
        return Block(
            input_ids.where(real, 0),
            None if bool(real.all()) else real.long(),
            targets.where(is_target, IGNORE_INDEX),
            begin + self.block_len >= longest,
            document_ids,
        )

    def _read(self, places: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.tokens[places].astype(np.int64))


@dataclass(frozen=True)
class _Spans:
    """The parts of the text that one stream reads, one after the other."""

    ends: np.ndarray  # columns of the stream where each part ends
    shifts: np.ndarray  # from a column of the part to its place in the text

    def places(self, columns: np.ndarray) -> np.ndarray:
        """Where in the text the inputs of the columns stand; behind the end, that of the last."""
        columns = np.minimum(columns, self.ends[-1] - 1)
        return columns + self.shifts[np.searchsorted(self.ends, columns, side="right")]


def _contiguous(num_tokens: int, num_streams: int) -> list[_Spans]:
    num_targets = num_tokens - 1
    if num_targets < num_streams:
        raise InputError(
            f"{num_tokens} tokens are too few for {num_streams} stream(s), which need {num_streams + 1} at least; "
            "give a longer text or fewer streams (a smaller batch)"
        )
    length, longer = divmod(num_targets, num_streams)
    return [
        _Spans(np.array([length + (row < longer)]), np.array([row * length + min(row, longer)])) for row in range(num_streams)
    ]


def _packed(bounds: np.ndarray | None, num_streams: int) -> list[_Spans]:
    if bounds is None:
        raise InputError("layout='documents' needs a corpus with documents; give document_starts, or the layout 'streams'")
    starts, lengths = bounds[:-1], np.diff(bounds)
    if len(starts) < num_streams:
        raise InputError(
            f"{len(starts)} document(s) are too few for {num_streams} streams; give more documents or fewer streams"
        )
    filled = [(0, row) for row in range(num_streams)]  # a heap already
    row_of = np.empty(len(starts), np.int64)
    for document, length in enumerate(lengths.tolist()):
        tokens, row_of[document] = filled[0]
        heapq.heapreplace(filled, (tokens + length, filled[0][1]))
    spans = []
    for row in range(num_streams):
        of_row = row_of == row
        ends = lengths[of_row].cumsum()
        spans.append(_Spans(ends, starts[of_row] - (ends - lengths[of_row])))
    return spans


class Blocks(Dataset):
    """The blocks of the streams `rows` by their number, for a `DataLoader`. Their order is the text's: do not shuffle."""

    def __init__(self, streams: Streams, rows: slice = slice(None)):
        self.streams = streams
        self.rows = rows

    def __len__(self) -> int:
        return len(self.streams)

    def __getitem__(self, number: int) -> Block:
        return self.streams.block(number, self.rows)


class StreamLoader:
    """The blocks of the streams `rows` in their order, for a training loop of one's own; it knows how far it has got.

    A loop over it hands out what is left of the pass; the next loop begins the next pass, or goes on where the last one was
    left. `num_workers` processes read ahead (0: none); what they have read is not handed out yet. Over several processes
    each gives its own `rows`, and all make the same number of steps. `start`: the number of the first block.
    """

    def __init__(self, streams: Streams, rows: slice = slice(None), num_workers: int = 0, start: int = 0):
        if not 0 <= start <= len(streams):
            raise InputError(f"start={start}: must be from 0 to the number of blocks, {len(streams)}")
        self.blocks = Blocks(streams, rows)
        self.num_workers = num_workers
        self._position = start

    def __len__(self) -> int:
        """Blocks of a pass."""
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        loader = DataLoader(
            self.blocks,
            batch_size=None,
            sampler=range(self._position, len(self)),
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else each pass would draw from the one that dropout draws from
        )
        for block in loader:
            self._position += 1
            yield block
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """The number of the block that is handed out next, and what it counts for. Rows may differ when it is loaded."""
        streams = self.blocks.streams
        return {
            "position": self._position,
            "num_tokens": len(streams.corpus),
            "num_streams": len(streams.lengths),
            "block_len": streams.block_len,
            "layout": streams.layout,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there: the next loop hands out exactly the blocks that had not been handed out.

        Raises InputError if the state is that of streams that were cut in another way.
        """
        different = [
            f"{name} {state.get(name)} (here {value})"
            for name, value in self.state_dict().items()
            if name != "position" and state.get(name) != value
        ]
        if different:
            raise InputError(f"the state is that of other streams: {', '.join(different)}; give the same text and sizes")
        self._position = state["position"]


def _as_it_is(block: Any) -> Any:
    return block
