"""Holm's step-down test: which of several claims hold, with the chance of any false one held at the level."""

from collections.abc import Callable, Sequence


def holm_rejected(p_values: Sequence[float], nominal: Callable[[int], float]) -> list[bool]:
    """Which hypotheses are rejected [Holm 1979, Scandinavian Journal of Statistics 6:65].

    `nominal(m)` is the level of a test that gets an m-th of the error budget; with looks it is the look's own level
    for alpha / m, which makes this the group-sequential step-down procedure of Maurer and Bretz [2013, Statistics in
    Biopharmaceutical Research 5:311].
    """
    rejected = [False] * len(p_values)
    for number, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > nominal(len(p_values) - number):
            break
        rejected[index] = True
    return rejected
