"""What came of a sanity test, for the page and the terminal."""

from typing import Any

from markupsafe import Markup

from mismatch_probe.notation import write_many, write_percent
from mismatch_probe.records.training_run import PASS_ACCURACY, TOO_FEW_STEPS, SanityRecord
from mismatch_probe.report.view import Badge, Tile

_UNFINISHED = "unfinished"
_NOT_PASSED = "not passed: "


def sanity_answer(record: SanityRecord) -> dict[str, Any]:
    """Fields of the overview that say whether the test is passed, and why not."""
    return {
        "subject": "sanity test",
        "badge": sanity_badge(record),
        "headline": sanity_headline(record),
        "tiles": _tiles(record),
    }


def sanity_headline(record: SanityRecord) -> str:
    """What came of the test, and how many of the latest responses were right."""
    return f"Sanity test {_verdict(record)}. {_sentence(_solved_words(record))}"


def _solved_words(record: SanityRecord) -> str:
    solved = record.accuracy
    if solved is None:
        return "not every problem was seen"
    bounds = "" if solved.low is None or solved.high is None else f" [{_share(solved.low)}, {_share(solved.high)}]"
    return (
        f"{_share(solved.value)}{bounds} of the latest responses to {write_many(len(record.latest), 'problem')} solved"
    )


def _verdict(record: SanityRecord) -> str:
    if record.passed is None:
        return _UNFINISHED
    return record.verdict if record.passed else f"failed: {record.verdict.removeprefix(_NOT_PASSED)}"


def sanity_badge(record: SanityRecord) -> Badge:
    """In place of how the training ended, which says nothing of the test."""
    if record.passed is None:
        return Badge("undecided", _UNFINISHED)
    return Badge("clean", "passed") if record.passed else Badge("bug", "failed")


def _tiles(record: SanityRecord) -> list[Tile]:
    solved, needed = record.accuracy, f"more than {write_percent(PASS_ACCURACY)} passes"
    if solved is None:
        share = Tile("Solved", "not known", f"{write_many(len(record.latest), 'problem')} seen; {needed}")
    else:
        interval = "" if solved.low is None or solved.high is None else f"{_share(solved.low)} to {_share(solved.high)}"
        share = Tile("Solved", _share(solved.value), "; ".join(part for part in (interval, needed) if part))
    kept = Tile(
        "Problems kept",
        "none yet" if record.kept is None else f"{len(record.kept):,}",
        f"of {len(record.rates):,} tried, those solved {write_percent(record.settings.keep_low)} to "
        f"{write_percent(record.settings.keep_high)} of the time",
    )
    return [share, kept, _next(record)]


def _next(record: SanityRecord) -> Tile:
    done = f"after step {record.step:,}"
    if record.passed:
        return Tile("Next step", "Train on", f"{done} what is known to be learnable was learnt")
    if record.passed is None:
        again = Markup('{}: the same command with <span class="whole">--resume</span>').format(done)
        return Tile("Next step", "Go on", again)
    if record.verdict.endswith(TOO_FEW_STEPS):
        flags = '<span class="whole">--resume</span> and a larger <span class="whole">--steps</span>'
        return Tile("Next step", "More steps", Markup(f"{{}}: the same command with {flags}").format(done))
    return Tile("Next step", "Mend and repeat", f"{done}: why it ended stands above")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _share(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
