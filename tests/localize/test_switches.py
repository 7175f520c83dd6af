"""Which ways to run the engine are tried besides its parts."""

from pathlib import Path

import pytest
import torch

from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import EngineSettings, ModelSettings
from mismatch_probe.localize.jobs import KV_CACHE, SWITCHES, run_switch_job, switches_of
from mismatch_probe.localize.workspace import Workspace


def settings(*, kv_cache: str | None = None, **changes: bool) -> LocalizeSettings:
    args = {} if kv_cache is None else {"kv_cache_dtype": kv_cache}
    return LocalizeSettings(model=ModelSettings(path=""), engine=EngineSettings(args=args), **changes)


@pytest.mark.parametrize("kv_cache", [None, "auto", "bfloat16"])
def test_a_kv_cache_in_the_models_format_has_nothing_to_be_raised_to(kv_cache: str | None) -> None:
    assert switches_of(settings(kv_cache=kv_cache)) == []


def test_a_kv_cache_in_fewer_bits_is_raised_without_being_asked_for() -> None:
    assert switches_of(settings(kv_cache="fp8")) == [KV_CACHE]
    assert switches_of(settings(kv_cache="fp8", interventions=False)) == []


def test_switches_that_are_asked_for_are_all_tried() -> None:
    assert switches_of(settings(switches=True, kv_cache="fp8_e4m3")) == list(SWITCHES)
    assert switches_of(settings(switches=True)) == [switch for switch in SWITCHES if switch != KV_CACHE]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they are tried")
@pytest.mark.parametrize("switch", [name for name, switch in SWITCHES.items() if switch.cuda_only])
def test_what_vllm_has_for_gpus_alone_is_told_as_not_tried(switch: str, tmp_path: Path) -> None:
    notes = run_switch_job(Workspace(tmp_path), switch)
    assert notes.left_out == {switch: "vLLM has it for CUDA alone"}
    assert not notes.trials
