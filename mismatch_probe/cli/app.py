"""The command line: registers the commands and turns errors into sentences and exit codes."""

import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from mismatch_probe import __version__
from mismatch_probe.cli import compare, diff, doctor, evaluate, gate, headroom, localize, report, sanity, schema, train
from mismatch_probe.errors import INSTALL_ENGINES, ExitCode, Interrupted, MismatchProbeError
from mismatch_probe.host import prepare


class _Commands(TyperGroup):
    """Keeps Ctrl-C from typer, which would end without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error


app = typer.Typer(
    name="mismatch-probe",
    cls=_Commands,
    help="Measure, explain and gate the training-inference mismatch of language models trained with RL.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_ENGINES = ("torch", "transformers", "vllm")

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Leaves --vllm.KEY VALUE to the command."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mismatch-probe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    """Measure, explain and gate the training-inference mismatch."""


app.command("compare", context_settings=_PASS_THROUGH)(compare.compare)
app.command("train", context_settings=_PASS_THROUGH)(train.train)
app.command("sanity", context_settings=_PASS_THROUGH)(sanity.sanity)
app.command("evaluate", context_settings=_PASS_THROUGH)(evaluate.evaluate)
app.command("headroom")(headroom.headroom)
app.command("localize", context_settings=_PASS_THROUGH)(localize.localize)
app.command("report")(report.report)
app.command("diff")(diff.diff)
app.add_typer(gate.app, name="gate")
app.command("doctor")(doctor.doctor)
app.command("schema")(schema.schema)


def main() -> None:
    """Entry point: every failure is one sentence on stderr and a documented exit code; 1 always means a failed gate."""
    prepare()
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except MismatchProbeError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"mismatch-probe: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the boundary of the program: Python's own exit code is 1
        if debug:
            traceback.print_exc()
        typer.echo(f"mismatch-probe: {_sentence(error)}", err=True)
        sys.exit(ExitCode.ENVIRONMENT)


def _sentence(error: Exception) -> str:
    """What an error that nobody raised on purpose comes to: a part that is not installed, or a surprise."""
    if isinstance(error, ModuleNotFoundError) and error.name in _ENGINES:
        return f"this command runs real engines, and {error.name} cannot be found here; run {INSTALL_ENGINES}"
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"unexpected {what}; the same command with --debug shows where"
