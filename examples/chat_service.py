"""A chat over HTTP: sessions on disk, each of the same size after any number of turns, and a system prompt read once.

    pip install -e ".[serve]"
    python examples/chat_service.py demo_output/model --sessions chats --end $'\\n' --turn $'{text}\\n'

    curl -X POST 127.0.0.1:8000/sessions
    curl -X POST 127.0.0.1:8000/sessions/ID/turns -H 'Content-Type: application/json' -d '{"text": "Who is there?"}'

It listens on this machine only and asks nobody who he is: whoever knows an id, 128 random bits, may go on with that session.
Turns that wait at the same time and are drawn in the same way run as one batch; docs/sessions.md says what follows from that.
"""

import argparse
import asyncio
import contextlib
import queue
import sys
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import uvicorn
from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_xl import XLCache
from modeling_xl import sessions as store_errors
from modeling_xl.sessions import Session, SessionError, SessionStore, generate, read, weights_digest
from modeling_xl.text import encode

STATUS = {
    store_errors.UnknownSessionError: 404,
    store_errors.BusySessionError: 409,
    store_errors.GoneSessionError: 410,
    store_errors.SessionTooLargeError: 413,
    store_errors.StoreFullError: 429,
}


@dataclass
class Limits:
    max_new_tokens: int = 256  # of one turn
    max_body_bytes: int = 64 * 1024
    body_seconds: float = 10.0  # for a body to arrive whole
    max_batch: int = 16
    sweep_seconds: float = 60.0  # between two looks for idle sessions
    max_waiting: int = 200  # requests at a time; more are refused by the server


def refuse(status: int, name: str, rule: str) -> JSONResponse:
    return JSONResponse({"error": {"field": name, "rule": rule}}, status)


