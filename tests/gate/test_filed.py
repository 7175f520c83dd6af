"""Limits on what `headroom` and `localize` filed with a run: exact, and refused where it is not there."""

import json
from pathlib import Path

import pytest

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.examinations import Headroom, HeadroomVerdict, ScaleTrial
from mismatch_probe.records.findings import Findings, Localization
from mismatch_probe.records.run_directory import RunDirectory
from tests.gate.cli import CommandLine, Ended, check, gate_file
from tests.report.documents import headroom, localization
from tests.simulated_run import Simulation, simulated_run

GATE = "[gate]\nmin_sequences = 32\nmin_prompts = 32\nmax_sequences = 32\n"
GOOD = check(metric="abs_logprob_diff", max=1)
SUSPECT = localization(suspect_layer=5)


@pytest.fixture
def judged(command_line: CommandLine, small: RunDirectory, tmp_path: Path) -> "Judge":
    return Judge(command_line, small, tmp_path)


class Judge:
    """Files documents of the run's own checkpoint with it and judges it."""

    def __init__(self, command_line: CommandLine, run: RunDirectory, folder: Path) -> None:
        self._command_line, self.run, self._folder = command_line, run, folder

    def __call__(self, text: str, *documents: Headroom | Localization) -> Ended:
        fingerprint = self.run.read_manifest().model.fingerprint
        for document in documents:
            Findings(self.run.path).write(document.model_copy(update={"model_fingerprint": fingerprint}))
        return self._command_line("gate", self.run.path, "--config", gate_file(self._folder, GATE + text), "--json")


@pytest.mark.parametrize(
    ("limit", "kept", "broken"),
    [
        (check(metric="headroom_fits", equal=1), headroom(), headroom(1e5)),
        (check(metric="headroom_margin_bits", min=8), headroom(40.0), headroom(400.0)),
        (check(metric="headroom_loss_scales", min=4), headroom(), headroom(1e5)),
        (check(metric="localize_suspects", equal=0), localization(), SUSPECT),
        (check(metric="localize_suspects", max=0), localization(), SUSPECT),
    ],
)
def test_a_limit_is_kept_by_one_result_and_broken_by_another(
    command_line: CommandLine,
    tmp_path: Path,
    limit: str,
    kept: Headroom | Localization,
    broken: Headroom | Localization,
) -> None:
    for document, code, answer in ((kept, ExitCode.PASS, "pass"), (broken, ExitCode.GATE_FAILED, "fail")):
        run = simulated_run(tmp_path / answer, Simulation(num_prompts=32, mean_length=20))
        ended = Judge(command_line, run, tmp_path)(limit + GOOD, document)
        assert (ended.code, ended.document["answer"]) == (code, answer), ended
        assert json.loads((run.path / "gate.json").read_text())["answer"] == answer
        results = {judged["metric"]: judged["answer"] for judged in ended.document["checks"]}
        assert results.pop("abs_logprob_diff") == "pass"
        assert list(results.values()) == [answer]


def test_the_largest_share_that_a_part_would_fix_can_be_limited(judged: Judge) -> None:
    ended = judged(check(metric="localize_largest_share", max=0.3), localization())
    assert (ended.code, ended.document["checks"][0]["value"]) == (ExitCode.GATE_FAILED, 0.41)


@pytest.mark.parametrize(
    ("metric", "command"), [("headroom_fits", "headroom --run"), ("localize_suspects", "localize --run")]
)
def test_a_missing_result_is_never_a_pass(judged: Judge, metric: str, command: str) -> None:
    ended = judged(check(metric=metric, min=1) if metric == "localize_suspects" else check(metric=metric, equal=1))
    assert ended.code == ExitCode.ENVIRONMENT
    assert "which is not there: make it with" in ended.stderr
    assert command in ended.stderr
    assert json.loads((judged.run.path / "gate.json").read_text())["answer"] == "error"


def test_a_result_of_another_checkpoint_is_never_a_pass(judged: Judge) -> None:
    Findings(judged.run.path).write(headroom(fingerprint="f" * 16))
    ended = judged(check(metric="headroom_fits", equal=1))
    assert (ended.code, "is of another checkpoint than the run" in ended.stderr) == (ExitCode.ENVIRONMENT, True)


def test_a_damaged_result_is_never_a_pass(judged: Judge) -> None:
    (judged.run.path / "headroom.json").write_text("{")
    ended = judged(check(metric="headroom_fits", equal=1))
    assert (ended.code, "headroom.json cannot be read" in ended.stderr) == (ExitCode.ENVIRONMENT, True)


