"""Faults in real runs, vLLM and all: the default guards see them, and each action does what it says."""

from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from benchmarks.training_faults import answers, outcomes
from benchmarks.training_faults.answers import Prove
from benchmarks.training_faults.fault import FIRST_ONSET, LAST_ONSET, LONGEST_HEALING, LONGEST_INTERVAL, Draw, Fault
from benchmarks.training_faults.faults import FAULTS
from benchmarks.training_faults.injection import Now
from benchmarks.training_faults.outcomes import SOON, clean_twin, fault_outcome
from benchmarks.training_faults.runs import SMALL, branched, run_with
from benchmarks.training_faults.sync_faults import last_layer_kept
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.parts import TrainingParts
from tests.environment import environment_as_it_was
from tests.train.quick_runs import BfloatEngine, quick_home, quick_settings
from tests.warm_python import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CHOSEN = [
    fault
    for fault in FAULTS
    if (fault.name, fault.strength)
    in {
        ("sync skipped", "every sync"),
        ("one layer on its way to the engine", "x 1.01"),
        ("last layer", "never synced"),
        ("engine samples otherwise, its log-probs show it", "temperature 1.2"),
        ("reward function", "too slow for one in 8"),
        ("end of responses", "dropped"),
        ("learning rate, applied unseen", "x 100"),
        ("gradients", "loss scale of 2^60"),
    }
]

LATEST_ONSET = 6


def test_a_layer_that_is_kept_is_as_it_was_first_sent_where_the_fault_is_there_from_the_first_sync() -> None:
    sent: list[dict[str, float]] = []
    engine = SimpleNamespace(
        update_weights=lambda weights: sent.append({name: float(value) for name, value in weights})
    )
    last_layer_kept(cast(TrainingParts, SimpleNamespace(engine=engine)), Now(1))
    for number in (1.0, 2.0):
        engine.update_weights([(f"layers.{layer}.w", torch.tensor(number)) for layer in (0, 3)])
    assert sent == [{"layers.0.w": 1.0, "layers.3.w": 1.0}, {"layers.0.w": 2.0, "layers.3.w": 1.0}]


@pytest.fixture(scope="module", autouse=True)
def _engine_imported() -> None:
    """Before a test, not in one: what is imported then is left out of the collections, ten for each engine."""
    with environment_as_it_was():
        import_module("mismatch_probe.engines.vllm.preload")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a twin without a fault, and what its policy earns, are kept for all faults."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture
