"""What a server imports that computes with torch before it forks, and a job of several threads."""

from threading import Barrier, Thread

import torch

from mismatch_probe.children.messages import Send

_THREADS = 6
torch.set_num_threads(2)
_TENSORS = [torch.zeros(400_000) for _ in range(_THREADS)]


def computes_in_threads(send: Send) -> list[str]:
    """What torch complains of where several threads are the first to compute."""
    together, complaints = Barrier(_THREADS), []

    def compute(tensor: torch.Tensor) -> None:
        together.wait()
        try:
            tensor.add_(1)
        except RuntimeError as error:
            complaints.append(str(error))

    threads = [Thread(target=compute, args=(tensor,)) for tensor in _TENSORS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return complaints
