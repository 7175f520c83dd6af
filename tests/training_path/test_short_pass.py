"""The chunked head is held against the model's own: another order of summation passes, other logits do not."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError
from mismatch_probe.training_path.batching import ChunkedHead
from mismatch_probe.training_path.observation import short_pass
from mismatch_probe.training_path.precision import load_training_model
from tests.tiny_models import make_checkpoint

WHOLE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_checkpoint(tmp_path_factory.mktemp("wide"), hidden_size=4096)
    settings = TrainingPathSettings()
    return load_training_model(folder, Dtype.FP32, settings, torch.device("cpu"), trust_remote_code=False)[0]


@pytest.mark.slow
def test_a_head_that_adds_up_in_another_order_for_fewer_rows_is_the_models_own(model: PreTrainedModel) -> None:
    def one_product_after_another(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(())
        for place in range(hidden.shape[-1]):
            logits = logits + hidden[..., place : place + 1] @ weight[:, place : place + 1].T
        return logits

    difference = _difference(model, one_product_after_another)
    assert difference > 8 * torch.finfo(torch.float32).eps, "the order of summation makes too little difference here"


def test_a_head_with_slightly_other_logits_for_fewer_rows_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(EngineError, match="other logits in chunks"):
        _difference(model, lambda hidden, weight: hidden @ weight.T * (1 + 1e-4))


def _difference(model: PreTrainedModel, of_few: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """By a short pass whose head computes fewer rows than all so."""

    def head(module: torch.nn.Linear, given: tuple[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
        return logits if given[0].shape[-2] == WHOLE else of_few(given[0], module.weight)

    handle = model.get_output_embeddings().register_forward_hook(head)
    try:
        with torch.no_grad():
            return short_pass(model, ChunkedHead(model)).head_difference
    finally:
        handle.remove()
