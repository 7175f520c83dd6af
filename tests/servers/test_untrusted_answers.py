"""What a server or a gateway writes into an answer: the key, however it is spelt, and more than was asked for."""

import base64
import gzip
import html
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from mismatch_probe.engines.server.answers import Question, most_bytes
from mismatch_probe.engines.server.arguments import KEY_VARIABLE, ApiKey, ServerArguments
from mismatch_probe.engines.server.client import contact
from mismatch_probe.engines.server.connection import Connection, HttpRequest, Refused
from mismatch_probe.engines.server.engine import count_processes
from mismatch_probe.engines.server.protocols import PROTOCOLS
from mismatch_probe.engines.server.protocols.completions import Completions
from mismatch_probe.errors import EngineError, MismatchProbeError, UsageError

KEY = "m-sk-a&b/C_d+4711"
MIB = 2**20
Handler = BaseHTTPRequestHandler


def escaped(key: str) -> str:
    """As JSON may write it, each character by its number."""
    return "".join(f"\\u{ord(character):04x}" for character in key)


def with_slashes(key: str) -> str:
    """As PHP and others write JSON."""
    return key.replace("/", "\\/").replace("&", "\\u0026")


SPELT: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "escaped": escaped,
    "with slashes": with_slashes,
    "escaped twice": lambda key: escaped(key).replace("\\", "\\\\"),
    "in capitals": str.upper,
    "percent": lambda key: quote(key, safe=""),
    "percent of all": lambda key: "".join(f"%{ord(character):02x}" for character in key),
    "percent twice": lambda key: quote(quote(key, safe="")),
    "html": html.escape,
    "html numbers": lambda key: "".join(f"&#{ord(character)};" for character in key),
    "basic": lambda key: base64.b64encode(f"Basic me:{key}".encode()).decode(),
    "bearer": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "url-safe": lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
    "hexadecimal": lambda key: key.encode().hex(),
    "hexadecimal with blanks": lambda key: key.encode().hex(" "),
    "hexadecimal with colons": lambda key: key.encode().hex(":").upper(),
    "hexadecimal bytes": lambda key: ", ".join(f"0x{byte:02x}" for byte in key.encode()),
    "wrapped": lambda key: key[:6] + "\\n  " + key[6:],
}
TRACES = [
    KEY.lower(),
    html.escape(KEY).lower(),
    quote(KEY, safe="").lower(),
    KEY.encode().hex(),
    KEY.encode().hex(":"),
    ",".join(f"0x{byte:02x}" for byte in KEY.encode()),
    base64.b64encode(KEY.encode())[:16].decode(),
    base64.b64encode(f"Basic me:{KEY}".encode())[12:28].decode(),
    "".join(f"%{ord(character):02x}" for character in KEY[:4]),
]


