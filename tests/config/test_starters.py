import re
import tomllib
from pathlib import Path

import pytest

from mismatch_probe.cli.first_steps import starter_path
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings, read_settings_file
from mismatch_probe.config.model import Settings
from mismatch_probe.config.sides import InferSide, TrainSide


@pytest.mark.parametrize(
    "path", [starter_path(kind) for kind in ("compare", "sides", "server")], ids=lambda path: path.name
)
def test_every_shipped_settings_file_can_be_used(path: Path) -> None:
    assert parse_settings(CompareSettings, read_settings_file(path)).model.path


def test_the_example_of_every_setting_holds_every_setting() -> None:
    text = starter_path("compare").read_text()
    shown = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert parse_settings(CompareSettings, shown).confidence != CompareSettings.model_fields["confidence"].default
    assert "confidence" not in read_settings_file(starter_path("compare"))
    sides = tomllib.loads(starter_path("sides").read_text())
    shown |= {name: sides[name] for name in ("infer", "train")}
    for name, field in CompareSettings.model_fields.items():
        assert name in shown
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            assert shown[name].keys() == field.annotation.model_fields.keys(), name


@pytest.mark.parametrize("kind", [InferSide, TrainSide])
def test_the_manual_has_every_setting_of_a_side(kind: type[Settings]) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "sides.md").read_text()
    settings = kind.model_fields.keys() - {"logged"}
    assert not [name for name in settings if not re.search(rf"`[^`]*\b{name}\b[^`]*`", manual)]
