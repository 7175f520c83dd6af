"""SGLang's own endpoint, `/generate`."""

from typing import Any, ClassVar

from mismatch_probe.engines.server.answers import (
    NEUTRAL,
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


class SglangGenerate(ServerProtocol):
    path: ClassVar[str] = "/generate"
    server: ClassVar[str] = "SGLang"

    def recognises(self, facts: ServerFacts) -> bool:
        """Other servers have an endpoint of this name that takes something else."""
        return "model_path" in facts.model_info

    def software(self, facts: ServerFacts) -> str | None:
        return "SGLang" if self.recognises(facts) else None

    def dtype(self, facts: ServerFacts) -> str | None:
        dtype = facts.server_info.get("dtype")
        return dtype if isinstance(dtype, str) and dtype != "auto" else None

    def body(self, question: Question, model: str) -> dict[str, Any]:
        salt = {} if question.cache_salt is None else {"cache_salt": question.cache_salt}
        return {
            "input_ids": question.prompt_ids,
            "return_logprob": True,
            "logprob_start_len": 0 if question.prefill else -1,
            "top_logprobs_num": question.top,
            "return_text_in_logprobs": False,
            "return_prompt_token_ids": True,
            "stream": False,
            **salt,
            "sampling_params": {
                **NEUTRAL,
                "n": question.count,
                "max_new_tokens": question.max_tokens,
                "min_new_tokens": 0,
                "temperature": question.temperature,
                "top_p": question.top_p,
                "top_k": question.top_k or -1,
                "sampling_seed": question.seed % 2**31,
                "ignore_eos": question.ignore_eos,
                "stop": None,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }

    def answers(self, content: Any) -> list[ServerAnswer]:
        return [_answer_of_content(each) for each in (content if isinstance(content, list) else [content])]


def _answer_of_content(content: Any) -> ServerAnswer:
    meta = member(content, "meta_info", dict)
    token_ids = whole_numbers(member(content, "output_ids", list), "output_ids")
    logprobs = [_entry(entry) for entry in member(meta, "output_token_logprobs", list)]
    if [token_id for _, token_id in logprobs] != token_ids:
        raise NoAnswer("its log-probs are of other tokens than it gives")
    prompt_ids = content.get("prompt_token_ids")
    versions = versions_of(meta.get("weight_versions")) or versions_of([[meta.get("weight_version")]])
    reason = meta.get("finish_reason")
    return ServerAnswer(
        token_ids=token_ids,
        logprobs=as_logprobs([value for value, _ in logprobs]),
        candidates=[
            _candidates_of_pairs([*(top or []), entry])
            for top, entry in zip(
                meta.get("output_top_logprobs") or [None] * len(token_ids), meta["output_token_logprobs"], strict=False
            )
        ],
        finish_reason=str(reason.get("type") if isinstance(reason, dict) else reason),
        prompt_ids=None if prompt_ids is None else whole_numbers(prompt_ids, "prompt_token_ids"),
        prompt_candidates=_prompt(meta),
        versions=versions,
    )


def _prompt(meta: dict[str, Any]) -> list[Candidates | None] | None:
    entries = meta.get("input_token_logprobs")
    if not entries:
        return None
    tops = meta.get("input_top_logprobs") or [None] * len(entries)
    return [
        None if _entry(entry)[0] is None else _candidates_of_pairs([*(top or []), entry])
        for entry, top in zip(entries, tops, strict=True)
    ]


def _entry(entry: Any) -> tuple[Any, int]:
    """A log-prob, which may be null, and its token's id; what stands behind them is text."""
    if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int:
        raise NoAnswer("a log-prob is not written as [log-prob, token id, text]")
    return entry[0], entry[1]


def _candidates_of_pairs(entries: list[Any]) -> Candidates:
    return {token_id: log_prob(value) for value, token_id in map(_entry, entries)}
