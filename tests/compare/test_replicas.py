"""Which of several replicas is another policy, from what was found out of each; real ones: `tests/servers`."""

from typing import Any

import pytest

from mismatch_probe.compare.replicas import replica_findings
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.summary import PairSummary, SettingFinding
from mismatch_probe.stats.results import Estimate
from tests.simulated_run import Simulation, simulated_manifest, simulated_run

QUIET = {"again": 0.0, "in_a_crowd": 0.0, "behind_the_cache": None}
HONEST = {
    "software": "vLLM 0.32.0", "dtype": "bf16", "weight_version": "step-7", "asked": QUIET,
    "standing_answer": {"5": -0.5, "9": -1.5},
}  # fmt: skip
STALE = {**HONEST, "standing_answer": {"5": -0.9, "9": -1.5}}


def manifest(*found: dict[str, Any], **changes: Any) -> Manifest:
    """A run of as many servers as there are settings: prod-1, prod-2, ..."""
    names = [f"prod-{number}" for number in range(1, len(found) + 1)]
    sides = [{"name": name, "url": f"http://{name}"} for name in names]
    sides[-1].update(changes)
    simulated = simulated_manifest(Simulation(num_prompts=2))
    values = {**simulated.settings.model_dump(mode="json"), "infer": sides, "pairs": [("bf16", name) for name in names]}
    stages = {
        f"sample-{name}": StageRecord(effective_settings=settings) for name, settings in zip(names, found, strict=True)
    }
    settings = parse_settings(CompareSettings, values)
    return simulated.model_copy(update={"settings": settings, "stages": stages})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairSummary:
    run = simulated_run(tmp_path_factory.mktemp("run") / "run", Simulation(num_prompts=8), with_summary=True)
    return run.read_summary().pairs[0]


def at_distances(pair: PairSummary, *distances: float) -> list[PairSummary]:
    """A pair with each replica, so far from the training path in mean abs(d)."""
    return [
        pair.model_copy(update={"infer": f"prod-{number}", "metrics": {"abs_logprob_diff": estimate(distance)}})
        for number, distance in enumerate(distances, 1)
    ]


def estimate(value: float) -> Estimate:
    return Estimate(value, 0.9 * value, 1.1 * value, 0.95, 8, 100, "token", 8)


def found(findings: list[SettingFinding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in findings]


def test_replicas_that_say_and_answer_the_same_are_one_policy(pair: PairSummary) -> None:
    [(level, what)] = found(replica_findings(manifest(HONEST, HONEST), at_distances(pair, 0.01, 0.01)))
    assert level == "note"
    assert what.startswith("prod-1, prod-2 say the same of themselves and answer one question alike")


@pytest.mark.parametrize(("distances", "named"), [((0.01, 0.3), "prod-2"), ((0.3, 0.01), "prod-1")])
def test_of_two_the_one_that_is_farther_from_the_training_path_is_named(
    distances: tuple[float, float], named: str, pair: PairSummary
) -> None:
    [(level, what)] = found(replica_findings(manifest(HONEST, STALE), at_distances(pair, *distances)))
    assert level == "error"
    assert what.startswith(f"{named} is another policy than its replica")
    assert "it answers one question otherwise (by 0.4 nats, where its own noise allows 0.05)" in what
    assert what.endswith("times as far from the training path's")


def test_of_two_that_are_as_far_neither_is_blamed(pair: PairSummary) -> None:
    [(_, what)] = found(replica_findings(manifest(HONEST, STALE), at_distances(pair, 0.01, 0.0101)))
    assert what.endswith("which of the two is off is not known")


@pytest.mark.parametrize("place", range(3))
def test_of_three_the_one_that_the_others_contradict_is_named_wherever_it_stands(place: int, pair: PairSummary) -> None:
    settings = [HONEST] * 3
    settings[place] = STALE
    [(level, what)] = found(replica_findings(manifest(*settings), at_distances(pair, 0.01, 0.01, 0.01)))
    assert level == "error"
    assert what.startswith(f"prod-{place + 1} is another policy")
    assert "agree" in what


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"weight_version": "step-6"}, "weight_version is step-6, and step-7 of prod-1"),
        ({"dtype": "fp16"}, "dtype is fp16, and bf16 of prod-1"),
        ({"software": "vLLM 0.31.0"}, "software is vLLM 0.31.0, and vLLM 0.32.0 of prod-1"),
    ],
)
def test_what_a_replica_says_of_itself_is_held_against_the_others(
    other: dict[str, str], words: str, pair: PairSummary
) -> None:
    [(_, what)] = found(replica_findings(manifest(HONEST, {**HONEST, **other}), at_distances(pair, 0.01, 0.01)))
    assert words in what


