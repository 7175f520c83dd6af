"""What `explain`, `localize` and `headroom` found of a run after it was judged, in its verdicts and its headline.

What is newer wins, and each sentence says which command it rests on.
"""

import re
from collections.abc import Sequence
from typing import Final

from mismatch_probe.causes.comparison import Code
from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.config.model import DEFAULT_NUM_PROMPTS
from mismatch_probe.config.sides import LOG_SIDE
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import capital, join_names, write_estimate, write_many, write_number
from mismatch_probe.records.examinations import Audit, Headroom
from mismatch_probe.records.findings import Document, Explanation, Localization, SideExplanation, Suspect
from mismatch_probe.records.summary import Cause, PairSummary, Summary, Verdict
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.zeros import MOST_LEFT_OUT_OF_A_PASS
from mismatch_probe.verdict.growth import step_to_explain
from mismatch_probe.verdict.headline import (
    CHECKPOINT_TELLS,
    CHECKPOINT_TELLS_CAUSE,
    CHECKPOINTS_TELL,
    HEADROOM,
    LOG_ENTROPY,
    OTHER_WEIGHTS,
    explain_command,
    few_prompts_sentence,
    foremost,
    grows,
    headline,
    localize_command,
    overall,
)

_NOTHING_COMPUTED: Final = (Code.UNEXPLAINED, Code.NOT_REPEATABLE)
_FURTHER: Final = 1.5
"""Times as far from the checkpoint as the other side; two right sides err alike."""
_SIDES: Final = {"mu": "The engine", "pi": "The training path"}
_GRAVEST_FIRST: Final = ("broken", "bug", "undecided", "precision", "clean")
BY_EXPLAIN: Final = "explain, with the checkpoint: "
_BY_LOCALIZE: Final = "localize, inside both sides: "
_WHAT_CHECKPOINT_TELLS: Final = {
    "undecided": "no cause that was computed from the checkpoint explains it (explain)",
    "broken": "too many log-probs are missing to tell by the checkpoint (explain)",
}
_FITS: Final = {
    HeadroomCode.FITS: "the checkpoint fits FP16",
    HeadroomCode.FITS_WITH_LOSS_SCALE: "the checkpoint fits FP16 with a loss scale",
    HeadroomCode.FITS_EXCEPT: "the checkpoint fits FP16 except some modules",
    HeadroomCode.GRADIENTS_NOT_MEASURED: "weights and activations fit FP16 and gradients were not measured",
    HeadroomCode.DOES_NOT_FIT: "the checkpoint does not fit FP16",
}
_OPEN_FIRST: Final = {
    "broken": "until the data is sound",
    "bug": "until the bug is fixed",
    "undecided": "until a bug is ruled out",
}
_NO_GAIN_UP_TO: Final = 2.0
"""Times closer in KL at the most that are no reason to change the dtype, where the interval reaches 1 as well."""
_TOO_FEW: Final = "too few to tell whether it is closer"
MORE_PROMPTS: Final = (
    f"Whether FP16 is closer takes more prompts: {DEFAULT_NUM_PROMPTS} by default, more with --num-prompts and a "
    "source that has them."
)


def with_findings(summary: Summary, documents: Sequence[Document]) -> Summary:
    """The summary with verdicts and headline of all that is known of the run; `documents` lie in the same folder.

    Twice is as once.
    """
    if not documents:
        return summary
    pairs = [pair.model_copy(update={"verdict": _verdict_of_pair(pair, documents)}) for pair in summary.pairs]
    full = summary.model_copy(update={"pairs": pairs, "verdict": overall(pairs)})
    text = headline_of(full, documents)
    if any(_TOO_FEW in sentence for sentence in _whether_fp16(full, documents)):
        first = foremost(pairs)
        advice = list(dict.fromkeys([MORE_PROMPTS, *first.verdict.advice]))
        advised = first.model_copy(update={"verdict": first.verdict.model_copy(update={"advice": advice})})
        pairs = [advised if pair is first else pair for pair in pairs]
    return full.model_copy(update={"pairs": pairs, "verdict": overall(pairs), "headline": text})


