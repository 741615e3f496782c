"""Text files, streams, the training loop and the evaluation: `data`, `train` and `evaluate`."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl import corpus as corpus_module
from modeling_xl import evaluate as evaluate_module
from modeling_xl.corpus import Corpus
from modeling_xl.data import Streams
from modeling_xl.evaluate import evaluate
from modeling_xl.evaluation_report import plot
from modeling_xl.extent import text_size
from modeling_xl.text import InputError, byte_tokenizer, encode, read_text
from modeling_xl.train import TrainingSettings, check_output_dir, load_config, new_model, save, train, training_settings

TEXT = "Tell me, O Muse, of the man of many devices — ὁ πολύτροπος — who wandered full many ways.\r\n" * 9


def config(**fields):
    sizes = {
        "vocab_size": 259,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 32,
        "segment_len": 8,
        "mem_len": 11,
        "initializer_range": 0.3,  # weights large enough for every setting to show in the loss
    }
    return XLConfig(**{**sizes, **fields})


def lengths_at_calls(model) -> list[int]:
    """Fills up, call by call, with how many tokens the memory that is handed in comes from."""
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: lengths.append(0 if kwargs["cache"] is None else int(kwargs["cache"].lengths.max())),
        with_kwargs=True,
    )
    return lengths


def make_model(**fields):
    torch.manual_seed(0)
    return XLForCausalLM(config(**fields)).eval()


@pytest.fixture
def tokens():
    return encode(TEXT, byte_tokenizer())[:200]


@pytest.fixture(scope="module")
def subword_tokenizer():
    """A small byte-level BPE, so that a token is not a byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


class TestReading:
    def test_files_are_joined_byte_for_byte(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"one\r\n")
        (tmp_path / "b.txt").write_bytes("zwölf".encode())
        assert read_text([tmp_path / "a.txt", tmp_path / "b.txt"]) == "one\r\nzwölf"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "no such file"),
            (b"", "is empty"),
            ("zwölf".encode("latin-1"), r"not UTF-8 text \(byte 0xf6 at offset 2\)"),
            (b"text\0", r"not text \(NUL byte at offset 4\)"),
        ],
        ids=["missing", "empty", "latin-1", "binary"],
    )
    def test_what_is_not_text_is_refused_by_name(self, tmp_path, content, message):
        path = tmp_path / "book.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=rf"book\.txt: .*{message}"):
            read_text([path])

    def test_a_folder_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="is a folder"):
            read_text([tmp_path])


class TestTokens:
    def test_bytes_are_ids_minus_three(self):
        ids = encode("aé</s><pad>", byte_tokenizer())
        assert (ids - 3).tolist() == list("aé</s><pad>".encode())
        assert encode("", byte_tokenizer()).shape == (0,)

    def test_special_ids_stand_for_no_bytes(self):
        assert text_size(torch.tensor([0, 1, 2, 3 + 0xC3, 3 + 0xA9]), byte_tokenizer()) == (2, 1)

    def test_subwords_count_the_bytes_of_their_text(self, subword_tokenizer):
        ids = encode(TEXT + "</s>", subword_tokenizer)
        assert subword_tokenizer.eos_token_id not in ids.tolist()
        assert len(ids) < len(TEXT.encode())
        text = TEXT + "</s>"
        assert text_size(ids, subword_tokenizer) == (len(text.encode()), len(text))


