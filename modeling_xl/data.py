"""Text files in, contiguous token streams out: what `train` and `evaluate` read. No model and no sampling here.

A stream is one part of the text, read by one row of the batch, segment after segment, so that the memory a row carries
is always the text just before. Letters: N tokens of the text, B streams, T columns of a block.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

IGNORE_INDEX = -100
SAMPLE_TEXT = Path(__file__).parent / "sample_text" / "tiny_shakespeare.txt"


class InputError(ValueError):
    """Something the user gave cannot be used; the message names it, the rule and the mend."""

    @classmethod
    def about(cls, what: str | Path, error: Exception) -> "InputError":
        """An error of a library about `what` the user named; of a wrapped error only the reason is kept."""
        reason = error.__cause__ or error
        return cls(f"{what}: {str(reason) or type(reason).__name__}")


def read_text(paths: Sequence[str | Path]) -> str:
    """Reads the files, strictly as UTF-8 and byte for byte (line ends are kept), and joins them in the given order.

    Raises InputError for a path that is missing, a folder, empty, not UTF-8 or holds a NUL byte.
    """
    return "".join(_read_file(Path(path)) for path in paths)


def _read_file(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; name the text files in it") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a readable text file") from None
    if not content:
        raise InputError(f"{path}: the file is empty; give a file with text in it")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text (byte 0x{content[error.start]:02x} at offset {error.start}); "
            "give a text file, or convert it, e.g. with `iconv -t UTF-8`"
        ) from None
    if "\0" in text:
        raise InputError(f"{path}: not text (NUL byte at offset {content.index(0)}); give a text file")
    return text


def split_text(text: str, held_out: float) -> tuple[str, str]:
    """Cuts off the last `held_out` (0 to 1) of the characters: (the text before, the held-out text)."""
    cut = len(text) - int(held_out * len(text))
    return text[:cut], text[cut:]


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer that needs no file: 259 ids, id = byte + 3; 0 is the pad, 1 the end, 2 unknown."""
    return ByT5Tokenizer(extra_ids=0)


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The token ids [N] of `text`, with no special token added or recognised inside it.

    Warns of words that the tokenizer does not know, with their number: a model scored on those is scored on another text.
    """
    if isinstance(tokenizer, ByT5Tokenizer):
        # Its own encoding, without a Python object a byte, and without reading a literal "</s>" as the end token.
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64) + tokenizer.offset
        return torch.from_numpy(ids)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    unknown = 0
    if tokenizer.unk_token_id is not None:
        unknown = ids.count(tokenizer.unk_token_id) - text.count(tokenizer.unk_token)  # a text may say "<unk>" itself
    if unknown > 0:
        warnings.warn(
            f"{unknown} of {len(ids)} tokens ({unknown / len(ids):.1%}) are unknown to the tokenizer and became "
            f"{tokenizer.unk_token}; is the text of the kind that the vocabulary was made from?",
            stacklevel=2,
        )
    return torch.tensor(ids, dtype=torch.long)


def count_bytes(tokens: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> int:
    """UTF-8 bytes of the text that `tokens` [N] stand for; special tokens have none."""
    if isinstance(tokenizer, ByT5Tokenizer):
        return int((tokens >= tokenizer.offset).sum())
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(text.encode())


@dataclass(frozen=True)
class Block:
    """One call's worth of the streams. `targets[b, t]` is the token after `input_ids[b, t]`, so it goes to the model as
    `shift_labels`; it is -100 where the stream has ended. `attention_mask` is None where every column is real."""

    input_ids: torch.Tensor  # (B, T)
    attention_mask: torch.Tensor | None  # (B, T), 1 = real, 0 = the stream has ended
    targets: torch.Tensor  # (B, T)
    is_last: bool  # the streams end here

    @property
    def num_targets(self) -> int:
        return self.targets.numel() if self.attention_mask is None else int(self.attention_mask.sum())

    def model_inputs(self, device: torch.device) -> dict[str, torch.Tensor | None]:
        """What a model with a loss is called with, on the device."""
        mask, targets = self.attention_mask, self.targets.to(device)
        return {
            "input_ids": self.input_ids.to(device),
            "attention_mask": None if mask is None else mask.to(device),
            "labels": targets,
            "shift_labels": targets,
        }


class Streams:
    """One text cut into contiguous streams of equal length (to one token), read `block_len` columns at a time.

    Every token but the first of the text is a target exactly once: a stream's first input is the token before its first
    target, also where the stream begins inside the text. The last block holds what is left: it is shorter, and where
    one stream is a token shorter than another the missing column is masked. The same arguments give the same blocks.
    """

    def __init__(self, tokens: torch.Tensor, num_streams: int, block_len: int):
        if tokens.dim() != 1:
            raise InputError(f"tokens must be one sequence [N], got shape {list(tokens.shape)}")
        if num_streams < 1 or block_len < 1:
            raise InputError(f"num_streams ({num_streams}) and block_len ({block_len}) must be at least 1")
        num_targets = len(tokens) - 1
        if num_targets < num_streams:
            raise InputError(
                f"{len(tokens)} tokens are too few for {num_streams} stream(s), which need {num_streams + 1} at least; "
                "give a longer text or fewer streams (a smaller batch)"
            )
        length, longer = divmod(num_targets, num_streams)
        row = torch.arange(num_streams)
        self.tokens = tokens
        self.block_len = block_len
        self.lengths = length + (row < longer).long()  # (B,)
        self.starts = row * length + row.clamp(max=longer)  # (B,)

    def __len__(self) -> int:
        return -(-int(self.lengths[0]) // self.block_len)

    def blocks(self, rows: slice = slice(None)) -> Iterator[Block]:
        """The blocks of the streams `rows`, in reading order."""
        starts, lengths = self.starts[rows, None], self.lengths[rows, None]
        longest = int(lengths.max())
        for begin in range(0, longest, self.block_len):
            column = torch.arange(begin, min(begin + self.block_len, longest))
            index, real = starts + column, column < lengths  # (B, T)
            is_last = begin + self.block_len >= longest
            if bool(real.all()):
                yield Block(self.tokens[index], None, self.tokens[index + 1], is_last)
            else:
                index = index.where(real, starts)
                input_ids, targets = self.tokens[index].where(real, 0), self.tokens[index + 1].where(real, IGNORE_INDEX)
                yield Block(input_ids, real.long(), targets, is_last)
