"""Of which model a run is. A log does not say it for sure: what is known of it is compared, and the rest is said."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mismatch_probe.errors import UsageError
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.manifest import Manifest


@dataclass(frozen=True)
class Identity:
    """fingerprints: of the checkpoint, or of those that an imported log was explained with and that fitted it.

    names: the checkpoint's, or those that the log gives. is_log: nothing but the log and its explanations say it.
    """

    fingerprints: frozenset[str]
    names: tuple[str, ...]
    is_log: bool

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> "Identity":
        """
        Raises:
            BrokenRecord: an explanation in the run cannot be read.
        """
        model, log = manifest.model, manifest.log
        if model.fingerprint or log is None:
            return cls(frozenset({model.fingerprint}), (model.name,), is_log=False)
        fitted = [explanation for explanation in Findings(path).explanations() if explanation.fits_the_log]
        known = frozenset(explanation.model_fingerprint for explanation in fitted if explanation.model_fingerprint)
        return cls(known, tuple(log.models), is_log=True)

    def __str__(self) -> str:
        named = ", ".join(self.names) or "a model that its log does not name"
        return f"{named}, fingerprint {', '.join(sorted(self.fingerprints)) or 'not known'}"


def check_same_model(run: Identity, baseline: Identity, where: str) -> None:
    """Two runs of one model, by their checkpoints, or by the one name that each log gives.

    Raises:
        UsageError: they are of two.
    """
    fingerprints_differ = (
        run.fingerprints and baseline.fingerprints and run.fingerprints.isdisjoint(baseline.fingerprints)
    )
    both_named = run.is_log and baseline.is_log and len(run.names) == len(baseline.names) == 1
    if fingerprints_differ or (both_named and run.names != baseline.names):
        raise UsageError(
            f"{where} is of another model ({baseline}; the run has {run}): give a baseline of the same checkpoint"
        )


def unchecked(run: Identity, other: Identity, what: str) -> Iterator[str]:
    """What cannot be told of two runs of which one is a log; `what` the other one is (`the baseline`)."""
    unknown = [
        name for name, identity in (("the run", run), (what, other)) if identity.is_log and not identity.fingerprints
    ]
    if unknown:
        yield (
            f"it was not checked that {what} is of the same model: the log of {' and of '.join(unknown)} does not say "
            "which checkpoint sampled it; `mismatch-probe explain RUN --model CHECKPOINT` records it"
        )
