"""What runs code is not taken from a run directory."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.resuming import code_flags, resumed_settings
from mismatch_probe.errors import UsageError

RUN = Path("run")
PLAIN: dict[str, Any] = {
    "model": {"path": "demo", "trust_remote_code": False},
    "task": {"reward": "math"},
    "engine": {"args": {"block_size": "32", "gpu_memory_utilization": "0.9", "kv_cache_dtype": "fp8_e4m3", "x": True}},
}


def test_what_runs_no_code_goes_on_as_it_was_recorded() -> None:
    assert resumed_settings(RUN, PLAIN, {}) == PLAIN
    assert resumed_settings(RUN, PLAIN, {"model": {"path": "mine"}})["model"]["path"] == "mine"
    assert code_flags(PLAIN) == []


@pytest.mark.parametrize(
    ("recorded", "words", "given"),
    [
        ({"model": {"trust_remote_code": True}}, "--trust-remote-code", {"model": {"trust_remote_code": True}}),
        ({"task": {"reward": "my_rewards:f"}}, "--reward my_rewards:f", {"task": {"reward": "my_rewards:f"}}),
        ({"evaluation": {"reward": "runs.x.evil:f"}}, "--reward runs.x.evil:f", {"evaluation": {"reward": "math"}}),
        (
            {"engine": {"args": {"logits_processors": '["evil.Processor"]', "seed": 1}}},
            """--vllm.logits_processors '["evil.Processor"]'""",
            {"engine": {"args": {"logits_processors": "none"}}},
        ),
        ({"engine": {"args": {"worker_cls": "evil.Worker"}}}, "--vllm.worker_cls evil.Worker", None),
        ({"engine": {"args": {"tokenizer": "/evil"}}}, "--vllm.tokenizer /evil", None),
        ({"engine": {"args": {"kv_transfer_config": {"a": "b"}}}}, """--vllm.kv_transfer_config '{"a": "b"}'""", None),
    ],
)
def test_what_runs_code_counts_only_when_it_is_given_now(
    recorded: dict[str, Any], words: str, given: dict[str, Any] | None
) -> None:
    with pytest.raises(UsageError) as refused:
        resumed_settings(RUN, recorded, {"model": {"path": "demo"}})
    assert f"run was made with {words}: what runs code is not taken from a run directory" in str(refused.value)
    if given is not None:
        [(table, content)] = given.items()
        assert resumed_settings(RUN, recorded, given)[table] == {**recorded[table], **content} or table == "engine"
