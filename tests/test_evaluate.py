"""What `evaluate` measures beside the loss of a text: positions, documents, pieces, effective context, `Trainer`'s metrics."""

import io
import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_config
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from modeling_xl import XLCache, XLForCausalLM, effective_context, generation_xl, text_pieces
from modeling_xl import corpus as corpus_module
from modeling_xl import evaluate as evaluate_module
from modeling_xl.conversion.vocabulary import Vocabulary, make_tokenizer
from modeling_xl.corpus import Corpus
from modeling_xl.effective_context import (
    check_same_vocabulary,
    context_losses,
    grid_step,
    measure_recl,
    relative_effective_context_length,
    spread_positions,
)
from modeling_xl.evaluate import (
    compute_metrics,
    evaluate,
    evaluate_pieces,
    following_window,
    preprocess_logits_for_metrics,
)
from modeling_xl.evaluation_report import memory_table, plot_positions, plot_recl, position_table, recl_table
from modeling_xl.text import SAMPLE_TEXT, InputError, byte_tokenizer, encode
from modeling_xl.text_pieces import read_pieces

TEXT = "Sing, O goddess — the anger of Achilles — μῆνιν ἄειδε!\n\nMany a brave soul\r\ndid it send   down to Hades.\n" * 7
# How Llama 3 splits a text, where "subwords" split it as GPT-2 does.
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Sums in another order, in float64.
EXACT = {"rel": 1e-12, "abs": 0}
KINDS = {
    "recurrence": {},
    "window": {"attention_window": 6},
    "compressive": {"memory_type": "compressive"},
    "linear": {"memory_type": "linear"},
}
ADAPTIVE = {"cutoffs": [20, 50], "div_val": 2, "embedding_size": 24}


def make_model(dtype=torch.float64, **fields):
    torch.manual_seed(0)
    return XLForCausalLM(tiny_config(**{"initializer_range": 0.3, **fields})).to(dtype).eval()


def byte_model(**fields):
    return make_model(vocab_size=259, **fields)


@pytest.fixture
def tokens():
    return torch.randint(97, (131,), generator=torch.Generator().manual_seed(1))


def word_tokenizer(kind):
    if kind == "words":
        tokenizer = Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(["<unk>", *sorted(set(TEXT.split()))])}, "<unk>")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "subwords_llama_3":
        split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "words": lambda: word_tokenizer("words"),
    "subwords": lambda: word_tokenizer("subwords"),
    "subwords_llama_3": lambda: word_tokenizer("subwords_llama_3"),
    "transfo_xl": lambda: make_tokenizer(Vocabulary(["<unk>", "<eos>", *dict.fromkeys(TEXT.split())], False, "<eos>", "<unk>")),
}


def nats_of_one_call(model, tokens, **inputs):
    """-log P of every token but the first [N - 1]."""
    with torch.no_grad():
        logits = model(tokens[None, :-1], **inputs).logits[0]
    return F.cross_entropy(logits, tokens[1:], reduction="none")


class TestLoss:
    @pytest.mark.parametrize("fields", [*KINDS.values(), {"memory_type": "none"}, ADAPTIVE], ids=str)
    @pytest.mark.parametrize("batch_size", [1, 2, 3])
    def test_batch_size_changes_nothing_in_float64(self, tokens, fields, batch_size):
        model = make_model(**fields)
        expected = evaluate(model, tokens, streams=5)
        result = evaluate(model, tokens, streams=5, batch_size=batch_size)
        assert result.loss == pytest.approx(expected.loss, **EXACT)
        assert [b.num_tokens for b in result.position_curve] == [b.num_tokens for b in expected.position_curve]

    def test_units(self):
        ids = encode(TEXT, byte_tokenizer())
        result = evaluate(byte_model(), ids)
        bits = result.loss * (len(ids) - 1) / math.log(2)
        assert result.num_characters == len(TEXT) - 1
        assert result.bits_per_byte == pytest.approx(bits / (len(TEXT.encode()) - 1), **EXACT)
        assert result.bits_per_character == pytest.approx(bits / (len(TEXT) - 1), **EXACT)
        assert result.perplexity == pytest.approx(math.exp(result.loss), **EXACT)

    @pytest.mark.parametrize("kind", TOKENIZERS)
    def test_characters_are_code_points(self, kind):
        tokenizer = TOKENIZERS[kind]()
        ids = encode("Many a brave soul — μῆνιν", tokenizer)
        result = evaluate(make_model(vocab_size=330), ids, tokenizer)
        assert result.num_characters == len(tokenizer.decode(ids[1:]))

    def test_a_character_counts_where_it_begins(self):
        ids = encode("éa", byte_tokenizer())
        result = evaluate(byte_model(), ids)
        assert (result.num_bytes, result.num_characters) == (2, 1)  # the rest of é, and a

    def test_every_setting_is_printed(self, tokens):
        """Report B03: which of two numbers counts? Each comes with its settings, and comes again."""
        model = make_model(num_sink_tokens=3, clamp_len=9)
        result = evaluate(model, tokens, streams=2)
        again, other = evaluate(model, tokens, streams=2), evaluate(model, tokens, streams=2, mem_len=3)
        assert again.loss == result.loss and again.settings == result.settings
        assert other.loss != result.loss and other.settings != result.settings
        assert (
            "segment 5, memory 7, clamp 9, window none, start empty, streams 2, batch 2, sinks 3, positions xl, memory type "
            "recurrence, dtype float64"
        ) in str(result)
        assert "130 tokens" in str(result) and "nats per token" in str(result) and "bits per character" in str(result)


