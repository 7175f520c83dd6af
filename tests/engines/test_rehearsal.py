"""What vLLM itself refuses of a configuration, found without starting it."""

import os
from pathlib import Path

import pytest

from mismatch_probe.children import servers
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import check_engine, check_room, rehearsal, with_typed_arguments
from mismatch_probe.errors import EngineError, MismatchProbeError, UsageError
from tests.children.conftest import own_servers
from tests.tiny_models import make_checkpoint

__all__ = ["own_servers"]
PLAIN = SamplingSettings()


def refusals(checkpoint: Path | str, *dtypes: Dtype, **args: object) -> dict[Dtype, MismatchProbeError]:
    starts = [(str(checkpoint), dtype, EngineSettings(args=args)) for dtype in dtypes]
    with rehearsal(starts, PLAIN, max_model_len=64) as refused:
        pass
    return {dtypes[number]: error for number, error in refused.items()}


def rehearsed(checkpoint: Path | str, *dtypes: Dtype, **args: object) -> None:
    for error in refusals(checkpoint, *dtypes, **args).values():
        raise error


@pytest.mark.slow
def test_what_vllm_can_start_passes_in_every_dtype_and_leaves_this_process_as_it_was(llama: Path) -> None:
    before = dict(os.environ)
    rehearsed(llama, Dtype.BF16, Dtype.FP16, Dtype.FP32, enforce_eager="true", max_num_seqs="8")
    assert os.environ == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"kv_cache_dtype": "nonsense"}, "--vllm.kv_cache_dtype nonsense.*Input should be"),
        ({"tensor_parallel_size": "9"}, "--vllm.tensor_parallel_size"),
        ({"max_model_len": "99999"}, "max_model_len"),
        ({"distributed_executor_backend": "ray"}, "--vllm.distributed_executor_backend ray .* GPUs alone.*leave it"),
    ],
)
def test_a_value_that_vllm_refuses_is_named_as_it_was_given(llama: Path, args: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rehearsed(llama, Dtype.BF16, **args)


@pytest.mark.slow
def test_a_dtype_that_vllm_refuses_this_checkpoint_in_is_found_among_others(tmp_path: Path) -> None:
    gemma = make_checkpoint(tmp_path, "gemma2")
    refused = refusals(gemma, Dtype.BF16, Dtype.FP16, Dtype.FP32)
    assert list(refused) == [Dtype.FP16]
    assert "in fp16: " in str(refused[Dtype.FP16])


def test_a_failure_of_the_body_comes_first_and_ends_the_rehearsal(llama: Path) -> None:
    with (
        pytest.raises(KeyError, match="mine"),
        rehearsal([(str(llama), Dtype.BF16, EngineSettings())], PLAIN, max_model_len=64),
    ):
        raise KeyError("mine")


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_an_engine_that_dies_without_a_word_is_an_error_of_the_environment(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text("class EngineArgs: ...")
    (tmp_path / "vllm" / "__init__.py").write_text("import sys; sys.exit('libcudart.so.13: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(servers.STAGES, "training", ["json"])
    with pytest.raises(EngineError, match=r"configuring vllm ended with exit code 1: .*libcudart.*probe doctor"):
        rehearsed(llama, Dtype.BF16)


@pytest.mark.parametrize(
    ("dtype", "temperature", "words"),
    [
        (Dtype.FP64, 1.0, "vLLM cannot run in fp64"),
        (Dtype.BF16, 0.001, "--temperature 0.001 cannot be used"),
    ],
)
def test_a_distribution_that_it_cannot_give_is_refused_at_once(dtype: Dtype, temperature: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_engine(dtype, SamplingSettings(temperature=temperature), EngineSettings())


@pytest.mark.parametrize(
    ("args", "words"),
    [({"nonsense": 1}, "no argument 'nonsense'"), ({"max_num_seqs": "many"}, "takes a whole number")],
)
def test_an_argument_that_it_does_not_have_is_refused_at_once(args: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_typed_arguments(EngineSettings(args=args), "vllm")


def test_a_prompt_must_leave_room_in_the_length_that_the_user_gave() -> None:
    check_room(EngineSettings(args={"max_model_len": "12"}), "prompt row-0", 10)
    check_room(EngineSettings(args={"max_model_len": "-1"}), "prompt row-0", 10)
    with pytest.raises(UsageError, match=r"--vllm.max_model_len 11 leaves prompt row-0 of 10 tokens no room"):
        check_room(EngineSettings(args={"max_model_len": "11"}), "prompt row-0", 10)
