"""A server that a training samples from: how it is set, what is refused, and the guards that it has no input for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.load import parse_settings, parse_side
from mismatch_probe.config.resuming import resumed_settings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import HeldWeight
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.rules import parse_guards
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.report.answers.train import events
from mismatch_probe.report.training.page import summarise_training, write_training_report
from mismatch_probe.train.preparation import free_to_change, prepare_training
from tests.train.quick_runs import StoppingEngine, quick_home, quick_settings, train

URL = "http://127.0.0.1:9"


def settings(side: str, **more: Any) -> TrainSettings:
    return parse_settings(TrainSettings, {"model": {"path": "demo"}, "infer": [parse_side("infer", side)], **more})


def test_the_server_s_dtype_is_the_sampler_s() -> None:
    assert settings(f"prod:url={URL},transfer=gloo").infer_dtype == Dtype.BF16
    fp16 = settings(f"prod:url={URL},transfer=nccl,dtype=fp16,concurrency=4")
    assert fp16.infer_dtype == Dtype.FP16
    assert fp16.sampler.name == "server"
    assert fp16.sampler.args == {"url": URL, "transfer": "nccl", "concurrency": "4"}
    assert parse_settings(TrainSettings, json.loads(fp16.model_dump_json())) == fp16


@pytest.mark.parametrize(
    ("side", "more", "sentence"),
    [
        (f"prod:url={URL}", {}, "does not say how; give transfer=gloo"),
        (f"prod:url={URL},transfer=gloo", {"infer_dtype": "fp16"}, "--infer-dtype fp16 is not what the server"),
        (f"prod:url={URL},transfer=gloo", {"engine": {"args": {"max_num_seqs": 4}}}, "leave one of them out"),
        (f"prod:url={URL},transfer=gloo,checkpoint=last-week", {}, "leave checkpoint and adapter out"),
        ("bf16", {}, "--infer names a server here"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked(side: str, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        settings(side, **more)


def test_a_backend_that_vllm_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="transfer"):
        prepare_training(settings(f"prod:url={URL},transfer=smoke"))


@pytest.mark.slow
def test_prompt_log_probs_at_another_temperature_are_refused() -> None:
    with pytest.raises(UsageError, match=r"prefill=true cannot be used with --temperature 0\.7"):
        prepare_training(settings(f"prod:url={URL},transfer=gloo,prefill=true", rollout={"temperature": 0.7}))


def test_a_guard_that_would_change_a_server_s_precision_is_refused() -> None:
    raises = {"name": "up", "rule": "nonfinite", "metric": "mismatch/kl_k3", "actions": ["raise_precision(infer)"]}
    guards = parse_guards({"defaults": False, "guard": [raises]}, "it")
    with pytest.raises(UsageError, match="a server computes in the dtype that it was started with"):
        prepare_training(settings(f"prod:url={URL},transfer=gloo"), guards)


def test_the_address_counts_when_it_is_given_now_and_may_be_another() -> None:
    recorded = settings(f"prod:url={URL},transfer=gloo")
    with pytest.raises(UsageError, match="nor is a server's address"):
        resumed_settings(Path("run"), recorded.model_dump(mode="json"), {})
    moved = {"infer": [parse_side("infer", "prod:url=http://127.0.0.1:10,transfer=gloo,tries=2")]}
    again = parse_settings(TrainSettings, resumed_settings(Path("run"), recorded.model_dump(mode="json"), moved))
    assert again.sampler.args["url"] == "http://127.0.0.1:10"
    kept = [given.model_dump(mode="json", exclude=free_to_change(given)) for given in (recorded, again)]
    assert kept[0] == kept[1]


class SilentEngine(StoppingEngine):
    """Scores no given tokens and does not say what it holds, as a server that was asked for neither."""

    @property
    def scores_given_tokens(self) -> bool:
        return False

    def held_weights(self, names: Sequence[str]) -> list[dict[str, HeldWeight]]:
        return []


@pytest.mark.slow
def test_guards_without_their_input_are_recorded_and_told(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch, SilentEngine)
    with pytest.warns(UserWarning, match="guards that are off here"):
        steps = train(tmp_path / "run", quick_settings(llama, home, 2))
    of_sync = {name for step in steps for name in step if name.startswith("sync/")}
    assert of_sync == {"sync/draw_surprise_mean", "sync/draw_surprise_error"}, "for these it need only sample"
    assert all("update/policy_shift_k3" in step for step in steps)
    directory = TrainingDirectory(tmp_path / "run")
    off = directory.read_training_manifest().guards_off
    assert off.keys() == {"stale-engine", "unsynced-weights", "other-weights", "engine-weights", "engine-layer"}
    write_training_report([directory], directory.report_path)
    summary = summarise_training(directory)
    assert summary.guards_off == off
    words = "unsynced-weights (lacks the number of weights that a sync left unchanged)"
    assert any(words in sentence for sentence in events(summary))
    assert words in directory.report_path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:guards that are off here")
def test_a_run_that_goes_on_without_an_input_of_its_guards_says_so(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As against a server that was started again without what tells which weights it holds."""
    home = quick_home(tmp_path, monkeypatch)
    train(tmp_path / "run", quick_settings(llama, home, 1))
    quick_home(tmp_path, monkeypatch, SilentEngine)
    with pytest.warns(UserWarning, match=r"step 2 lacks .*sync/weights_unchanged"):
        train(tmp_path / "run", quick_settings(llama, home, 2), resume=True)
