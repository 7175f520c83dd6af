"""What stands at the edges of masks: a response prefix trained as if it was sampled, and masks that are a token off."""

from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.causes.findings import Level, LogCode
from mismatch_probe.logs import LogChecks
from mismatch_probe.logs.row import LogFinding, split_by_mask
from mismatch_probe.records.sequences import LoggedResponse

CODES = (LogCode.CONSTANT_HEAD, LogCode.MASK_EDGE)
PREFIX = [901, 902, 903, 904, 905, 906, 907, 908, 909, 910, 911, 912]


def response(number: int, *, rounds: int = 3, with_pi: bool = True) -> LoggedResponse:
    """Of several rounds: 20 sampled tokens that end with 2, then 12 of a tool with one header."""
    random = np.random.default_rng(number)
    ids: list[int] = []
    sampled: list[bool] = []
    for turn in range(rounds):
        ids += [*random.integers(20, 800, 19).tolist(), 2]
        sampled += [True] * 20
        if turn < rounds - 1:
            ids += [5, 6, 7, *random.integers(20, 800, 6).tolist(), 8, 9, 10]
            sampled += [False] * 12
    mask = np.array(sampled)
    log_mu = np.where(mask, -1e-3 - random.exponential(1.0, mask.size), 0.0)
    log_mu[np.array(ids) == 2] = -0.02
    log_pi = -np.abs(log_mu + np.where(mask, random.normal(0, 0.01, mask.size), 0.0))
    return LoggedResponse(
        where=f"line {number}",
        prompt_token_ids=np.array([1, *random.integers(20, 800, 5)], np.int32),
        token_ids=np.array(ids, np.int32),
        sampled=mask,
        log_mu=log_mu,
        log_pi=log_pi if with_pi else None,
    )


def log(count: int = 24, **settings) -> list[LoggedResponse]:
    return [response(number, **settings) for number in range(count)]


def edges_found(responses: list[LoggedResponse]) -> list[tuple[str, object]]:
    checks = LogChecks()
    for each in responses:
        checks.add(each)
    return [
        (finding.code, finding.evidence.get("edge", finding.evidence.get("tokens")))
        for finding in checks.findings()
        if finding.code in CODES
    ]


def with_prefix(each: LoggedResponse, length: int, log_mu: float, log_pi: float) -> LoggedResponse:
    """`length` tokens that were not sampled stand first under the mask, with these log-probs."""

    def grown(values, first):
        return None if values is None else np.concatenate([first, values])

    return replace(
        each,
        token_ids=grown(each.token_ids, np.array(PREFIX[:length], np.int32)),
        sampled=grown(each.sampled, np.ones(length, np.bool_)),
        log_mu=grown(each.log_mu, np.full(length, log_mu)),
        log_pi=grown(each.log_pi, np.full(length, log_pi)),
    )


@pytest.mark.parametrize("length", [1, 4, 12])
@pytest.mark.parametrize(
    ("log_mu", "log_pi"),
    [(np.nan, -3.0), (0.0, -3.0), (-3.0, -3.0), (np.nan, -0.01)],
    ids=["not recorded", "0", "scored later", "not recorded, likely"],
)
def test_a_response_prefix_under_the_mask_is_named_with_its_length(length, log_mu, log_pi):
    assert edges_found([with_prefix(each, length, log_mu, log_pi) for each in log()]) == [
        (LogCode.CONSTANT_HEAD, length)
    ]


@pytest.mark.parametrize("log_mu", [np.nan, -3.0])
def test_a_response_prefix_is_named_without_the_trainers_side(log_mu):
    responses = [with_prefix(each, 4, log_mu, np.nan) for each in log(with_pi=False)]
    assert edges_found(responses) == [(LogCode.CONSTANT_HEAD, 4)]


def test_a_few_responses_without_the_prefix_hide_nothing():
    responses = [with_prefix(each, 4, np.nan, -3.0) if n else each for n, each in enumerate(log(40))]
    assert edges_found(responses) == [(LogCode.CONSTANT_HEAD, 4)]


