"""SkyRL: a TrainingCallback. It hears of a step after its update, so guards name faults and end the run, one step late.

    from mismatch_probe.adapters.skyrl import GuardCallback

    trainer.add_callback(GuardCallback())       # a RayPPOTrainer; in your own entry script

Metrics join SkyRL's own at its next log. To stop is to raise `TrainingStopped`, since SkyRL has no flag for it; a last
checkpoint is not written then. The fully asynchronous trainer takes no callbacks. Read in SkyRL a9564572e.
"""

import logging
from typing import Any, Final

from skyrl.train.utils.callbacks import TrainingCallback

from mismatch_probe.adapters import norm_or_none
from mismatch_probe.errors import TrainingStopped
from mismatch_probe.guards.answers import Decision
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.guards import Guards

CAN: Final = ("stop",)
"""What this adapter carries out."""

logger = logging.getLogger(__name__)


class GuardCallback(TrainingCallback):  # type: ignore[misc]
    """Those of docs/guards.md unless others are given."""

    def __init__(self, guards: Guards | None = None) -> None:
        self.guards = Guards.default(can=CAN) if guards is None else guards
        self._decision: Decision | None = None

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """
        Raises:
            TrainingStopped: a guard ended the run; the message is its diagnosis.
        """
        batch, metrics = callback_input.batch, callback_input.metrics or {}
        decision = self.guards.observe(
            Batch(batch.get("action_log_probs"), batch.get("rollout_logprobs"), batch["loss_mask"]),
            step=callback_input.global_step,
            loss=metrics.get("policy_loss"),
            grad_norm=norm_or_none(metrics.get("grad_norm")),
            learning_rate=metrics.get("policy_lr"),
        )
        self._decision = decision
        if decision.events:
            logger.warning("%s", decision)
        if decision.stop:
            raise TrainingStopped(str(decision.diagnosis))

    def on_log(self, trainer: Any, callback_input: Any, control: Any) -> None:
        if self._decision is not None and callback_input.logs is not None:
            callback_input.logs.update({f"guards/{name}": value for name, value in self._decision.metrics.items()})
