"""Sessions: in any batch and after any stop they are what they are alone and in one go, and a folder of them stays whole."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers import KEPT_STATES, biggest, ids_for, tiny_model
from report_helpers import CLOSE, EXACT

import modeling_xl.sessions
from modeling_xl import XLCache
from modeling_xl.sessions import (
    BusySessionError,
    GoneSessionError,
    Session,
    SessionStore,
    SessionTooLargeError,
    StoreFullError,
    UnknownSessionError,
    generate,
    read,
    score,
    weights_digest,
)

# A fifth of the vocabulary of 97 ends an answer, so that rows of a batch end at different times.
END_IDS = list(range(0, 97, 5))
PROBE = [5, 17, 80, 2, 44, 44, 9]
every_state = pytest.mark.parametrize("changes", KEPT_STATES)


def fresh(model, **settings) -> Session:
    return Session(XLCache(model.config, **settings))


def turn_alone(model, cache, pending, prompt, count):
    """The ids of one turn by plain `generate` on a cache of its own."""
    ids = torch.tensor([[*pending, *prompt]])
    options = {"do_sample": False, "eos_token_id": END_IDS, "pad_token_id": 0, "max_new_tokens": count}
    return model.generate(ids, cache=cache, new_tokens_only=True, **options)[0, ids.shape[1] :].tolist()


def probe(model, session) -> torch.Tensor:
    [(found, _)] = score(model, [session], [PROBE])
    return found


def interleaved(model, num_sessions, num_calls, most, rng, start=None):
    """Runs random batches of sessions; returns sessions and, for each, its turns (prompt, limit, answer)."""
    sessions = [start or fresh(model) for _ in range(num_sessions)]
    turns = [[] for _ in sessions]
    for _ in range(num_calls):
        rows = rng.sample(range(num_sessions), rng.randint(1, min(most, num_sessions)))
        prompts = [[rng.randrange(97) for _ in range(rng.randint(0 if sessions[row].pending else 1, 9))] for row in rows]
        limits = [rng.randint(1, 7) for _ in rows]
        found = generate(model, [sessions[row] for row in rows], prompts, limits, END_IDS, do_sample=False)
        for row, prompt, limit, (answer, session) in zip(rows, prompts, limits, found, strict=True):
            sessions[row] = session
            turns[row].append((prompt, limit, answer))
    return sessions, turns


def check_alone(model, session, turns, tolerance, start=None):
    """The same turns of one session by itself give the same text, and the same numbers afterwards."""
    cache, pending = XLCache(model.config), []
    for prompt, limit, answer in turns:
        assert turn_alone(model, cache, pending, prompt, limit) == answer
        pending = answer[-1:]
    if turns:
        assert biggest(probe(model, session), probe(model, Session(cache, tuple(pending)))) < tolerance


class TestBatches:
    @every_state
    def test_interleaved_sessions_are_what_each_is_alone(self, changes):
        """float64, so that no two tokens are equally likely by rounding."""
        model = tiny_model(**changes)
        sessions, turns = interleaved(model, 4, 6, 4, random.Random(1))
        assert len({len(answer) for turn in turns for _, _, answer in turn}) > 2  # rows left their batches at different times
        for session, turn in zip(sessions, turns, strict=True):
            check_alone(model, session, turn, EXACT)
            fed = sum(len(prompt) + len(answer) for prompt, _, answer in turn)
            assert session.num_tokens == fed == session.cache.get_seq_length() + len(session.pending)

    @pytest.mark.slow
    @pytest.mark.parametrize("memory", ["recurrence", "compressive", "linear"])
    def test_a_thousand_sessions(self, memory):
        model = tiny_model(memory_type=memory, position_type="rope")
        sessions, turns = interleaved(model, 1000, 250, 32, random.Random(2))
        for session, turn in zip(sessions, turns, strict=True):
            check_alone(model, session, turn, EXACT)

    @every_state
    def test_scores_of_texts_of_different_length(self, changes):
        """In float32: log-probabilities of each text given all before are those of the session alone."""
        model = tiny_model(dtype=torch.float32, **changes)
        rng = random.Random(3)
        sessions = [fresh(model) for _ in range(4)]
        caches = [XLCache(model.config) for _ in range(4)]
        last = [[] for _ in range(4)]
        for lengths in ((3, 11, 1, 6), (0, 2, 14, 1), (5, 1, 0, 9)):
            texts = [[rng.randrange(97) for _ in range(length)] for length in lengths]
            found = score(model, sessions, texts)
            for row, (text, (log_probs, session)) in enumerate(zip(texts, found, strict=True)):
                expected = torch.empty(0)
                if text:
                    with torch.no_grad():
                        ids = torch.tensor([last[row] + text])
                        logits = model(ids[:, :-1], cache=caches[row]).logits if ids.shape[1] > 1 else torch.empty(1, 0, 97)
                    expected = logits[0].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                    if not last[row]:
                        expected = torch.cat([torch.full((1,), torch.nan), expected])
                    last[row] = text[-1:]
                assert torch.equal(log_probs.isnan(), expected.isnan())
                assert len(text) == 0 or biggest(log_probs.nan_to_num(), expected.nan_to_num()) < CLOSE
                sessions[row] = session

    @every_state
    def test_prefix_is_read_once(self, changes):
        """Many continuations of one session in one batch: each follows the whole text, and the session stays as it was."""
        model = tiny_model(**changes)
        text = ids_for(model, 1, 23)[0].tolist()
        (prefix,) = read(model, [fresh(model)], [text])
        assert prefix.num_tokens == 23
        questions = [[7, 8], [], [30, 31, 32, 33, 34, 35, 36]]
        before = probe(model, prefix)
        answers = generate(model, [prefix] * 3, questions, 4, do_sample=False)
        assert torch.equal(probe(model, prefix), before)
        for question, (answer, session) in zip(questions, answers, strict=True):
            # Without a grid every call is a segment, so that the prefix is a call of its own there too.
            (again,) = read(model, [fresh(model)], [text])
            [(expected, alone)] = generate(model, [again], [question], 4, do_sample=False)
            assert answer == expected
            assert biggest(probe(model, session), probe(model, alone)) < EXACT
            if model.config.segment_len is not None:
                whole = torch.tensor([text + question])
                assert model.generate(whole, max_new_tokens=4, do_sample=False)[0, whole.shape[1] :].tolist() == answer

    def test_an_answer_ends_with_an_end_token(self):
        """It is returned and not read yet, also where others go on; None asks the model which they are."""
        model = tiny_model()
        prompts = [[3, 4, 5], [9, 9, 1]]
        (whole, _), (other, _) = generate(model, [fresh(model)] * 2, prompts, 12, do_sample=False)
        end = next(token for token in whole if token not in other)
        model.generation_config.eos_token_id = end
        for end_ids in ([end], None):
            (short, session), (same, _) = generate(model, [fresh(model)] * 2, prompts, 12, end_ids, do_sample=False)
            assert short == whole[: whole.index(end) + 1] and same == other
            assert session.pending == (end,) and session.num_tokens == 3 + len(short)
        assert generate(model, [fresh(model)], prompts[:1], 12, [], do_sample=False)[0][0] == whole

    def test_options_see_the_turn_whatever_leaves_the_batch(self):
        """A penalty on repeated tokens needs the turn's ids, also after a shorter row has left."""
        model = tiny_model()
        options = {"do_sample": False, "repetition_penalty": 1.8, "suppress_tokens": [7]}
        prompts = [[3, 4, 5], [9, 9, 1, 7, 8], [80]]
        with torch.no_grad():  # id 0 is what a short row would repeat, were its pads taken for text
            model.lm_head.weight[0] = model.lm_head.weight.abs().amax(0)
        together = generate(model, [fresh(model)] * 3, prompts, [2, 5, 14], **options)
        for prompt, limit, (answer, _) in zip(prompts, [2, 5, 14], together, strict=True):
            assert generate(model, [fresh(model)], [prompt], limit, **options)[0][0] == answer

    def test_sampling_draws_from_the_model(self):
        model = tiny_model()
        torch.manual_seed(0)
        found = generate(model, [fresh(model)] * 3, [[1, 2]] * 3, 9, do_sample=True, temperature=1.5, top_k=0)
        assert len({tuple(answer) for answer, _ in found}) > 1
        torch.manual_seed(0)
        again = generate(model, [fresh(model)] * 3, [[1, 2]] * 3, 9, do_sample=True, temperature=1.5, top_k=0)
        assert [answer for answer, _ in again] == [answer for answer, _ in found]

    def test_a_short_text_does_not_keep_the_length_of_its_neighbour(self):
        """Memory of all tokens: after a batch with a long one, a session holds what its own text needs."""
        model = tiny_model(dtype=torch.float32, memory_type="none")
        (long,) = read(model, [fresh(model)], [ids_for(model, 1, 3000)[0].tolist()])
        [(_, short), (_, longer)] = generate(model, [fresh(model), long], [[1, 2, 3], [4]], 5, do_sample=False)
        # A token has 3 layers of a key and a value of 2 heads of 6 in 4 bytes; buffers may have room for 256 more.
        tables = sum(table.nbytes for _, table in short.cache.derived.values())
        assert short.cache.nbytes - tables < 300 * 3 * 2 * 12 * 4 < 3000 * 3 * 2 * 12 * 4 < longer.cache.nbytes - tables

    def test_what_cannot_be_run_is_refused(self):
        model = tiny_model()
        new = fresh(model)
        (begun,) = read(model, [new], [[1, 2]])
        with pytest.raises(ValueError, match="session at 1 has no token"):
            generate(model, [begun, new], [[], []], 3)
        with pytest.raises(ValueError, match="1 sessions and 2 texts"):
            read(model, [new], [[1], [2]])
        for wrong in (0, [3, 4], [True, 1.5], [2, 0]):
            with pytest.raises(ValueError, match="max_new_tokens"):
                generate(model, [new], [[1]], wrong)
        with torch.no_grad(), pytest.raises(ValueError, match="2 rows"):
            Session(model(ids_for(model, 2, 4)).cache)
        with pytest.raises(ValueError, match="no_repeat_ngram_size=2 cannot be kept to"):
            generate(model, [new], [[1]], 3, no_repeat_ngram_size=2)
        with pytest.raises(ValueError, match=r"have dtype=None and 'torch.bfloat16'"):
            read(model, [begun, fresh(model, dtype=torch.bfloat16)], [[1], [2]])
        model.generation_config.min_new_tokens = 4
        with pytest.raises(ValueError, match=r"generation_config.min_new_tokens=4 cannot be kept to"):
            generate(model, [new], [[1]], 3)
        with pytest.raises(ValueError, match="vocab_size"):
            read(model, [begun], [[3, 97]])
        assert begun.num_tokens == 2


