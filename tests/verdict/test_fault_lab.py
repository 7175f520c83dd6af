"""A slice of the fault lab on a real run: real vLLM, the real training path, and a fault of each kind."""

from pathlib import Path

import pytest

from benchmarks.fault_lab.__main__ import prepared
from benchmarks.fault_lab.bench import Bench
from benchmarks.fault_lab.log_faults import log_faults
from benchmarks.fault_lab.scoring import clean_outcomes, outcome
from benchmarks.fault_lab.training_faults import training_faults

pytestmark = pytest.mark.slow

SLICE = {
    ("log-probs shifted along the response", "+1 tokens"),
    ("responses joined to other responses' scores", "25% of rows"),
    ("temperature in the engine only", "T = 0.8"),
    ("text before the prompt", "BOS before it"),
    ("padding attended to", "25% of it"),
    ("RoPE base", "x 2"),
    ("other weights", "0.01 of each tensor"),
    ("dropout active", "p = 0.1"),
    ("logits read late", "1 token"),
    ("another dtype than the run says", "fp32 for bf16"),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    scratch: Path = tmp_path_factory.mktemp("fault-lab")
    return prepared("llama", scratch, num_prompts=24, num_tokens=32)


def test_clean_runs_of_every_dtype_are_not_accused(bench: Bench) -> None:
    outcomes = clean_outcomes("llama", *next(bench.clean_variants()))
    assert [clean_run.in_run.code for clean_run in outcomes] == ["precision", "precision", "clean"]
    assert not any(clean_run.is_accused for clean_run in outcomes)


@pytest.mark.parametrize(("fault", "strength"), sorted(SLICE))
def test_an_injected_fault_is_named_with_and_without_the_settings(bench: Bench, fault: str, strength: str) -> None:
    injection = next(
        injected
        for injected in (*log_faults(), *training_faults(bench))
        if (injected.fault, injected.strength) == (fault, strength)
    )
    diagnosed = outcome("llama", injection, injection.make(bench))
    assert diagnosed.full.code in diagnosed.expected
    assert diagnosed.alone.code in diagnosed.expected
    assert diagnosed.sixteen_bit.code in (*diagnosed.expected, "beyond_format", "unexplained")
