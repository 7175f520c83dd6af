"""The metrics of logged responses over the steps of training.

What was there to measure, and what was not usable.

Where the numbers of an imported run come from, and what was seen in the log before any was computed.
"""

from collections.abc import Sequence
from typing import Final

from mismatch_probe.notation import (
    ABSENT,
    write_count,
    write_estimate,
    write_many,
    write_number,
    write_percent,
    write_share,
    write_size,
)
from mismatch_probe.records.log_readings import TurnBreak, TurnReading, VersionReading
from mismatch_probe.records.manifest import LogFile, LogNote, LogOrigin, Manifest
from mismatch_probe.records.summary import Counts, PairSummary, StepSummary, Summary
from mismatch_probe.report.figures import limits as drawing
from mismatch_probe.report.names import PairStyle, StyleOf, pair_key, pair_label, pair_styles, visible
from mismatch_probe.report.view import Block, Cell, Column, Figure, Heading, Note, Panel, Section, Table
from mismatch_probe.verdict.headline import foremost, grows

_DRAWN: Final = {"abs_logprob_diff": ("Mean |d|", "nats"), "kl_k3": ("KL (k3)", "nats a token")}
"""Title and unit of the metrics that are drawn."""
_MOST_ON_SCREEN: Final = 16
_NO_MARKS: Final = drawing.Marks()
_COLUMNS = {
    "abs_logprob_diff": "mean |d|",
    "kl_k3": "KL (k3)",
    "is_ratio_mean_token": "mean ratio",
    "outside_band_0.8_1.25": "tokens outside [0.8, 1.25]",
    "ess_seq": "ESS of responses",
}


def steps(summary: Summary) -> Section | None:
    """None where no pair has responses of several steps or weight versions."""
    pairs = [pair for pair in summary.pairs if pair.steps]
    if not pairs:
        return None
    has_steps = any(row.step is not None for pair in pairs for row in pair.steps)
    return Section(
        "steps",
        "Over the steps of training",
        "Each row is one step and one version of the weights that sampled. Where a step has several versions, what "
        "grows from the newest to the oldest is staleness; what the newest shows is not. Of very many steps, stretches "
        "of neighbouring ones have a row each.",
        [*([_step_figure(summary, pairs)] if has_steps else []), *(_step_table(pair) for pair in pairs)],
    )


def _step_figure(summary: Summary, pairs: Sequence[PairSummary]) -> Block:
    style_of = pair_styles(summary.pairs)
    names = [name for name in _DRAWN if not (name == "kl_k3" and grows(foremost(summary.pairs)))]
    panels = [draw_over_steps(f"steps-{name.replace('_', '-')}", name, pairs, style_of) for name in names]
    key = [(pair_label(pair), style_of(pair)) for pair in pairs]
    return Figure("figure-steps", "Lines are estimates, the band is their interval.", panels, [], key=key)


def draw_over_steps(
    anchor: str, name: str, pairs: Sequence[PairSummary], style_of: StyleOf, marks: drawing.Marks = _NO_MARKS
) -> Panel:
    """A metric of pairs whose responses have several steps."""
    title, unit = _DRAWN[name]
    heading = Heading(
        anchor,
        f"{title} over the steps",
        "; ".join(f"{pair_label(pair)} {_first_and_last(pair, name)}" for pair in pairs),
        "A level that stays is numerics; a rise between two steps marks what changed there."
        + (" The upright line is the step of the steepest rise." if marks.places else ""),
    )
    return drawing.draw(
        heading, [_newest_curve(pair, name, style_of(pair)) for pair in pairs], "step", unit, marks=marks
    )


def _first_and_last(pair: PairSummary, name: str) -> str:
    rows = [row for row in pair.steps if name in row.metrics]
    if not rows:
        return ABSENT
    first, last = (write_estimate(row.metrics[name]) for row in (rows[0], rows[-1]))
    return f"goes from {first} to {last}"


def _newest_curve(pair: PairSummary, name: str, style: PairStyle) -> drawing.Series:
    """Of each step the newest version, the last in its order, so that staleness does not move the line."""
    newest: dict[int, StepSummary] = {row.step: row for row in pair.steps if row.step is not None}
    rows = [row for row in newest.values() if name in row.metrics]
    estimates = [row.metrics[name] for row in rows]
    return drawing.Series(
        pair_label(pair),
        [float(row.step or 0) for row in rows],
        [estimate.value for estimate in estimates],
        style,
        [estimate.low for estimate in estimates],
        [estimate.high for estimate in estimates],
    )


def _steps_of(row: StepSummary) -> str:
    if row.step is None:
        return ABSENT
    return str(row.step) if row.last_step is None else f"{row.step} to {row.last_step}"


