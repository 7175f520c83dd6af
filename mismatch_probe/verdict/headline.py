"""The whole run in one short answer, and the command that goes on from it."""

import math
from collections.abc import Sequence
from typing import Final

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import DEFAULT_NUM_PROMPTS
from mismatch_probe.dtypes import Dtype, sides_label
from mismatch_probe.inert import words_line
from mismatch_probe.notation import shown_number, write_estimate, write_many, write_number, write_percent, write_value
from mismatch_probe.records.summary import Contrast, PairSummary, SettingFinding, SettingsContrast, Verdict
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.growth import course_words, growth_sentence, last_steps, levels_of, step_to_explain
from mismatch_probe.verdict.rounding import known_differences, of_few_tokens
from mismatch_probe.verdict.settings import rounding_words, settings_answer

KL_LIMIT: Final = 1e-3
KL_LIMIT_NAME: Final = "NeMo-RL's limit"
"""Of the KL (k3) per token in nats, as NeMo-RL recommends it."""

WIDE: Final = 2.0
"""An interval of a KL is wide where its upper bound is at least so many times its lower one."""

CHECKPOINT_TELLS: Final = "the checkpoint would tell whether it is a bug"
CHECKPOINT_TELLS_CAUSE: Final = "the checkpoint would tell the cause"
CHECKPOINTS_TELL: Final = "the checkpoints before and after it would tell whether it is a bug"

_SEVERITY = ("broken", "bug", "undecided", "precision", "clean")
_NO_MEASURE_OF_PRECISION = ("broken", "bug")
_MOST_NAMED: Final = 2
_OPENINGS = {"broken": "Broken data", "bug": "Bug", "undecided": "Undecided"}
_SAID_BY_THE_OPENING = ("The data is broken: ", "This is a bug, not precision: ", "The two sides are set differently: ")


def overall(pairs: Sequence[PairSummary]) -> Verdict:
    """The verdict of the run, which is that of its foremost pair."""
    return foremost(pairs).verdict


def foremost(pairs: Sequence[PairSummary]) -> PairSummary:
    """Of the pairs of the most serious kind the one of the largest KL; of broken data the first."""
    return most_serious_first(pairs)[0]


def most_serious_first(pairs: Sequence[PairSummary]) -> list[PairSummary]:
    """Pairs of one kind by their KL, the largest first; broken ones, whose numbers mean nothing, in their own order."""
    return sorted(pairs, key=lambda pair: (_SEVERITY.index(pair.verdict.kind), -_kl(pair)))


def measures_precision(verdict: Verdict) -> bool:
    """Whether the pair's numbers say what its formats do, so that they can be so many times those of another."""
    return verdict.kind not in _NO_MEASURE_OF_PRECISION


def headline(
    pairs: Sequence[PairSummary], contrasts: Sequence[Contrast], preflight: Sequence[SettingFinding] = ()
) -> str:
    """What an engineer reads first: whether it is a bug, its cause by name, or how large it is and what is closer; of a
    log whose KL grows over its steps that.
    """
    pair = foremost(pairs)
    if grows(pair):
        return _of_growth(pair, pairs, contrasts, preflight)
    return f"{_of_mean(pair, pairs, contrasts, preflight)}{few_prompts_sentence(pair)}"


def grows(pair: PairSummary) -> bool:
    """Whether the growth of its KL over the steps of a log leads the answer."""
    return pair.growth is not None and pair.verdict.kind not in ("clean", "broken")


