"""What `audit` says of real servers: as declared, of another dtype, of rounded weights, behind another temperature.

    python -m benchmarks.server_audits OUT [--smollm2 build/real/smollm2] [--only 'REGEX'] [--publish]

A real `vllm` server on this machine's CPU for each model and dtype is asked by `mismatch-probe audit`; OUT has the
answers. The rounded checkpoints are made here, without the package: each linear weight of the decoder is rounded to the
nearest with a scale for each row or each group, embeddings and head are left as they are, and all is written back in
BF16, which is what a weight-only quantised server multiplies with. `--publish` prints a table of what is in OUT.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.notation import write_many, write_number
from mismatch_probe.records.examinations import Audit
from tests.servers.proxy import Proxy
from tests.servers.real_server import TAKES_WEIGHTS, RealServer, demo_checkpoint

_GREEDY: Final = ()
_SEEDED: Final = ("--temperature", "1", "--noise", "vllm-cpu", "--samples-per-prompt", "2")
_SAMPLED: Final = ("--temperature", "1", "--samples-per-prompt", "2")
_HOW: Final = {"greedy": _GREEDY, "seeded": _SEEDED, "sampled": _SAMPLED}


@dataclass(frozen=True)
class Served:
    """A checkpoint, and how it is served."""

    model: str
    rounding: str = ""
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.model, self.dtype, self.rounding)))

    @property
    def words(self) -> str:
        rounded = f", {_ROUNDINGS[self.rounding].words}" if self.rounding else ""
        return f"{'BF16' if self.dtype == 'bfloat16' else 'FP32'}{rounded}"


@dataclass(frozen=True)
class Rounding:
    words: str
    levels: float
    group: int | None = None


_ROUNDINGS: Final = {
    "int8": Rounding("weights rounded to int8, a scale a row", 127),
    "int4": Rounding("weights rounded to int4, groups of 32", 7, 32),
    "int4-7.5": Rounding("weights rounded to int4, groups of 32, scales of half the range over 7.5", 7.5, 32),
}


@dataclass(frozen=True)
class Asked:
    """How a server is asked; temperature: what a proxy asks the server for in place of what is asked."""

    how: str
    declared: str = "bf16"
    temperature: float | None = None

    @property
    def name(self) -> str:
        suffix = "" if self.temperature is None else f"-t{self.temperature:g}"
        return f"{self.how}-{self.declared}{suffix}"


def cases() -> Iterator[tuple[Served, list[Asked]]]:
    both = [Asked("greedy"), Asked("seeded")]
    others = [Asked("seeded", temperature=each) for each in (0.8, 0.9, 1.1, 1.3)]
    declared_fp32 = [Asked("greedy", "fp32"), Asked("seeded", "fp32")]
    yield Served("demo"), [*both, *declared_fp32, *others, Asked("sampled", temperature=0.8)]
    yield Served("demo", dtype="float32"), [*both, *declared_fp32]
    for rounding in ("int8", "int4", "int4-7.5"):
        yield Served("demo", rounding), both
    yield Served("smollm2"), [*both, Asked("seeded", temperature=0.8)]
    yield Served("smollm2", dtype="float32"), [Asked("greedy"), Asked("greedy", "fp32")]
    for rounding in ("int8", "int4"):
        yield Served("smollm2", rounding), both


def rounded_copy(source: Path, folder: Path, rounding: Rounding) -> Path:
    """A checkpoint in `folder` as that at `source`, with rounded weights."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            is_linear = name.endswith("_proj.weight") and weight.ndim == 2
            if is_linear:
                weights[name] = _rounded(weight, rounding)
        save_file(weights, path, metadata={"format": "pt"})
    return folder


