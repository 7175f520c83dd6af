"""A job of the training path whose models several processes hold: they are started here, or by torchrun."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from mismatch_probe.children.ranks import in_place, places_here, run_together
from mismatch_probe.children.start import Job
from mismatch_probe.compare.torchrun import current

_FOLLOW: Final = "mismatch_probe.training_path.ranks.scorer:follow"


def run_over_ranks(job: Job, num_ranks: int, on_message: Callable[[Any], None]) -> None:
    """Run the job as the first rank, beside the others.

    Raises:
        MismatchProbeError: the failure of a rank, with which all ended.
        KeyboardInterrupt: the user interrupted; all are ended first.
    """
    torchrun = current()
    if torchrun is not None:
        torchrun.run(job, _FOLLOW, on_message)
        return
    with places_here(num_ranks) as places:
        first, *others = (in_place(follower(job) if place.rank else job, place) for place in places)
        run_together(first, others, on_message)


def follower(job: Job) -> Job:
    """What the other ranks run beside the job."""
    return replace(job, function=_FOLLOW, arguments=(), log=None)