def test_weights_alone_do_not_say_that_a_model_fits(judged: Judge) -> None:
    nothing_run = headroom().model_copy(update=dict.fromkeys(("activations", "gradients", "plain", "bf16")))
    ended = judged(check(metric="headroom_fits", equal=1), nothing_run)
    assert (ended.code, "made with --weights-only" in ended.stderr) == (ExitCode.ENVIRONMENT, True)


@pytest.mark.parametrize("metric", ["headroom_fits", "headroom_loss_scales"])
def test_gradients_that_were_not_measured_do_not_say_that_a_model_fits(judged: Judge, metric: str) -> None:
    verdict = HeadroomVerdict.of(HeadroomCode.GRADIENTS_NOT_MEASURED, [])
    ended = judged(
        check(metric=metric, min=1) if metric == "headroom_loss_scales" else check(metric=metric, equal=1),
        headroom().model_copy(update={"verdict": verdict}),
    )
    assert (ended.code, "gradients were not measured" in ended.stderr) == (ExitCode.ENVIRONMENT, True)


@pytest.mark.parametrize(("error", "is_measured"), [(0.98, True), (0.99, False)])
def test_loss_scales_of_a_model_that_does_not_fit_count_where_a_gradient_was_measured(
    judged: Judge, error: float, *, is_measured: bool
) -> None:
    document = headroom(largest=1e5)
    assert document.plain is not None
    assert document.bf16 is not None
    scale = ScaleTrial(exponent=0, relative_error=error, num_nonfinite=0, nonfinite=[])
    trials = {"plain": document.plain, "bf16": document.bf16}
    document = document.model_copy(
        update={name: trial.model_copy(update={"scales": [scale]}) for name, trial in trials.items()}
    )
    ended = judged(check(metric="headroom_loss_scales", min=1), document)
    assert ("gradients were not measured" in ended.stderr) == (not is_measured)
    assert (ended.code == ExitCode.ENVIRONMENT) == (not is_measured)


@pytest.mark.slow
def test_every_pair_of_the_run_must_have_been_looked_into_unless_one_is_named(
    command_line: CommandLine, tmp_path: Path
) -> None:
    pairs = (("bf16", "bf16"), ("fp32", "fp32"))
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=32, mean_length=20, pairs=pairs))
    judge = Judge(command_line, run, tmp_path)
    ended = judge(check(metric="localize_suspects", equal=0), localization())
    assert (ended.code, "localize-fp32-fp32.json, which is not there" in ended.stderr) == (ExitCode.ENVIRONMENT, True)
    assert judge(check(metric="localize_suspects", equal=0, slice={"pair": "bf16"})).code == ExitCode.PASS


def test_a_broken_limit_that_only_warns_does_not_block(judged: Judge) -> None:
    ended = judged(check(metric="headroom_fits", equal=1, level="warn") + GOOD, headroom(1e5))
    assert ended.code == ExitCode.PASS
    assert "warning: headroom fits of FP16 is 0; == 1 is broken" in ended.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (check(metric="headroom_fits"), "no limit given"),
        (check(metric="headroom_fits", min=0), "asks for nothing"),
        (check(metric="localize_largest_share", max=1), "asks for nothing"),
        (check(metric="headroom_fits", equal=1, slice={"pair": "bf16"}), "take slice out"),
        (check(metric="headroom_fits", equal=1, clip=5), "'clip' is unknown"),
        (check(metric="headroom_fits", max_regression=0.1), "'max_regression' is unknown"),
        (check(metric="headroom_fit", equal=1), "did you mean 'headroom_fits'?"),
    ],
)
def test_a_check_that_cannot_be_decided_is_a_sentence(judged: Judge, text: str, words: str) -> None:
    ended = judged(text, headroom())
    assert (ended.code, words in ended.stderr) == (ExitCode.USAGE, True), ended


def test_compare_refuses_at_once_what_only_headroom_finds(command_line: CommandLine, tmp_path: Path) -> None:
    config = gate_file(tmp_path, GATE + check(metric="headroom_fits", equal=1))
    ended = command_line("compare", "--model", "demo", "--gate", config, "--out", tmp_path / "run")
    assert (ended.code, "which headroom finds and compare does not" in ended.stderr) == (ExitCode.USAGE, True)
    assert not (tmp_path / "run").exists()


def test_what_was_found_of_two_sides_is_not_taken_for_that_of_their_dtypes(judged: Judge) -> None:
    localized = localization()
    of_sides = localized.model_copy(
        update={"settings": localized.settings.model_copy(update={"pair": ("bf16", "fp8kv")})}
    )
    ended = judged(check(metric="localize_suspects", max=0) + GOOD, of_sides)
    assert ended.code == ExitCode.ENVIRONMENT
    assert "localize-bf16-bf16.json, which is not there" in ended.stderr
    assert (judged.run.path / "localize-bf16-fp8kv.json").exists()
