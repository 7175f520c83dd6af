"""The commands by name, and a command line as one call."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import typer
from typer.main import get_command

from mismatch_probe import __version__
from mismatch_probe.cli import (
    compare,
    evaluate,
    examinations,
    explain,
    first_steps,
    gate,
    import_log,
    report,
    schema,
    train,
    watch,
)
from mismatch_probe.cli.interrupts import interruption_that_came
from mismatch_probe.cli.options import PROGRAM, TYPER_ERROR, example, sentence_of
from mismatch_probe.errors import ExitCode, UsageError

_HELP = ["-h", "--help"]

app = typer.Typer(
    name=PROGRAM,
    help="Measure, explain and gate the training-inference mismatch of language models trained with RL.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": _HELP},
)

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Leaves --vllm.KEY VALUE to the command."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"mismatch-probe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    """Measure, explain and gate the training-inference mismatch."""


def _add(name: str, command: Callable[..., Any], **settings: Any) -> None:
    """A command with its example; a paragraph of its help is filled, whatever lines it has in the source."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, help=help_text, epilog=example(name), **settings)(command)


_add("compare", compare.compare, context_settings=_PASS_THROUGH)
_add("train", train.train, context_settings=_PASS_THROUGH)
_add("sanity", train.sanity, context_settings=_PASS_THROUGH)
_add("evaluate", evaluate.evaluate, context_settings=_PASS_THROUGH)
_add("headroom", examinations.headroom)
_add("localize", examinations.localize, context_settings=_PASS_THROUGH)
_add("import", import_log.import_log)
_add("explain", explain.explain)
_add("score", import_log.score, context_settings=_PASS_THROUGH)
_add("watch", watch.watch)
_add("report", report.report)
_add("diff", report.diff)
app.add_typer(gate.app, name="gate", epilog=example("gate"))
_add("doctor", first_steps.doctor)
_add("schema", schema.schema)
_add("init", first_steps.init)


@cache
def _command() -> Callable[..., Any]:
    """What typer makes of the functions above, which takes longer than to parse a command line with it."""
    command = get_command(app)
    _show_no_type_of_switches(command)
    return command


def _show_no_type_of_switches(command: Any) -> None:
    """Newer versions of typer write `<bool>` behind a flag that takes no value."""
    help_option = command.get_help_option(typer.Context(command, help_option_names=_HELP))
    for parameter in (*command.params, help_option):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for below in getattr(command, "commands", {}).values():
        _show_no_type_of_switches(below)


def invoke(words: Sequence[str]) -> ExitCode:
    """Run the command that `words` name, to the code it ends with.

    Raises:
        MismatchProbeError: it cannot be run, or what stopped it.
        KeyboardInterrupt: the user interrupted.
    """
    try:
        code = _command()(args=list(words), prog_name=PROGRAM, standalone_mode=False)
    except TYPER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return ExitCode.USAGE
        raise UsageError(sentence_of(error, words)) from error
    if code == ExitCode.INTERRUPTED:
        raise interruption_that_came()
    return ExitCode(code or 0)
