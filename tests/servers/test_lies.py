"""A server that lies, fails or changes is named in one sentence; what it may do is taken without one.

The real server answers; a proxy changes single requests and replies.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.base import Engine
from mismatch_probe.errors import EngineError, ExitCode, UsageError
from tests.servers.asking import MOST_TOKENS, requests, started
from tests.servers.proxy import GENERATE, Json, Proxy, Reply
from tests.servers.real_server import RealServer

pytestmark = pytest.mark.slow

PLAIN = SamplingSettings(max_new_tokens=MOST_TOKENS)


@pytest.fixture(scope="module")
def proxied(vllm: RealServer) -> Iterator[tuple[Proxy, Engine]]:
    """A proxy, and an engine that met an honest server behind it. One request at a time has the same bits each time."""
    with Proxy(vllm.url) as proxy, started(proxy.url, concurrency=1) as engine:
        yield proxy, engine


@pytest.fixture
def proxy(proxied: tuple[Proxy, Engine]) -> Iterator[Proxy]:
    proxy = proxied[0]
    honest = proxy.before, proxy.after
    yield proxy
    proxy.before, proxy.after = honest


@pytest.fixture
def engine(proxied: tuple[Proxy, Engine]) -> Engine:
    return proxied[1]


def changed(change: Callable[[Json], None]) -> Callable[[str, Json, Reply], Reply]:
    """Every answer with tokens in it, changed in place."""

    def after(path: str, body: Json, reply: Reply) -> Reply:
        if path != GENERATE or reply.status != 200:
            return reply
        content = reply.json
        change(content)
        return Reply.of(content)

    return after


def asked_with(**sampling: Any) -> Callable[[str, Json], Json]:
    return lambda path, body: {**body, "sampling_params": {**body["sampling_params"], **sampling}}


def other_prompt(content: Json) -> None:
    content["prompt_token_ids"][0] += 1


def other_tokens(content: Json) -> None:
    content["choices"][0]["token_ids"][0] += 1


def unknown_token(content: Json) -> None:
    choice = content["choices"][0]
    choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = 5000


def aborted(content: Json) -> None:
    content["choices"][0]["finish_reason"] = "abort"


def relabelled(content: Json) -> None:
    content["choices"][0]["weight_versions"] = [{"version": "step-2", "start": 0, "end": 12}]


def relabelled_within(content: Json) -> None:
    spans = [{"version": "default", "start": 0, "end": 6}, {"version": "step-2", "start": 6, "end": 12}]
    content["choices"][0]["weight_versions"] = spans


def no_choice(content: Json) -> None:
    del content["choices"]


def text_for_a_number(content: Json) -> None:
    content["choices"][0]["logprobs"]["content"][0]["logprob"] = "-0.5"


def two_choices(content: Json) -> None:
    content["choices"] *= 2


LIES = {
    other_prompt: "on other token ids than those given .* instead of .* at position 0",
    other_tokens: "no answer of /inference/v1/generate: its log-probs are of other tokens than it gives",
    unknown_token: "gave r0 the token id 5000, and the checkpoint knows 320: it serves another model",
    aborted: "ended r0 with 'abort' instead of finishing it",
    relabelled: "changed its weights from default to step-2 while it was measured",
    relabelled_within: "changed its weights within r0, from default to step-2",
    no_choice: "is no answer of /inference/v1/generate: it has no choices",
    text_for_a_number: "is no answer of /inference/v1/generate: its logprob is no such value",
    two_choices: "gives 2 responses for r0 where 1 were asked for",
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: str(lie.__name__))
def test_an_answer_that_is_none_is_named(lie: Callable[[Json], None], proxy: Proxy, engine: Engine) -> None:
    proxy.after = changed(lie)
    with pytest.raises(EngineError, match=LIES[lie]) as named:
        engine.sample(requests(1), PLAIN)
    assert named.value.exit_code == ExitCode.ENVIRONMENT
    assert "\n" not in str(named.value)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"max_tokens": 24}, "gave r0 24 tokens where at most 12 were asked for: it does not take max_tokens"),
        ({"max_tokens": 5}, "cut r0 off after 5 tokens where 12 were asked for: .* --max-new-tokens 5"),
    ],
)
def test_another_length_than_asked_for_is_named(
    sampling: dict[str, Any], words: str, proxy: Proxy, engine: Engine
) -> None:
    proxy.before = asked_with(ignore_eos=True, **sampling)
    with pytest.raises(EngineError, match=words):
        engine.sample(requests(1), PLAIN)


def test_an_end_that_was_to_be_ignored_is_named(proxy: Proxy, engine: Engine) -> None:
    proxy.after = changed(lambda content: content["choices"][0].update(finish_reason="stop"))
    with pytest.raises(EngineError, match="although it was to ignore the end of sequence"):
        engine.sample(requests(1), PLAIN.model_copy(update={"ignore_eos": True}))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (lambda reply: Reply(200, reply.body[: len(reply.body) // 2]), "text that is no JSON, or is cut off, 2 times"),
        (
            lambda reply: Reply(200, reply.body, cut=len(reply.body) // 2),
            "breaks off its answer to /inference.*, 2 times",
        ),
        (
            lambda reply: Reply.of({"error": {"message": "EngineDeadError\x1b[2J\nsee log"}}, 500),
            r"with 500 \(EngineDeadError.*<U\+001B>.* see log\), 2 times in a row: see whether it runs",
        ),
        (lambda reply: Reply(503, b"<html>overloaded</html>"), r"with 503 \(<html>overloaded</html>\), 2 times"),
        (lambda reply: Reply.of({"detail": "Not Found"}, 404), "no longer serves demo: Not Found"),
        (lambda reply: Reply.of({"message": "too many logprobs"}, 400), "refuses a request .*: too many logprobs"),
        (lambda reply: Reply(418, b""), r"with 418 \(no words\)"),
        (lambda reply: Reply(200, b"[]"), "it has no choices"),
    ],
)
def test_a_failure_is_told_in_the_servers_own_words(
    reply: Callable[[Reply], Reply], words: str, proxy: Proxy, engine: Engine
) -> None:
    proxy.after = lambda path, body, given: reply(given)
    with pytest.raises(EngineError, match=words):
        engine.sample(requests(1), PLAIN)


def test_a_redirect_is_not_followed(proxy: Proxy, engine: Engine) -> None:
    proxy.after = lambda path, body, reply: Reply(307, b"", {"Location": "http://elsewhere.example/v1"})
    with pytest.raises(UsageError, match=r"elsewhere, to http://elsewhere\.example/v1: prompts and keys go"):
        engine.sample(requests(1), PLAIN)


@pytest.fixture(scope="module")
def impatient(vllm: RealServer) -> Iterator[tuple[Proxy, Engine]]:
    """A proxy, and an engine that gives each request two seconds. A slow processor answers one at a time in that."""
    with Proxy(vllm.url) as proxy, started(proxy.url, timeout_seconds=2.0, tries=6, concurrency=1) as engine:
        yield proxy, engine


def test_a_slow_server_is_given_up_after_two_tries(
    impatient: tuple[Proxy, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(path: str, body: Json, reply: Reply) -> Reply:
        time.sleep(2.5)
        return reply

    proxy, engine = impatient
    monkeypatch.setattr(proxy, "after", slowly)
    proxy.seen = []
    with pytest.raises(EngineError, match="did not answer /inference/v1/generate within 2 s, 2 times in a row"):
        engine.sample(requests(1), PLAIN)
    assert len(proxy.seen) == 2


def test_a_server_that_trickles_its_answer_is_too_slow_as_well(
    impatient: tuple[Proxy, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, engine = impatient
    monkeypatch.setattr(proxy, "pause_seconds", 0.6)
    with pytest.raises(EngineError, match="did not answer /inference/v1/generate within 2 s, 2 times in a row"):
        engine.sample(requests(1), PLAIN)


def test_closing_twice_is_closing_once(vllm: RealServer) -> None:
    engine = started(vllm.url)
    engine.close()
    engine.close()


@pytest.mark.parametrize(
    "trouble",
    [
        Reply(429, b"later", {"Retry-After": "1"}),
        Reply(502, b"bad gateway"),
        Reply(200, b"{"),
        Reply(200, b"{}  ", cut=1),
    ],
    ids=["429", "502", "cut-json", "broken-off"],
)
def test_what_passes_is_tried_again_and_changes_nothing(trouble: Reply, proxy: Proxy, engine: Engine) -> None:
    honest = engine.sample(requests(3), PLAIN)
    troubled = [0]

    def once(path: str, body: Json, reply: Reply) -> Reply:
        troubled[0] += 1
        return trouble if troubled[0] == 2 else reply

    proxy.after = once
    again = engine.sample(requests(3), PLAIN)
    assert [one.sequence for one in again] == [one.sequence for one in honest]
    assert all(np.array_equal(a.scores.logprobs, b.scores.logprobs) for a, b in zip(again, honest, strict=True))


@pytest.mark.parametrize("value", [None, -9999.0, float("nan")])
def test_what_is_missing_is_never_a_number(value: float | None, proxy: Proxy, engine: Engine) -> None:
    def missing(content: Json) -> None:
        content["choices"][0]["logprobs"]["content"][0]["logprob"] = value

    proxy.after = changed(missing)
    [sampled] = engine.sample(requests(1), PLAIN)
    assert np.isnan(sampled.scores.logprobs[0])
    assert np.isfinite(sampled.scores.logprobs[1:]).all()


def test_every_sampling_parameter_is_sent(proxy: Proxy, engine: Engine) -> None:
    proxy.seen = []
    engine.sample(requests(1), PLAIN)
    [question, _] = proxy.questions()
    sent = question["sampling_params"]
    assert sent == {
        "n": 1, "max_tokens": 12, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": 0, "ignore_eos": False,
        "stop": [], "stop_token_ids": [], "bad_words": [], "logprobs": 2, "prompt_logprobs": None, "detokenize": False,
        "skip_special_tokens": False,
    }  # fmt: skip
    assert question["token_ids"] == requests(1)[0].prompt.token_ids
