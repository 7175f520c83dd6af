"""From what was found to a verdict in words."""

from mismatch_probe.config.explain import LoggedSide
from mismatch_probe.explain.bench import SideBench
from mismatch_probe.explain.codes import ADVICE, KINDS, LogCode
from mismatch_probe.explain.search import Found
from mismatch_probe.notation import write_number
from mismatch_probe.records.explanation import Trial
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.verdict.codes import Code

SIDES: dict[LoggedSide, str] = {"mu": "the engine's side (mu)", "pi": "the trainer's side (pi)"}


def verdict_of(bench: SideBench, found: Found) -> Verdict:
    """On one side."""
    side = SIDES[bench.side]
    null = found.null.trial
    if found.explained_by is None:
        return Verdict(
            kind="undecided",
            code=Code.UNEXPLAINED,
            sentence=f"Unexplained: nothing that was tried explains {side}.",
            evidence=[_left_by("as declared", null), *(_evidence(one.trial) for one in found.tried[:2])],
            advice=["Look at where along the responses and on which of them the side departs from the checkpoint."],
        )
    trial = found.explained_by.trial
    if not trial.departures:
        return Verdict(
            kind="clean",
            code=LogCode.AS_DECLARED,
            sentence=f"As declared: {side} is what its checkpoint and settings give.",
            evidence=[_left_by("as declared", null)],
        )
    first, *others = [
        Cause(
            code=one.code,
            sentence=f"{side[0].upper()}{side[1:]} departs from its declared settings: {one.what}.",
            evidence=[_evidence(trial), _left_by("as declared", null)],
            advice=[ADVICE[one.code]] if one.code in ADVICE else [],
        )
        for one in trial.departures
    ]
    return Verdict(kind=KINDS[first.code], also=others, **first.model_dump())


def _evidence(trial: Trial) -> str:
    what = " and ".join(one.what for one in trial.departures)
    share = f"{100 * trial.explained:.3g}"
    return f"{what} explains {share} % of the square and leaves {write_number(trial.residual_floors)} times the floor"


def _left_by(what: str, trial: Trial) -> str:
    return (
        f"{what}: {write_number(trial.residual_floors)} times the floor of rounding "
        f"({write_number(trial.residual_nats)} nats rms)"
    )