def headline_of(summary: Summary, documents: Sequence[Document]) -> str:
    """What an engineer reads first of a summary whose verdicts have what is filed, and on what it rests.

    Whether to train in FP16 leads where that was examined, unless a bug, broken data or a growing KL comes first.
    """
    pair = foremost(summary.pairs)
    text, explanation = headline(summary.pairs, summary.contrasts, summary.preflight), explanation_of(pair, documents)
    few_prompts = few_prompts_sentence(pair) if text.endswith(few_prompts_sentence(pair)) else ""
    text = text.removesuffix(few_prompts)
    if explanation is not None:
        of_both = [CHECKPOINTS_TELL] if explanation.settings.weights else []
        for would_tell in (CHECKPOINT_TELLS, CHECKPOINT_TELLS_CAUSE, *of_both):
            text = text.replace(would_tell, _what_checkpoint_tells(explanation) or would_tell)
    answer = [text, *_sentences_behind(pair, documents), *([few_prompts.strip()] if few_prompts else [])]
    on_fp16 = _whether_fp16(summary, documents)
    waits = pair.verdict.kind in ("broken", "bug") or grows(pair)
    return " ".join([*answer, *on_fp16] if waits else [*on_fp16, *answer])


def _what_checkpoint_tells(explanation: Explanation) -> str:
    """Which side departs from the checkpoint, and how far, where the other one is as declared; empty where the verdict
    is no open one.
    """
    words = _WHAT_CHECKPOINT_TELLS.get(explanation.verdict.kind, "")
    sound = [side for side in explanation.sides if _is_as_declared(side)]
    open_sides = [side for side in explanation.sides if side.trials and side.verdict.kind == "undecided"]
    if explanation.verdict.kind != "undecided" or len(sound) != 1 or len(open_sides) != 1:
        return words
    times = write_number(open_sides[0].trials[0].residual_floors)
    return (
        f"{_SIDES[open_sides[0].side].lower()} lies {times} times as far from the checkpoint as rounding, by no cause "
        f"that was computed, and {_SIDES[sound[0].side].lower()} is as declared (explain)"
    )


def _whether_fp16(summary: Summary, documents: Sequence[Document]) -> list[str]:
    """One sentence on training in FP16, where `headroom` examined the checkpoint: yes, no or undecided, and why.

    Yes where the checkpoint fits, no bug is open and FP16 surely is closer than BF16; no where it does not fit, the
    engine refuses FP16 or it gains nothing, whatever else is open.
    """
    document = next((document for document in documents if isinstance(document, Headroom)), None)
    if document is None:
        return []
    fits = f"{_FITS[document.verdict.code]} (headroom)"
    if document.verdict.code in (HeadroomCode.DOES_NOT_FIT, HeadroomCode.FITS_EXCEPT):
        return [f"Train in FP16: no, {fits}."]
    if Dtype.FP16 in summary.left_out or summary.fp16_refused is not None:
        return ["Train in FP16: no, the engine refuses this checkpoint in FP16."]
    if document.activations is None:
        return ["Train in FP16: undecided, headroom looked at the weights alone; they fit FP16."]
    if document.verdict.code == HeadroomCode.GRADIENTS_NOT_MEASURED:
        return [
            "Train in FP16: undecided, headroom's responses leave next to no gradient to measure; weights and "
            "activations fit FP16."
        ]
    kind, times = overall(summary.pairs).kind, _times_closer(summary)
    if kind in _OPEN_FIRST:
        return [f"Train in FP16: undecided {_OPEN_FIRST[kind]}, though {fits}."]
    if times is None:
        return [f"Train in FP16: undecided without a pair in BF16 and one in FP16, though {fits}."]
    if times.low is not None and times.low > 1:
        return [f"Train in FP16: yes, {fits}."]
    if times.high is None or times.high > _NO_GAIN_UP_TO:
        few = "the prompts are" if times.num_prompts is None else f"{write_many(times.num_prompts, 'prompt')} are"
        return [f"Train in FP16: undecided, {few} {_TOO_FEW}, though {fits}."]
    return [f"Train in FP16: no, it shows no gain over BF16 here, though {fits}."]


def _times_closer(summary: Summary) -> Estimate | None:
    """The ratio of the KL of BF16 to that of FP16; None where one of both was not run."""
    of_kl = (each for each in summary.contrasts if each.metric == "kl_k3")
    return next((each.ratio for each in of_kl if each.of == Dtype.BF16 and each.over == Dtype.FP16), None)


def headroom_words(documents: Sequence[Document]) -> str:
    """`the checkpoint fits FP16 with a loss scale`; empty where that was not examined."""
    return next((_FITS[document.verdict.code] for document in documents if isinstance(document, Headroom)), "")


