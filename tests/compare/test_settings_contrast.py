"""What a side's own settings change, and that they hide no bug: planted on runs without engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.config.sides import InferSide, TrainSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.records.tables import read_table, write_table
from tests.simulated_run import Simulation, edit_leg, simulated_run

pytestmark = pytest.mark.slow

EAGER = InferSide(name="x", dtype=Dtype.BF16, args={"enforce_eager": False})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """BF16 and FP32, and beside them BF16 against an engine whose legs are those of BF16 under another name."""
    pairs = (("bf16", "bf16"), ("fp32", "fp32"))
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=32, mean_length=30, pairs=pairs))
    manifest = run.read_manifest()
    legs = Legs(run, manifest.run_key)
    for name in ("infer-x-decode", "train-bf16", "ref-fp32"):
        table = legs.read(name.replace("-x-", "-bf16-"))
        rows = table.to_pylist()
        moved = [
            row | {"id": row["id"].replace("@infer-bf16", "@infer-x")} for row in rows if "@infer-bf16" in row["id"]
        ]
        both = moved if name.startswith("infer-x") else [*rows, *moved]
        legs.write(name, table.from_pylist(both, schema=table.schema))
    rollouts = read_table(run.rollouts_path)
    rows = rollouts.to_pylist()
    moved = [
        row | {"id": row["id"].replace("@infer-bf16", "@infer-x"), "sampler": "infer-x"}
        for row in rows
        if row["sampler"] == "infer-bf16"
    ]
    write_table(run.rollouts_path, rollouts.from_pylist([*rows, *moved], schema=rollouts.schema))
    settings = manifest.settings.with_more([("bf16", "x")], [EAGER], [])
    stages = manifest.stages | {"sample-x": manifest.stages["sample-bf16"]}
    run.write_manifest(manifest.model_copy(update={"settings": settings, "stages": stages}))
    return run


def judged(run: RunDirectory) -> PairSummary:
    return summarise(run, run.read_manifest()).pairs[-1]


def test_settings_that_change_nothing_are_precision(run: RunDirectory) -> None:
    pair = judged(run)
    assert (pair.verdict.kind, pair.verdict.code) == ("precision", "settings")
    assert "enforce_eager = False is all that differs from BF16" in pair.verdict.sentence
    assert pair.settings_contrast is not None
    assert pair.settings_contrast.ratios["kl_k3"].value == pytest.approx(1)


def test_two_training_sides_are_set_against_each_other_on_the_same_tokens(run: RunDirectory) -> None:
    """A training side whose every deviation is three times that of BF16: the paired ratio is 3 to the last digits."""
    manifest = run.read_manifest()
    legs = Legs(run, manifest.run_key)
    table = legs.read("train-bf16")
    mu = dict(zip(*(legs.read("infer-bf16-decode")[name].to_pylist() for name in ("id", "logprobs")), strict=True))
    rows = [row for row in table.to_pylist() if row["id"] in mu]
    moved = [
        row | {"logprobs": (3 * np.asarray(row["logprobs"]) - 2 * np.asarray(mu[row["id"]])).tolist()} for row in rows
    ]
    legs.write("train-y", table.from_pylist(moved, schema=table.schema))
    side = TrainSide(name="y", dtype=Dtype.BF16, attention="eager")
    settings = manifest.settings.with_more([("y", "bf16")], [], [side])
    stages = manifest.stages | {"score-train-y": manifest.stages["score-train-bf16"]}
    run.write_manifest(manifest.model_copy(update={"settings": settings, "stages": stages}))
    contrast = judged(run).settings_contrast
    assert contrast is not None
    assert (contrast.side, contrast.counterpart) == ("pi", ("bf16", "bf16"))
    ratio = contrast.ratios["abs_logprob_diff"]
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low == pytest.approx(3, rel=1e-4)
    assert ratio.high == pytest.approx(3, rel=1e-4)
    assert ratio.num_sequences == 32


def without_fp32(run: RunDirectory) -> RunDirectory:
    """The run as if no FP32 pair had been asked for."""
    manifest = run.read_manifest()
    kept = [pair for pair in manifest.settings.pairs if pair != ("fp32", "fp32")]
    run.write_manifest(manifest.model_copy(update={"settings": manifest.settings.for_pairs(kept)}))
    return run


def test_a_measured_setting_is_told_where_no_fp32_pair_was_run(run: RunDirectory) -> None:
    summary = summarise(run, without_fp32(run).read_manifest())
    assert summary.pairs[-1].verdict.code == "settings"
    assert summary.verdict.kind == "undecided"
    assert "BF16" in summary.headline
    assert "--resume --dtype fp32" in " ".join(summary.pairs[-1].verdict.advice)


def test_two_pairs_of_equal_settings_are_no_answer(run: RunDirectory) -> None:
    """Under two names, which are no setting."""
    manifest = without_fp32(run).read_manifest()
    [side] = manifest.settings.infer
    settings = manifest.settings.model_copy(update={"infer": (side.model_copy(update={"args": {}}),)})
    summary = summarise(run, manifest.model_copy(update={"settings": settings}))
    assert [pair.verdict.code for pair in summary.pairs] == ["unexplained", "unexplained"]
    assert summary.pairs[-1].settings_contrast is None
    assert summary.headline.startswith("Undecided: ")


def spikes(values: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(values)) % 200 == 7, values - 3, values)


@pytest.mark.parametrize(
    "spoil",
    [lambda values: values - 1.0, lambda values: values * 3, spikes],
    ids=["every token off", "another temperature", "one token in 200 off by 3 nats"],
)
def test_a_bug_behind_settings_is_never_precision(run: RunDirectory, spoil: Callable[[np.ndarray], np.ndarray]) -> None:
    def spoiled(columns: dict[str, Any]) -> None:
        rows = columns["logprobs"]
        ends = np.cumsum([len(row) for row in rows])[:-1]
        columns["logprobs"] = [part.tolist() for part in np.split(spoil(np.concatenate(rows)), ends)]

    edit_leg(run, "infer-x-decode", spoiled)
    summary = summarise(run, run.read_manifest())
    assert summary.pairs[-1].verdict.kind in ("undecided", "bug")
    assert not summary.headline.startswith("No bug")
    commands = " ".join(summary.pairs[-1].verdict.advice)
    if summary.pairs[-1].verdict.kind == "undecided":
        assert "--resume --train fp32:dtype=fp32 --infer x-fp32:dtype=fp32,enforce_eager=false" in commands
