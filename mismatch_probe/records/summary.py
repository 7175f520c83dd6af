"""`summary.json`: the one record that terminal, report, `--json`, `diff` and `gate` read. And what `doctor` saw."""

from collections.abc import Sequence
from typing import Any, Final, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from mismatch_probe.causes import Catalogued, VerdictKind
from mismatch_probe.config.sides import SideName
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.plugins import Plugin
from mismatch_probe.stats.results import (
    Blame,
    Conditioning,
    ConfidenceBin,
    CorrectionResult,
    ErrorHistogram,
    Estimate,
    FewTokens,
    FullVocabularyCheck,
    LengthLaw,
    ProbabilityScatter,
    RoutingCheck,
    StepGrowth,
)


class Record(BaseModel):
    """Frozen, no unknown keys; non-finite numbers cannot be written."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OfSides(Record):
    """A record with the names of two sides. A run made before sides had names calls them by their dtypes."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_dtypes(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        by_dtype = {kind: values[f"{kind}_dtype"] for kind in ("train", "infer") if f"{kind}_dtype" in values}
        return {**by_dtype, **values}


class Cause(Record):
    """One cause that the data shows: its code, a sentence, what shows it, and what would fix it."""

    code: str
    sentence: str
    evidence: list[str] = []
    advice: list[str] = []

    @classmethod
    def of(
        cls,
        code: Catalogued,
        evidence: Sequence[str] = (),
        advice: Sequence[str] | None = None,
        *,
        variant: str = "",
        **figures: object,
    ) -> "Cause":
        """A cause in the catalogue's words.

        Args:
            advice: what fixes it; None for what the catalogue says.
            variant: which of the cause's words.
            figures: what the words name in braces.
        """
        return Cause(
            code=code.value,
            sentence=code.sentence(variant, **figures),
            evidence=list(evidence),
            advice=code.fix(variant, **figures) if advice is None else list(advice),
        )


class Verdict(Cause):
    """What the numbers mean: kind and code for machines, a sentence for people, and what to do.

    `kind` says how to take it; `code` names the foremost cause; `also` holds the other causes that were seen.
    """

    kind: VerdictKind
    also: list[Cause] = []


class SettingFinding(Record):
    """Something about the effective settings that can make the two sides differ, found before any number is read.

    error: it makes them differ; warning: it costs precision on one side; note: it is worth knowing. `code` is the cause
    it would produce, None where it could be several. `side` is the one to fix, None where it is both or either.
    """

    level: Literal["error", "warning", "note"]
    side: Literal["pi", "mu"] | None = None
    setting: str
    what: str
    advice: str
    code: str | None = None


class TokenInContext(Record):
    """A token with a large deviation, the text around it, and its log-probs (nats)."""

    sequence_id: str
    position: int
    before: str
    token: str
    after: str
    log_pi: float
    log_mu: float
    log_ref: float | None


class ResponseTokens(Record):
    """A response whose two sides are far apart, and its tokens around the worst of them (log-probs in nats).

    log_pi, log_mu: None for a token that was not sampled by the policy.
    """

    sequence_id: str
    prompt: str | None = None
    """The end of the prompt's text; None where it is not recorded."""
    num_tokens: int
    """Of the whole response, those that were measured."""
    log_weight: float
    """S, the sum of d."""
    mean_abs_diff: float
    largest_abs_diff: float
    kl_k3: float
    first: int
    """Position of the first token of `tokens`."""
    tokens: list[str]
    log_pi: list[float | None]
    log_mu: list[float | None]

    @model_validator(mode="after")
    def _as_many_values_as_tokens(self) -> "ResponseTokens":
        if not len(self.tokens) == len(self.log_pi) == len(self.log_mu):
            raise ValueError("tokens, log_pi and log_mu must be equally long")
        return self


MOST_LEFT_OUT: Final = 0.5
"""Share of the tokens, or of their surprisal, above which the others are not the log's."""


class Counts(Record):
    """What was there to measure, and what was not usable.

    positive_mu, positive_pi: log-probs above 0 by more than rounding explains.
    """

    num_sequences: int
    num_prompts: int | None = None
    """What the responses answer; None in summaries made before it was counted."""
    num_tokens: int
    missing_mu: int
    missing_pi: int
    nonfinite_mu: int
    nonfinite_pi: int
    positive_mu: int = 0
    positive_pi: int = 0
    void_checks: int = 0
    """Responses whose prefill or reference log-probs are missing, not finite, or above 0."""
    mismatched_ids: int
    truncated_responses: int
    left_out_tokens: int = 0
    """Of responses of a log, because a log-prob is missing or none."""
    left_out_surprisal: float = 0.0
    """The share that they have of all tokens' surprisal, -log p by the side that has one."""
    partial_responses: int = 0
    """Those with such tokens and others; they count for tokens, and not for whole responses."""
    zeros_for_missing: int = 0
    """Tokens whose log-prob is exactly 0 on a side and, by what the other side says, stands for none."""

    @property
    def left_out_share(self) -> float:
        """Of the tokens, or of their surprisal where that is more: what a mean may lack, since deviations grow with
        surprisal.
        """
        tokens = self.left_out_tokens + self.num_tokens
        return max(self.left_out_tokens / tokens, self.left_out_surprisal) if tokens else 0.0

    @property
    def is_measured_in_part(self) -> bool:
        """Whether tokens are left out, and the others are most of all."""
        return 0 < self.left_out_share <= MOST_LEFT_OUT

    @property
    def has_faults(self) -> bool:
        """Whether anything was not usable."""
        sides = (self.missing_mu, self.missing_pi, self.nonfinite_mu, self.nonfinite_pi, self.positive_mu)
        return any((*sides, self.positive_pi, self.void_checks, self.mismatched_ids))


