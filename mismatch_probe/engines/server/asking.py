"""What a server can do and ran with, learned by a few tiny requests."""

import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from scipy.special import chdtrc

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.server.answers import Question, ServerAnswer
from mismatch_probe.engines.server.client import Client, Contact
from mismatch_probe.engines.server.connection import Refused
from mismatch_probe.errors import EngineError, UsageError

_LEAST_EXPECTED: Final = 5.0
"""Draws in a group, below which the chi-square distribution does not hold."""


def draws_p_value(answers: Sequence[ServerAnswer]) -> float | None:
    """The p-value (chi-square) of the first tokens of `answers`, independent draws behind one prompt, under the
    candidates' log-probs, all other tokens in one group; None where too few groups are likely enough.
    """
    log_probs: dict[int, float] = {}
    for answer in answers:
        log_probs |= answer.candidates[0] if answer.candidates else {}
    draw_counts = Counter(answer.token_ids[0] for answer in answers if answer.token_ids)
    most_likely = sorted(log_probs, key=lambda token_id: log_probs[token_id], reverse=True)
    ids_of_candidates = {
        token_id for answer in answers for token_id in (answer.candidates[0] if answer.candidates else {})
    }
    draws = sum(draw_counts.values())
    ids = [
        token_id
        for token_id in most_likely
        if token_id in ids_of_candidates and draws * np.exp(log_probs[token_id]) >= _LEAST_EXPECTED
    ]
    expected_counts = [draws * float(np.exp(log_probs[token_id])) for token_id in ids]
    observed_counts = [draw_counts[token_id] for token_id in ids]
    rest = draws - sum(expected_counts)
    if rest >= _LEAST_EXPECTED:
        expected_counts, observed_counts = [*expected_counts, rest], [*observed_counts, draws - sum(observed_counts)]
    if len(expected_counts) < 2:
        return None
    scale = sum(observed_counts) / sum(expected_counts)
    due = scale * np.array(expected_counts)
    return float(chdtrc(len(expected_counts) - 1, np.sum((np.array(observed_counts) - due) ** 2 / due)))


UNLABELLED: Final = "default"
"""What vLLM and SGLang call weights that nobody has given a version."""

_PROMPT_TOKENS: Final = 160
"""More than a block of any prefix cache that is known, 128 tokens at most."""
_RESPONSE_TOKENS: Final = 8
_CROWD: Final = 16
"""Requests at once, where as many are to be in flight; every other one asks the same."""
_AGAIN: Final = 7
"""Times that one question is asked again, each over whichever replica a balancer chooses."""
_DRAWS: Final = (16, 16)
"""Requests, and responses to each: a server takes no more in one than it computes at once."""
_SHARES: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)
"""Of the made-up prompt, where a token is looked for that the model is not sure of."""
_TOP: Final = 5
_SEED: Final = 20260101
_LEAST_CHANGE: Final = 0.02
"""Nats by which half the temperature moves the log-prob of a likely token at least, where it is one after temperature;
rounding moves it less.
"""
_TOO_SURE: Final = 0.95
"""A token that is likelier than this is nearly as likely at any temperature."""


_RECORDED_NAMES: Final = {"draws_p_value": "sampled_as_said", "when_repeated": "again"}


@dataclass(frozen=True)
class ServerFindings:
    """What the requests showed; None where they did not show it."""

    echoes_prompt_ids: bool
    """Whether its answers have the prompt's ids, which can then be checked."""
    log_probs: str | None
    """`before temperature` or `after temperature`."""
    when_repeated: float | None
    """How far (nats) the log-probs of one response move when it is asked for again, at most of a few tries; 0 means the
    same bits.
    """
    in_a_crowd: float | None
    """The same among other requests."""
    behind_the_cache: float | None
    """The same where its prompt is cached."""
    same_tokens: bool
    """Whether one seed gives the same tokens each time."""
    refuses_unknown_ids: bool | None
    """Whether it refuses the first token id that the checkpoint does not have."""
    weight_version: str | None
    """What it labels its weights with."""
    draws_p_value: float | None
    """Of many draws of one token under the log-probs that it gives, where those are of what is sampled from."""
    processes: int | None = None
    """How many answer at the address, where they report when they were started."""

    @property
    def own_noise(self) -> float:
        """Nats by which one log-prob of this server moves when nothing changes that should matter."""
        return max(
            value for value in (0.0, self.when_repeated, self.in_a_crowd, self.behind_the_cache) if value is not None
        )

    def to_json(self) -> dict[str, Any]:
        """As a run records them, under the keys that they have had from the beginning."""
        return {_RECORDED_NAMES.get(name, name): value for name, value in asdict(self).items()}


