"""A few updates of policy and critic from fixed responses, on every rank that torchrun starts: what each one found.

python -m tests.train.ppo_on_ranks CHECKPOINT OUTPUT
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from mismatch_probe.config.train import OptimizerSettings, PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.distributed import is_main, join_process_group
from mismatch_probe.train.learner import rollout_batch
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.losses import plan_loss
from mismatch_probe.train.optimizer import Critic, Optimizer, Updater
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.sharded import ValueModel

UPDATES = 2
ONE_RESPONSE = 1
"""A micro-batch too small for two responses, so that ranks with fewer of them need fillers."""


def responses() -> list[Rollout]:
    """Eleven, so that two ranks have different numbers of them."""
    random = np.random.default_rng(0)
    rollouts = []
    for row in range(11):
        length = int(random.integers(3, 15))
        ids = random.integers(0, 250, 6 + length).tolist()
        sequence = TokenSequence(f"row-{row}", ids[:6], ids[6:])
        rollouts.append(Rollout(sequence, -random.exponential(2.0, length), f"p{row // 2}", float(row % 3), False, ""))
    return rollouts


def main(checkpoint: str, output: str) -> None:
    join_process_group(torch.device("cpu"))
    settings, rate = PolicySettings(device="cpu"), OptimizerSettings(learning_rate=1e-3)
    policy = Policy(Path(checkpoint), Dtype.FP32, settings, temperature=1.0)
    model = ValueModel(Path(checkpoint), Dtype.FP32, settings)
    own, critics = (Optimizer(one.trainable(), rate, steps=UPDATES, scale=None) for one in (policy, model))
    updater = Updater(policy, own, Critic(model, critics, ONE_RESPONSE), ONE_RESPONSE)
    rollouts = responses()
    rows = range(len(rollouts))
    messages = []
    for step in range(1, UPDATES + 1):
        scored = updater.score(rollouts, keep_graph=False)
        batch = rollout_batch(rollouts, scored.log_pi_T, [True] * len(rollouts), scored.values_T)
        update = plan_loss(build_objective("ppo"), batch, 16).update()
        messages.append(updater.accumulate(update, rollouts, rows, scored))
        updater.step(step, 1.0)
    last = updater.score(rollouts, keep_graph=False)
    assert last.values_T is not None
    if is_main():
        outcome = {"told": messages, "log_pi": last.log_pi_T.tolist(), "values": last.values_T.tolist()}
        Path(output).write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
