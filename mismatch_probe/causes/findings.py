"""What a log shows before any number is computed from it, and whether a checkpoint fits FP16."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mismatch_probe.causes import Catalogued, CauseEntry, SeenIn, Words


class Level(StrEnum):
    """What a finding does to the numbers."""

    BROKEN = "broken"
    """None may be computed before the log is fixed."""
    MISSING = "missing"
    """The values it names were not recorded and are left out."""
    WARNING = "warning"
    """They are computed, and may mean something else than they seem to."""
    NOTE = "note"
    """They are not touched."""


@dataclass(frozen=True)
class OfLog(CauseEntry):
    """A finding of a log."""

    level: Level = Level.MISSING
    seen_in: SeenIn = SeenIn.ARRAYS
    docs: str = "docs/logs.md"


class LogCode(Catalogued):
    """What can be found in a log; a member is its code in JSON."""

    entry: OfLog

    @property
    def level(self) -> Level:
        return self.entry.level

    NO_NUMBERS = OfLog("{name} hold no number{where}: {why}", name="no_numbers")
    ALL_ZERO = OfLog("{name} are all 0{where}: {why}", name="all_zero")
    CONSTANT = OfLog("{name} are all the same number{where}: {why}", name="constant")
    COPIED = OfLog("{name} are equal to the engine's bit for bit{where}: {why}", name="copied")
    COPIED_ROWS = OfLog(
        "{name} are equal to the engine's bit for bit at all or nearly all tokens, {as_copied}, in {number} of "
        "{total} responses: they were not recorded there, and the tokens of these responses are left out{undecided}",
        name="copied_rows",
    )
    SOME_MISSING = OfLog("{name} have no number, at {share}", name="some_missing")
    SENTINELS = OfLog("{name} are {what}: such numbers are written where there is none, at {share}", name="sentinels")
    ZEROS_FILL_RESPONSES = OfLog(
        "{name} are exactly 0 at {zeros} of {total} sampled tokens{where} where the other side is far below at "
        "{refuted} of them: {why}",
        name="zeros_fill_responses",
    )
    ZEROS_FOR_MISSING = OfLog(
        "{name} are exactly 0 at {zeros} of {total} sampled tokens{where} where the other side is far below at "
        "{refuted} of them: {why}; tokens of tools belong out of the mask",
        name="zeros_for_missing",
    )
    ZEROS_UNTOLD = OfLog(
        "{name} are exactly 0 at {zeros} of {total} sampled tokens, and none is nearly 0: the engine was sure of "
        "these tokens, or they were not recorded. {why}; `score` and `explain` compute a side that shows it",
        name="zeros_untold",
        level=Level.WARNING,
    )
    WRONG_SIGN = OfLog("{name} are {what}, at {share}", name="wrong_sign", level=Level.BROKEN)
    SHIFTED = OfLog(
        "the training path's log-probs stand one token too {late} (correlation {correlations}): shift the column",
        name="shifted",
        level=Level.BROKEN,
    )
    UNRELATED = OfLog(
        "the two sides hardly go together (correlation {correlations}): other rows, other weights or other ids",
        name="unrelated",
        level=Level.WARNING,
    )
    OTHER_BASE = OfLog(
        "{columns} look like logarithms to {base}: write natural ones, that are these times ln {number} = {nats:.4f}",
        name="other_base",
        level=Level.WARNING,
    )
    BEYOND_VOCABULARY = OfLog(
        "the entropies reach {highest}, first in {at}, and a vocabulary of {size} tokens has {most} nats at most: they "
        "are in other units, or sums",
        name="beyond_vocabulary",
        level=Level.WARNING,
        variants={
            "surprisal": Words(
                "the engine's log-probs are {mean} on average, and tokens that are drawn from a vocabulary of {size} "
                "tokens have -{most} at least: they are those of other tokens, or no natural log-probs"
            )
        },
    )
    MASK_COUNTS = OfLog(
        "tokens of the responses: {sampled} sampled, {not_sampled} of tools or templates; {padding} of padding "
        "left out",
        name="mask_counts",
        level=Level.NOTE,
    )
    NO_SAMPLED_TOKENS = OfLog(
        "{number} of {total} responses have no token that counts as sampled: they are empty, or their masks are 0 "
        "throughout",
        name="no_sampled_tokens",
        level=Level.NOTE,
    )
    PADDING_AS_TOKENS = OfLog(
        "{number} responses start or end with one id over and over that has no log-prob, the first at {at}: padding is "
        "marked as sampled; fix the mask",
        name="padding_as_tokens",
        level=Level.WARNING,
    )
    CONSTANT_HEAD = OfLog(
        "{alike} of {runs} {what} begin with the same {number} under the mask ({ids}), {why}: a response prefix, or "
        "the end of a template's header, is trained as if it had been sampled; take it out of the mask",
        name="constant_head",
        level=Level.WARNING,
    )
    MASK_EDGE = OfLog(
        "the mask {how}: the token {where} has {what} in {number} of {total} places, and {others}",
        name="mask_edge",
        level=Level.WARNING,
        variants={
            "question": Words(
                "the mask {verb} {number} times with {tokens}, where the engine has exactly 0 and others as sure have "
                "a log-prob: the engine was forced to it, or it was not sampled and the mask {how}. The log cannot "
                "tell"
            ),
            "after_stop": Words(
                "the mask ends {late} late: in {number} of {total} places it goes on behind a token at which the "
                "checkpoint stops, and nothing is sampled there"
            ),
        },
    )
    DUPLICATES = OfLog(
        "{number} of {total} responses repeat another one's ids and are too improbable to be sampled twice: rows were "
        "copied, or sampled without chance",
        name="duplicates",
        level=Level.WARNING,
    )
    OUTSIDE_VOCABULARY = OfLog(
        "{at} has the token id {id}, outside the vocabulary of {size}: the log is of another model",
        name="outside_vocabulary",
        level=Level.BROKEN,
    )
    IMAGES = OfLog(
        "{number} of {total} responses hold placeholders of images ({count} tokens, id {id}): the log has no pixels, "
        "so that the checkpoint cannot compute what follows them; they are left out",
        name="images",
        level=Level.NOTE,
    )
    TURNS = OfLog(
        "trajectories of several turns: {trajectories}; all {total} turns after the first begin with the prompt and "
        "the completion of the turn before{anew}",
        name="turns",
        level=Level.NOTE,
        variants={
            "none": Words(
                "trajectories of several turns: {trajectories}; no turn follows from another, so that none can be "
                "compared with the turn before{anew}"
            )
        },
    )
    TURNS_BROKEN = OfLog(
        "{broken} of {total} turns after the first ({share}), in {trajectories} of {all_trajectories} trajectories, do "
        "not begin with the prompt and the completion of the turn before: a trainer that joins the turns scores tokens "
        "after a context from which they were not sampled. First breaks: {kinds}{marks}; the first in {first}{anew}",
        name="turns_broken",
        level=Level.WARNING,
    )
    EXPERTS = OfLog(
        "the engine's experts are recorded in {layers}, {chosen} a token, at {share} of the places that a trainer "
        "would replay{empty}",
        name="experts",
        level=Level.NOTE,
    )
    EXPERTS_MISFIT = OfLog(
        "the engine's experts have other numbers of tokens, layers or experts than the ids they belong to in {number} "
        "of {total} responses, the first in {first}: nothing of them can be replayed",
        name="experts_misfit",
        level=Level.WARNING,
    )
    EXPERTS_MISSING = OfLog(
        "the engine's experts are missing (absent, or 0 throughout) at {missing} of {total} places that a trainer "
        "would replay ({share}): it chooses its own there, or takes expert 0{first}",
        name="experts_missing",
        level=Level.WARNING,
    )
    EXPERTS_INVALID = OfLog(
        "the engine's experts have numbers that are no experts at {number} places ({share}), the first in {first}",
        name="experts_invalid",
        level=Level.WARNING,
        variants={
            "repeated": Words(
                "the engine's experts name one expert twice for a token and layer at {number} places ({share}), the "
                "first in {first}"
            )
        },
    )
    EXPERTS_SHIFTED = OfLog(
        "the engine's experts stand one token too {late}: like tokens share {own} of their experts as the rows stand, "
        "and {best} if these are shifted by one; a trainer that replays them takes each token's from its neighbour",
        name="experts_shifted",
        level=Level.WARNING,
        variants={
            "layers": Words(
                "the engine's experts are recorded in {present}, and the checkpoint has experts in {layers}: a replay "
                "by number takes them from other layers"
            )
        },
    )
    KEPT_SETS = OfLog(
        "sets that tokens were drawn from are recorded for {share} of the sampled tokens; {inside} of the sets hold "
        "their token",
        name="kept_sets",
        level=Level.NOTE,
        variants={"none": Words("the log has a column of sets that tokens were drawn from, and no token has one")},
    )
    KEPT_SETS_BROKEN = OfLog(
        "the sets that tokens were drawn from do not hold their token in {number} of {total} places ({share}){late}, "
        "the first in {first}: a trainer that renormalises over them gives the token no probability",
        name="kept_sets_broken",
        level=Level.WARNING,
        variants={
            "misfit": Words(
                "the sets that tokens were drawn from are fewer or more than the tokens in {number} of {total} "
                "responses, the first in {first}"
            )
        },
    )
    KEPT_SETS_UNUSED = OfLog(
        "the {side}'s log-probs are not those within the recorded sets: of tokens alone in their sets, whose log-prob "
        "is 0 there, {number} of {total} ({share}) have less",
        name="kept_sets_unused",
        level=Level.WARNING,
        variants={
            "mass": Words(
                "the engine's probabilities within the recorded sets do not add up to 1 in {number} of {total} sets "
                "(on average {mass}): they were not renormalised over what was kept"
            )
        },
    )
    MIXED_WEIGHTS = OfLog(
        "the weights change within {number} of {total} responses ({share}), the first in {first}: at tokens of like "
        "probability d is {times} times as large {order}",
        name="mixed_weights",
        level=Level.NOTE,
        variants={
            "level": Words(
                "the weights change within {number} of {total} responses ({share}), the first in {first}: rms d is "
                "{before} nats before the last change and {after} after it, which is no clear difference at tokens of "
                "like probability"
            ),
            "few": Words(
                "the weights change within {number} of {total} responses ({share}), the first in {first}: rms d is "
                "{before} nats before the last change and {after} after it; too few responses have the length on both "
                "sides of a change to tell whether that is a difference"
            ),
            "unmeasured": Words(
                "the weights change within {number} of {total} responses ({share}), the first in {first}; where, or "
                "the log-probs of both sides, is not recorded"
            ),
        },
    )
    HALF_WRITTEN = OfLog(
        "line {line}, the last of {file}, is cut off: the lines before it are read, and it is left out",
        name="half_written",
        level=Level.WARNING,
    )
    UNREADABLE_FILES = OfLog("{number} left out: {files}", name="unreadable_files", level=Level.WARNING)
    UNFINISHED_STEP = OfLog(
        "step {step} was not declared finished by its system: rows of it may be missing",
        name="unfinished_step",
        level=Level.WARNING,
    )
    PADDING_ROWS = OfLog(
        "rows of {file} that are copies to fill the batch up are left out: {rows} at its end",
        name="padding_rows",
        level=Level.NOTE,
    )
    EVALUATION_LEFT_OUT = OfLog(
        "{file} is of an evaluation and is left out", name="evaluation_left_out", level=Level.NOTE
    )
    NO_WEIGHT_VERSIONS = OfLog(
        "{file} has no weight versions, and the rollout dump that has them is not at {rollouts}",
        name="no_weight_versions",
        level=Level.NOTE,
    )
    UNREAD_COLUMNS = OfLog("{file} has columns that are not read: {columns}", name="unread_columns", level=Level.NOTE)


_BF16: Final = "train and sample in BF16 (--train-dtype bf16 --infer-dtype bf16)"
_MORE_RESPONSES: Final = "run headroom with a higher --num-prompts, a longer --max-new-tokens or a higher --temperature"


@dataclass(frozen=True)
class OfHeadroom(CauseEntry):
    """Whether a checkpoint fits FP16."""

    seen_in: SeenIn = SeenIn.PASSES
    docs: str = "docs/headroom.md"


class HeadroomCode(Catalogued):
    FITS = OfHeadroom(
        "The checkpoint fits FP16, weights, activations and gradients, on these responses even without a loss scale.",
        "{scale}",
        name="fits",
        variants={
            "weights": Words(
                "The weights fit FP16; activations and gradients were not looked at.",
                "run headroom without --weights-only before training in FP16",
            )
        },
    )
    FITS_WITH_LOSS_SCALE = OfHeadroom(
        "The checkpoint fits FP16, weights, activations and gradients, with a loss scale of {scales}.",
        "{scale}",
        name="fits_with_loss_scale",
    )
    FITS_EXCEPT = OfHeadroom(
        "{trouble} With {parts} in FP32 and a loss scale of {scales} it fits.",
        (_BF16, "or keep {parts} in FP32 on both sides, as was tried here on the training path"),
        name="fits_except",
        variants={
            "weights": Words(
                "The weights fit FP16 except {exceptions}; nothing was run.",
                ("run headroom without --weights-only, which tries these modules in FP32", f"or {_BF16}"),
            ),
            "no gradient": Words(
                "{trouble} With {parts} in FP32 weights and activations fit; gradients were not measured, since these "
                "responses leave next to none.",
                (_MORE_RESPONSES, f"or {_BF16}"),
            ),
        },
    )
    GRADIENTS_NOT_MEASURED = OfHeadroom(
        "Weights and activations fit FP16; gradients were not measured, since these responses leave next to none.",
        _MORE_RESPONSES,
        name="gradients_not_measured",
    )
    DOES_NOT_FIT = OfHeadroom(
        "{trouble} The checkpoint does not fit FP16.",
        _BF16,
        name="does_not_fit",
        variants={
            "damaged": Words(
                "{number} stored weights are infinite or NaN, most in {tensor}: the checkpoint is damaged in any "
                "format.",
                "download or write the checkpoint again",
            )
        },
    )