class TestStreams:
    @pytest.mark.parametrize("num_tokens", [23, 24, 25, 97])
    @pytest.mark.parametrize(("num_streams", "block_len"), [(1, 5), (3, 4), (4, 100), (5, 1), (22, 3)])
    def test_every_token_but_the_first_is_a_target_once(self, num_tokens, num_streams, block_len):
        tokens = torch.arange(100, 100 + num_tokens)
        streams = Streams(tokens, num_streams, block_len)
        blocks = list(streams.blocks())
        assert len(blocks) == len(streams)
        assert [block.is_last for block in blocks] == [False] * (len(blocks) - 1) + [True]
        assert all(block.input_ids.shape[1] == block_len for block in blocks[:-1])
        assert all(block.attention_mask is None for block in blocks[:-1])
        rows = []
        for row in range(num_streams):
            targets = torch.cat([block.targets[row] for block in blocks])
            inputs = torch.cat([block.input_ids[row] for block in blocks])
            real = targets != -100
            assert torch.equal(inputs[real] + 1, targets[real])  # the token before
            assert not inputs[~real].any()
            rows.append(targets[real])
        assert torch.equal(torch.cat(rows), tokens[1:])
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
        assert sum(block.num_targets for block in blocks) == num_tokens - 1

    def test_missing_columns_are_masked(self):
        *_, last = Streams(torch.arange(1, 10), num_streams=3, block_len=2).blocks()
        assert last.attention_mask.tolist() == [[1], [1], [0]]
        assert last.targets.tolist() == [[4], [7], [-100]]

    def test_rows_are_read_alone_as_together(self):
        streams = Streams(torch.arange(50), num_streams=4, block_len=6)
        together = torch.cat([block.targets[1:3] for block in streams.blocks()], dim=1)
        alone = torch.cat([block.targets for block in streams.blocks(slice(1, 3))], dim=1)
        assert together.shape[1] == alone.shape[1] + 1  # the column that only the longer streams have
        assert torch.equal(together[:, :-1], alone)

    def test_a_text_too_short_is_refused(self):
        with pytest.raises(InputError, match="4 tokens are too few for 4 stream"):
            Streams(torch.arange(4), num_streams=4, block_len=2)


