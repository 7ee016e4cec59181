"""A server on the loopback with the part of the Hugging Face hub's HTTP API that downloads need:
a repository's commits and branches, its list of files, and the files with their ETags."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"


@dataclass
class Repository:
    """A repository's commits, and its branches and tags by name. `commit` changes them."""

    is_gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], *, branch: str = "main") -> str:
        """Moves ``branch`` to a new commit of just these files; returns its name."""
        state = hashlib.sha1(str(len(self.commits)).encode())
        for name, data in files.items():
            state.update(name.encode() + data)
        self.commits[state.hexdigest()] = dict(files)
        self.branches[branch] = state.hexdigest()
        return state.hexdigest()


class Hub:
    """Repositories by name, and the requests received."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        """Requests as ``GET /path``, in order of arrival."""
        self.amid_weights: Callable[[], object] = lambda: None
        """Called between the halves of a weight file."""

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that uses this hub and keeps its files in ``home``."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return kept | {"HF_ENDPOINT": self.url, "HF_HOME": str(home)} | more

    def sent(self, suffix: str = "") -> list[str]:
        """Files whose contents were sent, not only their headers."""
        return [
            each.rpartition("/")[2]
            for each in self.requests
            if each.startswith("GET") and "/resolve/" in each and each.endswith(suffix)
        ]


def files_of(folder: Path) -> dict[str, bytes]:
    """A repository's files from ``folder``, without hidden ones: digests that other tests left."""
    files = [each for each in folder.iterdir() if each.is_file() and each.name[0] != "."]
    return {file.name: file.read_bytes() for file in files}


@contextmanager
def hub_server() -> Iterator[Hub]:
    class Handler(_Handler):
        hub = Hub("")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Handler.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        is_file = not path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repository = self.hub.repositories.get("/".join(parts[:2]))
        if repository is None:
            # The hub does not say whether it is missing or private.
            if self.headers.get("Authorization") is None:
                return self._refuse(401, "", "Invalid username or password.")
            return self._refuse(404, "RepoNotFound", "Repository not found")
        kind, *rest = parts[2:] or ["revision", "main"]
        revision = "/".join(rest) if kind == "revision" else rest[0]
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if kind == "revision":
            return self._send(_json({"id": "/".join(parts[:2]), "sha": commit, "siblings": []}))
        if kind == "tree":
            return self._send(_json([_entry(*each) for each in files.items()]))
        assert is_file
        assert kind == "resolve"
        if repository.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            has_token = self.headers.get("Authorization") is not None
            return self._refuse(403 if has_token else 401, "GatedRepo", "Access is restricted")
        name = "/".join(rest[1:])
        if name not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        etag = hashlib.sha256(files[name]).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        self._send(files[name], headers, is_weights=name.endswith(".safetensors"))

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(_json({"error": message}), headers, status=status)

    def _send(
        self,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        status: int = 200,
        is_weights: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(body) // 2
        self.wfile.write(body[:half])
        if is_weights:
            self.hub.amid_weights()
        self.wfile.write(body[half:])


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _entry(name: str, data: bytes) -> dict[str, object]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}
