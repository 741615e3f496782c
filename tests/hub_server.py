"""A Hub on this machine: as much of the protocol of huggingface.co as pushing and loading a model takes, held in memory.

Repositories of models with branches, pull requests, tokens and privacy; files travel inside the commit. Uploads can be made to
break off.
"""

import base64
import hashlib
import json
import re
import socket
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import ModelCard
from yaml import YAMLError

REPO = r"(?P<repo>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+|refs/pr/\d+)"


def blob_id(content: bytes) -> str:
    """What git calls a file of this content, and the Hub with it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Commit:
    title: str
    files: dict[str, bytes]
    parent: str = ""

    @property
    def oid(self) -> str:
        content = [self.title, self.parent, *(f"{path} {blob_id(data)}" for path, data in sorted(self.files.items()))]
        return hashlib.sha1("\n".join(content).encode()).hexdigest()


@dataclass
class Repository:
    is_private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def add(self, ref: str, commit: Commit) -> str:
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit.oid

    def find(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


class HubServer(ThreadingHTTPServer):
    """tokens: the user of each; those of `readers` may not write. Everyone's repositories are in `repositories`."""

    daemon_threads = True

    def __init__(self, tokens: dict[str, str], readers: tuple[str, ...] = ()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens = tokens
        self.readers = readers
        self.repositories: dict[str, Repository] = {}
        self.breaks_off = False  # the connection, in the middle of every commit
        self.lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def running(self):
        thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class RefusedError(Exception):
    """Ends a request. code: as the Hub names the error."""

    def __init__(self, status: int, code: str, message: str = ""):
        super().__init__(message or code)
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    """One request: a route is the method of that name, with what the pattern found as arguments."""

    server: HubServer
    protocol_version = "HTTP/1.1"
    routes: ClassVar[list[tuple[str, str, str]]] = [
        ("GET", r"/api/whoami-v2", "who_am_i"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate_card"),
        ("POST", rf"/api/models/{REPO}/preupload/{REVISION}", "ask_for_upload"),
        ("POST", rf"/api/models/{REPO}/commit/{REVISION}", "commit"),
        ("POST", rf"/api/models/{REPO}/branch/(?P<branch>.+)", "create_branch"),
        ("GET", rf"/api/models/{REPO}/refs", "list_refs"),
        ("GET", rf"/api/models/{REPO}/tree/{REVISION}", "list_files"),
        ("GET", rf"/api/models/{REPO}/revision/{REVISION}", "describe"),
        ("GET", rf"/api/models/{REPO}", "describe"),
        ("GET", rf"/{REPO}/resolve/{REVISION}/(?P<path>.+)", "download"),
    ]

    def log_message(self, *_: Any) -> None:
        """Nothing: tests look at what is there."""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.server.breaks_off and "/commit/" in self.path:
            self.rfile.read(length // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.content = self.rfile.read(length)  # whatever is answered: the next request comes by the same connection
        self.answer("POST")

    def do_GET(self) -> None:
        self.answer("GET")

    def do_HEAD(self) -> None:
        self.answer("GET")

    def answer(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        found = ((re.fullmatch(pattern, path), name) for verb, pattern, name in self.routes if verb == method)
        match, name = next(((match, name) for match, name in found if match), (None, ""))
        try:
            if match is None:
                raise RefusedError(404, "EntryNotFound")
            route: Callable[..., None] = getattr(self, name)
            with self.server.lock:
                route(**match.groupdict())
        except RefusedError as error:
            self.send(error.status, {"error": str(error)}, {"X-Error-Code": error.code, "X-Error-Message": str(error)})

    def send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        """value: bytes of a file, or anything that JSON can say."""
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        kind = "application/octet-stream" if isinstance(value, bytes) else "application/json"
        self.send_response(status)
        for name, text in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self) -> Any:
        return json.loads(self.content)

    def user(self, *, writes: bool = False) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.server.tokens:
            raise RefusedError(401, "", "Invalid credentials in Authorization header")
        if writes and (not token or token in self.server.readers):
            raise RefusedError(
                403 if token else 401, "", "This token may not write" if token else "Invalid username or password."
            )
        return self.server.tokens.get(token)

    def repository(self, repo: str, *, writes: bool = False) -> Repository:
        user = self.user(writes=writes)
        found = self.server.repositories.get(repo)
        owner = repo.split("/")[0]
        if found is None or (found.is_private and user != owner):  # one that is hidden looks like one that is not there
            raise RefusedError(404 if user else 401, "RepoNotFound", "Repository not found")
        if writes and user != owner:
            raise RefusedError(403, "", f"{user} may not write to {repo}")
        return found

    def revision(self, repo: str, revision: str) -> Commit:
        commit = self.repository(repo).find(revision)
        if commit is None:
            raise RefusedError(404, "RevisionNotFound")
        return commit

    def who_am_i(self) -> None:
        if (user := self.user()) is None:
            raise RefusedError(401, "", "Invalid username or password.")
        self.send(200, {"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token"}})

    def create(self) -> None:
        user = self.user(writes=True)
        asked = self.body()
        repo = f"{asked.get('organization') or user}/{asked['name']}"
        where = {"url": f"{self.server.url}/{repo}", "name": repo, "id": repo}
        if repo.split("/")[0] != user:
            raise RefusedError(403, "", f"{user} may not create {repo}")
        if repo in self.server.repositories:
            self.send(409, {"error": "You already created this model repo", **where})
            return
        made = self.server.repositories[repo] = Repository(asked.get("visibility") == "private")
        made.add("main", Commit("initial commit", {".gitattributes": b""}))
        self.send(200, where)

    def validate_card(self) -> None:
        try:
            ModelCard(self.body()["content"])
        except (ValueError, YAMLError) as error:
            self.send(400, {"errors": [{"message": str(error)}]})
        else:
            self.send(200, {"errors": [], "warnings": []})

    def ask_for_upload(self, repo: str, revision: str) -> None:
        asked = self.body()
        there = self.repository(repo, writes=True).find(revision)
        contents = {} if there is None else there.files
        answers = [
            {
                "path": file["path"],
                "uploadMode": "regular",
                "shouldIgnore": False,
                "oid": blob_id(contents[file["path"]]) if file["path"] in contents else None,
            }
            for file in asked["files"]
        ]
        self.send(200, {"files": answers})

    def commit(self, repo: str, revision: str) -> None:
        where = self.repository(repo, writes=True)
        lines = [json.loads(line) for line in self.content.splitlines() if line.strip()]
        before = where.find(revision)
        if before is None:
            raise RefusedError(404, "RevisionNotFound")
        files, title = dict(before.files), ""
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "header":
                title = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "deletedFile":
                del files[value["path"]]
            else:
                raise RefusedError(400, "", f"{kind} is not known here")
        answer: dict[str, Any] = {"success": True}
        ref = revision
        if "create_pr" in parse_qs(urlsplit(self.path).query):
            number = 1 + sum(name.startswith("refs/pr/") for name in where.refs)
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.server.url}/{repo}/discussions/{number}"
        oid = where.add(ref, Commit(title, files, before.oid))
        self.send(200, {**answer, "commitOid": oid, "commitUrl": f"{self.server.url}/{repo}/commit/{oid}"})

    def create_branch(self, repo: str, branch: str) -> None:
        where = self.repository(repo, writes=True)
        if branch in where.refs:
            raise RefusedError(409, "", f"Reference already exists: {branch}")
        where.refs[branch] = where.refs["main"]
        self.send(200, {})

    def list_refs(self, repo: str) -> None:
        refs = [{"name": name, "ref": name, "targetCommit": oid} for name, oid in self.repository(repo).refs.items()]
        self.send(200, {"branches": refs, "tags": [], "converts": []})

    def list_files(self, repo: str, revision: str) -> None:
        files = self.revision(repo, revision).files
        self.send(200, [{"type": "file", "path": p, "size": len(c), "oid": blob_id(c)} for p, c in sorted(files.items())])

    def describe(self, repo: str, revision: str = "main") -> None:
        commit = self.revision(repo, revision)
        names = [{"rfilename": path} for path in sorted(commit.files)]
        hidden = self.server.repositories[repo].is_private
        self.send(200, {"id": repo, "sha": commit.oid, "private": hidden, "gated": False, "tags": [], "siblings": names})

    def download(self, repo: str, revision: str, path: str) -> None:
        commit = self.revision(repo, revision)
        headers = {"X-Repo-Commit": commit.oid}
        if (content := commit.files.get(path)) is None:
            missing = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self.send(404, {"error": "Entry not found"}, headers | missing)
            return
        self.send(200, content, headers | {"ETag": f'"{blob_id(content)}"'})
