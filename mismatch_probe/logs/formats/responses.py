"""What inference servers answer, one answer a line: the OpenAI form of vLLM and others, and SGLang's `/generate`.

A line may be the answer itself, or hold it as batch files do (`response.body`). The prompt's ids must stand in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import FileLook
from mismatch_probe.logs.recorded_choices import flat_experts, kept_sets, routed_experts
from mismatch_probe.logs.row import Row, Tell, read_lines
from mismatch_probe.logs.weight_versions import Spans, version_of, weight_spans
from mismatch_probe.records.sequences import FloatArray, IntArray, KeptSets, LoggedResponse

_PROMPT: Final = ("prompt_token_ids", "input_ids")
_OUTPUT: Final = "output_token_logprobs"
_SETS: Final = "output_token_sampling_mask"
_IN_SETS: Final = "output_token_sampling_logprobs"
_NAMED_BY_ID: Final = "token_id:"


def _is_openai(look: FileLook) -> bool:
    """Chats, completions and batch files, and vLLM's `/inference/v1/generate`, which has no `object`."""
    is_answer = look.lines_with("object", "choices") or look.lines_with("request_id", "choices")
    return is_answer or look.objects_with("response", "body")


def _answers(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for line in read_lines(path, tell):
        if line.has("error"):
            continue
        answer = line.inside("response").inside("body") if line.has("response") else line
        for choice in answer.rows("choices"):
            token_ids, log_probs, kept = _choice_of(choice)
            spans = _spans((choice, _metadata(answer), answer, line), token_ids.size)
            yield LoggedResponse(
                where=line.where,
                prompt_token_ids=_prompt(choice, answer, line, advice="ask with return_token_ids"),
                token_ids=token_ids,
                sampled=np.ones(token_ids.size, np.bool_),
                log_mu=log_probs,
                step=line.integer("step"),
                weight_version=line.text("weight_version") or version_of(spans),
                weight_spans=spans,
                temperature=line.number("temperature"),
                group=answer.text("id") or answer.text("request_id"),
                trajectory=line.text("trajectory"),
                model=answer.text("model"),
                finish_reason=choice.text("finish_reason"),
                experts=routed_experts(choice, "routed_experts"),
                kept=kept_sets(choice, "sampling_mask") if kept is None else kept,
            )


def _choice_of(choice: Row) -> tuple[IntArray, FloatArray | None, KeptSets | None]:
    """The ids and log-probs of a choice, and the sets that SGLang writes. Where `token_ids` is absent, SGLang's
    `meta_info` has them, or tokens that are named by their ids.
    """
    if isinstance(choice.columns.get("meta_info"), Mapping) and choice.inside("meta_info").has(_OUTPUT):
        return _of_metadata(choice.inside("meta_info"))
    names: list[Any] | None = None
    log_probs: Any = None
    if choice.has("logprobs"):
        logprobs = choice.inside("logprobs")
        if logprobs.has("content"):
            tokens = logprobs.rows("content")
            names = [token.columns.get("token") for token in tokens]
            log_probs = [token.columns.get("logprob") for token in tokens]
        else:
            names, log_probs = logprobs.columns.get("tokens"), logprobs.columns.get("token_logprobs")
    if choice.has("token_ids"):
        token_ids = choice.ids("token_ids")
    else:
        token_ids = Row(choice.where, {"token_ids": _ids_in(choice, names)}).ids("token_ids")
    row = Row(choice.where, {"logprobs": log_probs})
    return token_ids, row.optional_numbers("logprobs", token_ids.size), None


def _metadata(answer: Row) -> Row:
    """What SGLang's OpenAI form adds to an answer."""
    return answer.inside("metadata") if isinstance(answer.columns.get("metadata"), Mapping) else answer


def _spans(places: Sequence[Row], num_tokens: int) -> Spans | None:
    """Those of the choice, of the answer or its metadata (SGLang), or of the line."""
    of_places = (weight_spans(place, "weight_versions", num_tokens) for place in places)
    return next((spans for spans in of_places if spans is not None), None)


def _ids_in(choice: Row, names: Any) -> list[int]:
    if not isinstance(names, list) or not all(_is_id(name) for name in names):
        raise choice.refusal("it has no token ids; ask the server for them with return_token_ids")
    return [int(name.removeprefix(_NAMED_BY_ID)) for name in names]


def _is_id(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(_NAMED_BY_ID) and name[len(_NAMED_BY_ID) :].isdecimal()


def _prompt(*places: Row, advice: str) -> IntArray:
    for row in places:
        for column in _PROMPT:
            if row.has(column):
                return row.ids(column)
    raise places[0].refusal(f"it has no ids of the prompt ({' or '.join(_PROMPT)}); {advice}")


def _generations(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    sizes: dict[int, int] = {}
    for row in read_lines(path, tell):
        meta = row.inside("meta_info")
        token_ids, log_probs, kept = _of_metadata(meta)
        if row.has("output_ids") and not np.array_equal(row.ids("output_ids"), token_ids):
            raise row.refusal("output_ids are others than those of output_token_logprobs")
        finish = meta.columns.get("finish_reason")
        spans = weight_spans(meta, "weight_versions", token_ids.size)
        prompt = _prompt_of_generate(row, meta)
        yield LoggedResponse(
            where=row.where,
            prompt_token_ids=prompt,
            token_ids=token_ids,
            sampled=np.ones(token_ids.size, np.bool_),
            log_mu=log_probs,
            step=row.integer("step"),
            weight_version=version_of(spans, meta.text("weight_version")),
            weight_spans=spans,
            temperature=row.number("temperature"),
            trajectory=row.text("trajectory"),
            finish_reason=str(finish["type"]) if isinstance(finish, dict) and "type" in finish else None,
            experts=flat_experts(meta, "routed_experts", prompt.size + token_ids.size, sizes),
            kept=kept,
        )


def _of_metadata(meta: Row) -> tuple[IntArray, FloatArray, KeptSets | None]:
    """The ids and log-probs of SGLang's `meta_info`, and the sets that tokens were drawn from."""
    token_ids, log_probs = _pairs(meta, _OUTPUT)
    kept, of_sets = _sampling_sets(meta, token_ids)
    return token_ids, log_probs if of_sets is None else of_sets, kept


def _sampling_sets(meta: Row, token_ids: IntArray) -> tuple[KeptSets | None, FloatArray | None]:
    """The sets that tokens were drawn from (`return_sampling_mask`), and the tokens' log-probs within them, which are
    those of the law that was sampled. A log-prob a token, or in `support` mode one of each id in its set.

    Raises:
        UsageError: they are of other tokens.
    """
    kept = kept_sets(meta, _SETS)
    if kept is None:
        return None, None
    if kept.ends.size != token_ids.size:
        raise meta.refusal(f"{_SETS} has sets of {kept.ends.size} tokens where there are {token_ids.size}")
    values = meta.columns.get(_IN_SETS)
    if not isinstance(values, list) or not any(isinstance(value, list) for value in values):
        return kept, meta.optional_numbers(_IN_SETS, token_ids.size)
    if not all(isinstance(value, list) for value in values):
        raise meta.refusal(f"{_IN_SETS} has a list for some tokens and a number for others")
    of_ids = Row(meta.where, {_IN_SETS: [*chain.from_iterable(values)]}).numbers(_IN_SETS, kept.ids.size)
    if [len(value) for value in values] != kept.sizes.tolist():
        raise meta.refusal(f"{_IN_SETS} has other lengths than {_SETS}")
    log_probs = np.full(token_ids.size, np.nan)
    is_own = kept.ids == np.repeat(token_ids, kept.sizes)
    log_probs[np.repeat(np.arange(token_ids.size), kept.sizes)[is_own]] = of_ids[is_own]
    return KeptSets(kept.ids, kept.ends, of_ids), log_probs


def _prompt_of_generate(row: Row, meta: Row) -> IntArray:
    if meta.has("input_token_logprobs"):
        token_ids, _ = _pairs(meta, "input_token_logprobs")
        if meta.integer("prompt_tokens") in (None, token_ids.size):
            return token_ids
    return _prompt(
        row, advice="ask with return_logprob and logprob_start_len 0, or write the ids you sent into the line"
    )


def _pairs(row: Row, column: str) -> tuple[IntArray, FloatArray]:
    """Ids and log-probs of a list of `[log-prob, id, text]` or `[log-prob, id]`; the first may have no log-prob."""
    values = row.columns.get(column)
    if not isinstance(values, list) or not all(isinstance(item, Sequence) and len(item) in (2, 3) for item in values):
        raise row.refusal(f"{column} is no list of [log-prob, id, text] or [log-prob, id]")
    row_of_pairs = Row(row.where, {"ids": [item[1] for item in values], column: [item[0] for item in values]})
    return row_of_pairs.ids("ids"), row_of_pairs.numbers(column, len(values))


VLLM_RESPONSES: Final = Format(
    name="vllm_responses",
    title="answers of a server in the OpenAI form",
    holds=Holds.SAMPLER,
    fits=_is_openai,
    responses=_answers,
    step_of=lambda path: None,
)
SGLANG_RESPONSES: Final = Format(
    name="sglang_responses",
    title="answers of SGLang's /generate",
    holds=Holds.SAMPLER,
    fits=lambda look: look.objects_with("meta_info", _OUTPUT),
    responses=_generations,
    step_of=lambda path: None,
)