def _of_growth(
    pair: PairSummary, pairs: Sequence[PairSummary], contrasts: Sequence[Contrast], preflight: Sequence[SettingFinding]
) -> str:
    """The growth, how large it became, and the verdict, which is on all steps together."""
    assert pair.growth is not None
    grew = growth_sentence(pair.growth, against_limit(pair.growth.last))
    verdict, knows_last = pair.verdict, pair.growth.last_abs_diff is not None
    if verdict.kind == "undecided" and verdict.code == Code.UNEXPLAINED:
        size = f"{clause(verdict.sentence)}; " if knows_last else ""
        return f"{grew}. Undecided: {size}{_what_would_decide(pair)}{_but_known(pairs, preflight)}."
    if verdict.code == Code.BEYOND_FORMAT and last_steps(pair.growth) in verdict.sentence:
        tells = f"; {CHECKPOINT_TELLS_CAUSE}" if pair.is_logged else ""
        return f"{grew}. Bug: {clause(verdict.sentence)}{tells}{_but_known(pairs, preflight)}."
    return f"{grew}. Over all steps: {_of_mean(pair, pairs, contrasts, preflight)}"


def _of_mean(
    pair: PairSummary, pairs: Sequence[PairSummary], contrasts: Sequence[Contrast], preflight: Sequence[SettingFinding]
) -> str:
    verdict = pair.verdict
    if verdict.kind == "clean":
        sentence = _without_label(verdict.sentence, "Clean: ").removesuffix(".")
        return f"No bug. {sentence}{_but_known(pairs, preflight)}."
    if verdict.code == Code.SETTINGS and pair.settings_contrast is not None:
        return f"{_of_settings(pair, pair.settings_contrast, pairs)}{_but_known(pairs, preflight)}."
    if verdict.code == Code.ILL_CONDITIONED and verdict.kind == "precision" and pair.conditioning is not None:
        fp32 = write_estimate(pair.conditioning.error_fp32).value
        conditioning = f"FP32 itself is {fp32} nats a token from FP64 on this checkpoint"
        return f"No bug. {conditioning}; {_what_costs(pair)} KL {_kl_and_limit(pair)}{_but_known(pairs, preflight)}."
    if verdict.kind == "precision":
        cost = f"{_what_costs(pair)} KL {_kl_and_limit(pair)}{_closer(pair, contrasts)}"
        return f"No bug. {cost}{_but_known(pairs, preflight)}."
    if verdict.kind == "undecided" and verdict.code == Code.UNEXPLAINED and "kl_k3" in pair.metrics:
        differ = f"{_words_of_difference(pair)} by KL {_kl_and_limit(pair)}; {_what_would_decide(pair)}"
        return f"Undecided: {differ}{_closer(pair, contrasts)}{_but_known(pairs, preflight)}."
    opening, causes = _OPENINGS[verdict.kind], known_causes(verdict, preflight)
    others = [other for other in pairs if other is not pair and other.verdict.kind == verdict.kind]
    if len(others) + 1 < len(pairs):
        opening += f" in {_name_of_pair(pair)}" + (f" and {len(others)} more" if others else "")
    return f"{opening}: {_first_few(causes) or clause(verdict.sentence)}."


def known_causes(verdict: Verdict, preflight: Sequence[SettingFinding]) -> list[SettingFinding]:
    """The settings that differ between the sides and that a bug's verdict rests on, with those that come to it."""
    if verdict.kind != "bug":
        return []
    differing = [finding for finding in preflight if finding.level in ("error", "warning")]
    foremost_of_all = "\n".join([verdict.sentence, *verdict.evidence])
    rests_on = [finding for finding in differing if finding.what in foremost_of_all]
    secondary = [finding for finding in differing if any(finding.what in cause.sentence for cause in verdict.also)]
    return [*rests_on, *(finding for finding in secondary if finding not in rests_on)] if rests_on else []


def _first_few(findings: Sequence[SettingFinding]) -> str:
    """The first few, one after the other."""
    more = len(findings) - _MOST_NAMED
    names = "; ".join(finding.what for finding in findings[:_MOST_NAMED])
    return f"{names}; and {more} more" if more > 0 else names


def _but_known(pairs: Sequence[PairSummary], preflight: Sequence[SettingFinding]) -> str:
    differences = known_differences([pair.verdict for pair in pairs], preflight)
    return f"; but {_first_few(differences)}" if differences else ""


