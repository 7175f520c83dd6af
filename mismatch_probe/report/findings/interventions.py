"""What higher precision of each part, or another way to run the engine, would mend."""

from mismatch_probe.notation import ABSENT, Written, write_bytes, write_percent
from mismatch_probe.records.localize import Intervention, Interventions, Localization
from mismatch_probe.report.figures.shares import draw_shares
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Block, Cell, Figure, Heading, Note, Section, Table
from mismatch_probe.stats.results import Estimate

_SIDES = {"infer": "engine", "train": "training path", "both": "both sides"}
_STYLES = {
    "infer": PairStyle("truncate", (), "o"),
    "train": PairStyle("mask", (6, 2), "s"),
    "both": PairStyle("fp32", (1.5, 1.5), "^"),
}
_DRAWN = 10


def best_part(found: Localization) -> list[str]:
    """What the foremost intervention removes, where it surely removes anything; it was measured, not promised."""
    ranked = [] if found.interventions is None else found.interventions.ranked
    sure = [one for one in ranked if one.removed.low is not None and one.removed.low > 0]
    if not sure:
        return []
    best = sure[0]
    return [
        f"Measured: {best.part} in higher precision on {_whose(best)} removes {write_removed(best.removed)} of the "
        f"token KL and takes {_time_in_words(best)}."
    ]


def interventions(found: Interventions, key: str) -> Section:
    blocks: list[Block] = []
    if found.ranked:
        blocks.append(_figure(found, key))
    if sentence := together_sentence(found):
        blocks.append(Note(f"Do the effects add up? {sentence}"))
    if found.left_out:
        blocks.append(Note("Not tried:", [f"{what}: {why}" for what, why in found.left_out.items()]))
    return Section(
        f"interventions-{key}",
        "What would mend it",
        "Each part in turn computes in FP32, everything else as it was, and the same token ids are scored again.",
        blocks,
    )


def together_sentence(found: Interventions) -> str:
    """Empty where they were not tried together."""
    if found.together is None or found.sum_of_removed is None:
        return ""
    return (
        f"All parts of the training path together removed {write_removed(found.together.removed)}; one by one, "
        f"{write_percent(found.sum_of_removed)} in all."
    )


def write_removed(share: Estimate) -> str:
    """`41 % (38 to 44)`."""
    if share.low is None or share.high is None:
        return write_percent(share.value)
    return f"{write_percent(share.value)} ({100 * share.low:.0f} to {100 * share.high:.0f})"


def _figure(found: Interventions, key: str) -> Figure:
    shown = found.ranked[:_DRAWN]
    best = shown[0]
    heading = Heading(
        f"plot-interventions-{key}",
        "Share of the token KL that each part removes",
        f"foremost {best.part} on {_whose(best)}: {write_removed(best.removed)}",
    )
    more = f" The first {_DRAWN} of {len(found.ranked)} are drawn." if len(found.ranked) > _DRAWN else ""
    rows = [(f"{one.part}: {write_removed(one.removed)}", one.removed, _STYLES[one.side]) for one in shown]
    sides = dict.fromkeys(one.side for one in shown)
    return Figure(
        f"figure-interventions-{key}",
        "How to read it: farther right removes more of the mismatch; bars are intervals clustered by prompt, paired on "
        f"the same tokens. A bar across 0 removes nothing for sure.{more}",
        [draw_shares(heading, rows)],
        [tried_table(found)],
        key=[(_SIDES[side], _STYLES[side]) for side in sides],
    )


def tried_table(found: Interventions) -> Table:
    tried = [*found.ranked, *([] if found.together is None else [found.together])]
    rows: list[list[Cell]] = [
        [one.part, _SIDES[one.side], _removed(one.removed), _time(one), _weights(one.extra_bytes)] for one in tried
    ]
    columns = ["in FP32, or otherwise", "side", "removes of KL", "time", "weights besides"]
    return Table("Every part that was tried", columns, rows, text_columns=frozenset({1}), stacked=True)


def _removed(share: Estimate) -> Written:
    value, _, interval = write_removed(share).partition(" (")
    return Written(value, f"({interval}" if interval else "")


def _whose(one: Intervention) -> str:
    return _SIDES[one.side] if one.side == "both" else f"the {_SIDES[one.side]}"


def _time(one: Intervention) -> str:
    return f"{100 * one.slower:+.0f} %"


def _time_in_words(one: Intervention) -> str:
    percent = round(100 * one.slower)
    if not percent:
        return "as long as before"
    return f"{abs(percent)} % {'more' if percent > 0 else 'less'} time"


def _weights(num_bytes: int) -> str:
    if num_bytes >= 2**20:
        return write_bytes(num_bytes)
    return "under 1 MiB" if num_bytes else ABSENT
