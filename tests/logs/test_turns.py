"""Whether each turn begins with prompt and completion of the turn before it, and what happened where it does not."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.turns import TurnChecks
from mismatch_probe.records.sequences import LoggedResponse
from tests.logs import turns
from tests.logs.reading import DATA, lines_of, read, written
from tests.logs.turns import CASES, conversation, responses


def checks_of(conversations: list[turns.Turns], text_of=None) -> TurnChecks:
    checks = TurnChecks(text_of)
    for number, made in enumerate(conversations):
        for response in responses(made, f"t{number}"):
            checks.add(response)
    return checks


@pytest.mark.parametrize(("kind", "fault"), CASES, ids=[fault.__name__ for _, fault in CASES])
@pytest.mark.parametrize("num_broken", [1, 10, 40])
def test_a_break_is_named_at_three_strengths(kind, fault, num_broken):
    made = [conversation(number, fault if number < num_broken else None) for number in range(40)]
    checks = checks_of(made)
    reading = checks.reading()
    assert reading.num_trajectories == 40
    assert reading.num_turns == 120
    assert reading.num_broken_trajectories == num_broken
    assert reading.kinds == {kind: num_broken}
    assert reading.num_broken >= num_broken
    [finding] = checks.findings()
    assert finding.code == LogCode.TURNS_BROKEN


def test_turns_that_follow_from_no_other_are_not_said_to_begin_with_one():
    checks = TurnChecks(None)
    for number in range(2):
        response = responses(conversation(number), "t")[0]
        checks.add(response)
    [finding] = checks.findings()
    assert finding.code == LogCode.TURNS
    assert "no turn follows from another" in finding.sentence
    assert finding.sentence.endswith("; 1 turn begins anew")


def test_clean_turns_accuse_nobody():
    checks = checks_of([conversation(number) for number in range(40)])
    assert checks.reading().num_broken == 0
    assert [finding.code for finding in checks.findings()] == [LogCode.TURNS]


def test_the_place_of_a_break_is_that_of_the_first_other_token():
    made = conversation(0, turns.merged)
    [first] = checks_of([made]).reading().breaks
    prompt, completion = made[0]
    assert (first.turn, first.position, first.num_old, first.num_new) == (1, len(prompt) + 10, 2, 1)
    assert (first.old_ids, first.new_ids) == (completion[10:12], [9000])
    assert first.where == "turn 1 of t0"


def test_the_ends_of_blocks_that_are_left_out_are_named():
    [finding] = checks_of([conversation(number, turns.without_thinking) for number in range(5)]).findings()
    assert f"begins with {turns.THINK} and ends with {turns.THINK_END}" in finding.sentence


def test_another_end_of_a_turn_is_no_insertion():
    [first] = checks_of([conversation(0, turns.other_end, turns=2)]).reading().breaks
    assert first.old_ids == [turns.END]
    assert first.new_ids[0] == 9000


def only_before_turn(turn: int, render: turns.Render) -> turns.Render:
    """The history is written anew before one turn, and stands as it was before the others."""
    return lambda random, made, history: render(random, made, history) if len(made) == turn else history


@pytest.mark.parametrize("turn", [1, 2, 3])
@pytest.mark.parametrize("num_lost", [1, 2, 6])
def test_the_last_tokens_of_any_turn_that_are_lost_are_a_break_and_no_branch(turn, num_lost):
    """The history of a later turn begins with that of an earlier one too."""
    lost = only_before_turn(turn, lambda random, made, history: history[:-num_lost])
    reading = checks_of([turns.conversation(number, lost) for number in range(4)]).reading()
    assert (reading.num_broken, reading.num_restarts) == (4, 0)
    assert {each.turn for each in reading.breaks} == {turn}


def test_a_branch_from_an_earlier_turn_breaks_nothing():
    """One goes on from a turn of which another answer was not kept: their first words are alike."""
    made = turns.conversation(0)
    (prompt, completion), other = made[2], turns.words(np.random.default_rng(9), 40)
    branch = [*prompt, *completion[:10], *other, turns.END, *turns.HEADER], completion
    reading = checks_of([[*made[:3], branch]]).reading()
    assert (reading.num_broken, reading.num_restarts) == (0, 0)


def test_one_response_a_trajectory_is_no_turn():
    checks = checks_of([conversation(number, turns=1) for number in range(5)])
    assert checks.reading() is None
    assert checks.findings() == []


class TestNoBreak:
    def test_a_repeated_prompt(self):
        made = conversation(0)
        checks = checks_of([[made[0], made[1], made[1], made[2], made[3]]])
        assert (checks.reading().num_broken, checks.reading().num_turns) == (0, 3)

    def test_a_turn_that_goes_on_from_an_earlier_one(self):
        made = conversation(0)
        side = (made[0][0] + made[0][1] + [77] * 9, [78] * 9)
        assert checks_of([[made[0], side, *made[1:]]]).reading().num_broken == 0

    def test_a_conversation_that_begins_anew(self):
        first, second = conversation(0), conversation(1)
        reading = checks_of([[*first, *second]]).reading()
        assert (reading.num_broken, reading.num_restarts) == (0, 1)

    def test_trajectories_that_are_mixed(self):
        checks = TurnChecks()
        made = [responses(conversation(number), f"t{number}") for number in range(8)]
        for row in zip(*made, strict=True):
            for response in row:
                checks.add(response)
        assert (checks.reading().num_turns, checks.reading().num_broken) == (24, 0)


def test_memory_ends_with_the_trajectories_that_are_open(monkeypatch):
    monkeypatch.setattr("mismatch_probe.logs.turns._MOST_OPEN_TOKENS", 1000)
    checks = checks_of([conversation(number) for number in range(20)])
    assert checks.reading().num_turns == 60
    assert len(checks._open) < 4


@pytest.mark.parametrize(("new", "kind"), [("ab", "retokenized"), ("ax", "template")])
def test_texts_tell_merged_tokens_from_other_ones(new, kind):
    """Of two sampled tokens "a" and "b" that became one."""
    texts = {101: "a", 102: "b", 103: new}
    old = [(list(range(20, 30)), [11, 101, 102, *range(40, 60)])]
    history = [*old[0][0], 11, 103, *range(40, 60)]
    checks = checks_of([[*old, ([*history, 70, 71], [80])]], lambda ids: [texts.get(token, "?") for token in ids])
    assert checks.reading().kinds == {kind: 1}


@pytest.mark.parametrize(("before", "after"), [(1261, 1680), (64, 63), (16, 400)])
def test_another_number_of_an_images_placeholders_is_named_with_both_counts(before, after):
    checks = checks_of([turns.with_images(number, before=before, after=after) for number in range(8)])
    reading = checks.reading()
    assert reading.kinds == {"placeholders": 8}
    assert {(each.position, each.num_old, each.num_new) for each in reading.breaks} == {(2, before, after)}
    [finding] = checks.findings()
    assert f"151655 stands {before:,} times in a row in the turn before, and {after:,} times here" in finding.sentence


@pytest.mark.parametrize(("kind", "fault"), CASES, ids=[fault.__name__ for _, fault in CASES])
def test_images_that_are_as_they_were_change_no_other_break(kind, fault):
    clean = checks_of([turns.with_images(number) for number in range(8)]).reading()
    assert (clean.num_broken, clean.kinds) == (0, {})
    if fault in (turns.without_thinking, turns.merged, turns.split, turns.other_end):
        broken = checks_of([turns.with_images(number, render=fault) for number in range(8)]).reading()
        assert broken.kinds == {kind: 8}


def test_an_edit_is_the_shortest():
    made = conversation(0, lambda random, turns, history: [*history[:45], *history[48:]])
    [first] = checks_of([made]).reading().breaks
    assert (first.position, first.num_old, first.num_new) == (45, 3, 0)


class TestJoinedTurns:
    """Responses that hold several turns, with what lies between them out of the mask."""

    def joined(self, made: turns.Turns, sampled_from: int = 0) -> LoggedResponse:
        first, last = made[0][0], made[-1]
        ids = [*last[0], *last[1]][len(first) :]
        mask = np.zeros(len(ids), np.bool_)
        for prompt, completion in made[sampled_from:]:
            mask[len(prompt) - len(first) :][: len(completion)] = True
        return LoggedResponse(
            where="a line",
            prompt_token_ids=np.array(first, np.int32),
            token_ids=np.array(ids, np.int32),
            sampled=mask,
            trajectory="t",
        )

    def test_they_are_counted(self):
        checks = TurnChecks()
        checks.add(self.joined(conversation(0)))
        reading = checks.reading()
        assert (reading.num_trajectories, reading.num_turns, reading.num_broken) == (1, 3, 0)

    @pytest.mark.parametrize("render", [None, turns.without_thinking], ids=["clean", "dropped"])
    def test_a_branch_is_compared_with_the_path_before_it(self, render):
        """As a tree of messages has a second leaf where a prompt was written anew."""
        checks = TurnChecks()
        made = conversation(0)
        checks.add(self.joined(made[:3]))
        last = made[2]
        history = [*last[0], *last[1]] if render is None else render(np.random.default_rng(0), made[:3], [])
        checks.add(self.joined([made[0], ([*history, 60, 61, 62], [70, 71])], 1))
        reading = checks.reading()
        assert (reading.num_turns, reading.num_broken) == (3, render is not None)
        assert reading.kinds == ({} if render is None else {"dropped": 1})


def trajectories_of(path: Path) -> list[str | None]:
    return [response.trajectory for response in read(path)[0]]


def test_formats_say_which_responses_are_turns_of_one_trajectory(tmp_path):
    answers = [line | {"trajectory": "a"} for line in lines_of(DATA / "vllm_responses" / "answers.jsonl")]
    assert set(trajectories_of(written(tmp_path / "answers.jsonl", answers))) == {"a"}
    calls = lines_of(DATA / "tinker" / "capture" / "sample.jsonl")
    for number, call in enumerate(calls):
        call["scope"] |= {"traj_idx": number % 2}
    assert set(trajectories_of(written(tmp_path / "sample.jsonl", calls))) >= {"train/0/0", "train/0/1"}
    traces = DATA / "prime_rl_traces" / "rollouts" / "step_1" / "train" / "all" / "traces.jsonl"
    assert len(set(trajectories_of(traces))) == len(lines_of(traces))
    assert len(set(trajectories_of(DATA / "verl"))) == 4


class TestJoining:
    """A turn behind a break, as a trainer has it that joins the turns."""

    @pytest.mark.parametrize(
        "fault", [turns.merged, turns.split, turns.without_thinking, turns.other_header, turns.other_end]
    )
    def test_its_prompt_is_all_that_was_sampled_and_observed_before(self, fault):
        checks = TurnChecks()
        clean, broken = conversation(3, turns=3), conversation(3, fault, turns=3)
        joined = [checks.add(response) for response in responses(broken, "t")]
        assert joined[0] is None
        history = [*broken[0][0], *broken[0][1]]
        for number in (1, 2):
            prompt, completion = broken[number]
            observation = prompt[len(prompt) - len(clean[1][0]) + len(clean[0][0]) + len(clean[0][1]) :]
            history += observation
            assert joined[number].prompt_token_ids.tolist() == history
            assert joined[number].token_ids.tolist() == completion
            history += completion
        assert checks.reading().num_joined == 2

    def test_clean_turns_and_other_conversations_are_as_they_were(self):
        checks = TurnChecks()
        made = [*conversation(0), *conversation(1)]
        assert [checks.add(response) for response in responses(made, "t")] == [None] * 8
