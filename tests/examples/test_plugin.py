"""The example plug-in, installed as a user installs it, and used: its engine, its log format and its guard rule."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mismatch_probe as mp
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import ENGINES, check_engine, start_engine, with_typed_arguments
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.rules import RULES, parse_guards
from mismatch_probe.logs import FORMATS, recognise
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest
from tests.command_line import FEW
from tests.gate.cli import CommandLine
from tests.servers.real_server import demo_checkpoint
from tests.warm_python import warm_python

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package was installed into."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")  # building writes beside the source
    offline = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    words = [sys.executable, "-m", "pip", "install", *offline, "--target", str(folder / "target"), str(source)]
    subprocess.run(words, check=True, capture_output=True)
    return folder / "target"


@pytest.fixture(autouse=True)
def installed(target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It can be imported here. Servers of jobs with another PYTHONPATH would import all anew, and so would the next."""
    monkeypatch.syspath_prepend(target)
    yield
    for module in [name for name in sys.modules if name.startswith("mismatch_probe_example")]:
        del sys.modules[module]


def test_each_plug_in_is_listed_with_its_package_and_version() -> None:
    plugins = [plugin for registry in (ENGINES, FORMATS, RULES) for plugin in registry.plugins()]
    assert [(plugin.kind, plugin.name) for plugin in plugins] == [
        ("engine", "transformers"),
        ("log format", "example"),
        ("guard rule", "ratio"),
    ]
    assert {(plugin.package, plugin.version, plugin.problem) for plugin in plugins} == {
        ("mismatch-probe-example", "0.1.0", None)
    }


def test_looking_at_plug_ins_imports_no_engine(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{target}:{Path(mp.__file__).parents[1]}")
    code = (
        "import sys\n"
        "from mismatch_probe.engines.start import ENGINES\n"
        "assert [plugin.problem for plugin in ENGINES.plugins()] == [None]\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'httpx') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_its_log_format_is_recognised_and_imported(tmp_path: Path, command_line: CommandLine) -> None:
    generator = np.random.default_rng(0)
    log = tmp_path / "log.jsonl"
    rows = []
    for number in range(40):
        log_pi = -generator.exponential(1.0, 12)
        log_mu = log_pi + generator.normal(0, 0.01, 12)
        ids = generator.integers(1, 200, 12).tolist()
        rows.append({"q": [number + 1, 2], "a": ids, "lp": log_mu.tolist(), "train_lp": log_pi.tolist()})
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert recognise(log).title == "the example plug-in's log"
    ended = command_line("import", log, "--out", tmp_path / "run", "--json")
    assert ended.code in (0, 3), ended
    [pair] = ended.document["pairs"]
    assert pair["counts"]["num_tokens"] == 480


def test_its_guard_rule_fires() -> None:
    guard = {
        "name": "loss-over-reward",
        "rule": "ratio",
        "metric": "my/loss",
        "to": "my/scale",
        "above": 2.0,
        "actions": ["stop"],
    }
    [settings] = parse_guards({"defaults": False, "guard": [guard]}, "mismatch.toml")
    rule = settings.start()
    assert rule.judge({"my/loss": 1.9, "my/scale": 1.0}) is None
    breach = rule.judge({"my/loss": 2.1, "my/scale": 1.0})
    assert breach is not None
    assert breach.sentence == "my/loss is 2.10, above 2 times my/scale (1)"
    with pytest.raises(UsageError, match="above"):
        parse_guards({"defaults": False, "guard": [guard | {"above": -1.0}]}, "mismatch.toml")


def test_its_engine_samples_and_replays_what_it_sampled() -> None:
    settings = with_typed_arguments(EngineSettings(name="transformers", args={"attention": "eager"}), "transformers")
    sampling = SamplingSettings(max_new_tokens=8, temperature=0.8)
    check_engine(Dtype.FP32, sampling, settings)
    requests = [SampleRequest(f"r{seed}", EncodedPrompt("p", [5, 6, 7], ""), seed) for seed in (0, 1)]
    with start_engine(str(demo_checkpoint()), Dtype.FP32, settings, sampling, max_model_len=32) as engine:
        first, second = engine.sample(requests, sampling)
        assert first.sequence.token_ids != second.sequence.token_ids
        again = engine.sample(requests[1:], sampling)[0]
        assert again.sequence.token_ids == second.sequence.token_ids, "a response depends on its seed alone"
        [scores] = engine.replay([first.sequence])
        assert scores.logprobs == pytest.approx(first.scores.logprobs, abs=1e-4)
        [distribution] = engine.distributions([first.sequence.prompt_token_ids])
        assert np.exp(distribution.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
        assert distribution[first.sequence.token_ids[0]] == pytest.approx(first.scores.logprobs[0], abs=1e-4)


def test_its_engine_refuses_before_it_is_started() -> None:
    engine = EngineSettings(name="transformers", args={"atention": "eager"})
    with pytest.raises(UsageError, match=r"engine\.args\.atention is no argument of this engine"):
        with_typed_arguments(engine, engine.name)
    with pytest.raises(UsageError, match="leave top_p and top_k out"):
        check_engine(Dtype.BF16, SamplingSettings(top_k=5), engine)


def test_a_comparison_samples_with_it(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled by transformers in BF16, scored on the training path in BF16 and in FP32: the same model, other calls.

    The command and its jobs find the package in the folder that they start in.
    """
    config = tmp_path / "compare.toml"
    config.write_text(FEW.read_text() + '[engine]\nname = "transformers"\n[engine.args]\nattention = "sdpa"\n')
    words = ("--model", "demo", "--dtype", "bf16", "--config", config, "--num-prompts", 8, "--max-new-tokens", 16)
    monkeypatch.chdir(target)
    ended = warm_python("mismatch_probe", "compare", *words, "--out", tmp_path / "run", "--json", code=None)
    assert ended.returncode in (0, 1, 3), ended
    [pair] = json.loads(ended.stdout)["pairs"]
    assert 0 < pair["metrics"]["kl_k3"]["value"] < 0.1
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["versions"]["mismatch-probe-example"] == "0.1.0"
    assert "engine (mu): transformers" in (tmp_path / "run" / "report.html").read_text()
    assert manifest["stages"]["sample-bf16"]["effective_settings"]["engine"] == "transformers"