class TestEvaluate:
    def test_loss_is_that_of_one_call_over_the_text(self, tokens):
        model = make_model()
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        result = evaluate(model, tokens)
        loss = float(F.cross_entropy(logits, tokens[1:]))
        assert result.loss == pytest.approx(loss, abs=1e-5)
        assert result.bits_per_byte == pytest.approx(loss / math.log(2), abs=1e-5)  # a token is a byte
        assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        assert (result.num_tokens, result.num_bytes) == (199, 199)

    @pytest.mark.parametrize("batch_size", [1, 2, 3, 50])
    def test_batch_size_does_not_change_the_result(self, tokens, batch_size):
        model = make_model()
        expected = evaluate(model, tokens, streams=5)
        assert evaluate(model, tokens, streams=5, batch_size=batch_size).loss == pytest.approx(expected.loss, abs=1e-6)

    def test_length_of_a_call_does_not_change_the_result(self, tokens, monkeypatch):
        model = make_model()
        expected = evaluate(model, tokens, streams=2)
        monkeypatch.setattr(evaluate_module, "MAX_LOGITS", 1)
        assert evaluate(model, tokens, streams=2).loss == pytest.approx(expected.loss, abs=1e-6)

    @pytest.mark.parametrize(
        "fields",
        [{"mem_len": 0}, {"mem_len": 40}, {"segment_len": 5}, {"clamp_len": 3}, {"attention_window": 4}],
        ids=str,
    )
    def test_an_override_equals_a_model_made_so(self, tokens, fields):
        model, other = make_model(), make_model(**fields)
        other.load_state_dict(model.state_dict())
        before = model.config.to_dict()
        result = evaluate(model, tokens, **fields)
        assert result.loss == pytest.approx(evaluate(other, tokens).loss, abs=1e-6)
        assert result.loss != pytest.approx(evaluate(model, tokens).loss, abs=1e-6)
        assert model.config.to_dict() == before
        assert all(getattr(result, name) == value for name, value in fields.items())
        assert all(str(value) in result.settings for value in fields.values())

    def test_config_and_mode_are_restored_after_an_error(self, tokens):
        model = make_model().train()
        before = model.config.to_dict()
        with pytest.raises(ValueError, match="ids from"):
            evaluate(model, tokens + 259, mem_len=3)
        with pytest.raises(InputError, match="mem_len=-1"):
            evaluate(model, tokens, mem_len=-1)
        with pytest.raises(InputError, match="batch_size=0"):
            evaluate(model, tokens, batch_size=0)
        assert model.config.to_dict() == before
        assert model.training

    def test_plain_attention_is_scored_block_by_block(self, tokens):
        model = make_model(memory_type="none")
        with torch.no_grad():
            losses = [
                F.cross_entropy(model(tokens[None, i : i + 8][:, : 199 - i]).logits[0], tokens[i + 1 : i + 9], reduction="sum")
                for i in range(0, 199, 8)
            ]
        result = evaluate(model, tokens)
        assert result.loss == pytest.approx(float(sum(losses)) / 199, abs=1e-5)
        assert result.mem_len is None

    def test_a_model_without_segments_needs_a_length(self, tokens):
        model = make_model(segment_len=None)
        with pytest.raises(InputError, match="segment_len=None"):
            evaluate(model, tokens)
        assert evaluate(model, tokens, segment_len=8).loss == pytest.approx(evaluate(make_model(), tokens).loss, abs=1e-6)

    def test_subwords_are_measured_in_bytes(self, subword_tokenizer):
        ids = encode(TEXT, subword_tokenizer)
        result = evaluate(make_model(vocab_size=len(subword_tokenizer)), ids, subword_tokenizer)
        assert result.num_bytes == len(TEXT.encode()) - len(subword_tokenizer.decode(ids[:1]).encode())
        assert result.bits_per_byte == pytest.approx(result.loss * (len(ids) - 1) / math.log(2) / result.num_bytes)

    def test_plot_is_a_png(self, tokens, tmp_path):
        model = make_model()
        plot({"model": [evaluate(model, tokens, mem_len=m) for m in (0, 8)]}, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


class TestTrain:
    settings = TrainingSettings(max_steps=40, batch_size=4, learning_rate=1e-2, warmup_steps=5)

    def test_loss_falls_and_runs_repeat(self, tokens):
        first, second = (new_model(config(hidden_dropout=0.1), byte_tokenizer(), seed=3) for _ in range(2))
        before = evaluate(first, tokens).bits_per_byte
        results = [train(model, tokens, self.settings) for model in (first, second)]
        assert evaluate(first, tokens).bits_per_byte < before - 1
        assert results[0].bits_per_byte == results[1].bits_per_byte
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))

    def test_memory_is_carried_and_fresh_at_each_pass(self, tokens):
        model = make_model()
        lengths = lengths_at_calls(model)
        result = train(model, tokens, TrainingSettings(max_steps=10, batch_size=4))
        a_pass = [0, 8, 16, 24, 32, 40, 48]  # 50 targets a stream, in segments of 8
        assert lengths == [*a_pass, *a_pass[:3]]
        assert result.num_bytes == 199 + 3 * 4 * 8

    def test_streams_can_begin_anew(self, tokens):
        model = make_model()
        lengths = lengths_at_calls(model)
        train(model, tokens, TrainingSettings(max_steps=10, batch_size=4, stream_len=24))
        assert lengths == [0, 8, 16, 0, 8, 16, 0, 0, 8, 16]  # the seventh block ends the pass

    def test_loss_counts_every_target(self, tokens):
        """The reading of the first step is the loss over the first segment of each stream, its last token included."""
        model = make_model()
        block = next(Streams(tokens, 4, 8).blocks())
        with torch.no_grad():
            loss = F.cross_entropy(model(block.input_ids).logits.flatten(0, 1), block.targets.flatten())
        result = train(model, tokens, TrainingSettings(max_steps=1, batch_size=4))
        assert result.bits_per_byte == pytest.approx(float(loss) / math.log(2), rel=1e-5)

    def test_gradient_reaches_as_far_as_the_config_says(self, tokens):
        model = make_model(bptt_segments=2)
        widths = []
        model.register_forward_pre_hook(lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
        train(model, tokens, TrainingSettings(max_steps=2, batch_size=4))
        assert widths == [24, 24]

    @pytest.mark.parametrize(
        ("limits", "steps"), [({}, 7), ({"max_bytes": 65}, 3), ({"max_bytes": 999, "max_steps": 2}, 2)], ids=str
    )
    def test_whichever_limit_comes_first_ends_it(self, tokens, limits, steps):
        assert train(make_model(), tokens, TrainingSettings(batch_size=4, **limits)).steps == steps

    def test_plain_attention_trains_on_separate_segments(self, tokens):
        model = make_model(memory_type="none")
        caches = []
        model.register_forward_pre_hook(lambda _, __, kwargs: caches.append(kwargs["cache"]), with_kwargs=True)
        train(model, tokens, TrainingSettings(max_steps=3, batch_size=4))
        assert caches == [None] * 3

    @pytest.mark.parametrize("starts", [None, [0, 13, 90]], ids=["one_text", "documents"])
    def test_a_corpus_is_read_as_its_tokens(self, tokens, starts, tmp_path):
        """Kept in two bytes a token, it is also the same text to the checkpoints of the first run; other documents are not."""
        settings = TrainingSettings(max_steps=4, batch_size=4, save_steps=3)
        given = tokens if starts is None else Corpus(tokens, starts)
        first, second = make_model(), make_model()
        result = train(first, given, settings, checkpoints=tmp_path / "run")
        corpus = Corpus(tokens.numpy().astype("uint16"), starts)
        assert train(second, corpus, settings, checkpoints=tmp_path / "new").num_bytes == result.num_bytes
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        shutil.rmtree(tmp_path / "run" / "checkpoint-4")
        third = make_model()
        went_on = train(third, corpus, settings, checkpoints=tmp_path / "run")
        assert (went_on.steps, went_on.num_bytes) == (4, 4 * 8)  # one step after the checkpoint
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))
        with pytest.raises(InputError, match="of a run with other text; give"):
            train(make_model(), Corpus(tokens, [0, 14, 90]), settings, checkpoints=tmp_path / "run")

    def test_bytes_are_counted_in_pieces_where_the_corpus_does_not_say(self, subword_tokenizer, monkeypatch):
        ids = encode(TEXT, subword_tokenizer)
        size = text_size(ids, subword_tokenizer)[0]
        settings = TrainingSettings(max_steps=2, batch_size=4)
        num_targets = 2 * 4 * 8
        monkeypatch.setattr(corpus_module, "PIECE_TOKENS", 7)
        for corpus, num_bytes in ((ids, size), (Corpus(ids), size), (Corpus(ids, num_bytes=3 * size), 3 * size)):
            result = train(make_model(vocab_size=len(subword_tokenizer)), corpus, settings, subword_tokenizer)
            assert result.num_bytes == round(num_targets * num_bytes / len(ids))

    def test_a_loss_that_is_not_finite_ends_it(self, tokens):
        model = make_model()
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(math.nan)
        with pytest.raises(FloatingPointError, match="lower the learning rate"):
            train(model, tokens, TrainingSettings(max_steps=1, batch_size=4))


