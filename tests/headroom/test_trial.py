"""When a 16-bit run counts as close to FP32 and when it does not."""

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.headroom.judge import _gradient_sentences
from mismatch_probe.headroom.passes import exponents_at_the_ends, is_close, scales_that_fit
from mismatch_probe.records.examinations import PrecisionTrial, ScaleTrial
from tests.report.documents import headroom


def trial(error: float | None, further_share: float | None = None) -> PrecisionTrial:
    return PrecisionTrial(
        dtype=Dtype.FP16,
        modules_in_fp32=[],
        residual_in_fp32_from=None,
        first_nonfinite=None,
        logprob_error_nats=error,
        further_share=further_share,
        scales=[],
    )


BF16 = trial(1e-3)


@pytest.mark.parametrize(
    ("error", "further_share", "close"),
    [
        (1e-4, 0.1, True),
        (1e-4, 0.9, True),
        (3e-3, 0.1, True),
        (3e-3, 0.6, False),
        (9e-3, 0.1, False),
        (None, None, False),
    ],
)
def test_further_from_fp32_is_most_tokens_or_by_far(
    error: float | None, further_share: float | None, *, close: bool
) -> None:
    assert is_close(trial(error, further_share), BF16) is close


def test_what_fp32_itself_would_round_is_close_to_anything() -> None:
    assert is_close(trial(9e-6, 1.0), trial(1e-9))


def test_any_finite_answer_is_close_where_bf16_has_none() -> None:
    assert is_close(trial(0.1, None), trial(None))


def scales(errors: dict[int, float | None]) -> list[ScaleTrial]:
    return [
        ScaleTrial(exponent=exponent, relative_error=error, num_nonfinite=error is None, nonfinite=[])
        for exponent, error in errors.items()
    ]


@pytest.mark.parametrize(
    ("errors", "fitting", "left"),
    [
        ({0: 0.5, 4: 0.1, 8: 0.1, 12: None}, (4, 8), [1, 2, 3, 9, 10, 11]),
        ({0: 0.1, 4: 0.1, 8: 0.1}, (0, 8), []),
        ({0: None}, (None, None), []),
        ({0: 0.5, 4: 0.1, 8: 0.1, 9: 0.1, 10: 0.1, 11: None}, (4, 10), [1, 2, 3]),
    ],
)
def test_scales_between_the_outermost_that_fit_and_the_next_are_tried_too(
    errors: dict[int, float | None], fitting: tuple[int | None, int | None], left: list[int]
) -> None:
    assert scales_that_fit(scales(errors), None) == fitting
    assert exponents_at_the_ends(scales(errors)) == left


@pytest.mark.parametrize(("times", "is_said"), [(1.0, False), (1e7, True)])
def test_a_gradient_that_is_all_rounding_in_both_formats_is_said_to_be_none(times: float, is_said: bool) -> None:
    """Certain responses leave none, and then any loss scale seems to fit."""
    document = headroom()
    assert document.gradients is not None
    assert document.plain is not None
    assert document.bf16 is not None
    trials = []
    for each in (document.plain, document.bf16):
        scales = [
            scale.model_copy(update={"relative_error": scale.relative_error and times * scale.relative_error})
            for scale in each.scales
        ]
        trials.append(each.model_copy(update={"scales": scales}))
    sentences = _gradient_sentences(document.gradients, *trials)
    assert any("next to no gradient" in sentence for sentence in sentences) == is_said
