"""The document of `audit`: a server's tokens against the checkpoint that it is said to serve."""

from typing import Literal

from mismatch_probe.config.examinations import AuditSettings
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.summary import Record
from mismatch_probe.stats.results import Estimate

AuditMode = Literal["greedy", "foretold", "sampled"]
"""foretold: sampled with noise that is known, so that the checkpoint names each token."""
CandidateKind = Literal["as said", "sampling", "weights", "arithmetic", "prompt"]
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
    """The same of the checkpoint's own computation in the dtype that the server is said to compute in."""
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
    """That the tokens were drawn as said."""
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
    """Tokens that it does not name, where tokens are foretold."""
    noise_times: float | None = None
    noise_low: float | None = None
    noise_high: float | None = None
    moves_times: float | None = None
    """By how many times the dtype's rounding it moves the scores of the checkpoint itself."""
    log_evidence: float | None = None
    """The log of its likelihood over that as said, in nats; None where no probabilities were computed."""
    fits: bool = False
    tokens_needed: int | None = None
    """How many tokens tell it from what is said, on these prompts; None where no number would do."""


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
    """As said first."""
    cannot_tell: list[str]
    """What these tokens leave open, and how many would tell."""
    verdict: AuditVerdict
    seconds: dict[str, float]

    @property
    def exit_code(self) -> ExitCode:
        """What `audit` ends with: 1 where the server is another than is said, 3 where the tokens do not tell."""
        return {"clean": ExitCode.PASS, "bug": ExitCode.GATE_FAILED, "undecided": ExitCode.INCONCLUSIVE}[
            self.verdict.kind
        ]
