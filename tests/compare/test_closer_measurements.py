"""Floors and whole distributions read back from a run's files, and what spoils them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mismatch_probe.compare.run_reader import RunReader
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.records.tables import FULL_VOCABULARY, read_table, write_table
from mismatch_probe.stats.sequences import Repeat
from mismatch_probe.stats.subsamples import divergences
from tests.simulated_run import Simulation, edit_leg, simulated_run

pytestmark = pytest.mark.slow

POSITIONS = 12
Values = list[list[float]]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return simulated_run(tmp_path / "run", Simulation(num_prompts=16, mean_length=30))


def repeat_leg(
    run: RunDirectory, change: str, by: Callable[[np.ndarray], np.ndarray], rows: int = 5, leg: str = "train-bf16"
) -> None:
    """A leg of the first few responses, each log-prob changed `by` a function."""
    table = read_table(run.leg_path(leg)).slice(0, rows)
    values = [by(np.asarray(row)).tolist() for row in table["logprobs"].to_pylist()]
    place = table.schema.get_field_index("logprobs")
    field = table.schema.field(place)
    write_table(
        run.leg_path(f"{leg.removesuffix('-prefill').removesuffix('-decode')}-{change}"),
        table.set_column(place, field, pa.array(values, type=field.type)),
    )


def repeats(run: RunDirectory) -> dict[str, Repeat]:
    pair = RunReader(run, run.read_manifest()).pair(("bf16", "bf16")).pair
    assert pair is not None
    return dict(pair.repeats)


def whole_leg(run: RunDirectory, noise: float = 0.05) -> None:
    """Real categorical policies over 50 tokens at the first positions of every response, tokens sampled from mu."""
    random = np.random.default_rng(0)
    rows = []
    for row_id in read_table(run.rollouts_path)["id"].to_pylist():
        logits = random.normal(0, 2, (POSITIONS, 50))
        moved = logits + noise * random.normal(size=logits.shape)
        log_mu, log_pi = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (logits, moved))
        tokens = (np.exp(log_mu).cumsum(axis=1) > random.random((POSITIONS, 1))).argmax(axis=1)
        kl, tv = divergences(log_mu, log_pi)
        diff = (log_pi - log_mu)[np.arange(POSITIONS), tokens]
        rows.append({"id": row_id, "positions": list(range(POSITIONS)), "full_kl": kl, "full_tv": tv, "diff": diff})
    write_table(run.leg_path("full-bf16-bf16"), pa.Table.from_pylist(rows, schema=FULL_VOCABULARY))


def summary_of(run: RunDirectory) -> PairSummary:
    return summarise(run, run.read_manifest()).pairs[0]


def test_without_legs_there_are_no_floors_and_the_reason_for_no_exact_kl_is_told(run: RunDirectory) -> None:
    pair = summary_of(run)
    assert repeats(run) == {}
    assert pair.full_vocabulary is None
    assert pair.metrics_unavailable["full_kl"] == "no whole distributions were recorded"


def test_floors_are_measured_on_the_responses_that_were_repeated(run: RunDirectory) -> None:
    repeat_leg(run, "alone", lambda logprobs: logprobs - 1e-3)
    repeat_leg(run, "again", lambda logprobs: logprobs - 1e-3)
    repeat_leg(run, "other-attention", lambda logprobs: logprobs - 3e-3, rows=4)
    blame = summary_of(run).blame
    assert blame is not None
    assert blame.floors["pi_again"].value == 0
    assert blame.floors["pi_other_batch"].value == pytest.approx(1e-3, rel=1e-3)
    assert blame.floors["pi_other_attention"].value == pytest.approx(2e-3, rel=1e-3)
    assert blame.floors["pi_other_batch"].num_sequences == 5
    assert blame.floors["pi_other_attention"].num_sequences == 4


def test_the_engines_floors_are_measured_against_its_own_prefill(run: RunDirectory) -> None:
    shutil.copy(run.leg_path("infer-bf16-decode"), run.leg_path("infer-bf16-prefill"))
    repeat_leg(run, "alone", lambda logprobs: logprobs - 1e-3, leg="infer-bf16-prefill")
    repeat_leg(run, "cached", lambda logprobs: logprobs - 3e-3, rows=4, leg="infer-bf16-prefill")
    blame = summary_of(run).blame
    assert blame is not None
    assert blame.floors["mu_other_batch"].value == pytest.approx(1e-3, rel=1e-3)
    assert blame.floors["mu_cached"].value == pytest.approx(2e-3, rel=1e-3)
    assert blame.floors["mu_cached"].num_sequences == 4


def test_what_is_decoded_alone_is_held_against_the_same_among_many_as_far_as_it_comes_out(run: RunDirectory) -> None:
    def cut(logprobs: np.ndarray) -> np.ndarray:
        moved = logprobs[:] - 1e-3
        moved[3:] = np.nan
        return moved

    repeat_leg(run, "decoded-alone", lambda logprobs: logprobs - 1e-3, leg="infer-bf16-decode")
    assert summary_of(run).metrics["decoded_alike"].value == 1
    repeat_leg(run, "decoded-alone", cut, leg="infer-bf16-decode")
    pair = summary_of(run)
    assert pair.blame is not None
    assert pair.blame.floors["mu_decoded_alone"].value == pytest.approx(1e-3, rel=1e-3)
    assert pair.blame.floors["mu_decoded_alone"].num_tokens == 5 * 3
    assert (pair.metrics["decoded_alike"].value, pair.metrics["decoded_alike"].num_sequences) == (0, 5)


def test_what_comes_out_otherwise_at_once_measures_no_floor_and_is_counted(run: RunDirectory) -> None:
    repeat_leg(run, "decoded-alone", lambda logprobs: logprobs * np.nan, leg="infer-bf16-decode")
    assert "mu_decoded_alone" not in repeats(run)
    assert summary_of(run).metrics["decoded_alike"].value == 0


def test_an_engine_that_decodes_otherwise_alone_is_not_repeatable(run: RunDirectory) -> None:
    repeat_leg(run, "decoded-alone", lambda logprobs: logprobs - 0.5, leg="infer-bf16-decode")
    verdict = summary_of(run).verdict
    assert (verdict.code, "of decoding depend on what shares the batch" in verdict.sentence) == ("not_repeatable", True)


@pytest.mark.parametrize(("change", "words"), [("alone", "shares the batch"), ("cached", "behind the prefix cache")])
def test_an_engine_whose_log_probs_hang_on_its_requests_is_not_repeatable(
    run: RunDirectory, change: str, words: str
) -> None:
    shutil.copy(run.leg_path("infer-bf16-decode"), run.leg_path("infer-bf16-prefill"))
    repeat_leg(run, "alone", lambda logprobs: logprobs, leg="infer-bf16-prefill")
    repeat_leg(run, change, lambda logprobs: logprobs - 0.5, leg="infer-bf16-prefill")
    verdict = summary_of(run).verdict
    assert verdict.code == "not_repeatable"
    assert verdict.sentence.startswith("The engine")
    assert words in verdict.sentence


def test_a_training_path_that_differs_when_run_again_is_not_repeatable(run: RunDirectory) -> None:
    random = np.random.default_rng(0)
    for change in ("alone", "again"):
        repeat_leg(run, change, lambda logprobs: np.minimum(logprobs + random.normal(0, 0.5, logprobs.size), 0))
    verdict = summary_of(run).verdict
    assert "not_repeatable" in {verdict.code, *(cause.code for cause in verdict.also)}


def test_a_response_that_is_not_finite_or_of_other_ids_measures_no_floor(run: RunDirectory) -> None:
    for change in ("alone", "again"):
        repeat_leg(run, change, lambda logprobs: logprobs)

    def spoil(columns: dict[str, list[object]]) -> None:
        columns["logprobs"][0] = [float("nan")] * len(columns["logprobs"][0])  # type: ignore[arg-type]
        columns["ids_key"][1] = 7

    edit_leg(run, "train-bf16-alone", spoil)
    assert {repeat.sequences.num_sequences for repeat in repeats(run).values()} == {3}


def test_exact_divergences_are_metrics_with_counts_of_their_own(run: RunDirectory) -> None:
    whole_leg(run)
    pair = summary_of(run)
    assert pair.full_vocabulary is not None
    assert all(estimator.agrees for estimator in pair.full_vocabulary.estimators.values())
    assert pair.metrics["full_kl"] == pair.full_vocabulary.full_kl
    assert pair.metrics["full_tv"] == pair.full_vocabulary.full_tv
    assert pair.metrics["full_kl"].num_tokens == 16 * POSITIONS


@pytest.mark.parametrize("column", ["full_kl", "diff"])
def test_a_perturbed_full_vocabulary_leg_is_noticed(run: RunDirectory, column: str) -> None:
    whole_leg(run)

    def perturb(columns: dict[str, Values]) -> None:
        columns[column] = [[2 * value + 0.01 for value in row] for row in columns[column]]

    edit_leg(run, "full-bf16-bf16", perturb)
    check = summary_of(run).full_vocabulary
    assert check is not None
    assert not check.estimators["kl_k3"].agrees


def test_a_position_that_is_not_finite_is_counted_and_never_averaged(run: RunDirectory) -> None:
    whole_leg(run)

    def spoil(columns: dict[str, Values]) -> None:
        columns["full_kl"][0][0] = float("nan")

    edit_leg(run, "full-bf16-bf16", spoil)
    pair = summary_of(run)
    assert pair.full_vocabulary is None
    assert "full_kl" not in pair.metrics
    assert (
        pair.metrics_unavailable["full_kl"]
        == f"the whole distributions are not finite at 1 of {16 * POSITIONS} positions"
    )
