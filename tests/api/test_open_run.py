"""Runs opened from Python: their tables, what they say, and how a notebook shows them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mismatch_probe as mp
from mismatch_probe.dtypes import Dtype
from tests.report.training.training_runs import TrainingSample, firing, training_run
from tests.simulated_run import Simulation, simulated_run

LARGEST_CELL = 300_000
"""Bytes of a cell's output: with plotly.js in it, it would be 1.7 million."""


def columns(frame: Any) -> dict[str, list[Any]]:
    """Of a DataFrame, or of a Table where pandas is not installed."""
    return frame.to_dict("list") if hasattr(frame, "iloc") else frame.to_pydict()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))
    return simulated_run(path, Simulation(num_prompts=12, pairs=pairs), with_summary=True).path


def test_the_tables_of_a_comparison_hold_what_was_measured(comparison: Path) -> None:
    run = mp.open_run(comparison)
    tokens, responses = columns(run.tokens()), columns(run.sequences())
    estimate = run.pairs["bf16", "bf16"].metrics["abs_logprob_diff"]
    assert len(tokens["diff"]) == estimate.num_tokens == sum(responses["num_tokens"])
    assert np.mean(np.abs(tokens["diff"])) == pytest.approx(estimate.value)
    assert np.array(tokens["log_pi"]) - np.array(tokens["log_mu"]) == pytest.approx(np.array(tokens["diff"]), abs=1e-6)
    first = [place for place, name in enumerate(tokens["id"]) if name == responses["id"][0]]
    assert sum(tokens["diff"][place] for place in first) == pytest.approx(responses["diff_sum"][0])
    assert tokens["position"][: len(first)] == list(range(len(first)))
    assert {"log_ref", "text", "token_id", "prompt_id"} <= tokens.keys()


def test_a_pair_is_chosen_by_its_sides(comparison: Path) -> None:
    run = mp.open_run(str(comparison))
    bf16, fp32 = (np.abs(columns(run.tokens(pair))["diff"]).mean() for pair in run.pairs)
    assert fp32 < bf16 / 100
    with pytest.raises(mp.UsageError, match=r"has no pair bf16/fp32"):
        run.tokens(("bf16", "fp32"))
    with pytest.raises(KeyError, match=r"no pair 'bf16/bf61'; did you mean 'bf16/bf16'"):
        run.pairs["bf16", "bf61"]
    with pytest.raises(KeyError, match=r"no metric 'kl_k33'; did you mean 'kl_k3'"):
        run.pairs["bf16", "bf16"].metrics["kl_k33"]


@pytest.mark.slow
def test_a_comparison_says_what_its_summary_says(comparison: Path) -> None:
    run = mp.open_run(comparison)
    assert run.verdict == run.summary.verdict
    assert run.summary.headline in repr(run)
    metrics = columns(run.metrics())
    assert set(metrics["train"]) == {"bf16", "fp32"}
    assert {"metric", "value", "low", "high", "num_sequences"} <= metrics.keys()
    page = run._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "Verdict on each pair" in page
    assert 'id="responses"' not in page
    assert "report.html of the run" in page
    assert len(page.encode()) < LARGEST_CELL
    assert page.count("'") == 2, "only the attribute's own"


def test_a_training_run(tmp_path: Path) -> None:
    path = training_run(tmp_path / "run", TrainingSample(steps=8, firings=(firing(5, ["warn"]),))).path
    run = mp.open_run(path)
    metrics, events = columns(run.metrics()), columns(run.events())
    assert metrics["step"] == list(range(1, 9))
    assert all(math.isfinite(value) for value in metrics["mismatch/kl_k3"])
    assert (events["step"], events["guard"], events["value"]) == ([5], ["mismatch-limit"], [0.02])
    assert run.summary.steps == 8
    assert "finished" in repr(run)
    page = run._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert len(page.encode()) < LARGEST_CELL


def test_a_training_run_without_firings_has_an_empty_table(tmp_path: Path) -> None:
    run = mp.open_run(training_run(tmp_path / "run", TrainingSample(steps=2)).path)
    assert len(run.events()) == 0


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(mp.UsageError, match="holds no run; give the folder of a comparison"):
        mp.open_run(tmp_path)