def _rounded(weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    rows = weight.double()
    groups = rows if rounding.group is None else rows.reshape(rows.shape[0], -1, rounding.group)
    scales = groups.abs().amax(-1, keepdim=True) / rounding.levels
    lowest = -float(int(rounding.levels + 0.5))
    numbers = (groups / scales.clamp(min=1e-30)).round().clamp(lowest, int(rounding.levels))
    return (numbers * scales).reshape(rows.shape).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--publish", action="store_true")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.publish:
        publish(out)
        return
    checkpoints = {"demo": demo_checkpoint(), "smollm2": arguments.smollm2}
    servers: dict[tuple[str, str], list[tuple[Served, list[Asked]]]] = {}
    for served, questions in cases():
        chosen = [each for each in questions if re.search(arguments.only, f"{served.name}/{each.name}")]
        if chosen and checkpoints[served.model] is not None:
            servers.setdefault((served.model, served.dtype), []).append((served, chosen))
    for (model, dtype), of_server in servers.items():
        run_cases(out, dtype, of_server, Path(checkpoints[model]).resolve())


def run_cases(out: Path, dtype: str, of_server: list[tuple[Served, list[Asked]]], checkpoint: Path) -> None:
    """One server, into which rounded copies are loaded as a trainer pushes weights."""
    words = ["--dtype", dtype, *TAKES_WEIGHTS]
    if of_server[0][0].model != "demo":
        words += ["--max-model-len", "512", "--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes", str(2**29)]
    with RealServer(out / "server.log", *words, checkpoint=checkpoint) as server:
        for served, questions in of_server:
            folder = out / served.name
            folder.mkdir(parents=True, exist_ok=True)
            if served.rounding:
                server.load(rounded_copy(checkpoint, folder / "checkpoint", _ROUNDINGS[served.rounding]))
            for each in questions:
                with contextlib.ExitStack() as stack:
                    url = server.url
                    if each.temperature is not None:
                        url = stack.enter_context(Proxy(server.url, _at(each.temperature))).url
                    ask(folder / each.name, served, each, checkpoint, url)


def _at(temperature: float) -> Any:
    """Of a request, the same at that temperature."""

    def change(path: str, body: Any) -> Any:
        return body | {"temperature": temperature} if "temperature" in body else body

    return change


def ask(folder: Path, served: Served, question: Asked, checkpoint: Path, url: str) -> None:
    prompts = ["--prompts", "sums:long", "--max-new-tokens", "64"]
    if served.model != "demo":
        prompts = ["--prompts", "examples/prompts/chats.jsonl", "--max-new-tokens", "32"]
    command = [
        *(sys.executable, "-m", "mismatch_probe", "audit", "--model", str(checkpoint), "--num-prompts", "24"),
        *(*prompts, "--server", url, "--dtype", question.declared, *_HOW[question.how], "--out", str(folder)),
    ]
    print(folder, " ".join(command[3:]), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    about = {"served": served.words, "model": served.model, "asked": question.__dict__, "code": ended.returncode}
    if ended.returncode in (2, 4):
        raise SystemExit(ended.stderr[-3000:])
    (folder / "case.json").write_text(json.dumps(about))
    print(ended.stdout, flush=True)


def publish(out: Path) -> None:
    print("| model | served | asked | answer | equal tokens | scores moved, times the dtype's rounding | temperature |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted(out.glob("*/*/case.json")):
        case = json.loads(path.read_text())
        audit = Audit.model_validate_json((path.parent / "audit.json").read_text())
        print(row(case, audit))


def row(case: dict[str, Any], audit: Audit) -> str:
    question = Asked(**case["asked"])
    suffix = "" if question.temperature is None else f", at temperature {question.temperature:g} behind a proxy"
    agreement, law = audit.agreement, audit.law
    tokens = write_many(audit.responses.num_tokens, "token")
    equal = moved = temperature = ""
    if agreement is not None:
        share = agreement.equal
        bounds = "" if share.low is None or share.high is None else f" [{share.low:.2%}, {share.high:.2%}]"
        equal = f"{share.value:.2%}{bounds} of {tokens}"
        moved = (
            f"{write_number(agreement.noise_times)} [{write_number(agreement.noise_low)}, "
            f"{write_number(agreement.noise_high)}]"
        )
    if law is not None:
        temperature = f"{law.temperature:.3f} [{law.temperature_low:.3f}, {law.temperature_high:.3f}]"
    kind = {"clean": "as declared", "bug": "not as declared", "undecided": "undecided"}[audit.verdict.kind]
    answer = kind if audit.verdict.cause is None else f"{kind}: {audit.verdict.cause}"
    how = f"{question.how}, declared {question.declared.upper()}"
    return f"| {case['model']} | {case['served']}{suffix} | {how} | {answer} | {equal} | {moved} | {temperature} |"


if __name__ == "__main__":
    main()
