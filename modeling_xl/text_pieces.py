"""Text as it comes: read, cut where tokens begin, and encoded piece by piece, none of it held whole."""

import codecs
import io
import re
import warnings
from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedTokenizerBase

from .text import InputError, encode

# Text that is read as it comes: bytes asked for at once, and characters after which it is cut where no good place is.
READ_BYTES = 2**16
LONGEST_PIECE = 2**20
# Places where most tokenizers begin a new token whatever came before: after a single line end, before a single space.
LINE_START = re.compile(r"\S\r?\n(?=\S)")
WORD_END = re.compile(r"\S(?= \S)")


def encode_pieces(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[torch.Tensor]:
    """The ids [n] of each text as `encode` gives them. Of unknown words it warns once, at the first text that has any."""
    warned = False
    for text in texts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ids = encode(text, tokenizer)
        if caught and not warned:
            warnings.warn(f"{caught[0].message} (further ones are not counted)", stacklevel=2)
            warned = True
        yield ids


def read_pieces(file: io.BufferedIOBase) -> Iterator[str]:
    """The text of a file or pipe, as it comes and strictly as UTF-8, cut where a token begins for most tokenizers.

    A cut stands after a line end between two characters that are no spaces, else before a single space between two such,
    and else, after 2^20 characters, anywhere. Raises InputError as `read_text` does.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, num_read = "", 0
    while True:
        content = file.read1(READ_BYTES)
        begin = num_read - len(decoder.getstate()[0])
        try:
            text += decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input: not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset {begin + error.start}); "
                "convert it, e.g. with `iconv -t UTF-8`"
            ) from None
        if "\0" in text:
            raise InputError("standard input: not text (it holds a NUL byte); give text")
        num_read += len(content)
        cut = _cut(text) if content else len(text)
        if cut:
            yield text[:cut]
            text = text[cut:]
        if not content:
            break
    if not num_read:
        raise InputError("standard input: is empty; give a text")


def _cut(text: str) -> int:
    for pattern in (LINE_START, WORD_END):
        ends = [match.end() for match in pattern.finditer(text)]
        if ends:
            return ends[-1]
    return len(text) if len(text) >= LONGEST_PIECE else 0
