"""vLLM's endpoint that takes and gives token ids, served with `--enable-scale-out` or `--tokens-only`."""

from typing import Any, ClassVar

from mismatch_probe.engines.server.answers import (
    Candidates,
    NoAnswer,
    Question,
    ServerAnswer,
    ServerFacts,
    ServerProtocol,
    as_logprobs,
    log_prob,
    member,
    versions_of,
    whole_numbers,
)


class VllmGenerate(ServerProtocol):
    path: ClassVar[str] = "/inference/v1/generate"
    server: ClassVar[str] = "vLLM"

    def software(self, facts: ServerFacts) -> str | None:
        return None if facts.version is None else f"vLLM {facts.version}"

    def dtype(self, facts: ServerFacts) -> str | None:
        """From the text of its configuration, where the server shows it."""
        config = facts.server_info.get("vllm_config")
        if not isinstance(config, str) or "dtype=torch." not in config:
            return None
        return config.partition("dtype=torch.")[2].partition(",")[0]

    def body(self, question: Question, model: str) -> dict[str, Any]:
        salt = {} if question.cache_salt is None else {"cache_salt": question.cache_salt}
        return {
            "model": model,
            "token_ids": question.prompt_ids,
            "return_token_ids": True,
            "stream": False,
            **salt,
            "sampling_params": {
                **question.sampling,
                "bad_words": [],
                "logprobs": question.top + 1,  # the sampled token is one of them
                "prompt_logprobs": 1 if question.prefill else None,
                "detokenize": False,
                "skip_special_tokens": False,
            },
        }

    def answers(self, content: Any) -> list[ServerAnswer]:
        ids = content.get("prompt_token_ids") if isinstance(content, dict) else None
        prompt_ids = None if ids is None else whole_numbers(ids, "prompt_token_ids")
        prompt = prompt_candidates(content.get("prompt_logprobs")) if isinstance(content, dict) else None
        return [_answer_of_scores(choice, prompt_ids, prompt) for choice in member(content, "choices", list)]


def _answer_of_scores(
    choice: Any, prompt_ids: list[int] | None, prompt: list[Candidates | None] | None
) -> ServerAnswer:
    token_ids = whole_numbers(member(choice, "token_ids", list), "token_ids")
    entries = member(member(choice, "logprobs", dict), "content", list)
    if [member(entry, "token_id", int) for entry in entries] != token_ids:
        raise NoAnswer("its log-probs are of other tokens than it gives")
    return ServerAnswer(
        token_ids=token_ids,
        logprobs=as_logprobs([member(entry, "logprob", (int, float, type(None))) for entry in entries]),
        candidates=[
            {
                member(candidate, "token_id", int): log_prob(member(candidate, "logprob", (int, float, type(None))))
                for candidate in member(entry, "top_logprobs", list)
            }
            for entry in entries
        ],
        finish_reason=str(choice.get("finish_reason")),
        prompt_ids=prompt_ids,
        prompt_candidates=prompt,
        versions=versions_of(choice.get("weight_versions")),
    )


def prompt_candidates(entries: Any) -> list[Candidates | None] | None:
    """vLLM's prompt log-probs: null or `{id: {logprob, rank}}` for each token of the prompt.

    Raises:
        NoAnswer: they are written otherwise.
    """
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise NoAnswer("its prompt_logprobs are no list")
    return [None if entry is None else _candidates_of_table(entry) for entry in entries]


def _candidates_of_table(entry: Any) -> Candidates:
    if not isinstance(entry, dict) or not all(key.isdecimal() for key in entry):
        raise NoAnswer("its prompt_logprobs are not by token id")
    return {int(key): log_prob(member(value, "logprob", (int, float, type(None)))) for key, value in entry.items()}