def open_store(folder, model, **settings) -> SessionStore:
    limits = {name: settings.pop(name) for name in ("max_sessions", "idle_seconds", "weights") if name in settings}
    return SessionStore(folder, fresh(model, **settings), max_bytes=10**7, **limits)


@pytest.fixture
def model():
    return tiny_model(dtype=torch.float32)


class TestResuming:
    @pytest.mark.parametrize("form", ["key_value", "hidden"])
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
    @every_state
    def test_from_file_equals_never_stopped(self, changes, dtype, form, tmp_path):
        """Bit for bit: beside plain `generate` on a cache that was never saved, with the folder closed after each turn."""
        model = tiny_model(dtype=torch.float32, **changes)
        settings = {"dtype": dtype, "form": form}
        cache, pending = XLCache(model.config, **settings), []
        with open_store(tmp_path / "store", model, **settings) as store:
            name = store.create()
        rng = random.Random(4)
        for turns in range(1, 4):
            prompt = [rng.randrange(97) for _ in range(rng.randint(1, 8))]
            expected = turn_alone(model, cache, pending, prompt, 4)
            pending = expected[-1:]
            with open_store(tmp_path / "store", model, **settings) as store, store.hold(name) as held:
                [(answer, session)] = generate(model, [held.session], [prompt], 4, END_IDS, do_sample=False)
                assert held.save(session).turns == turns
            assert answer == expected
        with open_store(tmp_path / "store", model, **settings) as store, store.hold(name) as held:
            resumed = held.session
        assert (resumed.cache.dtype, resumed.cache.form) == (dtype, "key_value" if not model.config.has_two_forms else form)
        never = Session(cache, tuple(pending))
        assert torch.equal(probe(model, resumed), probe(model, never))
        assert resumed.num_tokens == never.num_tokens

    def test_several_are_held_and_run_as_a_batch(self, model, tmp_path):
        with open_store(tmp_path, model) as store:
            names = [store.create() for _ in range(3)]
            with ExitStack() as stack:
                held = [stack.enter_context(store.hold(name)) for name in names]
                turns = generate(model, [one.session for one in held], [[1], [2, 3], [4, 5, 6]], 5, do_sample=False)
                for one, (_, session) in zip(held, turns, strict=True):
                    one.save(session)
            assert [store.info(name).num_tokens for name in names] == [6, 7, 8]

    def test_dtype_halves_a_session(self, tmp_path):
        """Rows of memory halve, in memory and on disk; sums over all of the past stay float32."""

        def sizes(memory, dtype):
            model = tiny_model(dtype=torch.float32, memory_type=memory, position_type="rope", hidden_size=120)
            (session,) = read(model, [fresh(model, dtype=dtype)], [ids_for(model, 1, 60)[0].tolist()])
            session.cache.save_pretrained(tmp_path / f"{memory}-{dtype}")
            file = (tmp_path / f"{memory}-{dtype}" / "cache.safetensors").stat().st_size
            return session.cache.nbytes, file, len(json.dumps(session.cache.state_dict()["fingerprint"]))

        for memory, factor in {"recurrence": 2, "compressive": 2, "none": 2, "linear": 1}.items():
            held, file, header = sizes(memory, None)
            half_held, half_file, _ = sizes(memory, torch.bfloat16)
            assert held == factor * half_held
            # The file has a header of a few kilobytes beside the tensors.
            assert abs(file - half_file - held * (1 - 1 / factor)) < 0.5 * held + header


