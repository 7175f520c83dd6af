"""What each side's device sustains, measured in a job of its own that takes a second or two."""

from collections.abc import Sequence

from mismatch_probe.children.start import Job, run
from mismatch_probe.compare.cost.architecture import Architecture
from mismatch_probe.compare.cost.rates import Calibration, Process
from mismatch_probe.dtypes import Dtype


def measure_rates(
    architecture: Architecture, asked: Sequence[tuple[Process, Dtype]], training_device: str
) -> Calibration:
    """Rates of each process and dtype; the engine's are those of the GPU where PyTorch sees one.

    Raises:
        MismatchProbeError: the device cannot be used, or the job died.
    """
    widths = {
        "hidden": architecture.hidden_size,
        "queries": architecture.num_heads * architecture.head_dim,
        "keys": architecture.num_kv_heads * architecture.head_dim,
        "intermediate": architecture.intermediate_size,
        "heads": architecture.num_heads,
        "head_dim": architecture.head_dim,
    }
    job = Job(
        name="measuring how fast this machine is",
        function="mismatch_probe.training_path.timing:measure",
        arguments=(widths, [list(work) for work in asked], training_device),
        preload="training",
        when_killed="free some and try again",
    )
    return Calibration.model_validate(run(job))
