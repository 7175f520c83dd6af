"""SGLang's protocol: written and read as its 0.5.23 does, the tokens and log-probs sampled by a real vLLM.

No SGLang runs on this CPU. The dialect below answers in its schema; what it answers comes from the real server.
"""

from typing import Any

import numpy as np
import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.server.answers import NoAnswer, Question
from mismatch_probe.engines.server.protocols.sglang import SglangGenerate
from mismatch_probe.errors import EngineError
from mismatch_probe.records.sequences import TokenSequence
from tests.servers.asking import MOST_TOKENS, requests, started
from tests.servers.proxy import GENERATE, Json, Proxy, Reply
from tests.servers.real_server import RealServer

PLAIN = SamplingSettings(max_new_tokens=MOST_TOKENS)


class SglangDialect(Proxy):
    """The endpoints of SGLang that are asked, in front of vLLM's."""

    version = "step-7"

    def reply_to(self, method: str, path: str, headers: dict[str, str], body: Json) -> Reply:
        if path == "/model_info":
            return Reply.of({"model_path": "/models/policy", "weight_version": self.version, "is_generation": True})
        if path == "/server_info":
            return Reply.of({"dtype": "auto", "tp_size": 1})
        if path in (GENERATE, "/v1/completions", "/version"):
            return Reply.of({"detail": "Not Found"}, 404)
        if path != "/generate":
            return super().reply_to(method, path, headers, body)
        if "input_ids" not in body:
            return Reply.of({"error": {"message": "Either text, input_ids or input_embeds should be provided."}}, 400)
        reply = super().reply_to(method, GENERATE, headers, as_vllm_is_asked(body))
        if reply.status != 200:
            return reply
        answers = [self.as_sglang_answers(body, reply.json, choice) for choice in reply.json["choices"]]
        return Reply.of(answers if len(answers) > 1 else answers[0])

    def as_sglang_answers(self, question: Json, content: Json, choice: Json) -> Json:
        entries = choice["logprobs"]["content"]
        meta = {
            "id": content["request_id"],
            "finish_reason": {"type": choice["finish_reason"]},
            "prompt_tokens": len(question["input_ids"]),
            "weight_version": self.version,
            "cached_tokens": 0,
            "output_token_logprobs": [[entry["logprob"], entry["token_id"], None] for entry in entries],
            "output_top_logprobs": [
                [[top["logprob"], top["token_id"], None] for top in entry["top_logprobs"]] for entry in entries
            ],
        }
        if content["prompt_logprobs"] is not None:
            scored = list(zip(question["input_ids"], content["prompt_logprobs"], strict=True))
            meta["input_token_logprobs"] = [
                [None if entry is None else entry[str(token_id)]["logprob"], token_id, None]
                for token_id, entry in scored
            ]
            meta["input_top_logprobs"] = [
                None if entry is None else [[value["logprob"], int(name), None] for name, value in entry.items()]
                for _, entry in scored
            ]
        return {
            "text": "",
            "output_ids": choice["token_ids"],
            "meta_info": meta,
            "prompt_token_ids": question["input_ids"],
        }


def as_vllm_is_asked(body: Json) -> Json:
    params = body["sampling_params"]
    return {
        "token_ids": body["input_ids"],
        "cache_salt": body.get("cache_salt"),
        "sampling_params": {
            **{
                name: params[name]
                for name in ("n", "temperature", "top_p", "min_p", "ignore_eos", "repetition_penalty")
            },
            "top_k": max(0, params["top_k"]),
            "max_tokens": params["max_new_tokens"],
            "seed": params["sampling_seed"],
            "logprobs": body["top_logprobs_num"] + 1,
            "prompt_logprobs": 1 if body["logprob_start_len"] == 0 else None,
        },
    }