def localization_of(pair: PairSummary, documents: Sequence[Document]) -> Localization | None:
    """What was found inside both sides of a pair."""
    names = (pair.train, pair.infer)
    return next((each for each in documents if isinstance(each, Localization) and each.settings.names == names), None)


def _verdict_of_pair(pair: PairSummary, documents: Sequence[Document]) -> Verdict:
    """That of the log's checkpoint or of the inside of both sides; broken data stays what it is."""
    verdict = pair.verdict
    if verdict.kind != "broken":
        explanation, localization = explanation_of(pair, documents), localization_of(pair, documents)
        if explanation is not None:
            kl = pair.metrics.get("kl_k3") if _tells_of_all(explanation, pair) else None
            verdict = _with_explanation(verdict, explanation, kl)
        if localization is not None:
            verdict = _with_localization(verdict, localization)
    commands = [_command(document) for document in documents if not isinstance(document, Audit)]
    commands += [
        f"{_command(document)} {OTHER_WEIGHTS}"
        for document in documents
        if isinstance(document, Explanation) and document.settings.weights
    ]
    advice = [each for each in verdict.advice if not any(_asks_for(command, each) for command in commands)]
    if any(isinstance(document, Explanation) for document in documents):
        advice = [each for each in advice if each != LOG_ENTROPY]
    return verdict.model_copy(update={"advice": advice})


def explanation_of(pair: PairSummary, documents: Sequence[Document]) -> Explanation | None:
    """The gravest of those of a log and of its steps; of a pair whose sampler alone was logged, that of the engine's
    side where it is a bug. None of any other pair.
    """
    explanations = [document for document in documents if isinstance(document, Explanation)]
    if not explanations or not (pair.is_logged or pair.infer == LOG_SIDE):
        return None
    gravest = min(explanations, key=lambda each: _GRAVEST_FIRST.index(each.verdict.kind))
    if pair.is_logged:
        return gravest
    mu = next((side for side in gravest.sides if side.side == "mu" and side.verdict.kind == "bug"), None)
    return None if mu is None else gravest.model_copy(update={"sides": [mu], "verdict": mu.verdict})


def _tells_of_all(explanation: Explanation, pair: PairSummary) -> bool:
    """Whether sides that are as declared leave nothing open: those of a step before the KL grew do not."""
    return pair.growth is None or explanation.step in (None, step_to_explain(pair.growth))


def _command(document: Headroom | Explanation | Localization) -> str:
    """What files such a document."""
    if isinstance(document, Headroom):
        return HEADROOM
    if isinstance(document, Explanation):
        return explain_command(document.step)
    return localize_command(*document.settings.names)


def _asks_for(command: str, advice: str) -> bool:
    return re.search(rf"`{re.escape(command)}( --modules)?`", advice) is not None


def _with_explanation(verdict: Verdict, explanation: Explanation, kl: Estimate | None) -> Verdict:
    """Sides that are as declared leave rounding alone, where nothing else showed a bug; a departure is the cause.

    Log-probs that are missing are left out of what is measured, so that they break no verdict on the others.
    """
    result = explanation.verdict
    is_sound = result.kind == "clean" or all(map(_is_as_declared, explanation.sides))
    if verdict.code in (Code.PERIOD, Code.ONSET) and (is_sound or result.code in _NOTHING_COMPUTED):
        return _with_side(verdict, explanation)
    if verdict.code == Code.BEYOND_FORMAT and result.kind == "undecided":  # rounding stays excluded
        lines = [f"{BY_EXPLAIN}{line}" for line in (result.sentence, *result.evidence)]
        advice = list(dict.fromkeys([*verdict.advice, *result.advice]))
        return verdict.model_copy(update={"evidence": _with_lines(verdict, lines), "advice": advice})
    if result.kind == "broken" and not is_sound:
        return verdict.model_copy(update={"evidence": _with_lines(verdict, [f"{BY_EXPLAIN}{result.sentence}"])})
    if is_sound:
        evidence = _with_lines(verdict, [f"{BY_EXPLAIN}{side.verdict.sentence}" for side in explanation.sides])
        if verdict.kind != "undecided" or kl is None:
            return verdict.model_copy(update={"evidence": evidence})
        cause = Cause.of(
            Code.PRECISION,
            evidence,
            verdict.advice,
            kl=write_estimate(kl).value,
            proof=", and each is as declared with its checkpoint",
        )
        return Verdict(kind="precision", also=verdict.also, **cause.model_dump())
    evidence = _with_lines(verdict, [f"{BY_EXPLAIN}{line}" for line in result.evidence])
    others = (
        [Cause.model_validate(verdict.model_dump(include=set(Cause.model_fields)))] if verdict.kind == "bug" else []
    )
    also = {cause.code: cause for cause in (*result.also, *verdict.also, *others) if cause.code != result.code}
    return result.model_copy(update={"evidence": evidence, "also": list(also.values())})