class TestWindow:
    @pytest.mark.parametrize(("window", "followed"), [(7, 20), (8, 21), (6, None), (9, None), (None, None)])
    def test_one_that_equals_memory_follows_it(self, tokens, window, followed):
        model = make_model(attention_window=window)
        assert following_window(model.config, 20) == followed
        result = evaluate(model, tokens, mem_len=20)
        assert result.attention_window == (followed or window)
        assert result.window_follows_memory == (followed is not None)
        assert ("(follows memory)" in result.settings) == (followed is not None)
        assert result.loss == evaluate(model, tokens, mem_len=20, attention_window=followed).loss
        assert model.config.attention_window == window

    def test_a_given_window_wins(self, tokens):
        result = evaluate(make_model(attention_window=7), tokens, mem_len=20, attention_window=11)
        assert (result.attention_window, result.window_follows_memory) == (11, False)

    def test_it_stays_where_memory_means_nothing(self, tokens):
        result = evaluate(make_model(memory_type="none", attention_window=7), tokens, mem_len=20)
        assert (result.attention_window, result.mem_len) == (7, None)

    def test_none_is_left_without_memory(self, tokens):
        with pytest.raises(InputError, match=r"mem_len=0: attention_window=7 follows memory and would be 0; give a window"):
            evaluate(make_model(attention_window=7), tokens, mem_len=0)
        assert evaluate(make_model(attention_window=8), tokens, mem_len=0).attention_window == 1


class TestPositions:
    @pytest.mark.parametrize("streams", [1, 3])
    def test_bins_are_means_over_powers_of_two(self, tokens, streams):
        model = make_model()
        nats, before = [], []
        for part in range(streams):  # 130 targets: 44, 43, 43
            first, last = [(0, 44), (44, 87), (87, 130)][part] if streams == 3 else (0, 130)
            nats.append(nats_of_one_call(model, tokens[first : last + 1]))
            before.append(torch.arange(1, last - first + 1))
        nats, before = torch.cat(nats), torch.cat(before)
        result = evaluate(model, tokens, streams=streams, batch_size=2)
        assert [(b.first, b.last) for b in result.position_curve] == [
            (2**i, 2 ** (i + 1) - 1) for i in range(8 if streams == 1 else 6)
        ]
        for place in result.position_curve:
            inside = (before >= place.first) & (before <= place.last)
            assert place.num_tokens == int(inside.sum())
            assert place.loss == pytest.approx(float(nats[inside].mean()), **EXACT)
        assert sum(b.num_tokens for b in result.position_curve) == result.num_tokens == 130

    def test_blocks_of_plain_attention_begin_anew(self, tokens):
        result = evaluate(make_model(memory_type="none"), tokens)
        assert [(b.first, b.num_tokens) for b in result.position_curve] == [(1, 26), (2, 52), (4, 52)]  # 26 blocks of 5


def with_documents(tokens, lengths):
    """The first tokens as a corpus of documents of these lengths."""
    return Corpus(tokens[: sum(lengths)], [0, *itertools.accumulate(lengths[:-1])])


