"""The catalogue's faults of the log."""

from collections.abc import Iterator
from functools import partial

from benchmarks.fault_lab.bench import Bench, Injection, Make, at_strengths
from benchmarks.fault_lab.in_log import Edit, exchanged, shifted, spoiled, tokenised_again
from benchmarks.fault_lab.recording import BenchRun
from mismatch_probe.causes.comparison import Code


def log_faults() -> Iterator[Injection]:
    yield from at_strengths(
        "log-probs shifted along the response",
        "log",
        (Code.LABEL_OFFSET,),
        {f"{by:+d} tokens": edited(f"shift{by}", shifted(by)) for by in (1, -1, 2)},
    )
    yield from at_strengths(
        "responses joined to other responses' scores",
        "log",
        (Code.MISPAIRED,),
        {f"{share:.0%} of rows": edited(f"pair{share}", exchanged(share, with_ids=False)) for share in (0.05, 0.25, 1)},
        usual=("25% of rows", "100% of rows"),
    )
    yield from at_strengths(
        "legs in another order, ids recorded",
        "log",
        (Code.MISPAIRED,),
        {"25% of rows": edited("ids", exchanged(0.25, with_ids=True))},
    )
    yield from at_strengths(
        "responses tokenised again",
        "log",
        (Code.RETOKENISED,),
        {f"{share:.0%} of rows": edited(f"tokens{share}", tokenised_again(share)) for share in (0.02, 0.2)},
    )
    for fault, value, code in (
        ("log-probs missing", float("nan"), Code.MISSING_LOGPROBS),
        ("log-probs infinite", float("-inf"), Code.NONFINITE),
    ):
        yield from at_strengths(
            fault,
            "log",
            (code,),
            {f"{count} tokens": edited(f"{code}{count}", spoiled(value, count)) for count in (1, 8)},
        )


def edited(name: str, edit: Edit) -> Make:
    return partial(_edited, name=name, edit=edit)


def _edited(bench: Bench, name: str, edit: Edit) -> BenchRun:
    return bench.in_log(name, edit)
