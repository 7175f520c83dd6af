"""The plan of a comparison or of a grid of training runs, as an answer."""

from mismatch_probe.ablate.forecast import AblationForecast, VariantForecast
from mismatch_probe.compare.cost.earlier import MAX_NEW_TOKENS
from mismatch_probe.compare.cost.roofline import Span
from mismatch_probe.compare.estimates import DryRun, Outlook, RoundingCheck, StageEstimate
from mismatch_probe.notation import (
    join_names,
    write_about,
    write_count,
    write_many,
    write_rough_seconds,
    write_size,
    write_token_count,
)
from mismatch_probe.report.view import Answer, Badge, Column, Lines, Table

_GIB = 1 << 30


def dry_run_answer(plan: DryRun) -> Answer:
    """How long it takes and whether it fits, then what would be done, stage by stage, and on what that rests."""
    times = {} if plan.outlook is None else {stage.stage: stage.work for stage in plan.outlook.time.stages}
    columns: list[Column[StageEstimate]] = [
        Column("stage", lambda stage: stage.stage),
        Column("responses", lambda stage: write_count(stage.sequences)),
        Column("tokens, at most", lambda stage: write_count(stage.max_tokens)),
        Column("weights, GiB", lambda stage: f"{stage.weight_bytes / _GIB:.3g}"),
        Column("time, about", lambda stage: _rough(times.get(stage.stage))),
    ]
    model = (
        f"{plan.model} ({plan.architecture}, {plan.parameters:,} parameters): "
        f"{write_many(plan.num_prompts, 'prompt')} of up to {write_count(plan.longest_prompt_tokens)} tokens, "
        f"sequences of up to {write_count(plan.longest_sequence_tokens)} tokens"
    )
    headline, badge = _headline(plan.outlook)
    return Answer(
        subject="dry run",
        model=plan.model,
        headline=headline,
        badge=badge,
        screen=[
            Lines([model], follows=True),
            Table.of("Would run; nothing was started", plan.stages, columns),
            Lines(_lines(plan)),
        ],
    )


def _headline(outlook: Outlook | None) -> tuple[str, Badge]:
    if outlook is None:
        return "How long this takes cannot be estimated.", Badge("undecided", "no estimate")
    takes, comma = f"This takes {_about(outlook.total)}", ""
    if outlook.headroom is not None:
        takes, comma = f"{takes}, {_rough(outlook.headroom.time)} of it for headroom", ","
    lacking = [memory.process for memory in outlook.processes if not memory.fits]
    if lacking:
        return f"{takes}, and {join_names(lacking)} will not fit into memory.", Badge("broken", "too large")
    fits = f"{comma} and fits into memory" if outlook.processes else ""
    return f"{takes}{fits}.", Badge("clean", "fits")


def _lines(plan: DryRun) -> list[str]:
    disk = f"disk: at most {plan.max_disk_bytes / _GIB:.3g} GiB"
    if plan.outlook is None:
        return [f"time and memory: no estimate, {plan.no_outlook_because}", disk]
    check = plan.outlook.rounding_check
    return [*_time(plan.outlook), *_memory(plan.outlook), *([] if check is None else [_check_line(check)]), disk]


def _check_line(check: RoundingCheck) -> str:
    """When the check of rounding comes, and what it takes."""
    needs = "".join(
        f" and at most {write_size(memory.peak_bytes)} of {write_size(memory.available_bytes)} ({memory.device})"
        + ("" if memory.fits else ", which do not suffice: such a pair stays undecided")
        for memory in check.memory
    )
    return (
        "later: where a pair would be called a bug by its size alone, the same responses are scored in FP64 too, which "
        f"takes {_about(check.time)} more{needs}"
    )


def _time(outlook: Outlook) -> list[str]:
    time = outlook.time
    longest = max(time.stages, key=lambda stage: stage.work.likely_seconds, default=None)
    dominates = "" if longest is None else f"; the longest stage is {longest.stage}"
    starts = sum(stage.start.likely_seconds for stage in time.stages if stage.start is not None)
    starting = write_rough_seconds(time.ready.likely_seconds + starts)
    in_all = "in all" if outlook.headroom is None else "to compare"
    lines = [f"time: {_about(time.total)} {in_all}, {starting} of it to start processes and load models{dominates}"]
    if time.unknown_starts:
        lines.append(
            f"      and the start of a compiling engine, {len(time.unknown_starts)} times, which no earlier run shows"
        )
    if time.of_servers:
        lines.append(f"      and what the server takes over {', '.join(time.of_servers)}, which nothing here shows")
    if time.over_ranks:
        sent_size = write_size(sum(time.received_bytes.values()))
        lines.append(
            f"      without what ranks send each other over {', '.join(time.over_ranks)}: each is sent {sent_size}, at "
            "the speed of what connects them; an earlier run over as many ranks shows it"
        )
    if outlook.headroom is not None:
        lines.append(
            f"      and {_about(outlook.headroom.time)} for headroom where the checkpoint fits FP16; where it does "
            "not, each try with modules in FP32 takes about two thirds of that again"
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
    for memory in outlook.processes:
        needs = f"{memory.process} needs about {write_size(memory.peak_bytes)} of {write_size(memory.available_bytes)}"
        lines.append(f"memory: {needs} ({memory.device})")
        if not memory.fits:
            lines.append(f"WARNING: {memory.process} will not fit at {memory.stage}; {memory.advice}")
    return lines


def _about(span: Span) -> str:
    return write_about(span.likely_seconds, span.low_seconds, span.high_seconds)


def _rough(span: Span | None) -> str:
    return "" if span is None or not span.likely_seconds else write_rough_seconds(span.likely_seconds)


def _memory_cell(variant: VariantForecast) -> str:
    return "" if variant.memory is None else f"{variant.memory.peak_bytes / _GIB:.3g}"


def grid_forecast_answer(forecast: AblationForecast) -> Answer:
    """How long all cells take, one after the other, and whether one fits into memory."""
    columns: list[Column[VariantForecast]] = [
        Column("variant", lambda variant: variant.label),
        Column("cells to run", lambda variant: write_count(variant.cells)),
        Column("time of each, about", lambda variant: _rough(variant.each)),
        Column("known by", lambda variant: "cells that were run here" if variant.measured else "rates measured now"),
        Column(
            "memory, GiB", lambda variant: "" if variant.memory is None else f"{variant.memory.peak_bytes / _GIB:.3g}"
        ),
    ]
    lacking = [variant for variant in forecast.variants if variant.memory is not None and not variant.memory.fits]
    lines = [f"no estimate of {variant.label}: {variant.because}" for variant in forecast.variants if variant.because]
    lines += [
        f"WARNING: {variant.label} needs about {write_size(variant.memory.peak_bytes)} of "
        f"{write_size(variant.memory.available_bytes)}; {variant.memory.advice}"
        for variant in lacking
        if variant.memory is not None
    ]
    lines.append(
        "Responses are counted at --max-new-tokens, learning as three forward passes; syncs and probes come on top"
    )
    total, cells = forecast.total, write_many(sum(variant.cells for variant in forecast.variants), "cell")
    headline = f"How long {cells} take cannot be estimated."
    if total is not None:
        takes = write_about(total.likely_seconds, total.low_seconds, total.high_seconds)
        headline = f"{cells}, one after the other: {takes}."
    badge = Badge("broken", "too large") if lacking else Badge("clean" if total else "undecided", "forecast")
    return Answer(
        subject="dry run",
        model=forecast.model,
        headline=headline,
        badge=badge,
        screen=[Table.of("Would run; nothing was started", forecast.variants, columns), Lines(lines)],
    )
