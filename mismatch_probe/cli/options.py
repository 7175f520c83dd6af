"""The flags that several commands have, an example of each command, and what typer refuses, as one sentence."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mismatch_probe.dtypes import COMPUTED_IN
from mismatch_probe.errors import ExitCode, UsageError, did_you_mean
from mismatch_probe.inert import plain
from mismatch_probe.reading import is_there, nest_names

_ENGINE_PREFIX: Final = "--vllm."
_ENGINE_ARGUMENTS: Final = f"; engine arguments are written {_ENGINE_PREFIX}KEY VALUE"
DTYPES: Final = ", ".join(reversed(COMPUTED_IN))
"""Those that a side can be asked for, as help lists them."""

SIDES: Final = "Checkpoint and sides"
_QUESTIONS: Final = "Prompts and sampling"
COMPUTED: Final = "How it is computed"
_PROBLEMS: Final = "Problems and rollouts"
_TRAINING: Final = "Training"
GUARDS: Final = "Guards"
GATE: Final = "Gate"
MADE: Final = "What made the log"
REST: Final = "Run and output"
"""The heading of the flags that have none, in a command whose other flags do."""
_HEADINGS: Final = {
    "model": SIDES,
    "prompts": _QUESTIONS,
    "sampling": _QUESTIONS,
    "evaluation": _QUESTIONS,
    "engine": COMPUTED,
    "reference": COMPUTED,
    "training": COMPUTED,
    "attention": COMPUTED,
    "device": COMPUTED,
    "batch_tokens": COMPUTED,
    "modules": COMPUTED,
    "interventions": COMPUTED,
    "switches": COMPUTED,
    "weights_only": COMPUTED,
    "pi": MADE,
    "mu": MADE,
    "server": SIDES,
    "dtype": SIDES,
    "adapter": MADE,
    "task": _PROBLEMS,
    "reward": _PROBLEMS,
    "rollout": _PROBLEMS,
    "train_dtype": _TRAINING,
    "infer_dtype": _TRAINING,
    "objective": _TRAINING,
    "optimizer": _TRAINING,
    "policy": _TRAINING,
    "steps": _TRAINING,
    "grid": "Grid",
    "sanity": "Choice of problems",
    "guards": GUARDS,
}
"""The heading of a flag in the help, by the first part of its setting."""


@dataclass(frozen=True)
class Flag:
    """A flag that gives the setting of this dotted name, and nothing else; one that `turns_off` gives False.

    default: what the setting is unless the flag is given, where that is one value.
    """

    setting: str
    help: str
    kind: Any = str
    turns_off: bool = False
    default: str = ""

    @property
    def heading(self) -> str | None:
        """The heading of the help that it stands under."""
        return _HEADINGS.get(self.setting.partition(".")[0])

    def parameter(self, name: str) -> inspect.Parameter:
        """As typer reads it; the flag is `--name`, with dashes."""
        if self.kind is bool:
            flag = f"--{name.replace('_', '-')}"
            return _keyword(name, bool, typer.Option(False, flag, help=self.help, rich_help_panel=self.heading))
        text = f"{self.help.removesuffix('.')}; {self.default} unless given." if self.default else self.help
        return _keyword(name, self.kind | None, typer.Option(None, help=text, rich_help_panel=self.heading))


Flags = dict[str, Flag]
CommandFunction = Callable[..., ExitCode]

MODEL: Final = {
    "model": Flag("model.path", "Checkpoint: a folder, a hub id, or `demo`."),
    "revision": Flag("model.revision", "Branch, tag or commit of a hub id."),
    "trust_remote_code": Flag("model.trust_remote_code", "Run the model code that the checkpoint brings.", bool),
}
PROMPTS: Final = {
    "prompts": Flag(
        "prompts.source", "`sums:SPLIT`, a .jsonl or .parquet file, or hub:OWNER/NAME.", default="sums:long"
    ),
    "chat_template": Flag(
        "prompts.chat_template",
        "auto (text becomes a user message if there is a template), always, never.",
        default="auto",
    ),
}
SAMPLES_PER_PROMPT: Final = {
    "samples_per_prompt": Flag("sampling.samples_per_prompt", "Responses sampled for each prompt.", int, default="1")
}
MAX_NEW_TOKENS: Final = {
    "max_new_tokens": Flag("sampling.max_new_tokens", "Longest response, in tokens.", int, default="1024")
}
TEMPERATURE: Final = {
    "temperature": Flag("sampling.temperature", "Sampling temperature, the same on both sides.", float, default="1")
}
SEED: Final = {"seed": Flag("sampling.seed", "Seed of prompts and sampling.", int, default="0")}
ATTENTION: Final = {"attention": Flag("training.attention", "pi's attention: sdpa, eager, flash_attention_2.")}
DEVICE: Final = {
    "device": Flag("training.device", "Device of the training path: auto, cpu, cuda, cuda:1.", default="auto")
}

TASK_HELP: Final = "Problems: `sums:SPLIT`, a .jsonl or .parquet file, hub:…"
REWARD_HELP: Final = "`math`, or `module:function`; the task's own unless given."

Dtypes = list[str] | None
BothDtypes = Annotated[
    Dtypes,
    typer.Option(help=f"Both sides in this dtype (repeatable): {DTYPES}.", rich_help_panel=SIDES),
]
TrainDtypes = Annotated[
    Dtypes,
    typer.Option(
        help="The training side in this dtype (repeatable); each is compared with each --infer-dtype.",
        rich_help_panel=SIDES,
    ),
]
InferDtypes = Annotated[
    Dtypes, typer.Option(help="The inference side in this dtype (repeatable).", rich_help_panel=SIDES)
]
SideOptions = list[str] | None
TrainSides = Annotated[
    SideOptions,
    typer.Option(
        help="Training side with settings of its own: NAME:dtype=bf16,precision=fsdp (repeatable).",
        rich_help_panel=SIDES,
    ),
]
InferSides = Annotated[
    SideOptions,
    typer.Option(
        help="Inference side with settings of its own: NAME:dtype=bf16, and behind commas kv_cache_dtype=fp8, "
        "checkpoint=FOLDER, url=SERVER and others (repeatable).",
        rich_help_panel=SIDES,
    ),
]
ServerSide = Annotated[
    str | None, typer.Option(help="A server that samples, and is sent the weights: NAME:url=SERVER,transfer=gloo.")
]
Run = Annotated[Path | None, typer.Option(help="Run of `compare` to take the settings from and to file the result in.")]
Out = Annotated[Path | None, typer.Option(help="Run directory to write.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
Config = Annotated[Path | None, typer.Option(help="TOML or YAML file with the same settings.")]
WITHOUT_BASELINE_HELP: Final = "Leave out the checks that compare with a baseline, and say so."
WithoutBaseline = Annotated[bool, typer.Option("--without-baseline", help=WITHOUT_BASELINE_HELP)]
LOG_FORMAT_HELP: Final = "Format of the log; recognised by its content unless given."
LogFormat = Annotated[str | None, typer.Option(help=LOG_FORMAT_HELP)]
ImportedRun = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory that `import` made.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def unless_given(flags: Flags, **defaults: str) -> Flags:
    """The same flags for a command whose settings have other defaults."""
    return flags | {name: replace(flags[name], default=default) for name, default in defaults.items()}


def server_side(text: str | None) -> dict[str, Any]:
    """The setting that --infer of a training is.

    Raises:
        UsageError: it is not written as a side.
    """
    if text is None:
        return {}
    from mismatch_probe.config.load import parse_side

    return {"infer": [parse_side("infer", text)]}


def gives_settings(*groups: Flags) -> Callable[[CommandFunction], CommandFunction]:
    """Give a command the flags of these groups: its first parameter is what they and the engine arguments set, as a
    file would hold it. Typer is shown the flags in its place.
    """
    flags = {name: flag for group in groups for name, flag in group.items()}

    def with_flags(command: CommandFunction) -> CommandFunction:
        @wraps(command)
        def call(context: typer.Context, **values: Any) -> ExitCode:
            settings = given_by(flags, context)
            own_values = {name: value for name, value in values.items() if name not in flags}
            _require_presence(settings.get("model", {}).get("path"), own_values)
            return command(settings, **own_values)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        setting_parameters = [flag.parameter(name) for name, flag in flags.items()]
        arguments = [parameter for parameter in own if parameter.default is parameter.empty]
        rest = [parameter for parameter in own if parameter.default is not parameter.empty]
        parameters = [_keyword("context", typer.Context), *arguments, *setting_parameters, *rest]
        parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.flags = flags  # type: ignore[attr-defined]
        return call

    return with_flags


def _require_presence(model: str | None, values: Mapping[str, Any]) -> None:
    """Refuse a run, a log or a checkpoint's folder that is not there before a command imports what takes seconds. What
    words the refusal is imported for it alone. Of torchrun's ranks the first refuses, once they are joined.

    Raises:
        MismatchProbeError: one of them is not there.
    """
    if "RANK" in os.environ:
        return
    if isinstance(model, str) and model.startswith((".", "/")) and not is_there(Path(model)):
        from mismatch_probe.config.model import ModelSettings
        from mismatch_probe.tasks import resolve_model

        resolve_model(ModelSettings(path=model))
    run, source = values.get("run"), values.get("source")
    if isinstance(run, Path) and not is_there(run):
        from mismatch_probe.records.files import RunKind, require_kind

        require_kind(run, RunKind.COMPARISON)
    if isinstance(source, Path) and not is_there(source):
        from mismatch_probe.logs.look import files_of

        files_of(source)


def announce(what: str) -> None:
    """The first line of a terminal, at once: what a command imports takes seconds where a machine is busy."""
    if sys.stderr.isatty():
        print(plain(what), file=sys.stderr, flush=True)


def _keyword(name: str, hint: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def given_by(flags: Flags, context: typer.Context) -> dict[str, Any]:
    """The settings that a parsed command line gives, as a file would hold them.

    Raises:
        UsageError: a word is neither a flag nor an engine argument.
    """
    options = [option for parameter in context.command.params for option in parameter.opts]
    values_of_settings: dict[str, Any] = {"engine.args": vllm_flags(context.args, options) or None}
    for name, flag in flags.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            value = context.params[name]
            values_of_settings[flag.setting] = not flag.turns_off if flag.kind is bool else value
    return nest_names(values_of_settings)


def vllm_flags(extra: list[str], options: Sequence[str]) -> dict[str, str]:
    """`--vllm.KEY VALUE` and `--vllm.KEY=VALUE` pairs left over by the parser; a bare `--vllm.KEY` means true.

    options: those of the command, of which another word may be a misspelt one.

    Raises:
        UsageError: something else was left over, or an argument is given twice.
    """
    arguments: dict[str, str] = {}
    rest = list(extra)
    while rest:
        word = rest.pop(0)
        if not word.startswith(_ENGINE_PREFIX):
            if not word.startswith("-"):
                raise UsageError(f"{word} is more than the command takes{_ENGINE_ARGUMENTS}")
            name = word.partition("=")[0]
            hint = did_you_mean(name, options, _ENGINE_ARGUMENTS).replace("'", "")
            raise UsageError(f"there is no option {name}{hint}")
        key, separator, value = word.removeprefix(_ENGINE_PREFIX).partition("=")
        if not separator:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        name = key.replace("-", "_")
        if name in arguments:
            raise UsageError(f"{_ENGINE_PREFIX}{name} is given twice; give it once")
        arguments[name] = value
    return arguments


PROGRAM: Final = "mismatch-probe"

TYPER_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""The base of all that typer refuses; newer versions bring their own, older ones take click's."""

