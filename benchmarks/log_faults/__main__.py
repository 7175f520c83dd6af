"""Injects faults into logs of real runs and sees whether the explanation names the cause and the side.

    python -m benchmarks.log_faults [--models llama demo FOLDER] [--dtypes bf16] [--only RoPE] [--scratch FOLDER]

FOLDER is that of a real checkpoint; `--prompts`, `--samples` and `--tokens` make its log shorter or longer. Responses
and mu are vLLM's own, recorded once by the product's pipeline and kept in the scratch folder; pi is the training
path's. A fault changes what one side computed, or the line of the log. Outcomes are kept in the scratch folder as well
and not made again, and `--publish` writes all of them as a report. Of a fault that is drawn, as dropout is, `--draws`
says how many; each has a seed of its own.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.fault_lab.recording import CLEAN_DTYPES, record
from benchmarks.log_faults.bench import Bench, logged
from benchmarks.log_faults.catalogue import Fault, faults, sides
from benchmarks.log_faults.designs import DESIGNS, REAL, Design, design_of
from benchmarks.log_faults.publish import publish
from benchmarks.log_faults.sight import limit
from mismatch_probe.config.model import LoggedSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.explain.predictions import Predictions
from mismatch_probe.explain.run import explain_with
from mismatch_probe.importing.run import Log, LogSettings, import_log
from mismatch_probe.records.findings import Explanation
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.records.summary import Verdict


@dataclass(frozen=True)
class Outcome:
    """What was said of the faulty side and of the other one; a clean log has neither fault nor faulty side.

    without_checkpoint, with_reference: kind and code of the import's verdict, on the two columns alone and with that of
    the same policy in FP32 beside them. limit: of a fault that was missed, by `sight`; is_hidden: by rounding.
    size: of the log. draw: the seed of a fault that is drawn.
    """

    model: str
    dtype: str
    fault: str
    strength: str
    side: str
    outside: bool
    expected: list[str]
    codes: list[str]
    other_code: str
    sentence: str
    evidence: str
    without_checkpoint: list[str]
    with_reference: list[str]
    seconds: float
    is_hidden: bool = False
    limit: str = ""
    size: str = ""
    draw: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(DESIGNS), help=f"{', '.join(DESIGNS)}, or folders")
    parser.add_argument("--dtypes", nargs="*", type=Dtype.parse, default=CLEAN_DTYPES)
    parser.add_argument("--only", default="", help="faults whose name has this in it; clean, or nothing for all")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "log-faults")
    parser.add_argument("--draws", type=int, default=1, help="of each fault that is drawn")
    parser.add_argument("--publish", type=Path, help="folder for log-faults.md, of all outcomes that are kept")
    for name in ("prompts", "samples", "tokens"):
        parser.add_argument(f"--{name}", type=int, help=f"{getattr(REAL, name)} of a real checkpoint")
    arguments = parser.parse_args()
    size = {name: number for name in ("prompts", "samples", "tokens") if (number := getattr(arguments, name))}
    kept = arguments.scratch / "outcomes"
    kept.mkdir(parents=True, exist_ok=True)
    for model in arguments.models:
        design = replace(design_of(model), **size)
        for dtype in [each_dtype for each_dtype in design.dtypes if each_dtype in arguments.dtypes]:
            bench = prepared(model, design, dtype, arguments.scratch)
            done = {path.stem for path in kept.glob("*.json")}
            for outcome in outcomes(bench, arguments.only, done, arguments.draws):
                named = "named " if is_right(outcome) else "MISSED"
                print(
                    f"{model:10} {dtype} {named} {outcome.fault} {outcome.strength} in {outcome.side}: "
                    f"{' '.join(outcome.codes)} | other {outcome.other_code} ({outcome.seconds:.0f} s) "
                    f"{outcome.evidence} {outcome.limit}",
                    flush=True,
                )
                name = name_of(bench, outcome.fault, outcome.strength, outcome.draw)
                sized = asdict(replace(outcome, size=design.size))
                (kept / f"{name}.json").write_text(json.dumps(sized), encoding="utf-8")
    if arguments.publish:
        kept_outcomes = [
            Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(kept.glob("*.json"))
        ]
        publish([asdict(outcome) | {"right": is_right(outcome)} for outcome in kept_outcomes], arguments.publish)


def is_right(outcome: Outcome) -> bool:
    """The faulty side has one of the expected causes foremost, and the other side is as declared."""
    return outcome.codes[0] in outcome.expected and outcome.other_code == "as_declared"


def name_of(bench: Bench, fault: str, strength: str, draw: int = 0) -> str:
    """Under which an outcome is kept."""
    of_draw = f"-{draw}" if draw else ""
    return f"{bench.model}-{bench.dtype}-{fault}-{strength}{of_draw}".replace(" ", "-").replace("/", "-")


def outcomes(bench: Bench, only: str, done: set[str], draws: int = 1) -> Iterator[Outcome]:
    """Of the faults whose name has `only` in it, without those that are done."""
    with predictions_of(bench) as predictions:
        if only in "clean" and name_of(bench, "clean", "") not in done:
            yield judged(bench, predictions, None, "mu")
        for draw in range(draws):
            for number, fault in enumerate(faults(bench)):
                if only not in fault.name or (draw and not fault.is_drawn):
                    continue
                if name_of(bench, fault.name, fault.strength, draw) not in done:
                    torch.manual_seed(draw)
                    yield replace(judged(bench, predictions, fault, sides(number)), draw=draw)


def predictions_of(bench: Bench) -> AbstractContextManager[Predictions]:
    """Of the bench's responses, by its checkpoint."""
    return Predictions.open(bench.settings(), LoggedTokens.of(logged(bench.sequences, bench.mu, bench.pi)))


