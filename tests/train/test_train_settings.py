"""Settings that cannot train anything are refused before an engine starts."""

from typing import Any

import pytest

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.train.preparation import prepare_training


def settings(**changes: Any) -> TrainSettings:
    return parse_settings(TrainSettings, {"model": {"path": "demo"}, **changes})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer.learning_rate", float("inf")),
        ("optimizer.eps", float("inf")),
        ("optimizer.weight_decay", float("inf")),
        ("optimizer.max_grad_norm", float("inf")),
        ("optimizer.betas", (0.9, 1.0)),
        ("rollout.temperature", float("inf")),
        ("loss_scale.initial", float("inf")),
        ("critic.learning_rate", float("nan")),
    ],
)
def test_a_number_that_no_step_can_be_made_with_is_refused(name: str, value: Any) -> None:
    table, key = name.split(".")
    with pytest.raises(UsageError, match=name):
        settings(**{table: {key: value}})


@pytest.mark.slow
def test_one_sample_a_prompt_is_refused_where_samples_are_compared() -> None:
    with pytest.raises(UsageError, match="--samples-per-prompt 2 or more"):
        prepare_training(settings(rollout={"samples": 1}))
    task = {"source": "sums:easy", "num_problems": 2}
    prepare_training(settings(rollout={"samples": 1}, objective={"name": "reinforce"}, task=task))


@pytest.mark.slow
def test_an_engine_argument_is_recorded_in_its_type_and_an_unknown_one_refused() -> None:
    task = {"source": "sums:easy", "num_problems": 2}
    preparation = prepare_training(settings(task=task, engine={"args": {"max-num-seqs": "8"}}))
    assert preparation.manifest.settings.engine.args == {"max_num_seqs": 8}
    with pytest.raises(UsageError, match=r"did you mean --vllm\.max_num_seqs"):
        prepare_training(settings(task=task, engine={"args": {"max_num_seq": "8"}}))


def test_an_adapter_that_would_be_added_to_the_weights_sent_is_refused() -> None:
    with pytest.raises(UsageError, match=r"leave it unset \(policy\.lora trains an adapter\)"):
        prepare_training(settings(engine={"adapter": "lora"}))
