"""What the verdict says of a run: with all that was recorded, from the data alone, and without the FP32 pair."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.fault_lab.bench import Injection
from benchmarks.fault_lab.recording import FAULT_DTYPES, BenchRun
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.summary import Verdict
from mismatch_probe.verdict.preflight.facts import AGREEMENT, EXPERT_COUNTS


@dataclass(frozen=True)
class Named:
    kind: str
    code: str
    also: list[str]
    sentence: str


@dataclass(frozen=True)
class Outcome:
    """The verdicts on one injected fault. `alone`: effective settings hidden but for the dtypes. `sixteen_bit`: data
    alone and no FP32 pair in the run.
    """

    model: str
    fault: str
    strength: str
    where: str
    usual: bool
    expected: list[str]
    full: Named
    alone: Named
    sixteen_bit: Named

    @property
    def is_named(self) -> bool:
        return self.full.code in self.expected


def outcome(model: str, injection: Injection, faulty: BenchRun) -> Outcome:
    """Judge a faulty run three times."""
    return Outcome(
        model=model,
        fault=injection.fault,
        strength=injection.strength,
        where=injection.where,
        usual=injection.usual,
        expected=[code.value for code in injection.expected],
        full=_named(faulty.conclude(lambda manifest: manifest).verdict),
        alone=_named(faulty.conclude(without_settings).verdict),
        sixteen_bit=_named(faulty.conclude(partial(_pair_alone, dtype=FAULT_DTYPES[0])).verdict),
    )


def without_settings(manifest: Manifest) -> Manifest:
    """The manifest with nothing of the effective settings but what computes, and what was measured of it."""
    stages = {
        name: stage.model_copy(update={"effective_settings": _dtype_alone(stage.effective_settings)})
        for name, stage in manifest.stages.items()
    }
    return manifest.model_copy(update={"stages": stages})


def _dtype_alone(settings: dict[str, object]) -> dict[str, object]:
    config = settings.get("config") or {}
    assert isinstance(config, dict)
    experts = {key: config[key] for key in EXPERT_COUNTS if key in config}
    measured = {AGREEMENT: settings[AGREEMENT]} if AGREEMENT in settings else {}
    return {"dtype": settings.get("dtype"), "config": experts, **measured}


def _pair_alone(manifest: Manifest, dtype: str) -> Manifest:
    """The manifest about one pair, from the data alone."""
    pairs = tuple(pair for pair in manifest.settings.pairs if pair == (dtype, dtype))
    settings = manifest.settings.model_copy(update={"pairs": pairs})
    return without_settings(manifest).model_copy(update={"settings": settings})


def _named(verdict: Verdict) -> Named:
    return Named(verdict.kind, verdict.code, [cause.code for cause in verdict.also], verdict.sentence)


@dataclass(frozen=True)
class CleanOutcome:
    """The verdict on one pair of a run without a fault, with the run's other pairs and alone.

    variant: how the training path was set, all of it sound.
    """

    model: str
    variant: str
    pair: str
    in_run: Named
    alone: Named

    @property
    def is_accused(self) -> bool:
        return any(named.kind in ("bug", "broken") for named in (self.in_run, self.alone))


def clean_outcomes(model: str, variant: str, clean: BenchRun) -> list[CleanOutcome]:
    """Judge every pair of a run without a fault."""
    outcomes = []
    for pair in clean.conclude(lambda manifest: manifest).pairs:
        alone = clean.conclude(partial(_pair_alone, dtype=pair.train_dtype)).verdict
        outcomes.append(
            CleanOutcome(model, variant, f"{pair.train_dtype}/{pair.infer_dtype}", _named(pair.verdict), _named(alone))
        )
    return outcomes


def read_outcome(record: dict[str, Any]) -> Outcome:
    """As `as_json` wrote it."""
    return Outcome(**record | {name: Named(**record[name]) for name in ("full", "alone", "sixteen_bit")})


def read_clean_outcome(record: dict[str, Any]) -> CleanOutcome:
    """As `as_json` wrote it."""
    return CleanOutcome(**record | {name: Named(**record[name]) for name in ("in_run", "alone")})


def as_json(outcomes: list[Outcome] | list[CleanOutcome]) -> list[dict[str, object]]:
    """Plain values."""
    return [asdict(outcome) for outcome in outcomes]