def judged(bench: Bench, predictions: Predictions, fault: Fault | None, side: LoggedSide) -> Outcome:
    """Predictions are shared: they depend on the responses, not on what was logged of them."""
    start = time.monotonic()
    if fault is None:
        settings, log = bench.settings(), logged(bench.sequences, bench.mu, bench.pi)
    else:
        settings, log = bench.settings(**fault.settings_given), bench.log(side, fault.make(bench))
    explanation = explain_with(predictions, settings, LoggedTokens.of(log))
    verdict, other = _by_side(explanation, side)
    seconds = time.monotonic() - start
    made = Outcome(
        model=bench.model,
        dtype=str(bench.dtype),
        fault="clean" if fault is None else fault.name,
        strength="" if fault is None else fault.strength,
        side=side,
        outside=fault is not None and fault.outside,
        expected=["as_declared"] if fault is None else [str(code) for code in fault.expected],
        codes=[verdict.code, *(cause.code for cause in verdict.also)],
        other_code=other.code,
        sentence=verdict.sentence,
        evidence=verdict.evidence[0],
        without_checkpoint=imported(log, bench.dtype),
        with_reference=imported(
            [replace(row, log_ref=ref) for row, ref in zip(log, bench.ref, strict=True)], bench.dtype
        ),
        seconds=seconds,
    )
    if fault is None or is_right(made):
        return made
    is_hidden, figures = limit(bench, fault)
    return replace(made, is_hidden=is_hidden, limit=f"{figures}; {verdict.evidence[-1]}")


def _by_side(explanation: Explanation, side: LoggedSide) -> tuple[Verdict, Verdict]:
    verdict = next(each_side.verdict for each_side in explanation.sides if each_side.side == side)
    other = next(each_side.verdict for each_side in explanation.sides if each_side.side != side)
    return verdict, other


def imported(log: Sequence[LoggedResponse], dtype: Dtype) -> list[str]:
    """Kind and code of what `import` says of the log, which has a reference where its responses do. A side that it
    takes for one that was not recorded leaves nothing to judge.
    """
    settings_given = LogSettings(train_dtype=dtype, infer_dtype=dtype, ref_is_exact=log[0].log_ref is not None)
    with tempfile.TemporaryDirectory() as folder:
        source = Log("the log", "plain", [], log, lambda: [])
        run = import_log(source, settings_given, Path(folder) / "run", lambda num_tokens: None)
        if not run.summary_path.exists():
            return ["broken", "not_recorded"]
        verdict = run.read_summary().verdict
    return [verdict.kind, verdict.code]


def prepared(model: str, design: Design, dtype: Dtype, scratch: Path) -> Bench:
    """A model with its run."""
    name = Path(model).name
    folder = design.checkpoint(scratch / "checkpoints" / name)
    run = record(
        scratch / "clean" / name,
        folder,
        design.source,
        design.dtypes,
        num_prompts=design.prompts,
        num_tokens=design.tokens,
        sampling={"samples_per_prompt": design.samples},
    )
    return Bench(name, folder, run, scratch, dtype)


if __name__ == "__main__":
    main()
