"""Kills processes that take turns of sessions, at random moments, and checks what each leaves: a script of test_sessions.py.

Arguments: a folder, and how many processes to kill. They are forks of this one, which has loaded everything, so that a kill
takes a tenth of a second. Prints the numbers of kills and turns as JSON; whatever is lost or damaged is an AssertionError.
"""

import json
import os
import random
import signal
import sys
import time
import traceback

import torch
from helpers import tiny_model

from modeling_xl import XLCache
from modeling_xl.sessions import Session, SessionStore, generate, score


def turn_of(model, session: Session, number: int) -> tuple[list[int], Session]:
    rng = random.Random(number)
    prompt = [rng.randrange(97) for _ in range(rng.randint(1, 4))]
    ((answer, session),) = generate(model, [session], [prompt], 2, do_sample=False)
    return prompt + answer, session


def take_turns(model, folder: str, name: str, acknowledge: int) -> None:
    """Turns of one session, each reported once it is saved; meanwhile copies of it are made and deleted."""
    with SessionStore(folder, Session(XLCache(model.config))) as store:
        copies = [info.id for info in store.infos() if info.id != name]
        while True:
            with store.hold(name) as held:
                text, session = turn_of(model, held.session, held.info.turns)
                turns = held.save(session, text).turns
            os.write(acknowledge, turns.to_bytes(4, "big"))
            copies.append(store.fork(name))
            while len(copies) > 2:
                store.delete(copies.pop(0))


def main(folder: str, kills: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(6)
    model = tiny_model(dtype=torch.float32, memory_type=["recurrence", "compressive", "linear"], position_type="rope")
    with SessionStore(folder, Session(XLCache(model.config))) as store:
        name = store.create()
    # The same turns, never stopped.
    sessions, texts = [Session(XLCache(model.config))], []
    turns = 0
    for _ in range(kills):
        pipe, acknowledge = os.pipe()
        child = os.fork()
        if not child:
            os.close(pipe)
            try:
                take_turns(model, folder, name, acknowledge)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(acknowledge)
        # Some are killed before their first turn, in the middle of opening the folder.
        with os.fdopen(pipe, "rb") as saved:
            reported = b"".join(saved.read(4) for _ in range(rng.randint(0, 3)))
            time.sleep(rng.uniform(0.0, 0.03))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"a process ended by itself after turn {turns}"
            reported += saved.read()
        reported = int.from_bytes(reported[-4:], "big") if reported else turns
        with SessionStore(folder, Session(XLCache(model.config))) as store:
            turns = store.info(name).turns
            assert turns in (reported, reported + 1), f"{turns} turns are kept of {reported} that were saved"
            while len(texts) < turns:
                text, session = turn_of(model, sessions[-1], len(texts))
                texts.append(text)
                sessions.append(session)
            assert list(store.text(name)) == texts[:turns]
            for info in store.infos():
                with store.hold(info.id) as held:
                    kept = sessions[len([*store.text(info.id)])]
                    ((found, _), (expected, _)) = (score(model, [one], [[1, 2, 3]])[0] for one in (held.session, kept))
                    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
        left = {entry for entry in os.listdir(folder) if not entry.startswith(".") and entry != "store.json"}
        with SessionStore(folder, Session(XLCache(model.config))) as store:
            assert left == {info.id for info in store.infos()}
        assert not [entry for entry in os.listdir(folder) if entry.startswith((".new", ".gone"))]
    sys.stdout.write(json.dumps({"kills": kills, "turns": turns}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
