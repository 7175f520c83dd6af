"""The commands by name, and a command line as one call."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import typer
from typer.main import get_command

from mismatch_probe import __version__
from mismatch_probe.cli import (
    compare,
    diff,
    doctor,
    evaluate,
    explain,
    gate,
    headroom,
    import_log,
    init,
    localize,
    report,
    sanity,
    schema,
    score,
    train,
    watch,
)
from mismatch_probe.cli.examples import example
from mismatch_probe.cli.interrupts import interruption_that_came
from mismatch_probe.cli.usage import PROGRAM, TYPER_ERROR, sentence_of
from mismatch_probe.errors import ExitCode, UsageError

app = typer.Typer(
    name=PROGRAM,
    help="Measure, explain and gate the training-inference mismatch of language models trained with RL.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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


app.command("compare", context_settings=_PASS_THROUGH, epilog=example("compare"))(compare.compare)
app.command("train", context_settings=_PASS_THROUGH, epilog=example("train"))(train.train)
app.command("sanity", context_settings=_PASS_THROUGH, epilog=example("sanity"))(sanity.sanity)
app.command("evaluate", context_settings=_PASS_THROUGH, epilog=example("evaluate"))(evaluate.evaluate)
app.command("headroom", epilog=example("headroom"))(headroom.headroom)
app.command("localize", context_settings=_PASS_THROUGH, epilog=example("localize"))(localize.localize)
app.command("import", epilog=example("import"))(import_log.import_log)
app.command("explain", epilog=example("explain"))(explain.explain)
app.command("score", context_settings=_PASS_THROUGH, epilog=example("score"))(score.score)
app.command("watch", epilog=example("watch"))(watch.watch)
app.command("report", epilog=example("report"))(report.report)
app.command("diff", epilog=example("diff"))(diff.diff)
app.add_typer(gate.app, name="gate", epilog=example("gate"))
app.command("doctor", epilog=example("doctor"))(doctor.doctor)
app.command("schema", epilog=example("schema"))(schema.schema)
app.command("init", epilog=example("init"))(init.init)


@cache
def _command() -> Callable[..., Any]:
    """What typer makes of the functions above, which takes longer than to parse a command line with it."""
    return get_command(app)


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
