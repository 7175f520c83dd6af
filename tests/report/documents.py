"""What `headroom` and `localize` write, made up: for the page, the files and the gate, which only read it."""

import math

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.config.examinations import HeadroomSettings, LocalizeSettings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.examinations import (
    ActivationFindings,
    GradientFindings,
    GradientRange,
    Headroom,
    HeadroomVerdict,
    LayerRange,
    OperationRange,
    OptimizerFindings,
    PrecisionTrial,
    ScaleTrial,
    ScaleUnderflow,
    WeightFindings,
    WeightRange,
)
from mismatch_probe.records.findings import (
    Intervention,
    Interventions,
    Localization,
    PlaceError,
    RouterDecisions,
    SideError,
    Suspect,
)
from mismatch_probe.stats.results import Estimate

NUM_LAYERS = 12
EXPONENTS = range(25)
LARGEST = 65504.0


def estimate(value: float, spread: float = 0.1) -> Estimate:
    return Estimate(value, value * (1 - spread), value * (1 + spread), 0.95, 16, 1600, "token")


def localization(
    dtype: Dtype = Dtype.BF16, *, suspect_layer: int | None = None, name: str = "demo", fingerprint: str = "0" * 16
) -> Localization:
    """Errors that grow as the root of the depth; with a suspect, one block of the engine adds twenty times as much."""
    blocks = [_block(layer, 20.0 if layer == suspect_layer else 1.0) for layer in range(NUM_LAYERS)]
    ranked = [
        Intervention(
            part=part,
            side=side,
            kl_k3=estimate(1e-3 * (1 - share)),
            removed=Estimate(share, share - 0.04, share + 0.04, 0.95, 16, 1600, "token"),
            slower=slower,
            extra_bytes=extra,
        )
        for part, side, share, slower, extra in (
            ("lm_head", "both", 0.41, 0.02, 2**22),
            ("lm_head", "train", 0.22, 0.01, 2**22),
            ("residual stream", "train", 0.08, 0.3, 0),
            ("layer 3", "train", 0.01, 0.05, 2**12),
        )
    ]
    return Localization(
        tool_version="0.1.0",
        created_at="2026-01-01T00:00:00+00:00",
        model=name,
        model_fingerprint=fingerprint,
        settings=LocalizeSettings(model=ModelSettings(path=name), train_dtype=dtype, infer_dtype=dtype, modules=True),
        num_sequences=16,
        num_tokens=1600,
        looked_into_sequences=16,
        looked_into_tokens=1600,
        kl_k3=estimate(1e-3),
        mean_abs_diff=estimate(0.02),
        blocks=blocks,
        modules=[block.model_copy(update={"place": "mlp.down_proj"}) for block in blocks],
        first_difference="model.layers.0.self_attn.rotary_emb[q]",
        enters={"infer": f"model.layers.{suspect_layer or 0}", "train": "model.layers.0"},
        suspects=[] if suspect_layer is None else [_suspect(suspect_layer)],
        routers=[RouterDecisions(layer=0, infer=estimate(0.01), train=estimate(0.02), sides=estimate(0.02))],
        unmatched=["model.layers.0.mlp.extra"],
        interventions=Interventions(
            ranked=ranked, together=ranked[1], sum_of_removed=0.3, left_out={"router": "the model has none"}
        ),
        seconds={"engine in all": 20.0},
        stored_bytes=2**24,
        peak_memory_bytes={"engine": 2**30, "training": 2**29},
    )


def _block(layer: int, times: float) -> PlaceError:
    def side(times: float) -> SideError:
        return SideError(
            total=estimate(2e-3 * times * math.sqrt(layer + 1)),
            own=estimate(2e-3 * times),
            scale=estimate(1e-5),
            cosine=0.9999,
            largest=0.1,
        )

    return PlaceError(
        layer=layer,
        place="block",
        train_name=f"model.layers.{layer}",
        infer_name=f"model.layers.{layer}",
        infer=side(times),
        train=side(1.0),
        between=3e-3,
        own_ratio=times,
        own_ratio_channel=3,
        own_ratio_side="infer",
    )


def _suspect(layer: int) -> Suspect:
    return Suspect(
        place="mlp.down_proj",
        layers=[layer],
        train_names=[f"model.layers.{layer}.mlp.down_proj"],
        infer_names=[f"model.layers.{layer}.mlp.down_proj"],
        side="infer",
        times=20.0,
        channel=None,
        sentence="mlp.down_proj of the engine computes something else: 20 times the error of the other side.",
    )


