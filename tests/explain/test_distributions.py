"""Many distributions from one pass of logits, against each computed alone from its definition."""

from typing import Final

import numpy as np
import pytest
import torch

from mismatch_probe.causes.comparison import Code
from mismatch_probe.explain.families import of_distribution
from mismatch_probe.explain.fitting import INVERSE_TEMPERATURES, Distribution, curve, log_normalisers, log_probs

LOGITS = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 60)) * 3).float()
TARGETS = torch.from_numpy(np.random.default_rng(1).integers(0, 60, 40))
CUTS = [
    Distribution(1.0),
    Distribution(0.7),
    Distribution(1.0, top_p=0.9),
    Distribution(1.0, top_k=5),
    Distribution(1.0, min_p=0.1),
    Distribution(0.7, top_p=0.8, top_k=20, min_p=0.01),
]


def by_definition(logits: np.ndarray, target: int, cut: Distribution) -> float:
    """vLLM's order: temperature, min-p, top-k, top-p; and the target is kept."""
    scaled = np.exp((logits - logits.max()) / (cut.temperature or 1))
    order = np.argsort(-scaled)
    probabilities = scaled[order] / scaled.sum()
    kept = probabilities >= cut.min_p * probabilities[0]
    if cut.top_k:
        kept[cut.top_k :] = False
    within = np.where(kept, probabilities, 0) / probabilities[kept].sum()
    kept &= np.cumsum(within) - within < cut.top_p
    place = int(np.flatnonzero(order == target)[0])
    kept[: place + 1] = True
    return float(np.log(probabilities[place] / probabilities[kept].sum()))


@pytest.mark.parametrize("number", range(len(CUTS)))
def test_every_distribution_is_as_defined(number: int) -> None:
    temperatures = torch.tensor([[cut.temperature or 1.0] * len(TARGETS) for cut in CUTS])
    found = log_probs(LOGITS, TARGETS, temperatures, CUTS)[number].numpy()
    expected = [by_definition(LOGITS[row].double().numpy(), int(TARGETS[row]), CUTS[number]) for row in range(40)]
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_curve_is_exact_between_its_grid() -> None:
    own = LOGITS.gather(-1, TARGETS[:, None]).squeeze(-1).double().numpy()
    found = curve(own, log_normalisers(LOGITS).double().numpy())
    for temperature in (0.26, 0.7123, 1.0, 3.9):
        exact = torch.log_softmax(LOGITS.double() / temperature, -1).gather(-1, TARGETS[:, None]).squeeze(-1).numpy()
        assert found.at(temperature) == pytest.approx(exact, abs=1e-4)
    assert INVERSE_TEMPERATURES.min() == 0.25


SILENT: Final = np.full(4, np.nan)


def declared(code: Code, as_declared: Distribution, logged: np.ndarray = SILENT) -> str:
    """What the hypotheses of a cause say is declared in their place."""
    options = [option for family in of_distribution(as_declared, logged) for option in family.options]
    [words] = {option.departure.declared for option in options if option.departure.code == code}
    return words


@pytest.mark.parametrize(
    ("as_declared", "logged", "words"),
    [
        (Distribution(1.0), SILENT, "the log declares none and 1 is taken"),
        (Distribution(1.0), np.ones(4), "the log declares 1"),
        (Distribution(0.7), np.full(4, 0.7), "the log declares 0.7"),
        (Distribution(0.7), np.ones(4), "--temperature declares 0.7"),
        (Distribution(0.7), SILENT, "--temperature declares 0.7"),
        (Distribution(None), np.array([0.7, 1.0]), "the log declares several"),
    ],
)
def test_another_temperature_says_which_one_is_declared(
    as_declared: Distribution, logged: np.ndarray, words: str
) -> None:
    assert declared(Code.TEMPERATURE, as_declared, logged) == words


def test_another_cut_says_which_one_is_declared() -> None:
    assert declared(Code.TRUNCATED_SUPPORT, Distribution(1.0)) == "no cut is declared"
    assert declared(Code.TRUNCATED_SUPPORT, Distribution(1.0, top_p=0.95)) == "top-p 0.95 is declared"
    several = Distribution(1.0, top_p=0.95, top_k=20)
    assert declared(Code.TRUNCATED_SUPPORT, several) == "top-p 0.95 and top-k 20 are declared"
    in_sets = Distribution(1.0, in_sets=True)
    assert declared(Code.TRUNCATED_SUPPORT, in_sets) == "the log declares what each token was drawn from"
    assert declared(Code.RAW_LOGPROBS, Distribution(0.7)) == "temperature 0.7 is declared and no cut is declared"
    assert declared(Code.RAW_LOGPROBS, several) == "top-p 0.95 and top-k 20 are declared"
