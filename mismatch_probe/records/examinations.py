"""The documents of `headroom` (`headroom.json`: does a checkpoint fit FP16, what was seen, what was tried) and `audit`.

`audit` holds a server's tokens against the checkpoint that it should serve.
"""

from typing import Final, Literal

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.config.examinations import AuditSettings, HeadroomSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.notation import join_names, write_power
from mismatch_probe.records.summary import Record
from mismatch_probe.stats.results import Estimate

MOST_NAMES: Final = 4
"""Modules that a sentence names."""

HeldAs = Literal["fp16", "fp32", "kernel"]
"""Where an FP16 run keeps an operation's result: in FP16, in FP32, or inside a fused kernel, which adds up in FP32."""


class HeadroomVerdict(Record):
    code: HeadroomCode
    sentence: str
    evidence: list[str] = []
    advice: list[str] = []

    @classmethod
    def of(cls, code: HeadroomCode, evidence: list[str], variant: str = "", **figures: object) -> "HeadroomVerdict":
        """A verdict in the catalogue's words; `figures` are what these name in braces."""
        sentence, advice = code.sentence(variant, **figures), code.fix(variant, **figures)
        return cls(code=code, sentence=sentence, evidence=evidence, advice=advice)


class WeightRange(Record):
    """What rounding stored weights to FP16 does to one tensor, or to all of them."""

    tensor: str
    stored_as: str
    num_values: int
    largest: float
    """The largest finite magnitude."""
    num_nonfinite: int
    """Stored as infinity or NaN."""
    num_overflowed: int
    """Finite, infinite in FP16."""
    num_subnormal: int
    """Not zero and below 2^-14 after rounding."""
    num_flushed: int
    """Not zero, zero in FP16."""
    relative_error: float
    """Root of the squared errors over the squared weights, overflows left out."""


class WeightFindings(Record):
    """All floating-point tensors of the checkpoint; `worst` holds those that lose most, and every unfit one."""

    num_tensors: int
    total: WeightRange
    worst: list[WeightRange]


class OperationRange(Record):
    """Largest magnitude of one operation of one module in FP32; None where it is not finite even there."""

    module: str
    operation: str
    held_as: HeldAs
    largest: float | None
    margin_bits: float | None
    """log2(65504 / largest)."""
    relative_error: float | None
    """Of the results rounded to FP16, norm of the error over the norm; None where one overflows."""
    finite_in_fp16: bool | None
    """None where the FP16 run has no such operation."""


class LayerRange(Record):
    """One decoder layer in FP32: largest magnitudes, and how far the residual stream's largest channel stands out."""

    layer: str
    residual: float | None
    margin_bits: float | None
    outlier_ratio: float | None
    """The largest channel maximum over the median of the channel maxima. None where a layer has no such operation."""
    outlier_channel: int | None
    attention_scores: float | None
    """Query times key before the scale."""
    attention_logits: float | None
    """What enters the softmax."""
    mlp_product: float | None


class ActivationFindings(Record):
    """`tightest` are the operations held in FP16 nearest to its limit; `modules` the tightest of each module.

    `too_small` are those whose results FP16 holds less well than BF16 would, worst first.
    """

    num_sequences: int
    num_tokens: int
    largest_logit: float | None
    first_nonfinite: str | None
    layers: list[LayerRange]
    tightest: list[OperationRange]
    too_small: list[OperationRange]
    modules: list[OperationRange]


class ScaleUnderflow(Record):
    """What FP16 would make of the FP32 gradients times 2^exponent: shares of the values that are not zero.

    flushed: at most 2^-25, so zero. subnormal: not flushed, at most 2^-14. Parameters are those of one micro-batch, as
    its backward pass leaves them; activations the gradients of every operation held in FP16.
    """

    exponent: int
    parameters_flushed: float
    parameters_subnormal: float
    activations_flushed: float
    activations_subnormal: float
    largest_scaled: float
    overflows: bool


class GradientRange(Record):
    """The gradient of a parameter, or of an operation's result, unscaled, in FP32."""

    name: str
    largest: float
    margin_bits: float | None
    flushed_unscaled: float


class OptimizerFindings(Record):
    """AdamW's moments after one step: shares that are not zero in FP32 and would be zero in FP16."""

    held_as: Literal["fp32"] = "fp32"
    first_moment_flushed: float
    second_moment_flushed: float


