"""Hundreds of bad inputs: each is met with one sentence that says why, its exit code, and nothing written."""

from pathlib import Path

import pytest

from tests.cli.bad_checkpoints import ROWS as CHECKPOINTS
from tests.cli.bad_files import ROWS as FILES
from tests.cli.bad_flags import ROWS as FLAGS
from tests.cli.bad_rows import Bad, Grounds
from tests.cli.bad_runs import ROWS as RUNS
from tests.gate.cli import CommandLine

NEVER = ("Traceback", "unexpected", "()", "site-packages")


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Grounds:
    return Grounds(tmp_path_factory.mktemp("grounds"))


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad", [*FLAGS, *FILES, *CHECKPOINTS, *RUNS], ids=str)
def test_it_is_met_with_one_sentence(
    bad: Bad,
    grounds: Grounds,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = grounds.words(bad, tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ended = CommandLine(capsys, monkeypatch)(*words)
    assert ended.code == bad.code, ended
    assert bad.words in ended.stderr
    assert not [word for word in NEVER if word in ended.stderr], ended
    assert ended.stderr.count("mismatch-probe: ") == 1
    assert ended.stdout == ""
    assert not (tmp_path / "out").exists()
    assert not any((tmp_path / "here").iterdir())
