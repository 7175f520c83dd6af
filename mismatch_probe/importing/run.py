"""A log becomes a run directory that `report`, `gate` and `diff` read."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from mismatch_probe import __version__
from mismatch_probe.compare.plan import make_plan
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
from mismatch_probe.config.sides import InferSide, Side, TrainSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.importing.rows import (
    Columns,
    Partitions,
    chosen_rows,
    logged_legs,
    logged_rollouts,
    partitions,
    prompts_in,
    sampled_tokens_of,
)
from mismatch_probe.importing.selection import Census, chosen_prompts
from mismatch_probe.logs import LogChecks, LogFinding
from mismatch_probe.provenance import environment
from mismatch_probe.provenance.environment import RESPONSES, content_key
from mismatch_probe.records.atomic import TEMPORARY_PREFIX, storage_errors
from mismatch_probe.records.digests import new_run_key
from mismatch_probe.records.legs import Legs, write_prompts, write_rollouts
from mismatch_probe.records.manifest import LogFile, LogNote, LogOrigin, Manifest, ModelIdentity, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import LoggedResponse

LOG_SIDE: Final = "log"
"""Name of the sides whose numbers a log gives."""
LOG_FOLDER: Final = "log"
_UNFINISHED: Final = f"{TEMPORARY_PREFIX}log"
"""What an import that was killed leaves; the next one of that name takes its place."""
MOST_TOKENS: Final = 2_000_000
_HIGHEST_TEMPERATURE: Final = 100.0
_MOST_TEMPERATURES_NAMED: Final = 4


@dataclass(frozen=True)
class LogSettings:
    """What a log does not say of itself.

    temperature: of the log-probs of both sides. ref_is_exact: the log's reference is the same policy in FP32, and not
    another policy that training is kept near to.
    most_tokens: how many sampled tokens are analysed.
    """

    train_dtype: Dtype | None = None
    infer_dtype: Dtype | None = None
    temperature: float | None = None
    ref_is_exact: bool = False
    most_tokens: int = MOST_TOKENS

    def __post_init__(self) -> None:
        """
        Raises:
            UsageError: the temperature is none that log-probs can have, or a side is to be held against a reference and
                its dtype is not given.
        """
        if self.ref_is_exact and (self.train_dtype is None or self.infer_dtype is None):
            raise UsageError(
                "--ref-is-fp32 sets the error of each side against what its dtype can: give --train-dtype and "
                "--infer-dtype as well"
            )
        if self.temperature is not None and not _is_of_log_probs(self.temperature):
            raise UsageError(
                f"--temperature {self.temperature:g} is none that log-probs can have: give one above 0, at most "
                f"{_HIGHEST_TEMPERATURE:g}"
            )


@dataclass(frozen=True)
class Log:
    """A log that was recognised, ready to be read once. told: what its reader left out, known once it is read."""

    source: str
    format: str
    files: Sequence[LogFile]
    responses: Iterable[LoggedResponse]
    findings: Callable[[], Sequence[LogFinding]]


def import_log(
    log: Log,
    settings: LogSettings,
    out: Path,
    on_response: Callable[[int], None],
    on_read: Callable[[], None] = lambda: None,
) -> RunDirectory:
    """Make the run directory of a log, and its summary where both sides are recorded.

    `on_response` is told how many tokens each response has, `on_read` that the statistics begin. Nothing stays behind
    where the log cannot be used.

    Raises:
        UsageError: the log holds nothing that could be used, or cannot be read.
        RunDirectoryError: `out` is in use.
        StorageError: the disk refused.
    """
    run = RunDirectory(out)
    with run.created():
        try:
            manifest = _write_run(run, log, settings, on_response)
        except BaseException:
            run.remove()
            raise
        if log_pair(manifest) is not None:
            on_read()
            run.write_summary(summarise(run, manifest))
    return run


def log_pair(manifest: Manifest) -> PairName | None:
    """The pair of an imported run's two logged sides; None where the log has no log-probs of the trainer."""
    pair = (LOG_SIDE, LOG_SIDE)
    return pair if pair in manifest.settings.pairs and manifest.log is not None else None


def _write_run(run: RunDirectory, log: Log, log_settings: LogSettings, on_response: Callable[[int], None]) -> Manifest:
    unfinished = run.path / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    census, checks, row_partitions = Census(), LogChecks(), Partitions(unfinished)
    for response in log.responses:
        row_partitions.add(census.add(response), response)
        checks.add(response)
        on_response(response.token_ids.size)
    row_partitions.finish()
    findings = [*log.findings(), *checks.findings()]
    columns = Columns.of(census, checks)
    _require_usable(log, census, columns, findings)
    if columns.left_out:
        tokens_of = sampled_tokens_of(map(columns.of_recorded_steps, partitions(unfinished)))
    else:
        tokens_of = census.tokens_of
    chosen = chosen_prompts(tokens_of, census.cluster_of, log_settings.most_tokens)
    rows = columns.without_copies(columns.of_recorded_steps(chosen_rows(partitions(unfinished), chosen)))
    settings, assumed = _settings(log, census, columns, log_settings)
    mu = settings.mu(LOG_SIDE)
    rollouts, prompts = logged_rollouts(rows, mu, census.cluster_of), prompts_in(rows)
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
        assumed=assumed,
        notes=[note_of(finding) for finding in findings],
    )
    manifest = _manifest(log, settings, origin, rollouts)
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
    with storage_errors(run.path):
        unfinished.rename(run.path / LOG_FOLDER)
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


