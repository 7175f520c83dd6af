"""Logs with a reference in FP32: a side that errs by more than its format can is a bug, and rounding is none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Verdict
from tests.command_line import probe
from tests.importing.logs import write

pytestmark = pytest.mark.slow

TOKENS = 40


def log(responses: int = 32, *, times: tuple[float, float] = (1.0, 1.0), dtypes: str = "bf16 bf16") -> list[Any]:
    """Rows whose sides (pi, mu) err so many times as much as rounding in their formats does."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(responses):
        exact = -0.5 - random.exponential(1.5, TOKENS)
        columns = {
            name: exact + random.normal(0, 4 * Dtype(dtype).round_off * factor, TOKENS) * np.sqrt(-exact)
            for name, dtype, factor in zip(("train_logprobs", "logprobs"), dtypes.split(), times, strict=True)
        }
        row = {"prompt_token_ids": [1, 5, 10 + number // 4], "token_ids": random.integers(3, 200, TOKENS).tolist()}
        rows.append(row | {name: np.minimum(column, -1e-3).tolist() for name, column in columns.items()})
        rows[-1]["ref_logprobs"] = exact.tolist()
    return rows


def verdict(rows: list[Any], folder: Path, dtypes: str = "bf16 bf16") -> Verdict:
    train, infer = dtypes.split()
    words = ["--ref-is-fp32", "--train-dtype", train, "--infer-dtype", infer]
    probe("import", write(folder / "log.jsonl", rows), "--out", folder / "run", *words, code=ExitCode.PASS)
    return RunDirectory(folder / "run").read_summary().verdict


@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp16 fp16", "fp32 bf16", "fp16 bf16", "bf16 fp16", "fp32 fp32"])
def test_sides_that_round_in_their_formats_are_no_bug(tmp_path: Path, dtypes: str) -> None:
    assert verdict(log(dtypes=dtypes), tmp_path, dtypes).kind != "bug"


@pytest.mark.parametrize(("times", "side"), [((8.0, 1.0), "training path"), ((1.0, 8.0), "engine")])
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp16 bf16", "bf16 fp16"])
def test_a_side_that_errs_by_more_than_its_format_can_is_a_bug(
    tmp_path: Path, dtypes: str, times: tuple[float, float], side: str
) -> None:
    found = verdict(log(times=times, dtypes=dtypes), tmp_path, dtypes)
    assert (found.kind, found.code) == ("bug", "beyond_format")
    assert f"the {side}'s side errs by more" in found.sentence


def test_a_side_in_fp32_needs_no_other_side_to_be_measured_by(tmp_path: Path) -> None:
    found = verdict(log(times=(1e5, 1e5), dtypes="fp32 fp32"), tmp_path, "fp32 fp32")
    assert (found.kind, found.code) == ("bug", "beyond_format")
    assert "the training path's side and the engine's side err by more than FP32 can" in found.sentence


@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp32 bf16"])
def test_a_reference_copied_from_the_trainers_side_is_no_reference(tmp_path: Path, dtypes: str) -> None:
    rows = log()
    for row in rows:
        row["ref_logprobs"] = row["train_logprobs"]
    train, infer = dtypes.split()
    words = ["--ref-is-fp32", "--train-dtype", train, "--infer-dtype", infer]
    code = ExitCode.ENVIRONMENT if train == "bf16" else ExitCode.PASS
    probe("import", write(tmp_path / "log.jsonl", rows), "--out", tmp_path / "run", *words, code=code)
    found = RunDirectory(tmp_path / "run").read_summary().verdict
    assert (found.code == "copied_leg") == (train == "bf16")
    assert train != "bf16" or found.sentence.startswith(
        "The reference and the training path hold the same log-probs bit for bit"
    )


def test_a_single_prompt_with_two_responses_is_enough(tmp_path: Path) -> None:
    assert verdict(log(2, times=(16.0, 1.0)), tmp_path).code == "beyond_format"


def test_spikes_on_one_side_are_no_bug_by_themselves(tmp_path: Path) -> None:
    """As experts that are taken otherwise make them, in few tokens."""
    rows = log()
    for row in rows[::4]:
        row["logprobs"][7] -= 1.0
    assert verdict(rows, tmp_path).kind != "bug"
