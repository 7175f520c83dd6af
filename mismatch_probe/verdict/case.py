"""What a verdict is reached from, and what makes the numbers of a pair void: other ids, missing data, copied legs.

Kernels that are bitwise the same on both sides, as some on-policy trainers have, make both sides equal bit for bit,
also in 16 bit. That is believed, and named in the evidence, where every leg says which side of which run it is. Where
the legs say nothing, a 16-bit pair is taken for a copy; an FP32 pair, whose sides are meant to agree, is believed, and
what the legs lack is named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from mismatch_probe.causes.comparison import USABLE_ONLY, Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_count, write_many, write_share
from mismatch_probe.records.summary import Cause, Counts, SettingFinding, Verdict
from mismatch_probe.records.tables import ids_key
from mismatch_probe.stats.copies import CERTAIN_NATS, CopyTotals
from mismatch_probe.stats.results import Blame, Estimate, FewTokens, LengthLaw, StepGrowth
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.departures import Departures
from mismatch_probe.verdict.signatures.profile import Disagreement

MOST = 0.8
"""Share of the foreign rows that must have one cause."""


@dataclass(frozen=True)
class IdsCheck:
    """Rows of a leg whose ids are not those sampled, by what they are; `leg` names it."""

    leg: str
    total: int
    foreign: int
    num_of_other_response: int
    """The ids of another row."""
    num_of_other_prompt: int
    """The same response behind the prompt with its first token doubled or dropped."""
    num_without_end: int
    """The response without its last token."""
    num_of_other_length: int
    """Neither, and of another length."""


def examine_ids(
    leg: str,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampled_keys: Sequence[int],
    keys: Sequence[int],
    lengths: Sequence[int],
) -> IdsCheck | None:
    """What a leg was scored on; None where all is as sampled.

    sampled_keys: the key (`ids_key`) of each sampled row; keys and lengths: those that the leg recorded.
    """
    everyone = set(sampled_keys)
    counts = dict.fromkeys(
        ("num_of_other_response", "num_of_other_prompt", "num_without_end", "num_of_other_length"), 0
    )
    foreign = 0
    for prompt, response, own, key, length in zip(prompts, responses, sampled_keys, keys, lengths, strict=True):
        if own == key and length == len(response):
            continue
        foreign += 1
        variants = (ids_key([*prompt[:1], *prompt], response), ids_key(prompt[1:], response))
        if key != own and key in everyone:
            counts["num_of_other_response"] += 1
        elif key in variants:
            counts["num_of_other_prompt"] += 1
        elif key == ids_key(prompt, response[:-1]):
            counts["num_without_end"] += 1
        elif length != len(response):
            counts["num_of_other_length"] += 1
    return IdsCheck(leg, len(sampled_keys), foreign, **counts) if foreign else None


def doubled_first_token(prompts: Sequence[Sequence[int]]) -> int | None:
    """The token that all prompts begin with twice; None where there is none, or only one prompt."""
    starts = {tuple(prompt[:2]) for prompt in prompts}
    first = next(iter(starts), ())
    different = {tuple(prompt) for prompt in prompts}
    return first[0] if len(starts) == 1 and len(first) == 2 and first[0] == first[1] and len(different) > 1 else None


def share_without(token_id: int, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many different prompts do not begin with the token, and how many there are."""
    different = {tuple(prompt) for prompt in prompts}
    return sum(prompt[:1] != (token_id,) for prompt in different), len(different)


def ids_cause(ids: IdsCheck) -> Cause:
    """The cause that the ids alone show; `ids_differ` where they show none."""
    evidence = [f"{ids.foreign} of {ids.total} responses of {ids.leg} were scored on other ids than were sampled"]
    most = MOST * ids.foreign
    if ids.num_of_other_response >= most:
        evidence.append(f"{ids.num_of_other_response} of them carry the ids of another response")
        return Cause.of(Code.MISPAIRED, evidence, count=ids.num_of_other_response, total=ids.total)
    if ids.num_of_other_prompt >= most:
        evidence.append(f"{ids.num_of_other_prompt} of them have the prompt's first token doubled or dropped")
        what = "one side's prompts have their first token twice, or lack it"
        return Cause.of(Code.PROMPT_PREFIX, evidence, variant="ids", what=what)
    if ids.num_of_other_length >= most / 2:
        evidence.append(f"{ids.num_of_other_length} of them have another number of tokens")
        return Cause.of(Code.RETOKENISED, evidence, count=ids.foreign, total=ids.total)
    if ids.num_without_end >= most:
        evidence.append(f"{ids.num_without_end} of them lack the last token, such as the end of sequence")
    return Cause.of(Code.IDS_DIFFER, evidence, count=ids.foreign)


