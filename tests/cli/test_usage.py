"""What typer refuses is one sentence too: what was given, why it cannot be used, and where the fix is listed."""

import re

import pytest

from mismatch_probe.errors import ExitCode
from tests.cli.test_bad_input import assert_refused
from tests.command_line import probe


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nothing", "there is no command 'nothing'; `mismatch-probe --help` lists what it takes"),
        ("--bogus", "there is no option --bogus; `mismatch-probe --help` lists"),
        ("compare --model", "--model needs a value behind it; `mismatch-probe compare --help` lists"),
        ("compare --model demo --num-prompts x", "--num-prompts x cannot be used: "),
        ("report RUN --plotlyjs inline", "--plotlyjs inline cannot be used: 'inline' is not one of 'embed', 'cdn';"),
        ("train --model demo --steps 1.5", "--steps 1.5 cannot be used: "),
        ("headroom --modell x", "there is no option --modell; did you mean --model? `mismatch-probe headroom --help`"),
        (
            "impotr x",
            "there is no command 'impotr'; did you mean 'import'? `mismatch-probe --help` lists what it takes",
        ),
        ("compare --prompt x", "there is no option --prompt; did you mean --prompts?"),
        ("compare --model demo behind", "behind is more than the command takes; engine arguments are written"),
        (
            "compare --nothing-like-it x",
            "there is no option --nothing-like-it; engine arguments are written --vllm.KEY VALUE",
        ),
        ("report", "RUN is missing; `mismatch-probe report --help` lists"),
        ("report --json=x RUN", "--json"),
        ("diff a", "B is missing; `mismatch-probe diff --help` lists"),
        ("diff a b c d", "c d is more than the command takes; `mismatch-probe diff --help` lists"),
        ("schema a b", "b is more than the command takes; `mismatch-probe schema --help` lists"),
        ("doctor --dtype", "--dtype needs a value behind it; `mismatch-probe doctor --help` lists"),
        ("gate run", "RUN is missing; `mismatch-probe gate run --help` lists"),
        ("gate x y", "y is more than the command takes; `mismatch-probe gate run --help` lists"),
        ("gate --config", "--config needs a value behind it; `mismatch-probe gate"),
        ("gate calibrate", "RUN AGAIN... is missing; `mismatch-probe gate calibrate --help` lists"),
        ("gate calibrate --bogus x", "there is no option --bogus; `mismatch-probe gate calibrate --help` lists"),
        ("gate calibrate x --config", "--config needs a value behind it; `mismatch-probe gate"),
        ("localize --layers x", "--layers"),
        ("sanity --steps x --model demo", "--steps x cannot be used: "),
        ("evaluate --num-prompts x", "--num-prompts"),
    ],
)
def test_an_error_of_usage_is_one_sentence(words: str, sentence: str) -> None:
    answer = probe(*words.split())
    assert_refused(answer, sentence)
    assert answer.stderr.startswith("mismatch-probe: ")
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [[], ["gate"]])
def test_without_a_word_the_help_is_shown(words: list[str]) -> None:
    answer = probe(*words)
    assert answer.returncode == 2
    assert "--help" in answer.stdout
    assert answer.stderr == ""


HEADINGS = {
    "Measure a checkpoint": ["compare", "report", "diff", "audit"],
    "Read the log of a trainer": ["import", "explain", "score", "watch"],
    "Answer yes or no in CI": ["gate"],
    "Look deeper": ["localize", "headroom", "evaluate"],
    "Train under guards": ["train", "sanity", "ablate"],
    "Tools": ["doctor", "init"],
}


def test_the_help_lists_commands_under_headings_in_this_order() -> None:
    output = probe("--help", code=ExitCode.PASS).stdout
    places = [output.index(f" {heading} ") for heading in HEADINGS]
    assert places == sorted(places)
    for heading, after in zip(HEADINGS, [*places[1:], len(output)], strict=True):
        part = output[output.index(f" {heading} ") : after]
        assert re.findall(r"^│ ([a-z]+)", part, re.MULTILINE) == HEADINGS[heading]
    assert "schema" not in output


@pytest.mark.parametrize("command", ["compare", "train", "localize", "headroom", "explain"])
def test_where_flags_stand_under_headings_none_stands_without_one(command: str) -> None:
    output = probe(command, "--help", code=ExitCode.PASS).stdout
    assert "─ Checkpoint and sides ─" in output
    assert "─ Run and output ─" in output
    assert "─ Options ─" not in output


@pytest.mark.parametrize("command", ["compare", "import", "sanity", "ablate"])
def test_the_flags_of_run_and_output_stand_last(command: str) -> None:
    headings = re.findall(r"^╭─ ([A-Z][a-z ]+) ─", probe(command, "--help", code=ExitCode.PASS).stdout, re.MULTILINE)
    assert headings[-1] == "Run and output"
    assert len(headings) == len(set(headings)) > 2


def test_the_help_of_gate_has_every_flag_of_judging_a_run() -> None:
    of_group, of_run = (
        set(re.findall(r"--[a-z-]+", probe(*words, "--help", code=ExitCode.PASS).stdout))
        for words in (["gate"], ["gate", "run"])
    )
    assert of_group >= of_run > {"--config", "--baseline", "--junit", "--markdown", "--github", "--json"}


def test_the_help_of_explain_names_the_command_for_a_side_that_is_missing() -> None:
    assert "mismatch-probe score" in probe("explain", "--help", code=ExitCode.PASS).stdout


@pytest.mark.parametrize("command", [*HEADINGS["Measure a checkpoint"], "watch", "gate", "train", "import"])
def test_no_help_sends_to_a_document_that_a_wheel_lacks(command: str) -> None:
    assert "docs/" not in probe(command, "--help", code=ExitCode.PASS).stdout
