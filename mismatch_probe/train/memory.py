"""What a process that trains for days must not pile up."""

import os


def bound_kernel_caches() -> None:
    """Call before the first product: oneDNN keeps code and memory for each shape it meets, up to 1024 of them.

    Responses of ever new lengths are ever new shapes: on a CPU some 20 MB a step.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
