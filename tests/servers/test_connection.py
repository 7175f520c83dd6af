"""Requests to a server that keeps a TCP connection in words, and is gone from it when the next request comes."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import certifi
import pytest

from mismatch_probe.engines.server.arguments import ServerArguments
from mismatch_probe.engines.server.connection import Connection, HttpRequest, certificates
from mismatch_probe.errors import EngineError

REQUEST = HttpRequest("/finish_weight_update", {})


class HangsUp(BaseHTTPRequestHandler):
    """One answer per connection. status: of all answers."""

    protocol_version = "HTTP/1.1"
    status = 200
    has_answered = False

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.has_answered:
            self.close_connection = True
            return
        self.has_answered = True
        self.send_response(self.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *words: object) -> None:
        pass


class Fails(HangsUp):
    status = 500


@pytest.fixture
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    with ThreadingHTTPServer(("127.0.0.1", 0), getattr(request, "param", HangsUp)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Connection(ServerArguments(url=f"http://127.0.0.1:{server.server_address[1]}")) as connection:
            yield connection
        server.shutdown()


@pytest.mark.parametrize(("scheme", "are_read"), [("https", True), ("HTTPS", True), ("http", False)])
def test_certificates_are_read_for_https_alone(monkeypatch: pytest.MonkeyPatch, scheme: str, are_read: bool) -> None:
    """Where none are read nobody is believed."""
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    context = certificates(f"{scheme}://localhost")
    assert bool(context.cert_store_stats()["x509_ca"]) is are_read
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("tries_before", [1, 2])
def test_what_is_sent_once_is_answered(connection: Connection, tries_before: int) -> None:
    assert connection.ask(REQUEST, tries=tries_before) == {}
    assert connection.ask(REQUEST, tries=1) == {}


@pytest.mark.parametrize("connection", [Fails], indirect=True)
def test_a_failure_is_named_and_not_the_end_of_its_connection(connection: Connection) -> None:
    for _ in range(2):
        with pytest.raises(EngineError, match="answers /finish_weight_update with 500"):
            connection.ask(REQUEST, tries=1)


def test_what_can_be_sent_again_is_sent_again(connection: Connection) -> None:
    for _ in range(2):
        assert connection.ask(REQUEST, tries=2) == {}
