"""The settings and the manifest of a run that is imported from a log, with what the log does not say of itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from mismatch_probe import __version__
from mismatch_probe.compare.plan import make_plan
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
)
from mismatch_probe.importing.selection import Census
from mismatch_probe.provenance import environment
from mismatch_probe.provenance.environment import RESPONSES, content_key
from mismatch_probe.records.manifest import LogOrigin, Manifest, ModelIdentity, StageRecord

LOG_SIDE: Final = "log"
"""The name of the sides whose numbers a log gives."""
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
