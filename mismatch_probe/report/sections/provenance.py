"""What ran: settings in effect, request, versions, hardware, what servers do, and how to run it again."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from mismatch_probe.inert import cut_text
from mismatch_probe.notation import write_count, write_many, write_number, write_seconds, write_size
from mismatch_probe.reading import flat
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.summary import PairSummary, SettingFinding, Summary
from mismatch_probe.records.training_run import TrainingManifest
from mismatch_probe.report.names import pair_label, visible, visible_sentence
from mismatch_probe.report.view import Block, Cell, Column, Command, Note, Section, Table

_NOT_KNOWN = "is not known"


def server_tables(manifest: Manifest) -> list[Table]:
    """One for each side that a server computes and that was sampled; none where every engine ran here."""
    tables = []
    for side in manifest.settings.infer_sides:
        effective = manifest.stages.get(side.stage("sample"), StageRecord()).effective_settings
        probes = effective.get("asked")
        if side.engine is not None and side.engine.is_remote and isinstance(probes, dict):
            columns: list[Column[tuple[str, str]]] = [
                Column("asked", lambda row: row[0]),
                Column("answer", lambda row: visible_sentence(row[1]), is_text=True),
            ]
            caption = f"{side.name}: what the server was found to do"
            reading = "Asked of it before the first response, with a few tiny requests."
            tables.append(Table.of(caption, _answers(effective, probes), columns, reading=reading))
    return tables


def _answers(effective: Mapping[str, Any], probes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield (
        "software",
        f"{effective.get('software') or 'unknown'}, asked at {effective.get('url')}{effective.get('protocol')}",
    )
    yield "servers at this address", str(probes.get("processes") or _NOT_KNOWN)
    yield "model", f"{effective.get('model')}, from {effective.get('model_root') or 'it does not say where'}"
    yield "longest sequence", f"{effective.get('max_model_len') or _NOT_KNOWN} tokens"
    yield "dtype", f"{effective.get('dtype')}, known from {effective.get('dtype_known_from')}"
    label = effective.get("weight_version")
    yield (
        "label of its weights",
        str(label) if effective.get("weights_are_labelled") else f"none ({label or 'it gives none'})",
    )
    yield "prompt ids come back", _yes_or_no(probes.get("echoes_prompt_ids"))
    yield "log-probs are those", str(probes.get("log_probs") or _NOT_KNOWN)
    yield "the same request again", _write_move(probes.get("again"))
    yield "the same among others", _write_move(probes.get("in_a_crowd"))
    yield "the same with its prompt cached", _write_move(probes.get("behind_the_cache"))
    yield "one seed gives the same tokens", _yes_or_no(probes.get("same_tokens"))
    yield "refuses ids that the checkpoint lacks", _yes_or_no(probes.get("refuses_unknown_ids"))
    p_value = probes.get("sampled_as_said")
    yield "tokens are drawn as its log-probs say", _NOT_KNOWN if p_value is None else f"p = {write_number(p_value)}"
    yield "prompt log-probs", "asked for, one response at a time" if effective.get("prefill") else "not asked for"


def _yes_or_no(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, _NOT_KNOWN) if isinstance(value, bool) else _NOT_KNOWN


def _write_move(nats: object) -> str:
    if not isinstance(nats, int | float):
        return _NOT_KNOWN
    return "the same bits" if nats == 0 else f"log-probs move by up to {write_number(nats)} nats"


_HARDWARE = {
    "cpu": "processor",
    "cpu_instructions": "instruction sets",
    "cpu_cores": "cores",
    "memory_bytes": "memory",
    "gpus": "GPUs",
}
_GIT = {"dirty": "changes not committed"}
"""What is shown for names of the manifest."""
_VALUE_CHARACTERS = 300
_ABSENT = "—"

StageSettings = tuple[str, dict[str, Any]]
"""A stage, and the settings that it reported."""


def settings(summary: Summary, manifest: Manifest) -> Section:
    blocks: list[Block] = [_preflight(summary)] if summary.preflight else []
    blocks += server_tables(manifest)
    blocks += _of_pairs(summary, manifest)
    blocks.append(
        key_values("Settings of the run, resolved", manifest.settings.model_dump(mode="json"), is_folded=True)
    )
    return Section(
        "settings",
        "Settings in effect on both sides",
        "Read back from the running engine and the loaded model, not copied from the request. A setting named on "
        "both sides with two values is marked.",
        blocks,
    )


def provenance(manifest: Manifest) -> Section:
    return Section(
        "provenance",
        "Provenance",
        f"Measured {manifest.created_at} by mismatch-probe {manifest.tool_version}, seed "
        f"{manifest.settings.sampling.seed}.",
        [*origin(manifest), _stages(manifest), key_values("Content keys", manifest.content_keys, is_folded=True)],
    )


def origin(manifest: Manifest | TrainingManifest) -> list[Block]:
    """What was run on what: checkpoint, versions, hardware, git."""
    checkpoint = manifest.model
    start = checkpoint.start_token
    facts = {
        "name": checkpoint.name,
        "architecture": checkpoint.architecture,
        "stored in": checkpoint.checkpoint_dtype or "not known",
        "size of the weights": write_size(checkpoint.weight_bytes),
        "longest context": "not known"
        if checkpoint.context_length is None
        else f"{write_count(checkpoint.context_length)} tokens",
        "tokenizer": "there" if checkpoint.has_tokenizer else "none: tokens are shown by their ids",
        "a text begins with": "no token of its own" if start is None else f"{start[1]} (token {start[0]})",
        **({"other inputs": _other_inputs(manifest)} if checkpoint.sees_too else {}),
        "fingerprint of the files": checkpoint.fingerprint,
    }
    hardware = {_HARDWARE.get(name, name): value for name, value in manifest.hardware.items()}
    if "memory" in hardware:
        hardware["memory"] = write_size(hardware["memory"])
    if hardware.get("GPUs") == []:
        hardware["GPUs"] = "none"
    return [
        *([key_values("Checkpoint", facts)] if manifest.model.fingerprint else []),
        key_values("Versions", manifest.versions),
        *([key_values("Hardware", hardware)] if hardware else []),
        *_git(manifest),
    ]


def _git(manifest: Manifest | TrainingManifest) -> list[Block]:
    """An imported log does not say where it was made."""
    git = {_GIT.get(name, name): value for name, value in (manifest.git or {}).items()}
    if "changes not committed" in git:
        git["changes not committed"] = "yes" if git["changes not committed"] else "none"
    if git:
        return [key_values("Git state of the folder it was run in", git)]
    is_imported = isinstance(manifest, Manifest) and manifest.log is not None
    return [] if is_imported else [Note("Not run inside a git repository.")]


def _other_inputs(manifest: Manifest | TrainingManifest) -> str:
    images = manifest.images if isinstance(manifest, Manifest) else None
    if images is None:
        return "images or sounds, which are not measured"
    return f"{write_many(images.num_images, 'image')} in prompts, prepared by {images.processor['class']}"


def reproduce(manifest: Manifest) -> Section:
    commands = [continuation.command for continuation in manifest.continued if continuation.added]
    return Section(
        "reproduce",
        "Reproduce",
        "The same command with the same versions, on the same hardware, gives the same numbers where the engine is "
        "deterministic.",
        [Command(shlex.join(command)) for command in (manifest.command, *commands)],
    )


def _preflight(summary: Summary) -> Table:
    """What the settings alone already say, worst first."""
    order = ("error", "warning", "note")
    sides = {"pi": "training path", "mu": "inference engine", None: "either"}
    columns: list[Column[SettingFinding]] = [
        Column("setting", lambda finding: Markup("<code>{}</code>").format(visible(finding.setting))),
        Column("level", lambda finding: finding.level, is_text=True),
        Column("side to fix", lambda finding: sides[finding.side], is_text=True),
        Column("what differs", lambda finding: finding.what, is_text=True),
        Column("advice", lambda finding: finding.advice, is_text=True),
        Column("cause it would produce", lambda finding: finding.code or "", is_text=True),
    ]
    findings = sorted(summary.preflight, key=lambda finding: order.index(finding.level))
    return Table.of("What the settings alone say", findings, columns, is_stacked=True)


def _of_pairs(summary: Summary, manifest: Manifest) -> list[Block]:
    """The effective settings of the first pair, and of every other what it has otherwise."""
    first, *others = summary.pairs
    of_first = _effective(first, manifest)
    blocks = [both_sides(pair_label(first), *of_first)]
    for pair in others:
        engine, path = _effective(pair, manifest)
        if all(side[1] for side in (*of_first, engine, path)):
            blocks.append(_set_otherwise(pair_label(first), of_first, pair_label(pair), (engine, path)))
        else:
            blocks.append(both_sides(pair_label(pair), engine, path))
    return blocks


def effective_settings(pair: PairSummary, manifest: Manifest) -> Block:
    """The effective settings of both sides of a pair."""
    return both_sides(pair_label(pair), *_effective(pair, manifest))


def _effective(pair: PairSummary, manifest: Manifest) -> tuple[StageSettings, StageSettings]:
    """The stage of the engine and that of the training path, each with what it reported."""
    settings = manifest.settings
    stages = settings.mu(pair.infer).stage("sample"), settings.pi(pair.train).stage("score")
    mu, pi = (manifest.stages[stage].effective_settings if stage in manifest.stages else {} for stage in stages)
    return (stages[0], mu), (stages[1], pi)


def both_sides(label: str, engine: StageSettings, path: StageSettings) -> Block:
    """A name and the effective settings of the engine and of the training path, side by side."""
    mu, pi = dict(flat(engine[1])), dict(flat(path[1]))
    if not mu and not pi:
        return Note(f"{label}: neither side reported its settings.")
    names_of_both = [name for name in mu if name in pi]
    names = names_of_both + [name for name in (*pi, *mu) if name not in names_of_both]
    return _settings_side_by_side(f"{label}: effective settings", names, engine, path)


def _set_otherwise(
    first: str, of_first: tuple[StageSettings, StageSettings], label: str, sides: tuple[StageSettings, StageSettings]
) -> Block:
    """The settings in which a pair differs from the first pair, whose settings are all shown."""
    earlier_values, own_values = ([dict(flat(side[1])) for side in pair] for pair in (of_first, sides))
    names = dict.fromkeys(name for side in (*own_values, *earlier_values) for name in side)
    changes = [
        name
        for name in names
        if any(old.get(name) != new.get(name) for old, new in zip(earlier_values, own_values, strict=True))
    ]
    if not changes:
        return Note(f"{label}: the same effective settings as {first}.")
    return _settings_side_by_side(f"{label}: effective settings that are not those of {first}", changes, *sides)


def _settings_side_by_side(caption: str, names: Sequence[str], engine: StageSettings, path: StageSettings) -> Table:
    mu, pi = dict(flat(engine[1])), dict(flat(path[1]))
    columns: list[Column[str]] = [
        Column("setting", lambda name: Markup("<code>{}</code>").format(visible(name))),
        Column(f"inference engine (mu), {engine[0]}", lambda name: _two(mu.get(name), pi.get(name))[0], is_text=True),
        Column(f"training path (pi), {path[0]}", lambda name: _two(mu.get(name), pi.get(name))[1], is_text=True),
    ]
    return Table.of(caption, names, columns, is_folded=True)


def _two(mu: object, pi: object) -> tuple[Cell, Cell]:
    cells = tuple(_ABSENT if value is None else _setting_markup(value) for value in (mu, pi))
    if mu is not None and pi is not None and mu != pi:
        return tuple(
            Markup('<span class="differs">{}<span class="sr"> (differs)</span></span>').format(value) for value in cells
        )  # type: ignore[return-value]
    return cells  # type: ignore[return-value]


def _stages(manifest: Manifest) -> Table:
    columns: list[Column[tuple[str, StageRecord]]] = [
        Column("stage", lambda row: Markup("<code>{}</code>").format(visible(row[0]))),
        Column("state", lambda row: row[1].state, is_text=True),
        Column("batches", lambda row: f"{write_count(row[1].batches_done)} of {write_count(row[1].batches)}"),
        Column("tokens", lambda row: write_count(row[1].tokens)),
        Column("time", lambda row: write_seconds(row[1].seconds)),
        Column("note", lambda row: row[1].note, is_text=True),
    ]
    return Table.of("Stages", manifest.stages.items(), columns, is_folded=True)


def key_values(caption: str, values: Mapping[str, Any], *, is_folded: bool = False) -> Table:
    columns: list[Column[tuple[str, Any]]] = [
        Column("name", lambda row: visible(row[0])),
        Column("value", lambda row: _setting_markup(row[1]), is_text=True),
    ]
    return Table.of(caption, flat(values), columns, is_folded=is_folded)


def _setting_markup(value: object) -> Markup:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return visible_sentence(cut_text(text, _VALUE_CHARACTERS, keep="start"))
