"""Hooks inside real vLLM: every module of every architecture is matched, and looking changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.localize_faults.faults import draw, in_transformers
from benchmarks.localize_faults.lab import Trial
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.vllm.inside import engine_part_in_fp32, engine_parts, record_activations
from mismatch_probe.engines.vllm.outputs import infer_names
from mismatch_probe.localize.suspects import PlaceNames
from mismatch_probe.records.activations import plan_activation_batches
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.precision import undivided_modules
from tests.engines.conftest import StartEngine, start
from tests.localize.bench import Bench, some_sequences
from tests.tiny_models import make_checkpoint, plant_outliers

__all__ = ["start"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
Checkpoint = Callable[[str], Path]
ROUNDS_ITS_SCORES = {"gemma2": ["self_attn.attention"]}
"""Soft caps need transformers' eager attention, which rounds scores to BF16 where the engine keeps FP32."""
FAMILIES = ("llama", "qwen2", "qwen3", "mistral-sliding", "qwen3-moe", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(family: str, checkpoint: Checkpoint, start: StartEngine) -> Engine:
    """One for all tests of a family, which run one after the other."""
    return start(checkpoint(family), Dtype.BF16)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_every_module_is_matched_and_errs_as_rounding_does(
    checkpoint: Checkpoint, engine: Engine, tmp_path: Path, family: str
) -> None:
    bench = Bench(checkpoint(family), tmp_path, batch_tokens=400)
    bench.record("train")
    plain = engine.replay(some_sequences())
    layout, recorded = record_activations(engine, bench.batches, bench.store, modules=True)
    record_activations(engine, bench.batches, bench.store, modules=True, side="infer again")
    by_batch = [one for batch in bench.batches for one in engine.replay(batch.sequences)]
    assert all(np.array_equal(one.logprobs, other.logprobs) for one, other in zip(recorded, by_batch, strict=True))
    assert max(np.abs(one.logprobs - other.logprobs).max() for one, other in zip(recorded, plain, strict=True)) < 0.5

    held = bench.hold("infer", "train")
    names = PlaceNames.of({"layer_paths": layout["layer_paths"]}, {**layout, "names": infer_names(layout)})
    assert names.modules_without_place({error.place for error in held.errors}) == []
    assert [suspect.place for suspect in held.suspects] == ROUNDS_ITS_SCORES.get(family, [])

    assert bench.recorded("infer again") == bench.recorded("infer")
    bench.batches = bench.batches[:1]
    assert {error.place for error in bench.hold("train", "train").errors} == {error.place for error in held.errors}


@pytest.mark.parametrize("family", ["llama", "gemma3"], indirect=True)
def test_one_id_again_and_again_accuses_nobody_until_a_module_computes_something_else(
    checkpoint: Checkpoint, engine: Engine, tmp_path: Path, family: str
) -> None:
    bench = Bench(checkpoint(family), tmp_path)
    one_id = [TokenSequence(f"s{number}", [7] * (3 + number), [7] * 40) for number in range(10)]
    bench.batches = plan_activation_batches(one_id, batch_tokens=800, logit_rows=10_000)
    bench.record("train")
    record_activations(engine, bench.batches, bench.store, modules=True)
    assert bench.hold("infer", "train").suspects == []
    projection: Any = undivided_modules(bench.model)[1].mlp.down_proj
    projection.weight.data = projection.weight.data.roll(1, dims=0)
    bench.record("faulty")
    suspect, *others = bench.hold("infer", "faulty").suspects
    assert (suspect.place, suspect.layers, suspect.side) == ("mlp.down_proj", [1], "train")
    assert all("whose own error is rounding" in other.sentence for other in others), "kernels may round toward zero"


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3-moe"], indirect=True)
def test_a_raised_part_of_the_engine_changes_it_and_is_lowered_again(engine: Engine) -> None:
    plain = engine.replay(some_sequences())
    for part in engine_parts(engine):
        with engine_part_in_fp32(engine, part):
            with_part = engine.replay(some_sequences())
        again = engine.replay(some_sequences())
        assert any(
            not np.array_equal(one.logprobs, other.logprobs) for one, other in zip(plain, with_part, strict=True)
        )
        assert all(np.array_equal(one.logprobs, other.logprobs) for one, other in zip(plain, again, strict=True))


def test_a_model_with_outliers_is_accused_of_what_was_planted_alone(start: StartEngine, tmp_path: Path) -> None:
    """Massive activations, a huge and a dead channel, and a sink that most tokens attend to."""
    sink = 1
    folder = plant_outliers(make_checkpoint(tmp_path / "outliers", "llama"), sink)
    bench = Bench(folder, tmp_path)
    sequences = [
        replace(sequence, prompt_token_ids=[sink, *sequence.prompt_token_ids]) for sequence in some_sequences()
    ]
    bench.batches = plan_activation_batches(sequences, batch_tokens=800, logit_rows=10_000)
    bench.record("train")
    record_activations(start(folder, Dtype.BF16), bench.batches, bench.store, modules=True)
    assert bench.hold("infer", "train").suspects == []
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    for kind, strength in (("weight", 0.02), ("layer", 0.01), ("rope", 2.0), ("row", 0.1)):
        fault = draw(kind, strength, 0, num_layers=2, moe=False, vocab_size=256)
        with in_transformers(fault, bench.model, weights, 0.0):
            bench.record(f"faulty {kind}")
        trial = Trial("outliers", "train", fault, bench.hold("infer", f"faulty {kind}").suspects)
        assert trial.is_localized, trial


def test_planted_outliers_are_as_in_pretrained_models(tmp_path: Path) -> None:
    folder = plant_outliers(make_checkpoint(tmp_path, "llama"), sink=1)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.tensor([[1, *some_sequences()[0].token_ids]])
    with torch.no_grad():
        seen = model(ids, output_attentions=True, output_hidden_states=True)
    for scores in seen.attentions:
        assert scores[0, :, 1:, 0].median() > 0.9
    for states in seen.hidden_states[:-1]:
        assert states[0, 0].abs().max() > 1000 > 50 > states[0, 1:].abs().max()
        assert states[0, :, 5].abs().max() == 0
    embedded = seen.hidden_states[0][0, 1:].abs()
    assert embedded[:, 7].median() > 20 * embedded.median()


def test_chunks_of_a_prefill_give_the_same_rows(checkpoint: Checkpoint, start: StartEngine, tmp_path: Path) -> None:
    bench = Bench(checkpoint("qwen3"), tmp_path)
    for side, tokens in (("infer", 1024), ("chunked", 48)):
        engine = start(checkpoint("qwen3"), Dtype.FP32, args={"max_num_batched_tokens": tokens})
        record_activations(engine, bench.batches, bench.store, modules=True, side=side)
    assert max(error.between for error in bench.hold("infer", "chunked").errors) < 1e-4
