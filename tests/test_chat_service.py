"""The chat service of examples/: over HTTP, what it answers, what it refuses, and what a killed one leaves."""

import http.client
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import tiny_model

from modeling_xl import XLCache
from modeling_xl.sessions import Session, SessionStore, generate, read
from modeling_xl.text import byte_tokenizer

pytest.importorskip("fastapi", reason="the service needs FastAPI: pip install 'modeling-xl[serve]'")
pytest.importorskip("uvicorn", reason="the service needs uvicorn: pip install 'modeling-xl[serve]'")
pytestmark = pytest.mark.clients

EXAMPLE = Path(__file__).parent.parent / "examples" / "chat_service.py"
SYSTEM = "One is asked, the other answers.\n"
FORMAT = ["--turn", "Q: {text}\nA:", "--end", "\n"]


def load_example():
    spec = importlib.util.spec_from_file_location("chat_service", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    """float64: which token is the likeliest does not depend on the batch."""
    return tiny_model(vocab_size=259, position_type="rope")


@pytest.fixture(scope="module")
def prefix(model):
    (session,) = read(model, [Session(XLCache(model.config))], [ids_of(SYSTEM)])
    return session


def ids_of(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def ask(port, method, path, body=None, headers=None, **how):
    """Status and body of one request, decoded; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        if body is not None and not isinstance(body, bytes) and not how:
            body = json.dumps(body)
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})}, **how)
        answer = connection.getresponse()
        content = answer.read()
        is_json = answer.getheader("Content-Type") == "application/json"
        return answer.status, json.loads(content) if content and is_json else content.decode()
    finally:
        connection.close()


class Service:
    """The app in a thread of this process."""

    def __init__(self, model, prefix, folder, limits=None, **settings):
        import uvicorn

        example = load_example()
        self.store = SessionStore(folder, prefix, **{"max_sessions": 40, **settings})
        app = example.make_app(
            model, byte_tokenizer(), self.store, example.Limits(**(limits or {})), "Q: {text}\nA:", ["\n"], log=True
        )
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, access_log=False, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *args):
        self.server.should_exit = True
        self.thread.join()

    def ask(self, *args, **kwargs):
        return ask(self.port, *args, **kwargs)

    def create(self) -> str:
        status, session = self.ask("POST", "/sessions")
        assert status == 201
        return session["id"]


@pytest.fixture
def service(model, prefix, tmp_path):
    with Service(model, prefix, tmp_path, {"max_new_tokens": 20, "max_body_bytes": 2000}) as running:
        yield running


def answer_alone(model, session, text, count):
    [(found, session)] = generate(model, [session], [ids_of(f"Q: {text}\nA:")], count, ids_of("\n"), do_sample=False)
    return byte_tokenizer().decode(found[:-1] if found[-1:] == ids_of("\n") else found, skip_special_tokens=True), session


def test_a_conversation(service, model, prefix):
    name = service.create()
    session = prefix
    for turns, text in enumerate(("Who is there?", "", "naïve ☃ </s> <pad>"), 1):
        expected, session = answer_alone(model, session, text, 12)
        status, answer = service.ask("POST", f"/sessions/{name}/turns", {"text": text, "max_new_tokens": 12})
        assert (status, answer["text"]) == (200, expected)
        assert answer["session"]["turns"] == turns and answer["session"]["num_tokens"] == session.num_tokens
        assert service.ask("GET", f"/sessions/{name}") == (200, answer["session"])
    status, twin = service.ask("POST", f"/sessions/{name}/fork")
    assert status == 201 and twin["num_tokens"] == session.num_tokens
    expected, _ = answer_alone(model, session, "And?", 9)
    for one in (name, twin["id"]):
        assert service.ask("POST", f"/sessions/{one}/turns", {"text": "And?", "max_new_tokens": 9})[1]["text"] == expected
    assert [entry["text"] for entry in service.store.text(twin["id"])] == ["Who is there?", "", "naïve ☃ </s> <pad>", "And?"]
    assert service.ask("DELETE", f"/sessions/{name}") == (204, "")
    status, gone = service.ask("GET", f"/sessions/{name}")
    assert status == 410 and "was deleted" in gone["error"]["rule"]
    assert service.ask("GET", f"/sessions/{twin['id']}")[0] == 200


def test_many_at_once_are_each_alone(service, model, prefix, monkeypatch):
    batches = []
    example = sys.modules["chat_service"]
    plain = example.generate
    monkeypatch.setattr(
        example, "generate", lambda *args, **options: (batches.append(len(args[1])), plain(*args, **options))[1]
    )
    names = [service.create() for _ in range(12)]

    def talk(number):
        session, rng = prefix, random.Random(number)
        for turn in range(4):
            text, count = f"{number} {turn} " * rng.randint(1, 5), rng.randint(1, 20)
            status, answer = service.ask("POST", f"/sessions/{names[number]}/turns", {"text": text, "max_new_tokens": count})
            expected, session = answer_alone(model, session, text, count)
            assert (status, answer["text"]) == (200, expected)
        return True

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(talk, range(12)))
    assert sum(batches) == 48 and max(batches) > 1


def test_answers_are_drawn_as_asked(service):
    name = service.create()
    drawn = {"text": "x", "temperature": 1.5, "top_k": 50, "top_p": 0.9}
    answers = set()
    for _ in range(4):
        _, twin = service.ask("POST", f"/sessions/{name}/fork")
        answers.add(service.ask("POST", f"/sessions/{twin['id']}/turns", drawn)[1]["text"])
    assert len(answers) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        "..%2fx",
        "%2e%2e",
        "%2Fetc%2Fpasswd",
        "..",
        "x",
        "A" * 32,
        "a" * 31,
        "%C3%A9" * 32,
        "a" * 32,
        "%00" * 32,
        "a" * 32 + "%0a",
    ],
)
def test_ids_are_checked(service, wrong):
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork"), ("POST", "/turns")):
        status, answer = service.ask(method, f"/sessions/{wrong}{path}", {"text": "x"} if path == "/turns" else None)
        assert status in (404, 405) and answer["error"]["rule"], (method, path)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body.text"),
        ({"text": 5}, "body.text"),
        ({"text": "x", "max_new_tokens": 21}, "body.max_new_tokens"),
        ({"text": "x", "max_new_tokens": 0}, "body.max_new_tokens"),
        ({"text": "x", "max_new_tokens": "5"}, "body.max_new_tokens"),
        ({"text": "x", "temperature": -1}, "body.temperature"),
        ({"text": "x", "temperature": 1e-300}, "body.temperature"),
        ({"text": "x", "temperature": float("nan")}, "body.temperature"),
        ({"text": "x", "temperature": float("inf")}, "body.temperature"),
        ({"text": "x", "top_p": 0}, "body.top_p"),
        ({"text": "x", "top_k": -1}, "body.top_k"),
        ({"text": "x", "top_k": 10**30}, "body.top_k"),
        ({"text": "x", "beams": 3}, "body.beams"),
        ({"text": "\ud800"}, "body.text"),
        ([1], "body"),
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[" * 1900, "body"),
        (b"", "body"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_bodies_are_refused_by_field(service, body, field):
    name = service.create()
    status, answer = service.ask("POST", f"/sessions/{name}/turns", body)
    assert status in (400, 422), answer
    assert answer["error"]["field"].startswith(field) or status == 400
    assert service.ask("GET", f"/sessions/{name}")[1]["turns"] == 0
    assert service.ask("POST", f"/sessions/{name}/turns", {"text": "x"})[0] == 200


def test_long_bodies_are_refused_however_they_are_sent(service):
    name = service.create()
    path = f"/sessions/{name}/turns"
    most = {"text": "x" * (2000 - len('{"text": ""}'))}
    assert service.ask("POST", path, most)[0] == 200
    longer = json.dumps({"text": most["text"] + "x"}).encode()
    assert service.ask("POST", path, longer)[0] == 413
    chunks = [longer[:700], longer[700:1400], longer[1400:]]
    chunked = {"headers": {"Transfer-Encoding": "chunked"}, "encode_chunked": True}
    assert service.ask("POST", path, iter(chunks), **chunked)[0] == 413
    assert service.ask("POST", path, iter([b'{"text":', b' "x"}']), **chunked)[0] == 200
    # One that never ends is not waited for.
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as endless:
        endless.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(5):
            endless.sendall(b"1f4\r\n" + b"x" * 500 + b"\r\n")
        assert endless.recv(100).startswith(b"HTTP/1.1 413")
    assert service.ask("GET", f"/sessions/{name}")[1]["turns"] == 2


def test_a_body_that_is_cut_off_is_not_carried_out(service):
    """31 of 500 bytes that happen to be whole JSON, and then nothing more."""
    name = service.create()
    head = f"POST /sessions/{name}/turns HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as cut:
        cut.sendall(f'{head}Content-Length: 500\r\n\r\n{{"text": "Who is there, at all?"}}'.encode())
    time.sleep(0.5)
    assert service.ask("POST", f"/sessions/{name}/turns", {"text": "Now."})[1]["session"]["turns"] == 1


def test_pages_of_other_sites_are_refused(service):
    status, answer = service.ask("POST", "/sessions", headers={"Origin": "http://elsewhere.example"})
    assert status == 403 and answer["error"]["field"] == "origin"


def test_a_damaged_session_is_told_without_its_path(service, capfd, tmp_path):
    name = service.create()
    (tmp_path / name / "0" / "cache.safetensors").write_bytes(b"nothing")
    status, answer = service.ask("POST", f"/sessions/{name}/turns", {"text": "Now."})
    assert status == 500 and "cannot be read" in answer["error"]["rule"]
    assert name not in "".join(capfd.readouterr())


def test_limits_are_refused_with_their_status(model, prefix, tmp_path, monkeypatch):
    started, go_on = threading.Event(), threading.Event()

    def slow(*args, **options):
        started.set()
        assert go_on.wait(30)
        return generate(*args, **options)

    limits = {"body_seconds": 0.3, "sweep_seconds": 0.05}
    with Service(model, prefix, tmp_path, limits, max_sessions=2, idle_seconds=1.0) as service:
        monkeypatch.setattr(sys.modules["chat_service"], "generate", slow)
        first, second = service.create(), service.create()
        status, full = service.ask("POST", "/sessions")
        assert status == 429 and "max_sessions=2" in full["error"]["rule"]
        assert service.ask("POST", f"/sessions/{first}/fork")[0] == 429
        with ThreadPoolExecutor(1) as pool:
            turn = pool.submit(service.ask, "POST", f"/sessions/{first}/turns", {"text": "x"})
            assert started.wait(30)
            for method, path in (("POST", "/turns"), ("POST", "/fork"), ("DELETE", "")):
                assert service.ask(method, f"/sessions/{first}{path}", {"text": "y"})[0] == 409
            go_on.set()
            assert turn.result()[0] == 200
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as stalled:
            stalled.sendall(b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert stalled.recv(100).startswith(b"HTTP/1.1 408")
        time.sleep(1.3)
        assert len(service.store) == 0  # swept, with nobody asking
        assert service.ask("GET", f"/sessions/{second}")[0] == 410
        assert service.ask("GET", "/sessions/other/path")[0] == 404
        assert service.ask("GET", "/sessions")[0] == 405
        assert service.ask("POST", "/sessions", headers={"Host": "elsewhere.example"})[0] == 400


def test_a_session_that_grows_too_large(prefix, tmp_path):
    plain = tiny_model(vocab_size=259, memory_type="none", dtype=torch.float32)
    with Service(plain, Session(XLCache(plain.config)), tmp_path, max_bytes=40_000) as service:
        name = service.create()
        assert service.ask("POST", f"/sessions/{name}/turns", {"text": "x" * 5, "max_new_tokens": 1})[0] == 200
        status, refused = service.ask("POST", f"/sessions/{name}/turns", {"text": "x" * 90})
        assert status == 413 and "max_bytes=40,000" in refused["error"]["rule"]
        assert service.ask("GET", f"/sessions/{name}")[1]["turns"] == 1


def test_a_failure_of_the_model_is_told_and_harms_nothing(service, monkeypatch):
    example = sys.modules["chat_service"]
    name = service.create()

    def fail(*args, **options):
        raise RuntimeError("out of memory in a secret place")

    with monkeypatch.context() as patched:
        patched.setattr(example, "generate", fail)
        status, answer = service.ask("POST", f"/sessions/{name}/turns", {"text": "x"})
        assert status == 500 and "secret" not in answer
    assert service.ask("POST", f"/sessions/{name}/turns", {"text": "x"})[0] == 200


def start_server(model_folder, folder, *options):
    """The example as a program, ready to be asked; returns the process and its port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, str(EXAMPLE), str(model_folder), "--sessions", str(folder), "--port", str(port), *FORMAT, *options]
    process = subprocess.Popen(run, env=environment, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        assert process.poll() is None, process.stderr.read()
        try:
            ask(port, "GET", "/sessions/x")
        except OSError:
            time.sleep(0.1)
        else:
            return process, port
    raise AssertionError("the service did not start within a minute")


def test_a_killed_server_loses_at_most_the_turn_in_flight(model, prefix, tmp_path):
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "system.txt").write_text(SYSTEM)
    rng = random.Random(7)
    names, session, done, turns = [], {}, {}, 0
    for _ in range(4):
        process, port = start_server(tmp_path / "model", tmp_path / "store", "--system", str(tmp_path / "system.txt"), "--log")
        while len(names) < 3:
            names.append(ask(port, "POST", "/sessions")[1]["id"])
            session[names[-1]], done[names[-1]] = prefix, 0
        for name in names:
            # What is kept: every turn that was answered, and perhaps the one in flight.
            kept = ask(port, "GET", f"/sessions/{name}")[1]["turns"]
            assert kept in (done[name], done[name] + 1)
            if kept > done[name]:
                _, session[name] = answer_alone(model, session[name], f"turn {done[name]}", 5)
                done[name] = kept
        more = rng.randint(1, 5)
        try:
            while True:
                if not more:  # so many turns, and the next one is never finished, or just
                    threading.Timer(rng.uniform(0.0, 0.1), process.send_signal, [signal.SIGKILL]).start()
                more -= 1
                name = rng.choice(names)
                body = {"text": f"turn {done[name]}", "max_new_tokens": 5}
                status, answer = ask(port, "POST", f"/sessions/{name}/turns", body)
                expected, session[name] = answer_alone(model, session[name], body["text"], 5)
                assert (status, answer["text"]) == (200, expected)
                done[name] += 1
                turns += 1
        except (OSError, http.client.HTTPException):
            pass
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert turns >= 4
    process, port = start_server(tmp_path / "model", tmp_path / "store", "--log")
    try:
        for name in names:
            assert ask(port, "GET", f"/sessions/{name}")[0] == 200
        # A second one may not open the same folder.
        second = subprocess.run(
            [sys.executable, str(EXAMPLE), str(tmp_path / "model"), "--sessions", str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert second.returncode != 0 and "another SessionStore" in second.stderr
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)
