"""A job whose models, or whose engine, several processes hold: they are started here, or by torchrun."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from mismatch_probe.children.ranks import in_place, places_here, run_together
from mismatch_probe.children.start import Job
from mismatch_probe.compare.torchrun import current

FOLLOW_SCORER: Final = "mismatch_probe.training_path.ranks.scorer:follow"
FOLLOW_ENGINE: Final = "mismatch_probe.compare.engine_ranks:follow"


def run_over_ranks(job: Job, follow: str, num_ranks: int, on_message: Callable[[Any], None]) -> None:
    """Run the job as the first rank, beside the others, which run the function `follow`.

    Raises:
        MismatchProbeError: the failure of a rank, with which all ended.
        KeyboardInterrupt: the user interrupted; all are ended first.
    """
    torchrun = current()
    if torchrun is not None:
        torchrun.run(job, follow, on_message)
        return
    with places_here(num_ranks) as places:
        first, *others = (in_place(follower(job, follow) if place.rank else job, place) for place in places)
        run_together(first, others, on_message)


def follower(job: Job, follow: str) -> Job:
    """What the other ranks run beside the job."""
    return replace(job, function=follow, arguments=(), log=None)
