"""Conversations on fixed memory: one state each, many of them run as a batch, and a folder that keeps them.

`Session` is what a model remembers of one conversation. `read`, `generate` and `score` take several of them, with texts of
different length, in one batch, and return new ones. `SessionStore` keeps sessions on disk between turns. Nothing here knows of
tokenizers or servers.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout
from torch.nn import functional
from transformers import StoppingCriteria, StoppingCriteriaList

from .cache_xl import XLCache
from .configuration_xl import XLConfig
from .generation_xl import log_probs
from .memories import MEMORY_MECHANISMS
from .text import write_json

ID = re.compile(r"[0-9a-f]{32}")
SETTINGS_FILE = "store.json"
SESSION_FILE = "session.json"
TEXT_FILE = "text.jsonl"
FORMAT_VERSION = 1
MAX_REMEMBERED = 10_000  # ids of sessions that are gone
# What may be asked of `generate` for sessions: what looks at the next token's logits, or at which tokens there were. Others
# count from the prompt or compare runs of tokens, and would see the pads of a batch, and a new prompt where a row leaves it.
OPTIONS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "suppress_tokens", "renormalize_logits", "remove_invalid_values"),
)
REFUSED_OPTIONS = (
    *("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("stop_strings", "sequence_bias", "bad_words_ids", "guidance_scale"),
)


@dataclass(frozen=True)
class Session:
    """What a model remembers of one conversation. A value: what reads or writes more returns a new one, so that the same
    session can be gone on from as often as one likes.

    cache: of one text, or not used yet. pending: ids of the text that the cache has not read; after a turn the one token that
    came last.
    """

    cache: XLCache
    pending: tuple[int, ...] = ()

    def __post_init__(self):
        if self.cache.batch_size not in (-1, 1):
            raise ValueError(
                f"cache holds {self.cache.batch_size} rows; a session is one conversation. Make a session of each cache in "
                "cache.split()."
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far."""
        return int(self.cache.lengths.sum()) + len(self.pending)


# Several sessions as a batch.


@torch.no_grad()
def read(model, sessions: Sequence[Session], texts: Sequence[Sequence[int]]) -> list[Session]:
    """The sessions after `texts`, token ids of one text for each: a system prompt or a document to go on from many times."""
    cache, ids, mask = _join(model, sessions, texts)
    if ids.shape[1] > 1:
        model(ids[:, :-1], attention_mask=mask[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
    return _split(cache, ids)


@torch.no_grad()
def score(model, sessions: Sequence[Session], texts: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, Session]]:
    """For each session the log-probabilities of its text's tokens given all before, (len(text),) in nats, and the session
    after it. A token has nan if nothing is before it, or if the session has nothing pending that it could be scored by."""
    cache, ids, mask = _join(model, sessions, texts)
    missing = torch.full_like(ids[:, :1], torch.nan, dtype=torch.get_default_dtype())
    found = torch.cat([missing, *log_probs(model, ids, cache, mask)], 1)  # (B, T), of each column
    first = mask.argmax(1, keepdim=True)  # the oldest column of each row, before which there are pads or nothing
    found = found.scatter(1, first, torch.nan)
    rows = zip(found, texts, _split(cache, ids), strict=True)
    return [(row[len(row) - len(text) :], session) for row, text, session in rows]


@torch.no_grad()
def generate(
    model,
    sessions: Sequence[Session],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    end_ids: Sequence[int] | None = None,
    **options,
) -> list[tuple[list[int], Session]]:
    """One turn of each session: the ids that follow its prompt, and the session after them.

    A text ends with the first of `end_ids` (None: the end tokens of model.generation_config), which is returned, or after
    max_new_tokens, one number for all or one for each. It leaves the batch there, so that its memory holds what it would hold
    alone. options: those of `generate` in `OPTIONS`, such as do_sample, temperature and top_k; they see the prompt and the new
    ids of this turn. Draws come from torch's generator in the order of the batch. Raises ValueError for other options, also
    where model.generation_config sets one.
    """
    _check_options(model, options)
    limits = [max_new_tokens] * len(sessions) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(sessions) or not all(isinstance(limit, int) and limit >= 1 for limit in limits):
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be an integer >= 1, or one for each of the {len(sessions)}.")
    if end_ids is None:
        found = model.generation_config.eos_token_id
        end_ids = [] if found is None else [found] if isinstance(found, int) else found
    cache, ids, mask = _join(model, sessions, prompts)
    ended = _SomeRowEnded(ids.shape[1], limits, end_ids, ids.device)
    turns: dict[int, tuple[list[int], Session]] = {}
    rows = torch.arange(len(sessions))  # those still in the batch
    while len(rows):
        ids = model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=int(ended.limits.max()) + ended.start - ids.shape[1],
            stopping_criteria=StoppingCriteriaList([ended]),
            eos_token_id=list(end_ids) or None,
            pad_token_id=0,
            num_beams=1,
            num_return_sequences=1,
            **options,
        )
        # What of them still goes on is fed as the whole text of the turn, of which the cache has seen all but the last column.
        for row in ended.rows.nonzero()[:, 0].tolist():
            (session,) = _split(cache.select([row]), ids[[row]])
            turns[int(rows[row])] = (ids[row, ended.start :].tolist(), session)
        stay = ~ended.rows
        rows, ids, ended.limits = rows[stay.cpu()], ids[stay], ended.limits[stay]
        mask = functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)[stay]
        cache = cache.select(stay) if len(rows) else cache
    return [turns[row] for row in range(len(sessions))]


