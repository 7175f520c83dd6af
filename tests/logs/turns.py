"""Trajectories of several turns as tests plant them: clean, and with one fault each."""

from collections.abc import Callable

import numpy as np

from mismatch_probe.records.sequences import LoggedResponse

SYSTEM, START, END, THINK, THINK_END, NEW_LINE, TOOL = 1, 2, 3, 4, 5, 6, 7
HEADER = [START, 8, NEW_LINE]
"""What the template writes before a completion."""

Turns = list[tuple[list[int], list[int]]]
"""The prompt and the completion of each."""
Render = Callable[[np.random.Generator, Turns, list[int]], list[int]]
"""The history of a turn as the next prompt begins with it, from the true one."""


def words(random: np.random.Generator, count: int) -> list[int]:
    return random.integers(20, 5000, count).tolist()


def conversation(number: int, render: Render | None = None, *, turns: int = 4, answer: int = 30) -> Turns:
    """A trajectory whose history is written anew before each turn by `render`, or as it was."""
    random = np.random.default_rng(number)
    made: Turns = []
    prompt = [SYSTEM, *words(random, 12), END, START, 9, NEW_LINE, *words(random, 8), END, *HEADER]
    for _ in range(turns):
        completion = [THINK, *words(random, answer), THINK_END, *words(random, answer), END]
        made.append((prompt, completion))
        history = [*prompt, *completion]
        if render is not None:
            history = render(random, made, history)
        observation = [NEW_LINE, START, TOOL, NEW_LINE, *[11] * 5, *words(random, 20), END]
        prompt = [*history, *observation, *HEADER]
    return made


def responses(made: Turns, name: str) -> list[LoggedResponse]:
    return [
        LoggedResponse(
            where=f"turn {number} of {name}",
            prompt_token_ids=np.array(prompt, np.int32),
            token_ids=np.array(completion, np.int32),
            sampled=np.ones(len(completion), np.bool_),
            log_mu=-np.random.default_rng(number).exponential(1.0, len(completion)) - 1e-3,
            trajectory=name,
        )
        for number, (prompt, completion) in enumerate(made)
    ]


def merged(random: np.random.Generator, made: Turns, history: list[int]) -> list[int]:
    """Two sampled tokens become one other."""
    place = len(made[-1][0]) + 10
    return [*history[:place], 9000, *history[place + 2 :]]


def split(random: np.random.Generator, made: Turns, history: list[int]) -> list[int]:
    """A sampled token becomes three others."""
    place = len(made[-1][0]) + 10
    return [*history[:place], 9000, 9001, 9002, *history[place + 1 :]]


def without_thinking(random: np.random.Generator, made: Turns, history: list[int]) -> list[int]:
    prompt, completion = made[-1]
    return [*prompt, *completion[completion.index(THINK_END) + 1 :]]


def other_header(random: np.random.Generator, made: Turns, history: list[int]) -> list[int]:
    """Of the system's message."""
    return [SYSTEM, 9000, 9001, *history[2:]]


def inserted_thinking(random: np.random.Generator, made: Turns, history: list[int]) -> list[int]:
    """A template that writes an empty block before a completion."""
    prompt, completion = made[-1]
    return [*prompt, THINK, NEW_LINE, THINK_END, *completion]


def other_end(random: np.random.Generator, made: Turns, history: list[int]) -> list[int]:
    return [*history[:-1], 9000]


def shifted_observation(random: np.random.Generator, made: Turns, history: list[int]) -> list[int]:
    """The observation before the last completion loses its head."""
    if len(made) < 2:
        return history
    start = len(made[-2][0]) + len(made[-2][1])
    return [*history[:start], *history[start + 6 :]]


def written_anew(random: np.random.Generator, made: Turns, history: list[int]) -> list[int]:
    start = len(made[0][0]) + 5
    return [*history[:start], *words(random, 60)]


IMAGE, IMAGE_START = 151655, 151652


def with_images(number: int, *, before: int = 64, after: int = 64, render: Render | None = None) -> Turns:
    """A conversation whose first prompt shows an image: `before` placeholders there, `after` in later turns."""
    made = conversation(number, render)
    picture = [IMAGE_START, *[IMAGE] * before, IMAGE_START + 1]
    later = [IMAGE_START, *[IMAGE] * after, IMAGE_START + 1]
    return [
        ([prompt[0], *(later if turn else picture), *prompt[1:]], completion)
        for turn, (prompt, completion) in enumerate(made)
    ]


FAULTS: dict[str, list[Render]] = {
    "retokenized": [merged, split],
    "dropped": [without_thinking],
    "template": [other_header, inserted_thinking, other_end],
    "observation": [shifted_observation],
    "rewritten": [written_anew],
}
CASES = [(kind, fault) for kind, faults in FAULTS.items() for fault in faults]