def _require_usable(log: Log, census: Census, columns: Columns, findings: Sequence[LogFinding]) -> None:
    if not census.num_responses:
        raise UsageError(f"{log.source} holds no response, so there is nothing to import; give a log of {log.format}")
    if not census.num_sampled_tokens:
        raise UsageError(
            f"{log.source} marks no token as sampled by the policy, so there is nothing to compare; mend its mask"
        )
    if not columns.has_mu:
        why = next((finding.sentence for finding in findings if finding.column == "log_mu"), "no row has them")
        raise UsageError(
            f"{log.source} holds no log-probs of the sampler ({why}), so there is nothing to compare; switch them on "
            "where it is written (docs/logs.md says how)"
        )


def _settings(
    log: Log, census: Census, columns: Columns, log_settings: LogSettings
) -> tuple[CompareSettings, dict[str, str]]:
    """The settings of the run, and what had to be assumed."""
    assumed = {
        name: f"{Dtype.BF16}, because the log does not say; give --{name.replace('_', '-')}"
        for name, dtype in (("train_dtype", log_settings.train_dtype), ("infer_dtype", log_settings.infer_dtype))
        if dtype is None
    }
    temperature, why = _temperature(census.temperatures, log_settings.temperature)
    if why is not None:
        assumed["temperature"] = f"{temperature:g}, {why}"
    train_dtype, infer_dtype = log_settings.train_dtype or Dtype.BF16, log_settings.infer_dtype or Dtype.BF16
    train = LOG_SIDE if columns.has_pi else train_dtype.value
    settings = CompareSettings(
        model=ModelSettings(path=log.source),
        infer=(InferSide(name=LOG_SIDE, dtype=infer_dtype, logged=True),),
        train=(TrainSide(name=LOG_SIDE, dtype=train_dtype, logged=True),) if columns.has_pi else (),
        pairs=((train, LOG_SIDE),),
        prompts=PromptSettings(source=log.source),
        sampling=SamplingSettings(temperature=temperature, max_new_tokens=max(1, census.longest_response)),
        reference=ReferenceSettings(
            dtype=Dtype.FP32 if columns.has_pi and columns.has_ref and log_settings.ref_is_exact else "none",
            rounded_weights=False,
        ),
        floors=FloorSettings(num_sequences=0),
        full_vocabulary=FullVocabularySettings(positions=0),
    )
    return settings, assumed


def _temperature(logged: set[float], requested: float | None) -> tuple[float, str | None]:
    """Of both sides' log-probs, and why where it is another than the one that the log says."""
    values = " and ".join(f"{value:g}" for value in sorted(logged)[:_MOST_TEMPERATURES_NAMED])
    if len(logged) > _MOST_TEMPERATURES_NAMED:
        values += f" and {len(logged) - _MOST_TEMPERATURES_NAMED} more"
    if requested is not None:
        return requested, None if logged <= {requested} else f"as --temperature says; the log says {values}"
    if not logged:
        return 1.0, "because the log does not say; give --temperature"
    if len(logged) == 1 and _is_of_log_probs(next(iter(logged))):
        return next(iter(logged)), None
    return 1.0, f"because the log says {values}, and the report is of a single temperature above 0; give --temperature"


def _is_of_log_probs(temperature: float) -> bool:
    return 0 < temperature <= _HIGHEST_TEMPERATURE


def _stage(log: Log, side: Side, origin: LogOrigin) -> StageRecord:
    """What is recorded of a side; of a logged one nothing can be read back but what its importer said."""
    if not side.logged and side.role != "ref":
        return StageRecord()
    name = "train_dtype" if side.role == "pi" else "infer_dtype"
    source = "assumed" if name in origin.assumed else "given at the import"
    return StageRecord(
        state="skipped",
        note=f"logged in {log.source}",
        effective_settings={} if side.role == "ref" else {"dtype": side.dtype, "dtype_is": source},
    )


def _manifest(log: Log, settings: CompareSettings, origin: LogOrigin, rollouts: pa.Table) -> Manifest:
    stages = {stage.name: _stage(log, stage.side, origin) for stage in make_plan(settings).stages}
    return Manifest(
        tool_version=__version__,
        created_at=environment.now(),
        command=environment.command_given(),
        settings=settings,
        model=ModelIdentity(
            name=origin.models[0] if len(origin.models) == 1 else f"the policy of {Path(log.source).name}",
            folder="",
            fingerprint="",
            architecture="not said by the log",
            context_length=None,
            checkpoint_dtype=None,
            weight_bytes=0,
            has_tokenizer=False,
        ),
        content_keys={
            "settings": content_key(settings.model_dump(mode="json")),
            RESPONSES: content_key(rollouts.select(["id", "prompt_token_ids", "token_ids"]).to_pylist()),
        },
        versions={"mismatch-probe": __version__},
        hardware={},
        git=None,
        run_key=new_run_key(),
        log=origin,
        stages=stages,
    )
