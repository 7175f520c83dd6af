"""V in training: the body of the policy's checkpoint under a scalar head."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.adapters import whole
from mismatch_probe.train.sharded import ShardedModel
from mismatch_probe.training_path.prefixes import StateBatch


class TokenValues(torch.nn.Module):
    """What is expected to be earned, at the states in which response tokens are chosen.

    The head starts at zero: before any learning no state is worth more than another.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = model.base_model
        hidden_size = model.config.get_text_config().hidden_size
        self.head_D = torch.nn.Parameter(torch.zeros(hidden_size, device=model.device))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=model.device))

    def forward(self, batch: StateBatch) -> torch.Tensor:
        """Values [T] of the states before the batch's response tokens; the head's product is in FP32."""
        device = self.head_D.device
        hidden_BSD = self.body(**batch.model_inputs(device), use_cache=False).last_hidden_state
        hidden_QD = hidden_BSD.flatten(0, 1)[batch.states_Q.to(device)]
        values_Q: torch.Tensor = hidden_QD.float() @ self.head_D.float() + self.bias.float()
        return values_Q[batch.questions_T.to(device)]


class ValueModel(ShardedModel[TokenValues]):
    """Computed as the policy is; adapters, where asked for, are in its body, beside a head that is trained whole."""

    def __init__(
        self,
        folder: Path,
        dtype: Dtype,
        settings: PolicySettings,
        *,
        trust_remote_code: bool = False,
        seed: int = 0,
    ) -> None:
        """Raises as `ShardedModel`."""
        super().__init__(folder, dtype, settings, TokenValues, trust_remote_code=trust_remote_code, seed=seed)

    def expect(self, earned: float) -> None:
        """Where nothing has been learnt yet, value every state at `earned`.

        What the first gradients then tell the body is how states differ. From values of zero they would all ask it for
        more of the same, for as long as the mean takes to be reached, until it says the same of every state.
        """
        with torch.no_grad():
            if not bool(whole(self.module.head_D).any()):
                self.module.bias.fill_(earned)

    def values(self, sequences: list[TokenSequence]) -> torch.Tensor:
        """Of the response tokens [T] of a micro-batch, each before it is chosen, with a gradient where one is wanted.

        Raises:
            UsageError: a sequence has no prompt token, or an id outside the vocabulary.
            OutOfMemory: it does not fit.
        """
        values_T: torch.Tensor = self._compute(sequences)
        return values_T
