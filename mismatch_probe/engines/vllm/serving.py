"""What a vLLM server is extended by so that `train` can send it weights and compare what it then holds.

    VLLM_SERVER_DEV_MODE=1 vllm serve M --enable-scale-out --weight-transfer-config '{"backend": "gloo"}' \
        --worker-extension-cls mismatch_probe.engines.vllm.serving.ServedWorker
"""

from typing import Any

import torch

from mismatch_probe.engines.vllm import weight_transfer  # noqa: F401 - registers the backend
from mismatch_probe.engines.vllm.worker_weights import HeldWeights, pack_again


class ServedWorker(HeldWeights):
    """Methods vLLM mixes into a server's worker class, called over `/collective_rpc`."""

    device: Any

    def probe_repack(self) -> None:
        """Pack again for a CPU what `reload_weights` leaves out."""
        if torch.device(self.device).type == "cpu":
            pack_again(self.get_model())