def _check_options(model, options: dict[str, Any]) -> None:
    found = {name: value for name, value in options.items() if name not in OPTIONS}
    configured = ((name, getattr(model.generation_config, name, None)) for name in REFUSED_OPTIONS)
    found |= {f"model.generation_config.{name}": value for name, value in configured if value and value != 1}  # 1: no penalty
    for name, value in found.items():
        raise ValueError(
            f"{name}={value!r} cannot be kept to where sessions are padded and leave a batch one by one; allowed are "
            f"{', '.join(OPTIONS)}. Leave it out, or call model.generate with the cache of one session."
        )


class _SomeRowEnded(StoppingCriteria):
    """Stops the batch as soon as a row has ended, so that no row is fed what does not belong to its text."""

    def __init__(self, start: int, limits: Sequence[int], end_ids: Sequence[int], device: torch.device):
        self.start = start
        self.limits = torch.tensor(limits, device=device)
        self.end_ids = torch.tensor(list(end_ids), dtype=torch.long, device=device)
        self.rows = torch.zeros(len(limits), dtype=torch.bool, device=device)

    def __call__(self, input_ids, scores, **kwargs):
        self.rows = (self.limits <= input_ids.shape[1] - self.start) | torch.isin(input_ids[:, -1], self.end_ids)
        return self.rows.any().expand(len(self.rows)).clone()


