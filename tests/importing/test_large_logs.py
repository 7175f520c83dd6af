"""Logs that are large in another way than by tokens: groups of prompts, one prompt with very many responses, steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as dataset
import pytest

from mismatch_probe.compare.run_reader import MOST_ROWS
from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.selection import chosen_prompts
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from tests.command_line import probe
from tests.importing.logs import row, rows, write


def imported(folder: Path, written: list[Any], *words: object) -> RunDirectory:
    folder.mkdir(parents=True, exist_ok=True)
    probe("import", write(folder / "log.jsonl", written), "--out", folder / "run", *words, code=ExitCode.PASS)
    return RunDirectory(folder / "run")


def pair_of(run: RunDirectory) -> PairSummary:
    (pair,) = run.read_summary().pairs
    return pair


def turns(groups: int, of_each: int, *, named: bool) -> list[Any]:
    """Conversations whose turns have prompts of their own and errors in common."""
    random = np.random.default_rng(0)
    written = []
    for group in range(groups):
        size = random.normal(0, 0.05)
        for turn in range(of_each):
            one = row(group * of_each + turn) | {"prompt_token_ids": [1, group, turn]}
            one["train_logprobs"] = (np.asarray(one["logprobs"]) - abs(size)).tolist()
            written.append(one | ({"group": f"conversation {group}"} if named else {}))
    return written


@pytest.mark.slow
def test_prompts_of_one_group_are_one_cluster_of_an_interval(tmp_path: Path) -> None:
    alone, together = (
        pair_of(imported(tmp_path / str(named), turns(12, 8, named=named))).metrics["abs_logprob_diff"]
        for named in (False, True)
    )
    assert (alone.num_prompts, together.num_prompts) == (96, 12)
    assert together.value == pytest.approx(alone.value, rel=1e-12)
    assert None not in (alone.low, alone.high, together.low, together.high)
    assert together.high - together.low > 1.5 * (alone.high - alone.low)  # type: ignore[operator]


@pytest.mark.slow
def test_groups_that_share_a_prompt_are_one_and_those_of_other_steps_are_others(tmp_path: Path) -> None:
    prompts = [("a", 1, 0), ("a", 2, 0), ("b", 2, 0), ("b", 3, 0), ("a", 4, 1), ("c", 5, 0)]
    written = [
        row(number, step=step) | {"prompt_token_ids": [1, prompt], "group": group}
        for number, (group, prompt, step) in enumerate(prompts)
    ]
    assert pair_of(imported(tmp_path, written)).metrics["abs_logprob_diff"].num_prompts == 3


@pytest.mark.slow
def test_a_gate_clusters_two_logs_by_group_too(tmp_path: Path) -> None:
    runs = [imported(tmp_path / name, turns(12, 8, named=True)) for name in ("old", "new")]
    gate = tmp_path / "gate.toml"
    head = "[gate]\nmin_sequences = 96\nmin_prompts = 40\nmax_sequences = 96\n"
    gate.write_text(f'{head}[[gate.check]]\nmetric = "abs_logprob_diff"\nmax_regression = 0.5\n')
    answer = probe("gate", "run", runs[1].path, "--config", gate, "--baseline", runs[0].path)
    assert answer.returncode == ExitCode.INCONCLUSIVE, answer
    assert "a pass needs 40 prompts, and there are 12" in " ".join(answer.stdout.split())


@pytest.mark.slow
def test_a_prompt_has_the_same_name_in_every_log(tmp_path: Path) -> None:
    """So a gate meets the prompts of two logs whatever their order."""
    written = rows(400)
    old, new = imported(tmp_path / "old", written), imported(tmp_path / "new", written[::-1])
    gate = tmp_path / "gate.toml"
    gate.write_text('[[gate.check]]\nmetric = "abs_logprob_diff"\nmax_regression = 0.5\n')
    answer = probe("gate", "run", new.path, "--config", gate, "--baseline", old.path)
    assert answer.returncode == ExitCode.PASS, answer


@pytest.mark.slow
def test_of_one_prompt_with_very_many_responses_some_are_analysed(tmp_path: Path) -> None:
    written = [one | {"prompt_token_ids": [1, 2]} for one in rows(600)]
    run = imported(tmp_path, written, "--max-tokens", 3000)
    origin = run.read_manifest().log
    assert origin is not None
    assert 1500 <= origin.analysed_tokens <= 4500
    assert pair_of(run).counts.num_tokens == origin.analysed_tokens
    choice = chosen_prompts({"one": 1000, "other": 1000}, lambda prompt_id: "both", 500)
    assert (choice.prompt_ids, choice.share) == ({"one", "other"}, 0.25)


@pytest.mark.slow
def test_very_many_steps_of_one_response_share_files_and_rows(tmp_path: Path) -> None:
    run = imported(tmp_path, [row(number, step=number, tokens=8) for number in range(800)])
    table = dataset.dataset(run.path / "log", format="parquet").to_table()
    assert sorted(table["step"].to_pylist()) == list(range(800))
    assert len(list((run.path / "log").glob("*/*.parquet"))) == 1
    steps = pair_of(run).steps
    assert len(steps) == 400 <= MOST_ROWS
    assert [(one.step, one.last_step) for one in steps[:2]] == [(0, 1), (2, 3)]
    assert sum(next(iter(one.metrics.values())).num_sequences for one in steps) == 800
    assert "2 to 3" in (run.path / "report.html").read_text()
    probe("import", run.path / "log", "--out", tmp_path / "again", code=ExitCode.PASS)
    assert pair_of(RunDirectory(tmp_path / "again")).metrics == pair_of(run).metrics
