from pathlib import Path

import pytest

from mismatch_probe.provenance import environment
from mismatch_probe.provenance.environment import decisive, decisive_keys, hardware, recorded_environment


def test_variables_that_compute_are_recorded_and_secrets_and_caches_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = {"VLLM_ATTENTION_BACKEND", "OMP_NUM_THREADS", "LD_PRELOAD"}
    others = {"VLLM_API_KEY", "HOME", "TORCHINDUCTOR_CACHE_DIR"}
    for name in computing | others:
        monkeypatch.setenv(name, "x")
    found = recorded_environment()
    assert computing <= found.keys()
    assert not others & found.keys()


def test_only_what_can_change_a_number_is_decisive() -> None:
    versions = {"torch": "2.13", "pyarrow": "21"}
    hardware = {"cpu": "Xeon", "memory_bytes": 1}
    environment = {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive", "VLLM_LOGGING_LEVEL": "INFO"}
    assert decisive(versions, hardware, environment) == {
        "versions": {"torch": "2.13"},
        "hardware": {"cpu": "Xeon"},
        "environment": {"OMP_NUM_THREADS": "4"},
    }


def test_each_part_has_a_key_of_its_own() -> None:
    one = decisive_keys({"torch": "2.13"}, {"cpu": "Xeon"}, {})
    other = decisive_keys({"torch": "2.13"}, {"cpu": "Epyc"}, {})
    assert {name for name in one if one[name] != other[name]} == {"hardware"}


@pytest.mark.parametrize(
    ("cpu_info", "model", "instructions"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f\n\nmodel name\t: other\n", "AMD EPYC", "avx2, avx512f"),
        ("processor\t: 0\nFeatures\t: fp asimd sve bf16\n", None, "bf16, sve"),
        (None, None, "unknown"),
    ],
    ids=["x86", "ARM", "another system"],
)
def test_the_processor_is_recorded_with_the_instruction_sets_that_decide_how_it_rounds(
    cpu_info: str | None, model: str | None, instructions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if cpu_info is not None:
        path.write_text(cpu_info)
    monkeypatch.setattr(environment, "_CPU_INFO", path)
    recorded = hardware()
    assert recorded["cpu_instructions"] == instructions
    assert model is None or recorded["cpu"] == model