class TestDocuments:
    lengths = (3, 1, 8, 5, 2)

    @pytest.mark.parametrize("fields", [{"mem_len": 9}, {"attention_window": 6}, {"memory_type": "none"}], ids=str)
    @pytest.mark.parametrize("streams", [1, 2])
    def test_each_is_scored_as_if_alone(self, tokens, fields, streams):
        """Documents of at most mem_len + 1 tokens, or in one segment, read by streams that begin where one does."""
        model = make_model(**fields, segment_len=40 if "memory_type" in fields else 5)
        lengths = [*self.lengths, *self.lengths]  # two streams of 19 and 18 targets meet at the second half's first token
        alone = [nats_of_one_call(model, part) for part in tokens[:38].split(lengths) if len(part) > 1]
        result = evaluate(model, with_documents(tokens, lengths), streams=streams)
        assert (result.num_tokens, result.num_documents) == (28, 10)
        assert result.loss == pytest.approx(float(torch.cat(alone).mean()), **EXACT)
        assert "documents 10" in result.settings

    def test_positions_count_from_their_beginning(self, tokens):
        result = evaluate(make_model(), with_documents(tokens, self.lengths))
        # 2, 0, 7, 4 and 1 scored tokens; places 1, 2-3 and 4-7.
        assert [(b.first, b.num_tokens) for b in result.position_curve] == [(1, 4), (2, 5), (4, 5)]

    def test_a_stream_that_begins_inside_one_counts_from_there(self, tokens):
        result = evaluate(make_model(), with_documents(tokens, [41]), streams=4)
        assert [(b.first, b.num_tokens) for b in result.position_curve] == [(1, 4), (2, 8), (4, 16), (8, 12)]

    def test_bytes_are_those_of_what_is_scored(self, tmp_path):
        """Documents "éé\\n", "ab\\n" and "c"; the first byte of each is not scored."""
        (tmp_path / "text").write_text("éé\n\nab\n\n\nc", "utf-8")
        result = evaluate(byte_model(), Corpus.from_files([tmp_path / "text"], byte_tokenizer(), separator=""))
        assert result.num_documents == 3
        assert (result.num_tokens, result.num_bytes, result.num_characters) == (4 + 2 + 0, 6, 2 + 2)

    @pytest.mark.parametrize("kind", TOKENIZERS)
    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_any_documents_in_any_streams(self, kind, seed, monkeypatch):
        """Against one call over what of a document a stream holds, and each document decoded at once."""
        rng = random.Random(seed)
        tokenizer = TOKENIZERS[kind]()
        monkeypatch.setattr(corpus_module, "PIECE_TOKENS", rng.choice([1, 3, 7, 40]))
        monkeypatch.setattr(evaluate_module, "MAX_LOGITS", 330 * 5 * rng.choice([1, 2, 50]))
        # Characters that no merge has seen are cut between their bytes, too.
        text = TEXT if kind in ("words", "transfo_xl") else TEXT.replace("o", "𝄞").replace("a", "€")
        ids = encode(text, tokenizer)[: rng.randint(90, 110)]
        starts = [0, *sorted(rng.sample(range(1, len(ids)), rng.choice([0, 4, 30])))]
        streams, model = rng.choice([1, 3, 4]), make_model(vocab_size=330, mem_len=120)
        result = evaluate(model, Corpus(ids, starts), tokenizer, streams=streams, batch_size=rng.choice([1, 2, 4]))
        nats, before, num_bytes, num_characters = [], [], 0, 0
        for first, stop in itertools.pairwise([*starts, len(ids)]):
            text = tokenizer.decode(ids[first + 1 : stop], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            num_bytes += len(text.encode()) if kind != "bytes" else stop - first - 1
            num_characters += len(text) if kind != "bytes" else int(((ids[first + 1 : stop] - 3 & 0xC0) != 0x80).sum())
            for begin, end in stream_bounds(len(ids), streams):
                part = ids[max(first, begin) : min(stop, end + 1)]
                if len(part) > 1:
                    nats.append(nats_of_one_call(model, part))
                    before.extend(range(1, len(part)))
        assert result.loss == pytest.approx(float(torch.cat(nats).mean()), **EXACT)
        assert (result.num_tokens, result.num_documents) == (len(before), len(starts))
        assert (result.num_bytes, result.num_characters) == (num_bytes, num_characters)
        for place in result.position_curve:
            assert place.num_tokens == sum(place.first <= n <= place.last for n in before)

    @pytest.mark.parametrize("kind", TOKENIZERS)
    def test_a_corpus_is_scored_as_its_tokens(self, kind, tmp_path, monkeypatch):
        tokenizer, model = TOKENIZERS[kind](), make_model(vocab_size=330)
        (tmp_path / "text").write_text(TEXT, "utf-8")
        corpus = Corpus.from_files([tmp_path / "text"], tokenizer, tmp_path)
        expected = evaluate(model, encode(TEXT, tokenizer), tokenizer, streams=3).to_dict()
        monkeypatch.setattr(corpus_module, "PIECE_TOKENS", 11)
        assert {**evaluate(model, corpus, tokenizer, streams=3).to_dict(), "seconds": 0} == {**expected, "seconds": 0}

    @pytest.mark.parametrize("starts", [None, [0, 2000, 2007]], ids=["one_text", "documents"])
    def test_no_more_is_read_at_once_than_a_call_needs(self, starts, monkeypatch):
        monkeypatch.setattr(corpus_module, "PIECE_TOKENS", 64)
        monkeypatch.setattr(evaluate_module, "MAX_LOGITS", 97 * 5 * 12)
        corpus = Corpus(np.random.default_rng(0).integers(97, size=5000).astype("uint16"), starts)
        expected = evaluate(make_model(), corpus, streams=6, batch_size=3)
        corpus.tokens = Watched(corpus.tokens)
        found = evaluate(make_model(), corpus, streams=6, batch_size=3)
        assert found.loss == expected.loss
        assert max(corpus.tokens.sizes) == 64 and 60 in corpus.tokens.sizes  # 3 streams of 4 segments of 5

    def test_documents_of_one_token_are_refused(self, tokens):
        with pytest.raises(InputError, match="no token has another before it"):
            evaluate(make_model(), Corpus(tokens, np.arange(len(tokens))))


def stream_bounds(num_tokens, streams):
    """(first input, last target) of each."""
    length, longer = divmod(num_tokens - 1, streams)
    ends = list(itertools.accumulate(length + (row < longer) for row in range(streams)))
    return list(zip([0, *ends[:-1]], ends, strict=True))


class Watched:
    """An array of tokens that knows how many were read at once, and can do nothing else."""

    def __init__(self, tokens):
        self.tokens, self.sizes = tokens, []

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, places):
        self.sizes.append(self.tokens[places].size)
        return self.tokens[places]