def made_up_prompt(vocabulary: int, longest: int) -> list[int]:
    """Token ids that any checkpoint of this vocabulary knows, and that no cache holds but for this."""
    length = max(1, min(_PROMPT_TOKENS, longest // 2))
    return [(7 * place + place * place) % vocabulary for place in range(1, length + 1)]


def find_out(
    client: Client, sampling: SamplingSettings, prompt: list[int], vocabulary: int, processes: int | None = None
) -> ServerFindings:
    """Ask; `prompt` as `made_up_prompt` makes it, `processes` as `count_processes` counts them."""
    room = max(1, min(_RESPONSE_TOKENS, client.longest - len(prompt) - 1))
    question = Question(prompt, room, _SEED, ignore_eos=True, top=_TOP)
    question_with_salt = Question(prompt, room, _SEED, ignore_eos=True, top=_TOP, cache_salt=_fresh())
    takes_salt, first = _first_answer(client, question_with_salt, question)
    repeats = [client.ask(_salt(question) if takes_salt else question) for _ in range(_AGAIN)]
    warm = [client.ask(question) for _ in range(2)]
    in_flight = min(_CROWD, client.concurrency)
    crowd = client.ask_all([_other(question, number) if number % 2 else question for number in range(in_flight)])[::2]
    uncertain = _uncertain(client, prompt)
    log_probs = _log_probs(client, uncertain)
    is_raw = log_probs == "before temperature" and sampling.temperature != 1
    versions = [version for answer in (first, *repeats, *warm, *crowd) for version in answer.versions]
    return ServerFindings(
        echoes_prompt_ids=first.prompt_ids is not None,
        log_probs=log_probs,
        when_repeated=_largest_change_of_any(first if takes_salt else repeats[0], repeats),
        in_a_crowd=_largest_change_of_any(warm[1], crowd) if in_flight > 1 else None,
        behind_the_cache=_largest_change(first, warm[1]) if takes_salt else None,
        same_tokens=all(answer.token_ids == first.token_ids for answer in (*repeats, *warm, *crowd)),
        refuses_unknown_ids=_refuses(client, prompt, vocabulary),
        weight_version=versions[-1] if versions else None,
        draws_p_value=None if is_raw else _draws(client, sampling, uncertain),
        processes=processes,
    )


def _first_answer(client: Client, with_salt: Question, plain: Question) -> tuple[bool, ServerAnswer]:
    """Whether a cache salt is taken, and the first answer; a server that refuses one is asked without."""
    try:
        return True, client.ask(with_salt)
    except Refused:
        return False, client.ask(plain)


def _salt(question: Question) -> Question:
    return Question(
        question.prompt_ids, question.max_tokens, question.seed, ignore_eos=True, top=_TOP, cache_salt=_fresh()
    )


def _fresh() -> str:
    return secrets.token_hex(16)


def _other(question: Question, number: int) -> Question:
    """Another prompt of another length, so that a batch is not of one shape."""
    ids = question.prompt_ids
    return Question([*ids[number:], ids[0]][: max(1, len(ids) - number)], question.max_tokens, number, ignore_eos=True)


def _largest_change_of_any(first: ServerAnswer, others: Sequence[ServerAnswer]) -> float | None:
    """The largest of `_largest_change`; None where no pair has one."""
    return max((change for other in others if (change := _largest_change(first, other)) is not None), default=None)


def _largest_change(first: ServerAnswer, second: ServerAnswer) -> float | None:
    """The largest difference (nats) on the tokens that both begin with and the one behind them that both name."""
    same = 0
    while same < min(len(first.token_ids), len(second.token_ids)) and first.token_ids[same] == second.token_ids[same]:
        same += 1
    parts = [np.abs(first.logprobs[:same] - second.logprobs[:same]).tolist()]
    for mine, its in zip(first.candidates[: same + 1], second.candidates[: same + 1], strict=False):
        parts.append([abs(mine[token_id] - its[token_id]) for token_id in mine.keys() & its.keys()])
    values = [value for part in parts for value in part if np.isfinite(value)]
    return float(max(values)) if values else None


def _uncertain(client: Client, prompt: list[int]) -> list[int]:
    """Of a few beginnings of the prompt the one behind which the likeliest token is the least likely."""
    lengths = sorted({max(1, round(len(prompt) * share)) for share in _SHARES})
    beginnings = [prompt[:length] for length in lengths]
    answers = client.ask_all([Question(ids, 1, _SEED, ignore_eos=True, top=_TOP) for ids in beginnings])
    likeliest = [np.nanmax([*answer.candidates[0].values(), -np.inf]) for answer in answers]
    return beginnings[int(np.argmin(likeliest))]


def _log_probs(client: Client, prompt: list[int]) -> str | None:
    """From one token's log-prob at two temperatures: the likeliest one, which is the likeliest at any."""
    full, half = client.ask_all(
        [Question(prompt, 1, _SEED, temperature, ignore_eos=True, top=_TOP) for temperature in (1.0, 0.5)]
    )
    first, second = full.candidates[0], half.candidates[0]
    best = max(first, key=lambda token_id: first[token_id], default=None)
    if best is None or best not in second or not np.isfinite([first[best], second[best]]).all():
        return None
    if abs(second[best] - first[best]) > _LEAST_CHANGE:
        return "after temperature"
    return "before temperature" if np.exp(first[best]) < _TOO_SURE else None


def _refuses(client: Client, prompt: list[int], vocabulary: int) -> bool | None:
    """Whether the first id beyond the checkpoint's vocabulary is beyond the server's too."""
    try:
        client.ask(Question([*prompt[:4], vocabulary], 1, _SEED))
    except Refused:
        return True
    except EngineError:
        return None
    return False


def _draws(client: Client, sampling: SamplingSettings, prompt: list[int]) -> float | None:
    if sampling.top_p != 1 or sampling.top_k:
        return None
    requests, count = _DRAWS
    questions = [
        Question(prompt, 1, _SEED + count * number, sampling.temperature, ignore_eos=True, top=_TOP, count=count)
        for number in range(requests)
    ]
    try:
        answers = client.ask_for_several(questions)
    except Refused:
        return None
    return draws_p_value(answers)


def effective_settings(
    dtype: Dtype,
    engine: EngineSettings,
    sampling: SamplingSettings,
    contact: Contact,
    findings: ServerFindings,
    standing: dict[str, float],
    *,
    says_what_it_holds: bool | None,
) -> dict[str, Any]:
    """Plain JSON values. `asked` and `standing_answer` are measured anew by each process. says_what_it_holds: whether a
    server that is sent weights says the digests of those that it holds; None of one that is not sent any.
    """
    full_support = sampling.top_p == 1.0 and sampling.top_k == 0
    is_whole = full_support and sampling.temperature == 1.0
    dtype_of_server = _dtype_of_text(contact.dtype)
    mode = {"before temperature": "raw_logprobs", "after temperature": "processed_logprobs"}.get(
        findings.log_probs or ""
    )
    return {
        "engine": "server",
        "url": engine.args["url"],
        "software": contact.software,
        "protocol": contact.protocol.path,
        "model": contact.model,
        "model_root": contact.root,
        "max_model_len": contact.max_model_len,
        "dtype": dtype_of_server or dtype,
        "dtype_known_from": "the server" if dtype_of_server else "the side's own words",
        "weight_version": findings.weight_version,
        "weights_are_labelled": findings.weight_version not in (None, UNLABELLED),
        "logprobs_mode": None if is_whole else mode,
        "decode_support": "full vocabulary" if full_support else "kept by top_p and top_k, renormalised",
        "replay_support": "full vocabulary" if engine.prefill else None,
        "replay_temperature": sampling.temperature,
        "prefill": engine.prefill,
        "prefix_caching": engine.prefix_caching,
        "adapter": engine.adapter,
        "transfer": engine.args.get("transfer"),
        "says_what_it_holds": says_what_it_holds,
        "asked": findings.to_json(),
        "standing_answer": standing,
    }


def _dtype_of_text(text: str | None) -> Dtype | None:
    with suppress(UsageError):
        return None if text is None else Dtype.parse(text)
    return None
