"""What one side would refuse only after the other has worked, found out before anything starts."""

from mismatch_probe.config.model import CompareSettings
from mismatch_probe.errors import UsageError


def check_sides(settings: CompareSettings) -> None:
    """Refuse settings that no checkpoint could make usable on this machine.

    Raises:
        UsageError: the engine has no such dtype, the device is not there, or the attention does not run on it.
    """
    from mismatch_probe.training_path.loading import choose_device

    if "fp64" in settings.infer_dtypes:
        raise UsageError("vLLM cannot run in fp64; give --train-dtype fp64 with --infer-dtype fp32, fp16 or bf16")
    device = choose_device(settings.training.device)
    if settings.training.attention == "flash_attention_2" and device.type == "cpu":
        raise UsageError("flash_attention_2 needs a GPU, and the training path runs on the CPU; give --attention sdpa")