class TestPieces:
    def cut(self, text, monkeypatch, read_bytes):
        monkeypatch.setattr(text_pieces, "READ_BYTES", read_bytes)
        return list(read_pieces(io.BytesIO(text.encode())))

    @pytest.mark.parametrize("kind", TOKENIZERS)
    @pytest.mark.parametrize("read_bytes", [1, 7, 50, 2000])
    def test_tokens_are_those_of_the_whole_text(self, kind, read_bytes, monkeypatch):
        tokenizer = TOKENIZERS[kind]()
        pieces = self.cut(TEXT, monkeypatch, read_bytes)
        assert "".join(pieces) == TEXT
        assert len(pieces) > (5 if read_bytes < 2000 else 0)
        assert torch.equal(torch.cat([encode(piece, tokenizer) for piece in pieces]), encode(TEXT, tokenizer))

    def test_a_text_without_spaces_is_cut_all_the_same(self, monkeypatch):
        monkeypatch.setattr(text_pieces, "LONGEST_PIECE", 30)
        pieces = self.cut("é" * 100, monkeypatch, 7)
        assert "".join(pieces) == "é" * 100 and max(map(len, pieces)) < 34

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty"),
            ("aéb zwölf".encode() + "ö".encode("latin-1") + b"abc", r"not UTF-8 text \(byte 0xf6 at offset 11\)"),
            ("zwölf".encode()[:3], r"not UTF-8 text \(byte 0xc3 at offset 2\)"),
            (b"text\0", "NUL byte"),
        ],
        ids=["empty", "latin-1", "cut_off", "binary"],
    )
    @pytest.mark.parametrize("read_bytes", [1, 50])
    def test_what_is_not_text_is_refused(self, content, message, read_bytes, monkeypatch):
        monkeypatch.setattr(text_pieces, "READ_BYTES", read_bytes)
        with pytest.raises(InputError, match=f"standard input: .*{message}"):
            list(read_pieces(io.BytesIO(content)))

    @pytest.mark.parametrize("kind", TOKENIZERS)
    @pytest.mark.parametrize("memory", ["recurrence", "compressive", "none"])
    def test_result_is_that_of_the_file(self, kind, memory, monkeypatch):
        tokenizer = TOKENIZERS[kind]()
        model = make_model(vocab_size=330, memory_type=memory)
        monkeypatch.setattr(evaluate_module, "MAX_LOGITS", 330 * 5 * 3)  # several calls
        expected = evaluate(model, encode(TEXT, tokenizer), tokenizer).to_dict()
        pieces = self.cut(TEXT, monkeypatch, 40)
        assert len(pieces) > 3
        assert {**evaluate_pieces(model, pieces, tokenizer).to_dict(), "seconds": 0} == {**expected, "seconds": 0}

    def test_a_text_of_one_token_is_refused(self):
        with pytest.raises(InputError, match="no token has another before it"):
            evaluate_pieces(byte_model(), ["a"])

    def test_unknown_words_are_told_once(self):
        tokenizer = word_tokenizer("words")
        with pytest.warns(UserWarning, match=r"1 of 2 tokens .*\(further ones are not counted\)") as caught:
            evaluate_pieces(make_model(), ["Sing, O ", "Sing, nobody ", "nothing O"], tokenizer)
        assert len(caught) == 1

    @pytest.mark.slow
    def test_memory_does_not_grow_with_the_text(self):
        """20 MB: what the process holds at most after the first tenth is what it holds at the end, to 8 MB."""
        code = (
            "import resource, torch, modeling_xl\n"
            "from modeling_xl import XLConfig, XLForCausalLM\n"
            "from modeling_xl.evaluate import evaluate_pieces\n"
            "from modeling_xl.text_pieces import read_pieces\n"
            "import sys\n"
            "model = XLForCausalLM(XLConfig(vocab_size=259, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,\n"
            "    intermediate_size=4, position_type='none', segment_len=256, mem_len=1))\n"
            "peaks = []\n"
            "def pieces():\n"
            "    for piece in read_pieces(sys.stdin.buffer):\n"
            "        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
            "        yield piece\n"
            "result = evaluate_pieces(model, pieces())\n"
            "print(result.num_bytes, peaks[len(peaks) // 10], peaks[-1])\n"
        )
        text = SAMPLE_TEXT.read_bytes()
        text = text * (20_000_000 // len(text))
        done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, timeout=600, check=True)
        num_bytes, early, late = map(float, done.stdout.split())
        assert num_bytes == len(text) - 1
        assert late - early < 8