def steps_on_screen(pair: PairSummary) -> Table | None:
    """The course of a KL that grows; None where it does not, or has too many steps for a screen."""
    if not grows(pair) or len(pair.steps) > _MOST_ON_SCREEN:
        return None
    columns: list[Column[StepSummary]] = [
        Column("step", _steps_of),
        *Column.each(
            _DRAWN.items(),
            lambda item: item[1][0],
            lambda item, row: write_estimate(row.metrics.get(item[0])),
            can_lack_interval=True,
        ),
    ]
    return Table.of("", pair.steps, columns)


def _step_table(pair: PairSummary) -> Table:
    def size(name: str, row: StepSummary) -> str:
        first = next(iter(row.metrics.values()), None)
        return ABSENT if first is None else write_count(getattr(first, name))

    versions: list[Column[StepSummary]] = [
        Column(
            "weights", lambda row: ABSENT if row.weight_version is None else visible(row.weight_version), is_text=True
        )
    ]
    columns: list[Column[StepSummary]] = [
        Column("step", _steps_of),
        *(versions if any(row.weight_version is not None for row in pair.steps) else []),
        Column("responses", lambda row: size("num_sequences", row)),
        Column("tokens", lambda row: size("num_tokens", row)),
        *Column.each(
            _COLUMNS.items(), lambda item: item[1], lambda item, row: write_estimate(row.metrics.get(item[0]))
        ),
    ]
    return Table.of(
        f"{pair_label(pair)}: each step",
        pair.steps,
        columns,
        is_folded=len(pair.steps) > 12,
        anchor=f"steps-{pair_key(pair)}",
    )


_LABELS = {
    "num_sequences": "responses measured",
    "num_prompts": "prompts they answer",
    "num_tokens": "tokens measured",
    "missing_mu": "log-probs missing under mu",
    "missing_pi": "log-probs missing under pi",
    "nonfinite_mu": "log-probs not finite under mu",
    "nonfinite_pi": "log-probs not finite under pi",
    "positive_mu": "log-probs above 0 under mu",
    "positive_pi": "log-probs above 0 under pi",
    "void_checks": "responses with void prefill or reference log-probs",
    "mismatched_ids": "responses with other token ids",
    "truncated_responses": "responses cut at the length limit",
    "left_out_tokens": "tokens of the log left out for lack of a log-prob",
    "left_out_surprisal": "share of the surprisal that they have",
    "partial_responses": "responses measured in part, in no number of whole responses",
    "zeros_for_missing": "zeros of the log that stand for no log-prob",
}


def counts(summary: Summary) -> Section:
    columns: list[Column[str]] = [
        Column("", lambda name: _LABELS.get(name, name.replace("_", " "))),
        *Column.each(summary.pairs, pair_label, lambda pair, name: _write_metric(name, getattr(pair.counts, name))),
    ]
    return Section(
        "counts",
        "What was measured, what was not",
        "Missing and non-finite values are counted and named; they are never averaged, dropped in silence or set "
        "to zero.",
        [Table.of("Data of each pair", Counts.model_fields, columns, is_stacked=True)],
    )


def _write_metric(name: str, number: float | None) -> str:
    if name == "left_out_surprisal" and number is not None:
        return f"{100 * number:.3g} %"
    return ABSENT if number is None else write_count(int(number))


_NOT_IN_A_LOG: Final = (
    "Which side errs, and KL over the whole vocabulary, stand on this page only where they were computed: a log has "
    "log-probs of sampled tokens alone. mismatch-probe score computes both sides and an FP32 reference."
)
_ORDER = ("broken", "missing", "warning", "note")


def log(manifest: Manifest) -> Section | None:
    """None where the responses were sampled by the run itself."""
    origin = manifest.log
    if origin is None:
        return None
    blocks: list[Block] = [_amounts(origin)]
    if origin.assumed:
        blocks.append(Note("What the log does not say was assumed:", _assumptions(origin)))
    if origin.turns is not None:
        blocks += _turns(origin.turns)
    if origin.experts is not None or origin.kept_sets is not None:
        blocks.append(_choices(origin))
    if origin.versions is not None and origin.versions.num_mixed:
        blocks.append(_versions(origin.versions))
    if origin.notes:
        blocks.append(_notes(origin))
    return Section(
        "log",
        "The log that this was imported from",
        f"Format {origin.format}. Nothing was sampled or computed here but the statistics, unless a side is named by "
        "its dtype: those sides were scored later, on the log's own token ids.",
        [*blocks, _files(origin), Note(_NOT_IN_A_LOG)],
    )


def _amounts(origin: LogOrigin) -> Table:
    rows: list[list[Cell]] = [
        ["in the log", write_count(origin.num_responses), write_count(origin.num_tokens)],
        ["sampled by the policy", "", write_count(origin.num_sampled_tokens)],
        ["analysed", write_count(origin.analysed_responses), write_count(origin.analysed_tokens)],
    ]
    return Table("What is in it", ["", "responses", "tokens"], rows)


