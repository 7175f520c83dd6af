"""From files to a verdict: what legs recorded of their ids and what stages read back reaches the judgement."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.compare.stages import START_TOKENS, scored_with_starts
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import SummaryFailed
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence, leg_columns
from mismatch_probe.records.summary import Summary
from mismatch_probe.records.tables import ids_key, read_table
from mismatch_probe.report.pairs import contrast_sentences, reference_sentences
from mismatch_probe.stats.sequences import MISSING_LOG_PROB
from mismatch_probe.verdict import preflight
from mismatch_probe.verdict.preflight.facts import AGREEMENT, Sides
from tests.simulated_run import Simulation, edit_leg, edit_manifest, simulated_run

pytestmark = pytest.mark.slow

TOKEN_COLUMNS = ("logprobs", *(name for name, column in leg_columns().items() if column.per_token))
WITH_FP32 = Simulation(num_prompts=24, pairs=((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32)))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return simulated_run(tmp_path / "run", WITH_FP32)


def judged(run: RunDirectory) -> Summary:
    return summarise(run, run.read_manifest())


def codes(run: RunDirectory) -> list[str]:
    return [pair.verdict.code for pair in judged(run).pairs]


def test_a_sound_run_is_precision_and_clean(run: RunDirectory) -> None:
    assert codes(run) == ["precision", "clean"]
    assert judged(run).preflight == []


def sides_that_differ(nats: float) -> Simulation:
    """A run whose reference lies so far from itself behind a cache."""
    agreement = {"num_tokens": 16, "shorter_nats": 0.0, "cached_nats": nats, "why_not_cached": None}
    return replace(WITH_FP32, applied={"score-ref-fp32": {"dtype": "fp32", AGREEMENT: agreement}})


@pytest.mark.parametrize("nats", [0.002, 0.125, 3.5])
def test_a_verdict_does_not_rest_on_a_reference_that_contradicts_itself(tmp_path: Path, nats: float) -> None:
    summary = judged(simulated_run(tmp_path / "run", sides_that_differ(nats)))
    assert [pair.verdict.kind for pair in summary.pairs] == ["precision", "clean"]
    for pair in summary.pairs:
        assert "ref" not in pair.legs
        assert pair.blame is not None
        assert (pair.blame.share_pi, pair.blame.rms_error_mu) == (None, None)
        assert pair.blame.unavailable["share_pi"].startswith("the reference does not agree with itself")
        assert pair.verdict.evidence[0].startswith("the reference does not agree with itself: one by one behind a")
        assert any("flash-linear-attention" in advice for advice in pair.verdict.advice)
    assert [finding.setting for finding in summary.preflight] == [AGREEMENT]
    assert reference_sentences(summary)


def test_a_reference_that_agrees_with_itself_is_used(tmp_path: Path) -> None:
    summary = judged(simulated_run(tmp_path / "run", sides_that_differ(2e-6)))
    assert all(pair.blame is not None and "ref" in pair.legs for pair in summary.pairs)
    assert (summary.preflight, reference_sentences(summary)) == ([], [])


@pytest.mark.parametrize(
    ("agreement", "says"),
    [
        ({"shorter_nats": 0.0, "cached_nats": 0.02}, "one by one behind a cache"),
        ({"shorter_nats": 0.3, "cached_nats": None}, "without the last token"),
        ({"shorter_nats": 0.0, "cached_nats": float("nan")}, "one by one behind a cache"),
        ({"shorter_nats": 2e-6, "cached_nats": 9e-6}, None),
        ({"shorter_nats": 0.0, "cached_nats": None}, None),
        (None, None),
    ],
)
def test_a_reference_that_contradicts_itself_is_said(agreement: dict[str, float] | None, says: str | None) -> None:
    read_back = {"agreement_with_itself": None if agreement is None else {"num_tokens": 16, **agreement}}
    findings = preflight.preflight(
        Sides(Dtype.BF16, Dtype.BF16, {"dtype": "bf16"}, {"dtype": "bf16"}, reference=read_back)
    )
    assert [finding.setting for finding in findings] == ([] if says is None else ["agreement_with_itself"])
    assert says is None or says in findings[0].what


def test_rows_of_another_order_are_mispaired_by_their_ids(run: RunDirectory) -> None:
    def turn(columns: dict[str, Any]) -> None:
        for name in ("ids_key", *TOKEN_COLUMNS):
            columns[name] = columns[name][1:] + columns[name][:1]

    edit_leg(run, "train-bf16", turn)
    verdict = judged(run).pairs[0].verdict
    assert (verdict.kind, verdict.code) == ("broken", "mispaired")


def test_a_row_of_another_length_is_told_and_the_others_are_measured(run: RunDirectory) -> None:
    def merge_a_token(columns: dict[str, Any]) -> None:
        columns["ids_key"][0] = 7
        for name in TOKEN_COLUMNS:
            if columns[name][0] is not None:
                columns[name][0] = columns[name][0][:-1]

    edit_leg(run, "train-bf16", merge_a_token)
    pair = judged(run).pairs[0]
    assert (pair.verdict.kind, pair.verdict.code) == ("broken", "retokenised")
    assert pair.counts.num_sequences == 23


def test_void_reference_log_probs_break_the_verdict_and_are_counted(run: RunDirectory) -> None:
    def lose_tokens(columns: dict[str, Any]) -> None:
        for row in (0, 3):
            columns["logprobs"][row][2] = float("nan")

    edit_leg(run, "ref-fp32", lose_tokens)
    pair = judged(run).pairs[0]
    assert (pair.verdict.kind, pair.verdict.code) == ("broken", "void_checks")
    assert (pair.counts.void_checks, pair.counts.num_sequences) == (2, 22)


@pytest.mark.parametrize(
    ("leg", "code"),
    [("train-bf16", "positive_logprobs"), ("infer-bf16-decode", "positive_logprobs"), ("ref-fp32", "void_checks")],
)
@pytest.mark.parametrize("value", [0.5, 5.0])
def test_log_probs_above_0_break_the_verdict_and_are_left_out(
    run: RunDirectory, leg: str, code: str, value: float
) -> None:
    def raise_tokens(columns: dict[str, Any]) -> None:
        columns["logprobs"][1][:2] = [value, value]

    edit_leg(run, leg, raise_tokens)
    pair = judged(run).pairs[0]
    assert (pair.verdict.kind, pair.verdict.code) == ("broken", code)
    assert pair.counts.num_sequences == 23
    if code == "positive_logprobs":
        assert pair.verdict.sentence.startswith("The data is broken: 2 log-probs are above 0")


@pytest.mark.parametrize(
    ("leg", "code"),
    [("train-bf16", "missing_logprobs"), ("infer-bf16-decode", "missing_logprobs"), ("ref-fp32", "void_checks")],
)
@pytest.mark.parametrize("value", [MISSING_LOG_PROB, -12345.0])
def test_vllms_floor_is_a_missing_log_prob_and_never_averaged(
    run: RunDirectory, leg: str, code: str, value: float
) -> None:
    """One token in fifty; taken for values, they were called truncated support of 200 nats a token."""

    def lose_tokens(columns: dict[str, Any]) -> None:
        for row, logprobs in enumerate(columns["logprobs"]):
            if row % 2:
                logprobs[::50] = [value] * len(logprobs[::50])

    before = judged(run).pairs[0]
    edit_leg(run, leg, lose_tokens)
    pair = judged(run).pairs[0]
    assert (pair.verdict.kind, pair.verdict.code, pair.verdict.also) == ("broken", code, [])
    assert (before.counts.num_sequences, pair.counts.num_sequences) == (24, 12)
    assert pair.metrics["abs_logprob_diff_max"].value < 1
    if code == "missing_logprobs":
        lost = pair.counts.missing_pi + pair.counts.missing_mu
        assert lost >= 12
        assert f"{lost} log-probs are missing" in pair.verdict.sentence


@pytest.mark.parametrize("lost", ["train-fp32", "train-bf16"])
def test_no_ratio_stands_beside_a_pair_that_is_broken(tmp_path: Path, lost: str) -> None:
    pairs: tuple[tuple[Dtype, Dtype], ...] = (
        (Dtype.BF16, Dtype.BF16),
        (Dtype.FP16, Dtype.FP16),
        (Dtype.FP32, Dtype.FP32),
    )
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=24, pairs=pairs))
    sound = judged(run)
    assert contrast_sentences(sound)
    assert re.search(r"FP16 is [\d.]+ \[[\d.]+, [\d.]+\] times closer", sound.headline)

    def lose_a_token(columns: dict[str, Any]) -> None:
        columns["logprobs"][0][0] = MISSING_LOG_PROB

    edit_leg(run, lost, lose_a_token)
    broken = judged(run)
    assert broken.contrasts == []
    assert "times" not in broken.headline
    recorded_before = sound.model_copy(update={"pairs": broken.pairs})
    assert contrast_sentences(recorded_before) == []


def test_a_log_prob_rounded_up_a_little_is_measured(run: RunDirectory) -> None:
    def round_up(columns: dict[str, Any]) -> None:
        columns["logprobs"][1][0] = 1e-3

    edit_leg(run, "train-bf16", round_up)
    assert codes(run) == ["precision", "clean"]


def test_bos_twice_on_one_side_is_seen_by_the_ids(run: RunDirectory) -> None:
    rollouts = read_table(run.rollouts_path)
    prompts, responses = (rollouts[name].to_pylist() for name in ("prompt_token_ids", "token_ids"))
    rows = [index for index, by in enumerate(rollouts["sampler"].to_pylist()) if by == "infer-bf16"]

    def encode_again(columns: dict[str, Any]) -> None:
        columns["ids_key"] = [ids_key([prompts[row][0], *prompts[row]], responses[row]) for row in rows]

    edit_leg(run, "train-bf16", encode_again)
    assert judged(run).pairs[0].verdict.code == "prompt_prefix"


def test_settings_that_stages_read_back_are_linted(run: RunDirectory) -> None:
    def heat(manifest: Manifest) -> None:
        manifest.stages["sample-bf16"].effective_settings["replay_temperature"] = 0.7
        manifest.stages["score-train-bf16"].effective_settings["temperature"] = 1.0

    edit_manifest(run, heat)
    assert [(difference.level, difference.code) for difference in judged(run).preflight] == [("error", "temperature")]
    assert codes(run) == ["precision", "clean"], "a setting without an effect accuses nobody"


def test_the_start_of_each_prompt_is_scored_beside_its_response() -> None:
    seen: list[TokenSequence] = []

    def score(batch: list[TokenSequence]) -> list[ScoredSequence]:
        seen.extend(batch)
        return [ScoredSequence(sequence.id, np.arange(len(sequence.token_ids), dtype=np.float32)) for sequence in batch]

    long, short = TokenSequence("a", list(range(100)), [1, 2]), TokenSequence("b", [5], [3])
    scored = scored_with_starts(score, [long, short])
    assert [scores.id for scores in scored] == ["a", "b"]
    assert scored[0].start_logprobs is not None
    assert scored[0].start_logprobs.tolist() == list(range(START_TOKENS - 1))
    assert scored[0].logprobs.tolist() == [99, 100], "the response follows the prompt's 99 predicted tokens"
    assert scored[1].start_logprobs is None, "nothing predicts a prompt's only token"
    assert scored[1].logprobs.tolist() == [0]
    assert seen[0] == TokenSequence("a", [0], [*range(1, 100), 1, 2]), "one pass scores both"


def with_adapters(tmp_path: Path, of_server: str) -> Summary:
    """The trainer computes with the adapter `a`; the server is said to serve another folder, or the same."""
    held = {"folder": "a", "fingerprint": "f1", "rank": 4, "alpha": 8.0, "merged": False, "change_norm": 2.0}
    server = {"dtype": "bf16", "engine": "server", "adapter": of_server, "prefill": False, "asked": {}}
    simulation = Simulation(
        num_prompts=4,
        pairs=(("adapted", "prod"),),
        train=({"name": "adapted", "dtype": "bf16", "adapter": "a"},),
        infer=({"name": "prod", "url": "http://127.0.0.1:8000", "adapter": of_server},),
        applied={"score-train-adapted": {"dtype": "bf16", "adapter": held}, "sample-prod": server},
        adapters={"a": "f1", "copy-of-a": "f1", "b": "f2"},
    )
    return judged(simulated_run(tmp_path / "run", simulation))


@pytest.mark.parametrize("folder", ["a", "copy-of-a"])
def test_a_server_with_the_trainers_adapter_is_not_accused_of_another(tmp_path: Path, folder: str) -> None:
    assert not [finding for finding in with_adapters(tmp_path, folder).preflight if finding.setting == "adapter"]


def test_a_server_with_another_adapter_is_found(tmp_path: Path) -> None:
    [finding] = [finding for finding in with_adapters(tmp_path, "b").preflight if finding.setting == "adapter"]
    assert (finding.level, finding.code) == ("error", "adapter")
    assert "a (rank 4, alpha 8) on the training path, b in the engine" in finding.what


def test_a_rule_that_raises_is_named_and_the_run_is_summarised_without_the_defect(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(sides: object) -> Iterator[Any]:
        raise TypeError("string indices must be integers")
        yield

    with monkeypatch.context() as patched:
        patched.setattr(preflight, "RULES", (*preflight.RULES, defective))
        with pytest.raises(SummaryFailed) as failed:
            judged(run)
    assert str(failed.value).startswith(
        "the rule defective on the pair bf16/bf16 failed (TypeError: string indices must be integers)"
    )
    assert f"mismatch-probe report {run.path} --recompute" in str(failed.value)
    assert codes(run) == ["precision", "clean"]
