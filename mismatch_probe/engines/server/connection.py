"""Requests to one server: a bounded number at once, answers of bounded size, repeated where that can help."""

import asyncio
import json
import ssl
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx

from mismatch_probe.engines.server.arguments import ApiKey, ServerArguments
from mismatch_probe.errors import EngineError, UsageError, message_of
from mismatch_probe.host import Closing
from mismatch_probe.inert import cut_text, plain
from mismatch_probe.notation import write_size

ACCEPTED: Final = "gzip"
"""As a header. It is unpacked here, a little at a time; what others make of few bytes has no bound."""
_AS_IT_IS: Final = ("", "identity")
_PACKED: Final = ("gzip", "x-gzip")
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS


class TooLong(Exception):  # noqa: N818 - an answer, of a kind
    """More came than is read, packed or unpacked; the text ends a sentence about the server."""


class UnreadableBody(Exception):  # noqa: N818 - as TooLong
    """What came cannot be unpacked; the text ends a sentence about the server."""


async def read_body(response: httpx.Response, most_bytes: int) -> str:
    """All of an answer that streams in, unpacked and decoded from UTF-8, whatever else its headers call it.

    Raises:
        TooLong: it has more than `most_bytes`. No more than these and one chunk of the network's are held.
        UnreadableBody: it is packed otherwise than was asked for, or cut off.
        httpx.RequestError: the connection ends before it does.
    """
    packing = response.headers.get("content-encoding", "").strip().lower()
    if packing not in (*_AS_IT_IS, *_PACKED):
        raise UnreadableBody(f"packs its answer as {packing}, and {ACCEPTED} alone was asked for")
    unpacking = zlib.decompressobj(_GZIP_BITS) if packing in _PACKED else None
    body, num_sent = bytearray(), 0
    async for chunk in response.aiter_raw():
        num_sent += len(chunk)
        try:
            body += chunk if unpacking is None else unpacking.decompress(chunk, most_bytes - len(body) + 1)
        except zlib.error as error:
            raise UnreadableBody(f"packs its answer otherwise than as {packing}, as which it comes") from error
        if max(len(body), num_sent) > most_bytes:
            raise TooLong(
                f"has more than the {write_size(most_bytes)} that it can have: see what answers at this address"
            )
    if unpacking is not None and num_sent and not unpacking.eof:
        raise UnreadableBody("is cut off")
    return body.decode("utf-8", errors="replace")


Result = TypeVar("Result")

_CONNECT_SECONDS: Final = 10.0
_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 30.0
_TRIES_OF_A_SLOW_REQUEST: Final = 2
"""A server that takes too long over a request takes as long the next time."""
_ACCOUNT_BYTES: Final = 2**22
"""What a server says of itself is shorter, with a thousand adapters too."""
_ERROR_BYTES: Final = 2**18
_WORDS_CHARACTERS: Final = 300
_AGAIN: Final = (408, 429, 500, 502, 503, 504)
_REFUSED: Final = (400, 413, 422)
_UNSERVED: Final = (404, 405, 501)


class Unserved(Exception):  # noqa: N818 - an answer, of a kind
    """The server has no such endpoint, or no such model; the text is the server's own."""


class Refused(EngineError):  # noqa: N818 - as Unserved
    """The server does not take a request as it is."""


class WantsKey(UsageError):  # noqa: N818 - as Unserved
    """The server answers nobody without a key, or this key has no right to an endpoint."""


@dataclass(frozen=True)
class HttpRequest:
    """One HTTP request."""

    path: str
    body: dict[str, Any] | None = None
    """None asks with GET."""
    is_text: bool = False
    """Whether the answer is text and no JSON."""
    most_bytes: int = _ACCOUNT_BYTES
    """What the answer can have at most, unpacked."""


