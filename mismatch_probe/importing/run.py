"""A log becomes a run directory that `report`, `gate` and `diff` read, with what the log does not say of itself."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from mismatch_probe import __version__
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.subsamples import repeat_of_one_side
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.model import (
    FloorSettings,
    FullVocabularySettings,
    ModelSettings,
    PromptSettings,
    ReferenceSettings,
    SamplingSettings,
)
from mismatch_probe.config.sides import LOG_SIDE, InferSide, Side, TrainSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.errors import UsageError
from mismatch_probe.importing.rows import (
    CHOICES_LEG,
    Columns,
    FirstChoices,
    Partitions,
    logged_legs,
    logged_rollouts,
    prompts_in,
    read_partitions,
    rows_of_choice,
    sampled_tokens_of,
)
from mismatch_probe.importing.selection import Census, chosen_prompts
from mismatch_probe.logs import LogChecks, LogFinding
from mismatch_probe.logs.choices import ChoiceChecks, ExpertLayout
from mismatch_probe.logs.turns import TurnChecks
from mismatch_probe.logs.weight_versions import VersionChecks
from mismatch_probe.provenance import environment
from mismatch_probe.provenance.environment import RESPONSES, content_key
from mismatch_probe.records.files import JOINED_FOLDER, TEMPORARY_PREFIX, storage_errors
from mismatch_probe.records.legs import Legs, write_prompts, write_rollouts
from mismatch_probe.records.manifest import LogFile, LogNote, LogOrigin, Manifest, ModelIdentity, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.records.tables import ROLLOUTS, read_rows
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.verdict.rounding import noise_sentence

MOST_TOKENS: Final = 2_000_000
_HIGHEST_TEMPERATURE: Final = 100.0
_MOST_TEMPERATURES_NAMED: Final = 4


@dataclass(frozen=True)
class LogSettings:
    """What a log does not say of itself."""

    train_dtype: Dtype | None = None
    infer_dtype: Dtype | None = None
    temperature: float | None = None
    """The temperature of the log-probs of both sides."""
    ref_is_exact: bool = False
    """The log's reference is the same policy in FP32, and not another policy that training is kept near to."""
    most_tokens: int = MOST_TOKENS
    """At most so many sampled tokens are analysed."""

    def __post_init__(self) -> None:
        """
        Raises:
            UsageError: log-probs cannot have this temperature, or a side is to be compared with a reference and its
                dtype is not given.
        """
        if self.ref_is_exact and (self.train_dtype is None or self.infer_dtype is None):
            raise UsageError(
                "--ref-is-fp32 sets the error of each side against what its dtype can: give --train-dtype and "
                "--infer-dtype as well"
            )
        if self.temperature is not None and not _is_possible_temperature(self.temperature):
            raise UsageError(
                f"--temperature {self.temperature:g} is none that log-probs can have: give one above 0, at most "
                f"{_HIGHEST_TEMPERATURE:g}"
            )


def log_pair(manifest: Manifest) -> PairName | None:
    """The pair of an imported run's two logged sides; None where the log has no log-probs of the trainer."""
    pair = (LOG_SIDE, LOG_SIDE)
    return pair if pair in manifest.settings.pairs and manifest.log is not None else None


def settings_of_log(
    source: str, census: Census, columns: Columns, log_settings: LogSettings
) -> tuple[CompareSettings, dict[str, str]]:
    """The settings of the run, and why each value that the log does not say was assumed."""
    assumptions = {
        name: f"{Dtype.BF16}, because the log does not say; give --{name.replace('_', '-')}"
        for name, dtype in (("train_dtype", log_settings.train_dtype), ("infer_dtype", log_settings.infer_dtype))
        if dtype is None
    }
    temperature, why = _common_temperature(census.temperatures, log_settings.temperature)
    if why is not None:
        assumptions["temperature"] = f"{temperature:g}, {why}"
    train_dtype, infer_dtype = log_settings.train_dtype or Dtype.BF16, log_settings.infer_dtype or Dtype.BF16
    train = LOG_SIDE if columns.has_pi else train_dtype.value
    settings = CompareSettings(
        model=ModelSettings(path=source),
        infer=(InferSide(name=LOG_SIDE, dtype=infer_dtype, logged=True),),
        train=(TrainSide(name=LOG_SIDE, dtype=train_dtype, logged=True),) if columns.has_pi else (),
        pairs=((train, LOG_SIDE),),
        prompts=PromptSettings(source=source),
        sampling=SamplingSettings(temperature=temperature, max_new_tokens=max(1, census.longest_response)),
        reference=ReferenceSettings(
            dtype=Dtype.FP32 if columns.has_pi and columns.has_ref and log_settings.ref_is_exact else "none",
            rounded_weights=False,
        ),
        floors=FloorSettings(num_sequences=0),
        full_vocabulary=FullVocabularySettings(positions=0),
    )
    return settings, assumptions


