"""What responses to one prompt share measures each side's own noise, from the log alone; chance accuses nobody."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.compare.run_reader import RunReader
from mismatch_probe.config.sides import LOG_SIDE
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.run import Log, LogSettings, import_log
from mismatch_probe.logs import FORMATS
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.sections.errors import errors
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.signatures.weights import floor_with_noise
from tests.command_line import probe

NUM_PROMPTS, GROUP, SHARED, LENGTH = 16, 4, 12, 40
Row = dict[str, Any]


def rows(noise: float = 0.0, *, of_pi: float = 0.0, shared: int = SHARED, seed: int = 0) -> list[Row]:
    """Groups of responses that share their first tokens and then part; each side's log-probs move by its noise."""
    random = np.random.default_rng(seed)
    written = []
    for prompt in range(NUM_PROMPTS):
        start, exact = random.integers(10, 9000, shared), -random.gamma(1.0, 1.0, shared)
        for _ in range(GROUP):
            ids = np.concatenate([start, random.integers(10, 9000, LENGTH - shared)])
            log_probs = np.concatenate([exact, -random.gamma(1.0, 1.0, LENGTH - shared)])
            mu, pi = (
                np.minimum(log_probs + np.concatenate([random.normal(0, size, LENGTH)]), 0.0)
                for size in (noise, of_pi or noise)
            )
            written.append(
                {
                    "prompt_token_ids": [5, 6, 7 + prompt],
                    "token_ids": ids.tolist(),
                    "logprobs": mu.tolist(),
                    "train_logprobs": (pi + random.normal(0, 0.02, LENGTH)).clip(max=0).tolist(),
                }
            )
    return written


def imported(folder: Path, written: list[Row]) -> tuple[PairSummary, TokenPair]:
    source = folder / "log.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in written))
    plain = FORMATS.built_in["plain"]
    log = Log(str(source), "plain", [], plain.read(source, pytest.fail), lambda: [])
    run = import_log(log, LogSettings(), folder / "run", lambda tokens: None)
    pair = RunReader(run, run.read_manifest()).pair((LOG_SIDE, LOG_SIDE)).pair
    assert pair is not None
    return run.read_summary().pairs[0], pair


def noise_evidence(pair: PairSummary) -> list[str]:
    return [line for line in pair.verdict.evidence if ("responses" in line and "prompt" in line) or "noise" in line]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.003, 0.02, 0.1])
def test_the_noise_of_each_side_is_measured_and_is_the_floor(tmp_path: Path, noise: float) -> None:
    summary, pair = imported(tmp_path, rows(noise, of_pi=noise / 2))
    assert summary.blame is not None
    of_mu = summary.blame.floors["mu_siblings"]
    assert of_mu.num_tokens == NUM_PROMPTS * (GROUP - 1) * SHARED
    assert of_mu.num_prompts == NUM_PROMPTS
    assert of_mu.value == pytest.approx(np.sqrt(2) * noise, rel=0.15)
    assert of_mu.low is not None
    assert of_mu.low < np.sqrt(2) * noise < (of_mu.high or 0)
    assert any("the engine's own noise is rms" in line for line in noise_evidence(summary))
    section = errors(RunDirectory(tmp_path / "run").read_summary())
    assert section is not None
    assert section.title == "How far each side is from itself"
    floor = floor_with_noise(pair, (Dtype.BF16, Dtype.BF16), 1e-6)
    assert floor == pytest.approx(np.hypot(of_mu.value, summary.blame.floors["pi_siblings"].value) / np.sqrt(2))
    assert floor_with_noise(pair, (Dtype.BF16, Dtype.BF16), 1.0) == 1.0


@pytest.mark.slow
def test_a_sampler_that_repeats_itself_bit_for_bit_has_a_noise_of_0_and_nobody_is_accused(tmp_path: Path) -> None:
    summary, pair = imported(tmp_path, rows(0.0))
    assert summary.blame is not None
    assert summary.blame.floors["mu_siblings"].value == 0
    assert any("repeats itself bit for bit on 576 tokens" in line for line in noise_evidence(summary))
    assert summary.verdict.kind == "undecided"
    assert floor_with_noise(pair, (Dtype.BF16, Dtype.BF16), 0.03) == 0.03


def _other_contexts(written: list[Row]) -> None:
    """Another first token, then equal ids at equal places by chance."""
    for number, row in enumerate(written):
        row["token_ids"][0] = 100 + number % GROUP
        row["logprobs"] = (-np.random.default_rng(number).gamma(1.0, 1.0, LENGTH)).tolist()


def _other_weights(written: list[Row]) -> None:
    for number, row in enumerate(written):
        row["weight_version"] = str(number % GROUP)


def _other_steps(written: list[Row]) -> None:
    for number, row in enumerate(written):
        row["step"] = number % GROUP


def _unsampled(written: list[Row]) -> None:
    """A tool wrote what the responses share."""
    for row in written:
        row["mask"] = [0] * SHARED + [1] * (LENGTH - SHARED)


def _copies(written: list[Row]) -> None:
    """Each response stands there twice, as after a retry; nothing else is shared."""
    for number, row in enumerate(written):
        row["token_ids"][0] = 100 + number % GROUP // 2
        if number % 2:
            row.update({name: list(written[number - 1][name]) for name in ("token_ids", "logprobs", "train_logprobs")})


@pytest.mark.parametrize("change", [_other_contexts, _other_weights, _other_steps, _unsampled, _copies])
def test_what_is_no_repetition_is_not_compared(tmp_path: Path, change: Callable[[list[Row]], None]) -> None:
    written = rows(0.02)
    change(written)
    summary, _ = imported(tmp_path, written)
    assert summary.blame is not None
    assert not summary.blame.floors
    assert not noise_evidence(summary)
    assert errors(RunDirectory(tmp_path / "run").read_summary()) is None


def test_few_shared_tokens_say_nothing(tmp_path: Path) -> None:
    written = rows(0.02, shared=1)[: 2 * GROUP]
    summary, _ = imported(tmp_path, written)
    assert summary.blame is None or not summary.blame.floors


def test_noise_far_beyond_rounding_is_no_floor(tmp_path: Path) -> None:
    summary, pair = imported(tmp_path, rows(1.5))
    assert floor_with_noise(pair, (Dtype.BF16, Dtype.BF16), 1e-6) == 1e-6
    assert any("the engine's own noise" in line for line in noise_evidence(summary))


@pytest.mark.slow
def test_a_log_of_the_sampler_alone_says_its_noise(tmp_path: Path) -> None:
    for noise, words in ((0.02, "noise: the engine's own noise is rms 0.02"), (0.0, "repeats itself bit for bit")):
        source = tmp_path / f"{noise}.jsonl"
        written = [{name: row[name] for name in row if name != "train_logprobs"} for row in rows(noise)]
        source.write_text("".join(f"{json.dumps(row)}\n" for row in written))
        answer = probe("import", source, "--out", tmp_path / f"run-{noise}", code=ExitCode.INCONCLUSIVE)
        assert words in answer.stdout
        assert "576 tokens" in answer.stdout
