"""The completions endpoint in OpenAI's form, as vLLM extends it by token ids."""

import re
from typing import Any, ClassVar, Final

from mismatch_probe.engines.server.answers import (
    Candidates,
    NoAnswer,
    Question,
    ServerAnswer,
    ServerProtocol,
    as_logprobs,
    log_prob,
    member,
    whole_numbers,
)
from mismatch_probe.engines.server.protocols.vllm import prompt_candidates

_ID: Final = re.compile(r"token_id:(\d+)")


class Completions(ServerProtocol):
    path: ClassVar[str] = "/v1/completions"
    server: ClassVar[str] = "OpenAI"

    def body(self, question: Question, model: str) -> dict[str, Any]:
        optional: dict[str, Any] = {} if question.cache_salt is None else {"cache_salt": question.cache_salt}
        if question.prefill:
            optional["prompt_logprobs"] = 1
        return {
            **question.sampling,
            **optional,
            "model": model,
            "prompt": question.prompt_ids,
            "stream": False,
            "echo": False,
            "logprobs": question.top,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def answers(self, content: Any) -> list[ServerAnswer]:
        choices: list[Any] = member(content, "choices", list)
        return [
            _answer_of_choice(choice) for choice in sorted(choices, key=lambda choice: member(choice, "index", int))
        ]


def _answer_of_choice(choice: Any) -> ServerAnswer:
    logprobs = member(choice, "logprobs", dict)
    ids_of_names = [_token_id(text) for text in member(logprobs, "tokens", list)]
    token_ids = choice.get("token_ids")
    if token_ids is None:
        token_ids = ids_of_names
    elif whole_numbers(token_ids, "token_ids") != ids_of_names:
        raise NoAnswer("its log-probs are of other tokens than it gives")
    values = member(logprobs, "token_logprobs", list)
    if len(values) != len(token_ids):
        raise NoAnswer(f"it has {len(values)} log-probs for {len(token_ids)} tokens")
    tops = logprobs.get("top_logprobs")
    tops = [None] * len(token_ids) if tops is None else tops
    if not isinstance(tops, list) or len(tops) != len(token_ids):
        raise NoAnswer(
            f"it has {len(tops) if isinstance(tops, list) else 'no list of'} candidates for {len(token_ids)} tokens"
        )
    prompt_ids = choice.get("prompt_token_ids")
    return ServerAnswer(
        token_ids=token_ids,
        logprobs=as_logprobs(values),
        candidates=[
            {token_id: log_prob(value), **_candidates(top)}
            for token_id, value, top in zip(token_ids, values, tops, strict=True)
        ],
        finish_reason=str(choice.get("finish_reason")),
        prompt_ids=None if prompt_ids is None else whole_numbers(prompt_ids, "prompt_token_ids"),
        prompt_candidates=prompt_candidates(choice.get("prompt_logprobs")),
    )


def _token_id(text: Any) -> int:
    match = _ID.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise NoAnswer("it names its tokens by text and not by id")
    return int(match[1])


def _candidates(top: Any) -> Candidates:
    if not isinstance(top, dict | None):
        raise NoAnswer("its candidates are no table")
    return {_token_id(text): log_prob(value) for text, value in (top or {}).items()}
