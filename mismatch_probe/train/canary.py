"""A canary on demand: weights are sent, a step's responses sampled and scored, and nothing is learnt or written."""

import math

from mismatch_probe import __version__
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.guards import of_canary
from mismatch_probe.records.training_run import Canary, TrainingDirectory
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.distributed import join_process_group
from mismatch_probe.train.measure import response_metrics
from mismatch_probe.train.parts import assembled
from mismatch_probe.train.preparation import TrainingPreparation
from mismatch_probe.train.state import Adjustments
from mismatch_probe.training_path.loading import choose_device


def hold_canary(preparation: TrainingPreparation, run: TrainingDirectory | None) -> Canary:
    """What guards say of the newest checkpoint of a run, or, without one, of the model itself.

    Raises:
        MismatchProbeError: a part failed.
    """
    settings = preparation.settings
    join_process_group(choose_device(settings.policy.device))
    checkpoints = None if run is None else Checkpoints(run.checkpoints_path, keep=settings.checkpoint.keep)
    step = 0 if checkpoints is None else max(checkpoints.steps(), default=0)
    is_saved = checkpoints is not None and step in checkpoints.steps()
    adjustments = checkpoints.adjustments(step) if checkpoints is not None and is_saved else Adjustments()
    book = GuardBook(preparation.guards)
    with assembled(preparation, adjustments) as parts:
        if checkpoints is not None and is_saved:
            rest = checkpoints.load(step, parts.updater.trained)
            with checkpoints.restoring(step):
                parts.sync.restore(rest["sync"])
                book.restore(rest["guards"])
        metrics = parts.sync()
        rollouts = parts.rollouts.sample(step)
        scored = parts.updater.score(rollouts, keep_graph=False)
    metrics |= response_metrics(rollouts, scored.log_pi_T, scored.entropy_T)
    judged = of_canary(metrics)
    return Canary(
        tool_version=__version__,
        model=settings.model.path,
        step=step,
        train_dtype=adjustments.train_dtype or settings.train_dtype,
        infer_dtype=adjustments.infer_dtype or settings.infer_dtype,
        metrics={name: value if math.isfinite(value) else None for name, value in metrics.items()},
        fired=[event.as_json() for event in book.observe_canary(judged, step).events],
    )
