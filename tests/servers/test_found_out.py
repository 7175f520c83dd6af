"""What a server can do is found out by asking it, and said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.config.model import SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.server.answers import ServerAnswer
from mismatch_probe.engines.server.arguments import KEY_VARIABLE
from mismatch_probe.engines.server.asking import draws_p_value
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.training_path.scorer import Scorer
from mismatch_probe.verdict.preflight import preflight
from mismatch_probe.verdict.preflight.facts import Sides
from tests.ports import free_port
from tests.servers.asking import MOST_TOKENS, requests, started
from tests.servers.proxy import GENERATE, Json, Proxy, Reply
from tests.servers.real_server import CONTEXT, RealServer, WarmServer, demo_checkpoint

pytestmark = pytest.mark.slow

KEY = "sk-not-to-be-seen-51423"
WARM = SamplingSettings(max_new_tokens=MOST_TOKENS, temperature=0.7)


@pytest.fixture(scope="module")
def openai(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """As most are started: completions alone, a key; and log-probs after temperature."""
    words = ("--api-key", KEY, "--logprobs-mode", "processed_logprobs")
    with WarmServer(tmp_path_factory.mktemp("openai") / "log", *words) as server:
        yield server


@pytest.fixture(scope="module")
def alone(vllm: RealServer) -> Iterator[Engine]:
    """Of one request at a time, so that one question has one answer to the bit."""
    with started(vllm.url, concurrency=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def warm(vllm: RealServer) -> Iterator[Engine]:
    """The same at a temperature."""
    with started(vllm.url, WARM, concurrency=1) as engine:
        yield engine


def findings(engine: Engine) -> dict[str, Any]:
    settings_asked_for: dict[str, Any] = engine.effective_settings()["asked"]
    return settings_asked_for


def message_of(engine: Engine) -> dict[str, str]:
    """Level of each finding of the preflight on the server, by its setting."""
    sides = Sides(Dtype.BF16, Dtype.BF16, {"dtype": "bf16", "temperature": 1.0}, engine.effective_settings())
    return {finding.setting: finding.level for finding in preflight(sides)}


def test_what_an_honest_server_says_of_itself(vllm: RealServer) -> None:
    with started(vllm.url) as engine:
        applied = engine.effective_settings()
        assert applied["software"].startswith("vLLM 0.")
        assert applied["protocol"] == GENERATE
        assert (applied["model"], applied["model_root"]) == ("demo", str(demo_checkpoint()))
        assert (applied["max_model_len"], applied["dtype"]) == (CONTEXT, "bf16")
        assert applied["dtype_known_from"] == "the server"
        assert (applied["weight_version"], applied["weights_are_labelled"]) == ("default", False)
        assert applied["logprobs_mode"] is None, "at temperature 1 both are the same"
        settings_asked_for = findings(engine)
        assert (settings_asked_for["echoes_prompt_ids"], settings_asked_for["log_probs"]) == (
            True,
            "before temperature",
        )
        assert (settings_asked_for["same_tokens"], settings_asked_for["refuses_unknown_ids"]) == (True, True)
        for changed in ("again", "in_a_crowd", "behind_the_cache"):
            assert 0 <= settings_asked_for[changed] < 0.05
        assert settings_asked_for["sampled_as_said"] > 1e-6
        levels = message_of(engine)
        assert levels.pop("prefix_caching") == "note"
        levels.pop("asked.again, asked.in_a_crowd, asked.behind_the_cache", None)
        assert levels == {"weight_version": "note", "prefill": "note"}


def test_log_probs_before_temperature_are_an_error_where_one_applies(warm: Engine) -> None:
    assert warm.effective_settings()["logprobs_mode"] == "raw_logprobs"
    assert message_of(warm)["logprobs_mode"] == "error"


def test_a_server_of_openais_kind_wants_its_key_and_gives_the_same_tokens(
    openai: RealServer, warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(
        UsageError, match=rf"wants a key \(401\), and the environment variable {KEY_VARIABLE} is not set"
    ):
        started(openai.url)
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    with pytest.raises(UsageError, match="OTHER_KEY holds one that it does not take") as refused:
        started(openai.url, key_variable="OTHER_KEY")
    assert "sk-other" not in str(refused.value)
    monkeypatch.setenv(KEY_VARIABLE, f"{KEY}\n")
    with started(openai.url, WARM, concurrency=1) as completions:
        applied = completions.effective_settings()
        assert applied["protocol"] == "/v1/completions"
        assert (applied["logprobs_mode"], applied["weight_version"]) == ("processed_logprobs", None)
        assert findings(completions)["log_probs"] == "after temperature"
        assert "logprobs_mode" not in message_of(completions)
        ours, theirs = (engine.sample(requests(), WARM) for engine in (completions, warm))
        assert [one.sequence for one in ours] == [one.sequence for one in theirs]
        assert all(np.isfinite(one.scores.logprobs).all() for one in ours)
    settings = TrainingPathSettings(device="cpu")
    with Scorer.load(demo_checkpoint(), Dtype.FP32, settings, temperature=WARM.temperature) as scorer:
        pi = np.concatenate([one.logprobs for one in scorer.score_batch([one.sequence for one in ours])])
    processed, raw = (
        float(np.abs(np.concatenate([one.scores.logprobs for one in side]) - pi).mean()) for side in (ours, theirs)
    )
    assert processed < 0.05, "rounding to BF16: they are of what is sampled from"
    assert raw > 3 * processed, "those of before temperature are not"


def test_log_probs_are_those_of_both_endpoints_to_the_bit(vllm: RealServer, alone: Engine) -> None:
    plain = SamplingSettings(max_new_tokens=MOST_TOKENS)
    assert findings(alone)["in_a_crowd"] is None, "there is no crowd"
    with started(vllm.url, protocol="completions", concurrency=1) as completions:
        for one, other in zip(*(engine.sample(requests(), plain) for engine in (alone, completions)), strict=True):
            assert one.sequence == other.sequence
            assert np.array_equal(one.scores.logprobs, other.scores.logprobs)
            assert one.scores.top1_ids is not None
            assert np.array_equal(one.scores.top1_ids, other.scores.top1_ids)
            assert one.token_texts == other.token_texts


def test_a_temperature_that_the_log_probs_hide_is_seen_in_the_tokens(vllm: RealServer) -> None:
    def colder(path: str, body: Json) -> Json:
        if path != GENERATE or "sampling_params" not in body:
            return body
        return {**body, "sampling_params": {**body["sampling_params"], "temperature": 0.3}}

    with Proxy(vllm.url, before=colder) as proxy, started(proxy.url) as engine:
        assert findings(engine)["sampled_as_said"] < 1e-6
        assert message_of(engine)["asked.sampled_as_said"] == "error"


def test_a_server_that_rounds_otherwise_each_time_is_told_by_how_much(vllm: RealServer) -> None:
    jitter = np.random.default_rng(0)

    def noisy(path: str, body: Json, reply: Reply) -> Reply:
        if path != GENERATE or reply.status != 200:
            return reply
        content = reply.json
        for choice in content["choices"]:
            for entry in choice["logprobs"]["content"]:
                entry["logprob"] -= float(jitter.uniform(0, 0.01))
        return Reply.of(content)

    with Proxy(vllm.url, after=noisy) as proxy, started(proxy.url) as engine:
        assert all(0 < findings(engine)[name] < 0.01 for name in ("again", "in_a_crowd", "behind_the_cache"))
        assert message_of(engine)["asked.again, asked.in_a_crowd, asked.behind_the_cache"] == "note"


def test_a_server_that_takes_no_salt_and_echoes_nothing_is_measured_all_the_same(vllm: RealServer) -> None:
    def old(path: str, body: Json, reply: Reply) -> Reply:
        if path != GENERATE:
            return reply
        if "cache_salt" in body:
            return Reply.of({"error": {"message": "cache_salt is unknown"}}, 400)
        return Reply.of(reply.json | {"prompt_token_ids": None}) if reply.status == 200 else reply

    with Proxy(vllm.url, after=old) as proxy, started(proxy.url) as engine:
        settings_asked_for = findings(engine)
        assert (settings_asked_for["echoes_prompt_ids"], settings_asked_for["behind_the_cache"]) == (False, None)
        assert settings_asked_for["again"] is not None
        assert message_of(engine)["asked.echoes_prompt_ids"] == "warning"


def test_a_cache_salt_is_sent_where_the_prefix_cache_is_not_to_be_read(vllm: RealServer) -> None:
    plain = SamplingSettings(max_new_tokens=MOST_TOKENS)
    with Proxy(vllm.url) as proxy, started(proxy.url, prefix_caching=False) as engine:
        proxy.seen = []
        engine.sample(requests(3), plain)
        salts = [body.get("cache_salt") for body in proxy.questions() if len(body["token_ids"]) < 20]
        assert len({*salts}) == 3
        assert None not in salts


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"model": "policy"}, "serves demo, and not policy; give one of these"),
        ({"protocol": "sglang"}, "has no endpoint that is asked as sglang"),
    ],
)
def test_what_is_not_served_is_refused(args: dict[str, str], words: str, vllm: RealServer) -> None:
    with pytest.raises(UsageError, match=words):
        started(vllm.url, **args)


def test_nothing_at_the_address_and_something_else_at_it_are_told_apart(vllm: RealServer) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=rf"{url} cannot be reached \(.*\), 2 times in a row"):
        started(url)
    with Proxy(vllm.url, after=lambda path, body, reply: Reply(200, b"<html>hello</html>")) as proxy:
        with pytest.raises(EngineError, match="answers /v1/models with text that is no JSON"):
            started(proxy.url)
        proxy.after = lambda path, body, reply: Reply.of({"detail": "Not Found"}, 404)
        with pytest.raises(UsageError, match=r"is no server of vLLM's, .* kind: it has no /v1/models"):
            started(proxy.url)
        proxy.after = lambda path, body, reply: Reply.of({"data": "none"})
        with pytest.raises(UsageError, match="what it gives for /v1/models is no list of models"):
            started(proxy.url)


def test_weights_that_change_without_a_label_are_seen_between_batches(
    vllm: RealServer, alone: Engine, other_weights: Path
) -> None:
    plain = SamplingSettings(max_new_tokens=MOST_TOKENS)
    before = alone.sample(requests(3), plain)
    recorded = alone.effective_settings()
    vllm.load(other_weights)
    try:
        with pytest.raises(EngineError, match="answers the same question otherwise than when it was first asked"):
            alone.sample(requests(3), plain)
        with (
            started(vllm.url) as later,
            pytest.raises(EngineError, match=r"otherwise than the run was begun with .*: it holds other weights now"),
        ):
            later.require_same_policy(recorded)
    finally:
        vllm.load(demo_checkpoint())
    with started(vllm.url, concurrency=1) as again:
        again.require_same_policy(recorded)
        assert [one.sequence for one in again.sample(requests(3), plain)] == [one.sequence for one in before]


def test_a_label_that_changes_is_named_with_both(vllm: RealServer) -> None:
    vllm.label("step-1")
    try:
        with started(vllm.url) as engine:
            recorded = engine.effective_settings()
            assert (recorded["weight_version"], recorded["weights_are_labelled"]) == ("step-1", True)
            assert "weight_version" not in message_of(engine)
            vllm.label("step-2")
            with pytest.raises(EngineError, match="changed its weights from step-1 to step-2 while it was measured"):
                engine.sample(requests(1), SamplingSettings(max_new_tokens=MOST_TOKENS))
        with started(vllm.url) as later, pytest.raises(EngineError, match="from step-1 to step-2"):
            later.require_same_policy(recorded)
    finally:
        vllm.label("default")


def drawn(token_id: int) -> ServerAnswer:
    return ServerAnswer([token_id], np.zeros(1, dtype=np.float32), [{0: np.log(0.5), 1: np.log(0.3)}], "length")


def test_draws_are_held_to_the_log_probs_that_came_with_them() -> None:
    fair = [drawn(token_id) for token_id in [0] * 50 + [1] * 30 + [2] * 20]
    p_value = draws_p_value(fair)
    assert p_value is not None
    assert p_value > 0.99
    sharper = draws_p_value([drawn(token_id) for token_id in [0] * 85 + [1] * 13 + [2] * 2])
    assert sharper is not None
    assert sharper < 1e-6
    assert draws_p_value(fair[:3]) is None, "too few to tell"
