"""Guards in the loops of other trainers, one file each; docs/adapters.md says how to switch them on."""


def norm_or_none(grad_norm: float | None) -> float | None:
    """The norm of a gradient; None for the -1 that DeepSpeed writes where it is not finite, and the update left out."""
    return None if grad_norm is not None and grad_norm < 0 else grad_norm
