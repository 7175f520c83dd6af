import pytest

from mismatch_probe.provenance.environment import decisive, decisive_keys, recorded_environment


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