def _with_side(verdict: Verdict, explanation: Explanation) -> Verdict:
    """A fault at places of the context, which no hypothesis has, of the side that lies farther from the checkpoint."""
    sides = {side.side: side for side in explanation.sides if side.trials}
    lines = [f"{BY_EXPLAIN}{side.verdict.sentence}" for side in explanation.sides]
    sentence = verdict.sentence
    if len(sides) == 2:
        of_sides = sorted(((side, side.trials[0].residual_nats) for side in sides.values()), key=lambda each: -each[1])
        (far, largest), (_, other) = of_sides
        if largest > _FURTHER * other:
            sentence = re.sub("^(One side|The engine|The training path)", _SIDES[far.side], sentence)
            first, second = (f"{_SIDES[side.side].lower()} lies {write_number(size)} nats" for side, size in of_sides)
            lines.append(f"{BY_EXPLAIN}{first} from what the checkpoint gives, {second}")
    return verdict.model_copy(update={"sentence": sentence, "evidence": _with_lines(verdict, lines)})


def _with_lines(verdict: Verdict, lines: Sequence[str]) -> list[str]:
    """The lines before the verdict's own evidence, each once."""
    return list(dict.fromkeys([*lines, *verdict.evidence]))


def _is_as_declared(side: SideExplanation) -> bool:
    """Whether the log-probs that a side has are as declared, where no more are missing than a gate passes."""
    if side.verdict.code == Code.MISSING_LOGPROBS:
        share = side.num_missing / (side.num_tokens + side.num_missing)
        return share <= MOST_LEFT_OUT_OF_A_PASS and not side.verdict.also
    return side.verdict.kind == "clean"


def _with_localization(verdict: Verdict, localization: Localization) -> Verdict:
    """A place that errs otherwise than rounding makes a bug of what was open; none is a line of evidence."""
    if not localization.suspects:
        place = "module" if localization.modules else "block"
        line = f"{_BY_LOCALIZE}no {place} errs otherwise than rounding does"
        return verdict.model_copy(update={"evidence": list(dict.fromkeys([*verdict.evidence, line]))})
    evidence = _with_lines(verdict, [f"{_BY_LOCALIZE}{suspect.sentence}" for suspect in localization.suspects])
    if verdict.kind == "bug":
        return verdict.model_copy(update={"evidence": evidence})
    what = f"This is a bug, not precision: {join_names([_place(suspect) for suspect in localization.suspects], 4)} errs"
    return Verdict(
        kind="bug",
        code=Code.UNEXPLAINED,
        sentence=f"{what} otherwise than rounding does.",
        evidence=evidence,
        advice=["Compare that place in both implementations, from its input on."],
        also=verdict.also,
    )


def _place(suspect: Suspect) -> str:
    """`layer 5, mlp.down_proj of the engine`."""
    side = {"infer": "the engine", "train": "the training path"}[suspect.side]
    layers = f"layer{'s' if len(suspect.layers) > 1 else ''} {', '.join(map(str, suspect.layers))}, "
    return f"{layers if suspect.layers else ''}{suspect.place} of {side}"


def _sentences_behind(pair: PairSummary, documents: Sequence[Document]) -> list[str]:
    """Sentences behind the headline on the foremost pair: where a bug enters."""
    if pair.verdict.kind == "broken":
        return []
    sentences = []
    explanation = explanation_of(pair, documents)
    if explanation is not None and explanation.verdict.kind == "clean":
        of_what = "the log" if explanation.step is None else f"step {explanation.step}"
        sentences.append(f"Both sides of {of_what} are what its checkpoint and settings give (explain).")
    elif explanation is not None and explanation.verdict.kind in ("bug", "precision"):
        sentences.append("That is what explain found with the checkpoint.")
    localization = localization_of(pair, documents)
    if localization is not None and localization.suspects:
        if pair.verdict.kind == "bug" and pair.verdict.code == Code.UNEXPLAINED:
            sentences.append("That is what localize found inside both sides.")
        else:
            places = join_names([_place(suspect) for suspect in localization.suspects], 4)
            sentences.append(f"{capital(places)} errs otherwise than rounding does (localize).")
    return sentences