@pytest.mark.parametrize(("others", "length"), [([-0.3, -1.0], 3), ([-1e-3, -0.01], 1)])
def test_a_prefix_goes_on_with_what_chance_would_not_make_alike(others, length):
    """Behind "Sure" a model is not sure of ", here"; a token that it is sure of may be its own."""
    responses = []
    for each in log(12):
        longer = with_prefix(each, 3, -5.0, -5.0)
        log_mu = longer.log_mu.copy()
        log_mu[1:3] = others
        responses.append(replace(longer, log_mu=log_mu, log_pi=log_mu - 1e-3))
    assert edges_found(responses) == [(LogCode.CONSTANT_HEAD, length)]


class TestInnocent:
    def test_masks_as_they_should_be(self):
        assert edges_found(log()) == []
        assert edges_found(log(with_pi=False)) == []

    @pytest.mark.parametrize("value", [0.0, -1e-6, -0.05])
    def test_a_beginning_that_the_sampler_is_sure_of(self, value):
        """Exact zeros that are real, as of a think token, with a trainer that is as sure."""
        assert edges_found([with_prefix(each, 3, value, value - 1e-5) for each in log(200)]) == []

    def test_copies_of_one_response(self):
        assert edges_found([response(0)] * 30) == []

    def test_greedy_responses_that_begin_alike(self):
        assert edges_found([replace(with_prefix(each, 2, -1.5, -1.5), temperature=0.0) for each in log()]) == []

    def test_a_log_without_any_log_prob_of_the_sampler(self):
        assert edges_found([replace(each, log_mu=np.full(each.token_ids.size, np.nan)) for each in log()]) == []

    def test_tool_text_that_is_the_same_everywhere(self):
        assert edges_found([replace(each, token_ids=np.where(each.sampled, each.token_ids, 7)) for each in log()]) == []

    def test_single_tokens_that_a_mask_takes_out(self):
        """As a trainer masks tokens whose ratio is far off."""
        responses = []
        for number, each in enumerate(log(rounds=1)):
            sampled = each.sampled.copy()
            sampled[np.random.default_rng(number).choice(18, 3, replace=False) + 1] = False
            responses.append(replace(each, sampled=sampled))
        assert edges_found(responses) == []


def moved(each: LoggedResponse, edge: str) -> LoggedResponse:
    """The mask of a response with one of the edges of each stretch a token off, the numbers as they were."""
    changes = np.diff(np.concatenate([[0], each.sampled, [0]]).astype(np.int8))
    starts, ends = np.flatnonzero(changes == 1), np.flatnonzero(changes == -1)
    sampled = each.sampled.copy()
    if edge == "begins a token early":
        sampled[starts[1:] - 1] = True
    elif edge == "ends a token late":
        sampled[ends[:-1]] = True
    elif edge == "begins a token late":
        sampled[starts] = False
    else:
        sampled[ends - 1] = False
    return replace(each, sampled=sampled)


@pytest.mark.parametrize("edge", ["begins a token late", "ends a token early"])
@pytest.mark.parametrize("count", [8, 24, 100])
def test_a_mask_that_leaves_out_a_sampled_token_is_named(edge, count):
    assert edges_found([moved(each, edge) for each in log(count)]) == [(LogCode.MASK_EDGE, edge)]
    assert edges_found([moved(each, edge) for each in log(count, with_pi=False)]) == [(LogCode.MASK_EDGE, edge)]


@pytest.mark.parametrize("log_pi", [-2.0, -6.0])
def test_a_mask_that_takes_in_a_token_of_the_template_is_named(log_pi):
    responses = [moved(each, "begins a token early") for each in log()]
    for each in responses:
        each.log_pi[each.sampled & (each.log_mu == 0)] = log_pi
    assert edges_found(responses) == [(LogCode.CONSTANT_HEAD, 1)]


@pytest.mark.parametrize("value", [np.nan, 0.0], ids=["not recorded", "0"])
@pytest.mark.parametrize("log_pi", [-2.0, -6.0])
def test_a_mask_that_ends_late_is_named(value, log_pi):
    responses = []
    for each in log():
        late = moved(each, "ends a token late")
        is_extra = late.sampled & ~each.sampled
        log_mu, log_pi_of_all = np.where(is_extra, value, each.log_mu), np.where(is_extra, log_pi, each.log_pi)
        responses.append(replace(late, log_mu=log_mu, log_pi=log_pi_of_all))
    assert edges_found(responses) == [(LogCode.MASK_EDGE, "ends a token late")]


