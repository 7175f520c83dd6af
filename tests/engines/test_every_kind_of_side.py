"""No rule of the verdict raises, whatever kinds of sides it reads: their settings are what the real writers record."""

from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.config.model import EngineSettings, SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.server.asking import ServerFindings, effective_settings
from mismatch_probe.engines.server.client import Contact
from mismatch_probe.engines.server.protocols.vllm import VllmGenerate
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.scorer import Scorer
from mismatch_probe.verdict.preflight import preflight
from mismatch_probe.verdict.preflight.facts import Sides
from tests.engines.conftest import StartEngine
from tests.importing.imported import imported
from tests.importing.logs import rows, write
from tests.simulated_run import Simulation, simulated_run
from tests.this_cpu import needs_fp8_cache
from tests.training_path.ranks.jobs import score_over_ranks

pytestmark = [pytest.mark.slow, needs_fp8_cache, pytest.mark.filterwarnings("ignore")]

URL: Final = "http://127.0.0.1:8000"
ANSWERS: Final = (
    ServerFindings(True, "after temperature", 0.0, 0.0, 0.0, True, True, "step-7", 0.4, processes=2),
    ServerFindings(False, None, None, None, None, False, None, None, None),
    ServerFindings(True, "before temperature", 0.3, 0.3, 0.3, False, False, None, 1e-9, processes=1),
)
Records = dict[str, dict[str, Any]]


def of_server(
    findings: ServerFindings, dtype: str | None, *, adapter: Path | None = None, prefill: bool
) -> dict[str, Any]:
    engine = EngineSettings(
        name="server", args={"url": URL}, adapter=adapter and str(adapter), prefill=prefill, prefix_caching=True
    )
    contact = Contact("policy", "/models/policy", 64, "vllm", dtype, VllmGenerate())
    sampling = SamplingSettings(temperature=0.7)
    return effective_settings(Dtype.BF16, engine, sampling, contact, findings, {"1": -0.5}, says_what_it_holds=None)


@pytest.fixture(scope="module")
def engines(
    trainers: Records, start: StartEngine, llama: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Records:
    """By the names of sides of mu; behind `trainers`, or their ranks would need servers with vLLM's variables."""
    log = imported(tmp_path_factory.mktemp("log"), write(tmp_path_factory.mktemp("written") / "log.jsonl", rows()))
    started: dict[str, dict[str, Any]] = {
        "here": {},
        "adapted": {"adapter": adapter},
        "fp8kv": {"args": {"kv_cache_dtype": "fp8"}},
        "quantised": {"args": {"quantization": "fp8_per_channel"}},
        "overridden": {"args": {"hf_overrides": {"rope_theta": 5e5, "rms_norm_eps": 1e-3}}, "top_p": 0.9},
    }
    records = {name: start(llama, Dtype.BF16, **how).effective_settings() for name, how in started.items()}
    records |= {
        f"server{number}": of_server(findings, "bfloat16" if number else None, prefill=bool(number))
        for number, findings in enumerate(ANSWERS)
    }
    records["server-adapted"] = of_server(ANSWERS[0], None, adapter=adapter, prefill=False)
    return records | {"logged": log.read_manifest().stages["sample-log"].effective_settings}


@pytest.fixture(scope="module")
def trainers(llama: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """By the names of sides of pi."""
    loaded = {
        "here": TrainingPathSettings(device="cpu"),
        "adapted": TrainingPathSettings(device="cpu", adapter=str(adapter)),
        "merged": TrainingPathSettings(device="cpu", adapter=str(adapter), adapter_merged=True),
        "autocast": TrainingPathSettings(device="cpu", precision="autocast", log_softmax_dtype=Dtype.BF16),
    }
    records = {}
    for name, settings in loaded.items():
        with Scorer.load(llama, Dtype.BF16, settings) as scorer:
            records[name] = scorer.effective_settings()
    sequences = [[TokenSequence("r0", [1, 2, 3], [4, 5])]]
    records["ranks"] = score_over_ranks(2, llama, Dtype.BF16, TrainingPathSettings(ranks=2), sequences)[1]
    log = imported(tmp_path_factory.mktemp("log"), write(tmp_path_factory.mktemp("written") / "log.jsonl", rows()))
    return records | {"logged": log.read_manifest().stages["score-train-log"].effective_settings}


def test_every_pair_of_kinds_gets_a_verdict(engines: Records, trainers: Records, adapter: Path, tmp_path: Path) -> None:
    declared: dict[str, dict[str, Any]] = {
        "adapted": {"adapter": str(adapter)},
        "merged": {"adapter": str(adapter), "adapter_merged": True},
        "autocast": {"precision": "autocast"},
        "fp8kv": {"args": {"kv_cache_dtype": "fp8"}},
        "quantised": {"args": {"quantization": "fp8_per_channel"}},
        "server-adapted": {"url": URL, "adapter": str(adapter)},
        "logged": {"logged": True},
    }

    def sides(records: Records) -> tuple[dict[str, Any], ...]:
        server = {name: {"url": URL} for name in records if name.startswith("server")}
        return tuple({"name": name, "dtype": "bf16", **(server | declared).get(name, {})} for name in records)

    applied = {f"sample-{name}": record for name, record in engines.items()}
    applied |= {f"score-train-{name}": record for name, record in trainers.items()}
    simulation = Simulation(
        num_prompts=4,
        pairs=(("fp32", "fp32"), *product(trainers, engines)),
        train=sides(trainers),
        infer=sides(engines),
        applied=applied,
        adapters={str(adapter): trainers["adapted"]["adapter"]["fingerprint"]},
    )
    run = simulated_run(tmp_path / "run", simulation)
    summary = summarise(run, run.read_manifest())
    assert len(summary.pairs) == 1 + len(trainers) * len(engines)
    on_adapters = {finding.what for finding in summary.preflight if finding.setting == "adapter"}
    assert {what.split()[1] for what in on_adapters if what.endswith("has none")} == {"training", "engine"}
    assert not any("other adapters" in what for what in on_adapters)


def test_no_setting_is_needed_by_a_rule(engines: Records, trainers: Records) -> None:
    """A record of another version, or of an engine of somebody else's, may lack any of them."""
    for (of_pi, train), (of_mu, infer) in product(trainers.items(), engines.items()):
        if of_mu == "server-adapted":
            infer = {**infer, "adapter": {"folder": "lora", "fingerprint": "a1"}}
        for name in (*train, *infer):
            without = ({key: value for key, value in record.items() if key != name} for record in (train, infer))
            train_without, infer_without = without
            for dtype in (Dtype.BF16, Dtype.FP32):
                assert isinstance(preflight(Sides(dtype, dtype, train_without, infer_without)), list), (
                    of_pi,
                    of_mu,
                    name,
                )
