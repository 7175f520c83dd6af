"""Columns of a log that are in no nats, or of no vocabulary, are warned of; sound ones are not."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.logs import Level, LogChecks
from mismatch_probe.records.sequences import LoggedResponse

VOCABULARY = 32


def responses(temperature: float = 1.0, count: int = 40, length: int = 60) -> list[LoggedResponse]:
    """Of a policy whose tokens are drawn at a temperature; its log-probs are at 1."""
    rng = np.random.default_rng(0)
    logits = np.exp(rng.normal(1, 1, (count, length, 1))) * rng.standard_normal((count, length, VOCABULARY))
    log_p, log_q = (
        scaled - np.logaddexp.reduce(scaled, -1, keepdims=True) for scaled in (logits, logits / temperature)
    )
    tokens = (np.exp(log_q).cumsum(-1) > rng.random((count, length, 1))).argmax(-1)
    log_pi = np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
    log_mu = np.minimum(log_pi + 0.01 * rng.standard_normal(log_pi.shape), 0)
    entropy = -(np.exp(log_p) * log_p).sum(-1)
    return [
        LoggedResponse(
            where=f"line {row}",
            prompt_token_ids=np.array([1, row % VOCABULARY], np.int32),
            token_ids=tokens[row].astype(np.int32),
            sampled=np.ones(length, np.bool_),
            log_mu=log_mu[row],
            log_pi=log_pi[row],
            entropy_nats=entropy[row],
        )
        for row in range(count)
    ]


def codes_of(given: list[LoggedResponse], vocabulary_size: int | None = None) -> dict[str, str | None]:
    """Codes of warnings and worse, and their columns; by parts that are added up."""
    complete_checks = LogChecks(vocabulary_size)
    for start in (0, len(given) // 2):
        part = LogChecks(vocabulary_size)
        for response in given[start : start + (len(given) // 2 if start == 0 else len(given))]:
            part.add(response)
        complete_checks += part
    return {
        str(finding.code): finding.column for finding in complete_checks.findings() if finding.level is not Level.NOTE
    }


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.0])
def test_entropies_in_nats_are_told_nothing_of(temperature: float) -> None:
    assert codes_of(responses(temperature), VOCABULARY) == {}


def test_sides_of_other_distributions_say_nothing_of_the_unit_of_entropies() -> None:
    """Tokens of an engine at 0.7 fit entropies in bits where few are unsure: the log of the examples did."""
    bits = [replace(each, entropy_nats=each.entropy_nats / math.log(2)) for each in responses()]
    assert codes_of(bits) == {"other_base": "entropy_nats"}
    assert codes_of([replace(each, log_mu=1.4 * each.log_mu) for each in bits]) == {}


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize(
    ("columns", "column"),
    [
        (["entropy_nats"], "entropy_nats"),
        (["log_pi"], "log_pi"),
        (["log_mu"], "log_mu"),
        (["log_pi", "log_mu"], None),
        (["log_pi", "entropy_nats"], "log_pi"),
    ],
)
def test_columns_in_another_base_are_warned_of(base: int, columns: list[str], column: str | None) -> None:
    given = [replace(each, **{name: getattr(each, name) / math.log(base) for name in columns}) for each in responses()]
    assert codes_of(given) == {"other_base": column}


def test_entropies_that_no_vocabulary_of_this_size_has_are_warned_of() -> None:
    in_bits = [replace(each, entropy_nats=each.entropy_nats / math.log(2)) for each in responses()]
    assert codes_of(in_bits, VOCABULARY) == {"beyond_vocabulary": "entropy_nats"}
    summed = [replace(each, entropy_nats=np.cumsum(each.entropy_nats)) for each in responses()]
    assert codes_of(summed)["beyond_vocabulary"] == "entropy_nats"


@pytest.mark.parametrize(("nats", "vocabulary_size"), [(5.0, VOCABULARY), (16.0, None)])
def test_log_probs_that_no_drawn_tokens_have_are_warned_of(nats: float, vocabulary_size: int | None) -> None:
    low = [replace(each, log_mu=each.log_mu - nats, log_pi=each.log_pi - nats) for each in responses()]
    assert codes_of(low, vocabulary_size)["beyond_vocabulary"] in ("log_mu", "entropy_nats")
    assert "beyond_vocabulary" not in codes_of(responses(), vocabulary_size)


def test_a_log_whose_masks_leave_nothing_of_half_of_it_is_warned_of() -> None:
    given = responses()
    masked = [replace(each, sampled=np.zeros_like(each.sampled)) for each in given[:20]]
    assert "no_sampled_tokens" in codes_of([*masked, *given[20:]])
    assert "no_sampled_tokens" not in codes_of([*masked[:5], *given[5:]])
