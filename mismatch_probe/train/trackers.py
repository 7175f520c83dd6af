"""Experiment trackers, imported only where requested, and other frameworks' names for our metrics.

Only names whose definition is ours are here; each was read in the source at the commit named. Left out because the
definition differs: verl's `response_length/clip_ratio` (counts responses that end at the limit by themselves) and
`training/rollout_probs_diff_std` (divides by n - 1); TRL's `sampling/importance_sampling_ratio/*` (after truncation)
and `reward_std` (n - 1); slime's `entropy_loss` (mean of per-response means).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Protocol

from mismatch_probe.config.train import Tracker, TrainSettings
from mismatch_probe.errors import MismatchProbeError, MissingExtra, UsageError
from mismatch_probe.guards.diagnosis import StepFirings
from mismatch_probe.provenance.environment import content_key
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.trainer import StepListener

ALIASES: Final[dict[str, dict[str, str]]] = {
    "verl 1dda039b": {
        "rollout_corr/kl": "mismatch/kl_k1",
        "rollout_corr/k3_kl": "mismatch/kl_k3",
        "rollout_corr/log_ppl_diff": "mismatch/log_ppl_diff",
        "rollout_corr/ppl_ratio": "mismatch/ppl_ratio",
        "rollout_corr/chi2_token": "mismatch/chi2_token",
        "rollout_corr/chi2_seq": "mismatch/chi2_seq",
        "training/rollout_probs_diff_mean": "mismatch/prob_abs_diff",
        "training/rollout_probs_diff_max": "mismatch/prob_abs_diff_max",
        "training/rollout_actor_probs_pearson_corr": "mismatch/prob_pearson",
        "actor/entropy": "policy/entropy",
        "actor/grad_norm": "optim/grad_norm",
        "actor/lr": "optim/learning_rate",
        "critic/rewards/mean": "reward/mean",
        "response_length/mean": "response/length_mean",
        "response_length/max": "response/length_max",
        "timing_s/step": "time/step_seconds",
    },
    "TRL f2cd5771": {
        "sampling/sampling_logp_difference/mean": "mismatch/abs_logprob_diff",
        "sampling/sampling_logp_difference/max": "mismatch/abs_logprob_diff_max",
        "reward": "reward/mean",
        "frac_reward_zero_std": "reward/flat_groups_share",
        "completions/mean_length": "response/length_mean",
        "completions/max_length": "response/length_max",
        "completions/clipped_ratio": "response/truncated_share",
        "entropy": "policy/entropy",
        "grad_norm": "optim/grad_norm",
        "learning_rate": "optim/learning_rate",
    },
    "NeMo-RL 7ea279ab": {
        "train/token_mult_prob_error": "mismatch/token_mult_prob_error",
        "train/gen_kl_error": "mismatch/kl_k3",
        "train/reward": "reward/mean",
        "train/grad_norm": "optim/grad_norm",
        "train/lr": "optim/learning_rate",
    },
    "prime-rl 559b4477": {
        "mismatch_kl/all/mean": "mismatch/kl_k3",
        "kl_ent_ratio/mean": "mismatch/kl_entropy_ratio",
        "entropy/all/mean": "policy/entropy",
        "optim/lr": "optim/learning_rate",
        "time/step": "time/step_seconds",
    },
    "slime 624b824a": {
        "train/train_rollout_logprob_abs_diff": "mismatch/abs_logprob_diff_seq",
        "train/grad_norm": "optim/grad_norm",
        "train/lr-pg_0": "optim/learning_rate",
    },
}
"""Framework and commit: its name: ours. prime-rl's `optim/grad_norm` is ours as it stands."""


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics, and the same values under the names of other frameworks."""
    names = {alias: own for framework in ALIASES.values() for alias, own in framework.items()}
    return {**metrics, **{alias: metrics[own] for alias, own in names.items() if own in metrics}}


_PROJECT: Final = "mismatch-probe"

MessageCallback = Callable[[str], object]


class TrackerRun(Protocol):
    """One run at one tracker. An exception of its methods is reported once; the run goes on without it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step, those that are not finite as they are."""

    def close(self) -> None:
        """Send what is left."""


@contextmanager
def track(directory: TrainingDirectory, settings: TrainSettings, tell: MessageCallback) -> Iterator[StepListener]:
    """A listener that sends each step to the trackers of `settings.report_to`, under our names and other frameworks'.

    Only the first rank sends. `tell` says a sentence to the user, for a tracker that fails while the run goes on.
    """
    trackers = [GuardedTracker(name, tell) for name in settings.report_to if is_main()]
    for tracker in trackers:
        tracker.open(lambda name: _RUNS[name](directory, settings))

    def send(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        everything = with_aliases(metrics) | {"guards/firings": float(len(decision.events))}
        for tracker in trackers:
            tracker.act(lambda run: run.log(step, everything))

    try:
        yield send
    finally:
        for tracker in trackers:
            tracker.act(lambda run: run.close())


class GuardedTracker:
    """A tracker until it fails; what it failed with is reported once."""

    def __init__(self, name: Tracker, tell: MessageCallback) -> None:
        self._name = name
        self._tell = tell
        self._run: TrackerRun | None = None

    def open(self, start: Callable[[Tracker], TrackerRun]) -> None:
        """
        Raises:
            MismatchProbeError: what the user has to fix before the run starts.
        """
        with self._survive():
            self._run = start(self._name)

    def act(self, what: Callable[[TrackerRun], None]) -> None:
        if self._run is not None:
            with self._survive():
                what(self._run)

    @contextmanager
    def _survive(self) -> Iterator[None]:
        try:
            yield
        except MismatchProbeError:
            raise
        except Exception as error:  # noqa: BLE001 - another program's failure is no reason to end a training run
            self._run = None
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._tell(f"{self._name} failed ({reason}); the run goes on without it, metrics.jsonl has every step")


class _Tensorboard:
    """Event files in RUN/tensorboard; opened at the first step, so that a resumed run hides the steps it repeats."""

    def __init__(self, directory: TrainingDirectory, settings: TrainSettings) -> None:
        self._folder = directory.path / "tensorboard"
        self._writer_class = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._settings = settings.model_dump_json(indent=2)
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._writer_class(str(self._folder), purge_step=step)
            self._writer.add_text("settings", f"```json\n{self._settings}\n```", step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Wandb:
    """A run of Weights & Biases; a resumed run continues it. WANDB_PROJECT, WANDB_MODE and the like are heard."""

    def __init__(self, directory: TrainingDirectory, settings: TrainSettings) -> None:
        wandb = _import("wandb", "wandb")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=directory.path.name,
                id=_identity(directory),
                resume="allow",
                dir=str(directory.path),
                config=settings.model_dump(mode="json"),
            )
        except wandb.errors.UsageError as error:
            raise UsageError(
                f"wandb cannot be used: {str(error).splitlines()[0]} Or set WANDB_MODE=offline, or leave it out of "
                "--report-to."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio, kept on this machine unless TRACKIO_SPACE_ID says otherwise."""

    def __init__(self, directory: TrainingDirectory, settings: TrainSettings) -> None:
        self._run = _import("trackio", "trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=f"{directory.path.name}-{_identity(directory)}",
            resume="allow",
            config=settings.model_dump(mode="json"),
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


_RUNS: Final[dict[Tracker, Callable[[TrainingDirectory, TrainSettings], TrackerRun]]] = {
    "wandb": _Wandb,
    "tensorboard": _Tensorboard,
    "trackio": _Trackio,
}


def _identity(directory: TrainingDirectory) -> str:
    """The same for every start of a run, another for every run."""
    manifest = directory.read_training_manifest()
    return content_key([manifest.created_at, manifest.content_keys])


def _import(module: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"--report-to {package} needs a package that is not installed: `pip install 'mismatch-probe[trackers]'`, "
            f"or leave {package} out"
        ) from error