_WORDS: Final = (
    (r"^Missing (argument|option|parameter) '(.*?)'\. ?", r"\2 is missing; "),
    (r"^Invalid value for '(.*?)': (?:Value error, )?", r"\1 cannot be used: "),
    (r"^Got unexpected extra arguments? ?(?:\(s\) )?\((.*)\)$", r"\1 is more than the command takes"),
    (r"^No such (option|command):? (\S+?)\.?(?= |$)", r"there is no \1 \2"),
    (r" ?\(Possible options: (.*)\)$", r"; did you mean \1?"),
    (r"\.? Did you mean (?:one of: )?(.*?)\?$", r"; did you mean \1?"),
    (r"^Option '(.*?)' requires an argument", r"\1 needs a value behind it"),
)


def sentence_of(error: Any, words: Sequence[str]) -> str:
    """What typer says of an error of usage, without its box, and the command whose --help lists what it takes."""
    sentence = " ".join(error.format_message().split())
    for pattern, ours in _WORDS:
        sentence = re.sub(pattern, ours, sentence)
    sentence = _with_value(sentence.rstrip(".; "), words)
    joint = " " if sentence.endswith("?") else "; "
    return f"{sentence}{joint}`{_example_command(error, words)} --help` lists what it takes"


def _with_value(sentence: str, words: Sequence[str]) -> str:
    """Put the value behind its flag in a sentence on bad values; newer versions of typer leave it out."""
    flag, separator, why = sentence.partition(" cannot be used: ")
    values = [value for name, value in pairwise(words) if name == flag]
    return f"{flag} {values[-1]}{separator}{why}" if separator and values else sentence


