"""The part of the Hugging Face hub that fetching a model speaks to, on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

COMMIT = "1" * 40
LARGE = (".safetensors", ".bin", ".gguf")
"""Kept beside git, with a SHA-256 of their own."""


class FakeHub:
    """One repository at one commit, and what was asked of it."""

    def __init__(self, repo: str, files: Mapping[str, bytes], *, gated: bool = False) -> None:
        self.repo, self.files, self.gated = repo, files, gated
        self.url = ""
        self.fetched: list[str] = []

    @contextmanager
    def serving(self) -> Generator[FakeHub]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def tree(self) -> list[dict[str, object]]:
        return [self._entry(name, content) for name, content in self.files.items()]

    def _entry(self, name: str, content: bytes) -> dict[str, object]:
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": blob}
        if name.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return entry


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            api = f"/api/models/{hub.repo}"
            file = path.removeprefix(f"/{hub.repo}/resolve/{COMMIT}/")
            if not path.startswith((f"{api}/", f"/{hub.repo}/")):
                self._refuse(404, "RepoNotFound")
            elif hub.gated:
                self._refuse(403, "GatedRepo")
            elif path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                self._send_json({"id": hub.repo, "sha": COMMIT, "siblings": []})
            elif path.startswith(f"{api}/revision/"):
                self._refuse(404, "RevisionNotFound")
            elif path in (f"{api}/tree/{COMMIT}", f"{api}/tree/main"):
                self._send_json(hub.tree())
            elif file in hub.files:
                if self.command == "GET":
                    hub.fetched.append(file)
                self._send(hub.files[file], "application/octet-stream", file)
            else:
                self._refuse(404, "EntryNotFound")

        def _send_json(self, content: object) -> None:
            self._send(json.dumps(content).encode(), "application/json")

        def _send(self, content: bytes, kind: str, name: str = "") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            if name:
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
