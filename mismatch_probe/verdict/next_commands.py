"""Which command goes on from what a verdict says, where one does."""

from typing import Final

from mismatch_probe.dtypes import Dtype
from mismatch_probe.inert import words_line
from mismatch_probe.records.summary import Verdict
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.codes import Code

RUN: Final = "RUN"
"""Stands for the folder of the run, which the advice is stored in and can be moved with."""

GO_ON: Final = f"mismatch-probe compare --out {RUN} --resume"
ADD_EXACT_PAIR: Final = f"{GO_ON} --dtype fp32"
EXPLAIN: Final = f"mismatch-probe explain {RUN} --model CHECKPOINT"
HEADROOM: Final = f"mismatch-probe headroom --run {RUN}"

_TRY_CAUSES: Final = (
    "With the checkpoint that sampled these responses, each suspected cause is computed and set against the log"
)

_SCORE_IN_FP32: Final = (
    "FP32 against FP32 decides between precision and a bug: score the same token ids in FP32 on both sides, and "
    "compare these"
)

_SERVER_BESIDE_ENGINE: Final = (
    "Beside the engine here, in the same dtype and in FP32, what is the server's own shows: other weights than the "
    "checkpoint's, quantised ones, another dtype than was said"
)

_INSIDE_THE_MODEL = (Code.UNEXPLAINED, Code.ONE_SIDED_DTYPE, Code.POSITIONS, Code.STALE_WEIGHTS)
"""Bugs whose place is a module. The others lie in ids, prompts, labels and sampling, where no module is at fault."""


def with_next_commands(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with the commands that look closer added to its advice."""
    return verdict.model_copy(update={"advice": [*verdict.advice, *_commands(case, verdict)]})


def localize_command(train: str, infer: str) -> str:
    """By the dtypes, or by the names of sides that have settings of their own."""
    if not {train, infer} <= set(Dtype):
        sides = words_line("--pair", f"{train}/{infer}")
    else:
        sides = f"--dtype {train}" if train == infer else f"--train-dtype {train} --infer-dtype {infer}"
    return f"mismatch-probe localize --run {RUN} {sides}"


def _commands(case: Case, verdict: Verdict) -> list[str]:
    if not case.has_run:
        return [_SCORE_IN_FP32] if verdict.kind == "undecided" else []
    if case.is_logged:
        return [] if verdict.kind in ("clean", "broken") else [f"{_TRY_CAUSES}: `{EXPLAIN}`"]
    if verdict.kind == "undecided" and case.is_of_log:
        return [f"{_TRY_CAUSES}: `{EXPLAIN}`"]
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
    if verdict.kind == "bug" and verdict.code in _INSIDE_THE_MODEL:
        shown_in_fp32 = case.exact is not None and case.exact.settled
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
