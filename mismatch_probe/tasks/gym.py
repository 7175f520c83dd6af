"""Procedural tasks of reasoning-gym (`gym:NAME`), which is installed on request: problems, and its own scoring."""

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Final

from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks.prompt import Prompt

GYM_PREFIX: Final = "gym:"
INSTRUCTION: Final = "\n\nGive the final answer between <answer> and </answer>."


def gym_prompts(source: str, num_prompts: int, seed: int) -> list[Prompt]:
    """Problems of `gym:NAME` under its default settings, each asking for its answer in tags.

    Raises:
        MissingExtra: reasoning-gym is not installed.
        UsageError: it has no task of that name, or one that its defaults cannot make.
    """
    name = source.removeprefix(GYM_PREFIX)
    task = f"{GYM_PREFIX}{name}:{num_prompts}:{seed}"
    _, problems = _made(task)
    return [
        Prompt(
            f"{name}-{index}",
            text=problem["question"] + INSTRUCTION,
            answer=None if problem["answer"] is None else str(problem["answer"]),
            task=task,
        )
        for index, problem in enumerate(problems)
    ]


def gym_scorer(task: str) -> Callable[[EncodedPrompt, str], float]:
    """reasoning-gym's score, from 0 to 1, of what stands in a response's last answer tags, else of the whole response.

    `task` is that of the prompts. Scorers raise on texts that they cannot read as an answer: those score 0. That they
    run at all is tried here, on each problem's own answer.

    Raises:
        MissingExtra: reasoning-gym is not installed.
        UsageError: the scorer raises on an answer that reasoning-gym gave.
    """
    maker, problems = _made(task)
    for problem in problems:
        if problem["answer"] is not None:
            try:
                maker.score_answer(answer=str(problem["answer"]), entry=problem)
            except Exception as error:  # a third party's program
                raise UsageError(
                    f"task {task}: its scorer raised {type(error).__name__} ({error}) on its own answer "
                    f"{problem['answer']!r}; choose another task or another version of reasoning-gym"
                ) from error

    def score(prompt: EncodedPrompt, text: str) -> float:
        problem = problems[int(prompt.prompt_id.rpartition("-")[2])]
        tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
        try:
            return float(maker.score_answer(answer=(tagged[-1] if tagged else text).strip(), entry=problem))
        except Exception:  # noqa: BLE001 - on its own answers it runs, so it is the text that it cannot read
            return 0.0

    return score


def _made(task: str) -> tuple[Any, list[dict[str, Any]]]:
    """The data set of `gym:NAME:SIZE:SEED` and its problems; some tasks make other problems at another size."""
    name, size, seed = task.removeprefix(GYM_PREFIX).rsplit(":", 2)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise MissingExtra(
            f"task {GYM_PREFIX}{name} needs the package reasoning-gym, which is not installed; "
            "run pip install 'mismatch-probe[gym]'"
        ) from error
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=1)
        meant = f"did you mean {GYM_PREFIX}{near[0]}?" if near else f"its tasks are {', '.join(sorted(DATASETS))}"
        raise UsageError(f"reasoning-gym has no task {name!r}; {meant}")
    try:
        maker = create_dataset(name, size=int(size), seed=int(seed))
        return maker, [maker[index] for index in range(int(size))]
    except Exception as error:  # a third party's program
        raise UsageError(
            f"task {GYM_PREFIX}{name} cannot be made by reasoning-gym's defaults ({type(error).__name__}: {error}); "
            "choose another task"
        ) from error
