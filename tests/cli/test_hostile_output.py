"""What a stranger wrote reaches no terminal, no CI log and no file of a CI system as it was written."""

import io
import json
import unicodedata
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from mismatch_probe.cli.output import PeopleConsole, print_json
from mismatch_probe.errors import ExitCode
from mismatch_probe.gate.publishing import annotations, render_markdown, write_junit
from mismatch_probe.records.answers import CheckResult, GateResult
from tests.cli.test_bad_input import assert_refused
from tests.command_line import probe
from tests.simulated_run import Simulation, simulated_run
from tests.test_inert import ATTACKS
from tests.tiny_models import make_checkpoint

ATTACK = "".join(ATTACKS.values())


def assert_inert(text: str) -> None:
    lines = text.split("\n")
    assert all(unicodedata.category(character)[0] in "LMNPSZ" for line in lines for character in line)
    assert not set("\u2028\u2029\u3164\ufe0f") & set(text)
    assert not [line for line in lines if "::" in line or "##[" in line or "##vso[" in line]


@pytest.mark.slow
@pytest.mark.parametrize("attack", [ATTACK, "".join(reversed(ATTACKS.values()))], ids=["all", "all, the last first"])
def test_what_a_chat_template_raises(tmp_path: Path, attack: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")
    sent = json.dumps(attack)
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception(" + sent + ") }}")
    answer = probe("compare", "--model", checkpoint, "--out", tmp_path / "run")
    assert_refused(answer, "the chat template failed")
    assert_inert(answer.stderr)
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_traceback_of_what_a_chat_template_raises(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception(" + json.dumps(ATTACK) + ") }}")
    answer = probe("compare", "--model", checkpoint, "--out", tmp_path / "run", "--debug")
    assert "Traceback" in answer.stderr
    assert_inert(answer.stderr)


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "--model", "/x/ATTACK"),
        ("compare", "--model", "demo", "--prompts", "/x/ATTACK.jsonl"),
        ("compare", "--model", "demo", "--ATTACK"),
        ("report", "/x/ATTACK"),
        ("gate", "/x/ATTACK"),
        ("diff", "/x/ATTACK", "/x/y"),
        ("schema", "ATTACK"),
        ("doctor", "--dtype", "ATTACK", "--model", "demo"),
        ("ATTACK",),
        ("report", "--ATTACK"),
        ("gate", "x", "ATTACK"),
    ],
    ids=" ".join,
)
def test_names_in_an_error(tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attack = ATTACK.replace("/", "").replace("\x00", "").encode(errors="ignore").decode()
    answer = probe(*(word.replace("ATTACK", attack) for word in words))
    assert answer.returncode in (ExitCode.USAGE, ExitCode.ENVIRONMENT)
    assert_inert(answer.stderr)
    assert answer.stderr.startswith("mismatch-probe: ")
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_name_of_a_run_and_of_its_model(tmp_path: Path) -> None:
    attack = "\x1b]0;x\x07\u202e\n::error::y ##[add-mask]z"
    run = simulated_run(tmp_path / attack, Simulation(num_prompts=8, fingerprint=attack), with_summary=True)
    for words in (("report", run.path), ("diff", run.path, run.path), ("gate", run.path, "--config", tmp_path / "x")):
        answer = probe(*words)
        assert_inert(answer.stderr)
        assert_inert(answer.stdout)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("terminal", [False, True])
def test_whatever_a_text_comes_in_a_console_for_people_shows_it_inert(attack: str, terminal: bool) -> None:
    def drawn(text: str, console: Console) -> None:
        table = Table(text, title=text)
        table.add_row(text)
        table.add_row(Text(text.replace("\n", " ")))
        console.print(text, Text(text.replace("\n", " ")), table)
        with Progress(TextColumn("{task.description}", markup=False), console=console) as progress:
            progress.add_task(text, total=1)

    def seen(text: str) -> str:
        file = io.StringIO()
        console = PeopleConsole(file)
        console._force_terminal = terminal
        drawn(text, console)
        return file.getvalue()

    shown, harmless = seen(attack), seen("x")
    own = {character for character in harmless if unicodedata.category(character)[0] == "C"}
    if not terminal:
        assert_inert(shown)
    assert {character for character in shown if unicodedata.category(character)[0] == "C"} <= own
    assert "\x1b]" not in shown
    assert "::" not in shown
    assert "##" not in shown


def test_a_console_that_is_not_for_people_would_show_it_as_it_is() -> None:
    file = io.StringIO()
    Console(file=file, markup=False).print("\x1b]0;x\x07 \u202e ::error::y", soft_wrap=True)
    with pytest.raises(AssertionError):
        assert_inert(file.getvalue())


def test_a_document_on_standard_output_is_inert_and_reads_back_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    class Document(BaseModel):
        text: str

    text = ATTACK.replace("\ud800", "")
    print_json(Document(text=text))
    output = capsys.readouterr().out
    assert json.loads(output) == {"text": text}
    assert output.isascii()
    assert "##[" not in output
    assert not [line for line in output.splitlines() if line.strip().startswith("::")]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_a_gate_tells_a_ci_system(tmp_path: Path, attack: str) -> None:
    check = CheckResult(
        metric=attack, measured=attack, pair=attack, kind="max", limit=1, level="error", answer="fail",
        sentence=attack, value=2, low=1, high=3, bound_level=0.05, p_value=0.1, holm_level=0.05, passing_limit=None,
        run_value=2, baseline_value=None, comparison=None, num_sequences=1, num_tokens=1, by="token", source=attack,
    )  # fmt: skip
    failed = GateResult(
        tool_version="1", run=attack, gate_file=attack, answer="fail", exit_code=ExitCode.GATE_FAILED,
        sentence=attack, model=attack, checks=[check], model_fingerprint=attack, notes=[attack],
    )  # fmt: skip
    refused = failed.model_copy(update={"answer": "error", "checks": []})
    for number, result in enumerate((failed, refused)):
        for command in annotations(result):
            kind, message = command.removeprefix("::").split("::")
            assert_inert(kind + message)
            assert kind.startswith("error title=")
        assert_inert(render_markdown(result).replace("\ufe0f", ""))
        path = tmp_path / f"{number}.xml"
        write_junit(path, result)
        texts = [part for element in ET.parse(path).iter() for part in (*element.attrib.values(), element.text or "")]
        for part in texts:
            assert_inert(part)