def _short_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin ends behind the latest onset here; its policy is measured on half of the report's problems, and answers
    them in ten tokens instead of thirty.
    """
    monkeypatch.setattr(outcomes, "LAST_ONSET", LATEST_ONSET)
    monkeypatch.setitem(SMALL, "task", {"source": "copy:terms=2", "num_problems": 32})


def early(fault: Fault) -> Draw:
    """The first of its draws that begins soon, a sound step or more behind a checkpoint."""
    draws = (fault.drawn(Dtype.FP16, number) for number in count())
    soon = (draw for draw in draws if draw.onset <= LATEST_ONSET and draw.every < FIRST_ONSET)
    return next(draw for draw in soon if (draw.onset - 1) % draw.every)


@pytest.mark.usefixtures("_short_twins")
@pytest.mark.parametrize("fault", CHOSEN, ids=lambda fault: fault.slug)
def test_a_fault_is_caught_within_two_steps_and_its_cause_named(fault: Fault, lab: Path) -> None:
    found = fault_outcome(fault, Dtype.FP16, early(fault), lab, later=SOON - 1)
    assert found.in_time, found.firings
    assert found.right_cause, found.cause
    assert found.survived or fault.name == "learning rate, applied unseen", (found.reward, found.twin_reward)


@pytest.mark.usefixtures("_short_twins")
def test_no_guard_fires_without_a_fault(lab: Path, tmp_path: Path) -> None:
    """In the twin that faults are held against, and in the steps behind its last."""
    twin = clean_twin(CHOSEN[0], Dtype.FP16, lab, later=SOON - 1)
    begun = branched(twin, tmp_path / "run", LATEST_ONSET + SOON, every=1)
    settings = TrainingDirectory(tmp_path / "run").read_training_manifest().settings
    longer = settings.model_copy(update={"steps": 12})
    run = run_with(tmp_path / "run", longer, now=Now(longer.steps + 1, step=begun + 1), resume=True)
    assert list(run.metrics) == list(range(1, 13))
    assert [event["guard"] for event in run.directory.read_events()] == []


def test_a_draw_of_a_fault_is_the_same_in_every_call_and_another_for_another_number() -> None:
    draws = [FAULTS[0].drawn(Dtype.BF16, number) for number in range(64)]
    assert draws == [FAULTS[0].drawn(Dtype.BF16, number) for number in range(64)]
    assert {draw.onset for draw in draws} == set(range(FIRST_ONSET, LAST_ONSET + 1))
    assert {draw.every for draw in draws} == set(range(1, LONGEST_INTERVAL + 1))


def test_a_fault_that_heals_lasts_for_as_many_steps_as_are_drawn() -> None:
    healing = next(fault for fault in FAULTS if fault.heals and fault.lasts is None)
    lasts = {healing.drawn(Dtype.BF16, number).lasts for number in range(64)}
    assert lasts == set(range(1, LONGEST_HEALING + 1))


OF_THE_TRAINER_ALONE = (
    *(answers.skip_update, answers.lower_learning_rate, answers.tighten_sequences, answers.rollback, answers.stop),
)
"""Actions that ask nothing of an engine but to take weights: shown with a tiny policy, transformers as the engine."""


@pytest.mark.parametrize(
    "prove", [prove for prove in answers.PROOFS if prove not in OF_THE_TRAINER_ALONE], ids=lambda prove: prove.__name__
)
def test_an_action_does_what_it_says(prove: Prove, tmp_path: Path) -> None:
    """With half as many responses a step as in the report, and of ten tokens instead of thirty where these show it."""
    few = {} if prove is answers.switch_correction else {"task": {"source": "copy:terms=2"}}
    proof = prove(tmp_path / "run", rollout={"prompts": 4}, **few)
    assert proof.holds, (proof.checks, proof.seen)


@pytest.mark.parametrize("prove", OF_THE_TRAINER_ALONE, ids=lambda prove: prove.__name__)
def test_an_action_of_the_trainer_alone_does_what_it_says(
    prove: Prove, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the largest abs(S) is a bound that leaves out less than half of 32 responses, but not always of 16.

    The engine computes in BF16: in one dtype there are CPUs on which both sides agree to the last bit, and no S is far.
    An engine that only held BF16 weights would agree to FP32's rounding until the first update, and not from then on.
    """
    quick = quick_settings(llama, quick_home(tmp_path, monkeypatch, BfloatEngine), 1).model_dump(mode="json")
    parts = {"infer_dtype": "bf16", **{name: quick[name] for name in ("model", "task", "train_dtype")}}
    proof = prove(tmp_path / "run", **parts, rollout={"prompts": 8, "samples": 4, "max_new_tokens": 4})
    assert proof.holds, (proof.checks, proof.seen)


def test_a_run_that_a_guard_stops_ends_with_1_and_a_diagnosis_and_goes_on_once_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text('def score(prompt, response, answer):\n    return float("nan")\n')
    small = """--model demo --task copy:terms=2 --num-problems 32 --reward own:score --prompts-per-step 4
        --samples-per-prompt 4 --max-new-tokens 16 --steps 5 --out run"""
    output = command(small, ExitCode.GATE_FAILED)
    assert "rewards of the last step cannot be learned from" in output.splitlines()[0]
    outcome = TrainingDirectory(tmp_path / "run").read_training_manifest().outcome
    assert outcome.startswith("stopped: ")
    (tmp_path / "own.py").write_text("def score(prompt, response, answer):\n    return float(answer in response)\n")
    command("--resume --out run --reward own:score", ExitCode.PASS)
    assert [step for step, _ in TrainingDirectory(tmp_path / "run").read_metrics()] == [1, 2, 3, 4, 5]


def command(words: str, code: ExitCode) -> str:
    return warm_python("mismatch_probe", "train", *words.split(), code=code).stdout