def against_limit(kl: Estimate | float) -> str:
    """`7 % of NeMo-RL's limit`, or `12 times NeMo-RL's limit`; of an estimate by the digits that are shown of it."""
    share = (shown_number(kl) if isinstance(kl, Estimate) else kl) / KL_LIMIT
    if share < 0.01:
        return f"less than 1 % of {KL_LIMIT_NAME}"
    times = float(f"{share:.3g}")
    return f"{write_percent(share)} of {KL_LIMIT_NAME}" if share <= 1 else f"{times:,.15g} times {KL_LIMIT_NAME}"


def closest(pair: PairSummary, contrasts: Sequence[Contrast]) -> Contrast | None:
    """By how many times the KL of `pair` exceeds another pair's, where that is sure of any."""
    candidates = (
        contrast
        for contrast in contrasts
        if contrast.metric == "kl_k3"
        and contrast.of == _key(pair)
        and contrast.ratio.low is not None
        and contrast.ratio.low > 1
    )
    return max(candidates, key=lambda contrast: contrast.ratio.value, default=None)


def _kl(pair: PairSummary) -> float:
    """Of a token, in nats; below any other where it means nothing or could not be had."""
    if pair.verdict.kind == "broken" or "kl_k3" not in pair.metrics:
        return -math.inf
    return pair.metrics["kl_k3"].value


def _of_settings(pair: PairSummary, contrast: SettingsContrast, pairs: Sequence[PairSummary]) -> str:
    """What the settings cost, whether rounding explains it, and what stays open."""
    answer = f"{settings_answer(pair, contrast)}{rounding_words(contrast)}"
    if pair.verdict.kind == "precision":
        return f"No bug. {_capital(answer)}"
    if not contrast.is_rounding:
        what_lacks = "" if contrast.is_rounding is False else "; FP32 was not run with it"
        return f"Undecided: {answer}{what_lacks}"
    baseline = next((other for other in pairs if (other.train, other.infer) == contrast.counterpart), pair)
    return (
        f"{_capital(answer)}; what {_name_of_pair(baseline)} itself costs is undecided: {_what_would_decide(baseline)}"
    )


def _what_costs(pair: PairSummary) -> str:
    if pair.verdict.code == Code.ROUTING:
        return f"Experts chosen otherwise by rounding in {_name_of_pair(pair)} cost"
    if pair.is_logged:
        return "Rounding of the log's sides costs"
    return f"{_name_of_pair(pair)} rounding costs"


def _kl_and_limit(pair: PairSummary) -> str:
    kl = pair.metrics["kl_k3"]
    levels = levels_of(pair.steps) if pair.growth is None else None
    texts = {row.step: write_value(row.metrics["kl_k3"]) for row in pair.steps if "kl_k3" in row.metrics}
    course = "" if levels is None else f", {course_words(levels, texts)}"
    return f"{write_estimate(kl).value} a token, {against_limit(kl)}{of_few_tokens(pair.few_tokens)}{course}"


_FEW_PROMPTS: Final = 8
"""Fewer bound nothing well, whatever the interval that they have."""


def few_prompts_sentence(pair: PairSummary) -> str:
    """That the prompts are few, fewer than by default: with the interval of a KL that the headline has, where that is
    wide or cannot be had; of very few ones always. How much narrower more prompts make it depends on tokens that few
    prompts do not show.
    """
    kl = pair.metrics.get("kl_k3")
    if kl is None or kl.num_prompts is None or pair.verdict.kind in ("broken", "clean"):
        return ""
    prompts, interval = f"{write_many(kl.num_prompts, 'prompt')} only", write_estimate(kl).interval
    is_few = kl.num_prompts < _FEW_PROMPTS
    if pair.verdict.kind == "bug":
        return f" {prompts}: whether others show it too is open." if is_few and pair.is_logged else ""
    if kl.num_prompts >= DEFAULT_NUM_PROMPTS:
        return ""
    if kl.low is None or kl.high is None or not interval.startswith("["):
        return f" {prompts}, too few to bound the KL."
    if kl.high < WIDE * kl.low and not is_few:
        return ""
    what_narrows = "a log of more prompts narrows" if pair.is_logged else "more prompts narrow"
    return f" {prompts}: the KL is in {interval}; {what_narrows} it."


