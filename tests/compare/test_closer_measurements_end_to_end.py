"""Floors, whole distributions and an ordinary KV cache of a real run: real vLLM, real transformers, a tiny llama."""

import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from tests.compare.test_compare import SMALL, compare
from tests.simulated_run import edit_leg
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.slow

LOOKED_AT = 4
"""Of the responses, one by one."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("close")
    model = make_checkpoint(folder / "llama", "llama")
    dtypes = ("--dtype", "bf16", "--dtype", "fp32", "--dtype", "fp16")
    (folder / "closer.toml").write_text(f"[floors]\nnum_sequences = {LOOKED_AT}\n")
    closer = ("--config", folder / "closer.toml", "--vllm.kv_cache_dtype", "auto")
    compare("--model", model, *dtypes, *closer, "--out", folder / "run", *SMALL)
    return RunDirectory(folder / "run")


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def pair(run: RunDirectory, request: pytest.FixtureRequest) -> PairSummary:
    return next(pair for pair in run.read_summary().pairs if pair.train_dtype == request.param)


def test_the_training_path_repeats_itself_to_the_last_bit(pair: PairSummary) -> None:
    assert pair.blame is not None
    assert pair.blame.floors["pi_again"].value == 0


def test_another_batch_changes_less_than_the_two_sides_differ_by(pair: PairSummary) -> None:
    assert pair.blame is not None
    assert pair.blame.floors["pi_other_batch"].value <= pair.blame.rms_difference.value


def test_the_engine_alone_is_near_the_engine_among_many(pair: PairSummary) -> None:
    assert pair.blame is not None
    assert pair.blame.floors["mu_other_batch"].value <= pair.blame.rms_difference.value


def test_the_engine_decodes_alone_as_among_many(pair: PairSummary) -> None:
    assert pair.blame is not None
    assert pair.blame.floors["mu_decoded_alone"].value <= pair.blame.rms_difference.value
    assert pair.metrics["decoded_alike"].value > 0.5
    assert pair.metrics["decoded_alike"].num_sequences == LOOKED_AT


def test_another_attention_changes_something_and_no_more_than_rounding(pair: PairSummary) -> None:
    assert pair.blame is not None
    assert 0 < pair.blame.floors["pi_other_attention"].value < 3 * pair.blame.rms_difference.value


def test_sampled_estimators_agree_with_the_whole_vocabulary(pair: PairSummary) -> None:
    check = pair.full_vocabulary
    assert check is not None
    assert {name: estimator.agrees for name, estimator in check.estimators.items()} == dict.fromkeys(
        check.estimators, True
    )
    assert check.full_kl.value > 0
    assert check.full_kl.low is not None
    assert check.full_kl.high is not None
    k3 = pair.metrics["kl_k3"]
    assert k3.low is not None
    assert k3.high is not None
    assert check.full_kl.low < k3.high
    assert k3.low < check.full_kl.high


def test_a_cache_as_wide_as_the_arithmetic_is_not_named(run: RunDirectory) -> None:
    """`test_low_cache` has the same with a cache in FP8."""
    codes = {pair.train_dtype: pair.verdict.code for pair in run.read_summary().pairs}
    assert codes == {"bf16": "precision", "fp16": "precision", "fp32": "clean"}


def test_only_numbers_remain_of_the_distributions(run: RunDirectory) -> None:
    assert not (run.path / "parts").exists()
    size = sum(path.stat().st_size for path in (run.path / "legs").glob("full-*"))
    assert size < 384 * VOCAB_SIZE


def test_a_leg_of_another_policy_is_noticed(run: RunDirectory) -> None:
    """The exact values of BF16 against the sampled tokens of FP32."""
    exact = {}
    edit_leg(run, "full-bf16-bf16", lambda columns: exact.update(columns))

    def exchange(columns: dict[str, list[list[float]]]) -> None:
        for name in ("full_kl", "full_tv"):
            columns[name] = [
                [*ours[: len(theirs)], *theirs[len(ours) :]]
                for ours, theirs in zip(exact[name], columns[name], strict=True)
            ]

    path = run.leg_path("full-fp32-fp32")
    recorded = path.read_bytes()
    edit_leg(run, "full-fp32-fp32", exchange)
    try:
        fp32 = summarise(run, run.read_manifest()).pairs[1]
    finally:
        path.write_bytes(recorded)
    assert fp32.full_vocabulary is not None
    assert not fp32.full_vocabulary.estimators["kl_k3"].agrees
    assert not fp32.full_vocabulary.estimators["tv"].agrees