class BodyLimit:
    """Reads the body before anything else does, as far as it may go, whether or not its length was announced."""

    def __init__(self, app, limits: Limits):
        self.app = app
        self.limits = limits

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if b"origin" in dict(scope["headers"]):
            await refuse(403, "origin", "pages of other sites may not call; ask from a program")(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(scope, receive), self.limits.body_seconds)
        except ClientDisconnect:
            return
        except asyncio.TimeoutError:
            await refuse(408, "body", f"must arrive within {self.limits.body_seconds:g} seconds")(scope, receive, send)
            return
        if body is None:
            rule = f"may have {self.limits.max_body_bytes} bytes; send the text in several turns"
            await refuse(413, "body", rule)(scope, receive, send)
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay():
            return next(messages, None) or await receive()

        await self.app(scope, replay, send)

    async def _read(self, scope, receive) -> bytes | None:
        """The body, or None where it is too long."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if int(announced) > self.limits.max_body_bytes:
            return None
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect  # what has come is not what was sent
            body += message.get("body", b"")
            if len(body) > self.limits.max_body_bytes:
                return None
            more = message.get("more_body", False)
        return bytes(body)


@dataclass(eq=False)
class Waiting:
    """A turn that waits for the model."""

    session: Session
    ids: list[int]
    max_new_tokens: int
    sampling: dict
    result: Future = field(default_factory=Future)


class Worker:
    """The one thread that runs the model. It takes what waits, as long as it is drawn in the same way, as one batch."""

    def __init__(self, model, end_ids: list[int], max_batch: int):
        self.model = model
        self.end_ids = end_ids
        self.max_batch = max_batch
        self.queue: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="model", daemon=True)

    def run(self, waiting: Waiting) -> tuple[list[int], Session]:
        self.queue.put(waiting)
        return waiting.result.result()

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def _work(self) -> None:
        waiting: list[Waiting | None] = []
        while True:
            if not waiting:
                waiting.append(self.queue.get())
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self.queue.get_nowait())
            first = waiting[0]
            if first is None:
                return
            batch = [turn for turn in waiting if turn is not None and turn.sampling == first.sampling][: self.max_batch]
            waiting = [turn for turn in waiting if turn not in batch]
            self._generate(batch)

    def _generate(self, batch: list[Waiting]) -> None:
        try:
            turns = generate(
                self.model,
                [turn.session for turn in batch],
                [turn.ids for turn in batch],
                [turn.max_new_tokens for turn in batch],
                self.end_ids,
                **batch[0].sampling,
            )
        except Exception as error:
            for turn in batch:
                turn.result.set_exception(error)
        else:
            for turn, found in zip(batch, turns, strict=True):
                turn.result.set_result(found)


def make_app(
    model, tokenizer, store: SessionStore, limits: Limits, template: str = "{text}", ends: list[str] | None = None, log=False
) -> FastAPI:
    """The service. template: what the model reads of a turn; special tokens are recognised in it, never in a user's text.
    ends: texts of one token each that end an answer (None: the tokenizer's end token). log: whether texts are kept as well."""
    before, after = (ids_of(tokenizer, part) for part in template.split("{text}"))
    if ends is None:
        end_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    else:
        end_ids = [token for end in ends for token in ids_of(tokenizer, end)]
        if any(len(ids_of(tokenizer, end)) != 1 for end in ends):
            raise ValueError(f"--end {ends}: each must be one token of the tokenizer; choose another one.")
    worker = Worker(model, end_ids, limits.max_batch)

    class Turn(BaseModel):
        """A turn, and how its answer is drawn: the likeliest token each time with temperature 0."""

        model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        text: Annotated[str, AfterValidator(whole_text)]
        max_new_tokens: Annotated[int, Field(ge=1, le=limits.max_new_tokens)] = min(64, limits.max_new_tokens)
        # Below that the logits are divided by next to nothing.
        temperature: Annotated[float, Field(ge=0.01, le=10)] | Annotated[float, Field(ge=0, le=0)] = 0.0
        top_k: Annotated[int, Field(ge=0, le=model.config.vocab_size)] = 0
        top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

        def sampling(self) -> dict:
            if not self.temperature:
                return {"do_sample": False}
            return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async def sweep():
            while True:
                await asyncio.sleep(limits.sweep_seconds)
                await run_in_threadpool(store.expire)

        to_thread.current_default_thread_limiter().total_tokens = 2 * limits.max_waiting  # a turn that waits holds a thread
        worker.thread.start()
        sweeper = asyncio.create_task(sweep())
        yield
        sweeper.cancel()
        await run_in_threadpool(worker.close)
        store.close()

    app = FastAPI(title="Chat on fixed memory", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, limits=limits)
    # A page of another site may not reach the service by giving its own name this machine's address.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    @app.exception_handler(SessionError)
    def on_session_error(request: Request, error: SessionError):
        return refuse(STATUS[type(error)], "session", str(error))

    @app.exception_handler(OSError)
    @app.exception_handler(ValueError)
    def on_broken_store(request: Request, error: Exception):
        # Not raised on: a traceback in the server's log would hold a path, and so an id.
        return refuse(500, "session", f"cannot be read or written ({type(error).__name__}); the last saved turn stays")

    @app.exception_handler(RequestValidationError)
    def on_invalid(request: Request, error: RequestValidationError):
        first = error.errors()[0]
        return refuse(422, ".".join(str(part) for part in first["loc"]), first["msg"])

    @app.exception_handler(HTTPException)
    def on_http_error(request: Request, error: HTTPException):
        return refuse(error.status_code, "request", error.detail)

    @app.post("/sessions", status_code=201)
    def create() -> dict:
        return asdict(store.info(store.create()))

    @app.get("/sessions/{session_id}")
    def info(session_id: str) -> dict:
        return asdict(store.info(session_id))

    @app.post("/sessions/{session_id}/fork", status_code=201)
    def fork(session_id: str) -> dict:
        return asdict(store.info(store.fork(session_id)))

    @app.delete("/sessions/{session_id}", status_code=204)
    def delete(session_id: str) -> None:
        store.delete(session_id)

    @app.post("/sessions/{session_id}/turns")
    def turn(session_id: str, turn: Turn):
        with store.hold(session_id) as held:
            ids = [*before, *encode(turn.text, tokenizer).tolist(), *after]
            if not ids and not held.session.pending:
                return refuse(422, "body.text", "is empty and there is nothing to go on from; send a text")
            found, session = worker.run(Waiting(held.session, ids, turn.max_new_tokens, turn.sampling()))
            ended = found[-1] in end_ids
            answer = tokenizer.decode(found[:-1] if ended else found, skip_special_tokens=True)
            kept = held.save(session, *([{"text": turn.text, "answer": answer}] if log else []))
        return {"text": answer, "new_tokens": len(found), "ended": ended, "session": asdict(kept)}

    return app


def whole_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character; send whole characters") from None
    return text


def ids_of(tokenizer, text: str) -> list[int]:
    """The ids of a text of whoever runs the service, in which special tokens are recognised."""
    return tokenizer(text, add_special_tokens=False).input_ids


def count(text: str) -> int:
    """An argparse type: a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number >= 1")
    return int(text)


def parse(argv: list[str]) -> argparse.Namespace:
    limits = Limits()
    parser = argparse.ArgumentParser(description="Serve a chat on 127.0.0.1.", allow_abbrev=False)
    parser.add_argument("model", help="a folder that modeling-xl train or convert wrote")
    parser.add_argument("--sessions", required=True, metavar="DIR", help="where the sessions are kept")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--system", metavar="FILE", help="a text that each session begins with, read once at the start")
    parser.add_argument("--turn", default="{text}", metavar="TEMPLATE", help="what the model reads of a turn")
    parser.add_argument("--end", action="append", metavar="TEXT", help="one token that ends an answer; may be repeated")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], help="what memory is stored in")
    parser.add_argument("--log", action="store_true", help="keep the texts too; they grow with the conversation")
    parser.add_argument("--max-sessions", type=int, default=1000)
    parser.add_argument("--max-bytes", type=int, help="of one session, without its texts")
    parser.add_argument("--idle-seconds", type=float, default=24 * 3600.0, help="a session idle for longer is removed")
    parser.add_argument("--max-new-tokens", type=count, default=limits.max_new_tokens)
    parser.add_argument("--max-body-bytes", type=count, default=limits.max_body_bytes)
    parser.add_argument("--max-batch", type=count, default=limits.max_batch)
    args = parser.parse_args(argv)
    if args.turn.count("{text}") != 1:
        parser.error(f"--turn {args.turn!r}: must hold {{text}} once, where the user's text goes")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    start = Session(XLCache(model.config, dtype=args.dtype and getattr(torch, args.dtype)))
    if args.system:
        (start,) = read(model, [start], [ids_of(tokenizer, Path(args.system).read_text(encoding="utf-8"))])
    store = SessionStore(
        args.sessions,
        start,
        max_sessions=args.max_sessions,
        max_bytes=args.max_bytes,
        idle_seconds=args.idle_seconds,
        weights=weights_digest(model),
    )
    limits = Limits(max_new_tokens=args.max_new_tokens, max_body_bytes=args.max_body_bytes, max_batch=args.max_batch)
    app = make_app(model, tokenizer, store, limits, args.turn, args.end, args.log)
    # Ids are all that protects a session, so that they do not belong into a log of requests.
    uvicorn.run(app, host="127.0.0.1", port=args.port, access_log=False, limit_concurrency=limits.max_waiting)


if __name__ == "__main__":
    main()