def _words_of_difference(pair: PairSummary) -> str:
    return "the log's sides differ" if pair.is_logged else f"{_name_of_pair(pair)} differs from the engine"


def _what_would_decide(pair: PairSummary) -> str:
    if pair.update_ratio is not None:
        return f"{update_words(pair.update_ratio)}; {CHECKPOINTS_TELL}"
    if pair.is_logged:
        return CHECKPOINT_TELLS
    return "no FP32 pair was run to rule out a bug"


def update_words(ratio: float) -> str:
    """How the deviation changes where a log records that the weights do. ratio: its level before over that after."""
    first, second = ("before", "after") if ratio > 1 else ("after", "before")
    times = write_number(max(ratio, 1 / ratio))
    return f"d is {times} times as large {first} the last recorded change of the weights as {second} it"


def _closer(pair: PairSummary, contrasts: Sequence[Contrast]) -> str:
    best = closest(pair, contrasts)
    if best is None:
        return ""
    ratio = write_estimate(best.ratio)
    times = f"{ratio.interval} times closer" if ratio.bounds else f"times closer {ratio.interval}".strip()
    return f"; {best.over.upper()} is {ratio.value} {times}"


def clause(sentence: str) -> str:
    """A sentence as it goes on behind a colon."""
    for opening in _SAID_BY_THE_OPENING:
        sentence = _without_label(sentence, opening)
    is_word = sentence[1:2].islower() or sentence[1:2] == " "
    return (sentence[:1].lower() + sentence[1:] if is_word else sentence).removesuffix(".")


def _without_label(sentence: str, label: str) -> str:
    rest = sentence.removeprefix(label)
    return rest if rest == sentence else _capital(rest)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _key(pair: PairSummary) -> str:
    return pair.train if pair.train == pair.infer else f"{pair.train}/{pair.infer}"


def _name_of_pair(pair: PairSummary) -> str:
    return sides_label(pair.train, pair.infer)


RUN: Final = "RUN"
"""Stands for the folder of the run, which the advice is stored in and can be moved with."""

GO_ON: Final = f"mismatch-probe compare --out {RUN} --resume"
ADD_EXACT_PAIR: Final = f"{GO_ON} --dtype fp32"
EXPLAIN: Final = f"mismatch-probe explain {RUN} --model CHECKPOINT"
OTHER_WEIGHTS: Final = "--weights VERSION=FOLDER"


def explain_command(step: int | None) -> str:
    """Of all steps of a log, or of the one whose weights the checkpoint has."""
    return EXPLAIN if step is None else f"{EXPLAIN} --step {step}"


HEADROOM: Final = f"mismatch-probe headroom --run {RUN}"


LOG_ENTROPY: Final = (
    "Without the checkpoint one more column can show a temperature on one side, which these columns cannot: pi's "
    "entropy at each token, in nats (`entropy` in the plain format)"
)

_SCORE_IN_FP32: Final = (
    "FP32 against FP32 decides between precision and a bug: score the same token ids in FP32 on both sides, and "
    "compare these"
)

_SERVER_BESIDE_ENGINE: Final = (
    "The engine here, in the same dtype and in FP32, shows what only the server does: weights other than the "
    "checkpoint's, quantised weights, another dtype than was declared"
)


