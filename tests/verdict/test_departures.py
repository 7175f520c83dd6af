"""What the distances of a log's sides from a checkpoint make of the verdict; and a change of level inside responses."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.departures import Departures, beyond_format, level_change_of, other_checkpoint
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.rounding import noise_sentences
from mismatch_probe.verdict.signatures.profile import Disagreement
from tests.verdict import simulated
from tests.verdict.test_judge import case


def estimate(value: float) -> Estimate:
    return Estimate(value, 0.9 * value, 1.1 * value, 0.95, 32, 1000, "token", 8)


def departures(pi: float | None, mu: float, apart: float | None, *, named: bool = False) -> Departures:
    floors = {"mu": estimate(mu)} | ({} if pi is None else {"pi": estimate(pi)})
    return Departures(
        tuple(floors),
        floors,
        dict.fromkeys(floors, Dtype.BF16),
        None if apart is None else estimate(apart),
        from_checkpoint=True,
        is_named=named,
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (departures(1.0, 1.0, 1.4), []),
        (departures(20.0, 20.0, 1.4), ["other_checkpoint"]),
        (departures(None, 20.0, None), ["other_checkpoint"]),
        (departures(20.0, 1.0, 20.0), ["beyond_format"]),
        (departures(20.0, 20.0, 28.0), ["beyond_format"]),
        (departures(20.0, 20.0, 1.4, named=True), []),
    ],
)
def test_each_way_to_depart_has_its_code(found: Departures, expected: list[str]) -> None:
    verdict = other_checkpoint(found)
    codes = [cause.code for cause in beyond_format(found)] + ([] if verdict is None else [verdict.code])
    assert codes == expected
    assert verdict is None or "sampler" not in verdict.sentence, "a user reads of the engine"


def alone(disagreement: Disagreement) -> Disagreement:
    """As a log without a reference has it."""
    pair = replace(disagreement.pair, log_ref=None, entropy_pi=None, top1_pi=None, top1_mu=None)
    return replace(disagreement, pair=pair, floor=1e-6, is_settled=False, ref_repeats_pi=False)


def updated(seed: int, times: float, share: float, *, rises: bool, length: int = 300) -> Disagreement:
    """Inside a share of the responses, before or behind a place of its own, mu has other weights: its logits are off by
    so many times what rounding makes.
    """
    made = simulated.world(48, length, seed=seed)
    random, sequences = np.random.default_rng(seed), made.sequences
    own_places = sequences.spread(sequences.lengths * random.uniform(0.2, 0.8, 48))
    is_behind = sequences.positions >= own_places
    is_off = (is_behind if rises else ~is_behind) & sequences.spread(np.arange(48) % 10 < 10 * share)
    noise = simulated.NOISE_PER_ULP * Dtype.BF16.round_off * times
    off = made.generator.normal(size=made.logits.shape) * noise * is_off[:, None]
    return alone(simulated.with_logits(made, Dtype.BF16, mu=made.logits + off))


@pytest.mark.parametrize("rises", [True, False])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("times", [10, 30, 100])
def test_weights_that_change_inside_responses_change_the_level_there(
    times: float, share: float, *, rises: bool
) -> None:
    changes = [level_change_of(updated(seed, times, share, rises=rises)) for seed in range(3)]
    for change in changes:
        assert change is not None
        assert (change.times > 1) is rises
        assert abs(change.num_responses / change.num_long - share) < 0.2


@pytest.mark.parametrize(("length", "times"), [(100, 6), (80, 5)])
def test_responses_are_sure_together_of_a_change_that_few_are_sure_of_alone(length: int, times: float) -> None:
    """In short ones many of the places are near each other by chance."""
    logs = [updated(seed, times, 0.5, rises=rises, length=length) for seed in range(4) for rises in (True, False)]
    assert all(level_change_of(log) is not None for log in logs)


@pytest.mark.parametrize("seed", range(3))
def test_a_change_near_the_end_of_few_unsure_tokens_is_seen(seed: int) -> None:
    """Eight of them on either side are enough, as in texts of which a model is mostly sure."""
    disagreement = updated(seed, 30, 1.0, rises=False)
    few = np.random.default_rng(seed).random(disagreement.uncertain.size) < 0.1
    pair = replace(disagreement.pair, log_mu=np.where(few, disagreement.pair.log_mu, -1e-4))
    sparse = replace(disagreement, pair=replace(pair, log_pi=np.where(few, disagreement.pair.log_pi, -1e-4)))
    assert 16 < sparse.uncertain.sum() / 48 < 32
    change = level_change_of(sparse)
    assert change is not None
    assert change.times < 1


def sure_text(seed: int, least: float, times: float) -> Disagreement:
    """A log of a sure model, whose tokens have probabilities of 0.94 and more; in two thirds of the responses they are
    surer, down to `least` of uncertainty, and d is so many times as large, from a place of their own on.
    """
    disagreement = alone(simulated.clean(simulated.world(48, 300, seed=seed), Dtype.BF16))
    random, sequences = np.random.default_rng(seed), disagreement.pair.sequences
    is_late = sequences.positions >= sequences.spread(random.integers(20, sequences.lengths - 20))
    is_late &= sequences.spread(np.arange(48) % 3 > 0)
    unsure = 10 ** random.uniform(-2.5, -1.2, is_late.size) * np.where(is_late, least / 10**-2.5, 1.0)
    diff = 0.05 * unsure**1.4 * random.normal(size=is_late.size) * np.where(is_late, times, 1.0)
    log_mu = np.log1p(-unsure)
    columns = {"log_mu": log_mu.astype(np.float32), "log_pi": np.minimum(log_mu + diff, 0.0).astype(np.float32)}
    return replace(disagreement, pair=replace(disagreement.pair, **columns))


@pytest.mark.parametrize("seed", range(3))
def test_a_change_of_level_is_seen_in_texts_of_a_sure_model(seed: int) -> None:
    disagreement = sure_text(seed, 10**-2.5, 10)
    assert not disagreement.uncertain.any()
    change = level_change_of(disagreement)
    assert change is not None
    assert change.times > 1


@pytest.mark.parametrize("seed", range(3))
def test_a_text_that_grows_sure_has_no_change_of_level(seed: int) -> None:
    """Rounding moves a sure token by less, over what its uncertainty makes of an error of the logits."""
    assert level_change_of(sure_text(seed, 10**-4, 1)) is None


@cache
def sound_log(length: int, seed: int) -> tuple[simulated.World, Disagreement]:
    """48 responses behind prompts of many lengths, which differ by rounding."""
    made = simulated.world(48, length, seed=seed)
    made = replace(made, prompt_lengths=made.generator.integers(5, 90, 48))
    return made, simulated.clean(made, Dtype.BF16)


@pytest.mark.parametrize("length", [80, 300])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "shape",
    [
        "rounding", "tail", "heavy tail", "zeros", "slow level", "grows", "grows fast", "of the response", "of the end",
        "of the context", "some responses", "one token", "copied", "sets in late", "both ends", "rises for long",
    ],
)  # fmt: skip
def test_no_other_shape_of_a_log_has_such_a_change(length: int, seed: int, shape: str) -> None:
    made, disagreement = sound_log(length, seed)
    random, sequences = np.random.default_rng(seed), made.sequences
    own, places, count = sequences.positions, made.places, sequences.num_tokens
    from_end = sequences.spread(sequences.lengths) - own
    rounding, large = random.normal(0, 0.01, count), random.normal(0, 1.0, count)
    steps = np.cumsum(random.normal(0, 0.15, count))
    own_places = sequences.spread(sequences.lengths * random.uniform(0.2, 0.8, 48))
    diff = {
        "rounding": rounding,
        "tail": random.standard_t(1.5, count) * 0.01,
        "heavy tail": random.standard_cauchy(count).clip(-1000, 1000) * 0.003,
        "zeros": np.where(random.random(count) < 0.5, 0.0, rounding),
        "slow level": rounding * np.exp(steps - sequences.spread(steps[sequences.offsets[:-1]])).clip(0.1, 10),
        "grows": rounding * places**1.5 / 100,
        "grows fast": rounding * np.exp(places / 60),
        "of the response": rounding + (own >= length // 3) * large,
        "of the end": rounding + (from_end <= min(40, length // 3)) * large,
        "of the context": rounding + (places >= length // 2) * large,
        "some responses": rounding + sequences.spread(random.random(48) < 0.3) * large,
        "sets in late": rounding * np.maximum(1, own / length * 4 - 2) ** 3,
        "both ends": rounding * np.exp(4 * (2 * own / length - 1) ** 2 - 2),
        "rises for long": rounding * np.exp(2.5 * np.clip((own - own_places) / length / 0.3 + 0.5, 0, 1)),
        "one token": rounding + (own == min(40, length // 3)) * large,
        "copied": np.where(own < sequences.spread(sequences.lengths * random.uniform(0.2, 0.8, 48)), 0.0, rounding),
    }[shape]
    log_pi = np.minimum(disagreement.pair.log_mu + diff, 0.0).astype(np.float32)
    assert level_change_of(alone(replace(disagreement, pair=replace(disagreement.pair, log_pi=log_pi)))) is None


def test_noise_that_both_sides_have_alike_is_no_share_of_d() -> None:
    """As where the contexts of siblings differ in what the log does not hold."""

    def words(noise: float) -> str:
        floors = {f"{side}_siblings": estimate(noise) for side in ("mu", "pi")}
        return noise_sentences(SimpleNamespace(floors=floors, rms_difference=estimate(0.1)))[-1]

    assert words(0.05) == "noise of that size makes up 25 % of d (share of the mean square)"
    assert words(0.15) == "noise of that size makes up all of d (share of the mean square)"
    assert words(1.0).startswith("that is more than the sides differ by: both move alike")


def test_a_deviation_too_large_for_rounding_hides_no_such_change() -> None:
    verdict = judge(case(updated(0, 3000, 1.0, rises=False), is_logged=True))
    assert verdict.code == "beyond_format"
    assert any("falls at once" in line for line in verdict.evidence)


def test_a_log_with_such_a_change_says_so_and_accuses_no_weights() -> None:
    verdict = judge(case(updated(0, 30, 0.6, rises=False), is_logged=True))
    assert verdict.kind == "undecided"
    assert any("falls at once" in line for line in verdict.evidence)
    assert "`explain` with both checkpoints tells which (`--weights VERSION=FOLDER`)." in verdict.advice[-1]
    assert (
        judge(
            case(alone(simulated.clean(simulated.world()))),
        ).advice
        == judge(case(alone(simulated.clean(simulated.world())), is_logged=True)).advice
    )


def test_a_change_that_the_log_records_is_evidence_and_its_command_takes_both_weights() -> None:
    logged = case(updated(0, 30, 0.6, rises=False), is_logged=True)
    verdict = judge(replace(logged, update_ratio=12.0))
    words = "d is 12 times as large before the last recorded change of the weights as after it"
    assert words in verdict.evidence
    assert any("falls at once" in line for line in verdict.evidence)
    [command] = [line for line in verdict.advice if "explain" in line]
    assert command.endswith("`mismatch-probe explain RUN --model CHECKPOINT --weights VERSION=FOLDER`")
    of_a_step = judge(replace(logged, update_ratio=12.0, last_step=7)).advice
    assert any("explain RUN --model CHECKPOINT --step 7 --weights VERSION=FOLDER`" in line for line in of_a_step)
    clean = case(alone(simulated.clean(simulated.world())), is_logged=True)
    assert (judge(clean).kind, words in judge(replace(clean, update_ratio=12.0)).evidence) == ("clean", False)
    assert not any("--weights" in line for line in judge(logged).advice if "mismatch-probe" in line)


@pytest.mark.parametrize("begins_at", [9, 20, 25])
@pytest.mark.parametrize("seed", range(4))
def test_a_window_in_few_short_responses_is_no_change_at_places_of_their_own(seed: int, begins_at: int) -> None:
    """Many of 60 tokens are near each other by chance, and few by chance as near as where a window begins."""
    made = simulated.world(12, 60, seed=seed)
    disagreement, random = simulated.clean(made, Dtype.BF16), np.random.default_rng(seed)
    is_outside = made.sequences.positions >= begins_at
    diff = random.normal(0, 0.01, is_outside.size) * np.where(is_outside == (begins_at > 9), 10, 1)
    log_pi = np.minimum(disagreement.pair.log_mu + diff, 0.0).astype(np.float32)
    assert level_change_of(alone(replace(disagreement, pair=replace(disagreement.pair, log_pi=log_pi)))) is None


@pytest.mark.parametrize("seed", range(3))
def test_growth_in_noise_that_lasts_is_no_change_in_long_responses(seed: int) -> None:
    """A step is far likelier than growth in half of them and far less likely in the others."""
    made = replace(simulated.world(10, 4000, seed=seed), prompt_lengths=np.full(10, 20))
    disagreement, random = simulated.clean(made, Dtype.BF16), np.random.default_rng(seed)
    sequences = made.sequences
    lasting = np.convolve(random.normal(0, 0.15, sequences.num_tokens), np.exp(-np.arange(200) / 80), "same")
    growth = 2 * sequences.positions / sequences.spread(sequences.lengths)
    diff = random.normal(0, 0.01, lasting.size) * np.exp(lasting + growth)
    log_pi = np.minimum(disagreement.pair.log_mu + diff, 0.0).astype(np.float32)
    assert level_change_of(alone(replace(disagreement, pair=replace(disagreement.pair, log_pi=log_pi)))) is None
