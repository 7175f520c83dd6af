"""Answers of vLLM's two endpoints that are none are told from those that are, whatever a server writes."""

import copy
from collections.abc import Callable

import numpy as np
import pytest

from mismatch_probe.engines.server.answers import NoAnswer, Question, ServerFacts, ServerProtocol
from mismatch_probe.engines.server.arguments import KEY_VARIABLE, ServerArguments, engine_arguments
from mismatch_probe.engines.server.connection import Connection
from mismatch_probe.engines.server.protocols import PROTOCOLS
from mismatch_probe.engines.server.protocols.completions import Completions
from mismatch_probe.engines.server.protocols.vllm import VllmGenerate
from mismatch_probe.errors import UsageError
from tests.servers.proxy import Json

GENERATED = {
    "prompt_token_ids": [5, 6],
    "prompt_logprobs": [None, {"6": {"logprob": -2.0, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}}],
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [7],
            "weight_versions": [{"version": "step-1", "start": 0, "end": 1}],
            "logprobs": {
                "content": [{"token_id": 7, "logprob": -1.5, "top_logprobs": [{"token_id": 7, "logprob": -1.5}]}]
            },
        }
    ],
}
COMPLETED = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": [7],
            "prompt_token_ids": [5, 6],
            "logprobs": {
                "tokens": ["token_id:7"],
                "token_logprobs": [-1.5],
                "top_logprobs": [{"token_id:7": -1.5, "token_id:9": -0.5}],
            },
        }
    ]
}


def test_an_answer_is_read_whole() -> None:
    [generated] = VllmGenerate().answers(GENERATED)
    assert (generated.token_ids, generated.prompt_ids, generated.versions) == ([7], [5, 6], ("step-1",))
    assert generated.prompt_candidates == [None, {6: -2.0, 9: -0.5}]
    [completed] = Completions().answers(COMPLETED)
    assert completed.candidates == [{7: -1.5, 9: -0.5}]
    assert np.array_equal(generated.logprobs, completed.logprobs)


def test_a_server_that_names_tokens_by_id_alone_needs_no_other_ids() -> None:
    answer = copy.deepcopy(COMPLETED)
    del answer["choices"][0]["token_ids"], answer["choices"][0]["prompt_token_ids"]
    [read] = Completions().answers(answer)
    assert (read.token_ids, read.prompt_ids) == ([7], None)


def test_a_server_is_recognised_by_what_it_reports() -> None:
    sglang = ServerFacts(model={"id": "m"}, model_info={"model_path": "/m"}, server_info={}, version=None)
    vllm = ServerFacts(model={"id": "m"}, model_info={}, server_info={}, version="0.32.0")
    names = {"sglang": sglang, "vllm": vllm}
    recognised = {
        name: {key for key in ("vllm", "sglang", "completions") if PROTOCOLS.built_in[key].recognises(facts)}
        for name, facts in names.items()
    }
    assert recognised == {"sglang": {"vllm", "sglang", "completions"}, "vllm": {"vllm", "completions"}}
    software = {
        name: [words for protocol in PROTOCOLS.built_in.values() if (words := protocol.software(facts))]
        for name, facts in names.items()
    }
    assert software == {"sglang": ["SGLang"], "vllm": ["vLLM 0.32.0"]}


def test_a_protocol_that_nobody_has_is_refused_with_the_names() -> None:
    with pytest.raises(UsageError, match=r"protocol = 'sglan' is none of the known server protocols; .* sglang"):
        engine_arguments({"protocol": "sglan"}, {})


def put(*place: object) -> Callable[[Json], None]:
    *path, last, value = place

    def change(content: Json) -> None:
        for step in path:
            content = content[step]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("protocol", "good", "change", "words"),
    [
        (VllmGenerate(), GENERATED, put("choices", {}), "its choices is no list"),
        (VllmGenerate(), GENERATED, put("choices", 0, "token_ids", ["7"]), "its token_ids are no token ids"),
        (VllmGenerate(), GENERATED, put("choices", 0, "token_ids", [True]), "its token_ids are no token ids"),
        (VllmGenerate(), GENERATED, put("choices", 0, "token_ids", [-1]), "its token_ids are no token ids"),
        (VllmGenerate(), GENERATED, put("choices", 0, "token_ids", [8]), "its log-probs are of other tokens"),
        (VllmGenerate(), GENERATED, put("choices", 0, "logprobs", None), "its logprobs is no dict"),
        (VllmGenerate(), GENERATED, put("prompt_token_ids", "56"), "its prompt_token_ids are no token ids"),
        (VllmGenerate(), GENERATED, put("prompt_logprobs", "x"), "its prompt_logprobs are no list"),
        (VllmGenerate(), GENERATED, put("prompt_logprobs", [{"a": {}}]), "not by token id"),
        (Completions(), COMPLETED, put("choices", 0, "index", None), "its index is no int"),
        (Completions(), COMPLETED, put("choices", 0, "logprobs", "tokens", [" seven"]), "by text and not by id"),
        (Completions(), COMPLETED, put("choices", 0, "logprobs", "token_logprobs", []), "0 log-probs for 1 tokens"),
        (Completions(), COMPLETED, put("choices", 0, "logprobs", "token_logprobs", [True]), "a log-prob is no number"),
        (Completions(), COMPLETED, put("choices", 0, "logprobs", "top_logprobs", [{"x": 1}]), "by text and not by id"),
        (Completions(), COMPLETED, put("choices", 0, "logprobs", "top_logprobs", [5]), "its candidates are no table"),
        (Completions(), COMPLETED, put("choices", 0, "logprobs", "top_logprobs", []), "0 candidates for 1 tokens"),
    ],
)
def test_what_is_no_answer_is_told(
    protocol: ServerProtocol, good: Json, change: Callable[[Json], None], words: str
) -> None:
    content = copy.deepcopy(good)
    change(content)
    with pytest.raises(NoAnswer, match=words):
        protocol.answers(content)


@pytest.mark.parametrize("protocol", [VllmGenerate(), Completions()])
@pytest.mark.parametrize("content", [None, 5, "x", [], {}, {"choices": [None]}, {"choices": ["x"]}])
def test_anything_else_is_no_answer(protocol: ServerProtocol, content: Json) -> None:
    with pytest.raises(NoAnswer):
        protocol.answers(content)


def test_every_sampling_parameter_is_sent_to_completions() -> None:
    body = Completions().body(Question([1, 2], 8, seed=3), "policy")
    assert body == {
        "model": "policy", "prompt": [1, 2], "n": 1, "max_tokens": 8, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "seed": 3, "ignore_eos": False, "stop": [], "stop_token_ids": [], "stream": False, "echo": False, "logprobs": 1,
        "add_special_tokens": False, "skip_special_tokens": False, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    assert Completions().body(Question([1], 1, seed=3, prefill=True), "policy")["prompt_logprobs"] == 1


@pytest.mark.parametrize("key", ["sk-ä", "sk-a\nb", "sk-\x00"])
def test_what_no_key_holds_is_refused_and_not_repeated(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch_probe.engines.server.arguments.os.environ", {KEY_VARIABLE: key})
    with pytest.raises(UsageError, match="holds characters that no key has") as refused:
        Connection(ServerArguments(url="http://host"))
    assert "sk-" not in str(refused.value)