def _assumptions(origin: LogOrigin) -> list[str]:
    return [f"{name.replace('_', ' ')}: {what}" for name, what in origin.assumed.items()]


def _notes(origin: LogOrigin) -> Table:
    columns: list[Column[LogNote]] = [
        Column("what", lambda note: note.code.replace("_", " ")),
        Column("level", lambda note: note.level, is_text=True),
        Column("in words", lambda note: note.sentence, is_text=True),
    ]
    notes = sorted(origin.notes, key=lambda note: _ORDER.index(note.level))
    return Table.of("What was seen before any number was computed", notes, columns, is_stacked=True)


def _turns(turns: TurnReading) -> list[Block]:
    """How many turns break the prefix, and the first breaks of trajectories."""
    rows: list[list[Cell]] = [
        ["trajectories of several turns", write_count(turns.num_trajectories)],
        ["turns after the first", write_count(turns.num_turns)],
        [
            "do not begin with the turn before",
            f"{write_count(turns.num_broken)} ({write_share(turns.num_broken, turns.num_turns)})",
        ],
        ["begin anew", write_count(turns.num_restarts)],
    ]
    rows += [[f"trajectories first broken: {kind}", write_count(count)] for kind, count in turns.kinds.items()]
    blocks: list[Block] = [Table("Turns", ["", "number"], rows)]
    if turns.breaks:
        columns: list[Column[TurnBreak]] = [
            Column("kind", lambda each: each.kind, is_text=True),
            Column("place", lambda each: visible(each.where), is_text=True),
            Column("token of the prompt", lambda each: write_count(each.position)),
            Column("was", lambda each: _ids_of_break(each.old_text, each.old_ids, each.num_old), is_text=True),
            Column("became", lambda each: _ids_of_break(each.new_text, each.new_ids, each.num_new), is_text=True),
        ]
        blocks.append(Table.of("Where turns first break", turns.breaks, columns, is_stacked=True))
    return blocks


def _versions(versions: VersionReading) -> Table:
    """How many responses several versions of the weights sampled, and the level of d where these change."""
    rows: list[list[Cell]] = [
        ["responses that name a version", write_count(versions.num_recorded)],
        [
            "responses of several versions",
            f"{write_count(versions.num_mixed)} ({write_share(versions.num_mixed, versions.num_recorded)})",
        ],
    ]
    if versions.rms_before is not None and versions.rms_after is not None:
        rows += [
            ["rms d before the last change, nats", write_number(versions.rms_before)],
            ["rms d after it, nats", write_number(versions.rms_after)],
        ]
    if versions.is_level_changed and versions.times_before is not None:
        ratio = write_number(versions.times_before)
        rows.append(["d before over d after it, at tokens of like probability", ratio])
    return Table("Weights within responses, as recorded", ["", "number"], rows)


def _choices(origin: LogOrigin) -> Table:
    """How much of the engine's choices a trainer can replay."""
    rows: list[list[Cell]] = []
    if (experts := origin.experts) is not None:
        faults = {
            "layers that are empty": len(experts.empty_layers),
            "missing": experts.num_places - experts.num_recorded,
            "no expert's number": experts.num_invalid,
            "an expert twice": experts.num_repeated,
        }
        rows += [
            ["layers recorded", write_count(experts.num_layers), ""],
            [
                "experts that can be replayed, of tokens and layers",
                f"{write_count(experts.num_usable)} of {write_count(experts.num_places)}",
                write_percent(experts.coverage),
            ],
        ]
        for what, number in faults.items():
            if number:
                rows.append([f"experts: {what}", write_count(number), ""])
    if (sets := origin.kept_sets) is not None:
        counts = {"sampled tokens with a set": (sets.num_cut, sets.num_tokens, sets.coverage)}
        counts["sets that hold their token"] = (sets.num_inside, sets.num_cut, sets.agreement)
        rows += [
            [what, f"{write_count(part)} of {write_count(total)}", write_percent(share)]
            for what, (part, total, share) in counts.items()
        ]
    return Table("What can be replayed of the engine's choices", ["", "number", "share"], rows)


def _ids_of_break(text: str, ids: Sequence[int], count: int) -> str:
    if not count:
        return "nothing"
    words = visible(text) if text else f"{' '.join(map(str, ids))}{' ...' if count > len(ids) else ''}"
    return f"{words} ({write_many(count, 'token')})"


def _files(origin: LogOrigin) -> Table:
    words_for_finished = {None: "not known", True: "yes", False: "no"}
    columns: list[Column[LogFile]] = [
        Column("file", lambda file: visible(file.path)),
        Column("step", lambda file: "" if file.step is None else str(file.step)),
        Column("size", lambda file: write_size(file.size_bytes)),
        Column("modified", lambda file: visible(file.modified_at), is_text=True),
        Column("declared finished", lambda file: words_for_finished[file.complete], is_text=True),
    ]
    return Table.of("Files", origin.files, columns, is_folded=len(origin.files) > 12)
