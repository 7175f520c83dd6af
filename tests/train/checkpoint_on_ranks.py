"""A checkpoint of policy and critic, written or read by every rank that torchrun starts: sums of all tensors.

python -m tests.train.checkpoint_on_ranks write|read CHECKPOINT FOLDER OUTPUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from mismatch_probe.config.train import OptimizerSettings, PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.distributed import is_main, join_process_group
from mismatch_probe.train.optimizer import Optimizer, TrainedNetwork
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.sharded import ValueModel, full_tensor_of

REST: dict[str, Any] = {
    **{"earned": {}, "last_good_step": 0},
    **{"adjustments": {}, "optimizers": {}, "sync": {}, "guards": {}},
}


def learn(trained: dict[str, TrainedNetwork]) -> None:
    """Two steps along gradients that differ from parameter to parameter and from number to number."""
    for _ in range(2):
        for one in trained.values():
            for parameter in one.module.parameters():
                parameter.grad = parameter.detach().sin() + 0.01
            one.optimizer.step(1e-2)


def sums(trained: dict[str, TrainedNetwork]) -> dict[str, list[float]]:
    """Of every weight and moment: two sums in FP64, one with every second sign turned."""
    found = {}
    for network, one in trained.items():
        for name, parameter in one.module.named_parameters():
            moments = one.optimizer.adamw.state[parameter]
            for kind, tensor in {"weight": parameter, **moments}.items():
                flat = full_tensor_of(tensor).double().flatten()
                signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(flat.numel() // 2 + 1)[: flat.numel()]
                found[f"{network}.{name}.{kind}"] = [float(flat.sum()), float((flat * signs).sum())]
    return found


def main(what: str, checkpoint: str, folder: str, output: str) -> None:
    join_process_group(torch.device("cpu"))
    settings, rate = PolicySettings(device="cpu"), OptimizerSettings()
    policy = Policy(Path(checkpoint), Dtype.FP32, settings, temperature=1.0)
    critic = ValueModel(Path(checkpoint), Dtype.FP32, settings)
    trained = {
        name: TrainedNetwork(model.module, Optimizer(model.trainable(), rate, steps=4, scale=None))
        for name, model in (("policy", policy), ("critic", critic))
    }
    checkpoints = Checkpoints(Path(folder), keep=1)
    if what == "write":
        learn(trained)
        checkpoints.save(1, trained, policy, AutoTokenizer.from_pretrained(checkpoint), REST)
    else:
        assert checkpoints.load(1, trained) == REST
    found = sums(trained)
    if is_main():
        Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
