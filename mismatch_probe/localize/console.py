"""What was found on one screen, in the page's own tables; plain lines where the output is no terminal."""

from dataclasses import replace

from rich.console import Console

from mismatch_probe.notation import write_estimate, write_many, write_size
from mismatch_probe.records.findings import Localization
from mismatch_probe.report.findings.interventions import best_part, together_sentence, tried_table
from mismatch_probe.report.findings.localize import (
    blocks_table,
    layers_of,
    localize_headline,
    modules_table,
    routers_table,
)
from mismatch_probe.report.screen import print_blank_line, print_line, print_titled, without_intervals
from mismatch_probe.report.view import Table

_MOST_BLOCKS = 40
_BAR = 9


def render_localization(localization: Localization, console: Console) -> None:
    """What stands out, where errors enter and how they grow, and what would mend them."""
    print_blank_line(console)
    _headline(localization, console)
    print_titled(console, _with_bars(localization), without_intervals)
    if localization.modules:
        print_titled(console, modules_table(localization))
    if localization.interventions is not None:
        print_titled(console, tried_table(localization.interventions))
        print_line(console, together_sentence(localization.interventions))
        for what, why in localization.interventions.left_out.items():
            print_line(console, f"Not tried: {what}: {why}.", "dim")
    if localization.routers:
        print_titled(console, routers_table(localization))
    print_line(
        console,
        f"{localization.looked_into_sequences} of {write_many(localization.num_sequences, 'response')} looked into, "
        f"{write_many(localization.looked_into_tokens, 'token')}; "
        f"{write_size(localization.stored_bytes)} of activations stored; "
        + ", ".join(f"{job} job at most {write_size(size)}" for job, size in localization.peak_memory_bytes.items()),
        "dim",
    )


def _headline(localization: Localization, console: Console) -> None:
    for suspect in localization.suspects:
        print_line(console, f"{layers_of(suspect)}{suspect.sentence}", "bold red")
        print_line(console, f"  training path: {', '.join(suspect.train_names)}")
        if suspect.infer_names:
            print_line(console, f"  engine: {', '.join(suspect.infer_names)}")
    if not localization.suspects:
        print_line(console, localize_headline(localization), "bold")
    for sentence in best_part(localization):
        print_line(console, sentence, "bold")
    print_line(
        console,
        f"Token KL (k3) {write_estimate(localization.kl_k3)}, mean abs(d) {write_estimate(localization.mean_abs_diff)}",
    )
    if localization.first_difference is None:
        print_line(console, "Both sides are the same bit for bit at every place that was looked at.")
    else:
        print_line(console, f"The sides first differ at {localization.first_difference}.")
    entered = ", ".join(f"{side}: {name}" for side, name in localization.enters.items())
    print_line(console, f"Largest new error of a block: {entered}.")


def _with_bars(localization: Localization) -> Table:
    """Some of the blocks, evenly, and a bar of the greater error."""
    table = blocks_table(localization)
    grown = [max(block.infer.total.value, block.train.total.value) for block in localization.blocks]
    bars = ["█" * max(1, round(_BAR * error / max(grown))) if error else "" for error in grown]
    rows = [[*row, bar] for row, bar in zip(table.rows, bars, strict=True)]
    return replace(table, columns=[*table.columns, ""], rows=rows[:: -(-len(rows) // _MOST_BLOCKS)])
