# ruff: noqa: RUF001 - the look-alikes are what is tested
"""Vocabularies of a Transformer-XL, in every form they were saved in, as tokenizers that give the original's ids."""

import collections
import io
import pickle
import random
import sys
import types

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from modeling_xl.conversion.vocabulary import Vocabulary, _byte_letters, find_vocabulary, make_tokenizer, read_symbols
from modeling_xl.extent import text_size
from modeling_xl.text import InputError, encode

# Words as WikiText has them, and odder ones; no word holds a joint that `@-@`, `@,@` or `@.@` would stand for.
TEXT = """<unk> <eos> the of in and a to was on as that for with by is it from at his cat sat dog's name named known well
The In A He It During 1 2 5 12 100 000 1990 2nd 90s = == === . , ; : ! ? ( ) [ ] " ' - -- – — ... .... .. … @-@ @,@ @.@ @ 's
't 're 've 'll 'd 'm 'n 'S s' '90s '' `` # #1 $ % & * / + +1 < > ^ _ ~ | { } ° ½ £ € × − † § • → ♯ U.S. U.S U.K. D.C. St.
St Mr. Mr Dr. Jr. Jr J. J A. F.C. F.C no. No. etc. Inc. Inc a.m. p.m. e.g. i.e. Ph.D. vs. vs B.C. M.I.A. .22 .hack :0 1/2 9/11
and/or AC/DC km/h C++ C# F# O'Brien rock'n o'clock d' l' 'em <S> <formula> \\ \\n \\p{L} (?:a) [a-z] a|b .* ^x$ x{2,} x? \\Q
é e\u0301 naïve Ångström Straße ß ı İ Ł Đurađ Ælfric ω Ωmega Привет мир 日本 日本語 東京 ひらがな 한국어 हिन्दी
العربية עברית 😀 👩‍👩‍👧 \u200b
\ufeff ﬁ ² 10³ x² foo, (bar bar bar) foo "quoted" a: ;) :-) -a a- -a- a_b _x @user #tag a@b.c A&M R&B 50% AT&T Q* M+ N°
’ ’s ‘ “ ” “so so” Ph.D co. co aa aaa aaaa aaa. aaa.. Aa. Aaa."""
WORDS = list(dict.fromkeys(TEXT.split()))
JOINED = ["well-known", "e-mail", "a-b-c", "1,000", "3.5", "1,000.5", "(1,000)", "-1,5", "U-2", "St.-Denis", "O'Neill-Jr."]


def vocabulary(words=WORDS, **fields) -> Vocabulary:
    return Vocabulary(list(words), **{"eos": "<eos>", "unk": "<unk>", **fields})


def original(text: str, vocabulary: Vocabulary) -> list[int]:
    """The rule of the original code: split every line at whitespace, and end it."""
    ids = {symbol: i for i, symbol in enumerate(vocabulary.symbols)}
    found = []
    for line in io.StringIO(text, newline=None):
        line = line.strip().lower() if vocabulary.lower_case else line.strip()
        found += [ids.get(word, ids.get(vocabulary.unk)) for word in [*line.split(), vocabulary.eos]]
    return found


