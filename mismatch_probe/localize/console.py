"""What was found on one screen; plain lines where the output is no terminal."""

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_probe.inert import plain
from mismatch_probe.notation import write_bytes, write_count, write_estimate, write_number
from mismatch_probe.records.localize import Interventions, Localization, PlaceError, RouterDecisions, Suspect
from mismatch_probe.report.screen import print_line, print_table, screen_table
from mismatch_probe.stats.results import Estimate

_MOST_BLOCKS = 40
_BAR = 24


def render_localization(found: Localization, console: Console) -> None:
    """What stands out, where errors enter and how they grow, and what would mend them."""
    print_line(console, "")
    _headline(found, console)
    _blocks(found.blocks, console)
    if found.modules:
        _modules(found.modules, console)
    if found.interventions is not None:
        _interventions(found.interventions, console)
    if found.routers:
        _routers(found.routers, console)
    print_line(
        console,
        f"{found.looked_into_sequences} of {found.num_sequences} responses looked into, "
        f"{write_count(found.looked_into_tokens)} tokens; {write_bytes(found.stored_bytes)} of activations stored; "
        + ", ".join(f"{job} job at most {write_bytes(size)}" for job, size in found.peak_memory_bytes.items()),
        "dim",
    )


def _headline(found: Localization, console: Console) -> None:
    for suspect in found.suspects:
        print_line(console, _suspicion(suspect), "bold red")
        print_line(console, f"  training path: {', '.join(suspect.train_names)}")
        if suspect.infer_names:
            print_line(console, f"  engine: {', '.join(suspect.infer_names)}")
    if not found.suspects:
        looked = "module" if found.modules else "block"
        print_line(
            console,
            f"No {looked} stands out: on the same input both sides err everywhere as rounding does "
            f"(engine {found.settings.infer_dtype}, training path {found.settings.train_dtype}).",
            "bold",
        )
    print_line(
        console, f"Token KL (k3) {write_estimate(found.kl_k3)}, mean abs(d) {write_estimate(found.mean_abs_diff)}"
    )
    if found.first_difference is None:
        print_line(console, "Both sides are the same bit for bit at every place that was looked at.")
    else:
        print_line(console, f"The sides first differ at {found.first_difference}.")
    entered = ", ".join(f"{side}: {name}" for side, name in found.enters.items())
    print_line(console, f"Largest new error of a block: {entered}.")


def _suspicion(suspect: Suspect) -> str:
    layers = f"layers {', '.join(map(str, suspect.layers))}: " if suspect.layers else ""
    return layers + suspect.sentence


def _blocks(blocks: Sequence[PlaceError], console: Console) -> None:
    """Relative errors against FP32 behind every block, of the sides against each other, and a bar of the greater."""
    table = screen_table(console, "block", "infer", "own", "train", "own", "between", "")
    largest = max(max(block.infer.total.value, block.train.total.value) for block in blocks)
    stride = -(-len(blocks) // _MOST_BLOCKS)
    for block in blocks[::stride]:
        grown = max(block.infer.total.value, block.train.total.value)
        bar = "█" * max(1, round(_BAR * grown / largest)) if largest and grown else ""
        table.add_row(
            *map(
                Text,
                (
                    plain(block.train_name),
                    write_number(block.infer.total.value),
                    write_number(block.infer.own.value),
                    write_number(block.train.total.value),
                    write_number(block.train.own.value),
                    write_number(block.between),
                    bar,
                ),
            )
        )
    _show(console, table, "Relative error against FP32 behind each block; own: what the block adds to what it got")


def _modules(modules: Sequence[PlaceError], console: Console) -> None:
    """Own errors of each place, averaged over the layers."""
    table = screen_table(console, "place", "layers", "infer own", "train own", "ratio at most", "engine's name")
    for name in dict.fromkeys(one.place for one in modules):
        same = [one for one in modules if one.place == name]
        table.add_row(
            *map(
                Text,
                (
                    plain(name),
                    str(len(same)),
                    write_number(fmean(one.infer.own.value for one in same)),
                    write_number(fmean(one.train.own.value for one in same)),
                    f"{max(one.own_ratio for one in same):.3g}",
                    plain(same[0].infer_name or "none"),
                ),
            )
        )
    _show(console, table, "Error that each place adds to the same input, mean over layers")


def _interventions(found: Interventions, console: Console) -> None:
    table = screen_table(console, "in FP32, or otherwise", "side", "removes of the token KL", "time", "weights besides")
    for one in (*found.ranked, *([] if found.together is None else [found.together])):
        time, extra = f"{100 * one.slower:+.0f} %", _weights(one.extra_bytes)
        table.add_row(*map(Text, (plain(one.part), one.side, _share(one.removed), time, extra)))
    _show(console, table, "What higher precision of a part would mend, measured on the same token ids")
    if found.together is not None and found.sum_of_removed is not None:
        added_up = _percent(found.sum_of_removed)
        removed = _share(found.together.removed)
        print_line(
            console, f"All parts of the training path together removed {removed}; one by one, {added_up} % in all."
        )
    for what, why in found.left_out.items():
        print_line(console, f"Not tried: {what}: {why}.", "dim")


def _weights(num_bytes: int) -> str:
    return write_bytes(num_bytes) if num_bytes >= 2**20 else "under 1 MiB" if num_bytes else ""


def _share(removed: Estimate) -> str:
    """`41 % (38-44)`."""
    if removed.low is None or removed.high is None:
        return f"{_percent(removed.value)} %"
    return f"{_percent(removed.value)} % ({_percent(removed.low)} to {_percent(removed.high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _routers(routers: Sequence[RouterDecisions], console: Console) -> None:
    table = screen_table(console, "layer", "infer against FP32", "train against FP32", "the sides from each other")
    for router in routers:
        shares = (str(write_estimate(one)) for one in (router.infer, router.train, router.sides))
        table.add_row(str(router.layer), *shares)
    _show(console, table, "Share of tokens that go to another set of experts")


def _show(console: Console, table: Table, title: str) -> None:
    print_line(console, "")
    print_line(console, title, "bold")
    print_table(console, table)
