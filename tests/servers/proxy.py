"""A small HTTP proxy in front of a real server that changes single requests and replies: a server that lies."""

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

Json = Any
GENERATE = "/inference/v1/generate"


@dataclass
class Reply:
    """What goes back. cut: only so much of the body is sent, as by a server that dies while it writes."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None

    @classmethod
    def of(cls, content: Json, status: int = 200) -> Self:
        return cls(status, json.dumps(content).encode())

    @property
    def json(self) -> Json:
        return json.loads(self.body)


Before = Callable[[str, Json], Json]
After = Callable[[str, Json, Reply], Reply]


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away, as those do that are killed."""


class Proxy:
    """before: changes what is asked (its path, its body). after: changes what is answered (and sees what was asked).

    pause_seconds: before each fifth of an answer. seen: the path, headers and body of every request.
    """

    def __init__(self, target: str, before: Before | None = None, after: After | None = None) -> None:
        self.target = target
        self.before: Before = before or (lambda path, body: body)
        self.after: After = after or (lambda path, body, reply: reply)
        self.pause_seconds = 0.0
        self.seen: list[tuple[str, dict[str, str], Json]] = []
        self._server = _Quiet(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply_to(self, method: str, path: str, headers: dict[str, str], body: Json) -> Reply:
        self.seen.append((path, headers, body))
        question = None if body is None else self.before(path, body)
        target = urlsplit(self.target)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=120)
        try:
            content = None if question is None else json.dumps(question)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            reply = Reply(answer.status, answer.read())
        except OSError:
            return Reply(200, b"gone", cut=0)
        finally:
            connection.close()
        return self.after(path, body, reply)

    def questions(self) -> list[Json]:
        """The bodies of the requests that ask for tokens."""
        return [body for _, _, body in self.seen if isinstance(body, dict) and len(body) > 1]


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer("GET", None)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._answer("POST", json.loads(self.rfile.read(length) or b"{}"))

        def _answer(self, method: str, body: Json) -> None:
            reply = proxy.reply_to(method, self.path, dict(self.headers.items()), body)
            self.send_response(reply.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply.body)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self._write(reply.body[: reply.cut])
            self.close_connection = reply.cut is not None

        def _write(self, body: bytes) -> None:
            """Whole, or in five pieces with a pause before each."""
            size = -(-len(body) // (5 if proxy.pause_seconds else 1)) or 1
            for start in range(0, len(body), size):
                time.sleep(proxy.pause_seconds)
                self.wfile.write(body[start : start + size])

        def log_message(self, *words: object) -> None:
            pass

    return Handler
