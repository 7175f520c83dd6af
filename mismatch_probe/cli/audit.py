"""`mismatch-probe audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.errors import ExitCode, UsageError

_SERVER: Final = {
    "server": Flag("server.url", "Address of the server: http://HOST:PORT."),
    "served_model": Flag("server.model", "Name to ask for, where several models are served."),
    "chat": Flag("server.chat", "Send messages, which the server puts into its own chat template.", bool),
    "concurrency": Flag("server.concurrency", "Requests in flight at once.", int, default="16"),
    "key_variable": Flag("server.key_variable", "Environment variable that holds the server's key."),
}
_SAID: Final = {
    "dtype": Flag("dtype", "What the server is said to compute in.", default="bf16"),
    "adapter": Flag("server.adapter", "LoRA adapter that the server is said to serve: a folder."),
}
_SAMPLING: Final = {
    "num_prompts": Flag("prompts.num_prompts", "How many prompts to use; 32 unless given.", int),
    "temperature": Flag("sampling.temperature", "Temperature to ask for; 0 is greedy decoding.", float, default="0"),
    "top_p": Flag("sampling.top_p", "Top-p to ask for.", float, default="1"),
    "top_k": Flag("sampling.top_k", "Top-k to ask for; 0 is none.", int, default="0"),
    "noise": Flag(
        "sampling.noise",
        "Random numbers that a seed stands for: vllm-cpu foretells each token; `unknown` does not.",
        default="unknown",
    ),
    "ignore_eos": Flag("sampling.ignore_eos", "Go on behind the end of sequence.", bool),
}
_COMPUTED: Final = {
    "device": Flag("device", "Device that the checkpoint is computed on: auto, cpu, cuda, cuda:1.", default="auto"),
    "batch_tokens": Flag("batch_tokens", "Tokens of one forward pass, padding included.", int, default="2048"),
}


@gives_settings(
    options.MODEL,
    _SERVER,
    _SAID,
    options.PROMPTS,
    _SAMPLING,
    options.SAMPLES_PER_PROMPT,
    options.unless_given(options.MAX_NEW_TOKENS, max_new_tokens="128"),
    options.SEED,
    _COMPUTED,
)
def audit(
    flag_values: dict[str, Any],
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="A text, such as a system prompt, that the server may put before prompts (repeatable).",
            rich_help_panel=options.SIDES,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write audit.json and report.html into.")] = None,
    run: options.Run = None,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Say whether a server that gives no log-probs is what it is said to be, by the tokens that it samples.

    Ends with 0 where the tokens are as said, with 1 where they are not, and with 3 where they do not tell.
    """
    from mismatch_probe.audit.run import audit_server
    from mismatch_probe.cli.filing import Filing
    from mismatch_probe.cli.output import narration, print_outcome, results
    from mismatch_probe.cli.progress import progress_line
    from mismatch_probe.config.examinations import AuditSettings, audit_values
    from mismatch_probe.config.load import given_settings, parse_settings
    from mismatch_probe.records.files import AUDIT_FILE
    from mismatch_probe.report.answers.audit import audit_answer
    from mismatch_probe.report.screen import print_answer

    given_values = given_settings(config, flag_values)
    filing = Filing.open(out, run, given_values)
    values = filing.values(audit_values, given_values)
    if "model" not in values:
        raise UsageError("no model to hold the tokens against; give --model the checkpoint that is said to be served")
    if "url" not in values.get("server", {}):
        raise UsageError("no server to audit; give --server http://HOST:PORT")
    settings = parse_settings(AuditSettings, values | ({"headers": header} if header else {}))
    with filing.reserve(AUDIT_FILE):
        with progress_line(narration()) as line:
            document = audit_server(settings, line.at)
        report = filing.file(document)
    console = results(as_json=json_output)
    print_answer(audit_answer(document), console)
    print_outcome(console, report, document, as_json=json_output)
    return document.exit_code