def with_zeros_at_edges(edge: str, log_pi: float, *, coarse: bool = False) -> list[LoggedResponse]:
    """A mask takes in a token of which the engine has 0 and the trainer is nearly sure. A coarse sampler has 0
    wherever the trainer is sure.
    """
    random, responses = np.random.default_rng(3), []
    for each in log(40):
        off = moved(each, edge)
        is_extra = off.sampled & ~each.sampled
        if edge == "begins a token early":  # the first stretch of a response begins where it should
            off.sampled[:20] = False
        pi = np.where(is_extra, np.where(random.random(is_extra.size) < 0.1, -3.0, log_pi), each.log_pi)
        log_mu = np.where(is_extra | (coarse & (pi > -1.0)), 0.0, each.log_mu)
        ids = np.where(is_extra, random.integers(20, 800, is_extra.size), each.token_ids)
        responses.append(replace(off, token_ids=ids, log_mu=log_mu, log_pi=pi))
    return responses


@pytest.mark.parametrize("edge", ["begins a token early", "ends a token late"])
@pytest.mark.parametrize("log_pi", [-3.0, -0.3, -0.01])
def test_zeros_at_an_edge_stand_for_no_log_prob_where_tokens_as_sure_have_one(edge, log_pi):
    assert (LogCode.MASK_EDGE, edge) in edges_found(with_zeros_at_edges(edge, log_pi))


def with_sure_tokens(responses: list[LoggedResponse], log_pi: float, share_of_zeros: float) -> list[LoggedResponse]:
    """One in four tokens inside stretches is as sure to the trainer as `log_pi`; the engine has 0 at a share of it."""
    random, made = np.random.default_rng(4), []
    for each in responses:
        inner = each.sampled & np.roll(each.sampled, 1) & np.roll(each.sampled, -1)
        is_sure = inner & (each.log_mu != 0) & (random.random(inner.size) < 0.25)
        log_mu = np.where(random.random(inner.size) < share_of_zeros, 0.0, 1.1 * log_pi)
        pi = np.where(is_sure, log_pi, each.log_pi)
        made.append(replace(each, log_mu=np.where(is_sure, log_mu, each.log_mu), log_pi=pi))
    return made


def with_one_token(responses: list[LoggedResponse]) -> list[LoggedResponse]:
    """One token stands wherever the engine has 0 under the mask, at which the trainer is nearly sure."""
    made = []
    for each in responses:
        is_zero = each.sampled & (each.log_mu == 0)
        pi = np.where(is_zero, -1e-4, each.log_pi)
        made.append(replace(each, token_ids=np.where(is_zero, 7, each.token_ids), log_pi=pi))
    return made


@pytest.mark.parametrize("edge", ["begins a token early", "ends a token late"])
@pytest.mark.parametrize("log_pi", [-1e-3, -1e-4, -1e-6])
def test_zeros_of_several_tokens_at_an_edge_stand_for_no_log_prob_where_tokens_as_sure_have_one(edge, log_pi):
    responses = with_sure_tokens(with_zeros_at_edges(edge, log_pi), log_pi, 0.05)
    assert edges_found(responses) == [(LogCode.MASK_EDGE, edge)]
    checks = LogChecks()
    for each in responses:
        checks.add(each)
    [finding] = [finding for finding in checks.findings() if finding.code == LogCode.MASK_EDGE]
    assert finding.level == Level.WARNING


@pytest.mark.parametrize("edge", ["begins a token early", "ends a token late"])
def test_zeros_at_an_edge_accuse_nobody_where_they_may_be_real(edge):
    assert edges_found(with_zeros_at_edges(edge, -0.1, coarse=True)) == []
    assert edges_found(with_sure_tokens(with_zeros_at_edges(edge, -1e-4), -1e-4, 0.95)) == []
    assert edges_found(with_sure_tokens(with_zeros_at_edges(edge, -1e-4)[:3], -1e-4, 0.05)) == [], "too few places"


