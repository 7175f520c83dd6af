"""Logs that other systems' own writers made, through the whole command: counts and deviations as written."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.logs import FORMATS, Holds, recognise
from mismatch_probe.records.run_directory import RunDirectory
from tests.command_line import probe

DATA = Path(__file__).parents[1] / "logs" / "data"


def samples_of(holds: Holds) -> list[str]:
    return sorted(folder.name for folder in DATA.iterdir() if folder.is_dir() and recognise(folder).holds is holds)


BOTH_SIDES, ONE_SIDE, TEXTS = map(samples_of, (Holds.BOTH_SIDES, Holds.SAMPLER, Holds.PROMPTS))


@pytest.fixture(scope="module")
def source_mean() -> float:
    """Mean abs(log pi - log mu) over the sampled tokens of the rollouts that every log was written from."""
    responses = FORMATS.built_in["plain"].read(DATA / "plain" / "rollouts.jsonl", pytest.fail)
    deviations = [np.abs(response.log_pi - response.log_mu)[response.sampled] for response in responses]
    return float(np.concatenate(deviations).mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH_SIDES)
def test_a_log_of_both_sides_has_the_deviation_that_was_written(tmp_path: Path, name: str, source_mean: float) -> None:
    probe("import", DATA / name, "--out", tmp_path / "run", code=ExitCode.PASS)
    run = RunDirectory(tmp_path / "run")
    (pair,) = run.read_summary().pairs
    origin = run.read_manifest().log
    assert origin is not None
    assert origin.format == recognise(DATA / name).name == name
    assert pair.counts.num_sequences == 6
    assert pair.counts.num_tokens == origin.num_sampled_tokens
    four_decimals = 1e-4 if name == "prime_rl_traces" else 0.0
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(source_mean, rel=1e-5, abs=four_decimals)


@pytest.mark.parametrize("name", ONE_SIDE)
def test_a_log_of_the_samplers_side_waits_to_be_scored(tmp_path: Path, name: str) -> None:
    answer = probe("import", DATA / name, "--out", tmp_path / "run", code=ExitCode.INCONCLUSIVE)
    assert "6 responses" in answer.stdout
    assert "score" in answer.stdout


@pytest.mark.parametrize("name", TEXTS)
def test_a_log_of_texts_gives_its_prompts_and_the_reason(tmp_path: Path, name: str) -> None:
    answer = probe("import", DATA / name, "--out", tmp_path / "run", code=ExitCode.INCONCLUSIVE)
    assert recognise(DATA / name).why_not in answer.stdout
    prompts = (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()
    assert len(prompts) == (2 if name in ("trl", "verl_text") else 4)
