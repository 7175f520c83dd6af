"""The guard file: what it may say, and a sentence for everything it may not."""

import re
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.cli.first_steps import starter_path
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.actions import ActionKind, parse_action
from mismatch_probe.guards.rewards import REMEMBERED
from mismatch_probe.guards.rules import DEFAULT_GUARDS, DEFAULTS_FILE, RULES, load_guards

ROOT = Path(__file__).parents[2]
GOOD = '[[guard]]\nname = "own"\nrule = "limit"\nmetric = "reward/mean"\nbelow = 0.1\nactions = ["warn"]\n'
CUSUM = GOOD.replace("below = 0.1", "spread = 1").replace('"limit"', '"cusum"')
FLATLINE = GOOD.replace('metric = "reward/mean"\nbelow = 0.1', "zero = []").replace('"limit"', '"flatline"')

BAD_FILES = {
    "malformed TOML": ("[[guard]\n", "(malformed: "),
    "another key": ("default = false\n", "setting 'default' is unknown; did you mean 'defaults'?"),
    "guards that are no tables": ("guard = 3\n", "guard is no list of tables; write each guard under [[guard]]"),
    "no guard left": ("defaults = false\n", "leaves no guard"),
    "an unknown default switched off": ('off = ["stale-engin"]\n', "did you mean 'stale-engine'?"),
    "a default switched off that is not in use": (
        'defaults = false\noff = ["temperature"]\n',
        "no default guard in use",
    ),
    "a guard declared twice": (GOOD + GOOD, "the guard 'own' is declared twice"),
    "no rule": (GOOD.replace('rule = "limit"\n', ""), "guard own has no rule; give one of limit, nonfinite"),
    "an unknown rule": (GOOD.replace('"limit"', '"limits"'), "unknown rule 'limits'; did you mean 'limit'?"),
    "an unknown key": (GOOD.replace("below", "belw"), "setting 'belw' is unknown; did you mean 'below'?"),
    "no name": (GOOD.replace('name = "own"\n', ""), "guard 1: setting 'name' is missing"),
    "no metric": (GOOD.replace('metric = "reward/mean"\n', ""), "setting 'metric' is missing"),
    "no actions": (GOOD.replace('actions = ["warn"]\n', ""), "setting 'actions' is missing"),
    "an empty list of actions": (GOOD.replace('["warn"]', "[]"), "no list of actions"),
    "a firing that asks for nothing": (GOOD.replace('["warn"]', "[[]]"), 'asks for nothing; write "log"'),
    "an unknown action": (GOOD.replace('"warn"', '"roll_back"'), "did you mean 'rollback'?"),
    "an action that is none": (GOOD.replace('"warn"', '"stop("'), "is no action"),
    "a factor beyond 1": (GOOD.replace('"warn"', '"lower_learning_rate(2)"'), "lies between 0 and 1"),
    "a factor that is no number": (GOOD.replace('"warn"', '"tighten_sequences(half)"'), "lies between 0 and 1"),
    "no side": (GOOD.replace('"warn"', '"raise_precision"'), "raise_precision(train)"),
    "an unknown correction": (GOOD.replace('"warn"', '"switch_correction(tis)"'), "one of none, token-tis"),
    "an argument that is not taken": (GOOD.replace('"warn"', '"stop(now)"'), "stop takes no argument"),
    "no limit": (GOOD.replace("below = 0.1\n", ""), "no limit given; give above, below, or both"),
    "limits that no value keeps": (GOOD.replace("below = 0.1", "below = 1\nabove = 0"), "must be larger than below"),
    "a limit that is no number": (GOOD.replace("0.1", "nan"), "it holds nan"),
    "a limit as text": (GOOD.replace("0.1", '"0.1"'), "'below' is not usable"),
    "patience of none": (GOOD + "patience = 0\n", "'patience' is not usable"),
    "a cusum without a spread": (CUSUM.replace("spread = 1\n", ""), "setting 'spread' is missing"),
    "a cusum with patience": (CUSUM + "patience = 2\n", "raise h instead"),
    "a flatline of nothing": (FLATLINE, "no sign of a dead run given"),
    "a metric with two states": (FLATLINE.replace("[]", '["a"]\nnonzero = ["a"]'), "a is named twice"),
}


def written(folder: Path, text: str) -> Path:
    path = folder / "guards.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_one_sentence_that_names_it(tmp_path: Path, fault: str) -> None:
    text, expected = BAD_FILES[fault]
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        load_guards(path)
    message = str(raised.value)
    assert expected in message
    assert str(path) in message
    assert "\n" not in message