@pytest.mark.parametrize("edge", ["begins a token early", "ends a token late"])
def test_zeros_of_one_token_at_an_edge_are_a_question(edge):
    """A grammar forces such a token, whose 0 is real, and a template writes it: the log holds the same numbers."""
    checks = LogChecks()
    for each in with_sure_tokens(with_one_token(with_zeros_at_edges(edge, -1e-4)), -1e-4, 0.05):
        checks.add(each)
    [finding] = [finding for finding in checks.findings() if finding.code in CODES]
    assert (finding.level, finding.evidence["edge"], finding.evidence["tokens"]) == (Level.NOTE, edge, 1)
    assert "with the same token, where the engine has exactly 0" in finding.sentence
    assert finding.sentence.endswith("The log cannot tell")


def with_longer_masks(responses: list[LoggedResponse], tokens: int) -> list[LoggedResponse]:
    """Each stretch of the mask but the last takes in so many tokens of the template, which the engine scored."""
    made = []
    for each in responses:
        is_late = np.zeros(each.sampled.size + tokens + 1, dtype=np.bool_)
        for end in np.flatnonzero(np.diff(each.sampled.astype(int)) == -1):
            is_late[end + 1 : end + 1 + tokens] = True
        is_late = is_late[: each.sampled.size]
        log_mu = np.where(is_late, -0.3, each.log_mu)
        made.append(
            replace(each, sampled=each.sampled | is_late, log_mu=log_mu, log_pi=np.where(is_late, -0.31, each.log_pi))
        )
    return made


def findings_with_stop(responses: list[LoggedResponse], *stop_ids: int) -> list[LogFinding]:
    checks = LogChecks(stop_ids=frozenset(stop_ids))
    for each in responses:
        checks.add(each)
    return [finding for finding in checks.findings() if finding.code in CODES]


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_tokens_behind_a_stop_of_the_checkpoint_were_not_sampled_whatever_their_log_probs(tokens):
    [finding] = findings_with_stop(with_longer_masks(log(), tokens), 2, 3)
    assert (finding.level, finding.evidence["tokens"], finding.evidence["of"]) == (Level.WARNING, tokens, 48)
    assert "late: in 48 of 48 places it goes on behind a token at which the checkpoint stops" in finding.sentence


def test_a_stop_of_the_checkpoint_decides_the_question_of_one_token():
    late = with_sure_tokens(with_one_token(with_zeros_at_edges("ends a token late", -1e-4)), -1e-4, 0.05)
    [finding] = findings_with_stop(late, 2)
    assert (finding.level, finding.evidence["edge"]) == (Level.WARNING, "ends late")
    [question] = findings_with_stop(late, 7)
    assert question.level == Level.NOTE, "the token itself is the stop, which a grammar forces"


def test_a_stop_within_what_was_sampled_accuses_nobody():
    assert findings_with_stop(log(), 2) == []
    random = np.random.default_rng(0)
    anywhere = [
        replace(each, token_ids=np.where(random.random(each.token_ids.size) < 0.05, 3, each.token_ids).astype(np.int32))
        for each in log()
    ]
    assert findings_with_stop(anywhere, 3) == [], "sampled on behind it, as with ignore_eos"
    assert findings_with_stop(with_longer_masks(log(3), 1), 2) == [], "too few places"


@pytest.mark.parametrize("filler", [0.0, np.nan, -9999.0])
def test_a_row_with_its_prompt_shows_the_sampled_token_that_its_mask_leaves_out(filler):
    own = np.array([False] * 4 + [True] * 3)
    log_mu = np.array([filler] * 3 + [-0.5] * 4)
    late = split_by_mask(where="", token_ids=np.arange(7, dtype=np.int32), own=own, sampled=own, log_mu=log_mu)
    assert (late.prompt_token_ids.size, late.sampled.tolist()) == (3, [False, True, True, True])
    scored = split_by_mask(
        where="", token_ids=np.arange(7, dtype=np.int32), own=own, sampled=own, log_mu=np.full(7, -0.5)
    )
    assert scored.prompt_token_ids.size == 4, "the prompt was scored too"


def test_parts_of_a_log_add_up_to_it():
    responses = [with_prefix(each, 4, np.nan, -3.0) for each in log()]
    parts = [LogChecks(), LogChecks(), LogChecks()]
    for number, each in enumerate(responses):
        parts[number % 2].add(each)
    total = LogChecks()
    for part in parts:
        total += part
    [head] = [finding for finding in total.findings() if finding.code == LogCode.CONSTANT_HEAD]
    assert (head.evidence["tokens"], head.evidence["runs"]) == (4, 24)
