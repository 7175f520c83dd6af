"""`mismatch-probe gate RUN` and `mismatch-probe gate calibrate RUN AGAIN`."""

from copy import copy
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from mismatch_probe.cli import options
from mismatch_probe.cli.options import example
from mismatch_probe.errors import ExitCode, UsageError

_DEFAULT = "run"


class _RunUnlessNamed(TyperGroup):
    """`gate RUN` is `gate run RUN`: what names no subcommand is the run to judge.

    A folder may be named as a subcommand is: the word is the folder where no other one follows it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        if is_named and self._is_run_folder(args, ctx):
            is_named = False
        return super().parse_args(ctx, args if is_named or not args else [_DEFAULT, *args])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """With the flags of `gate RUN`, which is what most people ask for."""
        group = copy(self)
        group.params = self.commands[_DEFAULT].params
        group.commands = {name: command for name, command in self.commands.items() if name != _DEFAULT}
        group.subcommand_metavar = ""
        super(_RunUnlessNamed, group).format_help(ctx, formatter)

    def _is_run_folder(self, args: list[str], ctx: Any) -> bool:
        follows = args[1] if len(args) > 1 else ""
        is_last = not follows or (follows.startswith("-") and follows not in ctx.help_option_names)
        return is_last and args[0] in self.commands and Path(args[0]).is_dir()


app = typer.Typer(
    cls=_RunUnlessNamed,
    no_args_is_help=True,
    subcommand_metavar="RUN",
    help="Judge a run by the limits of a gate file: exit 0 pass, 1 fail, 2 usage, 3 inconclusive, 4 data that must not "
    "be judged.\n\n`gate RUN` is short for `gate run RUN`; `mismatch-probe init gate` writes a gate file.",
)

GateConfig = Annotated[Path, typer.Option(help="Gate file, for instance mismatch.toml.")]
_CONFIG: Final = Path("mismatch.toml")


@app.command(_DEFAULT, epilog=example("gate"))
def run(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Run directory to judge; with --preset layout, the metrics of a training run."
        ),
    ],
    config: GateConfig = _CONFIG,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Limits of others in place of a gate file: nemo-rl, prime-rl, verl, tinker, bitwise, layout.",
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Run directory that max_regression compares with; of layout, the other layout's metrics."),
    ] = None,
    without_baseline: options.WithoutBaseline = False,
    junit: Annotated[
        Path | None, typer.Option(help="Write JUnit XML to this file as well as to RUN/junit.xml.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the answer as Markdown to this file.")] = None,
    github: Annotated[
        bool,
        typer.Option(
            "--github", help="Write the summary, outputs and annotations of a GitHub job; where none runs, print them."
        ),
    ] = False,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Judge a run: exit 0 pass, 1 fail, 2 usage, 3 inconclusive, 4 data that must not be judged."""
    from mismatch_probe.cli.gate_answers import Outputs, judge_run
    from mismatch_probe.gate.config import as_preset

    if preset is not None and config != _CONFIG:
        raise UsageError("--preset is judged without a gate file; give --preset or --config, or name it in the file")
    source = config if preset is None else as_preset(preset)
    outputs = Outputs(junit=junit, markdown=markdown, github=github, json=json_output)
    return judge_run(path, source, baseline, outputs, without_baseline=without_baseline).exit_code


@app.command(epilog=example("gate calibrate"))
def calibrate(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN AGAIN...", help="Runs of one set-up; two for max_regression.")
    ],
    config: GateConfig = _CONFIG,
    json_output: options.JsonOutput = False,
) -> None:
    """Measure the noise floor, and write it to the file that `floor` in the gate file names: limits below it are then
    refused.
    """
    from mismatch_probe.cli.output import print_json, require_no_run_file, results
    from mismatch_probe.gate.config import load_gate
    from mismatch_probe.gate.reading import open_run, write_floor
    from mismatch_probe.gate.run import calibrate
    from mismatch_probe.report.answers.gate import floor_answer
    from mismatch_probe.report.screen import print_answer

    gate = load_gate(config)
    if gate.settings.floor is None:
        raise UsageError(f'{config} names no floor to write; add floor = "floor.json" under [gate]')
    target = config.parent / gate.settings.floor
    require_no_run_file("floor", target)
    floor = calibrate(gate, [open_run(path, "the run") for path in runs])
    write_floor(target, floor)
    print_answer(floor_answer(floor, target), results(as_json=json_output))
    if json_output:
        print_json(floor)
