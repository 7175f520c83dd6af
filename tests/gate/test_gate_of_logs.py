"""Imported logs under a gate: what they lack is said beside the answer, and a baseline of another model is refused."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.model import ExplainSettings, ModelSettings
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.findings import Explanation, Findings, SideExplanation, Trial
from mismatch_probe.records.summary import Verdict
from tests.command_line import probe
from tests.gate.cli import CommandLine, Ended
from tests.importing.logs import log_of_levels, row, write

GATE = '[gate]\nmin_sequences = 32\nmin_prompts = 8\nmax_sequences = 32\n[[gate.check]]\nmetric = "abs_logprob_diff"\n'


@pytest.fixture
def gated(command_line: CommandLine, tmp_path: Path) -> Any:
    def judge(run: Path, *words: object) -> Ended:
        kind = "max_regression = 10.0" if words else "max = 1.0"
        (tmp_path / "gate.toml").write_text(f"{GATE}{kind}\n")
        return command_line("gate", run, "--config", tmp_path / "gate.toml", "--json", *words)

    return judge


def imported(command_line: CommandLine, folder: Path, written: list[Any], *words: object) -> Path:
    folder.mkdir()
    log = write(folder / "log.jsonl", written)
    assert command_line("import", log, "--out", folder / "run", *words).code in (ExitCode.PASS, ExitCode.ENVIRONMENT)
    return folder / "run"


def of_steps(seed: int = 0, **others: Any) -> list[Any]:
    return [row(seed + number, step=number // 24, **others) for number in range(72)]


Copied = Callable[..., Path]


@pytest.fixture(scope="module")
def imported_once(tmp_path_factory: pytest.TempPathFactory) -> Copied:
    """A log of three steps that names a model, or none: imported once for each name of a run, and copied for a test."""

    @cache
    def run_of(name: str, model: str | None) -> Path:
        folder = tmp_path_factory.mktemp(name)
        log = write(folder / "log.jsonl", of_steps(**({} if model is None else {"model": model})))
        probe("import", log, "--out", folder / "run", code=ExitCode.PASS)
        return folder / "run"

    def copied(folder: Path, model: str | None = None) -> Path:
        return Path(shutil.copytree(run_of(folder.name, model), folder))

    return copied


def explained(run: Path, fingerprint: str, *, fits: bool) -> None:
    """As `explain` files it."""
    trial = Trial(departures=[], explained=0.0, residual_floors=0.5, residual_nats=0.01, standard_scores=0.0)
    verdict = Verdict(kind="clean", code="as_declared", sentence="", evidence=[], advice=[])
    side = SideExplanation(
        side="mu", num_tokens=1, num_missing=0, floor_nats=0.1, trials=[trial], explained_by=trial, verdict=verdict
    )
    if not fits:
        side = side.model_copy(update={"explained_by": None})
    Findings(run).write(
        Explanation(
            tool_version="0",
            settings=ExplainSettings(model=ModelSettings(path="checkpoint")),
            model_fingerprint=fingerprint,
            num_responses=1,
            num_tokens=1,
            sides=[side],
            verdict=verdict,
            seconds=0.0,
        )
    )


def test_a_log_that_is_too_small_for_the_first_look_asks_for_a_log_and_not_for_a_command(
    command_line: CommandLine, imported_once: Copied, tmp_path: Path
) -> None:
    run = imported_once(tmp_path / "log")
    text = GATE.replace("= 32", "= 128").replace("min_prompts = 8", "min_prompts = 9")
    (tmp_path / "gate.toml").write_text(f"{text}max = 1.0\n")
    document = command_line("gate", run, "--config", tmp_path / "gate.toml", "--json").document
    assert (document["answer"], document["next_command"]) == ("inconclusive", None)
    next_look = "the first look is at 128 sequences, and a pass needs 9 prompts: import a log with as many."
    assert document["sentence"].endswith(next_look)


@pytest.mark.slow
def test_steps_and_responses_that_were_left_out_stand_beside_the_answer(
    command_line: CommandLine, gated: Any, tmp_path: Path
) -> None:
    written = of_steps()
    for one in written[24:48]:
        one["train_logprobs"] = [0.0] * 30
    answer = gated(imported(command_line, tmp_path / "log", written))
    assert answer.code == ExitCode.PASS, answer
    assert "steps of the log that are not judged: 1" in answer.document["notes"]
    assert "judged: 48 of the log's 72 responses" in answer.document["notes"]
    assert any("are all 0 in step 1" in note for note in answer.document["notes"])


@pytest.mark.slow
def test_a_slice_that_lacks_too_much_is_no_pass_where_the_log_lacks_little(
    command_line: CommandLine, tmp_path: Path
) -> None:
    written = of_steps()
    for one in written[48:]:
        one["logprobs"][:2] = [None, None]
    run = imported(command_line, tmp_path / "log", written)
    for part, code in (('"0:"', ExitCode.PASS), ('"2:"', ExitCode.INCONCLUSIVE), ('":2"', ExitCode.PASS)):
        limit = f"max = 1.0\nslice = {{ step = {part} }}\n"
        (tmp_path / "gate.toml").write_text(GATE.replace("= 32", "= 8", 1) + limit)
        answer = command_line("gate", run, "--config", tmp_path / "gate.toml", "--json")
        assert answer.code == code, (part, answer.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "code"), [(4, ExitCode.INCONCLUSIVE), (36, ExitCode.PASS)])
def test_responses_that_are_copies_count_as_tokens_without_a_log_prob(
    command_line: CommandLine, gated: Any, tmp_path: Path, every: int, code: ExitCode
) -> None:
    written = of_steps()
    for one in written[::every]:
        one["train_logprobs"] = one["logprobs"]
    answer = gated(imported(command_line, tmp_path / "log", written))
    assert answer.code == code, answer
    assert any(f"in {72 // every} of 72 responses" in note for note in answer.document["notes"])
    assert ("tokens without a log-prob are" in answer.stdout) == (code == ExitCode.INCONCLUSIVE)


@pytest.mark.slow
def test_steps_of_which_chance_took_no_response_are_named_too(
    command_line: CommandLine, gated: Any, tmp_path: Path
) -> None:
    run = imported(command_line, tmp_path / "log", [row(number, step=number // 2) for number in range(72)])
    assert "not judged" not in " ".join(gated(run).document["notes"])
    run = imported(
        command_line, tmp_path / "part", [row(number, step=number // 2) for number in range(72)], "--max-tokens", 1300
    )
    (note,) = (note for note in gated(run).document["notes"] if note.startswith("steps of the log"))
    assert note.count(",") >= 10


@pytest.mark.slow
def test_a_baseline_whose_checkpoint_nobody_knows_is_said_not_to_be_checked(
    imported_once: Copied, gated: Any, tmp_path: Path
) -> None:
    runs = [imported_once(tmp_path / name) for name in ("old", "new")]
    answer = gated(runs[1], "--baseline", runs[0])
    assert answer.code == ExitCode.PASS, answer
    assert any("the log of the run and of the baseline does not say which" in note for note in answer.document["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fingerprints", "fits", "code"),
    [
        (("a1", "a1"), True, ExitCode.PASS),
        (("a1", "b2"), True, ExitCode.USAGE),
        (("a1", "b2"), False, ExitCode.PASS),
    ],
)
def test_the_checkpoints_that_explained_two_logs_are_compared(
    imported_once: Copied, gated: Any, tmp_path: Path, fingerprints: Any, fits: bool, code: ExitCode
) -> None:
    """One that did not fit says nothing of the log."""
    runs = [imported_once(tmp_path / name) for name in ("old", "new")]
    for run, fingerprint in zip(runs, fingerprints, strict=True):
        explained(run, fingerprint, fits=fits)
    answer = gated(runs[1], "--baseline", runs[0])
    assert answer.code == code, answer
    assert ("is of another model" in answer.stderr) == (code == ExitCode.USAGE)
    if code == ExitCode.PASS:
        assert any("not checked" in note for note in answer.document["notes"]) != fits


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("theirs", ExitCode.USAGE), ("ours", ExitCode.PASS)])
def test_logs_that_name_two_models_are_not_compared(
    imported_once: Copied, gated: Any, tmp_path: Path, name: str, code: ExitCode
) -> None:
    old, new = imported_once(tmp_path / "old", "ours"), imported_once(tmp_path / "new", name)
    answer = gated(new, "--baseline", old)
    assert answer.code == code, answer
    assert ("is of another model (ours" in answer.stderr) == (code == ExitCode.USAGE)


@pytest.mark.parametrize("level", ["warn", "error", "off"])
def test_a_pass_beside_a_verdict_that_is_a_bug_says_so_and_blocks_where_that_is_asked(
    command_line: CommandLine, tmp_path: Path, level: str
) -> None:
    """Mean abs(d) is 0.8 nats, which no BF16 makes, and the limit is 1."""
    log = log_of_levels(tmp_path / "log.jsonl", [1.0], responses=64)
    assert command_line("import", log, "--out", tmp_path / "run").code == ExitCode.PASS
    (tmp_path / "gate.toml").write_text(GATE.replace("[gate]", f'[gate]\nverdict = "{level}"') + "max = 1.0\n")
    ended = command_line("gate", tmp_path / "run", "--config", tmp_path / "gate.toml", "--json")
    result = ended.document
    what = "the run's own verdict on log is a bug: the two sides differ by more than BF16 can"
    assert ended.code == (ExitCode.GATE_FAILED if level == "error" else ExitCode.PASS)
    assert (f", but {what}." in result["sentence"]) == (level == "warn")
    assert [check["answer"] for check in result["checks"] if check["metric"] == "verdict"] == (
        [] if level == "off" else ["fail"]
    )


def test_a_sound_run_has_no_word_of_its_verdict(imported_once: Copied, gated: Any, tmp_path: Path) -> None:
    assert "verdict" not in str(gated(imported_once(tmp_path / "run")).document)