@dataclass(frozen=True)
class Case:
    """One pair: what was measured, what the run knows of its sides, and what can be done next."""

    name: tuple[str, str]
    """The names of the training side and of the engine's."""
    train_dtype: Dtype
    infer_dtype: Dtype
    applied_train: str | None
    """The dtype that was read back from the loaded model."""
    applied_infer: str | None
    """The dtype that was read back from the running engine."""
    counts: Counts
    metrics: dict[str, Estimate]
    length: LengthLaw | None
    blame: Blame | None
    disagreement: Disagreement | None
    """None where nothing was usable."""
    exact: Disagreement | None
    """The pair that differs from this one in its dtypes alone, with FP32 on both sides; this pair itself where it is
    that one; None where it was not run or is not usable.
    """
    ids: IdsCheck | None = None
    preflight: list[SettingFinding] = field(default_factory=list)
    legs_are_identified: bool = False
    """Whether each leg says which side computed it, and that it is this run's."""
    takes_dtypes: bool = True
    """Whether the run can be given an FP32 pair later; one with another run's responses cannot."""
    exact_name: tuple[str, str] | None = None
    """The names of both sides of the FP32 pair."""
    exact_sides: tuple[str, ...] = ()
    """Flags that give the same two sides in FP32."""
    can_be_looked_into: bool = True
    """Whether `localize` and `headroom` can examine it: both sides load the run's checkpoint and no adapter."""
    has_run: bool = True
    """Whether there is a run that a command can go on from."""
    few_tokens: FewTokens | None = None
    is_logged: bool = False
    """Whether both sides are those of a log."""
    is_of_server: bool = False
    """Whether its responses are a server's, whose weights nobody has read."""
    is_of_log: bool = False
    """Whether its responses are a log's."""
    departures: Departures | None = None
    """How far the log's sides lie from the reference."""
    log_faults: list[Cause] = field(default_factory=list)
    """Faults of the log that make its numbers mean nothing."""
    left_out: frozenset[str] = frozenset()
    """Sides of the run that the engine cannot compute, by name."""
    fp16_refused: str | None = None
    """Why the engine cannot compute in FP16; None where it can, or where a side already does."""
    growth: StepGrowth | None = None
    """How the KL grows over the steps of a log."""
    update_ratio: float | None = None
    """Level of d before the last recorded change of the weights over that after it; None unless they surely differ."""
    last_step: int | None = None
    """Of a log of several steps, whose checkpoint has the weights of one."""

    @property
    def is_of_dtypes(self) -> bool:
        """Whether the sides are named by their dtypes alone, without settings of their own."""
        return self.name == (self.train_dtype, self.infer_dtype)


SIDES = ("the training path", "the engine")


def data_faults(case: Case) -> Iterator[Cause]:
    """Every reason not to trust the pair; none for sound data."""
    yield from case.log_faults
    counts = case.counts
    settings = (case.train_dtype, case.infer_dtype)
    for side, dtype, applied_dtype in zip(SIDES, settings, (case.applied_train, case.applied_infer), strict=True):
        if applied_dtype != dtype:
            yield Cause.of(
                Code.DTYPE_NOT_APPLIED,
                [f"asked for {dtype}, read back {applied_dtype}"],
                wanted=dtype,
                side=side,
                applied=applied_dtype or "an unknown dtype",
            )
    tokens = write_many(counts.num_tokens, "token")
    usable = f"left to measure: {write_many(counts.num_sequences, 'response')} with {tokens}"
    if case.ids is not None:
        cause = ids_cause(case.ids)
        yield cause.model_copy(update={"evidence": [*cause.evidence, usable], "advice": [*cause.advice, USABLE_ONLY]})
    elif counts.mismatched_ids:
        yield Cause.of(Code.IDS_DIFFER, [usable], [USABLE_ONLY], count=counts.mismatched_ids)
    in_part = counts.is_measured_in_part
    for code, of_pi, of_mu in (
        (Code.MISSING_LOGPROBS, counts.missing_pi, counts.missing_mu),
        (Code.NONFINITE, counts.nonfinite_pi, counts.nonfinite_mu),
        (Code.POSITIVE_LOGPROBS, counts.positive_pi, counts.positive_mu),
    ):
        for side, count in zip(SIDES, (of_pi, of_mu), strict=True):
            if count and not (in_part and code is Code.MISSING_LOGPROBS):
                yield Cause.of(code, [usable], count=count, side=side)
    if counts.void_checks and not in_part:
        yield Cause.of(Code.VOID_CHECKS, [usable], count=counts.void_checks)
    if not counts.num_tokens:
        yield Cause.of(Code.NO_DATA)