def headroom(largest: float = 40.0, *, name: str = "demo", fingerprint: str = "0" * 16) -> Headroom:
    """A model whose residual stream grows to `largest` in its last layer; past FP16's limit it does not fit."""
    fits = largest < LARGEST
    layers = [_layer(layer, largest ** ((layer + 1) / NUM_LAYERS)) for layer in range(NUM_LAYERS)]
    tightest = OperationRange(
        module=f"model.layers.{NUM_LAYERS - 1}",
        operation="add 2",
        held_as="fp16",
        largest=largest,
        margin_bits=math.log2(LARGEST / largest),
        relative_error=2e-4 if fits else None,
        finite_in_fp16=fits,
    )
    first = None if fits else f"model.layers.{NUM_LAYERS - 1} (add 2)"
    where = "it fits with a loss scale of 2⁴ to 2¹⁶" if fits else f"activations overflow FP16, first at {first}"
    return Headroom(
        tool_version="0.1.0",
        created_at="2026-01-01T00:00:00+00:00",
        model=name,
        model_fingerprint=fingerprint,
        settings=HeadroomSettings(model=ModelSettings(path=name)),
        device="cpu",
        sampled_by="transformers generate, in fp32",
        verdict=HeadroomVerdict(
            code=HeadroomCode.FITS_WITH_LOSS_SCALE if fits else HeadroomCode.DOES_NOT_FIT,
            sentence=f"Of this model {where}.",
            evidence=["weights: 1,000 in 2 tensors"],
            advice=["train --train-dtype fp16 as it is" if fits else "train and sample in BF16"],
        ),
        weights=WeightFindings(num_tensors=2, total=_weights("all"), worst=[_weights("lm_head.weight")]),
        activations=ActivationFindings(
            num_sequences=4,
            num_tokens=100,
            largest_logit=9.0,
            first_nonfinite=first,
            layers=layers,
            tightest=[tightest],
            too_small=[],
            modules=[tightest],
        ),
        gradients=_gradients(),
        plain=_trial(Dtype.FP16, finite=fits, first=first),
        bf16=_trial(Dtype.BF16, finite=True, first=None),
        seconds={"weights": 0.1},
    )


def _layer(number: int, residual: float) -> LayerRange:
    return LayerRange(
        layer=f"model.layers.{number}",
        residual=residual,
        margin_bits=math.log2(LARGEST / residual),
        outlier_ratio=12.0,
        outlier_channel=7,
        attention_scores=90.0,
        attention_logits=16.0,
        mlp_product=residual / 2,
    )


def _weights(tensor: str) -> WeightRange:
    return WeightRange(
        tensor=tensor,
        stored_as="bf16",
        num_values=1000,
        largest=1.5,
        num_nonfinite=0,
        num_overflowed=0,
        num_subnormal=3,
        num_flushed=0,
        relative_error=1e-4,
    )


def _gradients() -> GradientFindings:
    gradient = GradientRange(name="lm_head.weight", largest=0.5, margin_bits=17.0, flushed_unscaled=0.2)
    return GradientFindings(
        objective="grpo",
        num_responses=4,
        mean_reward=0.5,
        stand_in_rewards=False,
        loss=0.1,
        norm=1.0,
        underflow=[
            ScaleUnderflow(
                exponent=exponent,
                parameters_flushed=0.2 * 2.0**-exponent,
                parameters_subnormal=0.1 * 2.0**-exponent,
                activations_flushed=0.4 * 2.0**-exponent,
                activations_subnormal=0.1 * 2.0**-exponent,
                largest_scaled=0.5 * 2.0**exponent,
                overflows=exponent > 16,
            )
            for exponent in EXPONENTS
        ],
        parameters=[gradient],
        activations=[gradient],
        optimizer=OptimizerFindings(first_moment_flushed=0.1, second_moment_flushed=0.9),
    )


def _trial(dtype: Dtype, *, finite: bool, first: str | None) -> PrecisionTrial:
    errors = {exponent: max(1e-3, 0.1 * 4.0**-exponent) for exponent in EXPONENTS if exponent <= 16}
    scales = [
        ScaleTrial(
            exponent=exponent,
            relative_error=errors.get(exponent),
            num_nonfinite=0 if exponent in errors else 1,
            nonfinite=[] if exponent in errors else ["lm_head.weight"],
        )
        for exponent in EXPONENTS
    ]
    return PrecisionTrial(
        dtype=Dtype.FP16 if dtype == Dtype.FP16 else Dtype.BF16,
        modules_in_fp32=[],
        residual_in_fp32_from=None,
        first_nonfinite=first,
        logprob_error_nats=0.003 if finite else None,
        scales=scales if finite else [],
        from_exponent=4 if finite and dtype == "fp16" else None,
        to_exponent=16 if finite and dtype == "fp16" else None,
    )