class GradientFindings(Record):
    """The gradient of an RL loss over the sampled responses."""

    objective: str
    num_responses: int
    mean_reward: float | None
    stand_in_rewards: bool
    """No prompt's rewards differed, so every other response was given reward 1 and the rest 0."""
    loss: float
    norm: float
    underflow: list[ScaleUnderflow]
    parameters: list[GradientRange]
    activations: list[GradientRange]
    optimizer: OptimizerFindings


class ScaleTrial(Record):
    """A true FP16 backward pass of the loss times 2^exponent."""

    exponent: int
    relative_error: float | None
    """Norm of its difference from the FP32 gradient over that one's norm, None where it is not finite."""
    num_nonfinite: int
    nonfinite: list[str]
    """Parameters whose gradient holds an infinity or NaN."""


class PrecisionTrial(Record):
    """A 16-bit run over the same responses, with some modules in FP32, and the residual stream from a layer on."""

    dtype: Dtype
    modules_in_fp32: list[str]
    residual_in_fp32_from: str | None
    first_nonfinite: str | None
    logprob_error_nats: float | None
    """Root mean square of its log-probs' difference from FP32, None where one is not finite."""
    further_share: float | None = None
    """Of the tokens where this run or BF16's is off, those where this one is further from FP32."""
    scales: list[ScaleTrial]
    from_exponent: int | None = None
    """The smallest loss scale that fits; None where none does."""
    to_exponent: int | None = None
    """The largest one."""

    @property
    def gradient_error(self) -> float | None:
        """The smallest at any scale."""
        errors = [scale.relative_error for scale in self.scales if scale.relative_error is not None]
        return min(errors, default=None)

    @property
    def fitting_scales(self) -> str:
        """The loss scales that fit: `2³ to 2²¹`."""
        if self.from_exponent is None:
            return "none"
        low, high = (write_power(2, exponent) for exponent in (self.from_exponent, self.to_exponent or 0))
        return low if low == high else f"{low} to {high}"

    @property
    def parts_in_fp32(self) -> str:
        """What the run has in FP32, of many parts the first ones; it has some."""
        names = self.modules_in_fp32
        if self.residual_in_fp32_from is not None:
            names = [f"the residual stream from {self.residual_in_fp32_from} on", *names]
        return join_names(names, MOST_NAMES)


NO_GRADIENT: Final = 0.99
"""The relative error from which nothing is left of a gradient: zero in its place has 1, rounding alone more."""


def leaves_gradient(trial: PrecisionTrial, yardstick: PrecisionTrial) -> bool:
    """Whether the responses leave a gradient that 16 bits can show: one of both errs by less than the gradient itself.

    Where neither does, rounding alone decides which loss scales seem to fit. A trial whose gradients all overflow has
    seen large ones.
    """
    return min(trial.gradient_error or 0.0, yardstick.gradient_error or 0.0) < NO_GRADIENT


class Headroom(Record):
    """The whole answer."""

    schema_version: int = 1
    tool_version: str
    created_at: str
    model: str
    model_fingerprint: str
    settings: HeadroomSettings
    device: str | None
    sampled_by: str | None
    verdict: HeadroomVerdict
    weights: WeightFindings
    activations: ActivationFindings | None = None
    gradients: GradientFindings | None = None
    plain: PrecisionTrial | None = None
    bf16: PrecisionTrial | None = None
    advised: PrecisionTrial | None = None
    seconds: dict[str, float] = {}

    @property
    def measured_loss_scales(self) -> bool:
        """Whether loss scales were tried on a gradient that 16 bits can show, with the modules in FP32 where the answer
        has some.
        """
        if self.verdict.code == HeadroomCode.GRADIENTS_NOT_MEASURED:
            return False
        trial = self.plain if self.advised is None else self.advised
        return trial is not None and self.bf16 is not None and leaves_gradient(trial, self.bf16)

    @property
    def exit_code(self) -> ExitCode:
        if self.verdict.code == HeadroomCode.DOES_NOT_FIT:
            return ExitCode.GATE_FAILED
        if self.activations is None or self.measured_loss_scales:
            return ExitCode.PASS
        return ExitCode.INCONCLUSIVE