def random_cuts(ids, seed):
    """The ids (..., T) in pieces of random lengths, some of them empty."""
    cuts = sorted(random.Random(seed).choices(range(ids.shape[-1] + 1), k=6))
    return [ids[..., a:b] for a, b in itertools.pairwise([0, *cuts, ids.shape[-1]])]


class TestStream:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_any_cutting_gives_the_numbers_of_one_call(self, kind, seed):
        model = make_model(**KINDS[kind])
        ids = torch.randint(97, (2, 41), generator=torch.Generator().manual_seed(seed))
        pieces = random_cuts(ids, seed)
        found = list(model.stream(pieces))
        assert [part.shape for part in found] == [piece.shape for piece in pieces]
        joined = torch.cat(found, 1)
        assert bool(joined[:, 0].isnan().all()) and not joined.requires_grad
        expected = -torch.stack([nats_of_one_call(model, row) for row in ids])
        assert torch.allclose(joined[:, 1:], expected, rtol=0, atol=1e-11)  # float64, sums in another order

    @pytest.mark.parametrize("fields", [{}, ADAPTIVE], ids=["dense", "adaptive"])
    def test_one_text_in_calls_of_bounded_size(self, tokens, fields, monkeypatch):
        model = make_model(**fields)
        expected = -nats_of_one_call(model, tokens)
        monkeypatch.setattr(generation_xl, "MAX_LOGITS", 97 * 4)
        widths = []
        model.register_forward_pre_hook(lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
        (found,) = model.stream([tokens])
        assert found.shape == tokens.shape and max(widths) == 4
        assert torch.allclose(found[1:], expected, rtol=0, atol=1e-11)

    def test_a_cache_goes_on(self, tokens):
        model, cache = make_model(), XLCache(tiny_config())
        (whole,) = model.stream([tokens])
        parts = list(model.stream([tokens[:30], tokens[30:50]], cache=cache))
        assert cache.lengths.tolist() == [49]  # all but the last, as after generate
        (more,) = model.stream([tokens[49:90]], cache=cache)
        assert bool(more[0].isnan())
        assert torch.allclose(torch.cat([*parts, more[1:]])[1:], whole[1:90], rtol=0, atol=1e-11)
        said = model.generate(tokens[None, 89:90], cache=cache, new_tokens_only=True, max_new_tokens=5, do_sample=False)
        expected = model.generate(tokens[None, :90], max_new_tokens=5, do_sample=False)
        assert torch.equal(said[:, 1:], expected[:, 90:])

    def test_without_segments_a_piece_is_one(self, tokens):
        model = make_model(segment_len=None)
        cache, expected = None, []
        for first in (0, 9, 20):
            ids = tokens[None, first : {0: 9, 9: 20, 20: 33}[first]]
            with torch.no_grad():
                output = model(ids, cache=cache)
            cache = output.cache
            expected.append(-F.cross_entropy(output.logits[0], tokens[first + 1 : first + 1 + ids.shape[1]], reduction="none"))
        found = torch.cat(list(model.stream([tokens[:10], tokens[10:21], tokens[21:34]])))
        assert torch.allclose(found[1:], torch.cat(expected), rtol=0, atol=1e-11)

    def test_what_cannot_be_read_is_refused(self, tokens):
        model = make_model()
        with pytest.raises(TypeError, match="pass an XLCache"):
            model.stream([tokens], cache={})
        with pytest.raises(ValueError, match=r"A piece has shape \(1, 1, 131\)"):
            list(model.stream([tokens[None, None]]))
        with pytest.raises(ValueError, match="A piece has 1 rows and those before had 2"):
            list(model.stream([torch.stack([tokens, tokens]), tokens]))


class TestRelativeContext:
    def losses(self):
        """Two models and ten positions, two of them hard. `far` gains on the hard ones up to 30 tokens, `near` up to 20."""
        hard = {
            "far": [(3.0, 2.0), (2.5, 2.0), (2.0, 2.0), (2.0, 2.0)],
            "near": [(3.0, 2.5), (2.9, 2.5), (2.9, 2.5), (1.0, 2.5)],
        }
        return {
            name: {c: torch.tensor([*pair, *[0.1] * 8]) for c, pair in zip((10, 20, 30, 40), pairs, strict=True)}
            for name, pairs in hard.items()
        }

    @pytest.mark.parametrize(
        ("ratio", "threshold", "expected"),
        [
            # r = 0.1, one position. far: 1 - e^-0.5, 1 - e^-0.5, then 0. near: at 10 it gains 1 - e^-0.1; at 20 the
            # baseline is 2.5 and its own 2.9 is no gain.
            (0.1, 0.01, {"far": "30", "near": "20"}),
            # Half of the gain in the mean over both.
            (0.2, 0.01, {"far": "30", "near": "20"}),
            # near: (0.1 / 10) in the mean over all, below 0.01 as 1 - e^-0.01 < 0.01; far 0.5 / 10.
            (1.0, 0.01, {"far": "30", "near": "10"}),
            (1.0, 0.05, {"far": "10", "near": "10"}),
        ],
    )
    def test_lengths_by_hand(self, ratio, threshold, expected):
        found = relative_effective_context_length(self.losses(), ratio, threshold)
        assert {name: str(length) for name, length in found.items()} == expected

    def test_a_formula_written_out(self):
        """Against the definition, position by position, on random numbers."""
        generator = torch.Generator().manual_seed(0)
        losses = {
            name: {c: torch.rand(17, generator=generator) * 4 / (1 + c / 9) for c in (4, 8, 12, 16, 20)}
            for name in ("a", "b", "c")
        }

        def recl(name, ratio, threshold):
            contexts = [4, 8, 12, 16, 20]
            for c, longer in itertools.pairwise(contexts):
                b = [min(float(losses[m][c][t]) for m in losses) for t in range(17)]
                hard = sorted(range(17), key=lambda t: -b[t])[: round(ratio * 17)]
                f_now = sum(min(b[t], float(losses[name][c][t])) for t in hard) / len(hard)
                f_next = sum(min(b[t], float(losses[name][longer][t])) for t in hard) / len(hard)
                if (math.exp(f_now) - math.exp(f_next)) / math.exp(f_now) < threshold:
                    return str(c)
            return ">= 20"

        seen = set()
        for ratio, threshold in itertools.product((0.1, 0.5, 1.0), (0.01, 0.2, 0.35)):
            found = relative_effective_context_length(losses, ratio, threshold)
            assert {name: str(length) for name, length in found.items()} == {m: recl(m, ratio, threshold) for m in losses}
            seen |= {str(length) for length in found.values()}
        assert len(seen) > 2

    def test_one_that_still_gains_is_a_lower_bound(self):
        losses = {"only": {2: torch.tensor([2.0, 2.0]), 4: torch.tensor([1.0, 2.0])}}
        found = relative_effective_context_length(losses, 0.5)["only"]
        assert (found.length, found.is_lower_bound, str(found)) == (4, True, ">= 4")

    @pytest.mark.parametrize(
        ("losses", "ratio", "message"),
        [
            ({}, 0.1, "the same context lengths"),
            ({"a": {1: torch.ones(3)}, "b": {2: torch.ones(3)}}, 0.1, "the same context lengths"),
            ({"a": {1: torch.ones(3), 2: torch.ones(4)}}, 0.1, "the same number of positions"),
            ({"a": {1: torch.ones(3)}}, 0, "ratio=0: must be above 0"),
        ],
    )
    def test_what_was_not_measured_alike_is_refused(self, losses, ratio, message):
        with pytest.raises(InputError, match=message):
            relative_effective_context_length(losses, ratio)


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).double().eval()


