"""Markdown of an answer: a table, and the one block of a run that is pasted into an issue, `report RUN --issue`."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from mismatch_probe.dtypes import Dtype
from mismatch_probe.inert import plain
from mismatch_probe.notation import WrittenNumber, write_estimate, write_many, write_number, write_percent, write_size
from mismatch_probe.records.findings import Document, Explanation, Localization, SideExplanation
from mismatch_probe.records.manifest import Manifest, ModelIdentity
from mismatch_probe.records.summary import PairSummary, Summary, TokenInContext
from mismatch_probe.report.answers.compare import run_facts
from mismatch_probe.report.names import HEADLINE_METRICS, pair_label
from mismatch_probe.report.pairs import level, pairs_table, size_sentence, table_footnote, terms
from mismatch_probe.report.screen import Write, in_full
from mismatch_probe.report.sections.errors import part_meaning
from mismatch_probe.report.sections.provenance import effective_settings
from mismatch_probe.report.view import Answer, Cell, Column, Table, Terms
from mismatch_probe.stats.catalogue import metric_words
from mismatch_probe.stats.results import Blame, Estimate
from mismatch_probe.verdict.findings import headline_of
from mismatch_probe.verdict.headline import foremost

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>#!|~$@&]|:(?=//)|(?<=www)\.)", re.IGNORECASE)


def escape(text: str) -> str:
    """The text with Markdown's special characters escaped, so that it makes no link, mention, markup or cell."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def escaped_cell(cell: Cell) -> str:
    return escape(in_full(cell))


def markdown_table(table: Table, write: Write = escaped_cell) -> list[str]:
    """The lines of a Markdown table; `write` turns a cell into text."""
    cells = [[write(cell) for cell in row] for row in table.rows]
    rows = (map(escape, table.columns), ["---"] * len(table.columns), *cells)
    return [f"| {' | '.join(row)} |" for row in rows]


_LEAST_OF_SQUARE: Final = 0.1
"""What makes less of the square of d than this is ruled out as its cause."""
_MOST_TRIALS: Final = 8
_MOST_TOKENS: Final = 8
_MORE_METRICS: Final = ("logprob_diff_rms", "ess_token", "pareto_k_token", "outside_band_0.8_1.25")