def _join(model, sessions: Sequence[Session], texts: Sequence[Sequence[int]]) -> tuple[XLCache, torch.Tensor, torch.Tensor]:
    """One cache of all, and what it has to read: ids (B, T), padded on the left, and their mask."""
    if not sessions or len(sessions) != len(texts):
        raise ValueError(f"{len(sessions)} sessions and {len(texts)} texts: there must be one text for each, and one at least.")
    rows = [[*session.pending, *text] for session, text in zip(sessions, texts, strict=True)]
    if not all(rows):
        raise ValueError(
            f"The session at {[bool(row) for row in rows].index(False)} has no token still to be read and its text is empty: "
            "give it a token at least."
        )
    wanted = _settings(sessions[0].cache)
    for session in sessions[1:]:
        for name, value in _settings(session.cache).items():
            if value != wanted[name]:
                raise ValueError(
                    f"The sessions have {name}={wanted[name]!r} and {value!r}; those of a batch must agree: make them from one "
                    "start."
                )
    width = max(map(len, rows))
    # Pads are never read. They repeat a token of the row, so that a penalty of repetition finds nothing but the text.
    ids = torch.tensor([row[:1] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    if int(ids.min()) < 0 or int(ids.max()) >= model.config.vocab_size:  # the last ones would only be met in the next turn
        raise ValueError(
            f"The texts hold ids from {int(ids.min())} to {int(ids.max())}; they must lie in 0 ... vocab_size - 1 = "
            f"{model.config.vocab_size - 1}. Does the tokenizer belong to this model?"
        )
    cache = XLCache.cat([_ready(session.cache, model.device) for session in sessions])
    # generate asks for a mask over all columns ever seen. A conversation has no end, so each turn counts its own.
    cache.columns = 0
    return cache, ids, mask


def _ready(cache: XLCache, device: torch.device) -> XLCache:
    """The same state on that device; one that has not been used yet gets its one row."""
    copied = cache.working_copy()
    copied.start(1)
    held = next((tensor.device for state in copied.states if state is not None for tensor in state.tensors()), device)
    return copied if held == device else copied.to(device)


def _split(cache: XLCache, ids: torch.Tensor) -> list[Session]:
    """A session for each row; of ids (B, T) the cache has read all but the last column."""
    sessions = []
    for part, last in zip(cache.split(), ids[:, -1].tolist(), strict=True):
        part.columns = int(part.lengths)  # those of the text alone, without the pads it had in batches
        sessions.append(Session(part, (last,)))
    return sessions


def weights_digest(model) -> str:
    """A name for the weights of a model and the settings they work with, which differs where any does: hexadecimal digits."""
    names = [name for name in XLConfig.__annotations__ if name != "format_version" and not name.endswith("_token_id")]
    digest = hashlib.sha256(json.dumps({name: repr(getattr(model.config, name)) for name in names}).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# The folder.


class SessionError(ValueError):
    """A session cannot be had, or not be kept, for a reason that whoever asks can act on."""


class UnknownSessionError(SessionError):
    """There is no session with this id, and none was removed lately."""


class GoneSessionError(SessionError):
    """The session was deleted, or removed because it was idle."""


class BusySessionError(SessionError):
    """Another turn of the session is in flight."""


class StoreFullError(SessionError):
    """The store holds as many sessions as it may."""


class SessionTooLargeError(SessionError):
    """The session takes more bytes than it may."""


@dataclass(frozen=True)
class SessionInfo:
    """What is known of a kept session without loading it.

    turns: saves since it was created. num_tokens: of the text so far. nbytes: on disk, without the text. text_bytes: of the
    text that is kept. saved_at: seconds since 1970.
    """

    id: str
    turns: int
    num_tokens: int
    nbytes: int
    text_bytes: int
    saved_at: float


@dataclass
class _Entry:
    info: SessionInfo | None = None  # None until the session has been written for the first time
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class HeldSession:
    """A session in the hands of one turn, from `SessionStore.hold`."""

    store: "SessionStore"
    info: SessionInfo
    session: Session
    is_held: bool = True

    def save(self, session: Session, *entries: Any) -> SessionInfo:
        """Keeps the session as it is after a turn, with `entries` (anything json writes) added to its text.

        Raises SessionTooLargeError where it takes too many bytes. The last saved turn stays whole until the new one is.
        """
        if not self.is_held:
            raise ValueError("The session is no longer held: save it inside the `with store.hold(...)` block.")
        self.info = self.store._save(self.info, session, entries)
        self.session = session
        return self.info


class SessionStore:
    """Sessions in a folder, for one process at a time and any number of its threads.

    folder: made where it is missing; it belongs to one store. start: what a new session begins as: `Session(XLCache(config))`,
    or one that has read a prefix; mem_len, dtype and form of its cache hold for all sessions.

    max_sessions: `create` and `fork` refuse more; none is removed to make room but idle ones. max_bytes: of one session on
    disk, its text apart; a memory that grows with the text (memory_type `none` without a window) must have it. idle_seconds: a
    session that was not saved for so long is removed by the next call that meets it, or by `expire` (None: never). weights: a
    name for the model's weights, such as `weights_digest` gives; a folder filled under another name is refused.

    A session is a folder named by its id. A turn is written beside the last one and then renamed, all of it synced to the disk
    before, so that a process killed at any moment leaves the last saved turn.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        start: Session,
        *,
        max_sessions: int = 1000,
        max_bytes: int | None = None,
        idle_seconds: float | None = None,
        weights: str | None = None,
    ):
        for name, value in {"max_sessions": max_sessions, "max_bytes": max_bytes, "idle_seconds": idle_seconds}.items():
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ValueError(f"{name}={value!r} of SessionStore must be a number above 0.")
        config, mem_len = start.cache.config, start.cache.mem_len
        kept = {name: MEMORY_MECHANISMS[name].kept_rows(config, mem_len) for name in config.layer_memory_types}
        if max_bytes is None and math.inf in kept.values():
            raise ValueError(
                "max_bytes=None of SessionStore: memory_type='none' without attention_window keeps every token, so a session "
                "grows without end. Give max_bytes, or a model with a bounded memory."
            )
        self.folder = Path(folder)
        self.start = start
        self.max_sessions = max_sessions
        self.max_bytes = max_bytes
        self.idle_seconds = idle_seconds
        self._guard = threading.RLock()  # of what follows, and of names in the folder
        self._entries: dict[str, _Entry] = {}
        self._gone: dict[str, str] = {}  # id: why, the newest last
        self._check_folder()
        self._lock = FileLock(self.folder / ".lock", timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"{self.folder}: another SessionStore has this folder open, in this process or in another one; close it first, "
                "or give each a folder of its own."
            ) from None
        try:
            self._check_settings(weights)
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets the folder go; what is saved stays."""
        self._lock.release()

    def __enter__(self) -> "SessionStore":
        return self

    def __exit__(self, *args) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._entries)

    # One session.

    def create(self, session: Session | None = None, *entries: Any) -> str:
        """Keeps a new session, `start` or the one given, and returns its id. Raises StoreFullError, SessionTooLargeError."""
        return self._add(self.start if session is None else session, entries)

    @contextlib.contextmanager
    def hold(self, session_id: str) -> Iterator[HeldSession]:
        """Loads a session for one turn. While it is held, others get BusySessionError; what is not saved is dropped.

        >>> with store.hold(session_id) as held:
        ...     [(ids, session)] = generate(model, [held.session], [prompt], 50)
        ...     held.save(session)
        """
        with self._held(session_id) as info:
            path = self.folder / info.id / str(info.turns)
            try:
                described = _read_json(path / SESSION_FILE)
                cache = XLCache.from_pretrained(path, self.start.cache.config)
            except FileNotFoundError:
                raise _taken_out(session_id) from None
            held = HeldSession(self, info, Session(cache, tuple(described["pending"])))
            try:
                yield held
            finally:
                held.is_held = False

    def fork(self, session_id: str) -> str:
        """A second session with the same past, text included; returns its id."""
        with self.hold(session_id) as held:
            return self._add(held.session, copied=held.info)

    def delete(self, session_id: str) -> None:
        with self._held(session_id):
            self._remove(session_id, "was deleted")

    def info(self, session_id: str) -> SessionInfo:
        """What is known of a session, also while a turn is in flight. It does not keep the session from being idle."""
        return self._find(session_id)[1]

    def text(self, session_id: str) -> Iterator[Any]:
        """The entries that were saved with the session's turns, oldest first."""
        info = self.info(session_id)
        if info.text_bytes:
            try:
                file = (self.folder / session_id / TEXT_FILE).open("rb")
            except FileNotFoundError:
                raise _taken_out(session_id) from None
            with file:
                while file.tell() < info.text_bytes:  # what lies behind belongs to a turn that was never finished
                    yield json.loads(file.readline())

    # All of them.

    def infos(self) -> list[SessionInfo]:
        """What is known of each session, the one that was saved longest ago first."""
        with self._guard:
            found = [entry.info for entry in self._entries.values() if entry.info is not None]
        return sorted(found, key=lambda info: info.saved_at)

    def expire(self) -> int:
        """Removes the sessions that are idle, and returns their number."""
        self._check_open()
        with self._guard:
            before = len(self._entries)
            for name, entry in [*self._entries.items()]:
                self._remove_if_idle(name, entry)
            return before - len(self._entries)

    # Within.

    def _check_open(self) -> None:
        if not self._lock.is_locked:
            raise ValueError(f"{self.folder}: this SessionStore is closed; open the folder again.")

    def _remove_if_idle(self, session_id: str, entry: _Entry) -> None:
        info = entry.info
        if self.idle_seconds is None or info is None or time.time() - info.saved_at <= self.idle_seconds:
            return
        if entry.lock.acquire(blocking=False):  # a turn in flight is no idleness
            try:
                self._remove(session_id, f"was idle for more than {self.idle_seconds:g} seconds")
            finally:
                entry.lock.release()

    def _find(self, session_id: str) -> tuple[_Entry, SessionInfo]:
        if not isinstance(session_id, str) or not ID.fullmatch(session_id):
            raise UnknownSessionError(f"session id {str(session_id)[:40]!r}: an id is 32 hexadecimal digits in lower case.")
        self._check_open()
        with self._guard:
            if session_id in self._entries:
                self._remove_if_idle(session_id, self._entries[session_id])
            entry = self._entries.get(session_id)
            if entry is None or entry.info is None:
                if session_id in self._gone:
                    raise GoneSessionError(f"session {session_id} {self._gone[session_id]}; begin a new one.")
                raise UnknownSessionError(f"session {session_id}: there is none with this id; begin a new one.")
            return entry, entry.info

    @contextlib.contextmanager
    def _held(self, session_id: str) -> Iterator[SessionInfo]:
        with self._guard:
            entry, _ = self._find(session_id)
            if not entry.lock.acquire(blocking=False):
                raise BusySessionError(f"session {session_id}: another turn is in flight; wait for its end.")
        try:
            yield cast(SessionInfo, entry.info)
        finally:
            entry.lock.release()

    def _add(self, session: Session, entries: Sequence[Any] = (), copied: SessionInfo | None = None) -> str:
        self._check_open()
        with self._guard:
            self.expire()
            if len(self._entries) >= self.max_sessions:
                raise StoreFullError(f"max_sessions={self.max_sessions} sessions are kept already; delete one first.")
            session_id = secrets.token_hex(16)
            entry = self._entries[session_id] = _Entry()
        path = self.folder / f".new-{session_id}"
        try:
            path.mkdir()
            text_bytes = 0
            if copied is not None and copied.text_bytes:
                shutil.copyfile(self.folder / copied.id / TEXT_FILE, path / TEXT_FILE)
                text_bytes = copied.text_bytes
                _sync(path / TEXT_FILE)
            text_bytes = _append(path / TEXT_FILE, text_bytes, entries)
            info = self._write(path, session_id, 0, session, text_bytes)
            _sync(path)
            path.rename(self.folder / session_id)
            _sync(self.folder)
        except BaseException:
            with self._guard:
                del self._entries[session_id]
            for left in (path, self.folder / session_id):
                shutil.rmtree(left, ignore_errors=True)
            raise
        entry.info = info
        return session_id

    def _save(self, info: SessionInfo, session: Session, entries: Sequence[Any]) -> SessionInfo:
        self._check_open()
        path = self.folder / info.id
        # One that was interrupted between its rename and its end: for whoever holds the session it was not saved.
        shutil.rmtree(path / str(info.turns + 1), ignore_errors=True)
        text_bytes = _append(path / TEXT_FILE, info.text_bytes, entries)
        saved = self._write(path, info.id, info.turns + 1, session, text_bytes)
        self._entries[info.id].info = saved
        _sync(path)
        shutil.rmtree(path / str(info.turns), ignore_errors=True)  # what is left of it goes when the folder is opened
        return saved

    def _write(self, path: Path, session_id: str, turn: int, session: Session, text_bytes: int) -> SessionInfo:
        """Writes the folder of a turn under its name."""
        wanted, found = _settings(self.start.cache), _settings(session.cache)
        for name in wanted:
            if wanted[name] != found[name]:
                raise ValueError(
                    f"The session has {name}={found[name]!r} and those of this store {wanted[name]!r}; go on from the store's "
                    "start, or from one of its sessions."
                )
        temporary = path / ".new"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            session.cache.save_pretrained(temporary)
            info = SessionInfo(session_id, turn, session.num_tokens, 0, text_bytes, time.time())
            described = {name: getattr(info, name) for name in ("num_tokens", "text_bytes", "saved_at")}
            write_json(temporary / SESSION_FILE, {"pending": list(session.pending), **described})
            nbytes = _size(temporary)
            if self.max_bytes is not None and nbytes > self.max_bytes:
                raise SessionTooLargeError(
                    f"session {session_id} takes {nbytes:,} bytes and max_bytes={self.max_bytes:,} are allowed; begin a new "
                    "one, or use a model with a smaller memory."
                )
            for file in temporary.iterdir():
                _sync(file)
            _sync(temporary)
            temporary.rename(path / str(turn))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return SessionInfo(**{**asdict(info), "nbytes": nbytes})

    def _remove(self, session_id: str, why: str) -> None:
        """Removes a session whose lock is held."""
        hidden = self.folder / f".gone-{session_id}"  # killed meanwhile, it is whole or gone
        with self._guard:
            with contextlib.suppress(FileNotFoundError):  # somebody has taken it out of the folder
                (self.folder / session_id).rename(hidden)
            del self._entries[session_id]
            self._gone[session_id] = why
            if len(self._gone) > MAX_REMEMBERED:
                del self._gone[next(iter(self._gone))]
        shutil.rmtree(hidden, ignore_errors=True)  # what is left of it goes when the folder is opened

    def _check_folder(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder}: is a file; give a folder for the sessions.")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / SETTINGS_FILE).is_file() and any(path.name[0] != "." for path in self.folder.iterdir()):
            raise ValueError(f"{self.folder}: is not empty and holds no sessions; give another folder.")

    def _check_settings(self, weights: str | None) -> None:
        """Compares what the sessions were made with to what they would be used with now."""
        settings = {"format_version": FORMAT_VERSION, "weights": weights, **_settings(self.start.cache)}
        settings = json.loads(json.dumps(settings))
        path = self.folder / SETTINGS_FILE
        if not path.is_file():
            write_json(path, settings)
            _sync(path)
            _sync(self.folder)
        saved = _read_json(path)
        for name in {**settings, **saved}:
            if settings.get(name) != saved.get(name):
                raise ValueError(
                    f"{self.folder}: its sessions were made with {name}={saved.get(name)!r} and cannot go on with "
                    f"{settings.get(name)!r}; use the former model and settings, or another folder."
                )

    def _open(self) -> None:
        """Finds the sessions, and removes what a killed process has left half done."""
        for path in self.folder.iterdir():
            kind, _, name = path.name.rpartition("-")
            if kind in (".new", ".gone") and ID.fullmatch(name):
                shutil.rmtree(path)
            elif ID.fullmatch(path.name) and path.is_dir():
                turns = sorted(int(turn.name) for turn in path.iterdir() if turn.name.isdecimal())
                try:
                    described = _read_json(path / str(turns[-1]) / SESSION_FILE)
                    kinds = {"num_tokens": int, "text_bytes": int, "saved_at": float}
                    known = {name: kind(described[name]) for name, kind in kinds.items()}
                except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                    warnings.warn(f"{path}: holds no whole session ({error!r}); it is left as it is.", stacklevel=3)
                    continue
                for old in (".new", *map(str, turns[:-1])):
                    shutil.rmtree(path / old, ignore_errors=True)
                nbytes = _size(path / str(turns[-1]))
                self._entries[path.name] = _Entry(SessionInfo(id=path.name, turns=turns[-1], nbytes=nbytes, **known))


def _taken_out(session_id: str) -> GoneSessionError:
    return GoneSessionError(f"session {session_id}: its files were taken out of the folder; begin a new one.")


def _settings(cache: XLCache) -> dict[str, Any]:
    """What all sessions of a store have in common."""
    dtype = None if cache.dtype is None else str(cache.dtype)
    form = cache.form or "key_value"  # what a first call without gradient makes of None
    return {**cache.config.memory_fingerprint(), "mem_len": cache.mem_len, "dtype": dtype, "form": form}


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _append(path: Path, begin: int, entries: Sequence[Any]) -> int:
    """Writes entries, a line each, at that byte, behind which lies at most an unfinished turn's; returns where they end."""
    if not entries:
        return begin
    lines = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    with path.open("r+b" if path.exists() else "xb") as file:
        file.truncate(begin)
        file.seek(begin)
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    return begin + len(lines)


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
