"""Metrics alone, from the file to the answer: shapes, contradictions, causes, and clean logs that accuse nobody."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.metrics import reading_of_metrics
from mismatch_probe.logs.metric_files import read_metric_log
from mismatch_probe.logs.metric_names import metric_names
from mismatch_probe.records.files import RunKind, kind_of
from mismatch_probe.records.lines import CurveReading, CurvesDirectory
from mismatch_probe.report.answers.curves import curves_answer
from mismatch_probe.stats.curves import shape_of
from mismatch_probe.verdict.curve_laws import LAWS, contradictions_in
from mismatch_probe.verdict.curves import published_bands
from tests.command_line import probe

DATA = Path(__file__).parents[1] / "logs" / "metric_data"
STEPS = np.arange(30)
ENTROPY = 0.41234567


def reading_of(name: str) -> CurveReading:
    log = read_metric_log(DATA / name)
    assert log is not None
    return reading_of_metrics(DATA / name, log)


def metrics_of_tokens(sides: np.ndarray) -> dict[str, float]:
    """Ours, of log-ratios [N, T] and probabilities of mu, each by its definition in docs/metrics.md."""
    log_mu, diff = sides
    ratio = np.exp(diff)
    prob = np.abs(np.exp(log_mu + diff) - np.exp(log_mu))
    clamped = np.clip(ratio, 0.5, 2)
    return {
        "kl_k1": -diff.mean(),
        "kl_k3": (ratio - diff - 1).mean(),
        "kl_k3_reverse": (1 / ratio + diff - 1).mean(),
        "abs_logprob_diff": np.abs(diff).mean(),
        "abs_logprob_diff_seq": np.abs(diff).mean(axis=1).mean(),
        "abs_logprob_diff_max": np.abs(diff).max(),
        "logprob_diff_rms": np.sqrt(np.square(diff).mean()),
        "token_mult_prob_error": np.exp(np.abs(diff)).mean(),
        "prob_abs_diff": prob.mean(),
        "prob_abs_diff_std": prob.std(),
        "prob_abs_diff_max": prob.max(),
        "chi2_token": np.square(ratio).mean() - 1,
        "is_ratio_mean_token": ratio.mean(),
        "ess_token": ratio.mean() ** 2 / np.square(ratio).mean(),
        "ratio_abs_error": np.abs(ratio - 1).mean(),
        "log_ppl_diff": -diff.mean(axis=1).mean(),
        "log_ppl_abs_diff": np.abs(diff.mean(axis=1)).mean(),
        "ppl_ratio": np.exp(-diff.mean(axis=1)).mean(),
        "kl_entropy_ratio": (ratio - diff - 1).mean() / ENTROPY,
        "entropy": ENTROPY,
        "weight_mean": ratio.mean(),
        "weight_std": clamped.std(),
        "weight_max": ratio.max(),
        "weight_share_above": (ratio > 2).mean(),
        "weight_share_below": (ratio < 0.5).mean(),
        "ess_clamped": clamped.mean() ** 2 / np.square(clamped).mean(),
    }


def log_of(spread: float, seed: int, heavy: bool = False) -> dict[str, np.ndarray]:
    """Columns of 30 steps of tokens of two policies that differ by noise."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in STEPS:
        log_mu = np.log(rng.uniform(0.05, 1, (64, 80)))
        noise = rng.standard_t(3, log_mu.shape) if heavy else rng.standard_normal(log_mu.shape)
        diff = spread * np.clip(noise, -6, 6) * (1 - np.exp(log_mu))
        diff -= np.log(np.exp(diff).mean())  # both sides normalise over the same tokens
        log_pi = np.minimum(log_mu + diff, 0)
        steps.append(metrics_of_tokens(np.stack([log_mu, log_pi - log_mu])))
    return {name: np.array([step[name] for step in steps]) for name in steps[0]}


def laws_broken_in(columns: dict[str, np.ndarray]) -> set[str]:
    return {contradiction.law for contradiction in contradictions_in(columns, STEPS, {name: name for name in columns})}


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("spread", [1e-4, 0.01, 0.05, 0.3])
def test_honest_numbers_break_no_law(spread: float, heavy: bool) -> None:
    for seed in range(5):
        assert laws_broken_in(log_of(spread, seed, heavy)) == set()


@pytest.mark.parametrize("digits", [3, 4, 6])
def test_rounding_on_a_console_breaks_no_law(digits: int) -> None:
    columns = {name: np.round(values, digits) for name, values in log_of(0.05, 1).items()}
    assert laws_broken_in(columns) == set()