AuditMode = Literal["greedy", "predicted", "sampled"]
"""predicted: sampled with noise that is known, so that the checkpoint names each token."""
CandidateKind = Literal["as declared", "sampling", "weights", "arithmetic", "prompt"]
AuditKind = Literal["clean", "bug", "undecided"]


class AuditedResponses(Record):
    """What the server gave."""

    software: str | None
    """Its software and version, as it calls itself."""
    model: str
    """The name that it was asked by."""
    root: str | None
    """The path or hub id of that model, as the server says."""
    num_responses: int
    num_prompts: int
    num_tokens: int
    num_empty: int
    """Responses without a token, which are left out."""
    from_text: bool
    """Whether the ids were made of text again, by the checkpoint's tokenizer."""
    num_other_prompts: int
    """Responses whose prompt the server's chat template made otherwise than the checkpoint's."""


class Agreement(Record):
    """Tokens that the checkpoint names, in FP32, at temperature 0 or with the noise that the seed stands for."""

    equal: Estimate
    """The share of the server's tokens that are the ones named."""
    floor: Estimate
    """The same of the checkpoint's own computation in the dtype that the server should compute in."""
    num_differing: int
    expected_differing: float
    """By the rounding of that dtype alone, from the margins of all positions."""
    noise_times: float
    """By how many times the rounding of that dtype the server's scores seem to be moved."""
    noise_low: float
    noise_high: float
    rounding_nats: float
    """How far that dtype moves the margin between the best two tokens where it is small: the median scale."""
    gaps: list[float]
    """Of the tokens that differ: by how much (nats) each is below the best one, largest first; at most 64."""
    near_ties: int
    """Tokens that differ where the gap is within four times the rounding."""


class LawFit(Record):
    """Tokens against the probabilities that the checkpoint gives them, without knowing the noise."""

    p_value: float
    """That the tokens were drawn as declared."""
    surprise_nats: float
    """Mean of -log p less the entropy: positive where the tokens are less likely than drawn ones would be."""
    surprise_score: float
    """In standard errors."""
    temperature: float
    """That makes the tokens likeliest."""
    temperature_low: float
    temperature_high: float
    num_outside: int
    """Tokens that the claimed top-p and top-k do not keep, beyond rounding."""
    largest_mass_before: float
    """The largest probability, at the claimed temperature, of all tokens likelier than a sampled one: a server that
    cuts by top-p never passes it.
    """
    largest_place: int
    """The largest place, from 1, that a sampled token has in the order of probability: a server that cuts by top-k
    never passes it.
    """


class AuditCandidate(Record):
    """Something else that the server may do, computed with the checkpoint."""

    kind: CandidateKind
    what: str
    num_differing: int | None = None
    """Tokens that it does not name, where tokens are predicted."""
    noise_times: float | None = None
    noise_low: float | None = None
    noise_high: float | None = None
    moves_times: float | None = None
    """By how many times the dtype's rounding it moves the scores of the checkpoint itself."""
    log_evidence: float | None = None
    """The log of its likelihood over that as declared, in nats; None where no probabilities were computed."""
    fits: bool = False
    tokens_needed: int | None = None
    """How many tokens tell it from what is declared, on these prompts; None where no number would do."""


class AuditVerdict(Record):
    """What the tokens say; `cause` is the candidate that they fit."""

    kind: AuditKind
    cause: str | None
    sentence: str
    evidence: list[str]
    advice: list[str]


class Audit(Record):
    schema_version: int = 1
    tool_version: str
    created_at: str
    model: str
    model_fingerprint: str
    settings: AuditSettings
    mode: AuditMode
    responses: AuditedResponses
    agreement: Agreement | None
    """None where the tokens are sampled with noise that is not known."""
    law: LawFit | None
    """None of greedy tokens."""
    candidates: list[AuditCandidate]
    """As declared first."""
    cannot_tell: list[str]
    """What these tokens leave open, and how many would tell."""
    verdict: AuditVerdict
    seconds: dict[str, float]

    @property
    def exit_code(self) -> ExitCode:
        """What `audit` ends with: 1 where the server is another than declared, 3 where the tokens do not tell."""
        return {"clean": ExitCode.PASS, "bug": ExitCode.GATE_FAILED, "undecided": ExitCode.INCONCLUSIVE}[
            self.verdict.kind
        ]
