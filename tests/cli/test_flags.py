"""Flags of `compare` and the settings they stand for."""

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from mismatch_probe.cli.commands import app
from mismatch_probe.cli.compare import compare
from mismatch_probe.cli.evaluate import evaluate
from mismatch_probe.cli.examinations import audit, headroom, localize
from mismatch_probe.cli.train import sanity, train
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.examinations import AuditSettings, HeadroomSettings, LocalizeSettings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.engines.vllm.arguments import engine_arguments
from mismatch_probe.errors import UsageError


def test_revision_and_trust_reach_the_settings_that_both_sides_load_with(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[ModelSettings] = []

    def keep(settings: CompareSettings, **_: Any) -> None:
        models.append(settings.model)
        raise UsageError("seen")

    monkeypatch.setattr("mismatch_probe.compare.preparation.prepare", keep)
    monkeypatch.setattr("mismatch_probe.children.servers.warm_up", lambda *_: None)
    for more in ((), ("--revision", "v2", "--trust-remote-code")):
        assert str(CliRunner().invoke(app, ["compare", "--model", "owner/name", *more]).exception) == "seen"
    plain, named = models
    assert (plain.revision, plain.trust_remote_code) == (None, False)
    assert (named.revision, named.trust_remote_code) == ("v2", True)


@pytest.mark.parametrize("name", ["model", "revision", "trust_remote_code", "dtype", "seed"])
def test_the_flag_that_an_engine_argument_is_refused_for_exists(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine_arguments({name: "x"}, {})
    flags = re.findall(r"--([a-z]+(?:-[a-z]+)*)(?![.\w-])", str(caught.value).partition(":")[2])
    assert flags
    assert {flag.replace("-", "_") for flag in flags} <= set(inspect.signature(compare).parameters)


@pytest.mark.parametrize(
    ("command", "kind", "others"),
    [
        (compare, CompareSettings, ()),
        (evaluate, CompareSettings, ("evaluation.",)),
        (headroom, HeadroomSettings, ()),
        (audit, AuditSettings, ()),
        (localize, LocalizeSettings, ()),
        (train, TrainSettings, ()),
        (sanity, TrainSettings, ("sanity.",)),
    ],
)
def test_every_flag_gives_a_setting_that_there_is(
    command: Callable[..., None], kind: type[BaseModel], others: tuple[str, ...]
) -> None:
    paths = [flag.setting for flag in command.flags.values()]
    assert len(paths) > 10
    assert [path for path in paths if not path.startswith(others or ("?",)) and not is_setting(kind, path)] == []


def test_a_path_that_is_no_setting_is_seen() -> None:
    assert is_setting(TrainSettings, "policy.lora.rank")
    assert not is_setting(TrainSettings, "policy.lora.ranks")
    assert not is_setting(TrainSettings, "rollouts.prompts")


def is_setting(kind: Any, path: str) -> bool:
    first, _, rest = path.partition(".")
    kinds = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
    fields = kinds[0].model_fields if kinds else {}
    return first in fields and (not rest or is_setting(fields[first].annotation, rest))
