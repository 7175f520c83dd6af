"""The answer on one screen; plain lines where the output is no terminal."""

from dataclasses import replace

from rich.console import Console

from mismatch_probe.headroom.sentences import raised
from mismatch_probe.records.headroom import GradientFindings, Headroom, HeadroomCode, LayerRange, Trial
from mismatch_probe.report.findings.gradients import underflow_table
from mismatch_probe.report.findings.headroom import layers_table
from mismatch_probe.report.screen import print_line, print_titled
from mismatch_probe.report.view import Table

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
        print_titled(console, layers_table(_nearest(found.activations.layers)))
    tried = next((one for one in (found.plain, found.advised) if one is not None and one.scales), None)
    if tried is not None and found.gradients is not None:
        print_titled(console, _scales(found.gradients, tried))
    if found.sampled_by is not None:
        print_line(console, f"responses sampled by {found.sampled_by}; device {found.device}", "dim")
    for advice in found.verdict.advice:
        print_line(console, f"Advice: {advice}")


def _nearest(layers: list[LayerRange]) -> list[LayerRange]:
    """The layers with the least room, in the model's order."""
    nearest = sorted(layers, key=lambda one: float("-inf") if one.margin_bits is None else one.margin_bits)
    shown = {one.layer for one in nearest[:_MOST_LAYERS]}
    return [one for one in layers if one.layer in shown]


def _scales(gradients: GradientFindings, trial: Trial) -> Table:
    """Every other loss scale that was tried, and those between which FP16 fits."""
    ends = (trial.from_exponent, trial.to_exponent)
    tried = {one.exponent for one in trial.scales if not one.exponent % 2 or one.exponent in ends}
    underflow = [one for one in gradients.underflow if one.exponent in tried]
    above = f", with {raised(trial)} in FP32" if trial.modules_in_fp32 or trial.residual_in_fp32_from else ""
    table = underflow_table(gradients.model_copy(update={"underflow": underflow}), trial)
    return replace(table, caption=f"{table.caption}{above}")