class SettingsContrast(Record):
    """What settings of a side change: the contrast of this pair with its counterpart, which differs in these alone."""

    counterpart: tuple[SideName, SideName] = Field(validation_alias=AliasChoices("counterpart", "beside"))
    side: Literal["pi", "mu"]
    settings: list[str]
    """Each as `name = value` of this pair."""
    ratios: dict[str, Estimate]
    """Of this pair's metrics to the other's, by name."""
    format: str | None = None
    """The coarsest that the settings name, FP8 for instance."""
    is_rounding: bool | None = None
    """Whether the ratios are no larger than rounding makes them; None where that is not known."""


class StepSummary(Record):
    """A pair's metrics by name on the responses of one step and weight version; None where the log does not say."""

    step: int | None
    weight_version: str | None
    last_step: int | None = None
    """Of a stretch of neighbouring steps, where a log has very many; its weight version is None unless they share one.
    """
    metrics: dict[str, Estimate]


class PairSummary(OfSides):
    """One side of the training path against an engine's, on responses sampled by the latter.

    train, infer: names of the sides; before sides had names, those of their dtypes.
    """

    train: SideName
    infer: SideName
    train_dtype: Dtype
    infer_dtype: Dtype
    legs: dict[str, str]
    counts: Counts
    metrics: dict[str, Estimate]
    metrics_unavailable: dict[str, str] = {}
    length: LengthLaw | None
    blame: Blame | None
    confidence: list[ConfidenceBin]
    scatter: ProbabilityScatter | None
    errors: list[ErrorHistogram]
    worst_tokens: list[TokenInContext]
    worst_responses: list[ResponseTokens] = []
    few_tokens: FewTokens | None = None
    """None unless a few tokens hold half of the KL."""
    corrections: list[CorrectionResult] = []
    full_vocabulary: FullVocabularyCheck | None = None
    routing: RoutingCheck | None = None
    settings_contrast: SettingsContrast | None = Field(
        default=None, validation_alias=AliasChoices("settings_contrast", "settings_told_apart")
    )
    steps: list[StepSummary] = []
    growth: StepGrowth | None = None
    """How the KL grows over the steps of the log, in the newest weights of each; None where it does not grow, by a test
    that a flat noisy log does not pass. The first line of the evidence, and the headline, have it in words.
    """
    is_logged: bool = False
    """Both were logged."""
    update_ratio: float | None = None
    """The level of d before the last change of the weights that the log records in a response over that after it; None
    unless they differ beyond doubt."""
    conditioning: Conditioning | None = None
    """What rounding in FP32 does to the checkpoint; None unless the pair would have been called a bug by its size."""
    verdict: Verdict

    @property
    def is_of_dtypes(self) -> bool:
        """Whether only the dtypes of the sides are declared."""
        return (self.train, self.infer) == (self.train_dtype, self.infer_dtype)


class Contrast(Record):
    """A metric of one pair over that of another, from rollouts of this run: `FP16 would cut it k-fold`."""

    metric: str
    of: str
    over: str
    ratio: Estimate


class Summary(Record):
    """The whole answer of a run."""

    schema_version: int = 1
    tool_version: str
    model: str
    model_fingerprint: str
    headline: str
    verdict: Verdict
    preflight: list[SettingFinding] = []
    left_out: dict[str, str] = {}
    """Sides that were asked for and that the engine cannot compute, by name, each with its reason."""
    fp16_refused: str | None = None
    """Why the engine cannot compute this checkpoint in FP16, where it was not asked for; None where it can."""
    contrasts: list[Contrast]
    pairs: list[PairSummary]

    @property
    def exit_code(self) -> ExitCode:
        """What a command that shows this answer ends with: broken data is never a pass, whatever the numbers say."""
        return ExitCode.ENVIRONMENT if self.verdict.kind == "broken" else ExitCode.PASS


class Import(Record):
    """Whether a package imports in this environment; `problem` is the last line of what it raised."""

    package: str
    ok: bool
    problem: str = ""


class Examination(Record):
    versions: dict[str, str]
    hardware: dict[str, Any]
    imports: list[Import]
    conflicts: list[str]
    remarks: list[str]
    effective_settings: dict[str, dict[str, Any]] = {}
    plugins: list[Plugin] = []

    @property
    def exit_code(self) -> ExitCode:
        healthy = not self.conflicts and all(import_.ok for import_ in self.imports)
        healthy = healthy and all(plugin.problem is None for plugin in self.plugins)
        return ExitCode.PASS if healthy else ExitCode.ENVIRONMENT