_SIDES: Final = ("pi", "mu")
_NAMES: Final = {"pi": "the training path", "mu": "the engine"}


def where_equal(copies: CopyTotals) -> str:
    """`at 600 of 632 tokens below -0.01 (94 %)`: where two columns are equal bit for bit, of those that decide it."""
    telling, equal = int(copies.telling), int(copies.equal)
    tokens = f"{write_count(telling)} tokens below -{CERTAIN_NATS:g}"
    if equal == telling:
        return f"at all {tokens}"
    return f"at {write_count(equal)} of {tokens} ({write_share(equal, telling)})"


def copy_of(pair: TokenPair, dtypes: tuple[Dtype, Dtype], *, are_identified: bool) -> CopyTotals | None:
    """Where the pair's legs are equal, if they are taken for one and its copy; else None. dtypes: of pi and of mu."""
    if are_identified or not any(dtype.rounds_coarsely for dtype in dtypes):
        return None
    copies = CopyTotals.of(pair.log_pi, pair.log_mu)
    return copies if copies.is_copy else None


def source_of_reference(
    pair: TokenPair, dtypes: tuple[Dtype, Dtype], *, are_identified: bool
) -> tuple[str, CopyTotals] | None:
    """The side whose 16-bit log-probs the reference holds, `pi` or `mu`, and where; None where it is no copy.

    A reference in FP32 rounds otherwise than 16 bits do. dtypes: of pi and of mu.
    """
    if are_identified or pair.log_ref is None:
        return None
    for side, leg, dtype in zip(_SIDES, (pair.log_pi, pair.log_mu), dtypes, strict=True):
        copies = CopyTotals.of(pair.log_ref, leg)
        if dtype.rounds_coarsely and copies.is_copy:
            return side, copies
    return None


def copied_leg(case: Case) -> Iterator[Cause]:
    """The reason not to trust a pair that may be one leg twice."""
    if case.disagreement is None:
        return
    dtypes, pair = (case.train_dtype, case.infer_dtype), case.disagreement.pair
    copies = copy_of(pair, dtypes, are_identified=case.legs_are_identified)
    if copies is not None:
        yield Cause.of(
            Code.COPIED_LEG,
            ["neither leg says which side of which run it is, as those of this version do"],
            legs="The two sides",
            where=where_equal(copies),
        )
        return
    source = source_of_reference(pair, dtypes, are_identified=case.legs_are_identified)
    if source is not None:
        side, copies = source
        yield Cause.of(
            Code.COPIED_LEG,
            [f"FP32 rounds otherwise than {dtypes[_SIDES.index(side)].upper()}, so no reference can equal that side"],
            [
                "Leave the reference out (a log: import it without --ref-is-fp32), or record that of the same policy "
                "in FP32; if the side itself computed in FP32, give that as its dtype."
            ],
            legs=f"The reference and {_NAMES[side]}",
            where=where_equal(copies),
        )


def with_equal_legs(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with what is to be known where the sides are equal bit for bit."""
    if case.disagreement is None or verdict.kind == "broken":
        return verdict
    copies = CopyTotals.of(case.disagreement.pair.log_pi, case.disagreement.pair.log_mu)
    if not copies.is_copy:
        return verdict
    how = (
        "each leg says that it was computed by its own side"
        if case.legs_are_identified
        else "and no leg says which side computed it, so that one may be a copy"
    )
    sentence = f"both sides are equal bit for bit {where_equal(copies)}, as the same kernels give: {how}"
    return verdict.model_copy(update={"evidence": [*verdict.evidence, sentence]})