@pytest.mark.slow
def test_the_same_server_says_the_same_in_sglangs_words(vllm: RealServer) -> None:
    with (
        SglangDialect(vllm.url) as proxy,
        started(proxy.url, prefill=True, concurrency=1) as sglang,
        started(vllm.url, concurrency=1) as plain,
    ):
        applied = sglang.effective_settings()
        assert (applied["software"], applied["protocol"]) == ("SGLang", "/generate")
        assert (applied["model_root"], applied["dtype_known_from"]) == ("/models/policy", "the side's own words")
        assert (applied["weight_version"], applied["weights_are_labelled"]) == ("step-7", True)
        assert (applied["asked"]["log_probs"], applied["asked"]["echoes_prompt_ids"]) == ("before temperature", True)
        ours, theirs = (engine.sample(requests(), PLAIN) for engine in (sglang, plain))
        for one, other in zip(ours, theirs, strict=True):
            assert one.sequence == other.sequence
            assert np.array_equal(one.scores.logprobs, other.scores.logprobs)
            assert np.array_equal(one.scores.top1_ids, other.scores.top1_ids)  # type: ignore[arg-type]
        scored = sglang.replay([one.sequence for one in ours])
        assert all(
            np.allclose(by_prefill.logprobs, one.scores.logprobs, atol=0.1)
            for by_prefill, one in zip(scored, ours, strict=True)
        )
        proxy.version = "step-8"
        with pytest.raises(EngineError, match="changed its weights from step-7 to step-8 while it was measured"):
            sglang.sample(requests(1), PLAIN)


def test_every_sampling_parameter_is_sent_in_sglangs_names() -> None:
    body = SglangGenerate().body(Question([1, 2], 8, seed=2**31 + 5, top_k=0), "policy")
    assert body["sampling_params"] == {
        "n": 1, "max_new_tokens": 8, "min_new_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "sampling_seed": 5,
        "ignore_eos": False, "stop": None, "stop_token_ids": [], "skip_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    assert (body["logprob_start_len"], body["return_logprob"]) == (-1, True)


def answer(**meta: Any) -> Json:
    complete_answer = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.5, 7, None], [-9999.0, 9, None]],
    }
    return {"text": "x", "output_ids": [7, 9], "meta_info": {**complete_answer, **meta}}


def test_an_answer_without_what_is_newer_is_read() -> None:
    [read] = SglangGenerate().answers(answer())
    assert (read.token_ids, read.finish_reason, read.versions, read.prompt_ids) == ([7, 9], "stop", (), None)
    assert np.array_equal(read.logprobs, np.asarray([-0.5, np.nan], dtype=np.float32), equal_nan=True)


@pytest.mark.parametrize("spans", [[["a", 0, 1], ["b", 1, 2]], [{"version": "a"}, {"version": "b"}]])
def test_spans_of_weight_versions_are_read_as_lists_and_as_tables(spans: Json) -> None:
    [read] = SglangGenerate().answers(answer(weight_version="b", weight_versions=spans))
    assert read.versions == ("a", "b")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"text": "x"}, "it has no meta_info"),
        ({"meta_info": {}, "output_ids": [1]}, "it has no output_token_logprobs"),
        (answer(output_token_logprobs=[[-0.5, 8, None], [-0.1, 9, None]]), "of other tokens than it gives"),
        (answer(output_token_logprobs=[[-0.5, "7"], [-0.1, 9]]), "not written as"),
        ("x", "it has no meta_info"),
    ],
)
def test_what_is_no_answer_of_sglang_is_told(content: Json, words: str) -> None:
    with pytest.raises(NoAnswer, match=words):
        SglangGenerate().answers(content)


def test_a_prompts_first_token_has_no_log_prob() -> None:
    listed = [[None, 1, None], [-0.2, 2, None]]
    [read] = SglangGenerate().answers(answer(input_token_logprobs=listed))
    assert read.prompt_candidates == [None, {2: -0.2}]
    assert TokenSequence("a", [1], [2]).num_tokens == len(read.prompt_candidates)