class TestContextLosses:
    @pytest.mark.parametrize("make", [make_model, lambda: make_model(**ADAPTIVE), llama], ids=["xl", "adaptive", "llama"])
    @pytest.mark.parametrize("context", [1, 6, 13])
    def test_a_plain_loop_gives_the_same(self, tokens, make, context, monkeypatch):
        model = make()
        monkeypatch.setattr(effective_context, "MAX_WINDOW_TOKENS", 40)  # several calls
        positions = spread_positions(len(tokens), 13, 11)
        found = context_losses(model, tokens, positions, context)
        for t, nats in zip(positions.tolist(), found.tolist(), strict=True):
            with torch.no_grad():
                log_probs = model(tokens[None, t - context : t]).logits[0, -1].log_softmax(-1)
            assert nats == pytest.approx(-float(log_probs[tokens[t]]), **EXACT)

    def test_positions_are_spread_over_the_text(self):
        assert spread_positions(10, 4, 3).tolist() == [4, 6, 8]
        assert spread_positions(10, 4, 99).tolist() == [4, 5, 6, 7, 8, 9]
        with pytest.raises(InputError, match="10 tokens are too few for contexts of 10"):
            spread_positions(10, 10, 3)

    @pytest.mark.parametrize("memory", ["recurrence", "none"])
    def test_a_window_bounds_what_is_measured(self, tokens, memory):
        """One layer that sees 4 keys predicts from 4 tokens, exactly."""
        model = make_model(num_hidden_layers=1, attention_window=4, memory_type=memory)
        positions = spread_positions(len(tokens), 12, 40)
        losses = {c: context_losses(model, tokens, positions, c) for c in (3, 4, 5, 12)}
        assert torch.allclose(losses[4], losses[12], rtol=0, atol=1e-12)
        assert not torch.allclose(losses[3], losses[4], rtol=0, atol=1e-3)
        result = measure_recl({"model": model}, tokens, step=1, longest=12, num_positions=40)["model"]
        assert all(found.length <= 4 and not found.is_lower_bound for found in result.lengths)
        assert max(result.context_losses) <= 5  # nothing further is measured

    def test_a_group_of_models_of_several_types(self, tokens):
        group = {"xl": make_model(), "llama": llama()}
        results = measure_recl(group, tokens, longest=20, num_positions=30, ratios=(0.3, 1.0))  # steps of a segment, 5
        positions = spread_positions(len(tokens), 20, 30)
        losses = {
            name: {c: context_losses(model, tokens, positions, c) for c in (5, 10, 15, 20)} for name, model in group.items()
        }
        for index, ratio in enumerate((0.3, 1.0)):
            expected = relative_effective_context_length(losses, ratio)
            assert {name: result.lengths[index] for name, result in results.items()} == expected
        assert results["xl"].group == ("xl", "llama")
        assert "model type llama, dtype float64" in results["llama"].settings
        assert "segment 5, memory 7" in results["xl"].settings and "30 positions" in results["xl"].settings
        assert recl_table(results).splitlines()[0].split() == ["RECL", "(tokens)", "r", "=", "0.3", "r", "=", "1.0"]

    def test_lengths_given_are_those_of_the_model(self, tokens):
        model = make_model()
        result = measure_recl({"m": model}, tokens, longest=20, num_positions=9, mem_len=0)["m"]
        other = measure_recl({"m": make_model(mem_len=0)}, tokens, longest=20, num_positions=9)["m"]
        assert result == other and model.config.mem_len == 7

    @pytest.mark.parametrize(
        ("fields", "step"),
        [
            ([{}], 5),
            ([{}, {"segment_len": 4}], 20),
            ([{"attention_window": 8}, {"segment_len": None}, {"memory_type": "none"}, {"memory_type": "linear"}], 1),
            ([{"attention_window": 9}], 5),
        ],
        ids=str,
    )
    def test_steps_keep_the_place_in_the_segment(self, fields, step):
        assert grid_step([*(tiny_config(**changes) for changes in fields), LlamaConfig()]) == step

    def test_a_step_that_cuts_segments_is_warned_of(self, tokens):
        with pytest.warns(UserWarning, match="a step of 7 is no multiple of the segment, 5"):
            measure_recl({"m": make_model()}, tokens, step=7, longest=14, num_positions=3)
        result = measure_recl({"llama": llama()}, tokens.repeat(9), num_positions=2)["llama"]
        assert (result.step, result.longest) == (64, 1024)

    def test_what_cannot_be_measured_is_refused(self, tokens):
        with pytest.raises(InputError, match=r"mem_len=3: a model of type 'llama' has no such setting"):
            measure_recl({"llama": llama()}, tokens, step=2, longest=4, mem_len=3)
        with pytest.raises(InputError, match="longest=10: two steps of 6 must fit"):
            measure_recl({"llama": llama()}, tokens, step=6, longest=10)
        with pytest.raises(InputError, match=r"small: has 50 ids and the text needs \d+"):
            measure_recl({"small": make_model(vocab_size=50)}, tokens)
        with pytest.raises(InputError, match="words: its vocabulary is not that of bytes"):
            check_same_vocabulary({"bytes": byte_tokenizer(), "again": byte_tokenizer(), "words": word_tokenizer("words")})