class TestStore:
    def test_life_of_a_session(self, model, tmp_path):
        with open_store(tmp_path, model) as store:
            name = store.create(None, {"said": "hello"})
            with store.hold(name) as held:
                [(_, session)] = generate(model, [held.session], [[1, 2]], 4, do_sample=False)
                kept = held.save(session, {"said": "1 2"}, {"said": "\ud800é\n"})
            assert (kept.turns, kept.num_tokens) == (1, 6)
            assert kept == store.info(name) == store.infos()[0]
            twin = store.fork(name)
            with store.hold(twin) as held, store.hold(name) as origin:
                assert torch.equal(probe(model, held.session), probe(model, origin.session))
                held.save(generate(model, [held.session], [[3]], 2, do_sample=False)[0][1], {"said": "3"})
            assert [entry["said"] for entry in store.text(name)] == ["hello", "1 2", "\ud800é\n"]
            assert [entry["said"] for entry in store.text(twin)] == ["hello", "1 2", "\ud800é\n", "3"]
            assert [store.info(one).num_tokens for one in (name, twin)] == [6, 9]
            store.delete(twin)
            assert len(store) == 1
            for lost in (store.info, store.delete, store.fork, lambda one: store.hold(one).__enter__()):
                with pytest.raises(GoneSessionError, match="was deleted"):
                    lost(twin)
        on_disk = sum(path.stat().st_size for path in (tmp_path / name / "1").iterdir())
        assert store.info.__self__ is store and kept.nbytes == on_disk
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["1", "text.jsonl"]
        with open_store(tmp_path, model) as store:
            assert store.infos() == [kept]

    @pytest.mark.parametrize(
        "wrong",
        ["../x", "/etc/passwd", "", ".", "..", "%2e%2e", "é" * 32, "٣" * 32, "A" * 32, "a" * 31, "a" * 33, "a" * 32 + "\n"],
    )
    def test_ids_do_not_walk(self, model, tmp_path, wrong):
        with open_store(tmp_path / "store", model) as store:
            store.create()
            before = sorted(tmp_path.rglob("*"))
            for ask in (store.info, store.delete, store.fork, lambda one: list(store.text(one)), lambda one: hold(store, one)):
                with pytest.raises(UnknownSessionError, match="32 hexadecimal"):
                    ask(wrong)
            with pytest.raises(UnknownSessionError, match="none with this id"):
                store.info("a" * 32)
            assert sorted(tmp_path.rglob("*")) == before

    def test_ids_are_not_guessed(self, model, tmp_path):
        with open_store(tmp_path, model) as store:
            names = {store.create() for _ in range(20)}
        assert len(names) == 20 and len({name[:6] for name in names}) == 20

    def test_one_turn_at_a_time(self, model, tmp_path):
        with open_store(tmp_path, model) as store:
            name = store.create()
            with store.hold(name) as held:
                for ask in (store.delete, store.fork, lambda one: hold(store, one)):
                    with pytest.raises(BusySessionError, match="in flight"):
                        ask(name)
                assert store.info(name).turns == 0
            with pytest.raises(ValueError, match="no longer held"):
                held.save(held.session)
            # Of many threads that want the same session each gets it, one after the other.
            done = []

            def turns():
                while len(done) < 12:
                    try:
                        with store.hold(name) as held:
                            count = held.info.turns
                            held.save(read(model, [held.session], [[1]])[0])
                            done.append(count)
                    except BusySessionError:
                        time.sleep(0.001)

            threads = [threading.Thread(target=turns) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert done == list(range(len(done)))
            assert store.info(name).num_tokens == len(done)

    def test_limits(self, model, tmp_path, monkeypatch):
        now = 1000.0
        monkeypatch.setattr(modeling_xl.sessions.time, "time", lambda: now)
        with open_store(tmp_path, model, max_sessions=2, idle_seconds=60) as store:
            first = store.create()
            now += 50
            second = store.create()
            for more in (store.create, lambda: store.fork(first)):
                with pytest.raises(StoreFullError, match="max_sessions=2"):
                    more()
            now += 20
            assert store.info(second).id == second
            with pytest.raises(GoneSessionError, match="idle for more than 60 seconds"):
                store.info(first)
            third = store.create()
            now += 50  # the second is idle and makes room
            store.create()
            with store.hold(third) as held:
                now += 100  # a long turn
                assert store.expire() == 1
                held.save(held.session)
            assert [info.id for info in store.infos()] == [third]
        assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == sorted([third, "store.json"])

    def test_bytes_of_a_session_are_bounded(self, tmp_path):
        """A memory that grows must be given a bound; a turn that passes it is refused and the last one stays."""
        model = tiny_model(dtype=torch.float32, memory_type="none")
        with pytest.raises(ValueError, match=r"max_bytes=None.*grows without end"):
            SessionStore(tmp_path, fresh(model))
        windowed = tiny_model(memory_type="none", attention_window=9)
        SessionStore(tmp_path / "windowed", fresh(windowed)).close()
        with SessionStore(tmp_path / "store", fresh(model), max_bytes=40_000) as store:
            name = store.create()
            with store.hold(name) as held:
                held.save(read(model, [held.session], [[1] * 9])[0], "nine")
            with store.hold(name) as held:
                (longer,) = read(model, [held.session], [[1] * 200])
                with pytest.raises(SessionTooLargeError, match="max_bytes=40,000"):
                    held.save(longer, "two hundred")
                with pytest.raises(SessionTooLargeError):
                    store.create(longer)
            assert store.info(name).num_tokens == 9 and len(store) == 1
            assert list(store.text(name)) == ["nine"]
            with store.hold(name) as held:
                held.save(read(model, [held.session], [[1] * 5])[0], "five")
            assert list(store.text(name)) == ["nine", "five"]
            assert sorted(path.name for path in (tmp_path / "store" / name).iterdir()) == ["2", "text.jsonl"]

    def test_folders_that_do_not_fit_are_refused(self, model, tmp_path):
        with open_store(tmp_path / "store", model, weights="a") as store:
            store.create()
            with pytest.raises(ValueError, match="another SessionStore"):
                open_store(tmp_path / "store", model, weights="a")
            (other,) = read(model, [fresh(model, mem_len=3)], [[1, 2]])
            with pytest.raises(ValueError, match="mem_len=3 and those of this store 7"):
                store.create(other)
            assert len(store) == 1
        with pytest.raises(ValueError, match="closed"):
            store.create()
        for changes, field in (
            ({"weights": "b"}, "weights"),
            ({"weights": "a", "mem_len": 3}, "mem_len"),
            ({"weights": "a", "dtype": torch.bfloat16}, "dtype"),
            ({"weights": "a", "form": "hidden"}, "form"),
        ):
            with pytest.raises(ValueError, match=f"made with {field}="):
                open_store(tmp_path / "store", model, **changes)
        with pytest.raises(ValueError, match="made with position_type="):
            open_store(tmp_path / "store", tiny_model(position_type="rope"), weights="a")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("all of it")
        with pytest.raises(ValueError, match="holds no sessions"):
            open_store(tmp_path / "mine", model)
        with pytest.raises(ValueError, match="is a file"):
            open_store(tmp_path / "mine" / "thesis.txt", model)
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"
        for name in ("max_sessions", "idle_seconds"):
            with pytest.raises(ValueError, match=f"{name}=0"):
                open_store(tmp_path / "new", model, **{name: 0})
        open_store(tmp_path / "store", model, weights="a").close()

    def test_digest_names_the_weights(self, model):
        name = weights_digest(model)
        assert name == weights_digest(tiny_model(dtype=torch.float32)) and len(name) == 64
        assert name != weights_digest(tiny_model(dtype=torch.bfloat16))
        assert name != weights_digest(tiny_model(dtype=torch.float32, embedding_scale=3.0))
        assert name == weights_digest(tiny_model(dtype=torch.float32, eos_token_id=5))
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1e-6
        assert name != weights_digest(model)

    @pytest.mark.parametrize("place", ["rename", "sync"])
    def test_a_save_that_is_interrupted_behind_its_rename(self, model, tmp_path, monkeypatch, place):
        """The next turn is saved, and the text is that of the turns that were."""
        with open_store(tmp_path, model) as store:
            name = store.create()

            def save(text):
                with store.hold(name) as held:
                    [(_, session)] = generate(model, [held.session], [[1, 2]], 3, do_sample=False)
                    return held.save(session, text)

            def renamed(path, target):
                rename(path, target)
                raise KeyboardInterrupt

            def synced(path):
                sync(path)
                if path.name == name:
                    raise OSError(5, "wrong")

            save("one")
            rename, sync = Path.rename, modeling_xl.sessions._sync
            with monkeypatch.context() as patch:
                patch.setattr(*((Path, "rename", renamed) if place == "rename" else (modeling_xl.sessions, "_sync", synced)))
                with pytest.raises((OSError, KeyboardInterrupt)):
                    save("a longer text than the others")
            save("two")
            save("three")
            kept = ["one", "two", "three"] if place == "rename" else ["one", "a longer text than the others", "two", "three"]
            assert list(store.text(name)) == kept
            info = store.info(name)
            assert info.turns == len(kept)
        with open_store(tmp_path, model) as store:
            assert store.info(name) == info and list(store.text(name)) == kept

    def test_files_taken_out_of_the_folder(self, model, tmp_path, monkeypatch):
        with open_store(tmp_path, model, idle_seconds=60, max_sessions=2) as store:
            lost, kept = store.create(), store.create()
            shutil.rmtree(tmp_path / lost)
            with pytest.raises(GoneSessionError, match="taken out of the folder"), store.hold(lost):
                pass
            now = time.time()
            monkeypatch.setattr(modeling_xl.sessions.time, "time", lambda: now + 61)
            store.create()
            with pytest.raises(GoneSessionError):
                store.info(lost)
            with pytest.raises(GoneSessionError):
                store.info(kept)

    def test_a_closed_store_writes_nothing(self, model, tmp_path):
        first = open_store(tmp_path, model, idle_seconds=60)
        name = first.create()
        with first.hold(name) as held:
            (session,) = read(model, [held.session], [[1, 2]])
            first.close()
            with pytest.raises(ValueError, match="closed"):
                held.save(session, "late")
        with pytest.raises(ValueError, match="closed"):
            first.expire()
        with open_store(tmp_path, model) as second:
            assert second.info(name).turns == 0 and second.info(name).text_bytes == 0

    def test_one_damaged_session_leaves_the_others(self, model, tmp_path):
        with open_store(tmp_path, model) as store:
            good, bad, worse = (store.create() for _ in range(3))
        (tmp_path / bad / "0" / "session.json").write_text("{")
        (tmp_path / worse / "0" / "cache.safetensors").write_bytes(b"")
        with pytest.warns(UserWarning, match="no whole session"):
            store = open_store(tmp_path, model)
        with store:
            assert sorted(info.id for info in store.infos()) == sorted([good, worse])
            hold(store, good)
            with pytest.raises(ValueError, match="whole cache"):
                hold(store, worse)
            with pytest.raises(ValueError, match="whole cache"):  # the lock has been let go
                hold(store, worse)
        assert (tmp_path / bad / "0" / "session.json").read_text() == "{"


def hold(store, name) -> None:
    with store.hold(name):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="killed processes are forks of one that has loaded torch")
