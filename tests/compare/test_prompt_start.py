"""Prompts that lack their family's first token: told of a run's own prompts, in the headline of a sound run too."""

from pathlib import Path

import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.dtypes import Dtype
from tests.simulated_run import Simulation, simulated_run

PAIRS = ((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))


def headline(tmp_path: Path, start: tuple[int, str] | None) -> str:
    """Of a sound run of 16 prompts that begin with token 1."""
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=16, pairs=PAIRS))
    manifest = run.read_manifest()
    model = manifest.model.model_copy(update={"start_token": start})
    return summarise(run, manifest.model_copy(update={"model": model})).headline


@pytest.mark.slow
def test_prompts_without_the_first_token_are_told_in_the_headline(tmp_path: Path) -> None:
    assert headline(tmp_path, (2, "<bos>")).endswith(
        "; but 16 of 16 prompts do not begin with <bos>, as every text of this model's family does."
    )


@pytest.mark.slow
def test_prompts_that_begin_with_it_and_families_without_one_accuse_nobody(tmp_path: Path) -> None:
    assert "; but" not in headline(tmp_path / "with", (1, "<s>"))
    assert "; but" not in headline(tmp_path / "none", None)