PLANTED = {
    "k3_below_abs": ("kl_k3", lambda of, size: 0.5 * of["abs_logprob_diff"] ** 2 / size),
    "k3_below_abs_seq": ("kl_k3", lambda of, size: 0.5 * of["abs_logprob_diff_seq"] ** 2 / size),
    "k3_below_rms_and_max": ("kl_k3", lambda of, size: 0.3 * of["logprob_diff_rms"] ** 2 / size),
    "k3_below_half_square": ("kl_k3", lambda of, size: 0.5 * of["logprob_diff_rms"] ** 2 / size),
    "k3_above_factor": ("kl_k3", lambda of, size: size * (of["token_mult_prob_error"] - 1)),
    "factor_below_abs": ("token_mult_prob_error", lambda of, size: 1 + of["abs_logprob_diff"] / size),
    "mean_above_max": ("abs_logprob_diff_max", lambda of, size: of["abs_logprob_diff"] / size),
    "prob_mean_above_max": ("prob_abs_diff_max", lambda of, size: of["prob_abs_diff"] / size),
    "prob_spread": (
        "prob_abs_diff_std",
        lambda of, size: size * np.sqrt(of["prob_abs_diff"] * of["prob_abs_diff_max"]),
    ),
    "prob_above_logprob": ("prob_abs_diff", lambda of, size: size * of["abs_logprob_diff"]),
    "ess_above_weights": ("weight_std", lambda of, size: size * (0.2 + of["weight_std"])),
    "ess_below_weights": ("ess_clamped", lambda of, size: of["ess_clamped"] / size),
    "ess_of_chi2": ("ess_token", lambda of, size: of["ess_token"] / size),
    "chi2_below_mean": ("kl_k3", lambda of, size: of["kl_k3"] + size * of["chi2_token"]),
    "ppl_below_log": ("log_ppl_diff", lambda of, size: of["log_ppl_diff"] + size * 0.01),
    "log_ppl_above_abs": ("log_ppl_diff", lambda of, size: size * 1.1 * of["log_ppl_abs_diff"]),
    "ratio_of_entropy": ("kl_entropy_ratio", lambda of, size: size * of["kl_entropy_ratio"]),
    "mean_weight_above_error": ("is_ratio_mean_token", lambda of, size: 1 + size * of["ratio_abs_error"]),
    "weight_above_max": ("weight_max", lambda of, size: size * np.exp(of["abs_logprob_diff_max"])),
    "chi2_seq_below_zero": ("chi2_seq", lambda of, size: np.full(30, -0.3 * size)),
    "chi2_token_below_zero": ("chi2_token", lambda of, size: np.full(30, -0.05 * size)),
    "mean_weight": ("kl_k1", lambda of, size: of["kl_k3"] + 0.03 * size),
}


def relations_to_limits(metric: str, level: float) -> list[str]:
    return [band.relation for band in published_bands(metric, level) if band.kind == "any"]


def test_a_level_that_keeps_a_limit_and_lies_below_every_published_number_is_below(tmp_path: Path) -> None:
    """A nightly test's limit is no number of a model."""
    answer = probe("import", DATA / "areal.log", "--out", tmp_path / "run")
    assert "below what is published of dense models and of mixtures of experts" in " ".join(answer.stdout.split())


def test_a_limit_is_exact_and_a_band_is_as_near_as_its_distance_from_agreement() -> None:
    """Agreement is a probability factor of 1 and a correlation of 1, so that 1.08 is no 1.05 and 1.024."""
    assert relations_to_limits("token_mult_prob_error", 1.051) == ["above"]
    assert relations_to_limits("token_mult_prob_error", 1.049) == ["within"]
    assert "above" in relations_to_limits("kl_k3", 1.01e-3)
    of_mixtures = [band.relation for band in published_bands("token_mult_prob_error", 1.08) if band.kind == "mixture"]
    assert of_mixtures == ["above"]
    near_it = [band.relation for band in published_bands("token_mult_prob_error", 1.026) if band.kind == "mixture"]
    assert near_it == ["within"]


@pytest.mark.parametrize("size", [1.2, 2.0, 3.0])
@pytest.mark.parametrize("law", PLANTED)
def test_a_planted_contradiction_is_named_at_three_strengths(law: str, size: float) -> None:
    columns = log_of(0.1, 3)
    metric, plant = PLANTED[law]
    columns[metric] = plant(columns, size)
    assert law in laws_broken_in(columns)


def test_every_law_is_planted() -> None:
    assert {law.name for law in LAWS} == PLANTED.keys()


