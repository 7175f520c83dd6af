"""The advice of a summary as it can be followed now: with the run's folder, and without what was followed already."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from mismatch_probe.records.explanation import Explanation
from mismatch_probe.records.findings import Document
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.kinds import EVALUATION
from mismatch_probe.records.summary import Summary, Verdict
from mismatch_probe.verdict.headline import overall
from mismatch_probe.verdict.next_commands import EXPLAIN, GO_ON, HEADROOM, RUN, localize_command


def with_advice_to_follow(summary: Summary, run: Path, filed: Sequence[Document]) -> Summary:
    """The summary of the run in the folder `run`, in which `filed` lies; the verdict of the run is told as today."""
    done = [_command(document) for document in filed]
    pairs = [pair.model_copy(update={"verdict": _to_follow(pair.verdict, run, done)}) for pair in summary.pairs]
    return summary.model_copy(update={"verdict": overall(pairs), "pairs": pairs})


def parted(advice: str) -> tuple[str, str]:
    """What to do, and the command that does it: what stands between backticks at the end, or nothing."""
    what, _, command = advice.partition(": `")
    return (what, command.removesuffix("`")) if command.endswith("`") else (advice, "")


def _to_follow(verdict: Verdict, run: Path, done: Sequence[str]) -> Verdict:
    left = [advice for advice in verdict.advice if not any(_asks_for(command, advice) for command in done)]
    return verdict.model_copy(update={"advice": [_in_folder(advice, run) for advice in left]})


def _command(document: Document) -> str:
    """What files such a document."""
    if isinstance(document, Headroom):
        return HEADROOM
    if isinstance(document, Explanation):
        return EXPLAIN
    return localize_command(*document.settings.names)


def _asks_for(command: str, advice: str) -> bool:
    return re.search(rf"`{re.escape(command)}( --modules)?`", advice) is not None


def _in_folder(advice: str, run: Path) -> str:
    """An evaluation goes on by its own command."""
    if (run / EVALUATION).exists():
        advice = advice.replace(GO_ON, GO_ON.replace(" compare ", " evaluate "))
    return re.sub(rf"(--run|--out|explain) {RUN}\b", lambda match: f"{match[1]} {shlex.quote(str(run))}", advice)