class Connection(Closing):
    """The key is read from the environment, sent to this address alone, and struck out of whatever comes back. Of that
    no more is read than its question can have, and not for longer than a request may take.
    """

    def __init__(self, arguments: ServerArguments) -> None:
        self.url = arguments.url
        self.concurrency = arguments.concurrency
        self._arguments = arguments
        self._key = ApiKey.of(arguments.key_variable)
        self._runner = asyncio.Runner()
        verify = certificates(arguments.url)
        self._client_with_keepalive = self._client(verify, num_kept=arguments.concurrency)
        self._client_of_one_request = self._client(verify, num_kept=0)

    def ask(self, request: HttpRequest, *, tries: int | None = None) -> Any:
        """What the server answers, as JSON values or as text.

        A request that is sent only once gets a TCP connection of its own. One that was kept may end just then: vLLM's
        server closes it, unannounced, behind an answer with 500, and any server closes it after some idle seconds.

        Raises:
            UsageError: it wants a key, or sends the request elsewhere.
            Unserved: it has no such endpoint.
            Refused: it does not take the request.
            EngineError: it cannot be reached, fails, is too slow, or answers with no JSON, or with more than it can.
        """
        return self._run_to_end(self._answer_to(request, tries or self._arguments.tries))

    def ask_all(
        self,
        requests: Sequence[HttpRequest],
        read: Callable[[int, Any], Result],
        on_finished: Callable[[int, int], None] | None = None,
    ) -> list[Result]:
        """What `read` makes of the number of each request and its answer, in order; the first failure ends all."""
        return self._run_to_end(self._all(requests, read, on_finished))

    def close(self) -> None:
        if not self._client_of_one_request.is_closed:
            self._run_to_end(self._client_with_keepalive.aclose())
            self._run_to_end(self._client_of_one_request.aclose())
            self._runner.close()

    def _client(self, verify: ssl.SSLContext, *, num_kept: int) -> httpx.AsyncClient:
        """num_kept: how many TCP connections stay open for the next request."""
        return httpx.AsyncClient(
            headers={"Accept-Encoding": ACCEPTED, **self._key.headers},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=num_kept),
            follow_redirects=False,
            trust_env=False,
            verify=verify,
        )

    def _run_to_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    async def _all(
        self,
        requests: Sequence[HttpRequest],
        read: Callable[[int, Any], Result],
        on_finished: Callable[[int, int], None] | None,
    ) -> list[Result]:
        places = asyncio.Semaphore(self.concurrency)
        num_finished = 0

        async def answer_of(number: int, request: HttpRequest) -> Result:
            nonlocal num_finished
            async with places:
                result = read(number, await self._answer_to(request, self._arguments.tries))
            num_finished += 1
            if on_finished is not None:
                on_finished(num_finished, len(requests))
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer_of(number, request)) for number, request in enumerate(requests)]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in tasks]

    async def _answer_to(self, request: HttpRequest, tries: int) -> Any:
        client = self._client_of_one_request if tries == 1 else self._client_with_keepalive
        wait, slow = _FIRST_WAIT_SECONDS, 0
        for number in range(1, tries + 1):
            try:
                async with asyncio.timeout(self._arguments.timeout_seconds):
                    response, text = await self._send(client, request)
            except TimeoutError:
                slow += 1
                problem = f"did not answer {request.path} within {self._arguments.timeout_seconds:g} s"
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                problem = f"cannot be reached ({self._inert(message_of(error))})"
            except httpx.RequestError as error:
                problem = f"breaks off its answer to {request.path} ({self._inert(message_of(error))})"
            except TooLong as error:
                raise EngineError(f"the answer of the server at {self.url} to {request.path} {error}") from error
            except UnreadableBody as error:
                problem = f"answers {request.path} with what cannot be read: it {self._inert(str(error))}"
            else:
                if response.status_code == httpx.codes.OK:
                    try:
                        return self._key.strike_text(text) if request.is_text else self._key.strike(json.loads(text))
                    except (ValueError, RecursionError):
                        problem = f"answers {request.path} with text that is no JSON, or is cut off"
                else:
                    problem = self._problem(request, response, text)
                    wait = max(wait, _seconds_to_wait(response))
            if number == tries or slow == _TRIES_OF_A_SLOW_REQUEST:
                break
            await asyncio.sleep(min(wait, _LONGEST_WAIT_SECONDS))
            wait *= 2
        times = "" if number == 1 else f", {number} times in a row"
        raise EngineError(f"the server at {self.url} {problem}{times}: see whether it runs, and what its log says")

    async def _send(self, client: httpx.AsyncClient, request: HttpRequest) -> tuple[httpx.Response, str]:
        """The response and its text; an error's text that is too long is left out."""
        method = "GET" if request.body is None else "POST"
        async with client.stream(method, f"{self.url}{request.path}", json=request.body) as response:
            if response.status_code == httpx.codes.OK:
                return response, await read_body(response, request.most_bytes)
            try:
                return response, await read_body(response, _ERROR_BYTES)
            except (TooLong, UnreadableBody) as error:
                return response, f"its text {error}"

    def _problem(self, request: HttpRequest, response: httpx.Response, text: str) -> str:
        """What is wrong with an answer, where asking again can help.

        Raises:
            MismatchProbeError: it cannot.
        """
        status, words = response.status_code, self._words(text)
        if status in _AGAIN:
            return f"answers {request.path} with {status} ({words})"
        if response.is_redirect:
            target = self._inert(response.headers.get("location", "nowhere"))
            raise UsageError(
                f"the server at {self.url} sends {request.path} elsewhere, to {target}: prompts and keys go to the "
                "address that was given alone; give the one that answers"
            )
        if status in (401, 403):
            has = "holds one that it does not take" if self._key.is_set else "is not set"
            raise WantsKey(
                f"the server at {self.url} wants a key ({status}), and the environment variable "
                f"{self._arguments.key_variable} {has}; set it, or name another with key_variable=NAME"
            )
        if status in _UNSERVED:
            raise Unserved(words)
        if status in _REFUSED:
            raise Refused(f"the server at {self.url} refuses a request to {request.path}: {words}")
        raise EngineError(f"the server at {self.url} answers {request.path} with {status} ({words})")

    def _words(self, text: str) -> str:
        """What an error says: its message where it is written as OpenAI's, its text elsewhere."""
        try:
            content = self._key.strike(json.loads(text))
        except (ValueError, RecursionError):
            content = text
        for name in ("error", "message", "detail"):
            if isinstance(content, dict) and name in content:
                content = content[name]
        return self._inert(content if isinstance(content, str) else json.dumps(content)) or "no words"

    def _inert(self, text: str) -> str:
        return cut_text(plain(self._key.strike_text(" ".join(text.split()))), _WORDS_CHARACTERS, keep="start")


def certificates(url: str) -> ssl.SSLContext:
    """Those that this machine trusts, for https. For http none, which nobody shows there: reading them takes longer
    than an answer.
    """
    is_encrypted = httpx.URL(url).scheme == "https"
    return ssl.create_default_context() if is_encrypted else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _seconds_to_wait(response: httpx.Response) -> float:
    """Seconds that the server asks to be left alone."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0
