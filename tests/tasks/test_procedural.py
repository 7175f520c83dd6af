import re

import pytest

from mismatch_probe.config.model import PromptSettings
from mismatch_probe.errors import UsageError
from mismatch_probe.tasks import load_prompts, verify
from mismatch_probe.tasks.problems import TASKS, ProblemSet, TermRange
from mismatch_probe.tasks.source import parse_problem_set


def load(source: str, num_prompts: int = 8, seed: int = 0):
    return load_prompts(PromptSettings(source=source, num_prompts=num_prompts), seed)


def test_the_worked_answer_of_a_sum_is_arithmetic_that_holds_at_every_step():
    problem = ProblemSet(TASKS["sums"], TermRange(30, 30), seed=1).problem(0)
    terms = [int(term.split(":")[1]) for term in problem.question.removeprefix("sum ").split()]
    first, *steps = problem.solution.split(";")
    numbers = [tuple(map(int, re.split(r"[:+=]", step))) for step in steps]
    assert first == f"1:{terms[0]}"
    assert all(left + term == total for _, left, term, total in numbers)
    assert [number for number, _, _, _ in numbers] == list(range(2, 31))
    assert [term for _, _, term, _ in numbers] == terms[1:]
    assert int(problem.answer) == sum(terms)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_task_verifies_its_own_worked_answer_and_no_other(task):
    problems = ProblemSet(task, TermRange(4, 4), seed=0)
    right, other = problems.problem(0), problems.problem(1)
    assert verify(task.name, right.answer, right.solution)
    assert verify(task.name, right.answer, right.solution + " ")
    assert not verify(task.name, right.answer, other.solution)
    assert not verify(task.name, right.answer, right.solution + "0")
    assert not verify(task.name, right.answer, "")


def test_a_sum_is_judged_by_its_last_total_alone():
    assert verify("sums", "30", "1:20;2:20+10=30")
    assert not verify("sums", "30", "1:20;2:20+10=30;3:30+1=31")


def test_a_problem_depends_on_its_index_and_the_seed_but_not_on_how_many_are_asked_for():
    assert load("sums:long", 3) == load("sums:long", 9)[:3]
    assert load("sums:long", 3, seed=0) != load("sums:long", 3, seed=1)
    assert len({prompt.text for prompt in load("sums:medium", 64)}) == 64


def test_prompt_ids_are_unique():
    assert len({prompt.prompt_id for prompt in load("copy:easy", 64)}) == 64


def test_the_number_of_terms_can_be_given_as_a_number_or_as_a_range():
    assert {len(prompt.text.split()) - 1 for prompt in load("sums:terms=12")} == {12}
    assert {len(prompt.text.split()) - 1 for prompt in load("sums:terms=3-5", 64)} == {3, 4, 5}


def test_a_task_without_a_split_is_its_medium_split():
    assert parse_problem_set("sums", 0, "--prompts") == parse_problem_set("sums:medium", 0, "--prompts")


@pytest.mark.parametrize("source", ["sums:giant", "copy:giant", "sums:seed=3"])
def test_an_unknown_split_is_refused_with_the_list_of_those_that_exist(source):
    with pytest.raises(UsageError, match="easy, medium, hard, long"):
        load(source)


@pytest.mark.parametrize("terms", ["1", "100", "5-3", "x", "", "3-", "-4"])
def test_a_number_of_terms_out_of_range_is_refused(terms):
    with pytest.raises(UsageError, match="within 2-99"):
        load(f"sums:terms={terms}")


def test_an_unknown_task_is_refused_with_the_list_of_those_that_exist():
    with pytest.raises(UsageError, match=r"'mathematics' is unknown.*sums, copy"):
        load("mathematics")