def _common_temperature(temperatures: set[float], request: float | None) -> tuple[float, str | None]:
    """The temperature of both sides' log-probs, and a reason where it is not the one that the log says."""
    values = " and ".join(f"{value:g}" for value in sorted(temperatures)[:_MOST_TEMPERATURES_NAMED])
    if len(temperatures) > _MOST_TEMPERATURES_NAMED:
        values += f" and {len(temperatures) - _MOST_TEMPERATURES_NAMED} more"
    if request is not None:
        return request, None if temperatures <= {request} else f"as --temperature says; the log says {values}"
    if not temperatures:
        return 1.0, "because the log does not say; give --temperature"
    if len(temperatures) == 1 and _is_possible_temperature(next(iter(temperatures))):
        return next(iter(temperatures)), None
    return 1.0, f"because the log says {values}, and the report is of a single temperature above 0; give --temperature"


def _is_possible_temperature(temperature: float) -> bool:
    return 0 < temperature <= _HIGHEST_TEMPERATURE


def manifest_of_log(
    source: str, settings: CompareSettings, origin: LogOrigin, rollouts: pa.Table, *, has_tokenizer: bool = False
) -> Manifest:
    stages = {stage.name: _logged_stage(source, stage.side, origin) for stage in make_plan(settings).stages}
    return Manifest(
        **environment.manifest_head(),
        settings=settings,
        model=ModelIdentity(
            name=origin.models[0] if len(origin.models) == 1 else f"the policy of {Path(source).name}",
            folder="",
            fingerprint="",
            architecture="not named by the log",
            context_length=None,
            checkpoint_dtype=None,
            weight_bytes=0,
            has_tokenizer=has_tokenizer,
        ),
        content_keys={
            "settings": content_key(settings.model_dump(mode="json")),
            RESPONSES: content_key(rollouts.select(["id", "prompt_token_ids", "token_ids"]).to_pylist()),
        },
        versions={"mismatch-probe": __version__},
        hardware={},
        git=None,
        log=origin,
        stages=stages,
    )


def _logged_stage(source: str, side: Side, origin: LogOrigin) -> StageRecord:
    """The record of a side's stage; of a logged side it has only what its importer said."""
    if not side.logged and side.role != "ref":
        return StageRecord()
    name = "train_dtype" if side.role == "pi" else "infer_dtype"
    basis = "assumed" if name in origin.assumed else "given at the import"
    return StageRecord(
        state="skipped",
        note=f"logged in {source}",
        effective_settings={} if side.role == "ref" else {"dtype": side.dtype, "dtype_is": basis},
    )


LOG_FOLDER: Final = "log"
IDS: Final = TokenTexts(None)
"""Tokens as their ids."""
_UNFINISHED: Final = f"{TEMPORARY_PREFIX}log"
"""The folder that a killed import leaves; the next import with the same name replaces it."""


@dataclass(frozen=True)
class Log:
    """A log whose format was recognised, ready to be read once."""

    source: str
    format: str
    files: Sequence[LogFile]
    responses: Iterable[LoggedResponse]
    findings: Callable[[], Sequence[LogFinding]]
    """What its reader left out; complete once the responses are read."""


