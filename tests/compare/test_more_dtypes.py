"""More dtypes for a real run, and every advice of the tool followed as it is written."""

import re
import shlex
from contextlib import chdir
from pathlib import Path

import pytest

from mismatch_probe.compare.continuation import samplers_left
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.stages import FloorStage, ScoreStage
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table
from tests import command_line
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow

SMALL = (
    *("--prompts", "sums:easy", "--num-prompts", "8", "--max-new-tokens", "12"),
    *("--config", str(command_line.FEW)),
)


def probe(words: list[str], folder: Path) -> str:
    """What a command says to people; it must succeed."""
    with chdir(folder):
        answer = command_line.probe(*words, code=ExitCode.PASS)
        return answer.stderr + answer.stdout


def advised(output: str) -> list[list[str]]:
    """The commands that stand in the advice, as a shell takes them apart."""
    commands = [shlex.split(advice[1]) for advice in re.finditer(r"^ +(mismatch-probe .*)", output, re.MULTILINE)]
    return [command[1:] for command in commands]


def test_every_advice_is_a_command_that_works_as_it_is_written(tmp_path: Path) -> None:
    """From a pair that decides nothing to an FP32 pair beside it, and on to what looks closer."""
    model = make_checkpoint(tmp_path / "model", "llama")
    run = RunDirectory(tmp_path / "one run")
    command = ["compare", "--model", str(model), "--train-dtype", "fp32", "--infer-dtype", "bf16", "--out", "one run"]
    [add_fp32] = advised(probe([*command, *SMALL], tmp_path))
    assert add_fp32 == ["compare", "--out", "one run", "--resume", "--dtype", "fp32"]
    legs = {path: (path.read_bytes(), read_table(path)) for path in (run.path / "legs").iterdir()}
    kept = {path: content for path, (content, _) in legs.items() if "bf16" in path.name}
    output = probe(add_fp32, tmp_path)
    assert ": the engine samples in FP32" in output
    assert "the engine samples in BF16" not in output

    assert {path: path.read_bytes() for path in kept} == kept
    for path, (_, before) in legs.items():
        assert read_table(path).slice(0, before.num_rows).equals(before)
    manifest = run.read_manifest()
    assert manifest.continued[-1].added == [("fp32", "fp32")]
    assert {stage.state for stage in manifest.stages.values()} <= {"done", "skipped"}
    for stage in make_plan(manifest.settings).stages:
        if isinstance(stage, ScoreStage | FloorStage) and manifest.stages[stage.name].state == "done":
            assert samplers_left(run, stage) == ()
    assert [pair.verdict.kind for pair in run.read_summary().pairs] == ["precision", "clean"]

    closer = advised(output)
    assert [command[0] for command in closer] == ["localize", "headroom"]
    for command in closer:
        probe(command, tmp_path)
    assert advised(probe(["report", "one run"], tmp_path)) == []


def test_an_unfinished_run_finishes_what_it_began_and_then_takes_the_dtypes(tmp_path: Path) -> None:
    """A leg that was lost stands for one that was not reached; the added dtypes come after it."""
    model = make_checkpoint(tmp_path / "model", "llama")
    run = RunDirectory(tmp_path / "run")
    probe(["compare", "--model", str(model), "--dtype", "bf16", "--out", "run", *SMALL], tmp_path)
    lost = run.leg_path("train-bf16")
    before = lost.read_bytes()
    lost.unlink()
    run.summary_path.unlink()
    probe(["compare", "--out", "run", "--resume", "--train-dtype", "fp32", "--infer-dtype", "bf16"], tmp_path)
    assert lost.read_bytes() == before
    pairs = [(pair.train_dtype, pair.infer_dtype) for pair in run.read_summary().pairs]
    assert pairs == [("bf16", "bf16"), ("fp32", "bf16")]
    assert run.read_summary().pairs[1].full_vocabulary is not None
