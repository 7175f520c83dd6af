"""What became of token ids that a leg was not scored on as sampled: exchanged, another prompt, cut, tokenised again."""

from collections.abc import Sequence
from dataclasses import dataclass

from mismatch_probe.records.summary import Cause
from mismatch_probe.records.tables import ids_key
from mismatch_probe.verdict.codes import Code

MOST = 0.8
"""Share of the foreign rows that must tell the same story."""


@dataclass(frozen=True)
class IdsFound:
    """Rows of a leg whose ids are not those sampled, by what they are; `leg` names it.

    exchanged: the ids of another row. other_prompt: the same response behind the prompt with its first token doubled or
    dropped. cut: the response without its last token. other_length: neither, and of another length.
    """

    leg: str
    total: int
    foreign: int
    exchanged: int
    other_prompt: int
    cut: int
    other_length: int


def examine_ids(
    leg: str,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampled: Sequence[int],
    keys: Sequence[int],
    lengths: Sequence[int],
) -> IdsFound | None:
    """What a leg was scored on; None where all is as sampled.

    sampled: the key (`ids_key`) of each sampled row; keys and lengths: those that the leg recorded of what it scored.
    """
    everyone = set(sampled)
    counts = dict.fromkeys(("exchanged", "other_prompt", "cut", "other_length"), 0)
    foreign = 0
    for prompt, response, own, key, length in zip(prompts, responses, sampled, keys, lengths, strict=True):
        if own == key and length == len(response):
            continue
        foreign += 1
        variants = (ids_key([*prompt[:1], *prompt], response), ids_key(prompt[1:], response))
        if key != own and key in everyone:
            counts["exchanged"] += 1
        elif key in variants:
            counts["other_prompt"] += 1
        elif key == ids_key(prompt, response[:-1]):
            counts["cut"] += 1
        elif length != len(response):
            counts["other_length"] += 1
    return IdsFound(leg, len(sampled), foreign, **counts) if foreign else None


def doubled_first_token(prompts: Sequence[Sequence[int]]) -> int | None:
    """The token that all prompts begin with twice; None where there is none, or only one prompt to tell by."""
    starts = {tuple(prompt[:2]) for prompt in prompts}
    first = next(iter(starts), ())
    different = {tuple(prompt) for prompt in prompts}
    return first[0] if len(starts) == 1 and len(first) == 2 and first[0] == first[1] and len(different) > 1 else None


def share_without(token_id: int, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many different prompts do not begin with the token, and how many there are."""
    different = {tuple(prompt) for prompt in prompts}
    return sum(prompt[:1] != (token_id,) for prompt in different), len(different)


def ids_cause(ids: IdsFound) -> Cause:
    """The cause that the ids alone tell, `ids_differ` where they tell none."""
    evidence = [f"{ids.foreign} of {ids.total} responses of {ids.leg} were scored on other ids than were sampled"]
    most = MOST * ids.foreign
    if ids.exchanged >= most:
        evidence.append(f"{ids.exchanged} of them carry the ids of another response")
        advice = ["Join both sides by a response id, not by order."]
        return Code.MISPAIRED.cause(evidence, advice, count=ids.exchanged, total=ids.total)
    if ids.other_prompt >= most:
        evidence.append(f"{ids.other_prompt} of them have the prompt's first token doubled or dropped")
        advice = ["Encode prompts once and pass ids on; the tokenizer's BOS and the template's must not both be added."]
        what = "one side's prompts have their first token twice, or lack it"
        return Code.PROMPT_PREFIX.cause(evidence, advice, what=what)
    if ids.other_length >= most / 2:
        evidence.append(f"{ids.other_length} of them have another number of tokens")
        advice = ["Pass the sampled token ids to the training side; text encoded again need not give the same tokens."]
        return Code.RETOKENISED.cause(evidence, advice, count=ids.foreign, total=ids.total)
    if ids.cut >= most:
        evidence.append(f"{ids.cut} of them lack the last token, such as the end of sequence")
    return Code.IDS_DIFFER.cause(evidence, ["Score exactly the sampled ids of prompt and response."], count=ids.foreign)