class TestSettings:
    @pytest.mark.parametrize(
        "fields",
        [
            {"max_steps": 0},
            {"batch_size": 1.5},
            {"batch_size": None},
            {"learning_rate": 0},
            {"learning_rate": "fast"},
            {"warmup_steps": -1},
            {"weight_decay": -0.1},
            {"mixed_precision": "int4"},
            {"seed": True},
        ],
        ids=str,
    )
    def test_a_value_out_of_range_is_named(self, fields):
        (name,) = fields
        with pytest.raises(InputError, match=f"{name}=.*must be"):
            TrainingSettings(**fields)

    def test_given_settings_go_before_stored_ones(self):
        settings = training_settings({"batch_size": 3, "seed": 5}, batch_size=7, seed=None)
        assert (settings.batch_size, settings.seed) == (7, 5)

    def test_those_of_transformers_are_taken_too(self, tmp_path):
        settings = training_settings({"lr_scheduler_type": "inverse_sqrt", "adam_beta2": 0.999, "batch_size": 3}, seed=4)
        arguments = settings.arguments(tmp_path)
        assert (arguments.lr_scheduler_type, arguments.adam_beta2, arguments.seed) == ("inverse_sqrt", 0.999, 4)
        assert arguments.per_device_train_batch_size == 3

    @pytest.mark.parametrize(
        ("stored", "message"),
        [
            ({"beams": 4}, "beams=4: no training setting; known: batch_size, .*, and the fields of Transformers'"),
            ({"others": {}}, "others={}: no training setting"),
            ({"output_dir": "a"}, "output_dir='a': give --output-dir instead"),
            ({"bf16": True}, "bf16=True: give mixed_precision instead"),
            ({"adam_beta2": "high"}, "adam_beta2='high': must be a number"),
            ({"adam_beta2": True}, "adam_beta2=True: must be a number"),
            ({"full_determinism": 1}, "full_determinism=1: must be true or false"),
        ],
        ids=str,
    )
    def test_what_is_none_is_named(self, stored, message):
        with pytest.raises(InputError, match=message):
            training_settings(stored)

    @pytest.mark.parametrize("stored", [{"lr_scheduler_type": "up"}, {"label_smoothing_factor": 0.1}], ids=str)
    def test_what_the_trainer_refuses_is_named(self, stored, tmp_path):
        (name,) = stored
        with pytest.raises(InputError, match=f"{name}="):
            training_settings(stored).arguments(tmp_path)

    def test_config_from_a_name_a_folder_and_a_file(self, tmp_path):
        by_name, stored = load_config("demo", mem_len=5, segment_len=None)
        assert (by_name.mem_len, by_name.segment_len) == (5, 32)
        assert training_settings(stored).max_steps > 0
        by_name.save_pretrained(tmp_path)
        for source in (tmp_path, tmp_path / "config.json"):
            again, stored = load_config(source)
            assert again.to_diff_dict() == by_name.to_diff_dict()
            assert stored == {}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "no config there; .* demo"),
            ("{", "not JSON"),
            ("[]", "must hold one JSON object"),
            ('{"model_type": "llama"}', "model_type is 'llama'"),
            ('{"mem_len": -1}', "mem_len"),
            ('{"position_type": "sundial"}', "sundial"),
        ],
    )
    def test_a_config_that_cannot_be_used_is_refused(self, tmp_path, content, message):
        path = tmp_path / "config.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(InputError, match=rf"config\.json: .*{message}"):
            load_config(path)

    def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(self):
        with pytest.raises(InputError, match=r"vocab_size=100 is less than the tokenizer.s 259"):
            new_model(config(vocab_size=100), byte_tokenizer(), seed=0)


