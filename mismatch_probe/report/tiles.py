"""What an engineer asks first of the worst pair, and the advice that can still be followed."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mismatch_probe.causes.comparison import Code, words_in_short
from mismatch_probe.notation import ABSENT, write_estimate, write_token_count
from mismatch_probe.records.findings import Document, Explanation
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.kinds import EVALUATION
from mismatch_probe.records.summary import PairSummary, SettingsToldApart, Summary, Verdict
from mismatch_probe.report.names import listed, pair_label
from mismatch_probe.report.pairs import budget
from mismatch_probe.report.view import Tile
from mismatch_probe.verdict.headline import (
    EXPLAIN,
    GO_ON,
    HEADROOM,
    KL_LIMIT,
    RUN,
    against_limit,
    closest,
    foremost,
    localize_command,
    overall,
)
from mismatch_probe.verdict.settings import explained, settings_words


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


_WHOLE: Final = 10
_PAIRS_NAMED: Final = 2

_NOT_NAMED: Final = (Code.UNEXPLAINED, Code.BEYOND_FORMAT)

_NEXT: Final = {
    "compare": ("Add an FP32 pair", "it tells rounding from a bug; the command is below"),
    "explain": ("Explain the log", "with its checkpoint each cause is computed; the command is below"),
    "localize": ("Localize it", "to the part it comes from; the command is below"),
    "headroom": ("Examine FP16", "whether the checkpoint fits it; the command is below"),
}
"""What a command of the advice does."""


def tiles(summary: Summary) -> list[Tile]:
    """Size, length budget and next step. A bug has its cause in place of a budget, which would mean nothing; broken
    data has none, since its numbers are no measurement.
    """
    pair = foremost(summary.pairs)
    kind = pair.verdict.kind
    if kind == "broken" or "kl_k3" not in pair.metrics:
        return []
    if kind == "bug":
        return [_size(pair), _cause(summary, pair), _mend(summary, pair)]
    if pair.verdict.code == Code.SETTINGS and pair.settings_told_apart is not None:
        return [_size(pair), *_settings(pair.settings_told_apart), *_length(pair)]
    return [_size(pair), *_length(pair), *_next(summary, pair)]


def _size(pair: PairSummary) -> Tile:
    kl = pair.metrics["kl_k3"]
    return Tile(
        f"{pair_label(pair)}: KL per token", write_estimate(kl).value, f"{against_limit(kl.value)} ({KL_LIMIT:g})"
    )


def _settings(told_apart: SettingsToldApart) -> list[Tile]:
    """How many times the KL of the pair beside; none where that cannot be had."""
    ratio = told_apart.ratios.get("kl_k3")
    if ratio is None:
        return []
    written, words = write_estimate(ratio), settings_words(told_apart.settings)
    without = "them" if len(told_apart.settings) > 1 else "it"
    note = f"{written.interval} times the KL of the same pair without {without}{explained(told_apart)}"
    return [Tile(f"{words[:1].upper()}{words[1:]}", f"{written.value} times", note.strip())]


def _length(pair: PairSummary) -> list[Tile]:
    law = pair.length
    written = budget(pair).value
    if law is None or written == ABSENT:
        return []
    tokens = law.budget_tokens or law.budget_closed_form
    assert tokens is not None
    median = law.median_response
    times = tokens.value / median
    rounded = float(f"{times:.2g}")
    compared = f"{rounded:,.0f}" if rounded >= _WHOLE else f"{rounded:g}"
    note = f"{compared} times the median response here, {write_token_count(median)} tokens"
    return [Tile(f"Length budget at ESS {law.budget_ess:g}", f"{written} tokens", note)]


def _next(summary: Summary, pair: PairSummary) -> list[Tile]:
    if pair.verdict.kind == "clean":
        return [Tile("Next step", "None", "there is nothing to mend between the two sides")]
    best = closest(pair, summary.contrasts)
    if best is not None:
        ratio = write_estimate(best.ratio)
        note = f"{ratio.value} {ratio.interval} times closer in KL"
        return [Tile("Closest dtype in this run", best.over.upper(), note)]
    commands = [command for _, command in map(parted, pair.verdict.advice) if command]
    return [Tile("Next step", *_NEXT[name]) for name in (command.split()[1] for command in commands[:1])]


def _cause(summary: Summary, pair: PairSummary) -> Tile:
    code = pair.verdict.code
    bugs = [other for other in summary.pairs if other.verdict.kind == "bug"]
    alike = [other for other in bugs if other.verdict.code == code]
    where = _pairs(alike, len(summary.pairs))
    others = "; other pairs have other causes" if len(alike) < len(bugs) else ""
    name = "Not known yet" if code in _NOT_NAMED else code.replace("_", " ").capitalize()
    return Tile("Cause", name, f"seen in {where}{others}")


def _pairs(pairs: Sequence[PairSummary], num_all: int) -> str:
    """`BF16`, `BF16 and FP32, 2 of 13 pairs`."""
    named = listed([pair_label(pair) for pair in pairs]) if len(pairs) <= _PAIRS_NAMED else pair_label(pairs[0])
    return named if num_all == 1 else f"{named}, {len(pairs)} of {num_all} pairs"


def _mend(summary: Summary, pair: PairSummary) -> Tile:
    look = "Look where FP32 differs" if pair.verdict.code == Code.UNEXPLAINED else "Look at that side"
    is_of_log = any(other.is_logged for other in summary.pairs)
    again = "import a new log: its sides must agree" if is_of_log else "compare again: FP32 must agree with FP32"
    return Tile("Next step", words_in_short(pair.verdict.code) or look, f"as said below; then {again}")
