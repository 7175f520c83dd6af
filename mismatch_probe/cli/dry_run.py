"""The plan of a comparison on one screen."""

from rich.console import Console

from mismatch_probe.compare.cost.earlier import MAX_NEW_TOKENS
from mismatch_probe.compare.cost.roofline import Span
from mismatch_probe.compare.estimates import DryRun, Outlook, StageEstimate
from mismatch_probe.notation import (
    write_about,
    write_count,
    write_many,
    write_rough_seconds,
    write_size,
    write_token_count,
)
from mismatch_probe.report.screen import print_line, print_titled
from mismatch_probe.report.view import Column, Table

_GIB = 1 << 30


def show_dry_run(plan: DryRun, console: Console) -> None:
    """Print what would be done, its upper bounds, and how long it will take."""
    console.print(
        f"{plan.model} ({plan.architecture}, {plan.parameters:,} parameters): "
        f"{write_many(plan.num_prompts, 'prompt')} of up to "
        f"{write_count(plan.longest_prompt_tokens)} tokens, sequences of up to "
        f"{write_count(plan.longest_sequence_tokens)} tokens",
        highlight=False,
    )
    times = {} if plan.outlook is None else {stage.stage: stage.work for stage in plan.outlook.time.stages}
    columns: list[Column[StageEstimate]] = [
        Column("stage", lambda stage: stage.stage),
        Column("responses", lambda stage: write_count(stage.sequences)),
        Column("tokens, at most", lambda stage: write_count(stage.max_tokens)),
        Column("weights, GiB", lambda stage: f"{stage.weight_bytes / _GIB:.3g}"),
        Column("time, about", lambda stage: _rough(times.get(stage.stage))),
    ]
    print_titled(console, Table.of("Would run; nothing was started", plan.stages, columns))
    print_line(console, "")
    for line in _lines(plan):
        console.print(line, highlight=False, soft_wrap=True)


def _lines(plan: DryRun) -> list[str]:
    disk = f"disk: at most {plan.max_disk_bytes / _GIB:.3g} GiB"
    if plan.outlook is None:
        return [f"time and memory: no estimate, {plan.no_outlook_because}", disk]
    return [*_time(plan.outlook), *_memory(plan.outlook), disk]


def _time(outlook: Outlook) -> list[str]:
    time = outlook.time
    longest = max(time.stages, key=lambda stage: stage.work.likely_seconds, default=None)
    dominates = "" if longest is None else f"; the longest stage is {longest.stage}"
    total = write_about(time.total.likely_seconds, time.total.low_seconds, time.total.high_seconds)
    starts = sum(stage.start.likely_seconds for stage in time.stages if stage.start is not None)
    starting = write_rough_seconds(time.ready.likely_seconds + starts)
    lines = [f"time: {total} in all, {starting} of it to start processes and load models{dominates}"]
    if time.unknown_starts:
        lines.append(
            f"      and the start of a compiling engine, {len(time.unknown_starts)} times, which no earlier run tells"
        )
    if time.of_servers:
        lines.append(f"      and what the server takes over {', '.join(time.of_servers)}, which nothing here tells")
    if time.over_ranks:
        sent = write_size(sum(time.received_bytes.values()))
        lines.append(
            f"      without what ranks send each other over {', '.join(time.over_ranks)}: each is sent {sent}, at the "
            "speed of what connects them; an earlier run over as many ranks tells"
        )
    tokens = write_token_count(round(outlook.response_tokens))
    if outlook.response_tokens_from == MAX_NEW_TOKENS:
        lines.append(f"      if responses have {tokens} tokens, their limit; it takes less if they end before")
    else:
        lines.append(f"      if responses have {tokens} tokens on average, as in {outlook.response_tokens_from}")
    if outlook.earlier_runs:
        lines.append(f"      by rates measured now and by the stages of {', '.join(outlook.earlier_runs)}")
    else:
        lines.append("      by rates measured now; after a first short run beside this one it is known better")
    return lines


def _memory(outlook: Outlook) -> list[str]:
    lines = [f"{stage}: layer by layer, since {why}" for stage, why in outlook.by_layer.items()]
    for memory in outlook.memory:
        needs = f"{memory.process} needs about {write_size(memory.peak_bytes)} of {write_size(memory.available_bytes)}"
        lines.append(f"memory: {needs} ({memory.device})")
        if not memory.fits:
            lines.append(f"WARNING: {memory.process} will not fit at {memory.stage}; {memory.advice}")
    return lines


def _rough(span: Span | None) -> str:
    return "" if span is None or not span.likely_seconds else write_rough_seconds(span.likely_seconds)
