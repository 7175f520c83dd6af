"""Our own products cost time at every operator: they are entered where they change a number, and nowhere else."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_probe.cli.train import train
from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.train.policy import Policy
from mismatch_probe.training_path.arithmetic import CpuProducts
from tests.settings_calls import call

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "native", "products"),
    [
        ("fp16", False, CpuProducts),
        ("fp16", True, nullcontext),
        ("bf16", False, CpuProducts),
        ("bf16", True, nullcontext),
        ("fp32", False, nullcontext),
    ],
)
def test_the_engine_multiplies_16_bit_formats_as_the_policy_does_where_the_processor_cannot(
    dtype: str, native: bool, products: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def refuse(*_: Any, **settings: Any) -> None:
        given.append(settings["products"])
        raise UsageError("seen")

    for trial in ("native_fp16_follows_the_definition", "has_native_bf16"):
        monkeypatch.setattr(f"mismatch_probe.train.parts.{trial}", lambda: native)
    monkeypatch.setattr("mismatch_probe.train.parts.start_engine", refuse)
    flags = {"model": {"path": "demo"}, "task": {"source": "sums:easy", "num_problems": 32}, "infer_dtype": dtype}
    with pytest.raises(UsageError, match="seen"):
        call(train, flags, out=tmp_path / "run")
    assert given == [products]


@pytest.mark.parametrize("native_bf16", [True, False])
@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16, Dtype.FP16])
def test_the_policy_enters_them_where_they_change_its_dtype(
    dtype: Dtype, by_onednn: bool, native_bf16: bool, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mismatch_probe.train.sharded.fp32_by_onednn", lambda: by_onednn)
    monkeypatch.setattr("mismatch_probe.train.sharded.has_native_bf16", lambda: native_bf16)
    policy = Policy(llama, dtype, PolicySettings(), temperature=1.0)
    learning = isinstance(policy.computing(), CpuProducts)
    with torch.no_grad():
        scoring = isinstance(policy.computing(), CpuProducts)
    expected = {Dtype.FP32: (by_onednn, by_onednn), Dtype.BF16: (True, not native_bf16), Dtype.FP16: (True, True)}
    assert (learning, scoring) == expected[dtype]
