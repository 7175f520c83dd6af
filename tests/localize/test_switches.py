"""Which ways to run the engine are tried besides its parts."""

import pytest

from mismatch_probe.config.localize import LocalizeSettings
from mismatch_probe.config.model import EngineSettings, ModelSettings
from mismatch_probe.localize.switches import KV_CACHE, SWITCHES, switches_of


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