def test_a_replicas_own_noise_is_no_other_policy(pair: PairSummary) -> None:
    noisy = {**STALE, "asked": {**QUIET, "again": 0.05}}
    [(level, _)] = found(replica_findings(manifest(HONEST, noisy), at_distances(pair, 0.01, 0.01)))
    assert level == "note"


def moved_by(nats: float, **settings_asked_for: float | None) -> dict[str, Any]:
    return {**HONEST, "asked": {**QUIET, **settings_asked_for}, "standing_answer": {"5": -0.5 - nats, "9": -1.5}}


@pytest.mark.parametrize("place", range(3))
def test_a_step_that_is_too_small_for_the_limit_is_seen_where_servers_repeat_their_bits(
    place: int, pair: PairSummary
) -> None:
    settings = [HONEST] * 3
    settings[place] = moved_by(0.001)
    finding = next(iter(replica_findings(manifest(*settings), at_distances(pair, 0.01, 0.01, 0.01))))
    assert (finding.level, finding.code) == ("warning", None)
    others = ", ".join(f"prod-{number}" for number in (1, 2, 3) if number != place + 1)
    assert finding.what.startswith(f"one question is answered a little otherwise than by {others}: prod-{place + 1} by")
    assert "0.001 nats, where its own noise allows 0" in finding.what


@pytest.mark.parametrize("noise", ["again", "in_a_crowd", "behind_the_cache"])
def test_replicas_that_round_otherwise_in_a_crowd_are_not_accused(noise: str, pair: PairSummary) -> None:
    busy = moved_by(0.004, **{noise: 0.003})
    [(level, what)] = found(replica_findings(manifest(HONEST, busy), at_distances(pair, 0.01, 0.01)))
    assert level == "note"
    assert what.endswith("but for weights that move a likely token's log-prob by less than 0.0300 nats")


def test_only_answers_that_are_known_to_repeat_are_said_to_have_the_same_bits(pair: PairSummary) -> None:
    unknown = {**HONEST, "asked": dict.fromkeys(QUIET)}
    for other, words in ((HONEST, "with the same bits"), (unknown, "less than 0.0500 nats")):
        [(level, what)] = found(replica_findings(manifest(HONEST, other), at_distances(pair, 0.01, 0.01)))
        assert (level, words in what) == ("note", True)
    [(level, _)] = found(replica_findings(manifest(HONEST, {**moved_by(0.01), "asked": dict.fromkeys(QUIET)}), []))
    assert level == "note"


@pytest.mark.parametrize("changes", [{"checkpoint": "other"}, {"dtype": "fp16"}])
def test_servers_that_are_to_differ_are_no_replicas(changes: dict[str, str], pair: PairSummary) -> None:
    assert replica_findings(manifest(HONEST, STALE, **changes), at_distances(pair, 0.01, 0.3)) == []


@pytest.mark.parametrize("nothing", [{}, {"asked": "nothing"}, {"asked": QUIET, "standing_answer": "none"}])
def test_a_server_of_which_nothing_was_found_out_accuses_nobody(nothing: dict[str, Any], pair: PairSummary) -> None:
    findings = replica_findings(manifest(nothing, HONEST), at_distances(pair, 0.01, 0.01))
    assert [finding for finding in findings if "answers one question otherwise" in finding.what] == []