@contextmanager
def serving(answer: Callable[[Handler], None]) -> Iterator[str]:
    """The address of a server whose every request is answered by `answer`."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer()

        def _answer(self) -> None:
            self.close_connection = True
            try:
                answer(self)
            except OSError:
                """The client went away, as it should."""

        def log_message(self, *words: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

    with Quiet(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def reply(handler: Handler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def ask_server(url: str, request: HttpRequest, **arguments: Any) -> Any:
    with Connection(ServerArguments(url=url, tries=1, **arguments)) as connection:
        return connection.ask(request)


@pytest.fixture(autouse=True)
def _with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.mark.parametrize("spelt", SPELT.values(), ids=SPELT)
def test_the_key_is_struck_out_of_names_and_texts(spelt: Callable[[str], str]) -> None:
    body = f'{{"a": ["{spelt(KEY)}"], "{spelt(KEY)}": {{"b": "x {spelt(KEY)} y"}}, "c": 1}}'.encode()
    with serving(partial(reply, body=body)) as url:
        content = ask_server(url, HttpRequest("/x"))
    check_no_trace(json.dumps(content))
    assert "[key]" in content["a"][0]
    assert content["c"] == 1


@pytest.mark.parametrize("spelt", SPELT.values(), ids=SPELT)
@pytest.mark.parametrize("status", [307, 400, 404, 418, 500])
def test_the_key_is_struck_out_of_what_an_error_says(status: int, spelt: Callable[[str], str]) -> None:
    bodies = [f'{{"error": {{"message": "{spelt(KEY)} is wrong"}}}}', f"<b>{spelt(KEY)}</b>", f'["{spelt(KEY)}"]']
    for body in bodies:
        where = f"http://elsewhere/?{spelt(KEY)}".replace("\n", "")
        with (
            serving(partial(reply, body=body.encode(), status=status, Location=where)) as url,
            pytest.raises(Exception) as failed,  # noqa: PT011 - of many kinds
        ):
            ask_server(url, HttpRequest("/x"))
        check_no_trace(str(failed.value))


def test_the_key_is_struck_out_of_the_names_of_models() -> None:
    """`serves ..., ...; say which` named it."""
    body = f'{{"data": [{{"id": "{escaped(KEY)}"}}, {{"id": "x"}}]}}'.encode()
    with (
        serving(partial(reply, body=body)) as url,
        Connection(ServerArguments(url=url, tries=1)) as connection,
        pytest.raises(UsageError, match=r"serves \[key\], x; say which") as failed,
    ):
        contact(connection, ServerArguments(url=url))
    check_no_trace(str(failed.value))


@pytest.mark.parametrize("charset", ["utf-7", "rot13", "unicode_escape", "utf-16", "zlib_codec"])
def test_the_key_does_not_hide_behind_a_charset(charset: str) -> None:
    body = json.dumps({"a": "m+AC0-sk+AC0-a+ACY-b/C+AF8-d+-4711", "b": KEY}).encode()
    with serving(partial(reply, body=body, Content_Type=f"application/json; charset={charset}")) as url:
        check_no_trace(json.dumps(ask_server(url, HttpRequest("/x"))))


def test_a_key_of_digits_is_struck_out_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "4711471147")
    with serving(lambda handler: reply(handler, b'{"max_model_len": 4711471147, "other": 7}')) as url:
        assert ask_server(url, HttpRequest("/x")) == {"max_model_len": "[key]", "other": 7}


@pytest.mark.parametrize("separator", ["", " ", ":", "-", "  \n", ", "])
def test_a_key_of_hexadecimal_digits_is_struck_with_separators_between_its_bytes(separator: str) -> None:
    key = "a1b2c3d4e5f60718"
    spelt = separator.join(key[at : at + 2] for at in range(0, len(key), 2))
    for text in (spelt, spelt.upper()):
        assert ApiKey(key).strike_text(f"x {text}.") == "x [key]."
    other = spelt.replace("c3", "c4")
    assert ApiKey(key).strike_text(other) == other


@pytest.mark.parametrize(
    "text",
    [
        "m-sk-a&b/C_d 4711",
        "6d:2d:73:6b",
        "0x6d, 0x2d, 0x73",
        "m-sk",
        "token_id:4711",
        'x{model_name="demo"} 1.0',
        "AAAA" * 10,
        "&amp;%25\\u0026",
    ],
)
def test_what_is_no_key_stays_as_it_is(text: str) -> None:
    assert ApiKey(KEY).strike({text: [text]}) == {text: [text]}
    assert ApiKey(None).strike_text(text) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["\\" * MIB, "m-sk-" * 2**18, "6d:" * 2**19, "m:;,.|" * 2**18, "m " * 2**19, "&amp;" * 2**18, "QUJD" * 2**18],
)
def test_looking_for_the_key_takes_time_in_proportion_to_the_text(text: str) -> None:
    """A minute would not do where one step back were tried for every character."""
    began = time.process_time()
    ApiKey(KEY).strike_text(text)
    assert time.process_time() - began < 20


def check_no_trace(text: str) -> None:
    """Neither the key nor a way of writing it; white space aside."""
    joined = "".join(text.split()).replace("\\n", "").lower()
    assert [trace for trace in TRACES if trace.lower() in joined] == []
    assert KEY.lower() not in html.unescape(joined)
    assert "\\u002d" not in joined


def endless(handler: Handler, chunk: bytes = b"x" * 2**16, seconds: float = 60.0, **headers: str) -> None:
    """An answer that goes on, in chunks."""
    handler.send_response(200)
    for name, value in {"Transfer-Encoding": "chunked", **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        handler.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")


@cache
def bomb(num_bytes: int) -> bytes:
    """So much white space, packed a thousandfold."""
    packing = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(packing.compress(b" " * MIB) for _ in range(num_bytes // MIB))
    return packed + packing.flush()


QUESTIONS = [
    HttpRequest("/v1/models"),
    HttpRequest("/version"),
    HttpRequest("/metrics", is_text=True),
    HttpRequest("/weight_info"),
    HttpRequest("/inference/v1/generate", {}, most_bytes=most_bytes(Question([1, 2], 8, seed=0))),
]


@pytest.mark.parametrize("request_", QUESTIONS, ids=lambda request: request.path)
def test_an_answer_without_end_is_given_up_at_its_limit(request_: HttpRequest) -> None:
    began = time.monotonic()
    with serving(endless) as url, pytest.raises(EngineError, match=r"to /\S+ has more than the \d+ MiB that it can"):
        ask_server(url, request_)
    assert time.monotonic() - began < 30


@pytest.mark.slow
@pytest.mark.parametrize("request_", QUESTIONS, ids=lambda request: request.path)
def test_a_packed_answer_is_held_to_the_same_limit(request_: HttpRequest, peak_bytes: Callable[[], int]) -> None:
    """256 MiB, in a quarter of one."""
    packed = bomb(256 * MIB)
    assert len(packed) < MIB
    before = peak_bytes()
    with (
        serving(partial(reply, body=packed, Content_Encoding="gzip")) as url,
        pytest.raises(EngineError, match=r"has more than the \d+ MiB that it can"),
    ):
        ask_server(url, request_)
    assert peak_bytes() - before < 64 * MIB


def test_packed_chunks_that_unpack_to_nothing_are_counted_too() -> None:
    nothing = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = nothing.compress(b"") + nothing.flush(zlib.Z_FULL_FLUSH)
    empty = nothing.flush(zlib.Z_FULL_FLUSH) or b"\x00\x00\x00\xff\xff"

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()
        handler.wfile.write(start)
        while True:
            handler.wfile.write(empty * 2**13)

    with serving(answer) as url, pytest.raises(EngineError, match="has more than"):
        ask_server(url, HttpRequest("/x"))


@pytest.mark.parametrize("packing", ["br", "zstd", "gzip, gzip", "deflate"])
def test_packing_that_was_not_asked_for_is_refused(packing: str) -> None:
    with (
        serving(partial(reply, body=b"{}", Content_Encoding=packing)) as url,
        pytest.raises(EngineError, match=f"packs its answer as {packing}, and gzip alone was asked for"),
    ):
        ask_server(url, HttpRequest("/x"))


@pytest.mark.slow
def test_a_packed_answer_is_unpacked() -> None:
    content = {"data": ["a" * MIB]}
    body = gzip.compress(json.dumps(content).encode())
    with serving(partial(reply, body=body, Content_Encoding="gzip")) as url:
        assert ask_server(url, HttpRequest("/x")) == content
    for wrong in (body[:-9], b"{}"):
        with (
            serving(partial(reply, body=wrong, Content_Encoding="gzip")) as url,
            pytest.raises(EngineError, match=r"with what cannot be read: it (is cut off|packs its answer otherwise)"),
        ):
            ask_server(url, HttpRequest("/x"))


@pytest.mark.slow
def test_the_whole_answer_has_a_deadline() -> None:
    """And not only each piece of it."""

    def slowly(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    began = time.monotonic()
    with serving(slowly) as url, pytest.raises(EngineError, match=r"did not answer /x within 0\.5 s"):
        ask_server(url, HttpRequest("/x"), timeout_seconds=0.5)
    assert time.monotonic() - began < 10


def test_an_error_of_any_length_is_one_sentence() -> None:
    for status, kind in ((400, Refused), (500, EngineError), (403, UsageError)):
        with serving(partial(reply, body=b"x" * 8 * MIB, status=status)) as url:
            with pytest.raises(kind) as failed:
                ask_server(url, HttpRequest("/x"))
            assert len(str(failed.value)) < 400
            assert KEY not in str(failed.value)


@pytest.mark.slow
def test_metrics_without_end_leave_the_processes_unknown() -> None:
    with serving(endless) as url, Connection(ServerArguments(url=url, tries=1)) as connection:
        assert count_processes(connection) is None


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS.built_in.values(), ids=PROTOCOLS.built_in)
def test_the_limit_has_room_for_what_a_server_writes(protocol: Any) -> None:
    """Of each token its text of a hundred characters, its bytes, and candidates likewise."""
    question = Question(list(range(1000)), 512, seed=0, top=5, count=2)
    text = "token " * 16
    entry = {"token": text, "token_id": 123456, "logprob": -12.345678901234567, "bytes": list(text.encode())}
    entries = [{**entry, "top_logprobs": [entry] * 6}] * 512
    choice = {"token_ids": [123456] * 512, "text": text * 512, "logprobs": {"content": entries}, "prompt": range(1000)}
    answer = json.dumps({"choices": [{**choice, "prompt": list(range(1000))}] * 2})
    assert len(answer) < most_bytes(question) < 64 * MIB


def test_a_server_that_lies_about_everything_is_one_sentence() -> None:
    """Whatever is asked of it, before anything is sampled."""
    with (
        serving(lambda handler: endless(handler, b'{"data": [' * 2**10)) as url,
        Connection(ServerArguments(url=url, tries=1)) as connection,
        pytest.raises(MismatchProbeError, match="has more than"),
    ):
        contact(connection, ServerArguments(url=url))


class Mine(Completions):
    server = ""


def test_what_is_no_server_is_answered_with_every_kind_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROTOCOLS, "built_in", {**PROTOCOLS.built_in, "mine": Mine()})
    with (
        serving(lambda handler: handler.send_error(404)) as url,
        Connection(ServerArguments(url=url, tries=1)) as connection,
        pytest.raises(UsageError, match=r"is no server of vLLM's, SGLang's, .*OpenAI's or mine's kind: it has no /v1/"),
    ):
        contact(connection, ServerArguments(url=url))


@pytest.fixture
def peak_bytes() -> Callable[[], int]:
    """Most memory that this process ever held."""

    def peak() -> int:
        with Path("/proc/self/status").open() as status:
            return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

    return peak