@dataclass(frozen=True)
class Issue:
    """One Markdown block on a run: the answer, versions, numbers with their intervals, what was ruled out and by which
    number, the settings of both sides, and the command. It names no file and shows no text unless that is wanted.
    """

    summary: Summary
    """With what other commands filed, as `full_summary` has it."""
    manifest: Manifest
    documents: Sequence[Document]
    run: Path
    has_paths: bool = False
    has_text: bool = False

    def __str__(self) -> str:
        pair = foremost(self.summary.pairs)
        findings = [f"{finding.setting}: {finding.what}" for finding in self.summary.preflight]
        blocks = [
            [f"### {self._write(headline_of(self.summary, self.documents))}"],
            self._list("", _basis(self.summary, self.manifest)),
            ["**Numbers**", "", *self._numbers()],
            self._list("Seen", [*pair.verdict.evidence, *(cause.sentence for cause in pair.verdict.also)]),
            self._list_ruled_out(pair),
            self._list("What the settings alone say", findings),
            self._worst_tokens(pair.worst_tokens) if self.has_text else [],
            ["**Reproduce**", "", "```", *self._commands(), "```"],
            self._settings(pair),
        ]
        return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"

    def _write(self, text: str) -> str:
        return escape(text if self.has_paths else _without_paths(text, self._places))

    def _write_cell(self, cell: Cell) -> str:
        """Numbers of our own stand as they are, so that the block can be read before it is rendered."""
        return str(cell) if isinstance(cell, WrittenNumber) else self._write(in_full(cell))

    def _table(self, table: Table) -> list[str]:
        return markdown_table(table, self._write_cell)

    def _list(self, title: str, sentences: Iterable[str]) -> list[str]:
        lines = [f"- {self._write(sentence)}" for sentence in sentences]
        return [*([f"**{title}**", ""] if title else []), *lines] if lines else []

    def _numbers(self) -> Iterator[str]:
        summary = self.summary
        yield from self._table(pairs_table(summary))
        yield ""
        names = (*HEADLINE_METRICS, *_MORE_METRICS)
        measured = [name for name in names if any(name in pair.metrics for pair in summary.pairs)]
        columns: list[Column[str]] = [
            Column("metric", metric_words),
            *Column.each(summary.pairs, pair_label, lambda pair, name: write_estimate(pair.metrics.get(name))),
        ]
        yield from self._table(Table.of("", measured, columns))
        yield ""
        sizes = [f"{pair_label(pair)}: {size_sentence(pair)}" for pair in summary.pairs]
        notes = [f"brackets: {level(summary)} intervals, clustered by prompt", table_footnote(summary), *sizes]
        answers = [f"{title}: {sentence}" for title, sentence in terms(summary, self.documents)]
        yield from self._list("", [note for note in (*notes, *answers) if note])

    def _list_ruled_out(self, pair: PairSummary) -> list[str]:
        rows = list(_causes_ruled_out(self.summary, pair, self.documents))
        columns: list[Column[tuple[str, str]]] = [
            Column("not the cause", lambda row: row[0]),
            Column("because", lambda row: row[1]),
        ]
        lines = self._table(Table.of("", rows, columns)) if rows else ["Nothing yet."]
        return ["**Ruled out, and by which number**", "", *lines]

    def _settings(self, pair: PairSummary) -> list[str]:
        table = effective_settings(pair, self.manifest)
        lines = self._table(table) if isinstance(table, Table) else ["Neither side reported its settings."]
        return ["<details>", "<summary>Settings in effect on both sides</summary>", "", *lines, "", "</details>"]

    def _worst_tokens(self, tokens: Sequence[TokenInContext]) -> list[str]:
        columns: list[Column[TokenInContext]] = [
            Column("before", lambda token: token.before),
            Column("token", lambda token: token.token),
            Column("log pi", lambda token: write_number(token.log_pi)),
            Column("log mu", lambda token: write_number(token.log_mu)),
        ]
        return ["**Worst tokens**", "", *self._table(Table.of("", tokens[:_MOST_TOKENS], columns))] if tokens else []

    def _commands(self) -> Iterator[str]:
        continued = [continuation.command for continuation in self.manifest.continued if continuation.added]
        for command in (self.manifest.command, *continued):
            yield shlex.join(map(plain, _without_places(command, self._places, has_paths=self.has_paths)))

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """Every file and folder that the records name, and what stands in its place; the longest first."""
        settings, models = self.manifest.settings, [self.manifest.model, *self.manifest.checkpoints.values()]
        sides = [*settings.infer_sides, *settings.train_sides]
        log = [] if self.manifest.log is None else self.manifest.log.files
        places = {
            **{side.model.path: "CHECKPOINT" for side in sides if not _is_of_hub(side.model.path, models)},
            **{model.folder: "CHECKPOINT" for model in models},
            **{str(path): "RUN" for path in (self.run, self.run.resolve())},
            settings.prompts.source: "PROMPTS",
            **{file.path: "LOG" for file in log},
        }
        return {path: places[path] for path in sorted(places, key=len, reverse=True) if "/" in path}


def issue_of_answer(
    answer: Answer,
    basis: Iterable[str],
    commands: Iterable[Sequence[str]],
    places: Mapping[str, str],
    *,
    has_paths: bool = False,
) -> str:
    """The block of what is no comparison, a training run or metrics alone: the screen's answer as Markdown.

    basis: versions and hardware. places: files and folders that the records name, and what stands in their place.
    """

    def write(text: str) -> str:
        return escape(text if has_paths else _without_paths(text, places))

    def write_cell(cell: Cell) -> str:
        return str(cell) if isinstance(cell, WrittenNumber) else write(in_full(cell))

    def table_lines(table: Table) -> list[str]:
        title = [f"**{write(table.caption)}**", ""] if table.caption else []
        return [*title, *markdown_table(table, write_cell)]

    blocks = [[f"### {write(in_full(answer.headline))}"], [f"- {write(fact)}" for fact in (*basis, *answer.facts)]]
    if answer.table is not None and not any(isinstance(part, Table) for part in answer.screen):
        blocks += [table_lines(answer.table), [f"- {write(answer.footnote)}"] if answer.footnote else []]
    for part in answer.screen:
        if isinstance(part, Table):
            blocks.append(table_lines(part))
        elif isinstance(part, Terms):
            blocks.append([f"- {write(name)}: {write(text)}" for name, text in part.items])
        elif part.style == "bold":
            blocks.append([f"**{write(text)}**" for text in part.texts])
        else:
            blocks.append([f"- {write(text.strip())}" for text in part.texts])
    if answer.advice:
        blocks += [["**Next**"], [f"- {write(in_full(sentence))}" for sentence in answer.advice]]
    words = [shlex.join(map(plain, _without_places(command, places, has_paths=has_paths))) for command in commands]
    blocks += [["**Reproduce**", "", "```", *words, "```"]]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _without_places(command: Sequence[str], places: Mapping[str, str], *, has_paths: bool) -> Sequence[str]:
    return command if has_paths else [_without_paths(word, places) for word in _words_with_places(command)]


