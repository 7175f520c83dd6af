"""`make paper`: its tables are those of its records, and what compares two ablations sees one number that differs."""

import json
import os
import runpy
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts.moved_weights import rows_of
from scripts.paper import differing_numbers, numbers_of, tables_of
from tests.ablate.test_summarise import ablation_run, all_cells

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "reports" / "paper"
CELL = "fp16-fp16.seed-1"


def test_the_tables_of_the_paper_are_those_of_its_records() -> None:
    assert (RECORDS / "tables.md").read_text(encoding="utf-8") == tables_of(RECORDS)


def test_two_runs_of_an_ablation_are_alike_and_one_number_that_differs_is_named(tmp_path: Path) -> None:
    cells = all_cells()
    run, again = (ablation_run(tmp_path / name, cells).path for name in ("run", "again"))
    assert numbers_of(run)
    assert differing_numbers(run, again) == []
    changed = replace(cells[CELL], changes={7: {"reward/mean": 0.123}})
    other = ablation_run(tmp_path / "other", {**cells, CELL: changed}).path
    assert differing_numbers(run, other) == [(CELL, 7, "reward/mean")]


def test_a_step_that_one_run_lacks_differs(tmp_path: Path) -> None:
    cells = all_cells()
    run, cut = (ablation_run(tmp_path / name, cells).path for name in ("run", "cut"))
    lines = (cut / "cells" / CELL / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (cut / "cells" / CELL / "metrics.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    assert {key[:2] for key in differing_numbers(run, cut)} == {(CELL, json.loads(lines[-1])["step"])}


def _paper(root: Path) -> tuple[list[str], str]:
    """The grids that the script runs in this copy of the repository, whose commands only write how they were called."""
    (root / "scripts").mkdir(parents=True, exist_ok=True)
    (root / "reports" / "paper").mkdir(parents=True, exist_ok=True)
    script = root / "scripts" / "paper.sh"
    script.write_bytes((ROOT / "scripts" / "paper.sh").read_bytes())
    bin_folder = root / "venv" / "bin"
    bin_folder.mkdir(parents=True, exist_ok=True)
    calls = root / "calls"
    calls.unlink(missing_ok=True)
    for name in ("python", "mismatch-probe"):
        command = bin_folder / name
        command.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {calls}\n'
            'if [ "$1" = ablate ]; then mkdir -p "$5" && touch "$5/ablation.json" "$5/manifest.json"; fi\n',
            encoding="utf-8",
        )
        command.chmod(0o755)
    ended = subprocess.run(
        ["bash", script, root / "out", root / "venv"], capture_output=True, text=True, check=True, env=os.environ
    )
    return calls.read_text(encoding="utf-8").splitlines(), ended.stdout


def test_the_script_runs_every_grid_that_has_a_file_and_the_second_time_resumes_each(tmp_path: Path) -> None:
    (tmp_path / "build" / "real" / "smollm2").mkdir(parents=True)
    (tmp_path / "build" / "real" / "smollm2" / "config.json").touch()
    first, _ = _paper(tmp_path)
    again, _ = _paper(tmp_path)
    grids = {path.stem for path in RECORDS.glob("*.toml")} - {"warn", "repeat"}
    ablations = [line for line in first if line.startswith("mismatch-probe ablate")]
    assert {Path(line.split()[3]).stem for line in ablations} == grids
    assert not any("--resume" in line for line in first)
    assert [f"{line} --resume" for line in ablations] == [line for line in again if " ablate " in line]
    assert again[-1] == "python -m scripts.paper reports/paper"


def test_without_the_real_checkpoint_the_script_leaves_its_grid_out_and_says_so(tmp_path: Path) -> None:
    calls, printed = _paper(tmp_path)
    assert not any("smollm2" in line for line in calls)
    assert "build/real/smollm2 holds no checkpoint" in printed


def test_the_reward_of_the_real_checkpoint_takes_each_answer_as_whole_words_and_no_other() -> None:
    names_answer = runpy.run_path(str(ROOT / "examples" / "rewards" / "answers.py"))["names_answer"]
    facts = [json.loads(line) for line in (RECORDS / "facts.jsonl").read_text(encoding="utf-8").splitlines()]
    for fact in facts:
        for spelling in fact["answer"].split("|"):
            assert names_answer(fact["prompt"], f"It is {spelling.upper()}.", fact["answer"]) == 1
            assert names_answer(fact["prompt"], f"It is {spelling}ish.", fact["answer"]) == 0
    assert names_answer("", "", "ice") == names_answer("", "nice", "ice") == names_answer("", "a", None) == 0


@pytest.mark.parametrize(("step", "share"), [(2.0**-10, 0.0), (2.0**-7, 1.0)])
def test_a_change_below_half_a_number_of_bf16_moves_no_weight_that_was_such_a_number(
    step: float, share: float, tmp_path: Path
) -> None:
    for steps, weights in ((0, torch.ones(8)), (5, torch.ones(8) + step)):
        model = tmp_path / "cells" / CELL / "checkpoints" / f"step-{steps:06}" / "model"
        model.mkdir(parents=True)
        save_file({"weight": weights}, model / "model.safetensors")
    rows = {row["rounded_to"]: row for row in rows_of(tmp_path)}
    assert {(row["cell"], row["steps"], row["weights"]) for row in rows.values()} == {(CELL, 5, 8)}
    assert rows["BF16"]["moved"] == 8 * share
    assert rows["BF16"]["passed_on"] == share
    assert rows["FP16"]["passed_on"] == 1


@pytest.mark.parametrize("kept", [(), (5, 10)])
def test_a_cell_without_its_first_checkpoint_gives_no_row_and_says_so(
    kept: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cells" / CELL).mkdir(parents=True)
    for steps in kept:
        (tmp_path / "cells" / CELL / "checkpoints" / f"step-{steps:06}" / "model").mkdir(parents=True)
    assert list(rows_of(tmp_path)) == []
    assert f"{CELL} kept no checkpoint of step 0" in capsys.readouterr().out