def test_killed_at_any_moment(tmp_path):
    """A process that is killed in the middle of turns, forks and deletions loses at most the turn in flight."""
    kills = 30
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = [sys.executable, str(Path(__file__).parent / "killed_turns.py"), str(tmp_path / "store"), str(kills)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["kills"] == kills and report["turns"] > kills / 2


def check_flat(model, folder, turns, every, measure=lambda: 0):
    """Runs turns of one session; sizes in memory and on disk, the text apart, at every so many of them."""
    rng = random.Random(5)
    sizes = []
    with open_store(folder, model) as store:
        name = store.create()
        for turn in range(1, turns + 1):
            with store.hold(name) as held:
                prompt = [rng.randrange(97) for _ in range(rng.randint(1, 6))]
                [(answer, session)] = generate(model, [held.session], [prompt], 2, do_sample=False)
                info = held.save(session, {"prompt": prompt, "answer": answer})
            if turn % every == 0:
                files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "text.jsonl"]
                sizes.append((session.cache.nbytes, sum(path.stat().st_size for path in files), len(files), measure()))
        assert info.turns == turns
        assert sum(1 for _ in store.text(name)) == turns
        assert info.text_bytes == (Path(folder) / name / "text.jsonl").stat().st_size
    return sizes


@every_state
def test_size_does_not_grow_with_the_turns(changes, tmp_path):
    if changes.get("memory_type") == "none" or "none" in changes.get("memory_type", ""):
        changes = {**changes, "attention_window": 6}
    sizes = check_flat(tiny_model(dtype=torch.float32, **changes), tmp_path, 30, 1)
    held, on_disk, files, _ = (column[5:] for column in zip(*sizes, strict=True))
    # Which rows wait in a buffer when a turn ends differs by a tenth at most; with all tokens there would be 1.7 times as many.
    assert max(held[12:]) <= 1.1 * max(held[:12]) and max(on_disk[12:]) <= 1.1 * max(on_disk[:12]) and len(set(files)) == 1


@pytest.mark.slow
def test_ten_thousand_turns(tmp_path):
    psutil = pytest.importorskip("psutil")
    model = tiny_model(dtype=torch.float32, memory_type=["recurrence", "compressive", "linear"], position_type="rope")
    sizes = check_flat(model, tmp_path, 10_000, 100, lambda: psutil.Process().memory_info().rss)
    held, on_disk, files, resident = zip(*sizes, strict=True)
    # One turn in a hundred is looked at, and how full buffers are differs by a tenth.
    assert max(held) <= 1.1 * max(held[:10]) and max(on_disk) <= 1.1 * max(on_disk[:10]) and len(set(files)) == 1
    # `generate` itself leaves some hundred bytes a call with the allocator; a state kept each time would be above 100 MB.
    assert max(resident[-10:]) - min(resident[5:15]) < 10 * 2**20
