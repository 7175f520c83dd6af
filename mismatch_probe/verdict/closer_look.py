"""Which command looks closer at what a verdict says, where one does."""

from typing import Final

from mismatch_probe.records.summary import Verdict
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.codes import Code

RUN: Final = "RUN"
"""Stands for the folder of the run, which the advice is stored in and can be moved with."""

_INSIDE_THE_MODEL = (Code.UNEXPLAINED, Code.ONE_SIDED_DTYPE, Code.POSITIONS, Code.STALE_WEIGHTS)
"""Bugs whose place is a module. The others lie in ids, prompts, labels and sampling, where no module is at fault."""


def with_closer_look(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, with the commands that look closer added to its advice."""
    return verdict.model_copy(update={"advice": [*verdict.advice, *_commands(case, verdict)]})


def _commands(case: Case, verdict: Verdict) -> list[str]:
    if verdict.kind == "bug" and verdict.code in _INSIDE_THE_MODEL:
        shown_in_fp32 = case.exact is not None and case.exact.settled
        dtypes = "--dtype fp32" if shown_in_fp32 else _dtypes(case)
        return [f"Find the module that it enters at: `mismatch-probe localize --run {RUN} {dtypes} --modules`"]
    if verdict.kind != "precision":
        return []
    has_bf16 = "bf16" in (case.train_dtype, case.infer_dtype)
    found = []
    if has_bf16 or verdict.advice or verdict.code == Code.ROUTING:
        modules = " --modules" if verdict.code == Code.ROUTING else ""
        command = f"mismatch-probe localize --run {RUN} {_dtypes(case)}{modules}"
        found.append(f"See which part it comes from, and what higher precision of it would remove: `{command}`")
    if has_bf16:
        found.append(f"Before a switch to FP16, see whether the checkpoint fits: `mismatch-probe headroom --run {RUN}`")
    return found


def _dtypes(case: Case) -> str:
    if case.train_dtype == case.infer_dtype:
        return f"--dtype {case.train_dtype}"
    return f"--train-dtype {case.train_dtype} --infer-dtype {case.infer_dtype}"