def versions_and_hardware(versions: Mapping[str, str], hardware: Mapping[str, Any]) -> Iterator[str]:
    """A line each, where it is known."""
    if versions:
        yield ", ".join(f"{package} {version}" for package, version in versions.items())
    if hardware:
        gpus = "; ".join(map(str, hardware.get("gpus") or ["no GPU"]))
        memory = f", {write_size(hardware['memory_bytes'])}" if "memory_bytes" in hardware else ""
        yield f"{gpus}; {hardware.get('cpu_cores')} cores of {hardware.get('cpu')}{memory}; {hardware.get('system')}"


def _basis(summary: Summary, manifest: Manifest) -> Iterator[str]:
    """Model, versions, hardware and sizes."""
    model = manifest.model
    if manifest.log is not None and not model.fingerprint:
        yield f"log in the format {manifest.log.format}: {write_many(manifest.log.num_responses, 'response')}"
    else:
        name = manifest.settings.model.path if _is_of_hub(manifest.settings.model.path, [model]) else model.name
        yield f"model {name}: {model.architecture}, stored in {model.checkpoint_dtype}, fingerprint {model.fingerprint}"
    yield from versions_and_hardware(manifest.versions, manifest.hardware)
    yield "; ".join(run_facts(summary, manifest))
    if manifest.environment:
        yield ", ".join(f"{name}={value}" for name, value in manifest.environment.items())


def _is_of_hub(path: str, models: Iterable[ModelIdentity]) -> bool:
    """Whether a checkpoint's path is its name on a hub, which is nobody's folder."""
    return any(f"models--{path.replace('/', '--')}" in model.folder for model in models)


