"""verl: a plugin that its entry point loads; guards see each batch on the driver, withhold its update, and end the run.

    pip install mismatch-probe          # verl finds the plugin by itself, on every node
    python -m verl.trainer.main_ppo ... actor_rollout_ref.rollout.calculate_log_probs=True +trainer.guards=default

`trainer.guards` is `default` or the path of a guard file; without it the plugin does nothing. Every metric joins verl's
own. Read in verl 0.9.1, for both of its trainers: `PPOTrainer` (v1) and `RayPPOTrainer`. This module imports neither
torch nor verl: the classes are wrapped when verl imports them.
"""

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from mismatch_probe.guards.answers import Decision
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.guards import Guards

CAN: Final = ("skip", "stop")
"""What this adapter carries out."""

_STATE: Final = "_mismatch_probe"
_COLUMNS: Final = ("uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "entropy")

logger = logging.getLogger(__name__)


class _TrainerState:
    """What the plugin keeps on a trainer. decision: of `batch`, the one that is learned from."""

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self.decision: Decision | None = None
        self.batch: Any = None
        self.entropy: Any = None

    def decide(self, trainer: Any, batch: Any, measurement: Callable[[], Batch], metrics: dict[str, Any]) -> Decision:
        """Once a batch: critic and actor learn from the same one."""
        if self.decision is not None and self.batch is batch:
            return self.decision
        self.batch = batch
        self.decision = decision = self.guards.observe(measurement())
        metrics.update(decision.metrics)
        metrics["guards/firings"] = len(decision.events)
        if decision.events:
            logger.warning("%s", decision)
        if decision.stop:
            trainer.total_training_steps = trainer.global_steps
        return decision


def wrap_v1(module: ModuleType) -> None:
    """`verl.trainer.ppo.v1.trainer_base`: batches lie in the transfer queue, and metrics are handed through."""
    queue = module.tq

    def measure(trainer: Any, batch: Any) -> Batch:
        data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(_COLUMNS))
        columns = data.to_padded_tensor()
        return _batch(trainer, columns, columns["uid"].tolist(), columns.get("entropy", None))

    def guard_learning(learn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(learn)
        def learns(trainer: Any, batch: Any, metrics: dict[str, Any]) -> Any:
            state = _state(trainer)
            if state is None or not state.decide(trainer, batch, lambda: measure(trainer, batch), metrics).skip:
                return learn(trainer, batch, metrics=metrics)
            return batch

        return learns

    _wrap(module.PPOTrainer, ("_update_critic", "_update_actor"), guard_learning)


def wrap_v0(module: ModuleType) -> None:
    """`verl.trainer.ppo.ray_trainer`: batches are `DataProto`s; the entropies are dropped early, and so kept here."""

    def keep_scores(score: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(score)
        def scores(trainer: Any, batch: Any) -> Any:
            output = score(trainer, batch)
            state = _state(trainer)
            if state is not None:
                state.entropy = output[0].batch.get("entropys", None)
            return output

        return scores

    def guard_learning(learn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(learn)
        def learns(trainer: Any, batch: Any) -> Any:
            state = _state(trainer)
            if state is None:
                return learn(trainer, batch)
            metrics: dict[str, Any] = {}
            columns = batch.batch
            uid = batch.non_tensor_batch.get("uid")
            decision = state.decide(trainer, batch, lambda: _batch(trainer, columns, uid, state.entropy), metrics)
            output = module.DataProto(meta_info={"metrics": {}}) if decision.skip else learn(trainer, batch)
            output.meta_info["metrics"].update(metrics)
            return output

        return learns

    _wrap(module.RayPPOTrainer, ("_compute_old_log_prob",), keep_scores)
    _wrap(module.RayPPOTrainer, ("_update_critic", "_update_actor"), guard_learning)


def _batch(trainer: Any, columns: Any, prompts: Sequence[Any] | None, entropy: Any) -> Batch:
    """The responses of a batch, padded. In bypass mode verl copies mu's log-probs, so pi's are not known."""
    correction = trainer.config.algorithm.get("rollout_correction", None)
    is_copied = bool(correction and correction.get("bypass_mode", False))
    scores = columns.get("token_level_scores", None)
    scores = columns.get("rm_scores", None) if scores is None else scores
    return Batch(
        None if is_copied else columns.get("old_log_probs", None),
        columns.get("rollout_log_probs", None),
        columns["response_mask"],
        entropy=entropy,
        prompt_ids=None if prompts is None else list(prompts),
        rewards=None if scores is None else scores.sum(-1),
    )


def _state(trainer: Any) -> _TrainerState | None:
    """Of a trainer that asks for guards; None of another."""
    guards_file = trainer.config.trainer.get("guards", None)
    if not guards_file:
        return None
    if not hasattr(trainer, _STATE):
        guards = Guards.default(can=CAN) if guards_file == "default" else Guards.from_file(guards_file, can=CAN)
        setattr(trainer, _STATE, _TrainerState(guards))
    state: _TrainerState = getattr(trainer, _STATE)
    return state


def _wrap(trainer: type, names: Sequence[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for name in names:
        if hasattr(trainer, name):
            setattr(trainer, name, wrap(getattr(trainer, name)))
        else:
            logger.warning("verl's %s has no %s, so guards see nothing there; use verl 0.9.1", trainer.__name__, name)


class _Wrapping(Loader):
    """A module's own loader, and what is to be done once the module is there."""

    def __init__(self, loader: Loader, wrap: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._wrap = wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._wrap(module)


class _Finder(MetaPathFinder):
    """Finds verl's trainers as Python does, and has them wrapped when they are imported."""

    wraps: Final = {"verl.trainer.ppo.v1.trainer_base": wrap_v1, "verl.trainer.ppo.ray_trainer": wrap_v0}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.wraps:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapping(spec.loader, self.wraps[name])
        return spec


sys.meta_path.insert(0, _Finder())
for _name, _wrap_module in _Finder.wraps.items():
    if _name in sys.modules:
        _wrap_module(sys.modules[_name])
