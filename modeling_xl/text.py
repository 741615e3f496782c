"""Text files, read strictly and written whole, and their tokens. No model here."""

import codecs
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

SAMPLE_TEXT = Path(__file__).parent / "sample_text" / "tiny_shakespeare.txt"
CHUNK_BYTES = 2**20  # read at once


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
    return "".join(read_chunks(paths))


def read_chunks(paths: Sequence[str | Path]) -> Iterator[str]:
    for path in map(Path, paths):
        try:
            with path.open("rb") as file:
                yield from decoded(path, partial(file.read, CHUNK_BYTES))
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; check the path") from None
        except IsADirectoryError:
            raise InputError(f"{path}: is a folder; name the text files in it") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); give a readable text file") from None


def decoded(source: str | Path, read: Callable[[], bytes]) -> Iterator[str]:
    """The text of what `read` gives until it gives nothing, as it comes; `source` is what errors name."""
    decoder, num_read, content = codecs.getincrementaldecoder("utf-8")(), 0, b"-"
    while content:
        content = read()
        begin = num_read - len(decoder.getstate()[0])  # of what is decoded now: a character may lie across two chunks
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{source}: not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset {begin + error.start}); "
                "give a text file, or convert it, e.g. with `iconv -t UTF-8`"
            ) from None
        if "\0" in text:
            raise InputError(f"{source}: not text (NUL byte at offset {num_read + content.index(0)}); give a text file")
        num_read += len(content)
        if text:
            yield text
    if not num_read:
        raise InputError(f"{source}: is empty; give a file with text in it")


def write_json(path: Path, value: Any) -> None:
    """Writes under a temporary name first, so that a run that is killed leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer that needs no file: 259 ids, id = byte + 3; 0 is the pad, 1 the end, 2 unknown."""
    return ByT5Tokenizer(extra_ids=0)


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The token ids [N] of `text`, with no special token added or recognised inside it.

    Warns of words that the tokenizer does not know, with their number: a model scored on those is scored on another text.
    """
    (ids,), (unknown,) = encode_each([text], tokenizer)
    warn_of_unknown(unknown, len(ids), tokenizer)
    return torch.from_numpy(ids)


def encode_each(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[list[np.ndarray], list[int]]:
    """The ids of each text, and how many of them stand for words that the tokenizer does not know."""
    if isinstance(tokenizer, ByT5Tokenizer):
        # Its own encoding, without a Python object a byte, and without reading a literal "</s>" as the end token.
        codes = (np.frombuffer(text.encode(), np.uint8) for text in texts)
        return [np.add(code, tokenizer.offset, dtype=np.int64) for code in codes], [0] * len(texts)
    ids = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    unknown = [0] * len(texts)
    if tokenizer.unk_token_id is not None:  # a text may say "<unk>" itself
        counts = zip(ids, texts, strict=True)
        unknown = [max(0, row.count(tokenizer.unk_token_id) - text.count(tokenizer.unk_token)) for row, text in counts]
    return [np.array(row, np.int64) for row in ids], unknown


def warn_of_unknown(unknown: int, num_tokens: int, tokenizer: PreTrainedTokenizerBase, remark: str = "") -> None:
    if unknown:
        warnings.warn(
            f"{unknown} of {num_tokens} tokens ({unknown / num_tokens:.1%}) are unknown to the tokenizer and became "
            f"{tokenizer.unk_token}; is the text of the kind that the vocabulary was made from?{remark}",
            stacklevel=3,
        )
