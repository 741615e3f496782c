"""From the vocabulary of a Transformer-XL, in any form it was saved in, to a tokenizer that Transformers loads.

It is no training of a tokenizer: the symbols and their ids are the file's. All the rules of splitting text are parts of
the `tokenizers` library, so that tokenizer.json carries them.

Sources: the original code's vocabulary.py and data_utils.py (split at whitespace, `<eos>` after every line); the
tokenizer of the former Transformers `transfo-xl` (raw text brought into the Moses form of WikiText).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_xl.text import InputError, read_text

from .restricted_pickle import RestrictedFile, is_stub

FILE_NAMES = ("vocab.txt", "vocab.pkl", "vocab.bin", "pretrained_vocab_file*", "cache.pt", "cache.pkl")
END_SYMBOLS = ("<eos>", "<S>")
UNKNOWN_SYMBOLS = ("<unk>", "<UNK>")

# In the regular expressions of `tokenizers`: a character of a word, and what stands apart wherever it is.
LETTER = r"[\p{L}\p{M}\p{N}]"
APART = r"[^\p{L}\p{M}\p{N}\s.'\-]"
# Character that WikiText writes as a word of its own, `@-@`, where it joins two: what it joins.
JOINTS = {",": r"\d", ".": r"\d", "-": LETTER}
# Around a word that the vocabulary knows: nothing, or only what stands apart from it.
BEGIN = r"(?<![^\s(\[\"])"
BEFORE_END = rf"(?=(?:'{LETTER}+|{APART}|\.)*(?!\S))"
OPENING, CLOSING = ("(", "["), (",", ";", ":", "!", "?", ")", "]")
ENDINGS = ("'s", "'t", "'d", "'m", "'re", "'ve", "'ll")


@dataclass(frozen=True)
class Vocabulary:
    """`symbols[i]` has the id i; `eos` and `unk` are the symbols for the end of a line and for an unknown word."""

    symbols: list[str]
    lower_case: bool = False
    eos: str | None = None
    unk: str | None = None


def find_vocabulary(folder: Path) -> Path | None:
    """The file of the folder that holds a vocabulary, the plainest form first; None where there is none."""
    found = (path for name in FILE_NAMES for path in sorted(Path(folder).glob(name)) if path.is_file())
    return next(found, None)


def read_symbols(path: Path) -> Vocabulary:
    """Reads any of the forms; pickled ones without running code from them.

    Raises InputError for what is no vocabulary, and for symbols that no text could give.
    """
    path = Path(path)
    if path.suffix == ".txt":
        symbols, lower_case = _symbols_of_text(path), False
    else:
        symbols, lower_case = _symbols_of_pickle(path)
    for i, symbol in enumerate(symbols):
        if not symbol or symbol.split() != [symbol] or re.search("[\ud800-\udfff]", symbol):
            raise InputError(
                f"{path}: symbol {i}, {symbol[:80]!r}, is not one word; give the vocabulary the model was trained with"
            )
    eos = next((symbol for symbol in END_SYMBOLS if symbol in symbols), None)
    unk = next((symbol for symbol in UNKNOWN_SYMBOLS if symbol in symbols), None)
    return Vocabulary(symbols, lower_case, eos, unk)


def _symbols_of_text(path: Path) -> list[str]:
    lines = re.split(r"\r\n|\r|\n", read_text([path]).rstrip("\r\n"))
    for i, line in enumerate(lines, 1):
        if not line.strip():
            raise InputError(
                f"{path}: line {i} is empty, and every line names a symbol; take it out if the ids do not count it"
            )
    return list(dict.fromkeys(line.split()[0] for line in lines))  # the original passed over repeated symbols


def _symbols_of_pickle(path: Path) -> tuple[list[str], bool]:
    with RestrictedFile(path) as file:
        root = file.root
    if is_stub(root, "Corpus"):
        root = vars(root).get("vocab")
    fields = vars(root) if is_stub(root, "Vocab") else root
    symbols = fields.get("idx2sym") if isinstance(fields, dict) else None
    if not isinstance(symbols, list) or not symbols or not all(isinstance(symbol, str) for symbol in symbols):
        raise InputError(
            f"{path}: holds no vocabulary (a list of words `idx2sym`); give vocab.txt, vocab.pkl, vocab.bin or cache.pt"
        )
    ids = fields.get("sym2idx", {symbol: i for i, symbol in enumerate(symbols)})
    if len(set(symbols)) != len(symbols) or ids != {symbol: i for i, symbol in enumerate(symbols)}:
        raise InputError(
            f"{path}: idx2sym and sym2idx do not give every symbol one id from 0 to {len(symbols) - 1}; save it again"
        )
    return symbols, bool(fields.get("lower_case"))


def make_tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """The tokenizer of the vocabulary: of words, of bytes (enwik8) or of characters (text8), as its symbols are.

    Words. Text whose words the vocabulary knows, with spaces between them, gives the ids that the original gave: words as
    they stand, and `<eos>` for every line end (an empty line is one `<eos>`). A last line without a line end gets none,
    where the original wrote one. A vocabulary with `<S>` instead (One Billion Word) gets two for every line end: the end of
    a sentence and the beginning of the next. Unknown words are split further: punctuation stands apart, and where the
    vocabulary has `@-@`, `@,@` and `@.@`, well-known becomes `well @-@ known` and 1,000.5 `1 @,@ 000 @.@ 5`.

    Decoding undoes this, and encoding the decoded text gives the same ids; except that a vocabulary which has `@-@` and also
    words such as well-known gives `well @-@ known` and `well-known @-@ by` back as other words of the same text.

    Bytes and characters. Line feeds are left out, as the original's files could not hold them.

    Where the vocabulary has no unknown symbol, encoding an unknown word raises an exception ("Missing [UNK] token").
    """
    symbols = [symbol for symbol in vocabulary.symbols if symbol not in (vocabulary.eos, vocabulary.unk)]
    if symbols and all(re.fullmatch("0|[1-9][0-9]{0,2}", symbol) and int(symbol) < 256 for symbol in symbols):
        tokenizer = _byte_tokenizer(vocabulary)
    elif "_" in symbols and all(len(symbol) == 1 for symbol in symbols):
        tokenizer = _character_tokenizer(vocabulary)
    else:
        tokenizer = _word_tokenizer(vocabulary)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=vocabulary.eos,
        unk_token=vocabulary.unk,
        clean_up_tokenization_spaces=False,
    )


def _model(vocabulary: Vocabulary, symbols: Iterable[str]) -> Tokenizer:
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    return Tokenizer(models.WordLevel(ids, unk_token=vocabulary.unk or UNKNOWN_SYMBOLS[0]))


def _byte_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    letters = _byte_letters()
    tokenizer = _model(vocabulary, [letters[int(s)] if s.isdecimal() else s for s in vocabulary.symbols])
    tokenizer.normalizer = normalizers.Replace("\n", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter that `ByteLevel` writes for each byte: itself if it can be seen, else one from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]


def _character_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = _model(vocabulary, vocabulary.symbols)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("\n", ""), normalizers.Replace(" ", "_")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("_", " ")])
    return tokenizer


def _word_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = _model(vocabulary, vocabulary.symbols)
    line_end = f" {vocabulary.eos or ''} " if vocabulary.eos != "<S>" else " <S> <S> "
    tokenizer.normalizer = normalizers.Sequence(
        [
            *([normalizers.Lowercase()] if vocabulary.lower_case else []),
            normalizers.Replace(Regex(r"\r\n|\r|\n"), line_end),
            normalizers.Replace(Regex(r"[\x1c-\x1f]"), " "),  # Python splits at these too
            *(_joint_splitter(vocabulary, joint) for joint in JOINTS if f"@{joint}@" in vocabulary.symbols),
        ]
    )
    tokenizer.pre_tokenizer = _word_splitter(vocabulary)
    tokenizer.decoder = _word_joiner(vocabulary, line_end)
    return tokenizer


def _joint_splitter(vocabulary: Vocabulary, joint: str) -> normalizers.Normalizer:
    """Puts `@joint@` for the joint, except inside of words that the vocabulary knows."""
    side, mark = JOINTS[joint], re.escape(joint)
    known = [
        r"(?<=[\s(\[\"]{0}|\A{0}){1}{2}".format(re.escape(symbol[:i]), re.escape(symbol[i:]), BEFORE_END)
        for symbol in vocabulary.symbols
        for i in range(1, len(symbol) - 1)
        if symbol[i] == joint and (joint == "-" or (symbol[i - 1].isdigit() and symbol[i + 1].isdigit()))
    ]
    unless = f"(?!{'|'.join(known)})" if known else ""
    return normalizers.Replace(Regex(f"(?<={side})(?={mark}{side}){unless}{mark}"), f" @{joint}@ ")


def _word_splitter(vocabulary: Vocabulary) -> pre_tokenizers.PreTokenizer:
    """Whole words of the vocabulary first; what the rules for unknown words leave whole need not be listed."""
    rules = [
        rf"\.{{2,}}|-{{2,}}|{APART}",
        rf"(?<!{LETTER})(?:\p{{Lu}}|\p{{L}}(?:\.\p{{L}})+)\.{BEFORE_END}",  # J. and U.S., also where not known
        rf"{LETTER}+(?:[.\-]{LETTER}+)*",
        rf"(?<={LETTER}|\.)'{LETTER}+",
        r"\S",
    ]
    bare = _keep("|".join(rules))
    split = [symbol for symbol in vocabulary.symbols if [piece for piece, _ in bare.pre_tokenize_str(symbol)] != [symbol]]
    if not split:
        return bare
    listed = _one_of(sorted(split))
    whole = rf"(?<!\S){listed}(?!\S)"
    between_punctuation = f"{BEGIN}{listed}{BEFORE_END}"
    return _keep("|".join([whole, between_punctuation, *rules]))


def _keep(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)


def _one_of(words: list[str]) -> str:
    """A pattern of the sorted words in which each character decides where to go on, so that its length costs no time."""
    pairs = zip(words[0], words[-1], strict=False)
    length = next((i for i, (one, other) in enumerate(pairs) if one != other), len(words[0]))
    prefix = words[0][:length]
    rest = [word[length:] for word in words if word != prefix]
    branches = [_one_of(list(group)) for _, group in groupby(rest, key=lambda word: word[0])]
    optional = "?" if len(rest) < len(words) else ""
    return re.escape(prefix) + (f"(?:{'|'.join(branches)}){optional}" if branches else "")


def _word_joiner(vocabulary: Vocabulary, line_end: str) -> decoders.Decoder:
    """Spaces between the words, except where splitting the joined text gives the same words again."""
    known = set(vocabulary.symbols)
    steps: list[Any] = [decoders.WordPiece(prefix="\n", cleanup=False), decoders.Fuse()]  # no symbol begins with a line end
    if vocabulary.eos:
        steps.append(decoders.Replace(Regex(f" ?{re.escape(line_end.strip())} ?"), "\n"))
    steps += [_attach(known, mark, r"\S") for mark in CLOSING]
    steps += [_attach(known, ".", rf"{LETTER * 2}|\d"), *(_attach(known, ending, LETTER) for ending in ENDINGS)]
    steps += [_attach_next(known, mark) for mark in OPENING]
    for joint, side in JOINTS.items():
        steps.append(decoders.Replace(Regex(rf"(?<={side}) @{re.escape(joint)}@ (?={side})"), joint))
    return decoders.Sequence(steps)


def _attach(known: set[str], mark: str, before: str) -> decoders.Decoder:
    """Takes the space out before the mark, unless the two would then be another word that the vocabulary knows."""
    joined = [f"{BEGIN}{re.escape(symbol)}" for symbol in sorted(known) if symbol + mark in known]
    unless = f"(?<!{'|'.join(joined)})" if joined else ""
    return decoders.Replace(Regex(rf"(?= {re.escape(mark)}(?!\S))(?<={before}){unless} "), "")


def _attach_next(known: set[str], mark: str) -> decoders.Decoder:
    joined = [re.escape(symbol) for symbol in sorted(known) if mark + symbol in known]
    unless = f"(?!{'|'.join(joined)})" if joined else ""
    mark = re.escape(mark)
    return decoders.Replace(Regex(rf"(?<=\s{mark}|\A{mark}) {unless}(?=\S)"), "")
