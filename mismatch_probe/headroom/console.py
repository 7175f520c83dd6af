"""The answer on one screen; plain lines where the output is no terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatch_probe.headroom.sentences import raised
from mismatch_probe.inert import plain
from mismatch_probe.notation import ABSENT, write_number
from mismatch_probe.records.headroom import Headroom, HeadroomCode, LayerRange, Trial
from mismatch_probe.report.screen import print_line, print_table, screen_table

_STYLES = {
    HeadroomCode.FITS: "bold green",
    HeadroomCode.FITS_WITH_LOSS_SCALE: "bold green",
    HeadroomCode.FITS_EXCEPT: "bold yellow",
    HeadroomCode.DOES_NOT_FIT: "bold red",
}
_MOST_LAYERS = 12


def render_headroom(found: Headroom, console: Console) -> None:
    """Verdict, what shows it, the layers nearest to the limit, the loss scales, and what to do."""
    print_line(console, "")
    print_line(console, f"{found.verdict.code}: {found.verdict.sentence}", _STYLES[found.verdict.code])
    print_line(console, "")
    for line in found.verdict.evidence:
        print_line(console, line)
    if found.activations is not None:
        _layers(found.activations.layers, console)
    tried = next((one for one in (found.plain, found.advised) if one is not None and one.scales), None)
    if tried is not None:
        _scales(found, tried, console)
    if found.sampled_by is not None:
        print_line(console, f"responses sampled by {found.sampled_by}; device {found.device}", "dim")
    for advice in found.verdict.advice:
        print_line(console, f"Advice: {advice}")


def _layers(layers: list[LayerRange], console: Console) -> None:
    """The layers with the least room, in the model's order."""
    nearest = sorted(layers, key=lambda one: float("-inf") if one.margin_bits is None else one.margin_bits)
    shown = {one.layer for one in nearest[:_MOST_LAYERS]}
    table = screen_table(
        console, "layer", "residual", "bits left", "outlier ratio", "q k", "into softmax", "MLP product"
    )
    for one in layers:
        if one.layer in shown:
            bits = ABSENT if one.margin_bits is None else f"{one.margin_bits:.1f}"
            numbers = (one.residual, one.outlier_ratio, one.attention_scores, one.attention_logits, one.mlp_product)
            residual, *rest = map(write_number, numbers)
            table.add_row(*map(Text, (plain(one.layer), residual, bits, *rest)))
    _show(console, table, "Largest magnitudes in FP32, of 65,504")


def _scales(found: Headroom, trial: Trial, console: Console) -> None:
    assert found.gradients is not None
    underflow = {one.exponent: one for one in found.gradients.underflow}
    table = screen_table(
        console, "loss scale", "zero: activations", "zero: weights", "largest", "gradient error", "fits"
    )
    low, high = trial.from_exponent, trial.to_exponent
    for one in trial.scales:
        if one.exponent % 2 and one.exponent not in (low, high):
            continue
        at = underflow[one.exponent]
        fits = low is not None and high is not None and low <= one.exponent <= high
        error = "overflows" if one.relative_error is None else write_number(one.relative_error)
        shares = (f"{100 * share:.2g} %" for share in (at.activations_flushed, at.parameters_flushed))
        cells = (f"2^{one.exponent}", *shares, write_number(at.largest_scaled), error, "yes" if fits else "")
        table.add_row(*map(Text, cells))
    above = f", with {raised(trial)} in FP32" if trial.modules_in_fp32 or trial.residual_in_fp32_from else ""
    _show(console, table, f"FP16 gradients: what underflows, the largest, and the error of a true run{above}")


def _show(console: Console, table: Table, title: str) -> None:
    print_line(console, "")
    print_line(console, title, "bold")
    print_table(console, table)
    print_line(console, "")
