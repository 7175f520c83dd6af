"""A gate file that cannot be used ends with a sentence, its exit code, and no file that says pass."""

import json
from pathlib import Path

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from tests.gate.cli import GATE, GOOD, REGRESSION, CommandLine, check, gate_file

BAD_FILES = {
    "malformed TOML": ("[gate\n", "(malformed: "),
    "no gate table": ("", "has no [gate] table"),
    "another table": (GATE + GOOD + "[compare]\n", "table 'compare' is unknown"),
    "an unknown setting": ("[gate]\nmin_sequence = 5\n", "did you mean 'min_sequences'?"),
    "an unknown preset": ('[gate]\npreset = "trl"\n', "'preset' is not usable"),
    "no check": (GATE, "asks for nothing"),
    "every check off": (GATE + check(metric="kl_k2", max=1, level="off"), "asks for nothing"),
    "checks that are no tables": (GATE + "check = 3\n", "gate.check is no list of tables"),
    "a preset before any table": (
        'preset = "nemo-rl"\n',
        "setting 'preset' stands before any table; write it below [gate]",
    ),
    "alpha beyond use": ("[gate]\nalpha = 0.7\n" + GOOD, "'alpha' is not usable"),
    "alpha of next to nothing": ("[gate]\nalpha = 1e-300\n" + GOOD, "'alpha' is not usable"),
    "alpha as text": ('[gate]\nalpha = "0.05"\n' + GOOD, "'alpha' is not usable"),
    "fewer sequences at the end": ("[gate]\nmax_sequences = 50\n" + GOOD, "is below min_sequences"),
    "looks too close": ("[gate]\nmin_sequences = 100\nmax_sequences = 110\n" + GOOD, "1.5 times as many"),
    "an unknown key of a check": (GATE + check(metric="kl_k2", max=1, clipp=5), "did you mean 'clip'?"),
    "no metric": (GATE + check(max=1), "'metric' is missing"),
    "an unknown metric": (GATE + check(metric="abs_logprob_dif", max=1), "did you mean 'abs_logprob_diff'?"),
    "an aggregate it lacks": (GATE + check(metric="kl_k2", agg="p99", max=1), "kl_k2 has no aggregate 'p99'"),
    "an unknown aggregate": (GATE + check(metric="kl_k2", agg="median", max=1), "'agg' is not usable"),
    "no limit": (GATE + check(metric="kl_k2"), "no limit given"),
    "two limits": (GATE + check(metric="kl_k2", max=1, min=0), "both max and min"),
    "a limit that is no number": (GATE + check(metric="kl_k2") + "max = nan\n", "it holds nan"),
    "a limit below what there can be": (GATE + check(metric="kl_k2", min=0), "kl_k2 is never below 0"),
    "a limit that clip keeps": (GATE + check(metric="kl_k3", clip=0.01, max=1e-3), "never above 5.01671e-05 with clip"),
    "a share of at most all": (GATE + check(metric="top1_flip", max=1), "top1_flip is never above 1"),
    "a ratio of at least what it is": (
        GATE + check(metric="token_mult_prob_error", clip=5, min=1),
        "token_mult_prob_error is never below 1",
    ),
    "a regression to nothing": (
        GATE + check(metric="prob_pearson", max_regression=1),
        "can only be worse by less than 1",
    ),
    "an unknown level": (GATE + check(metric="kl_k2", max=1, level="fatal"), "'level' is not usable"),
    "a maximum that blocks": (GATE + check(metric="abs_logprob_diff", agg="max", max=1), "use abs_logprob_diff or"),
    "unclipped k3 that blocks": (GATE + check(metric="kl_k3", max=1), "add clip = 5"),
    "sequence chi-squared that blocks": (GATE + check(metric="chi2_seq", max=1), "use kl_k2_seq"),
    "a clip of nothing": (GATE + check(metric="kl_k3", clip=0, max=1), "'clip' is not usable"),
    "a regression of a signed metric": (GATE + check(metric="kl_k1", max_regression=0.1), "no relative regression"),
    "a check given twice": (GATE + GOOD + GOOD, "is given twice"),
    "an unknown slice": (GATE + check(metric="kl_k2", max=1, slice={"pos": "0:5"}), "setting 'slice.pos' is unknown"),
    "a range that is none": (GATE + check(metric="kl_k2", max=1, slice={"position": "5"}), "is no range"),
    "an empty range": (GATE + check(metric="kl_k2", max=1, slice={"position": "5:5"}), "is empty"),
    "an unknown side": (
        GATE + check(metric="kl_k2", max=1, slice={"pair": "fp8"}),
        "asks for the pair fp8/fp8",
    ),
    "no name of a side": (GATE + check(metric="kl_k2", max=1, slice={"pair": "b f"}), "a side's name is at most 48"),
    "positions no response reaches": (GATE + check(metric="kl_k2", max=1, slice={"position": "9999:"}), "no token of"),
    "lengths no response has": (GATE + check(metric="kl_k2", max=1, slice={"length": "9999:"}), "no token of"),
    "a pair that was not run": (GATE + check(metric="kl_k2", max=1, slice={"pair": "fp16"}), "the run has bf16/bf16"),
    "a metric that was not recorded": (GATE + check(metric="top1_flip", max=0.5), "were not recorded"),
    "a regression without a baseline": (GATE + REGRESSION, "add --baseline"),
    "a floor that was never measured": (GATE + 'floor = "floor.json"\n' + GOOD, "make it with gate calibrate"),
}


@pytest.mark.parametrize(("text", "words"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_gate_file_that_cannot_be_used(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path, text: str, words: str
) -> None:
    ended = command_line("gate", baseline.path, "--config", gate_file(tmp_path, text))
    assert ended.code == ExitCode.USAGE
    assert words in ended.stderr
    assert json.loads((baseline.path / "gate.json").read_text())["answer"] == "error"


def test_a_gate_file_that_is_not_there(command_line: CommandLine, baseline: RunDirectory, tmp_path: Path) -> None:
    ended = command_line("gate", baseline.path, "--config", tmp_path / "none.toml")
    assert (ended.code, "there is no gate file" in ended.stderr) == (ExitCode.USAGE, True)