def with_next_commands(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with the commands that look closer added to its advice; the one that decides comes first."""
    commands = _commands(case, verdict)
    is_open = verdict.kind == "undecided" and case.growth is None
    advice = [*commands, *verdict.advice] if is_open else [*verdict.advice, *commands]
    return verdict.model_copy(update={"advice": advice})


def localize_command(train: str, infer: str) -> str:
    """By the dtypes, or by the names of sides that have settings of their own."""
    if not {train, infer} <= set(Dtype):
        sides = words_line("--pair", f"{train}/{infer}")
    else:
        sides = f"--dtype {train}" if train == infer else f"--train-dtype {train} --infer-dtype {infer}"
    return f"mismatch-probe localize --run {RUN} {sides}"


def _try_causes(case: Case) -> str:
    step = case.last_step if case.growth is None else step_to_explain(case.growth)
    if case.update_ratio is not None:
        return (
            "With the checkpoint after the last recorded change of the weights, and the one before it as --weights, "
            "each suspected cause is computed and each response is compared part by part: "
            f"`{explain_command(step)} {OTHER_WEIGHTS}`"
        )
    responses = "these responses" if step is None else f"the responses of step {step}"
    return (
        f"With the checkpoint that sampled {responses}, each suspected cause is computed and compared with the log: "
        f"`{explain_command(step)}`"
    )


def _commands(case: Case, verdict: Verdict) -> list[str]:
    if not case.has_run:
        return [_SCORE_IN_FP32] if verdict.kind == "undecided" else []
    if case.is_logged:
        if verdict.kind in ("clean", "broken"):
            return []
        lacks_entropy = case.disagreement is not None and case.disagreement.pair.entropy_pi is None
        is_open = verdict.kind == "undecided" and verdict.code == Code.UNEXPLAINED
        return [_try_causes(case), *([LOG_ENTROPY] if is_open and lacks_entropy else [])]
    if verdict.kind == "undecided" and verdict.code == Code.ILL_CONDITIONED:
        return []
    if verdict.kind == "undecided" and case.is_of_log:
        return [_try_causes(case)]
    if verdict.kind == "undecided" and case.takes_dtypes:
        command = ADD_EXACT_PAIR if case.is_of_dtypes else f"{GO_ON} {words_line(*case.exact_sides)}"
        if case.is_of_server:
            return [f"{_SERVER_BESIDE_ENGINE}: `{command}`"]
        return [f"FP32 against FP32 decides between precision and a bug: `{command}`"]
    if verdict.kind == "undecided":
        return [
            "FP32 against FP32 decides between precision and a bug, and these responses are another run's: give both "
            "runs that this one was made from an FP32 pair (compare --resume --dtype fp32), and rescore into a new "
            "folder."
        ]
    if verdict.code == Code.BEYOND_FORMAT and case.takes_dtypes:
        command = ADD_EXACT_PAIR if case.is_of_dtypes else f"{GO_ON} {words_line(*case.exact_sides)}"
        return [f"FP32 against FP32 shows causes that 16 bits hide: `{command}`"]
    if not case.can_be_looked_into:
        return []
    if verdict.kind == "bug" and Code.by_name(verdict.code).entry.is_in_the_model:
        shown_in_fp32 = case.exact is not None and case.exact.is_settled
        train, infer = case.exact_name if shown_in_fp32 and case.exact_name else case.name
        return [f"Find the module that it enters at: `{localize_command(train, infer)} --modules`"]
    if verdict.kind != "precision":
        return []
    has_bf16 = Dtype.BF16 in (case.train_dtype, case.infer_dtype)
    commands = []
    if has_bf16 or verdict.advice or verdict.code == Code.ROUTING:
        modules = " --modules" if verdict.code == Code.ROUTING else ""
        command = f"{localize_command(*case.name)}{modules}"
        commands.append(f"See which part it comes from, and what higher precision of it would remove: `{command}`")
    if has_bf16 and case.fp16_refused is not None:
        commands.append(f"FP16 is not open to this checkpoint here: {case.fp16_refused}")
    elif has_bf16 and Dtype.FP16 not in case.left_out:
        commands.append(f"Before a switch to FP16, see whether the checkpoint fits: `{HEADROOM}`")
    return commands