def test_the_published_chi_square_of_minus_0_88_is_called_void_and_nothing_else_is_accused() -> None:
    """The numbers of verl#7242."""
    published = {
        "kl_k1": 5.35e-3,
        "kl_k3": 5.19e-3,
        "chi2_token": 0.0108,
        "chi2_seq": -0.881,
        "prob_abs_diff": 0.0148,
        "prob_abs_diff_max": 0.611,
        "prob_abs_diff_std": 0.030,
        "prob_pearson": 0.9925,
    }
    columns = {name: np.array([value]) for name, value in published.items()}
    (contradiction,) = contradictions_in(columns, np.array([1]), {name: name for name in columns})
    assert (contradiction.law, contradiction.is_exact) == ("chi2_seq_below_zero", False)


def test_each_sample_has_its_headline() -> None:
    kinds = {name: reading_of(name).curves[0].shape for name in ("verl.jsonl", "slime.log", "prime_rl.jsonl")}
    assert kinds == {"verl.jsonl": "growing", "slime.log": "step_up", "prime_rl.jsonl": "flat"}
    assert "steps up 3.9-fold at step 18" in reading_of("slime.log").verdict.sentence
    skyrl = reading_of("skyrl.log")
    assert "is a sawtooth around" in skyrl.verdict.sentence
    assert "from the newest weights to the oldest" in skyrl.curves[0].shape_words
    assert "staleness" in skyrl.causes[0]


def unsure_curve(fold: float) -> np.ndarray:
    """A change over 40 of 60 steps that the test of its level does not tell from slow noise."""
    rng, steps = np.random.default_rng(0), np.arange(60)
    while True:
        rise = np.log(fold) * np.maximum(steps - 20, 0) / 39
        values: np.ndarray = 1.2e-3 * np.exp(rise + 0.08 * rng.standard_normal(60))
        if shape_of(values).kind == "unsure":
            return values


@pytest.mark.parametrize("fold", [3.3, 1 / 3.3])
def test_a_change_that_is_not_sure_has_both_levels_and_the_causes_of_a_sure_one(tmp_path: Path, fold: float) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "rollout_corr/k3_kl": kl} for step, kl in enumerate(unsure_curve(fold).tolist())]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = read_metric_log(file)
    assert log is not None
    reading = reading_of_metrics(file, log)
    assert re.match(
        r"KL \(k3\) went from a level of [\d.e-]+ to [\d.e-]+, which slow noise can do", reading.verdict.sentence
    )
    assert re.fullmatch(r"[\d.]+-fold, no sure trend", reading.curves[0].shape_words)
    assert any("drives the two apart" in cause for cause in reading.causes) is (fold > 1)


def test_a_filled_in_zero_is_named_and_the_rest_is_read() -> None:
    reading = reading_of("nemo_rl.tfevents")
    assert [contradiction.law for contradiction in reading.contradictions] == ["not_computed"]
    assert reading.verdict.kind == "undecided"
    assert reading.verdict.sentence.startswith("KL (k3) grew")


def test_samples_of_sound_runs_are_accused_of_nothing() -> None:
    for name in ("slime.log", "skyrl.log", "prime_rl.jsonl", "prime_rl.log", "trackio.db"):
        assert reading_of(name).contradictions == [], name
    (void,) = reading_of("verl.jsonl").contradictions
    assert (void.law, void.first_step) == ("chi2_seq_below_zero", 19)


def test_a_cause_that_lowers_the_entropy_comes_last_where_the_entropy_stays(tmp_path: Path) -> None:
    growing = 1e-3 * np.exp(np.linspace(0, 5, len(STEPS)))
    for entropy, place in ((np.full(len(STEPS), 0.5), -1), (np.linspace(0.5, 0.1, len(STEPS)), 0)):
        log = lines_of(tmp_path / "metrics.jsonl", kl_k3=growing, entropy=entropy)
        metrics = read_metric_log(log)
        assert metrics is not None
        causes = reading_of_metrics(log, metrics).causes
        assert "entropy falls" in causes[place]
        assert ("did not fall" in causes[place]) == (place == -1)
        assert ("the entropy that is logged fell" in causes[place]) == (place == 0)


def test_a_headline_beyond_a_limit_names_the_limit_and_how_many_times_it_that_is(tmp_path: Path) -> None:
    log = lines_of(tmp_path / "metrics.jsonl", kl_k3=np.full(len(STEPS), 4.1e-3), entropy=np.linspace(2, 1, len(STEPS)))
    metrics = read_metric_log(log)
    assert metrics is not None
    reading = reading_of_metrics(log, metrics)
    assert "4.1 times the limit of NeMo-RL (0.001)" in reading.verdict.sentence
    answer = curves_answer(reading)
    assert "JSON lines with metrics of verl" in answer.facts
    assert "likeliest" not in str(answer)
    at_limit = lines_of(tmp_path / "at.jsonl", kl_k3=np.full(len(STEPS), 1.003e-3), entropy=np.ones(len(STEPS)))
    metrics = read_metric_log(at_limit)
    assert metrics is not None
    assert "above the limit of NeMo-RL (0.001)" in reading_of_metrics(at_limit, metrics).verdict.sentence, "not 1 times"
    factor = tmp_path / "factor.jsonl"
    factor.write_text("".join(f'{{"step": {step}, "train/token_mult_prob_error": 1.08}}\n' for step in STEPS))
    metrics = read_metric_log(factor)
    assert metrics is not None
    assert "above the limit of NeMo-RL (1.05)" in reading_of_metrics(factor, metrics).verdict.sentence


