"""What one side would refuse only after the other has worked."""

from typing import Any

import pytest
import torch

from mismatch_probe.compare import preflight
from mismatch_probe.compare.preflight import check_sides
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.training_path import loading


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "choose_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(preflight, "find_spec", lambda name: object())


def check(*dtypes: str) -> None:
    pairs = [(dtype, dtype) for dtype in dtypes]
    training = {"attention": "flash_attention_2"}
    check_sides(parse_settings(CompareSettings, {"model": {"path": "demo"}, "pairs": pairs, "training": training}))


@pytest.mark.usefixtures("on_a_gpu")
def test_flash_attention_is_refused_for_fp32_before_anything_is_sampled() -> None:
    check("bf16", "fp16")
    with pytest.raises(UsageError, match=r"flash_attention_2 runs in 16 bit alone.*fp32.*--attention sdpa"):
        check("bf16", "fp32")


@pytest.mark.usefixtures("on_a_gpu")
def test_flash_attention_that_is_not_installed_is_missed_before_anything_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install flash-attn.*--attention sdpa"):
        check("bf16")


def test_a_comparison_sends_a_server_no_weights() -> None:
    side = {"name": "prod", "url": "http://127.0.0.1:9", "args": {"transfer": "gloo"}}
    given = {"model": {"path": "demo"}, "pairs": [("bf16", "prod")], "infer": [side]}
    with pytest.raises(UsageError, match="--infer prod: transfer is how train sends a server weights"):
        check_sides(parse_settings(CompareSettings, given))


def test_a_device_map_that_is_none_is_refused_before_anything_is_sampled() -> None:
    def check_map(device_map: str) -> None:
        training = {"device_map": device_map}
        check_sides(parse_settings(CompareSettings, {"model": {"path": "demo"}, "training": training}))

    for usable in ("auto", "balanced", "cpu", "cuda:1"):
        check_map(usable)
    with pytest.raises(UsageError, match=r"training\.device_map 'banana'.*auto"):
        check_map("banana")


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"ranks": 2, "device_map": "auto"}, "ranks place the weights themselves"),
        ({"tensor_parallel": 2, "adapter": "adapters/last"}, "an adapter cannot be computed over ranks"),
        ({"tensor_parallel": 2, "precision": "fsdp"}, "precision = fsdp divides no product"),
        ({"ranks": 2, "lm_head_dtype": "fp32"}, "lm_head_dtype goes with precision = fsdp alone"),
        ({"ranks": 2, "device": "cuda:1"}, "cuda:1 is one GPU, and each of 2 ranks takes its own"),
    ],
)
def test_what_ranks_cannot_hold_is_refused_before_anything_is_sampled(training: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_sides(parse_settings(CompareSettings, {"model": {"path": "demo"}, "training": training}))


def test_ranks_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="3 ranks cannot be divided into groups of tensor_parallel = 2"):
        parse_settings(CompareSettings, {"model": {"path": "demo"}, "training": {"ranks": 3, "tensor_parallel": 2}})
