"""Zeros in logs: of samplers that are sure, for what was not recorded, and of greedy sampling."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.errors import ExitCode
from tests.command_line import probe
from tests.importing.imported import imported, pair_of
from tests.importing.logs import mean_abs, row, write
from tests.importing.watching import old, watched


def sure_rows(count: int, share: float = 0.8, **others: Any) -> list[dict[str, Any]]:
    """Responses whose sampler is alone in its nucleus (top-p 0.98) at so many tokens, of 40."""
    written = [row(number, tokens=40, **others) for number in range(count)]
    for number, one in enumerate(written):
        random = np.random.default_rng(1000 + number)
        for position in np.flatnonzero(random.random(40) < share):
            one["logprobs"][position], one["train_logprobs"][position] = 0.0, float(-random.uniform(0, 0.02))
    return written


def filled(one: dict[str, Any]) -> dict[str, Any]:
    """As `row` makes it, but for the engine's column: zeros."""
    return one | {"logprobs": [0.0] * len(one["logprobs"])}


def notes_of(run: Any) -> dict[str, str]:
    log = run.read_manifest().log
    assert log is not None
    return {note.code: note.sentence for note in log.notes if note.level != "note"}


@pytest.mark.slow
def test_a_few_responses_of_zeros_among_honest_ones_are_named_and_left_out(tmp_path: Path) -> None:
    honest = sure_rows(60)
    lost = [filled(row(100 + number, tokens=40)) for number in range(2)]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", [*honest, *lost]))
    pair = pair_of(run)
    assert notes_of(run).keys() == {"zeros_fill_responses"}
    assert "exactly 0 at 80 of 2,480 sampled tokens, in 2 responses, where" in notes_of(run)["zeros_fill_responses"]
    counts = pair.counts
    assert (counts.missing_mu, counts.left_out_tokens, counts.num_tokens, counts.zeros_for_missing) == (
        80,
        80,
        2400,
        80,
    )
    answer = probe("report", tmp_path / "run")
    words = "80 of them are exactly 0 on one side and, by what the other says, stand for no log-prob; "
    assert "Left out: 80 tokens (3.2 %)" in (output := " ".join(answer.stdout.split()))
    assert words.removesuffix("; ") in output
    assert re.search(
        r"zeros of the log that stand for no log-prob.{,80}>80<",
        (tmp_path / "run" / "report.html").read_text(),
        re.DOTALL,
    )
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(honest), rel=1e-12)
    assert pair.verdict.kind != "broken"


@pytest.mark.slow
def test_honest_zeros_and_nulls_are_no_zeros_for_what_is_missing(tmp_path: Path) -> None:
    honest = sure_rows(60)
    honest[0]["logprobs"][7] = None
    run = imported(tmp_path, write(tmp_path / "log.jsonl", honest))
    counts = pair_of(run).counts
    assert (counts.left_out_tokens, counts.zeros_for_missing) == (1, 0)
    assert "exactly 0" not in probe("report", tmp_path / "run").stdout


@pytest.mark.slow
def test_a_stretch_of_zeros_in_a_response_is_left_out_alone(tmp_path: Path) -> None:
    honest = sure_rows(60, share=0.3)
    spoiled = row(100, tokens=60)
    spoiled["logprobs"][20:50] = [0.0] * 30
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", [*honest, spoiled])))
    assert (pair.counts.missing_mu, pair.counts.partial_responses) == (30, 1)


@pytest.mark.slow
def test_a_step_of_nothing_but_honest_zeros_is_measured(tmp_path: Path) -> None:
    written = [one | {"step": 0} for one in sure_rows(16)] + [one | {"step": 1} for one in sure_rows(16, share=1.0)]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    assert (notes_of(run), pair_of(run).counts.num_tokens) == ({}, 32 * 40)
    folder = tmp_path / "steps"
    folder.mkdir()
    for step in (0, 1):
        write(folder / f"step_{step}.jsonl", [one for one in written if one["step"] == step])
    old(folder)
    _, record = watched(folder, code=ExitCode.PASS)
    assert record.num_judged == 2


@pytest.mark.slow
def test_a_response_of_zeros_in_a_step_of_a_watch_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    write(folder / "step_0.jsonl", sure_rows(32))
    write(folder / "step_1.jsonl", [*sure_rows(30), filled(row(100, tokens=30))])
    old(folder)
    answer, record = watched(folder, code=ExitCode.INCONCLUSIVE)
    assert record.steps[1].findings == ["zeros_fill_responses"]
    assert "not judged: 30 of 1,230 tokens (2.4 %, " in answer.stderr, "they are few, and have much of the surprisal"
    write(folder / "step_1.jsonl", [*sure_rows(80), filled(row(100, tokens=30))])
    old(folder)
    _, record = watched(folder, code=ExitCode.PASS)
    assert record.steps[1].left_out_tokens == 30


@pytest.mark.parametrize("with_pi", [True, False])
@pytest.mark.parametrize("temperature", [0.0, None])
def test_greedy_sampling_whose_log_probs_say_nothing_is_told_so(
    tmp_path: Path, temperature: float | None, with_pi: bool
) -> None:
    written = [filled(row(number, with_pi=with_pi, temperature=temperature)) for number in range(20)]
    log = write(tmp_path / "log.jsonl", written)
    answer = probe("import", log, "--out", tmp_path / "run", code=ExitCode.USAGE)
    sentence = (
        "their tokens were sampled at temperature 0" if temperature == 0 else "or sampling was greedy (temperature 0)"
    )
    assert sentence in answer.stderr


@pytest.mark.slow
def test_greedy_sampling_with_raw_log_probs_is_measured(tmp_path: Path) -> None:
    written = [row(number, temperature=0.0) for number in range(20)]
    assert pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written))).counts.num_tokens == 600


def test_zeros_of_a_side_alone_are_kept_until_another_side_tells(tmp_path: Path) -> None:
    written = [{name: one[name] for name in one if name != "train_logprobs"} for one in sure_rows(60)]
    log = write(tmp_path / "log.jsonl", written)
    run = imported(tmp_path, log, code=ExitCode.INCONCLUSIVE)
    assert notes_of(run).keys() == {"zeros_untold"}
