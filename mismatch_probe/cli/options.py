"""The flags that several commands have, declared once, each with the setting that it gives."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from mismatch_probe.config.nested import nested
from mismatch_probe.errors import UsageError

_ENGINE_PREFIX = "--vllm."


@dataclass(frozen=True)
class Sets:
    """The setting that a flag gives, by its dotted name; a flag that turns something off gives `False`."""

    path: str
    turns_off: bool = False


Model = Annotated[str | None, typer.Option(help="Checkpoint: a folder, a hub id, or `demo`."), Sets("model.path")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id."), Sets("model.revision")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the model code that the checkpoint brings."),
    Sets("model.trust_remote_code"),
]
Prompts = Annotated[
    str | None,
    typer.Option(help="`sums:SPLIT`, a .jsonl or .parquet file, or hub:OWNER/NAME."),
    Sets("prompts.source"),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="auto (text becomes a user message if there is a template), always, never."),
    Sets("prompts.chat_template"),
]
Task = Annotated[str | None, typer.Option(help="Problems: `sums:SPLIT`, a .jsonl or .parquet file, hub:…")]
RewardName = Annotated[str | None, typer.Option(help="`math`, or `module:function`; default: the task's own.")]
Dtypes = list[str] | None
BothDtypes = Annotated[Dtypes, typer.Option(help="Both sides in this dtype (repeatable): bf16, fp16, fp32.")]
TrainDtypes = Annotated[Dtypes, typer.Option(help="Training side (repeatable; crossed with --infer-dtype).")]
InferDtypes = Annotated[Dtypes, typer.Option(help="Inference side (repeatable).")]
SamplesPerPrompt = Annotated[
    int | None, typer.Option(help="Responses sampled for each prompt."), Sets("sampling.samples_per_prompt")
]
MaxNewTokens = Annotated[int | None, typer.Option(help="Longest response, in tokens."), Sets("sampling.max_new_tokens")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature, the same on both sides."), Sets("sampling.temperature")
]
Seed = Annotated[int | None, typer.Option(help="Seed of prompts and sampling."), Sets("sampling.seed")]
Attention = Annotated[
    str | None, typer.Option(help="pi's attention: sdpa, eager, flash_attention_2."), Sets("training.attention")
]
Device = Annotated[
    str | None, typer.Option(help="Device of the training path: auto, cpu, cuda, cuda:1."), Sets("training.device")
]
Run = Annotated[Path | None, typer.Option(help="Run of `compare` to take the settings from and to file the result in.")]
Out = Annotated[Path | None, typer.Option(help="Run directory to write.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
Config = Annotated[Path | None, typer.Option(help="TOML or YAML file with the same settings.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def settings_given(command: Callable[..., None], context: typer.Context, **more: Any) -> dict[str, Any]:
    """The settings that a command line gives, engine arguments and `more` included, as a file would hold them.

    Raises:
        UsageError: a word is neither a flag nor an engine argument.
    """
    given: dict[str, Any] = {"engine.args": vllm_flags(context.args) or None, **more}
    for name, hint in get_type_hints(command, include_extras=True).items():
        source = context.get_parameter_source(name)
        for sets in (argument for argument in get_args(hint) if isinstance(argument, Sets)):
            if source is not None and source.name != "DEFAULT":
                given[sets.path] = (
                    not sets.turns_off if isinstance(context.params[name], bool) else context.params[name]
                )
    return nested(given)


def vllm_flags(extra: list[str]) -> dict[str, str]:
    """`--vllm.KEY VALUE` and `--vllm.KEY=VALUE` pairs left over by the parser; a bare `--vllm.KEY` means true.

    Raises:
        UsageError: something else was left over, or an argument is given twice.
    """
    given: dict[str, str] = {}
    rest = list(extra)
    while rest:
        word = rest.pop(0)
        if not word.startswith(_ENGINE_PREFIX):
            raise UsageError(f"{word!r} is not an option here; engine arguments are written --vllm.KEY VALUE")
        key, separator, value = word.removeprefix(_ENGINE_PREFIX).partition("=")
        if not separator:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        name = key.replace("-", "_")
        if name in given:
            raise UsageError(f"{_ENGINE_PREFIX}{name} is given twice; give it once")
        given[name] = value
    return given
