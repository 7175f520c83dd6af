"""Flags of `compare` and the settings they stand for."""

import inspect
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from mismatch_probe.cli import compare_command
from mismatch_probe.cli.commands import app
from mismatch_probe.cli.compare import compare
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import CompareSettings
from mismatch_probe.engines.vllm.arguments import engine_arguments
from mismatch_probe.errors import ExitCode, UsageError


def test_revision_and_trust_reach_the_settings_that_both_sides_load_with(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def parsed(flags: dict[str, Any], **_: Any) -> ExitCode:
        given.append(flags)
        return ExitCode.PASS

    monkeypatch.setattr(compare_command, "run_compare", parsed)
    for more in ((), ("--revision", "v2", "--trust-remote-code")):
        assert CliRunner().invoke(app, ["compare", "--model", "owner/name", *more]).exit_code == 0
    plain, told = (parse_settings(CompareSettings, flags).model for flags in given)
    assert (plain.revision, plain.trust_remote_code) == (None, False)
    assert (told.revision, told.trust_remote_code) == ("v2", True)


@pytest.mark.parametrize("name", ["model", "revision", "trust_remote_code", "dtype", "seed"])
def test_the_flag_that_an_engine_argument_is_refused_for_exists(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine_arguments({name: "x"}, {})
    flags = re.findall(r"--([a-z]+(?:-[a-z]+)*)(?![.\w-])", str(caught.value).partition(":")[2])
    assert flags
    assert {flag.replace("-", "_") for flag in flags} <= set(inspect.signature(compare).parameters)