def _example_command(error: Any, words: Sequence[str]) -> str:
    if error.ctx is not None:
        return str(error.ctx.command_path)
    return " ".join([PROGRAM, *(word for word in words[:1] if not word.startswith("-"))])


EXAMPLES: Final[dict[str, str]] = {
    "compare": "compare --model ckpt --dtype bf16 --dtype fp32 --prompts sums:long --out runs/mine",
    "train": "train --model ckpt --task sums:terms=3 --objective grpo --steps 100 --out runs/rl",
    "sanity": "sanity --model ckpt --train-dtype fp16 --infer-dtype fp16 --out runs/sanity",
    "ablate": "ablate --model ckpt --precision bf16/bf16 --precision fp16/fp16 --seed 0 --seed 1 --seed 2 "
    "--task sums:terms=3 --steps 100 --out runs/ablation",
    "evaluate": "evaluate --model ckpt --task sums:medium --dtype bf16 --dtype fp16 --out runs/evaluate",
    "headroom": "headroom --model ckpt --out runs/headroom",
    "localize": "localize --run runs/mine --dtype bf16",
    "import": "import logs/ --out runs/theirs",
    "explain": "explain runs/theirs --model ckpt/12 --step 12",
    "score": "score runs/theirs --model ckpt/12 --step 12 --out runs/scored",
    "watch": "watch logs/ --guards guards.toml",
    "report": "report runs/mine",
    "diff": "diff runs/before runs/after",
    "audit": "audit --model ckpt --server http://rollout-0:8000 --prompts prompts.jsonl --out runs/audit",
    "gate": "gate runs/mine --config mismatch.toml",
    "gate calibrate": "gate calibrate runs/before runs/after --config mismatch.toml",
    "doctor": "doctor --model ckpt",
    "schema": "schema summary",
    "init": "init gate --out mismatch.toml",
}


def example(command: str) -> str:
    return f"Example: mismatch-probe {EXAMPLES[command]}"
