"""The experts and the sets that a log records: what is wrong is named with its place, and sound logs accuse nobody."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.logs import LogChecks
from mismatch_probe.logs.choices import ChoiceChecks, ExpertLayout
from mismatch_probe.logs.kept_sets import KeptChecks
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.records.sequences import KeptSets, LoggedResponse
from tests.logs.choices import NUM_EXPERTS, shifted_rows, shifted_sets, with_experts, with_sets


def checks_of(log: Sequence[LoggedResponse], layout: ExpertLayout | None = None) -> ChoiceChecks:
    checks = ChoiceChecks(layout)
    for response in log:
        checks.add(response)
    return checks


def findings_of(log: Sequence[LoggedResponse], layout: ExpertLayout | None = None) -> dict[str, LogFinding]:
    return {str(finding.code): finding for finding in checks_of(log, layout).findings()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dense", [0, 2])
@pytest.mark.parametrize("chosen", [1, 2, 8])
def test_sound_experts_accuse_nobody_and_are_covered(seed: int, dense: int, chosen: int) -> None:
    log = with_experts(seed, responses=8, dense=dense, chosen=chosen, layers=5)
    if seed % 2:  # a row for the last token too, which no pass computes
        log = [
            replace(each, experts=np.concatenate([each.experts, np.zeros_like(each.experts[:1])]))
            for each in log
            if each.experts is not None
        ]
    assert findings_of(log).keys() == {"experts"}
    reading = checks_of(log).expert_reading()
    assert reading is not None
    assert (reading.coverage, reading.empty_layers) == (1.0, list(range(dense)))


def test_a_log_without_choices_has_no_finding() -> None:
    log = [replace(response, experts=None) for response in with_experts(0, responses=4)]
    assert not findings_of(log)
    assert checks_of(log).expert_reading() is None
    assert checks_of(log).kept_reading() is None


@pytest.mark.parametrize("share", [0.01, 0.1, 0.6])
@pytest.mark.parametrize("chosen", [1, 4])
def test_rows_of_zeros_before_sampled_tokens_are_missing(share: float, chosen: int) -> None:
    log, random, planted = [], np.random.default_rng(5), 0
    for response in with_experts(1, chosen=chosen):
        assert response.experts is not None
        experts, num_prompt = response.experts.copy(), response.prompt_token_ids.size
        lost = np.flatnonzero(random.random(response.token_ids.size) < share) + num_prompt - 1
        experts[lost] = 0
        planted += lost.size
        log.append(replace(response, experts=experts))
    findings = findings_of(log)
    assert findings["experts_missing"].evidence["places"] == planted * 6
    assert findings.keys() == {"experts", "experts_missing"}
    assert "line" in findings["experts_missing"].sentence
    reading = checks_of(log).expert_reading()
    assert reading is not None
    assert reading.coverage == pytest.approx(1 - planted / (24 * 60))


def test_rows_that_only_tools_need_are_not_missed() -> None:
    log = []
    for response in with_experts(2):
        assert response.experts is not None
        experts, sampled = response.experts.copy(), response.sampled.copy()
        sampled[20:30] = False
        experts[response.prompt_token_ids.size + 19 : response.prompt_token_ids.size + 29] = 0
        log.append(replace(response, experts=experts, sampled=sampled))
    assert findings_of(log).keys() == {"experts"}


@pytest.mark.parametrize("number", [1, 20, 400])
@pytest.mark.parametrize("what", ["beyond", "negative", "repeated"])
def test_numbers_that_are_no_experts_or_come_twice_are_named(number: int, what: str) -> None:
    log, random = with_experts(3), np.random.default_rng(7)
    places = random.choice(24 * 60 * 6, number, replace=False)
    for place in places.tolist():
        row, token, layer = place // 360, place // 6 % 60, place % 6
        experts = log[row].experts
        assert experts is not None
        own = experts[log[row].prompt_token_ids.size - 1 + token, layer]
        own[1] = {"beyond": 65535, "negative": -3, "repeated": own[0]}[what]
    finding = findings_of(log)["experts_invalid"]
    assert finding.evidence["places"] == number
    assert ("twice" in finding.sentence) == (what == "repeated")


def test_a_checkpoint_knows_how_many_experts_there_are() -> None:
    log = with_experts(3, layers=4)
    assert "experts_invalid" in findings_of(log, ExpertLayout(4, tuple(range(4)), NUM_EXPERTS - 1))
    assert "experts_invalid" not in findings_of(log, ExpertLayout(4, tuple(range(4)), NUM_EXPERTS))


@pytest.mark.parametrize("by_context", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("seed", range(2))
def test_rows_a_token_off_are_named_from_the_log_alone(by: int, by_context: float, seed: int) -> None:
    log = [shifted_rows(response, by) for response in with_experts(seed, responses=48, by_context=by_context)]
    finding = findings_of(log)["experts_shifted"]
    assert finding.evidence["shift"] == by
    assert ("late" in finding.sentence) == (by > 0)


@pytest.mark.parametrize("seed", range(4))
def test_routers_that_no_token_decides_accuse_nobody(seed: int) -> None:
    assert findings_of(with_experts(seed, by_context=1.0)).keys() == {"experts"}


@pytest.mark.parametrize("lost", [1, 5])
def test_rows_of_other_numbers_than_the_tokens_are_named(lost: int) -> None:
    log = with_experts(4)
    experts = log[3].experts
    assert experts is not None
    log[3] = replace(log[3], experts=experts[lost + 1 :])
    findings = findings_of(log)
    assert findings["experts_misfit"].evidence["responses"] == 1
    assert "line 4" in findings["experts_misfit"].sentence


@pytest.mark.parametrize(("present", "is_sound"), [((2, 3, 4, 5), True), ((0, 1, 2, 3), False), ((1, 2, 3, 4), False)])
def test_layers_that_have_no_experts_in_the_checkpoint_are_named(present: tuple[int, ...], is_sound: bool) -> None:
    log = []
    for response in with_experts(6, layers=6, dense=2):
        assert response.experts is not None
        experts = np.zeros_like(response.experts)
        experts[:, present] = response.experts[:, 2:]
        log.append(replace(response, experts=experts))
    layout = ExpertLayout.of({"num_hidden_layers": 6, "n_routed_experts": NUM_EXPERTS, "first_k_dense_replace": 2})
    assert layout is not None
    assert layout.layers == (2, 3, 4, 5)
    assert ("experts_shifted" in findings_of(log, layout)) != is_sound


def test_layers_with_experts_alone_fit_the_checkpoint() -> None:
    layout = ExpertLayout(num_layers=6, layers=(2, 3, 4, 5), num_experts=NUM_EXPERTS)
    assert findings_of(with_experts(6, layers=4), layout).keys() == {"experts"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.99])
def test_sound_sets_accuse_nobody(seed: int, top_p: float) -> None:
    log = with_sets(seed, top_p=top_p)
    assert findings_of(log).keys() == {"kept_sets"}
    reading = checks_of(log).kept_reading()
    assert reading is not None
    assert (reading.coverage, reading.agreement) == (1.0, 1.0)


@pytest.mark.parametrize("are_recorded", [True, False])
def test_zeros_of_tokens_that_are_alone_in_their_sets_are_no_question(are_recorded: bool) -> None:
    checks = LogChecks()
    for response in with_sets(1, responses=60, top_p=0.8):
        assert response.kept is not None
        log_p = np.where(response.kept.sizes == 1, 0.0, -1.0)
        checks.add(replace(response, log_mu=log_p, log_pi=log_p.copy(), kept=response.kept if are_recorded else None))
    assert ("zeros_untold" in {str(finding.code) for finding in checks.findings()}) != are_recorded


def test_an_empty_set_is_no_cut_and_no_fault() -> None:
    log = []
    for response in with_sets(1):
        assert response.kept is not None
        sets = np.split(response.kept.ids, response.kept.ends[:-1])
        sets = [each if place % 2 else each[:0] for place, each in enumerate(sets)]
        log.append(replace(response, kept=KeptSets(np.concatenate(sets), np.cumsum([each.size for each in sets]))))
    assert findings_of(log).keys() == {"kept_sets"}
    reading = checks_of(log).kept_reading()
    assert reading is not None
    assert reading.coverage == 0.5


@pytest.mark.parametrize("number", [1, 30, 300])
def test_tokens_outside_their_sets_are_counted(number: int) -> None:
    log = with_sets(2)
    for place in np.random.default_rng(3).choice(8 * 50, number, replace=False).tolist():
        log[place // 50].token_ids[place % 50] = 100_000
    finding = findings_of(log)["kept_sets_broken"]
    assert finding.evidence["tokens"] == number
    assert finding.evidence["shift"] == 0


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.95])
def test_sets_a_token_off_are_called_so(by: int, top_p: float) -> None:
    finding = findings_of([shifted_sets(response, by) for response in with_sets(4, top_p=top_p)])["kept_sets_broken"]
    assert finding.evidence["shift"] == by
    assert f"one token too {'late' if by > 0 else 'early'}" in finding.sentence


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.95])
@pytest.mark.parametrize(("renormalised", "side"), [(("log_mu",), "training path's"), (("log_pi",), "engine's")])
def test_a_side_that_is_not_renormalised_over_the_sets_is_named(
    top_p: float, renormalised: tuple[str, ...], side: str
) -> None:
    findings = [
        finding
        for finding in checks_of(with_sets(5, top_p=top_p, renormalised=renormalised)).findings()
        if finding.code == "kept_sets_unused"
    ]
    assert findings
    assert all(side in finding.sentence for finding in findings)


def test_sets_that_are_fewer_than_the_tokens_are_named() -> None:
    log = with_sets(6)
    kept = log[0].kept
    assert kept is not None
    log[0] = replace(log[0], kept=KeptSets(kept.ids, kept.ends[:-1]))
    assert "line 1" in findings_of(log)["kept_sets_broken"].sentence


def test_a_column_of_empty_sets_is_called_that():
    checks = KeptChecks()
    for response in with_sets(1, responses=3):
        size = response.token_ids.size
        checks.add(replace(response, kept=KeptSets(np.zeros(0, np.int32), np.zeros(size, np.int64))))
    [finding] = checks.findings()
    assert finding.sentence == "the log has a column of sets that tokens were drawn from, and no token has one"