def test_three_columns_are_named_and_none_that_is_logged() -> None:
    for path in DATA.glob("*.*"):
        if path.suffix != ".md":
            reading = reading_of(path.name)
            assert len(reading.next_columns) == 3
    skyrl = [column.name for column in reading_of("skyrl.log").next_columns]
    assert not any("age" in name or "entropy" in name for name in skyrl)


def lines_of(path: Path, **curves: np.ndarray) -> Path:
    names = {name.metric: name.name for name in reversed(metric_names().values()) if name.trainer == "verl"}
    rows = [
        {"step": int(step), **{names[metric]: float(values[step]) for metric, values in curves.items()}}
        for step in STEPS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_import_makes_a_folder_that_report_shows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    answer = probe("import", DATA / "verl.jsonl", "--out", run, "--json", code=ExitCode.PASS)
    document = CurveReading.model_validate_json(answer.stdout)
    assert kind_of(run) is RunKind.CURVES
    assert CurvesDirectory(run).read() == document
    page = (run / "report.html").read_text()
    assert "Compared with published numbers" in page
    assert "<h3>chi-squared of responses</h3>" in page
    assert "chi2 seq below zero" not in page
    k1 = next(curve for curve in document.curves if curve.metric == "kl_k1")
    assert k1.last_level == k1.values[-2]
    assert [band.relation for band in k1.bands] == ["above"]
    screen = probe("report", run, code=ExitCode.PASS).stdout
    assert document.verdict.sentence in screen
    assert "miles, mismatch blog, 300 runs" in screen
    assert "a reading of metrics alone" in probe("diff", run, run, code=ExitCode.USAGE).stderr
    assert "is not empty" in probe("import", DATA / "verl.jsonl", "--out", run, code=ExitCode.USAGE).stderr


def test_numbers_that_contradict_each_other_end_with_4(tmp_path: Path) -> None:
    columns = log_of(0.1, 3)
    path = lines_of(
        tmp_path / "bad.jsonl",
        kl_k3=columns["kl_k3"],
        prob_abs_diff=np.full(30, 0.2),
        prob_abs_diff_max=np.full(30, 0.1),
    )
    log = read_metric_log(path)
    assert log is not None
    reading = reading_of_metrics(path, log)
    assert reading.exit_code == ExitCode.ENVIRONMENT
    assert reading.verdict.sentence.startswith("Numbers of this log contradict each other: mean |pi - mu| is 0.200")
    assert curves_answer(reading).badge.kind == "broken"


def test_one_bad_step_is_named_and_does_not_void_the_log(tmp_path: Path) -> None:
    columns = log_of(0.1, 3)
    largest = columns["prob_abs_diff_max"].copy()
    largest[7] = 0.0
    path = lines_of(
        tmp_path / "one.jsonl",
        kl_k3=columns["kl_k3"],
        prob_abs_diff=columns["prob_abs_diff"],
        prob_abs_diff_max=largest,
    )
    log = read_metric_log(path)
    assert log is not None
    reading = reading_of_metrics(path, log)
    assert [contradiction.first_step for contradiction in reading.contradictions] == [7]
    assert reading.exit_code == ExitCode.PASS


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    values = np.full(30, 1e-3) * np.exp(0.1 * np.sin(STEPS * 2.1))
    values[[3, 4]] = np.nan, np.inf
    path = lines_of(tmp_path / "nan.jsonl", kl_k3=values)
    log = read_metric_log(path)
    assert log is not None
    (curve,) = reading_of_metrics(path, log).curves
    assert (curve.num_nonfinite, curve.num_steps, curve.values[3]) == (2, 30, None)


def test_a_strangers_names_are_inert(tmp_path: Path) -> None:
    path = tmp_path / "evil\x1b[31m.jsonl"
    path.write_text(json.dumps({"step": 1, "rollout_corr/k3_kl": 0.1, "\x1b]0;evil\x07": 1.0}) + "\n")
    log = read_metric_log(path)
    assert log is not None
    from io import StringIO

    from mismatch_probe.cli.output import PeopleConsole
    from mismatch_probe.report.screen import print_answer

    out = StringIO()
    print_answer(curves_answer(reading_of_metrics(path, log)), PeopleConsole(out))
    assert "\x1b" not in out.getvalue()
