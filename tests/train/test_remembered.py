"""What a checkpoint remembers beside weights: damage to it is a sentence, wherever it is met."""

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import BrokenRecord
from mismatch_probe.train.checkpoints import Checkpoints
from tests.train.quick_runs import quick_home, quick_settings, train

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE: dict[str, Any] = {
    "adjustments": {"learning_rate_factor": 1.0},
    "earned": {"2": [0.5]},
    "optimizers": {},
    "sync": {},
    "guards": {},
    "last_good_step": 0,
}


def checkpoint(folder: Path, text: str) -> Checkpoints:
    path = folder / "step-000002"
    path.mkdir()
    (path / "trainer.json").write_text(text)
    return Checkpoints(folder, keep=2)


def test_a_whole_one_is_believed(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path, json.dumps(WHOLE))
    assert kept.best() == 2
    assert kept.adjustments(2).learning_rate_factor == 1.0


def test_what_a_version_before_wrote_is_believed(tmp_path: Path) -> None:
    before = {name: value for name, value in WHOLE.items() if name not in ("earned", "last_good_step")}
    assert checkpoint(tmp_path, json.dumps({**before, "recent_reward": 0.5, "doubted_since": None})).best() == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("null", "it holds null, not an object"),
        ("[]", "it holds a list, not an object"),
        ("[" * 100_000, "it nests deeper than can be read"),
        ("{", "malformed JSON"),
        ("{}", "adjustments: Field required"),
        (json.dumps({**WHOLE, "earned": {"2": "much"}}), "earned.2: Input should be"),
        (json.dumps({**WHOLE, "guards": None}), "guards: Input should be"),
        (json.dumps({**WHOLE, "adjustments": {"wish": 1}}), "wish: Unexpected keyword"),
        (json.dumps({**WHOLE, "adjustments": {"learning_rate_factor": "1"}}), "learning_rate_factor: Input should be"),
    ],
)
def test_a_damaged_one_is_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BrokenRecord, match=words):
        checkpoint(tmp_path, text).best()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["sync", "guards", "optimizers"])
def test_parts_that_cannot_take_theirs_back_say_so(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    train(home / "run", quick_settings(llama, home, 2))
    path = home / "run" / "checkpoints" / "step-000002" / "trainer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: {"wish": 1}}))
    with pytest.raises(BrokenRecord, match="does not hold what a run goes on with"):
        train(home / "run", quick_settings(llama, home, 4), resume=True)
