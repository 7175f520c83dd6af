"""What typer refuses is one sentence too: what was given, why it cannot be used, and where the fix is listed."""

import pytest

from tests.cli.test_bad_input import assert_refused
from tests.command_line import probe


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nothing", "there is no command 'nothing'; `mismatch-probe --help` lists what it takes"),
        ("--bogus", "there is no option --bogus; `mismatch-probe --help` lists"),
        ("compare --model", "--model needs a value behind it; `mismatch-probe compare --help` lists"),
        ("compare --model demo --num-prompts x", "--num-prompts x cannot be used: "),
        ("train --model demo --steps 1.5", "--steps 1.5 cannot be used: "),
        ("headroom --modell x", "there is no option --modell (close to it: --model); `mismatch-probe headroom --help`"),
        ("report", "RUN... is missing; `mismatch-probe report --help` lists"),
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