class TestSaving:
    def test_model_tokenizer_and_generation_config_are_saved(self, tmp_path):
        model = new_model(config(), byte_tokenizer(), seed=0)
        save(model, byte_tokenizer(), tmp_path / "new" / "model")
        loaded = XLForCausalLM.from_pretrained(tmp_path / "new" / "model")
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
        assert loaded.generation_config.pad_token_id == 0
        assert len(AutoTokenizer.from_pretrained(tmp_path / "new" / "model")) == 259
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]

    def test_a_folder_in_use_is_refused_unless_overwrite(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "model-00001-of-00002.safetensors").write_text("old shard")
        (tmp_path / "config.json").write_text("old")
        with pytest.raises(InputError, match="is not empty"):
            check_output_dir(tmp_path, overwrite=False)
        save(make_model(), byte_tokenizer(), tmp_path, overwrite=True)
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "xl"
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
        with pytest.raises(InputError, match="is a file"):
            check_output_dir(tmp_path / "notes.txt", overwrite=True)

    def test_a_save_that_fails_leaves_what_was_there(self, tmp_path):
        path = tmp_path / "model"
        save(make_model(), byte_tokenizer(), path)
        before = {file.name: file.read_bytes() for file in path.iterdir()}

        class BrokenTokenizer:
            def save_pretrained(self, folder):
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            save(make_model(hidden_size=48), BrokenTokenizer(), path, overwrite=True)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
        assert list(tmp_path.iterdir()) == [path]
