"""The commands by name, and a command line as one call."""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any, Final

import typer
from typer.main import get_command

from mismatch_probe import __version__
from mismatch_probe.cli import (
    ablate,
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
from mismatch_probe.cli.options import PROGRAM, REST, TYPER_ERROR, example, sentence_of
from mismatch_probe.cli.process import interruption_that_came
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


def _add(heading: str, name: str, command: Callable[..., Any], **settings: Any) -> None:
    """A command under its heading, with its example; a paragraph of its help is filled, whatever lines it has in the
    source.
    """
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, help=help_text, epilog=example(name), rich_help_panel=heading, **settings)(command)


_HEADINGS = _MEASURE, _LOGS, _CI, _DEEPER, _TRAINING, _TOOLS = (
    "Measure a checkpoint",
    "Read the log of a trainer",
    "Answer yes or no in CI",
    "Look deeper",
    "Train under guards",
    "Tools",
)

_add(_MEASURE, "compare", compare.compare, context_settings=_PASS_THROUGH)
_add(_MEASURE, "report", report.report)
_add(_MEASURE, "diff", report.diff)
_add(_MEASURE, "audit", examinations.audit)
_add(_LOGS, "import", import_log.import_log)
_add(_LOGS, "explain", explain.explain)
_add(_LOGS, "score", import_log.score, context_settings=_PASS_THROUGH)
_add(_LOGS, "watch", watch.watch)
app.add_typer(gate.app, name="gate", epilog=example("gate"), rich_help_panel=_CI)
_add(_DEEPER, "localize", examinations.localize, context_settings=_PASS_THROUGH)
_add(_DEEPER, "headroom", examinations.headroom)
_add(_DEEPER, "evaluate", evaluate.evaluate, context_settings=_PASS_THROUGH)
_add(_TRAINING, "train", train.train, context_settings=_PASS_THROUGH)
_add(_TRAINING, "sanity", train.sanity, context_settings=_PASS_THROUGH)
_add(_TRAINING, "ablate", ablate.ablate, context_settings=_PASS_THROUGH)
_add(_TOOLS, "doctor", first_steps.doctor)
_add(_TOOLS, "init", first_steps.init)
_add(_TOOLS, "schema", schema.schema, hidden=True)


@cache
def _command() -> Any:
    """What typer makes of the functions above, which takes longer than to parse a command line with it."""
    command: Any = get_command(app)
    command.commands = dict(sorted(command.commands.items(), key=_place_of_heading))
    _finish_help(command)
    return command


def _place_of_heading(item: tuple[str, Any]) -> int:
    """Typer has groups of commands before all commands; the help has them under their heading."""
    return _HEADINGS.index(item[1].rich_help_panel)


def _finish_help(command: Any) -> None:
    """Newer versions of typer write `<bool>` behind a flag that takes no value. Where flags stand under headings, those
    without one stand under REST, which is the last.
    """
    help_option = command.get_help_option(typer.Context(command, help_option_names=_HELP))
    options = [option for option in (*command.params, help_option) if option.param_type_name == "option"]
    has_headings = any(option.rich_help_panel for option in options)
    for option in options:
        if option.is_flag:
            option.metavar = ""
        if has_headings and not option.rich_help_panel:
            option.rich_help_panel = REST
    command.params.sort(key=lambda parameter: getattr(parameter, "rich_help_panel", None) == REST)
    for subcommand in getattr(command, "commands", {}).values():
        _finish_help(subcommand)


_NOT_IN_HELP: Final = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
"""Imported by what draws typer's help, and used in no help of this program: a third of the time of `--help`."""


def _import_help() -> None:
    """Import what draws typer's help without these; a typer that imports more of them does so itself, whole."""
    modules = {name: ModuleType(name) for name in _NOT_IN_HELP if name not in sys.modules}
    for name, module in modules.items():
        setattr(module, _NOT_IN_HELP[name], type(_NOT_IN_HELP[name], (), {}))
    sys.modules.update(modules)
    try:
        with suppress(ImportError):
            import typer.rich_utils  # noqa: F401
    finally:
        for name in modules:
            del sys.modules[name]


def invoke(words: Sequence[str]) -> ExitCode:
    """Run the command that `words` name, to the code it ends with.

    Raises:
        MismatchProbeError: it cannot be run, or what stopped it.
        KeyboardInterrupt: the user interrupted.
    """
    if not words or not {*_HELP}.isdisjoint(words):
        _import_help()
    try:
        code = _command()(args=list(words), prog_name=PROGRAM, standalone_mode=False)
    except TYPER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return ExitCode.USAGE
        raise UsageError(sentence_of(error, words)) from error
    if code == ExitCode.INTERRUPTED:
        raise interruption_that_came()
    return ExitCode(code or 0)