def _causes_ruled_out(summary: Summary, pair: PairSummary, documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """What is not the cause, and the number that says so."""
    counts = pair.counts
    if not pair.is_logged and not counts.mismatched_ids:
        yield "other token ids on one side", f"0 of {write_many(counts.num_sequences, 'response')}"
    if not counts.has_faults:
        yield "missing or impossible log-probs", f"0 of {write_many(counts.num_tokens, 'token')}"
    yield from _agreement_in_fp32(summary, pair)
    ratio = pair.metrics.get("is_ratio_mean_token")
    if ratio is not None and ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high:
        weight = f"the mean weight of a token is {write_estimate(ratio)}, which is 1 without a cut"
        yield "a vocabulary that one side cuts", weight
    if pair.blame is not None and pair.blame.rms_difference.value > 0:
        yield from _small_parts(pair.blame)
    for document in documents:
        if isinstance(document, Localization) and document.settings.names == (pair.train, pair.infer):
            yield from _useless_interventions(document)
        elif isinstance(document, Explanation):
            for side in document.sides:
                yield from _failed_trials(side)


def _agreement_in_fp32(summary: Summary, pair: PairSummary) -> Iterator[tuple[str, str]]:
    for other in summary.pairs:
        is_exact = other.is_of_dtypes and {other.train_dtype, other.infer_dtype} == {Dtype.FP32}
        if is_exact and other is not pair and other.verdict.kind in ("clean", "precision"):
            number = write_estimate(other.metrics.get("abs_logprob_diff"))
            yield "a bug that no dtype explains", f"FP32 against FP32 is {other.verdict.kind}: mean |d| {number}"


def _small_parts(blame: Blame) -> Iterator[tuple[str, str]]:
    """Floors and parts of the error that make too little of d."""
    total = blame.rms_difference
    parts: Mapping[str, Estimate] = {**blame.floors, **blame.components}
    for name, part in parts.items():
        if name == "pi_vs_mu_prefill":
            continue
        upper = part.value if part.high is None else part.high
        if upper**2 <= _LEAST_OF_SQUARE * total.value**2:
            yield part_meaning(name), f"rms {write_estimate(part)} nats, where d has {write_number(total.value)}"


def _useless_interventions(localization: Localization) -> Iterator[tuple[str, str]]:
    ranked = [] if localization.interventions is None else localization.interventions.ranked
    for intervention in ranked:
        removed = intervention.removed
        if (removed.value if removed.high is None else removed.high) <= _LEAST_OF_SQUARE:
            side = {"infer": "the engine", "train": "the training path", "both": "both sides"}[intervention.side]
            yield (
                f"{intervention.part} of {side} in coarse precision",
                f"in higher precision it removes {write_estimate(removed)} of the KL",
            )


def _failed_trials(side: SideExplanation) -> Iterator[tuple[str, str]]:
    """Hypotheses on a logged side that leave nearly all of its residual."""
    who = {"mu": "engine", "pi": "training path"}[side.side]
    failures = [trial for trial in side.trials if trial.departures and trial.explained <= _LEAST_OF_SQUARE]
    for trial in failures[:_MOST_TRIALS]:
        what = " and ".join(departure.what for departure in trial.departures)
        share = f"{write_percent(max(trial.explained, 0))} of the deviation's mean square"
        yield f"{who}: {what}", f"explains {share}, leaves {write_number(trial.residual_floors)} times rounding"


_PLACES: Final[Mapping[str, str]] = {
    "--model": "CHECKPOINT",
    "--prompts": "PROMPTS",
    "--out": "RUN",
    "--scored": "RUN",
    "--config": "FILE",
    "--gate": "FILE",
}
_ALWAYS_FOLDERS: Final = ("--out", "--scored")
_FILE: Final = re.compile(r"\.(?:jsonl?|toml|ya?ml|parquet|csv|pt|pkl|safetensors|log|txt|sqlite|db)(?:\.\w+)?$")
_FOLDERS: Final = re.compile(r"[\w.@+~-]+(?:/[\w.@+~-]+)+/?")
_ANY_PATH: Final = re.compile(
    r"""https?://[^\s'"`)\]]+|(?<![\w/.:<~])(?:~|\.{1,2})?/[\w.@+~=%-]+(?:/[\w.@+~=%-]+)*/?|\b[A-Za-z]:\\[^\s'"]+"""
    r"|(?<![\w/])[\w.@+~=%-]+(?:/[\w.@+~=%-]+)+\.(?:jsonl?|toml|ya?ml|parquet|csv|pt|pkl|safetensors|log|txt)\b"
)
"""An address, a path from a root, or a file behind a folder."""


def _words_with_places(command: Sequence[str]) -> Iterator[str]:
    """The words of a command with a placeholder for each file and folder; tasks that are built in and flags stay."""
    flag = ""
    for number, word in enumerate(command):
        name, equals, value = word.partition("=")
        if word.startswith("--") and equals:
            yield f"{name}={_placeholder(name, value) or value}"
        else:
            is_value = number > 1 and not word.startswith("-")
            yield (_placeholder(flag, word) or word) if is_value else word
        flag = word


def _placeholder(flag: str, value: str) -> str:
    """What stands for a value; empty where it is no file or folder. A model may be named by its name on a hub."""
    is_local = value.startswith(("/", ".", "~")) or _FILE.search(value) is not None
    is_folder = flag in _ALWAYS_FOLDERS or (flag != "--model" and _FOLDERS.fullmatch(value) is not None)
    return _PLACES.get(flag, "PATH") if is_local or is_folder else ""


def _without_paths(text: str, places: Mapping[str, str]) -> str:
    """The text without a file, folder or address of anybody's machine, whether its records name it or not."""
    for path, place in places.items():
        text = re.sub(rf"(?<![\w/]){re.escape(path)}(?![\w-])", place, text)
    return _ANY_PATH.sub("PATH", text)
