"""verl's plugin: its classes wrapped when they are imported, and what the wrapped methods do with real batches."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mismatch_probe.adapters import verl as plugin  # noqa: E402
from tests.guards.steps import RESPONSES, TOKENS  # noqa: E402
from tests.other_trainers.batches import columns  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:guards that are off")

HAS_VERL = find_spec("verl") is not None
NAN_REWARD = {"rewards": [float("nan")] * 16}


class Section(dict):  # type: ignore[type-arg]
    """A part of verl's configuration."""

    __getattr__ = dict.__getitem__


def config(guards: str | None = "default", **correction: Any) -> Section:
    trainer = Section() if guards is None else Section(guards=guards)
    return Section(trainer=trainer, algorithm=Section(rollout_correction=Section(correction)))


class Padded(dict):  # type: ignore[type-arg]
    """Columns as the transfer queue gives them."""

    def to_padded_tensor(self) -> "Padded":
        return self


def v1_module(batches: list[dict[str, Any]]) -> ModuleType:
    """A stand-in for `trainer_base` whose queue holds these batches and whose trainer counts its updates."""

    class PPOTrainer:
        def __init__(self, settings: Section) -> None:
            self.config, self.global_steps, self.total_training_steps = settings, 1, 100
            self.learned: list[str] = []

        def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
            self.learned.append(f"critic {batch.keys[0]}")
            return batch

        def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
            self.learned.append(f"actor {batch.keys[0]}")
            metrics["actor/pg_loss"] = 0.1
            return batch

    def kv_batch_get(keys: list[int], partition_id: str, select_fields: list[str]) -> Padded:
        return Padded({"uid": torch.arange(16) // 4, **batches[keys[0]]})

    module = ModuleType("trainer_base")
    module.PPOTrainer, module.tq = PPOTrainer, SimpleNamespace(kv_batch_get=kv_batch_get)  # type: ignore[attr-defined]
    return module


def v1_run(settings: Section, batches: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    module = v1_module(batches)
    plugin.wrap_v1(module)
    trainer, logged = module.PPOTrainer(settings), []
    for number in range(len(batches)):
        if trainer.global_steps > trainer.total_training_steps:
            break
        metrics: dict[str, Any] = {}
        batch = SimpleNamespace(keys=[number], partition_id="train")
        trainer._update_actor(trainer._update_critic(batch, metrics=metrics), metrics=metrics)
        trainer.global_steps += 1
        logged.append(metrics)
    return trainer, logged


def test_a_clean_run_learns_from_every_batch_and_logs_what_guards_saw() -> None:
    trainer, logged = v1_run(config(), [columns(step) for step in range(1, 5)])
    assert len(trainer.learned) == 8
    assert all(0 < metrics["mismatch/kl_k3"] < 1e-3 and metrics["guards/firings"] == 0 for metrics in logged)
    assert {"reward/flat_groups_share", "policy/entropy", "actor/pg_loss"} <= logged[0].keys()


def test_a_batch_that_guards_give_up_reaches_neither_actor_nor_critic_and_the_run_ends() -> None:
    batches = [columns(1), columns(2), *(columns(step, **NAN_REWARD) for step in range(3, 9))]
    trainer, logged = v1_run(config(), batches)
    assert trainer.learned == ["critic 0", "actor 0", "critic 1", "actor 1"]
    assert len(logged) == 7
    assert trainer.total_training_steps == 7


def test_a_mask_that_is_all_zero_reaches_neither_actor_nor_critic_and_ends_the_run() -> None:
    empty = [columns(step, mask=np.zeros((RESPONSES, TOKENS))) for step in range(3, 9)]
    trainer, logged = v1_run(config(), [columns(1), columns(2), *empty])
    assert trainer.learned == ["critic 0", "actor 0", "critic 1", "actor 1"]
    assert [metrics["guards/firings"] for metrics in logged] == [0, 0, 1, 1, 1, 1, 1]


def test_a_batch_that_comes_again_for_ever_ends_the_run() -> None:
    trainer, logged = v1_run(config(), [columns(1)] * 14)
    assert (len(logged), trainer.total_training_steps) == (11, 11)


def test_without_the_setting_the_plugin_does_nothing() -> None:
    trainer, logged = v1_run(config(None), [columns(step, **NAN_REWARD) for step in range(1, 4)])
    assert (len(trainer.learned), logged[0]) == (6, {"actor/pg_loss": 0.1})


def test_the_sampler_s_log_probs_that_verl_copied_are_not_taken_for_the_trainer_s() -> None:
    _, logged = v1_run(config(bypass_mode=True), [columns(1)])
    assert not any(name.startswith("mismatch/") for name in logged[0])


def test_guards_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "guards.toml"
    path.write_text(
        'defaults = false\n[[guard]]\nname = "own"\nrule = "limit"\nmetric = "mismatch/kl_k3"\nabove = 1e-9\n'
        'actions = ["skip_update"]\n'
    )
    trainer, logged = v1_run(config(str(path)), [columns(1)])
    assert (trainer.learned, logged[0]["guards/firings"]) == ([], 1)


@pytest.mark.slow
def test_the_module_needs_neither_torch_nor_verl() -> None:
    code = "import sys; import mismatch_probe.adapters.verl; assert not {'torch', 'verl'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_names_the_plugin() -> None:
    named = {point.name: point.value for point in entry_points(group="verl.plugins")}
    if "mismatch_probe" not in named:
        pytest.skip("the installed package is older than its entry point")
    assert named["mismatch_probe"] == plugin.__name__


@pytest.mark.skipif(not HAS_VERL, reason="verl is not installed")
@pytest.mark.parametrize("name", ["verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer"])
def test_the_real_trainers_are_wrapped_when_verl_imports_them(name: str) -> None:
    code = (
        f"import mismatch_probe.adapters.verl, {name} as module\n"
        "trainer = getattr(module, 'PPOTrainer' if 'v1' in module.__name__ else 'RayPPOTrainer')\n"
        "assert trainer._update_actor.__wrapped__.__module__ == module.__name__\n"
        "assert trainer._update_critic.__wrapped__.__module__ == module.__name__\n"
    )
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer


@pytest.mark.skipif(not HAS_VERL, reason="verl is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_real_ray_trainer_s_methods_on_a_real_batch() -> None:
    """Everything but the workers, which would hold the model, is verl's own."""
    import numpy as np

    module = importlib.import_module("verl.trainer.ppo.ray_trainer")
    protocol = importlib.import_module("verl.protocol")
    if not hasattr(module.RayPPOTrainer._update_actor, "__wrapped__"):
        plugin.wrap_v0(module)
    trainer = object.__new__(module.RayPPOTrainer)
    trainer.config, trainer.global_steps, trainer.total_training_steps = config(), 1, 9

    def given(step: int, **changed: Any) -> Any:
        tensors = columns(step, **changed)
        tensors["token_level_scores"] = tensors.pop("rm_scores")
        tensors.pop("entropy")
        return protocol.DataProto.from_dict(
            tensors=tensors, non_tensors={"uid": np.repeat(np.arange(4), 4).astype(object)}
        )

    for step in range(1, 4):
        output = trainer._update_actor(given(step, **NAN_REWARD))
        metrics = output.meta_info["metrics"]
        assert metrics["reward/nonfinite"] == 16
        assert metrics["mismatch/kl_k3"] > 0
        assert trainer.total_training_steps == (9 if step < 3 else 1)
