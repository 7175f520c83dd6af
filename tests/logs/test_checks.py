"""Each check on six real rollouts, sound and with one fault put in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.logs import FORMATS, Level, LogChecks, LogFinding
from mismatch_probe.logs.checks.columns import ResponseBlock
from mismatch_probe.logs.checks.log import Alignment
from mismatch_probe.records.sequences import LoggedResponse

ROLLOUTS = Path(__file__).parent / "data" / "plain" / "rollouts.jsonl"
SURE = -1.0


@pytest.fixture(scope="module")
def sound() -> list[LoggedResponse]:
    return list(FORMATS.built_in["plain"].read(ROLLOUTS, pytest.fail))


def checked(responses: list[LoggedResponse], **options: int) -> LogChecks:
    checks = LogChecks(**options)
    for response in responses:
        checks.add(response)
    return checks


def findings_of(responses: list[LoggedResponse], **options: int) -> dict[str, LogFinding]:
    """What is told beside the counts of tokens, by its code."""
    findings = checked(responses, **options).findings()
    assert len({finding.code for finding in findings}) == len(findings)
    return {finding.code: finding for finding in findings if finding.code != "mask_counts"}


def with_column(responses: list[LoggedResponse], column: str, make: Callable) -> list[LoggedResponse]:
    return [replace(response, **{column: make(response)}) for response in responses]


def at(values: np.ndarray, where: np.ndarray | int, value: float) -> np.ndarray:
    changed = values.copy()
    changed[where] = value
    return changed


def test_a_sound_log_is_only_counted(sound):
    assert findings_of(sound, vocabulary_size=279) == {}
    assert checked(sound).missing_numbers() == {}
    [counts] = checked(sound).findings()
    assert counts.evidence == {"sampled": 90, "not_sampled": 6, "padding": 0}


NOT_RECORDED = {
    "all_zero": lambda response: np.zeros_like(response.log_mu),
    "constant": lambda response: np.full_like(response.log_mu, -5.63),
    "copied": lambda response: response.log_mu,
    "no_numbers": lambda response: np.full_like(response.log_mu, np.nan),
}


@pytest.mark.parametrize("code", NOT_RECORDED)
def test_a_column_without_numbers_is_not_recorded(sound, code):
    faulty = with_column(sound, "log_pi", NOT_RECORDED[code])
    finding = findings_of(faulty)[code]
    assert (finding.level, finding.column) == (Level.MISSING, "log_pi")
    assert list(findings_of(faulty)) == [code], "nothing else is said of such a column"
    unrecorded = checked(faulty).missing_numbers()
    assert unrecorded["log_pi"].code == code
    assert unrecorded["log_pi"].steps is None


@pytest.mark.parametrize("code", NOT_RECORDED)
def test_a_column_without_numbers_in_one_step_is_not_recorded_there(sound, code):
    of_step_2 = [response for response in sound if response.step == 2]
    faulty = [*(each for each in sound if each.step == 1), *with_column(of_step_2, "log_pi", NOT_RECORDED[code])]
    assert list(findings_of(faulty)) == [code]
    assert "in step 2" in findings_of(faulty)[code].sentence
    assert findings_of(faulty)[code].evidence == {"steps": [2]}
    assert checked(faulty).missing_numbers()["log_pi"].steps == {2}


def test_a_sampler_without_numbers_is_not_recorded_either(sound):
    assert list(findings_of(with_column(sound, "log_mu", NOT_RECORDED["all_zero"]))) == ["all_zero"]


def test_an_absent_column_is_no_finding(sound):
    assert findings_of(with_column(sound, "log_pi", lambda response: None)) == {}


@pytest.mark.parametrize(
    ("value", "code", "level"),
    [
        (np.nan, "some_missing", Level.MISSING),
        (-9999.0, "sentinels", Level.MISSING),
        (-np.inf, "sentinels", Level.MISSING),
        (0.5, "wrong_sign", Level.BROKEN),
    ],
)
@pytest.mark.parametrize("column", ["log_mu", "log_pi", "log_ref"])
def test_one_value_that_is_no_log_prob_is_counted(sound, column, value, code, level):
    faulty = [replace(sound[0], **{column: at(getattr(sound[0], column), 4, value)}), *sound[1:]]
    findings = findings_of(faulty)
    assert list(findings) == [code]
    assert (findings[code].level, findings[code].column) == (level, column)
    assert findings[code].evidence == {"tokens": 1, "of": 90}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (np.exp, "are above 0, as probabilities are (log their logarithms), at "),
        (lambda values: 3 - values, "are above 0, as log-probs without their minus sign are (log them with it), at "),
        (lambda values: at(values, 4, 0.5), "are above 0, and no probability is above 1, at 4 of 90"),
    ],
)
def test_a_column_of_the_wrong_sign_says_what_it_looks_like(sound, change, words):
    findings = findings_of(with_column(sound, "log_mu", lambda response: change(response.log_mu)))
    assert words in findings["wrong_sign"].sentence


def test_what_stands_at_a_tools_tokens_is_not_looked_at(sound):
    tool = with_column(sound, "log_pi", lambda each: np.where(each.sampled, each.log_pi, np.nan))
    assert findings_of(tool) == {}


def test_a_log_prob_may_be_rounded_above_zero(sound):
    assert findings_of(with_column(sound, "log_pi", lambda response: at(response.log_pi, 0, 0.125))) == {}


def test_an_entropy_below_zero_is_broken(sound):
    findings = findings_of(with_column(sound, "entropy_nats", lambda response: -response.entropy_nats))
    assert {code: finding.level for code, finding in findings.items()} == {"wrong_sign": Level.BROKEN}


@pytest.mark.parametrize(("column", "other"), [("log_mu", "log_pi"), ("log_pi", "log_mu")])
def test_zeros_that_the_other_side_refutes_were_not_recorded(sound, column, other):
    def zeroed(response: LoggedResponse) -> np.ndarray:
        unsure = np.flatnonzero(response.sampled & (getattr(response, other) < SURE))[:1]
        return at(getattr(response, column), unsure, 0.0)

    findings = findings_of(with_column(sound, column, zeroed))
    assert {code: finding.column for code, finding in findings.items()} == {"zeros_for_missing": column}


def test_zeros_of_certain_tokens_are_log_probs(sound):
    def certain(value: float) -> Callable:
        return lambda response: np.where(response.log_mu > SURE, value, response.log_mu)

    both = with_column(with_column(sound, "log_pi", certain(-1e-7)), "log_mu", certain(0.0))
    nudged = with_column(both, "log_pi", lambda response: response.log_pi - 1e-3)
    assert findings_of(nudged) == {}


def test_zeros_of_a_side_alone_are_doubtful_where_nothing_is_nearly_zero(sound):
    def alone(share: float) -> list[LoggedResponse]:
        many = [replace(each, log_pi=None, log_mu=np.minimum(each.log_mu, -1e-3)) for each in sound] * 20
        rng = np.random.default_rng(0)
        return [
            replace(each, log_mu=np.where(rng.random(each.log_mu.size) < share, 0, each.log_mu), group=str(number))
            for number, each in enumerate(many)
        ]

    assert findings_of(alone(0.02))["zeros_untold"].level == Level.WARNING
    assert "zeros_untold" not in findings_of(alone(0.0))


@pytest.mark.slow
def test_zeros_that_both_sides_have_are_doubtful_where_nothing_is_nearly_zero(sound):
    def stretched(length: int) -> list[LoggedResponse]:
        many = sound * 20
        shown = [np.arange(each.log_mu.size) < length for each in many]
        return [
            replace(
                each,
                log_mu=np.where(zero, 0, np.minimum(each.log_mu, -1e-3)),
                log_pi=np.where(zero, 0, np.minimum(each.log_pi, -1e-3)),
                group=str(number),
            )
            for number, (each, zero) in enumerate(zip(many, shown, strict=True))
        ]

    findings = [each for each in checked(stretched(5)).findings() if each.code == "zeros_untold"]
    assert {(each.column, each.level) for each in findings} == {("log_mu", Level.WARNING), ("log_pi", Level.WARNING)}
    assert all("The other side is exactly 0 there too" in each.sentence for each in findings)
    assert "zeros_untold" not in findings_of(stretched(0))


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_column_shifted_by_a_token_is_broken(sound, shift):
    faulty = with_column(sound, "log_pi", lambda response: np.roll(response.log_pi, shift))
    finding = findings_of(faulty)["shifted"]
    assert finding.level == Level.BROKEN
    assert ("late" in finding.sentence) == (shift == 1)
    correlations = finding.evidence["correlations"]
    assert correlations[str(shift)] > 0.9 > correlations["0"]


def test_one_token_that_is_far_off_leaves_the_sides_related(sound):
    log_pi = sound[0].log_pi.copy()
    log_pi[np.flatnonzero(sound[0].sampled)[3]] = -900.0
    alignment = Alignment()
    alignment.add(ResponseBlock([replace(sound[0], log_pi=log_pi), *sound * 9]))
    assert not alignment.is_unrelated


def test_sides_of_other_rows_are_unrelated(sound):
    def of_another(response: LoggedResponse) -> np.ndarray:
        other = sound[(sound.index(response) + 1) % len(sound)]
        return np.resize(other.log_pi[::-1], response.log_pi.size)

    rows = [replace(each, log_pi=of_another(each)) for each in sound]
    assert list(findings_of(rows)) == ["unrelated"]


def test_rows_that_were_copied_are_told_from_likely_ones(sound):
    unlikely = [each for each in sound if each.log_mu[each.sampled].sum() < -20]
    likely = [each for each in sound if each.log_mu[each.sampled].sum() > -10]
    assert unlikely
    assert likely
    assert findings_of([*sound, *unlikely])["duplicates"].evidence["responses"] == len(unlikely)
    assert findings_of([*sound, *likely]) == {}


def test_ids_outside_the_vocabulary_are_of_another_model(sound):
    finding = findings_of(sound, vocabulary_size=260)["outside_vocabulary"]
    assert finding.level == Level.BROKEN
    assert finding.evidence == {"id": 260, "at": f"line 3 of {ROLLOUTS}", "vocabulary_size": 260}
    assert findings_of(sound, vocabulary_size=261) == {}


def test_masks_are_counted_by_class(sound):
    masked = [replace(sound[0], sampled=np.zeros_like(sound[0].sampled), num_padding=7), *sound[1:]]
    findings = {finding.code: finding for finding in checked(masked).findings()}
    assert findings["mask_counts"].evidence == {"sampled": 67, "not_sampled": 29, "padding": 7}
    assert findings["no_sampled_tokens"].evidence == {"responses": 1, "of": 6}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_under_the_mask_is_seen(sound, side):
    def padded(values: np.ndarray, fill: float) -> np.ndarray:
        padding = np.full(12, fill, values.dtype)
        return np.concatenate([padding, values] if side == "left" else [values, padding])

    fills = {"token_ids": 0, "sampled": True, "log_mu": 0.0, "log_pi": -3.0, "log_ref": -3.0, "entropy_nats": 0.1}
    faulty = [
        replace(each, **{name: padded(getattr(each, name), fill) for name, fill in fills.items()}) for each in sound
    ]
    assert findings_of(faulty)["padding_as_tokens"].evidence == {"responses": 6, "at": sound[0].where}


@pytest.mark.parametrize("is_sure", [True, False])
def test_a_text_that_repeats_itself_is_no_padding_where_the_sampler_has_real_zeros(sound, is_sure):
    """Alone in its nucleus at half of the tokens, then at each of a row; a trainer that is unsure there refutes it."""

    def repeated(each):
        real = np.where(np.arange(each.log_mu.size) % 2, each.log_mu, 0.0)
        pi = np.where(real == 0, -1e-6, each.log_pi)
        row = np.full(12, 0.0)
        return replace(
            each,
            token_ids=np.concatenate([each.token_ids, np.full(12, 7, np.int32)]),
            sampled=np.concatenate([each.sampled, row == 0]),
            log_mu=np.concatenate([real, row]),
            log_pi=np.concatenate([pi, row - (1e-6 if is_sure else 3.0)]),
            log_ref=None,
            entropy_nats=None,
        )

    found_codes = {finding.code for finding in checked([repeated(each) for each in sound]).findings()}
    assert ("padding_as_tokens" in found_codes) != is_sure


def test_checks_of_parts_add_up(sound):
    faulty = [replace(sound[0], log_pi=at(sound[0].log_pi, 4, -9999.0)), *sound[1:], sound[3]]
    complete_checks, parts = checked(faulty, vocabulary_size=260), checked(faulty[:2], vocabulary_size=260)
    parts += checked(faulty[2:5], vocabulary_size=260)
    parts += checked(faulty[5:], vocabulary_size=260)
    assert parts.findings() == complete_checks.findings()
    assert len(complete_checks.findings()) > 2


def test_zeros_of_a_token_alone_in_its_nucleus_are_log_probs(sound):
    """With top-p 0.5 a token of probability 0.5 or more is sampled for certain."""
    alone = with_column(sound, "log_mu", lambda each: np.where(each.log_pi > np.log(0.5), 0, each.log_mu - 0.2))
    assert findings_of(alone) == {}


@pytest.mark.parametrize("column", ["log_pi", "log_ref"])
def test_short_responses_that_copy_the_sampler_are_judged_together(sound, column):
    random = np.random.default_rng(0)
    short = [
        replace(
            sound[0],
            step=None,
            prompt_token_ids=sound[0].prompt_token_ids,
            token_ids=random.integers(3, 60, 8).astype(np.int32),
            sampled=np.ones(8, dtype=np.bool_),
            log_mu=-random.exponential(1.0, 8) - 0.1,
            log_pi=None,
            log_ref=None,
            entropy_nats=None,
        )
        for _ in range(80)
    ]
    computed = with_column(short, column, lambda response: response.log_mu - random.uniform(1e-3, 1e-2, 8))
    copied = with_column(short[:40], column, lambda response: response.log_mu)
    finding = findings_of([*copied, *computed[40:]])["copied_rows"]
    assert (finding.level, finding.column, finding.evidence["responses"]) == (Level.MISSING, column, 40)
    assert "copied_rows" not in findings_of(computed)
    assert "copied_rows" not in findings_of([*copied[:3], *computed])


@pytest.mark.parametrize("column", ["log_pi", "log_ref"])
def test_responses_that_copy_the_sampler_are_told_from_the_others(sound, column):
    long = [
        replace(response, step=None) for response in sound if (response.log_mu[response.sampled] < -1e-3).sum() >= 16
    ] * 4
    copied = with_column(long[: len(long) // 2], column, lambda response: response.log_mu)
    computed = with_column(long[len(long) // 2 :], column, lambda response: response.log_mu - 0.01)
    assert len(copied) > 0
    finding = findings_of([*copied, *computed])["copied_rows"]
    assert (finding.level, finding.column, finding.evidence["responses"]) == (Level.MISSING, column, len(copied))
    assert "copied_rows" not in findings_of(computed)
    parts = checked(copied)
    parts += checked(computed)
    assert parts.copies()[column].count == len(copied)


def answers(sound: list[LoggedResponse], lengths: list[int], digits: int) -> list[LoggedResponse]:
    """Two computations in FP32 of answers of these lengths, rounded to so many decimals."""
    random = np.random.default_rng(5)
    responses = []
    for number, length in enumerate(lengths):
        log_mu = -0.1 - random.exponential(1.0, length)
        sides = (side.round(digits) for side in (log_mu, log_mu + random.normal(0, 10.0 ** -(digits + 1), length)))
        values = dict(zip(("log_mu", "log_pi"), sides, strict=True))
        ids = random.integers(3, 90, length)
        of_row = {"token_ids": ids, "sampled": np.ones(length, dtype=np.bool_), "log_ref": None, "entropy_nats": None}
        responses.append(replace(sound[number % len(sound)], step=None, **of_row, **values))
    return responses


@pytest.mark.parametrize("digits", [2, 4])
def test_short_copies_whose_first_token_was_overwritten_are_none_that_were_computed(
    sound: list[LoggedResponse], digits: int
) -> None:
    copied = with_column(
        [replace(each, log_mu=at(each.log_mu, -1, -1e-4)) for each in answers(sound, [2, 2, 3, 4] * 20, digits)],
        "log_pi",
        lambda each: at(each.log_mu, 0, -0.7),
    ) + with_column(answers(sound, [40] * 20, digits), "log_pi", lambda each: each.log_mu)
    parts = checked(copied[:30])
    parts += checked(copied[30:])
    assert checked(copied).missing_numbers()["log_pi"].code == parts.missing_numbers()["log_pi"].code == "copied"


@pytest.mark.parametrize("digits", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[1], [2], [3], [4], [1, 2, 3, 4]])
def test_short_answers_that_were_computed_are_recorded(
    sound: list[LoggedResponse], lengths: list[int], digits: int
) -> None:
    assert not checked(answers(sound, lengths * 80, digits)).missing_numbers()
    short = answers(sound, [2, 3, 4] * 40, digits)
    far = with_column(short, "log_pi", lambda each: np.minimum(each.log_pi - 0.02 * (1 + each.token_ids % 7), 0))
    long = with_column(answers(sound, [60] * 20, digits), "log_pi", lambda each: each.log_mu)
    checks = checked([*far, *long])
    assert not checks.missing_numbers()
    assert checks.copies()["log_pi"].count == len(long)


@pytest.mark.parametrize("value", [-100.0, -120.0])
def test_what_no_sampler_draws_is_missing_in_every_check(sound, value):
    """It neither hides how the sides go together, nor refutes a zero, nor makes a short answer improbable."""
    response = next(each for each in sound if each.sampled.sum() > 5)
    where = np.flatnonzero(response.sampled)
    faulty = [replace(response, log_mu=at(response.log_mu, where[:2], value)), *sound[1:]]
    assert list(findings_of(faulty)) == ["sentinels"]
    zeroed = at(response.log_pi, where[:3], 0.0)
    placed = at(response.log_mu, where[:3], value)
    assert "zeros_for_missing" not in findings_of([replace(response, log_mu=placed, log_pi=zeroed), *sound[1:]])
    sure = replace(response, log_mu=at(np.full_like(response.log_mu, -1e-3), where[0], value), log_pi=None)
    assert "duplicates" not in findings_of([sure, sure])
