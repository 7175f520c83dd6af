"""What `headroom` and `localize` found, filed in a folder of its own or with a run; only a tiny model runs here."""

import json
from pathlib import Path

import pytest

from mismatch_probe.cli.examinations import examine_run
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.examinations import HeadroomSettings, LocalizeSettings, headroom_values, localize_values
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.errors import OutOfMemory
from mismatch_probe.provenance import checkpoint
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.run_directory import RunDirectory
from tests.cli.test_schema import validate
from tests.gate.cli import GATE, CommandLine, check, gate_file
from tests.report.documents import headroom, localization
from tests.simulated_run import Simulation, simulated_run
from tests.tiny_models import make_checkpoint

SMALL = ("--num-prompts", 2, "--samples-per-prompt", 2, "--max-new-tokens", 8)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that says it was made from a tiny checkpoint."""
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=32, mean_length=20), with_summary=True)
    folder = make_checkpoint(tmp_path / "tiny")
    manifest = run.read_manifest()
    model = manifest.model.model_copy(update={"folder": str(folder), "fingerprint": checkpoint.fingerprint(folder)})
    settings = manifest.settings.model_copy(
        update={
            "model": ModelSettings(path=str(folder)),
            "prompts": manifest.settings.prompts.model_copy(update={"source": "sums:easy"}),
        }
    )
    run.write_manifest(manifest.model_copy(update={"model": model, "settings": settings}))
    return run


@pytest.mark.slow
def test_headroom_of_a_run_is_filed_with_it_and_on_its_page(run: RunDirectory, command_line: CommandLine) -> None:
    ended = command_line("headroom", "--run", run.path, *SMALL, "--json")
    assert ended.code == 0, ended
    found = Findings(run.path).headroom()
    assert found is not None
    assert json.loads(found.model_dump_json()) == ended.document
    assert found.model_fingerprint == run.read_manifest().model.fingerprint
    assert found.settings.prompts.source == "sums:easy"
    assert 'id="headroom"' in run.report_path.read_text()
    again = command_line("headroom", "--run", run.path, *SMALL)
    assert (again.code, "is there already: remove it to look again" in again.stderr) == (2, True)


@pytest.mark.slow
def test_an_examination_that_is_refused_is_undecided_and_leaves_the_comparison_alone(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OutOfMemory("it does not fit")

    monkeypatch.setattr("mismatch_probe.headroom.run.measure_headroom", refuse)
    refusal = examine_run(run)
    assert refusal is not None
    assert refusal.startswith("Train in FP16: undecided, headroom could not examine the checkpoint: it does not fit. ")
    assert f"mismatch-probe headroom --run {run.path}" in refusal
    assert not Findings(run.path).exist


@pytest.mark.slow
def test_localize_of_a_run_is_filed_with_it_for_report_and_gate(
    run: RunDirectory, tmp_path: Path, command_line: CommandLine
) -> None:
    few = ("--num-prompts", 2, "--max-new-tokens", 16, "--no-interventions")
    ended = command_line("localize", "--run", run.path, "--dtype", "fp32", *few, "--json")
    assert ended.code == 0, ended
    [found] = Findings(run.path).localizations()
    assert json.loads(found.model_dump_json()) == ended.document
    assert (found.settings.train_dtype, found.settings.prompts.source) == ("fp32", "sums:easy")
    assert 'id="localize-fp32-fp32"' in run.report_path.read_text()
    assert not list(run.path.glob(".localize-*"))
    limit = check(metric="localize_suspects", equal=0, slice={"pair": "fp32"})
    judged = command_line("gate", run.path, "--config", gate_file(tmp_path, GATE + limit))
    assert judged.code == 0, judged


@pytest.mark.slow
def test_a_folder_of_its_own_has_a_page_that_can_be_made_again(tmp_path: Path, command_line: CommandLine) -> None:
    out = tmp_path / "out"
    model = make_checkpoint(tmp_path / "tiny")
    ended = command_line("headroom", "--model", model, "--weights-only", "--out", out)
    assert ended.code == 0, ended
    assert command_line("report", out).stdout == ended.stdout
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    again = command_line("report", out, "--json")
    assert again.code == 0
    assert (out / "report.html").read_bytes() == page
    validate("headroom", again.document)


@pytest.mark.slow
def test_a_localization_is_rendered_again_from_its_file(tmp_path: Path, command_line: CommandLine) -> None:
    Findings(tmp_path).write(localization(suspect_layer=5))
    ended = command_line("report", tmp_path, "--json")
    assert ended.code == 0
    validate("localize", ended.document)
    assert "20 times the error" in (tmp_path / "report.html").read_text()
    assert "20 times the error" in command_line("report", tmp_path).stdout
    refused = command_line("report", tmp_path, "--recompute")
    assert (refused.code, "--recompute is for comparisons" in refused.stderr) == (2, True)


def test_a_changed_checkpoint_is_refused(run: RunDirectory, command_line: CommandLine) -> None:
    folder = Path(run.read_manifest().model.folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    ended = command_line("headroom", "--run", run.path)
    assert (ended.code, "no longer holds the checkpoint" in ended.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--out", "elsewhere"), "leave --out out"),
        (("--model", "demo"), "--run looks at the run's own model"),
    ],
)
@pytest.mark.parametrize("command", ["headroom", "localize"])
def test_flags_that_contradict_a_run_are_refused(
    run: RunDirectory, command_line: CommandLine, command: str, words: tuple[str, ...], sentence: str
) -> None:
    ended = command_line(command, "--run", run.path, *words)
    assert (ended.code, sentence in ended.stderr) == (2, True), ended


@pytest.mark.parametrize("command", ["headroom", "localize"])
def test_what_another_process_is_making_is_refused_before_it_is_computed(
    command: str, run: RunDirectory, command_line: CommandLine
) -> None:
    name = "headroom.json" if command == "headroom" else "localize-bf16-bf16.json"
    with RunDirectory(run.path).reserve(name):
        ended = command_line(command, "--run", run.path, *(("--dtype", "bf16") if command == "localize" else SMALL))
    assert (ended.code, f"{name} is being made by another process: wait for it" in ended.stderr) == (2, True)
    assert not Findings(run.path).exist


def test_what_is_no_run_is_refused(tmp_path: Path, command_line: CommandLine) -> None:
    ended = command_line("localize", "--run", tmp_path)
    assert (ended.code, "is not a run directory" in ended.stderr) == (2, True)


def test_of_several_pairs_one_must_be_meant(run: RunDirectory, command_line: CommandLine) -> None:
    manifest = run.read_manifest()
    pairs = (("bf16", "bf16"), ("fp16", "fp16"))
    run.write_manifest(manifest.model_copy(update={"settings": manifest.settings.model_copy(update={"pairs": pairs})}))
    ended = command_line("localize", "--run", run.path)
    assert (ended.code, "the run has the pairs bf16, fp16; say which with --dtype" in ended.stderr) == (2, True)


def test_a_closer_look_has_the_settings_of_its_run() -> None:
    run = parse_settings(
        CompareSettings,
        {
            "model": {"path": "demo"},
            "pairs": [("bf16", "fp16")],
            "prompts": {"source": "sums:easy", "num_prompts": 64},
            "sampling": {"temperature": 0.7, "max_new_tokens": 300, "seed": 5},
            "engine": {"args": {"block_size": "32"}},
            "training": {"precision": "autocast", "attention": "eager"},
        },
    )
    closer = parse_settings(LocalizeSettings, localize_values(run))
    assert (closer.train_dtype, closer.infer_dtype) == ("bf16", "fp16")
    assert (closer.prompts.source, closer.prompts.num_prompts) == ("sums:easy", 16)
    assert (closer.sampling.temperature, closer.sampling.max_new_tokens, closer.sampling.seed) == (1.0, 300, 5)
    assert closer.engine.args == {"block_size": "32"}
    assert (closer.training.precision, closer.training.batch_tokens) == ("autocast", 2048)
    examined = parse_settings(HeadroomSettings, headroom_values(run))
    assert (examined.attention, examined.sampling.temperature) == ("eager", 0.7)
    assert examined.sampling.max_new_tokens == 256
    assert headroom().settings.attention is None
