"""What a flag's help says of its default is the default of the setting."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from mismatch_probe.cli.compare import compare
from mismatch_probe.cli.examinations import audit, headroom, localize
from mismatch_probe.cli.options import Flag
from mismatch_probe.cli.train import train
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.examinations import AuditSettings, HeadroomSettings, LocalizeSettings
from mismatch_probe.config.train import TrainSettings

COMMANDS: dict[Any, type[BaseModel]] = {
    compare: CompareSettings,
    audit: AuditSettings,
    headroom: HeadroomSettings,
    localize: LocalizeSettings,
    train: TrainSettings,
}


def default_of(settings: type[BaseModel], name: str) -> object:
    """None where there is none, or no one value."""
    value: object = None
    for part in name.split("."):
        field = settings.model_fields.get(part)
        if field is None:
            return None
        value = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            settings = type(value)
    return value


def flags() -> Iterator[Any]:
    for command, settings in COMMANDS.items():
        for name, flag in command.flags.items():
            value = default_of(settings, flag.setting)
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                yield pytest.param(flag, value, id=f"{command.__name__}-{name}")


@pytest.mark.parametrize(("flag", "value"), list(flags()))
def test_the_help_of_a_flag_says_the_default_of_its_setting(flag: Flag, value: str | float) -> None:
    assert flag.default
    assert flag.default == value if isinstance(value, str) else float(flag.default) == value
    assert f"; {flag.default} unless given." in flag.parameter("any").default.help