def ids_of(text: str, tokenizer) -> list[int]:
    """As `encode`, without its warning of unknown words."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def random_text(rng: random.Random, words: list[str], spaces=(" ",), line_ends=("\n",)) -> str:
    def line():
        return "".join(word + rng.choice(spaces) for word in rng.choices(words, k=rng.randint(0, 9))) + rng.choice(line_ends)

    return "".join(line() for _ in range(rng.randint(1, 4)))


def pieces(tokenizer, text: str) -> list[str]:
    """The words that the text is split into, those the vocabulary does not know as they stand."""
    backend = tokenizer.backend_tokenizer
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))]


class TestWords:
    @pytest.mark.parametrize("words", [WORDS, WORDS + JOINED, [w for w in WORDS + JOINED if not w.startswith("@")]], ids=len)
    def test_known_words_get_the_ids_of_the_original(self, words):
        known = vocabulary(words)
        tokenizer, rng = make_tokenizer(known), random.Random(0)
        for _ in range(1500):
            text = random_text(rng, words)
            assert encode(text, tokenizer).tolist() == original(text, known), text

    def test_every_known_word_alone_and_beside_every_other(self):
        known = vocabulary(WORDS + JOINED)
        tokenizer = make_tokenizer(known)
        for word in known.symbols:
            text = "\n".join([word, *(f"{word} {other} {word}" for other in known.symbols)]) + "\n"
            assert encode(text, tokenizer).tolist() == original(text, known)

    def test_whitespace_and_line_ends_of_every_kind(self):
        known = vocabulary()
        tokenizer, rng = make_tokenizer(known), random.Random(1)
        spaces = [" ", "  ", "\t", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\xa0", "\u2003", "\u2028", "\u3000"]
        for _ in range(500):
            text = random_text(rng, WORDS, spaces, ["\n", "\r\n", "\r"])
            assert encode(text, tokenizer).tolist() == original(text, known), text

    def test_lower_case(self):
        known = vocabulary(dict.fromkeys(word.lower() for word in WORDS), lower_case=True)
        tokenizer, rng = make_tokenizer(known), random.Random(2)
        for _ in range(300):
            text = random_text(rng, [*known.symbols, "The", "CAT", "Inc.", "<UNK>", "Ångström"])
            assert ids_of(text, tokenizer) == original(text, known), text

    def test_lines(self):
        known = vocabulary()
        tokenizer = make_tokenizer(known)

        def words(text):
            return [known.symbols[i] for i in ids_of(text, tokenizer)]

        assert words("the cat\nsat\n") == ["the", "cat", "<eos>", "sat", "<eos>"]
        assert words("the cat\nsat") == ["the", "cat", "<eos>", "sat"]  # where the original ends the last line too
        assert words("the\n\n \ncat") == ["the", "<eos>", "<eos>", "<eos>", "cat"]
        assert words("") == []
        assert words("the <eos> cat") == ["the", "<eos>", "cat"]
        assert words("unheard words <unk>") == ["<unk>"] * 3

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("The cat's named, well-known.", "The cat 's named , well @-@ known ."),
            ("23,000 of 1,234,567.25 (5%)!", "23 @,@ 000 of 1 @,@ 234 @,@ 567 @.@ 25 ( 5 % ) !"),
            ('"In 1990," said J. Smith; "it was $5."', '" In 1990 , " said J. Smith ; " it was $ 5 . "'),
            ("We don't; they've: I'll, 1990's [sic]?", "We don 't ; they 've : I 'll , 1990 's [ sic ] ?"),
            ("in the U.S., U.S. and (U.S.) at 5 a.m.", "in the U.S. , U.S. and ( U.S. ) at 5 a.m."),
            ("Acme Inc. of St. John, D.C.; the U.N.'s", "Acme Inc. of St. John , D.C. ; the U.N. 's"),
            ("Wait... the dogs' end--or not", "Wait ... the dogs ' end -- or not"),
            ("state-of-the-art, non-U.S. 1990-1995", "state @-@ of @-@ the @-@ art , non @-@ U.S. 1990 @-@ 1995"),
            ("see example.com/a_b.", "see example.com / a _ b ."),
            ("C++, C#; (AC/DC): AT&T's.", "C++ , C# ; ( AC/DC ) : AT&T 's ."),
            ("It was 5.\nThe end.", "It was 5 . <eos> The end ."),
            ("1,a a.b -5 5- x,000", "1 , a a.b - 5 5 - x , 000"),
        ],
    )
    def test_raw_text(self, text, expected):
        assert pieces(make_tokenizer(vocabulary()), text) == expected.split()

    def test_joints_are_split_only_where_the_vocabulary_splits_them(self):
        without = make_tokenizer(vocabulary(word for word in WORDS if not word.startswith("@")))
        assert pieces(without, "a well-known 1,000 or 3.5") == ["a", "well-known", "1", ",", "000", "or", "3.5"]
        partly = make_tokenizer(vocabulary(WORDS + JOINED))
        assert pieces(partly, "(well-known, well-read") == ["(", "well-known", ",", "well", "@-@", "read"]

    def test_no_character_of_raw_text_is_lost(self):
        tokenizer, rng = make_tokenizer(vocabulary()), random.Random(3)
        for _ in range(500):
            text = "".join(rng.choices("aB1.,;-'() \n\"é$—😀", k=30))
            joined = "".join(pieces(tokenizer, text)).replace("<eos>", "")
            for joint in ",.-":
                joined = joined.replace(f"@{joint}@", joint)
            assert joined == "".join(text.split())

    def test_an_unknown_word_raises_where_there_is_no_unknown_symbol(self):
        tokenizer = make_tokenizer(vocabulary(["<eos>", "the"], unk=None))
        assert encode("the\n", tokenizer).tolist() == [1, 0]
        with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
            encode("the cat\n", tokenizer)

    def test_sentence_marks(self):
        tokenizer = make_tokenizer(Vocabulary(["<S>", "<UNK>", "the", "end", "."], eos="<S>", unk="<UNK>"))
        ids = ids_of("the end.\nthe start", tokenizer)
        assert ids == [2, 3, 4, 0, 0, 2, 1]
        assert tokenizer.decode(ids) == "the end.\nthe <UNK>"
        assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1)


class TestDecoding:
    @pytest.mark.parametrize("words", [WORDS, [w for w in WORDS + JOINED if not w.startswith("@")]], ids=len)
    def test_encoding_what_was_decoded_gives_the_same_ids(self, words):
        tokenizer, rng = make_tokenizer(vocabulary(words)), random.Random(4)
        common = [word for word in words if word.isalnum() or word in [*".,;:!?()[]\"'", "'s", "@-@", "@,@", "@.@"]]
        for _ in range(3000):
            text = random_text(rng, rng.choice([words, common]))
            ids = encode(text, tokenizer).tolist()
            decoded = tokenizer.decode(ids)
            assert encode(decoded, tokenizer).tolist() == ids, (text, decoded)

    @pytest.mark.parametrize(
        "text",
        [
            "The cat's name, well-known.\nIt was 1,000.5!\n",
            "in the U.S. (1990) and the U.K.; a 2nd?",
            "St. A. of D.C.: 5, 12 and 100.\n\n",
        ],
    )
    def test_text_comes_back(self, text):
        tokenizer = make_tokenizer(vocabulary())
        assert tokenizer.decode(encode(text, tokenizer)) == text

    def test_what_joined_would_be_another_word_stays_apart(self):
        tokenizer = make_tokenizer(vocabulary())
        text = "named Inc . or Inc. and foo , ( bar ) the St . J . 's"
        decoded = tokenizer.decode(encode(text.replace("or", "and"), tokenizer))
        assert decoded == "named Inc . and Inc. and foo , ( bar ) the St . J . 's"

    def test_a_vocabulary_with_both_forms_keeps_the_text(self):
        tokenizer = make_tokenizer(vocabulary(WORDS + JOINED))
        decoded = tokenizer.decode(encode("well @-@ known", tokenizer))
        assert decoded == "well-known" == tokenizer.decode(encode(decoded, tokenizer))

    def test_bytes_are_counted(self):
        tokenizer = make_tokenizer(vocabulary())
        assert text_size(encode("the cat's name .", tokenizer), tokenizer)[0] == len("the cat's name.")


class TestSaving:
    @pytest.mark.parametrize("kind", ["words", "bytes", "characters"])
    def test_auto_tokenizer_loads_it(self, tmp_path, kind):
        known, text = {
            "words": (vocabulary(), 'The "cat\'s" well-known (U.S.) 1,000.\n\nIn'),
            "bytes": (Vocabulary([str(byte) for byte in range(255, -1, -1)]), "Ünï \t\0\r\x7f😀"),
            "characters": (Vocabulary(list("_abcdefghijklmnopqrstuvwxyz")), "the cat  sat"),
        }[kind]
        made = make_tokenizer(known)
        made.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        ids = encode(text, made)
        assert torch.equal(encode(text, loaded), ids) and len(ids)
        assert loaded.decode(ids) == made.decode(ids)
        assert len(loaded) == len(known.symbols)
        assert (loaded.eos_token, loaded.unk_token) == (known.eos, known.unk)
        if known.eos:
            assert loaded.eos_token_id == known.symbols.index(known.eos)

    def test_ids_are_the_places_in_the_vocabulary(self):
        tokenizer = make_tokenizer(vocabulary())
        assert tokenizer.get_vocab() == {symbol: i for i, symbol in enumerate(WORDS)}


class TestBytesAndCharacters:
    def test_bytes(self):
        known = Vocabulary([str(byte) for byte in random.Random(0).sample(range(256), 256)])
        tokenizer = make_tokenizer(known)
        text = "<page>\n  [[Ünïcode]] — 'x' 10\t😀</s>\n"
        ids = encode(text, tokenizer).tolist()
        assert [int(known.symbols[i]) for i in ids] == [byte for byte in text.encode() if byte != ord("\n")]
        assert tokenizer.decode(ids) == text.replace("\n", "")
        assert text_size(torch.tensor(ids), tokenizer)[0] == len(ids)

    def test_letters_of_bytes(self):
        letters = _byte_letters()
        assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        for character in [chr(i) for i in range(0x250)] + ["ᬀ", "語", "😀", "\U0010ffff"]:
            ((piece, _),) = splitter.pre_tokenize_str(character)
            assert piece == "".join(letters[byte] for byte in character.encode())

    def test_bytes_with_special_symbols(self):
        tokenizer = make_tokenizer(Vocabulary(["<eos>", "97", "98", "<unk>"], eos="<eos>", unk="<unk>"))
        assert ids_of("ab!\na", tokenizer) == [1, 2, 3, 1]

    def test_an_unknown_byte_raises(self):
        tokenizer = make_tokenizer(Vocabulary(["97", "98"]))
        with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
            encode("abc", tokenizer)

    @pytest.mark.parametrize("words", [["256", "1"], ["01", "1"], ["a", "1"], ["²", "1"], ["١", "1"]])
    def test_other_numbers_are_words(self, words):
        assert encode(" ".join(words), make_tokenizer(Vocabulary(words))).tolist() == [0, 1]

    def test_characters(self):
        tokenizer = make_tokenizer(Vocabulary(list("_etaonihsrdlucmwfygpbvkxjqz")))
        ids = encode("anarchism originated as", tokenizer).tolist()
        assert len(ids) == 23 and tokenizer.decode(ids) == "anarchism originated as"
        assert ids[:3] == [3, 5, 3] and ids[9] == 0


class TestFiles:
    fields = {  # noqa: RUF012
        "idx2sym": ["<eos>", "the", "<unk>", "cat"],
        "sym2idx": collections.OrderedDict([("<eos>", 0), ("the", 1), ("<unk>", 2), ("cat", 3)]),
        "counter": collections.Counter({"the": 3, "cat": 1}),
        "special": ["<eos>"],
        "min_freq": 0,
        "max_size": None,
        "lower_case": True,
        "delimiter": None,
        "vocab_file": None,
    }
    expected = Vocabulary(["<eos>", "the", "<unk>", "cat"], lower_case=True, eos="<eos>", unk="<unk>")

    @pytest.fixture
    def corpus(self, monkeypatch):
        """A Corpus as the original's data_utils makes it, with token arrays of either kind."""
        numpy = pytest.importorskip("numpy")
        classes = {}
        for module, name in (("data_utils", "Corpus"), ("vocabulary", "Vocab")):
            classes[name] = type(name, (), {"__module__": module})
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
            setattr(sys.modules[module], name, classes[name])
        made = classes["Corpus"]()
        made.vocab, made.dataset = classes["Vocab"](), "wt2"
        vars(made.vocab).update(self.fields)
        made.train, made.valid = torch.arange(5), numpy.arange(3)
        return made

    @pytest.mark.parametrize("protocol", range(6))
    def test_pickled_fields(self, tmp_path, protocol):
        (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(self.fields, protocol))
        assert read_symbols(tmp_path / "vocab.pkl") == self.expected

    @pytest.mark.parametrize("name", ["vocab.bin", "pretrained_vocab_file.bin", "pretrained_vocab_file"])
    @pytest.mark.parametrize("is_zip", [False, True])
    def test_fields_saved_by_torch(self, tmp_path, name, is_zip):
        torch.save(self.fields, tmp_path / name, _use_new_zipfile_serialization=is_zip)
        assert read_symbols(find_vocabulary(tmp_path)) == self.expected

    @pytest.mark.parametrize("is_zip", [False, True])
    def test_a_corpus_saved_by_torch(self, tmp_path, corpus, is_zip):
        torch.save(corpus, tmp_path / "cache.pt", _use_new_zipfile_serialization=is_zip)
        assert read_symbols(tmp_path / "cache.pt") == self.expected

    @pytest.mark.parametrize("protocol", range(6))
    def test_a_pickled_corpus(self, tmp_path, corpus, protocol):
        corpus.train = corpus.valid
        (tmp_path / "cache.pkl").write_bytes(pickle.dumps(corpus, protocol))
        assert read_symbols(tmp_path / "cache.pkl") == self.expected

    def test_text(self, tmp_path):
        (tmp_path / "vocab.txt").write_text("<eos>\nthe 120\n\t<UNK>\r\nthe\nzwölf\n", encoding="utf-8")
        assert read_symbols(tmp_path / "vocab.txt") == Vocabulary(["<eos>", "the", "<UNK>", "zwölf"], eos="<eos>", unk="<UNK>")

    def test_the_plainest_file_is_found_first(self, tmp_path):
        assert find_vocabulary(tmp_path) is None
        (tmp_path / "vocab.json").touch()
        assert find_vocabulary(tmp_path) is None
        for name in ("cache.pkl", "cache.pt", "pretrained_vocab_file.bin", "vocab.bin", "vocab.pkl", "vocab.txt"):
            (tmp_path / name).touch()
            assert find_vocabulary(tmp_path) == tmp_path / name

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"idx2sym": []}, "holds no vocabulary"),
            ({"idx2sym": None}, "holds no vocabulary"),
            ({"idx2sym": ["a", 1]}, "holds no vocabulary"),
            ({"idx2sym": ["a", "a"], "sym2idx": {"a": 1}}, "one id from 0 to 1"),
            ({"sym2idx": {"<eos>": 1, "the": 2, "<unk>": 3, "cat": 4}}, "one id from 0 to 3"),
            ({"sym2idx": {"<eos>": 0}}, "one id from 0 to 3"),
            ({"sym2idx": None}, "one id from 0 to 3"),
            ({"idx2sym": ["a", "b c"], "sym2idx": {"a": 0, "b c": 1}}, "symbol 1, 'b c', is not one word"),
            ({"idx2sym": [""], "sym2idx": {"": 0}}, "symbol 0, '', is not one word"),
            ({"idx2sym": ["\ud800"], "sym2idx": {"\ud800": 0}}, "is not one word"),
        ],
    )
    def test_what_is_no_vocabulary(self, tmp_path, fields, message):
        (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({**self.fields, **fields}))
        with pytest.raises(InputError, match=rf"vocab\.pkl: .*{message}"):
            read_symbols(tmp_path / "vocab.pkl")

    @pytest.mark.parametrize("root", [[], "text", {}, {"a": 1}, None])
    def test_another_object(self, tmp_path, root):
        (tmp_path / "cache.pt").write_bytes(pickle.dumps(root))
        with pytest.raises(InputError, match=r"cache\.pt: holds no vocabulary"):
            read_symbols(tmp_path / "cache.pt")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "empty"),
            (b"\n\n", "line 1 is empty"),
            (b"a\n\nb\n", "line 2 is empty"),
            (b"a\xff", "not UTF-8"),
            (None, "no such"),
        ],
    )
    def test_text_that_is_no_vocabulary(self, tmp_path, content, message):
        if content is not None:
            (tmp_path / "vocab.txt").write_bytes(content)
        with pytest.raises(InputError, match=rf"vocab\.txt: .*{message}"):
            read_symbols(tmp_path / "vocab.txt")

    def test_code_is_not_run(self, tmp_path):
        (tmp_path / "vocab.pkl").write_bytes(b"cbuiltins\nexec\n(S'raise SystemExit'\ntR.")
        with pytest.raises(InputError, match=r"builtins\.exec"):
            read_symbols(tmp_path / "vocab.pkl")
