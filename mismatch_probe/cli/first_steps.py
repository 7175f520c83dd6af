"""`mismatch-probe doctor` and `mismatch-probe init KIND`: what is asked before the first run."""

from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from mismatch_probe.cli import options
from mismatch_probe.errors import ExitCode, UsageError, did_you_mean


class Starter(NamedTuple):
    """A commented file to begin with: its usual name, what it is for, and the command that reads it."""

    file: str
    about: str
    reader: tuple[str, ...]


_COMPARE: Final = ("compare", "--out", "RUN", "--config")
STARTERS: Final[dict[str, Starter]] = {
    "gate": Starter("mismatch.toml", "limits for CI", ("gate", "RUN", "--config")),
    "guards": Starter("guards.toml", "guards of a training run", ("train", "--model", "CHECKPOINT", "--guards")),
    "compare": Starter("compare.toml", "every setting of a comparison", _COMPARE),
    "sides": Starter("sides.toml", "sides with names and settings of their own", _COMPARE),
    "server": Starter("server.toml", "a server that already runs, as a side", _COMPARE),
}


def starter_path(kind: str) -> Path:
    """The file that ships with the package."""
    from importlib.resources import files

    return Path(str(files("mismatch_probe"))) / "starters" / f"{kind}.toml"


def init(
    kind: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(STARTERS)}; all are listed without it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; by default its usual name, here.")] = None,
) -> None:
    """Write a commented file to begin with: limits for CI, guards, or settings of a comparison."""
    if kind is None and out is not None:
        raise UsageError(f"--out names a file, and nothing says which; give one of {', '.join(STARTERS)} before it")
    if kind is None:
        for name, starter in STARTERS.items():
            typer.echo(f"{name:<9}{starter.file:<15}{starter.about}")
        return
    if kind not in STARTERS:
        hint = did_you_mean(kind, STARTERS, f"; give one of {', '.join(STARTERS)}")
        raise UsageError(f"{kind!r} is no file to begin with{hint}")
    from mismatch_probe.cli.output import require_no_run_file
    from mismatch_probe.inert import command_line
    from mismatch_probe.records.files import write_text

    path = out or Path(STARTERS[kind].file)
    if path.exists():
        raise UsageError(f"{path} exists already, and init writes nothing over; name another file with --out")
    require_no_run_file("--out", path)
    write_text(path, starter_path(kind).read_text(encoding="utf-8"))
    typer.echo(f"Wrote {path}. Read it, then: {command_line(*STARTERS[kind].reader, path)}")


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also start both sides on this checkpoint and show what they really apply.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="The dtype both sides are started in, with --model.")] = "bf16",
    infer: Annotated[
        str | None,
        typer.Option(help="With --model, the inference side to start instead: prod:url=http://HOST:PORT."),
    ] = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Check versions, devices, pin conflicts and imports; with --model, the effective settings of both sides."""
    from mismatch_probe.children.servers import warm_up
    from mismatch_probe.cli.output import print_json, results
    from mismatch_probe.compare.examination import examine
    from mismatch_probe.config.load import parse_side
    from mismatch_probe.report.answers.doctor import doctor_answer
    from mismatch_probe.report.screen import print_answer

    if infer is not None and model is None:
        raise UsageError("--infer names the side that is started besides the training path; give --model too")
    if model is not None:
        warm_up("training", "engine")
    examination = examine(model, dtype, None if infer is None else parse_side("infer", infer))
    print_answer(doctor_answer(examination), results(as_json=json_output))
    if json_output:
        print_json(examination)
    return examination.exit_code