class TestTrainerMetrics:
    @pytest.mark.parametrize("fields", [{}, ADAPTIVE], ids=["dense", "adaptive"])
    @pytest.mark.parametrize("batch_size", [1, 3, 8])
    def test_they_are_means_over_all_tokens(self, fields, batch_size, tmp_path):
        """Rows of unequal length, padded batch by batch, against a sum row by row; the mean of batches is another number."""
        model = make_model(torch.float32, **fields)
        generator = torch.Generator().manual_seed(2)
        lengths = [17, 3, 9, 2, 14, 1, 16, 5]
        rows = [torch.randint(97, (n,), generator=generator) for n in lengths]
        hidden = [4, 0, 0, 1, 3, 0, 0, 2]  # first tokens of each row that are not to be scored
        labels = [row.masked_fill(torch.arange(len(row)) < skip, -100) for row, skip in zip(rows, hidden, strict=True)]

        def collate(samples):
            def pad(name, value):
                return torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)

            mask = [{"m": torch.ones_like(sample["input_ids"])} for sample in samples]
            mask = torch.nn.utils.rnn.pad_sequence([m["m"] for m in mask], batch_first=True)
            return {"input_ids": pad("input_ids", 0), "attention_mask": mask, "labels": pad("labels", -100)}

        trainer = Trainer(
            model,
            TrainingArguments(str(tmp_path), per_device_eval_batch_size=batch_size, report_to=[], use_cpu=True),
            data_collator=collate,
            eval_dataset=[{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)],
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        nats = [
            nats_of_one_call(model, row)[label[1:] != -100] for row, label in zip(rows, labels, strict=True) if len(row) > 1
        ]
        expected = float(torch.cat(nats).double().mean())
        found = trainer.evaluate()
        # float32, batches padded in other ways
        assert found["eval_loss"] == pytest.approx(expected, abs=1e-5)
        assert found["eval_bits_per_token"] == pytest.approx(expected / math.log(2), abs=2e-5)
        assert found["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
        if batch_size == 8:
            inputs = collate([{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)])
            with torch.no_grad():
                assert float(model(**inputs).loss) == pytest.approx(expected, abs=1e-5)


class TestReports:
    def test_tables(self, tokens):
        model = make_model()
        results = [evaluate(model, tokens, mem_len=m) for m in (0, 12)]
        rows = [line.split() for line in memory_table({"a/model": results}).splitlines()]
        assert rows[1][:3] == ["a/model", "0", f"{results[0].bits_per_byte:.4f}"]
        assert rows[2][1] == "12"
        short = evaluate(model, tokens[:20])
        lines = position_table({"long": results[0], "short": short}).splitlines()
        assert lines[0].split() == ["tokens", "before", "tokens", "long", "short"]
        assert lines[1].split() == ["1", "1", f"{results[0].position_curve[0].loss:.4f}", f"{short.position_curve[0].loss:.4f}"]
        assert lines[-1].split() == ["128-255", "3", f"{results[0].position_curve[-1].loss:.4f}"]

    def test_plots_are_png(self, tokens, tmp_path):
        model = make_model()
        plot_positions({"a": evaluate(model, tokens), "b": evaluate(model, tokens, mem_len=0)}, tmp_path / "a.png")
        plot_recl(measure_recl({"a": model, "b": llama()}, tokens, longest=10), tmp_path / "b.png")
        assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))
