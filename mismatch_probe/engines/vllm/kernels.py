"""vLLM's CPU kernels in the place of Triton's, put there once for every engine of a process and of its forks."""

from typing import Final

_REGISTERS: Final = "register_triton_kernel_overrides"


def register_kernels() -> None:
    """Do what vLLM does at every start of an engine, and have it done with.

    vLLM looks at every name of every module, half a second of processor time in a forked process. A module that is
    imported later finds the kernels in place. Versions that register none stay as they are.
    """
    from vllm.platforms import current_platform

    register = getattr(current_platform, _REGISTERS, None)
    if register is not None:
        register()
        setattr(type(current_platform), _REGISTERS, staticmethod(_nothing_left))


def _nothing_left() -> None:
    pass
