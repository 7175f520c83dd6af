"""Limits in use elsewhere, each with its source. A limit on a heavy-tailed metric gets a clip; alerts are warnings."""

from mismatch_probe.gate.config import Check, PresetName

_CLIP_NATS = 5.0

_NEMO = "NeMo-RL, guide to adding models: token_mult_prob_error at most 1.05, gen_kl_error below 1e-3"
_PRIME = "prime-rl, integration tests: mismatch_kl (k3) below 0.015 in each of 20 steps"
_VERL = "verl, rollout_probs_diff_mean: below 0.005 normal, above 0.01 a problem"
_VERL_ALERT = "verl, rollout correction: alerts at ESS below 0.3, abs(kl) above 0.1, chi2_token above 1"
_TINKER = "tinker cookbook: sampling against training KL (k1) below 0.01"
_TITAN = "torchtitan, batch-invariant mode: log-probs bitwise equal"

PRESETS: dict[PresetName, tuple[Check, ...]] = {
    "nemo-rl": (
        Check(metric="token_mult_prob_error", clip=_CLIP_NATS, max=1.05, source=_NEMO),
        Check(metric="kl_k3", clip=_CLIP_NATS, max=1e-3, source=_NEMO),
    ),
    "prime-rl": (Check(metric="kl_k3", clip=_CLIP_NATS, max=0.015, source=_PRIME),),
    "verl": (
        Check(metric="prob_abs_diff", max=0.01, source=_VERL),
        Check(metric="prob_abs_diff", max=0.005, level="warn", source=_VERL),
        Check(metric="ess_token", clip=_CLIP_NATS, min=0.3, level="warn", source=_VERL_ALERT),
        Check(metric="kl_k1", max=0.1, level="warn", source=_VERL_ALERT),
        Check(metric="kl_k1", min=-0.1, level="warn", source=_VERL_ALERT),
        Check(metric="chi2_token", clip=_CLIP_NATS, max=1.0, level="warn", source=_VERL_ALERT),
    ),
    "tinker": (
        Check(metric="kl_k1", max=0.01, source=_TINKER),
        Check(metric="kl_k1", min=-0.01, source=f"{_TINKER}; a KL is not negative, so far below 0 k1 is no KL"),
    ),
    "bitwise": (Check(metric="bitwise_equal", equal=1.0, source=_TITAN),),
}
