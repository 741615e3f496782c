"""Text as it comes: read, cut where tokens begin, and encoded piece by piece, none of it held whole."""

import io
import re
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from .text import decoded, encode_each, warn_of_unknown

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
        (ids,), (unknown,) = encode_each([text], tokenizer)
        if unknown and not warned:
            warn_of_unknown(unknown, len(ids), tokenizer, " (further ones are not counted)")
            warned = True
        yield torch.from_numpy(ids)


def read_pieces(file: io.BufferedIOBase) -> Iterator[str]:
    """The text of a file or pipe, as it comes and strictly as UTF-8, cut where a token begins for most tokenizers.

    A cut stands after a line end between two characters that are no spaces, else before a single space between two such,
    and else, after 2^20 characters, anywhere. Raises InputError as `read_text` does.
    """
    text = ""
    for more in decoded("standard input", partial(file.read1, READ_BYTES)):
        text += more
        if cut := _cut(text):
            yield text[:cut]
            text = text[cut:]
    if text:
        yield text


def _cut(text: str) -> int:
    for pattern in (LINE_START, WORD_END):
        ends = [match.end() for match in pattern.finditer(text)]
        if ends:
            return ends[-1]
    return len(text) if len(text) >= LONGEST_PIECE else 0
