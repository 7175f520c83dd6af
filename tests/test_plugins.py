"""What installed packages bring: a plug-in that cannot be used is one sentence, and disturbs nothing else."""

import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mismatch_probe.compare import examination
from mismatch_probe.compare.examination import examine
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.server.arguments import engine_arguments
from mismatch_probe.engines.server.protocols import PROTOCOLS
from mismatch_probe.engines.start import ENGINES, check_engine
from mismatch_probe.errors import ExitCode, PluginError, UsageError
from mismatch_probe.guards.rules import RULES, parse_guards
from mismatch_probe.logs import FORMATS, recognise
from tests.gate.cli import CommandLine

Install = Callable[..., Path]

PLAIN = {"prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": [-1.0, -2.0]}
GUARD = {"name": "mine", "metric": "my/loss", "actions": ["warn"]}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package into a folder of packages, as an installer leaves it."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str, group: str, name: str, value: str, code: str = "") -> Path:
        folder = tmp_path / f"{package.replace('-', '_')}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (folder / "entry_points.txt").write_text(f"[mismatch_probe.{group}]\n{name} = {value}\n")
        module = tmp_path / f"{value.partition(':')[0]}.py"
        module.write_text(textwrap.dedent(code))
        monkeypatch.delitem(sys.modules, module.stem, raising=False)
        return module

    return put


def plain_log(folder: Path) -> Path:
    path = folder / "log.jsonl"
    path.write_text(json.dumps(PLAIN) + "\n")
    return path


def test_nothing_is_found_where_no_package_brings_anything() -> None:
    assert [plugin for registry in (ENGINES, PROTOCOLS, FORMATS, RULES) for plugin in registry.plugins()] == []


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("absent_part:X", "import no_such_module_here", "cannot be imported .ModuleNotFoundError: No module named 'no"),
        ("ends_it:X", "raise SystemExit('no GPU')", r"cannot be imported \(SystemExit: no GPU\); fix or uninstall"),
        ("empty:X", "", "cannot be imported .AttributeError"),
        ("other:X", "X = 3", "lacks `packages` and `preload` and `start` .* of EngineProvider .docs/extending.md"),
    ],
)
def test_a_broken_engine_is_one_sentence_where_it_is_named(install: Install, value: str, code: str, words: str) -> None:
    install("broken-thing", "engines", "mine", value, code)
    with pytest.raises(PluginError, match=rf"the engine 'mine' of the package broken-thing 1\.2 .*{words}"):
        check_engine(Dtype.BF16, SamplingSettings(), EngineSettings(name="mine"))
    check_engine(Dtype.BF16, SamplingSettings(), EngineSettings())
    assert ENGINES.names() == ["vllm", "server", "mine"]


def test_a_built_in_name_cannot_be_taken(install: Install) -> None:
    module = install("greedy", "engines", "vllm", "greedy:X", "raise AssertionError('imported')")
    assert ENGINES.get("vllm") is ENGINES.built_in["vllm"]
    [plugin] = ENGINES.plugins()
    assert plugin.problem == (
        "the engine 'vllm' of the package greedy 1.2 is refused: vllm is built in; uninstall the package, or rename it "
        "there"
    )
    assert ENGINES.usable() == dict(ENGINES.built_in)
    assert module.exists()


def test_two_packages_with_one_name_are_both_refused(install: Install) -> None:
    for package in ("first", "second"):
        install(package, "engines", "mine", f"{package}:X")
    with pytest.raises(PluginError, match=r"the engine 'mine' of the package first .* second brings one of this name"):
        ENGINES.get("mine")


def test_a_log_is_recognised_beside_a_broken_format(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("broken-logs", "log_formats", "mine", "broken_logs:X", "raise ValueError('half installed')")
    with caplog.at_level(logging.WARNING):
        assert recognise(plain_log(tmp_path)).name == "plain"
    [message] = caplog.messages
    assert message.startswith(
        "the log format 'mine' of the package broken-logs 1.2 cannot be imported (ValueError: half"
    )
    with pytest.raises(PluginError, match="half installed"):
        recognise(plain_log(tmp_path), "mine")


def test_a_format_goes_by_the_name_of_its_entry_point(install: Install) -> None:
    code = """
        from mismatch_probe.logs import Format, Holds
        X = Format(name="other", title="a log", holds=Holds.SAMPLER, fits=lambda look: False)
    """
    install("logs", "log_formats", "mine", "its_logs:X", code)
    with pytest.raises(PluginError, match="its name is 'other', and its entry point is called 'mine'"):
        FORMATS.get("mine")


def test_a_guard_file_names_what_is_wrong_with_a_rule_of_a_package(install: Install) -> None:
    code = """
        from mismatch_probe.guards.rules.bounds import LimitSettings as X
    """
    install("rules", "guards", "mine", "its_rules:X", code)
    with pytest.raises(PluginError, match=r"the guard rule 'mine' of the package rules .* as its entry point"):
        parse_guards({"guard": [GUARD | {"rule": "mine"}]}, "mismatch.toml")
    with pytest.raises(UsageError, match="unknown rule 'yours'"):
        parse_guards({"guard": [GUARD | {"rule": "yours"}]}, "mismatch.toml")
    assert parse_guards({}, "mismatch.toml")


def test_a_server_protocol_is_brought_as_well(install: Install) -> None:
    code = """
        from mismatch_probe.engines.server.answers import ServerProtocol

        class Mine(ServerProtocol):
            path = "/generate_ids"
            def recognises(self, facts): return "mine" in facts.model_info
            def body(self, question, model): return {"ids": question.prompt_ids}
            def answers(self, content): return []

        X = Mine()
    """
    install("asking", "server_protocols", "mine", "its_protocol:X", code)
    assert engine_arguments({"protocol": "mine"}, {"protocol": ""}) == {"protocol": "mine"}
    assert list(PROTOCOLS.usable()) == [*PROTOCOLS.built_in, "mine"]


def test_doctor_names_a_broken_plug_in(
    install: Install, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    monkeypatch.setattr(examination, "_PACKAGES", ("json",))  # torch and vLLM take long to import
    assert examine(None, "bf16").plugins == []
    install("broken-logs", "log_formats", "mine", "broken_logs:X", "raise ValueError('half installed')")
    ended = command_line("doctor", "--json")
    assert ended.code == ExitCode.ENVIRONMENT
    [plugin] = ended.document["plugins"]
    assert (plugin["kind"], plugin["name"], plugin["package"]) == ("log format", "mine", "broken-logs")
    assert "plug-in: the log format 'mine' of the package broken-logs 1.2 cannot be imported" in ended.stderr