def test_a_file_that_is_not_there_is_blamed_on_its_own_flag(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--guards .*none\.toml does not exist"):
        load_guards(tmp_path / "none.toml")


def test_a_file_adds_to_the_defaults(tmp_path: Path) -> None:
    guards = load_guards(written(tmp_path, GOOD))
    assert guards[:-1] == DEFAULT_GUARDS
    assert guards[-1].name == "own"


def test_a_guard_of_a_defaults_name_replaces_it(tmp_path: Path) -> None:
    guards = load_guards(written(tmp_path, GOOD.replace("own", "temperature")))
    assert len(guards) == len(DEFAULT_GUARDS)
    assert next(guard for guard in guards if guard.name == "temperature").metrics == ("reward/mean",)


def test_defaults_can_be_left_out_one_by_one_and_all(tmp_path: Path) -> None:
    fewer = load_guards(written(tmp_path, 'off = ["temperature"]\n'))
    assert {guard.name for guard in DEFAULT_GUARDS} - {guard.name for guard in fewer} == {"temperature"}
    assert [guard.name for guard in load_guards(written(tmp_path, "defaults = false\n" + GOOD))] == ["own"]


@pytest.mark.parametrize("guard", DEFAULT_GUARDS, ids=lambda guard: guard.name)
def test_a_default_guard_can_be_written_in_a_file(guard: Any) -> None:
    assert RULES.built_in[guard.rule].model_validate(guard.model_dump(mode="json")) == guard


def test_the_defaults_are_a_guard_file_that_names_each_threshold_s_source() -> None:
    assert load_guards(DEFAULTS_FILE) == DEFAULT_GUARDS
    assert all(guard.source for guard in DEFAULT_GUARDS)


def test_a_copy_of_the_defaults_is_a_file_to_change(tmp_path: Path) -> None:
    text = DEFAULTS_FILE.read_text(encoding="utf-8").replace("above = 0.015", "above = 0.01")
    changed = [guard for guard in load_guards(written(tmp_path, text)) if guard not in DEFAULT_GUARDS]
    assert [guard.name for guard in changed] == ["mismatch-limit"]


def test_no_new_batch_is_one_where_all_that_are_remembered_came_before() -> None:
    [limit] = [guard.above for guard in DEFAULT_GUARDS if guard.name == "no-new-batch"]
    assert limit == REMEMBERED - 1


@pytest.mark.parametrize("kind", ActionKind)
def test_every_action_reads_as_it_is_written(kind: ActionKind) -> None:
    argument = {"factor": "(0.25)", "to": "(seq-mis)", "side": "(infer)", None: ""}[kind.argument]
    assert str(parse_action(f"{kind}{argument}")) == f"{kind}{argument}"


def test_a_factor_is_written_with_all_its_digits() -> None:
    assert parse_action(str(parse_action("lower_learning_rate(0.333333333)"))).factor == 0.333333333


def test_the_example_is_accepted_and_shows_every_rule_and_action() -> None:
    guards = load_guards(starter_path("guards"))
    own = [guard for guard in guards if guard not in DEFAULT_GUARDS]
    assert {guard.rule for guard in own} == set(RULES.built_in)
    assert {action.kind for guard in own for firing in guard.actions for action in firing} == set(ActionKind)


def test_the_manual_has_a_row_for_every_rule_and_no_other() -> None:
    manual = (ROOT / "docs" / "guards.md").read_text(encoding="utf-8")
    table = manual.split("| rule | broken where | parameters |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(RULES.built_in)


def test_the_manual_lists_every_default_guard_as_it_is() -> None:
    manual = (ROOT / "docs" / "guards.md").read_text(encoding="utf-8")
    missing = [guard.name for guard in DEFAULT_GUARDS if row(guard) not in manual]
    assert not missing, "\n".join(row(guard) for guard in DEFAULT_GUARDS if guard.name in missing)


def test_the_manual_has_every_default_guard_in_one_group() -> None:
    manual = (ROOT / "docs" / "guards.md").read_text(encoding="utf-8")
    table = manual.split("| guards | see | first | in the end |")[1].split("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", line.split("|")[1])]
    assert sorted(named) == sorted(guard.name for guard in DEFAULT_GUARDS)


def test_the_short_guard_file_of_the_manual_is_one(tmp_path: Path) -> None:
    manual = (ROOT / "docs" / "guards.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^```toml\n(.*?)^```$", manual, re.MULTILINE | re.DOTALL)
    (tmp_path / "guards.toml").write_text(text)
    guards = {guard.name: guard for guard in load_guards(tmp_path / "guards.toml")}
    assert {guard.name for guard in DEFAULT_GUARDS} - guards.keys() == {"support"}
    assert guards["mismatch-limit"].patience == 3


def row(guard: Any) -> str:
    """A line of the manual's table, from the guard itself."""
    hidden = {"name", "rule", "metric", "actions", "source", "patience", "clear_after", "warmup"}
    given = guard.model_dump(mode="json", exclude_unset=True, exclude=hidden)
    names = "" if guard.rule == "flatline" else guard.metric
    rule = " ".join(
        word
        for word in (names, guard.rule, *(f"{key} {as_text(value)}".strip() for key, value in given.items()))
        if word
    )
    then = ", ".join(" + ".join(map(str, firing)) for firing in guard.actions)
    return f"| `{guard.name}` | {rule} | {guard.patience} | {then} | {guard.source} |"


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {as_text(least)}" for name, least in value.items())
    if value is True:
        return ""
    return ", ".join(value) if isinstance(value, list) else str(value) if isinstance(value, str) else format(value, "g")
