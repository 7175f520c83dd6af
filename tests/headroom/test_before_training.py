"""What `headroom` says before training is what the guards of an FP16 run then see; vLLM samples."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fp16_overflow import MODELS, Trained, examined, trained
from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.records.examinations import Headroom

STEPS = 4
"""More than a guard needs: an overflow fires at the second step, and an update lost at each is most of so many."""
MOST_TOKENS = 40
"""Of a response; those of a model that never ends one need not be as long as in the report."""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def looked_at_and_trained(number: int, folder: Path) -> tuple[Headroom, dict[str, Trained]]:
    """From half as many prompts as in the report: an overflow is in every response, or in none."""
    model = replace(MODELS[number], max_new_tokens=min(MODELS[number].max_new_tokens, MOST_TOKENS))
    checkpoint = model.make(folder / "model")
    return examined(checkpoint, num_prompts=2), {
        dtype: trained(checkpoint, model, dtype, folder, steps=STEPS, prompts=4) for dtype in model.learns_in
    }


def test_a_model_that_fits_is_not_accused_and_trains_in_fp16(tmp_path: Path) -> None:
    headroom, runs = looked_at_and_trained(0, tmp_path)
    assert headroom.verdict.code in (HeadroomCode.FITS, HeadroomCode.FITS_WITH_LOSS_SCALE)
    assert (runs["fp16"].guards, runs["fp16"].stopped) == ({}, None)


def test_activations_past_65504_are_named_at_their_layer_and_the_fp16_run_is_stopped(tmp_path: Path) -> None:
    headroom, runs = looked_at_and_trained(1, tmp_path)
    assert headroom.verdict.code not in (HeadroomCode.FITS, HeadroomCode.FITS_WITH_LOSS_SCALE)
    assert "overflow FP16, first at model.layers.1" in headroom.verdict.sentence
    assert headroom.activations is not None
    residual = [layer.residual for layer in headroom.activations.layers]
    assert [value is not None and value > 65504 for value in residual] == [False, True, True, True]
    assert "mismatch-nonfinite" in runs["fp16"].guards
    assert runs["fp16"].stopped is not None
    assert "FP16 training is dead" in runs["fp16"].stopped
    assert runs["bf16"].stopped is None
    assert runs["bf16"].overflows == 0


def test_a_backward_pass_that_overflows_is_foretold_and_seen_at_the_second_update(tmp_path: Path) -> None:
    headroom, runs = looked_at_and_trained(2, tmp_path)
    assert "backward pass overflows at every loss scale; the largest gradient is at model.layers.1.mlp" in (
        headroom.verdict.sentence
    )
    assert headroom.plain is not None
    assert headroom.plain.first_nonfinite is None
    assert runs["fp16"].guards["overflow"] == 2
    assert runs["fp16"].overflows >= 3
    assert runs["bf16"].overflows == 0
