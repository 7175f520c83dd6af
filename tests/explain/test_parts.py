"""Weights that changed while a response was sampled: each part by the real scores of its own weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.fault_lab.in_training import other_weights
from mismatch_probe.config.model import SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain import explain
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.explain.parts import _intervals, _plans
from mismatch_probe.records.findings import Explanation
from mismatch_probe.records.sequences import EncodedPrompt, FloatArray, LoggedResponse, TokenSequence
from mismatch_probe.tasks.source import load_tokenizer
from mismatch_probe.training_path.generation import Sampler
from mismatch_probe.training_path.precision import load_training_model
from tests.explain.logs import logged, scored, settings

FEW_PROMPTS = 6
"""Of which two responses each are drawn: as many as show what all of them show."""


def drawn(checkpoint: Path, prompts: list[EncodedPrompt], num_tokens: int, seed: int) -> list[list[int]]:
    sampling = SamplingSettings(max_new_tokens=num_tokens, temperature=1.5)
    with Sampler(checkpoint, Dtype.FP32, TrainingPathSettings(), sampling) as sampler:
        return [response.token_ids for response in sampler.sample(prompts, None, seed)]


def updated_in_flight(older: Path, newer: Path, num_prompts: int = 12) -> tuple[list[TokenSequence], list[int]]:
    """Responses whose first part is sampled by the older weights and the rest by the newer, and where that changes; 0
    where the newer sampled all of it.
    """
    tokenizer = load_tokenizer(str(newer), trust_remote_code=False)
    random = np.random.default_rng(0)
    pairs = random.integers(0, 99, (num_prompts, 2)).tolist()
    prompts = [
        EncodedPrompt(f"{number}", tokenizer(f"Q: {first}+{second}=")["input_ids"], "")
        for number, (first, second) in enumerate(pairs)
        for _ in range(2)
    ]
    firsts = drawn(older, prompts, 24, 1)
    cuts = [int(random.integers(6, len(ids) - 1)) if len(ids) > 8 else 0 for ids in firsts]
    begun_prompts = [
        EncodedPrompt(prompt.prompt_id, prompt.token_ids + ids[:cut], "")
        for prompt, ids, cut in zip(prompts, firsts, cuts, strict=True)
    ]
    rests = drawn(newer, begun_prompts, 40, 2)
    sequences = [
        TokenSequence(f"line {number + 1}", prompt.token_ids, ids[:cut] + rest)
        for number, (prompt, ids, cut, rest) in enumerate(zip(prompts, firsts, cuts, rests, strict=True))
    ]
    return sequences, cuts


def in_parts(older: list[FloatArray], newer: list[FloatArray], cuts: Sequence[int]) -> list[FloatArray]:
    return [np.concatenate([old[:cut], new[cut:]]) for old, new, cut in zip(older, newer, cuts, strict=True)]


def with_versions(log: list[LoggedResponse], cuts: Sequence[int]) -> list[LoggedResponse]:
    """As an engine records them that knows of each part."""
    return [
        replace(
            response,
            weight_version="7-8" if cut else "8",
            weight_spans=(("7", cut), ("8", len(response.token_ids))) if cut else (("8", len(response.token_ids)),),
        )
        for response, cut in zip(log, cuts, strict=True)
    ]


def explained(log: list[LoggedResponse], older: Path, newer: Path) -> Explanation:
    return explain(settings(newer, weights=({"version": "7", "checkpoint": str(older)},)), log)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.03, 0.2])
def test_weights_that_change_within_responses_are_named_with_their_place_and_the_stamp_at_completion(
    llama: Path, tmp_path: Path, size: float
) -> None:
    older = other_weights(llama, tmp_path / "older", size)
    sequences, cuts = updated_in_flight(older, llama)
    by_older, by_newer = scored(older, sequences), scored(llama, sequences)
    log = logged(sequences, mu=in_parts(by_older, by_newer, cuts), pi=by_newer, weight_version="8")
    explanation = explained(log, older, llama)
    mu, pi = explanation.sides
    assert (mu.verdict.code, pi.verdict.code) == ("mixed_weights", "as_declared")
    parts = explanation.parts
    assert parts is not None
    mixed = {response.where: response for response in parts.responses if len(response.parts) > 1}
    truly_mixed = {sequence.id: cut for sequence, cut in zip(sequences, cuts, strict=True) if cut}
    assert mixed.keys() <= truly_mixed.keys()
    assert len(mixed) >= (0.8 if size > 0.03 else 0.4) * len(truly_mixed)
    inside = [where for where, each in mixed.items() if _holds(each.intervals[0], truly_mixed[where])]
    assert len(inside) >= 0.9 * len(mixed)
    assert {response.misfit for response in mixed.values()} == {"completion"}
    assert any("stamp at completion" in line for line in mu.verdict.evidence)


def _holds(interval: Sequence[int], place: int) -> bool:
    return interval[0] <= place <= interval[1]


@pytest.mark.slow
def test_versions_that_are_recorded_for_each_part_are_declared_and_accuse_nobody(llama: Path, tmp_path: Path) -> None:
    older = other_weights(llama, tmp_path / "older", 0.05)
    sequences, cuts = updated_in_flight(older, llama, FEW_PROMPTS)
    by_older, by_newer = scored(older, sequences), scored(llama, sequences)
    log = with_versions(logged(sequences, mu=in_parts(by_older, by_newer, cuts), pi=by_newer), cuts)
    explanation = explained(log, older, llama)
    assert [side.verdict.code for side in explanation.sides] == ["as_declared"] * 2
    assert explanation.parts is not None
    assert explanation.parts.num_mixed >= 0.8 * sum(cut > 0 for cut in cuts)
    assert explanation.parts.misfits == {}


@pytest.mark.slow
def test_clean_logs_accuse_nobody_one_version_or_a_change_that_is_only_recorded(llama: Path, tmp_path: Path) -> None:
    older = other_weights(llama, tmp_path / "older", 0.05)
    equal = other_weights(llama, tmp_path / "equal", 0.0)
    sequences, cuts = updated_in_flight(llama, llama, FEW_PROMPTS)
    by_newer = scored(llama, sequences)
    log = logged(sequences, mu=by_newer, pi=by_newer, weight_version="8")
    for given, clean_log in ((older, log), (equal, with_versions(log, cuts))):
        explanation = explained(clean_log, given, llama)
        assert [side.verdict.code for side in explanation.sides] == ["as_declared"] * 2
        assert explanation.parts is not None
        assert (explanation.parts.num_mixed, explanation.parts.num_misfits) == (0, 0)


def with_kept_cache(older: Path, newer: Path, sequences: list[TokenSequence], cuts: Sequence[int]) -> list[FloatArray]:
    """The newer weights go on where the older ones left keys and values of the context, as an engine that drops
    nothing.
    """
    (before, arithmetic), (after, _) = (
        load_training_model(folder, Dtype.BF16, TrainingPathSettings(), torch.device("cpu"), trust_remote_code=False)
        for folder in (older, newer)
    )
    columns = []
    with arithmetic.active():
        for sequence, cut in zip(sequences, cuts, strict=True):
            ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
            num_prompt = len(sequence.prompt_token_ids)
            num_cached = num_prompt + cut - 1
            begun = before(ids[:, :num_cached], use_cache=True)
            rest = after(ids[:, num_cached:], past_key_values=begun.past_key_values, use_cache=True)
            logits = torch.cat([begun.logits[0, num_prompt - 1 :], rest.logits[0]]).float()[: len(sequence.token_ids)]
            log_probs = torch.log_softmax(logits, -1)
            own = log_probs.gather(-1, torch.tensor(sequence.token_ids)[:, None])
            columns.append(own.squeeze(-1).double().numpy())
    return columns


@pytest.mark.slow
def test_keys_and_values_that_are_kept_across_the_change_are_named(
    llama: Path, tmp_path: Path, rows_tried: set[int]
) -> None:
    older = other_weights(llama, tmp_path / "older", 0.06)
    sequences, cuts = updated_in_flight(older, llama, FEW_PROMPTS)
    sequences, cuts = zip(*((each, cut) for each, cut in zip(sequences, cuts, strict=True) if cut), strict=True)
    log = logged(
        list(sequences),
        mu=with_kept_cache(older, llama, list(sequences), cuts),
        pi=scored(llama, list(sequences)),
        weight_version="8",
    )
    explanation = explained(log, older, llama)
    mu, _ = explanation.sides
    assert mu.verdict.code == "mixed_weights"
    assert "keys and values of the older ones kept" in mu.verdict.sentence
    assert explanation.parts is not None
    assert explanation.parts.keeps_cache
    assert rows_tried == set(range(len(sequences)))


def tokens_of(lengths: Sequence[int]) -> LoggedTokens:
    sequences = [TokenSequence(f"line {number}", [1], [2] * length) for number, length in enumerate(lengths)]
    return LoggedTokens.of(logged(sequences, mu=[np.zeros(length) for length in lengths]))


def test_the_parts_of_least_loss_come_in_the_order_of_the_weights() -> None:
    tokens = tokens_of([30, 12])
    losses = np.ones((3, 42))
    losses[0, :10] = losses[1, 10:18] = losses[2, 18:30] = -4
    losses[1, 30:] = -4
    assert _plans(losses, tokens) == [((0, 10), (1, 18), (2, 30)), ((1, 12),)]
    assert _plans(losses[::-1], tokens)[1] == ((1, 12),)
    assert len(_plans(losses[::-1], tokens)[0]) < 3


def test_a_change_costs_more_than_chance_gives() -> None:
    """Losses of two versions on tokens of the first: the second is better on some end by chance."""
    random = np.random.default_rng(0)
    tokens = tokens_of([200] * 200)
    residual = random.standard_normal(200 * 200)
    losses = np.stack([residual**2 / 2, (residual - 0.3) ** 2 / 2])
    assert [plan for plan in _plans(losses, tokens) if len(plan) > 1] == []
    assert [plan for plan in _plans(losses[::-1], tokens) if len(plan) > 1] == []


def test_an_interval_holds_every_place_that_fits_about_as_well() -> None:
    losses = np.zeros((2, 20))
    losses[0, 12:], losses[1, :8] = 5, 5
    [interval] = _intervals(losses, ((0, 10), (1, 20)))
    assert interval == (8, 12)