def import_log(
    log: Log,
    settings: LogSettings,
    out: Path,
    on_response: Callable[[int], None],
    on_read: Callable[[], None] = lambda: None,
    texts: TokenTexts = IDS,
    layout: ExpertLayout | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> RunDirectory:
    """Make the run directory of a log, and its summary where both sides are recorded.

    `on_response` receives the number of tokens of each response, and `on_read` is called when the statistics begin.
    texts: of tokens, by the checkpoint's tokenizer; their ids unless given. layout: of the checkpoint's experts.
    stop_ids: those at which it stops.
    Nothing is left on the disk where the log cannot be used.

    Raises:
        UsageError: the log holds nothing that could be used, or cannot be read.
        RunDirectoryError: `out` is in use.
        StorageError: the disk refused.
    """
    run = RunDirectory(out)
    with run.create():
        try:
            manifest = _write_log_run(run, log, settings, on_response, texts, layout, stop_ids)
        except BaseException:
            run.remove()
            raise
        if log_pair(manifest) is not None:
            on_read()
            run.write_summary(summarise(run, manifest))
    return run


def _write_log_run(
    run: RunDirectory,
    log: Log,
    log_settings: LogSettings,
    on_response: Callable[[int], None],
    texts: TokenTexts,
    layout: ExpertLayout | None,
    stop_ids: frozenset[int],
) -> Manifest:
    unfinished_folder = run.path / _UNFINISHED
    shutil.rmtree(unfinished_folder, ignore_errors=True)
    census, checks, row_partitions = Census(), LogChecks(stop_ids=stop_ids), Partitions(unfinished_folder)
    turn_checks = TurnChecks(texts if texts.has_tokenizer else None)
    joined_partitions = Partitions(unfinished_folder / JOINED_FOLDER)
    choice_checks, choices, version_checks = ChoiceChecks(layout), FirstChoices(), VersionChecks()
    for response in log.responses:
        choice_checks.add(response)
        version_checks.add(response)
        choices.add(response)
        kept = None if response.kept is None else response.kept.singles()
        response = replace(response, experts=None, kept=None)
        prompt_id = census.add(response)
        row_partitions.add(prompt_id, response)
        checks.add(replace(response, kept=kept))
        joined_turn = turn_checks.add(response)
        if joined_turn is not None:
            joined_partitions.add(prompt_id, joined_turn)
        on_response(response.token_ids.size)
    row_partitions.finish()
    joined_partitions.finish()
    of_checks = (checks, turn_checks, choice_checks, version_checks)
    findings = [*log.findings(), *(finding for each in of_checks for finding in each.findings())]
    columns = Columns.of(census, checks)
    _require_usable_log(log, census, columns, findings)
    if columns.left_out:
        tokens_of = sampled_tokens_of(map(columns.of_recorded_steps, read_partitions(unfinished_folder)))
    else:
        tokens_of = census.tokens_of
    choice = chosen_prompts(tokens_of, census.cluster_of, log_settings.most_tokens)
    rows = columns.without_copies(columns.of_recorded_steps(rows_of_choice(read_partitions(unfinished_folder), choice)))
    settings, assumptions = settings_of_log(log.source, census, columns, log_settings)
    mu = settings.mu(LOG_SIDE)
    rollouts, prompts = logged_rollouts(rows, mu, census.cluster_of, texts), prompts_in(rows, texts)
    origin = LogOrigin(
        format=log.format,
        files=list(log.files),
        num_responses=census.num_responses,
        num_tokens=census.num_tokens,
        num_sampled_tokens=census.num_sampled_tokens,
        analysed_responses=rows.num_rows,
        analysed_tokens=pa.compute.sum(pa.compute.list_flatten(rows["mask"]).cast(pa.int64())).as_py() or 0,
        steps_left_out=sorted(census.steps.difference(rows["step"].to_pylist())),
        models=sorted(census.models),
        assumed=assumptions,
        turns=turn_checks.reading(),
        experts=choice_checks.expert_reading(),
        kept_sets=choice_checks.kept_reading(),
        versions=version_checks.reading(),
        notes=[note_of(finding) for finding in findings],
    )
    manifest = manifest_of_log(log.source, settings, origin, rollouts, has_tokenizer=texts.has_tokenizer)
    legs = Legs(run, manifest.run_key)
    write_prompts(run, manifest.run_key, prompts)
    write_rollouts(run, manifest.run_key, rollouts)
    of_sides = {"log_mu": mu.leg("decode")}
    if columns.has_pi:
        pi = settings.pi(LOG_SIDE)
        reference = settings.reference_of(pi)
        of_sides |= {"log_pi": pi.leg()} | ({} if reference is None else {"log_ref": reference.leg()})
    for leg, table in logged_legs(rows, rollouts["id"], of_sides):
        legs.write(leg, table)
    if (choice_table := choices.table(rollouts)).num_rows:
        legs.write(mu.leg(CHOICES_LEG), choice_table)
    with storage_errors(run.path):
        if (unfinished_folder / JOINED_FOLDER).exists():
            (unfinished_folder / JOINED_FOLDER).rename(run.path / JOINED_FOLDER)
        unfinished_folder.rename(run.path / LOG_FOLDER)
    run.write_manifest(manifest)
    return manifest


def note_of(finding: LogFinding) -> LogNote:
    return LogNote(
        level=finding.level.value,
        code=finding.code,
        sentence=finding.sentence,
        column=finding.column,
        evidence=dict(finding.evidence),
    )


def _require_usable_log(log: Log, census: Census, columns: Columns, findings: Sequence[LogFinding]) -> None:
    if not census.num_responses:
        raise UsageError(f"{log.source} holds no response, so there is nothing to import; give a log of {log.format}")
    if not census.num_sampled_tokens:
        if not census.num_tokens:
            raise UsageError(f"the responses of {log.source} are all empty, so there is nothing to compare")
        raise UsageError(
            f"{log.source} marks no token as sampled by the policy, so there is nothing to compare; fix its mask"
        )
    if not columns.has_mu:
        why = next((finding.sentence for finding in findings if finding.column == "log_mu"), "no row has them")
        raise UsageError(
            f"{log.source} holds no log-probs of the engine ({why}), so there is nothing to compare; switch them on "
            "where it is written"
        )


def noise_of_sampler(run: RunDirectory, manifest: Manifest) -> str:
    """The noise of the engine of a log that has no trainer's log-probs, in words; empty where its responses share too
    few tokens to measure it.
    """
    rollouts = read_rows(run.rollouts_path, ROLLOUTS)
    leg = Legs(run, manifest.run_key).read(manifest.settings.mu(LOG_SIDE).leg("decode"), columns=["logprobs"])
    repeat = repeat_of_one_side(rollouts, [np.asarray(row, dtype=np.float64) for row in leg["logprobs"].to_pylist()])
    if repeat is None:
        return ""
    floor = Estimator(repeat.sequences, manifest.settings.confidence).root_mean_square(repeat.diff, "token")
    return "" if floor is None else noise_sentence("the engine", floor)
