"""Where the numbers of an imported run come from, and what was seen in the log before any was computed."""

from mismatch_probe.notation import write_count, write_size
from mismatch_probe.records.log_origin import LogOrigin
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.report.hostile import visible
from mismatch_probe.report.view import Block, Cell, Note, Section, Table

_ORDER = ("broken", "missing", "warning", "note")


def log(manifest: Manifest) -> Section | None:
    """None where the responses were sampled by the run itself."""
    origin = manifest.log
    if origin is None:
        return None
    blocks: list[Block] = [_amounts(origin)]
    if origin.assumed:
        blocks.append(Note("What the log does not say was assumed:", _assumed(origin)))
    if origin.notes:
        blocks.append(_notes(origin))
    return Section(
        "log",
        "The log that this was imported from",
        f"Format {origin.format}. Nothing was sampled or computed here but the statistics, unless a side is named by "
        "its dtype: those sides were scored later, on the log's own token ids.",
        [*blocks, _files(origin)],
    )


def _amounts(origin: LogOrigin) -> Table:
    rows: list[list[Cell]] = [
        ["in the log", write_count(origin.num_responses), write_count(origin.num_tokens)],
        ["sampled by the policy", "", write_count(origin.num_sampled_tokens)],
        ["analysed", write_count(origin.analysed_responses), write_count(origin.analysed_tokens)],
    ]
    return Table("What is in it", ["", "responses", "tokens"], rows)


def _assumed(origin: LogOrigin) -> list[str]:
    return [f"{name.replace('_', ' ')}: {what}" for name, what in origin.assumed.items()]


def _notes(origin: LogOrigin) -> Table:
    rows: list[list[Cell]] = [
        [note.code.replace("_", " "), note.level, visible(note.sentence)]
        for note in sorted(origin.notes, key=lambda note: _ORDER.index(note.level))
    ]
    return Table(
        "What was seen before any number was computed",
        ["what", "level", "in words"],
        rows,
        text_columns=frozenset({1, 2}),
        stacked=True,
    )


def _files(origin: LogOrigin) -> Table:
    rows: list[list[Cell]] = [
        [
            visible(file.path),
            "" if file.step is None else str(file.step),
            write_size(file.size_bytes),
            visible(file.modified_at),
            {None: "not said", True: "yes", False: "no"}[file.complete],
        ]
        for file in origin.files
    ]
    columns = ["file", "step", "size", "modified", "declared finished"]
    return Table("Files", columns, rows, text_columns=frozenset({3, 4}), folded=len(rows) > 12)
