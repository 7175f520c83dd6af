"""The catalogue of causes: words that can be filled in, and tests that are registered where an entry says so."""

from collections.abc import Iterator
from string import Formatter
from typing import Any

import pytest

from mismatch_probe.causes import Catalogued, CauseRank, OrderedTests, SeenIn
from mismatch_probe.causes.comparison import ARRAYS_IN_ORDER, Code
from mismatch_probe.causes.findings import HeadroomCode, LogCode
from mismatch_probe.causes.training import SUMS_IN_ORDER, EndCause
from mismatch_probe.guards.diagnose import SIGNATURES as ENDING_MODULES
from mismatch_probe.guards.diagnosis import ENDINGS
from mismatch_probe.records.summary import Cause
from mismatch_probe.verdict.signatures import MODULES
from mismatch_probe.verdict.signatures.profile import SIGNATURES
from tests.docs.pages import DOCS

ENTRIES: list[Catalogued] = [*Code, *EndCause, *LogCode, *HeadroomCode]


def words() -> Iterator[tuple[Catalogued, str]]:
    """Each cause with each of its words."""
    return ((cause, variant) for cause in ENTRIES for variant in ("", *cause.entry.variants))


@pytest.mark.parametrize(("cause", "variant"), list(words()), ids=lambda value: str(value))
def test_every_cause_has_words_that_can_be_filled_in(cause: Catalogued, variant: str) -> None:
    held = cause.entry.variants[variant] if variant else cause.entry
    fixes = [held.fix] if isinstance(held.fix, str) else held.fix
    names = {name for text in (held.sentence, *fixes) for _, name, _, _ in Formatter().parse(text) if name}
    figures: dict[str, Any] = dict.fromkeys(names, 1)
    assert (DOCS.parent / cause.entry.docs).read_text(encoding="utf-8").count(f"`{cause}`")
    filled = Cause.of(cause, variant=variant, **figures)
    assert filled.code == cause
    assert filled.sentence
    assert "{" not in "".join([filled.sentence, *filled.advice])


def test_a_figure_that_the_words_lack_is_an_error() -> None:
    with pytest.raises(KeyError, match="ratio"):
        Cause.of(Code.TEMPERATURE)


def test_a_temperature_is_fixed_on_the_engine_that_returns_it_and_on_the_sampler_that_does_not() -> None:
    """Where the sides differ, the training path takes the engine's temperature; where both give log-probs of another
    distribution than the sampled one, both take that of the sampling.
    """
    [of_sides] = Cause.of(Code.TEMPERATURE, ratio=0.8).advice
    [of_sampler] = Cause.of(Code.TEMPERATURE, variant="sampler", flatter="flatter").advice
    for advice in (of_sides, of_sampler):
        assert "logprobs_mode=processed_logprobs" in advice
    assert "at which temperature the engine really samples" in of_sides
    assert "divide the training path's logits by that one" in of_sides
    assert "divide the training path's logits by the sampling temperature" in of_sampler
    assert "really samples" not in of_sampler
    assert Code.TEMPERATURE.entry.in_a_log.startswith("Set that side to the temperature that the log declares")


def cause_of(sign: str | tuple[str, str]) -> str:
    return sign if isinstance(sign, str) else sign[0]


def test_what_the_arrays_show_is_registered_for_the_entries_that_say_so() -> None:
    assert len(list(SIGNATURES)) == len(ARRAYS_IN_ORDER)
    assert MODULES
    shown = {cause_of(sign) for sign in ARRAYS_IN_ORDER}
    told_later = {"routing", "other_experts", "copied_leg", "beyond_format", "other_checkpoint", "unexplained"}
    results = {"precision", "ill_conditioned", "settings", "clean"}
    assert {code for code in Code if SeenIn.ARRAYS in code.entry.seen_in} == shown | told_later | results


def test_what_sums_show_is_registered_for_every_end_of_a_run_but_the_unknown_one() -> None:
    assert len(list(ENDINGS)) == len(SUMS_IN_ORDER)
    assert ENDING_MODULES
    assert {cause_of(sign) for sign in SUMS_IN_ORDER} == set(EndCause) - {EndCause.UNEXPLAINED}


def test_a_cause_of_a_comparison_says_that_sums_show_it_where_they_do() -> None:
    assert {code for code in Code if SeenIn.SUMS in code.entry.seen_in} == set(Code) & set(EndCause)


def test_a_test_without_a_place_in_the_order_is_refused() -> None:
    tests = OrderedTests[Any](["temperature"])
    with pytest.raises(LookupError, match="positions must be in the table"):
        tests.of("positions")(len)
    tests.of("temperature")(len)
    with pytest.raises(LookupError, match="have one test"):
        tests.of("temperature")(max)


def test_a_line_of_the_order_without_a_test_is_seen() -> None:
    with pytest.raises(KeyError, match="temperature"):
        list(OrderedTests[Any](["temperature"]))


def test_what_explain_can_name_says_what_fixes_it() -> None:
    of_logs = {code for code in Code if code.entry.in_a_log}
    without = {Code.MISPAIRED, Code.OTHER_CHECKPOINT, Code.UNEXPLAINED, Code.AS_DECLARED}
    assert {code for code in Code if SeenIn.PASSES in code.entry.seen_in} == of_logs | without


def test_evidence_by_elimination_is_the_weakest() -> None:
    assert max(CauseRank) is CauseRank.ELIMINATION
    assert [code for code in Code if code.entry.rank is CauseRank.ELIMINATION] == [Code.STALE_WEIGHTS]
