"""When a 16-bit run counts as close to FP32 and when it does not."""

import pytest

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.headroom.judge import judge_headroom
from mismatch_probe.headroom.passes import exponents_at_the_ends, is_close, scales_that_fit
from mismatch_probe.records.examinations import HeadroomVerdict, PrecisionTrial, ScaleTrial
from mismatch_probe.report.answers.headroom import headroom_answer
from mismatch_probe.report.sections.gradients import gradients, underflow_table
from mismatch_probe.report.view import Figure
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


@pytest.mark.parametrize(
    ("fp16", "bf16", "code"),
    [
        (0.1, 0.8, HeadroomCode.FITS),
        (0.1, 5e3, HeadroomCode.FITS),
        (1.0, 5e3, HeadroomCode.GRADIENTS_NOT_MEASURED),
        (3e3, 5e3, HeadroomCode.GRADIENTS_NOT_MEASURED),
        (6e3, 5e3, HeadroomCode.GRADIENTS_NOT_MEASURED),
        (6e3, 0.8, HeadroomCode.DOES_NOT_FIT),
        (None, 5e3, HeadroomCode.DOES_NOT_FIT),
    ],
)
def test_a_gradient_that_is_all_rounding_in_both_formats_was_not_measured(
    fp16: float | None, bf16: float, code: HeadroomCode
) -> None:
    """Certain responses leave none, and then any loss scale seems to fit. One that is zero in FP16 errs by 1."""
    yardstick = tried(Dtype.BF16, {0: bf16}, 1e-3)
    verdict = judged(tried(Dtype.FP16, {0: fp16, 4: fp16}, 1e-4, yardstick), yardstick)
    is_unmeasured = code == HeadroomCode.GRADIENTS_NOT_MEASURED
    assert verdict.code == code
    assert any("next to no gradient" in sentence for sentence in verdict.evidence) == is_unmeasured
    assert ("--num-prompts" in " ".join(verdict.advice)) == is_unmeasured
    assert "further from FP32 than BF16's" not in verdict.sentence or bf16 < 1


def test_modules_in_fp32_do_not_bring_a_gradient_that_is_not_there() -> None:
    bf16 = tried(Dtype.BF16, {0: 5e3}, 1e-3)
    far, near = (tried(Dtype.FP16, {0: 3e3}, error, bf16) for error in (1.0, 1e-4))
    verdict = judged(far, bf16, near.model_copy(update={"modules_in_fp32": ["lm_head"]}))
    assert verdict.code == HeadroomCode.FITS_EXCEPT
    assert "weights and activations fit; gradients were not measured" in verdict.sentence
    assert not any("none fits" in sentence for sentence in verdict.evidence)
    document = headroom().model_copy(update={"verdict": verdict, "plain": far, "advised": near, "bf16": bf16})
    assert document.exit_code == ExitCode.INCONCLUSIVE
    near = tried(Dtype.FP16, {0: 0.1}, 1e-4, bf16)
    assert document.model_copy(update={"advised": near}).exit_code == ExitCode.PASS


@pytest.mark.parametrize(("error", "is_measured"), [(0.1, True), (3e3, False)])
def test_a_page_marks_no_loss_scale_that_was_not_measured(error: float, *, is_measured: bool) -> None:
    bf16 = tried(Dtype.BF16, {0: 5e3}, 1e-3)
    plain = tried(Dtype.FP16, {0: error, 4: error}, 1e-4, bf16)
    plain = plain.model_copy(update={"from_exponent": 0, "to_exponent": 4})  # as earlier versions recorded
    document = headroom()
    assert document.gradients is not None
    table = underflow_table(document.gradients, plain, bf16)
    assert any("yes" in row for row in table.rows) == is_measured
    [figure] = [block for block in gradients(document.gradients, plain, bf16).blocks if isinstance(block, Figure)]
    assert ("fitting scales not measured" in figure.panels[0].heading.description) != is_measured
    answer = headroom_answer(document.model_copy(update={"plain": plain, "bf16": bf16}))
    assert answer.figure is not None
    assert ("Whether a loss scale fits was not measured" in answer.figure.caption) != is_measured
    [tile] = [tile for tile in answer.tiles if tile.label == "Loss scales that fit"]
    assert (tile.value == "not measured") != is_measured


def tried(
    dtype: Dtype, errors: dict[int, float | None], logprob_error: float, yardstick: PrecisionTrial | None = None
) -> PrecisionTrial:
    """What a run gives whose gradients err by so much."""
    low, high = scales_that_fit(scales(errors), yardstick)
    figures = {"scales": scales(errors), "dtype": dtype, "from_exponent": low, "to_exponent": high}
    return trial(logprob_error, 1.0).model_copy(update=figures)


def judged(plain: PrecisionTrial, bf16: PrecisionTrial, advice: PrecisionTrial | None = None) -> HeadroomVerdict:
    document = headroom()
    assert document.activations is not None
    assert document.gradients is not None
    return judge_headroom(document.weights, document.activations, document.gradients, plain, bf16, advice, [])
