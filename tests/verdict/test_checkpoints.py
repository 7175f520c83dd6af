"""Two checkpoints in one pair: weights, configuration, tokenizer and template are told apart, by what was recorded."""

from dataclasses import replace
from typing import Any, Final

import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.manifest import CheckpointDifference, ModelIdentity, TensorDifference, WeightsDifference
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.preflight import preflight
from mismatch_probe.verdict.preflight.facts import Sides
from tests.verdict.simulated import clean, world
from tests.verdict.test_judge import case, with_exact
from tests.verdict.test_preflight import CONFIG, INFER, TRAIN

EQUAL: Final = WeightsDifference(num_tensors=272)
NOISE: Final = WeightsDifference(
    num_tensors=272, num_other=1, largest=[TensorDifference(name="model.layers.14.mlp.down_proj.weight", relative=0.05)]
)
ROUNDED: Final = WeightsDifference(num_tensors=272, num_rounded=272, formats=("fp32", "bf16"))
IDENTITIES: Final = tuple(
    ModelIdentity(
        name=f"ckpt/{name}",
        folder=f"/here/{name}",
        fingerprint=name,
        architecture="X",
        context_length=None,
        checkpoint_dtype=None,
        weight_bytes=0,
    )
    for name in ("base", "other")
)


def found(
    weights: WeightsDifference = EQUAL,
    infer: dict[str, Any] | None = None,
    dtype: Dtype = Dtype.BF16,
    **differing: Any,
) -> list[SettingFinding]:
    """Findings of two checkpoints that differ so; `infer` is what the engine read of its config.json."""
    engine = {**INFER, "dtype": dtype, "config": {**CONFIG, **(infer or {})}}
    engine |= {"lm_head_dtype": None, "kv_cache_dtypes": []}
    difference = CheckpointDifference(train="ckpt/base", infer="ckpt/other", weights=weights, **differing)
    return preflight(Sides(dtype, dtype, {**TRAIN, "dtype": dtype}, engine, IDENTITIES, difference))


def codes(findings: list[SettingFinding]) -> list[tuple[str, str, str | None]]:
    return [(finding.level, finding.setting, finding.code) for finding in findings]


def test_two_checkpoints_that_compute_the_same_accuse_nobody() -> None:
    assert found() == []
    assert found(config={"transformers_version": ("4", "5"), "_name_or_path": ("a", "b"), "dtype": ("x", "y")}) == []


def test_another_configuration_is_named_by_its_key_and_weights_that_are_equal_are_not() -> None:
    [finding] = found(infer={"rope_parameters.rope_theta": 1e5})
    assert finding.what == "rope_theta is 10,000 on the training path and 100,000 in the engine"
    [finding] = found(infer={"rope_parameters.rope_theta": 1e5 * 1.1})
    assert finding.what == "rope_theta is 10,000 on the training path and 110,000 in the engine"
    [finding] = found(infer={"rope_parameters.rope_theta": 1e5})
    assert (
        finding.advice
        == "Give both checkpoints one config.json; their weights are equal, so that none have to be sent."
    )
    assert codes(found(infer={"rms_norm_eps": 1e-3})) == [("error", "rms_norm_eps", Code.CONFIGURATION)]
    assert codes(found(infer={"final_logit_softcapping": 30.0})) == [
        ("error", "final_logit_softcapping", Code.CONFIGURATION)
    ]


def test_a_number_as_fp32_holds_it_is_the_same_setting() -> None:
    assert found(infer={"rms_norm_eps": 9.999999974752427e-07, "rope_parameters.rope_theta": 10000}) == []


def test_other_weights_are_named_by_their_tensors_and_an_equal_configuration_is_not() -> None:
    [finding] = found(NOISE)
    assert finding.what == (
        "the training path holds the weights of base and the engine those of other: 1 of 272 tensors differs "
        "(model.layers.14.mlp.down_proj.weight by 5 %)"
    )
    assert (finding.level, finding.code) == ("error", Code.STALE_WEIGHTS)


def test_other_weights_and_another_configuration_are_both_named() -> None:
    causes = found(NOISE, infer={"rms_norm_eps": 1e-3})
    assert codes(causes) == [
        ("error", "checkpoint", Code.STALE_WEIGHTS),
        ("error", "rms_norm_eps", Code.CONFIGURATION),
    ]
    assert causes[1].advice == "Give both checkpoints one config.json."


def test_of_many_tensors_the_ones_that_differ_most_are_named() -> None:
    largest = [
        TensorDifference(name=f"w{number}", relative=relative) for number, relative in enumerate((2, 0.100049, 0.002))
    ]
    many = WeightsDifference(num_tensors=272, num_other=270, largest=largest, infer_alone=2, alone=["x", "y"])
    [finding] = found(many)
    assert finding.what.endswith(
        ": 270 of 272 tensors differ (most w0 by 200 %, w1 by 10 %, w2 by 0.2 %); 2 tensors are in the engine's alone "
        "(x, y)"
    )


@pytest.mark.parametrize(
    ("dtype", "level", "code"), [(Dtype.FP32, "warning", Code.ONE_SIDED_DTYPE), (Dtype.BF16, "note", None)]
)
def test_weights_that_are_rounded_in_the_file_matter_where_more_digits_are_computed(
    dtype: Dtype, level: str, code: Code | None
) -> None:
    [finding] = found(ROUNDED, dtype=dtype)
    assert (finding.level, finding.side, finding.code) == (level, "mu", code)
    assert finding.what.startswith("272 of 272 tensors are stored in fp32 for the training path and in bf16")


@pytest.mark.parametrize(
    ("differing", "setting", "words"),
    [
        ({"chat_template": "from here on: a, b"}, "chat_template", "the chat templates of base and other differ: from"),
        ({"tokenizer": ["merges"]}, "tokenizer", "the tokenizers of base and other differ: merges"),
        ({"config": {"bos_token_id": (1, 0)}}, "bos_token_id", "bos_token_id is 1 on the training path and 0 in"),
    ],
)
def test_what_makes_ids_of_text_is_a_warning_since_both_sides_read_the_same_ids(
    differing: dict[str, Any], setting: str, words: str
) -> None:
    [finding] = found(**differing)
    assert (finding.level, finding.setting, finding.code) == ("warning", setting, Code.PROMPT_PREFIX)
    assert finding.what.startswith(words)


def test_a_server_that_says_nothing_of_its_configuration_is_judged_by_the_files_that_it_is_said_to_serve() -> None:
    difference = CheckpointDifference(
        train="ckpt/base",
        infer="ckpt/other",
        weights=EQUAL,
        config={"rms_norm_eps": (1e-6, 1e-3), "mlp_bias": (None, False), "use_cache": (True, False)},
    )
    infer = {name: value for name, value in INFER.items() if name != "config"}
    sides = Sides(Dtype.BF16, Dtype.BF16, TRAIN, infer, IDENTITIES, difference)
    assert codes(preflight(sides)) == [("error", "rms_norm_eps", Code.CONFIGURATION)]


def test_a_run_made_before_checkpoints_were_compared_is_judged_by_their_fingerprints() -> None:
    [finding] = preflight(Sides(Dtype.BF16, Dtype.BF16, TRAIN, INFER, IDENTITIES))
    assert finding.what == "the training path holds the weights of base and the engine those of other"
    assert finding.code == Code.STALE_WEIGHTS


def test_weights_that_are_known_to_differ_are_a_bug_however_small_the_number() -> None:
    verdict = judge(case(clean(world(), Dtype.BF16), preflight=found(NOISE)))
    assert (verdict.kind, verdict.code) == ("bug", "stale_weights")
    assert "1 of 272 tensors differs" in verdict.sentence


def test_a_known_difference_that_fp32_shows_nothing_of_is_a_fact_of_a_sound_pair() -> None:
    sound = with_exact(Dtype.BF16)
    assert judge(replace(sound, preflight=found())).evidence == judge(sound).evidence
    verdict = judge(replace(sound, preflight=found(NOISE)))
    assert verdict.kind == "precision"
    assert verdict.evidence[0].endswith(
        "(model.layers.14.mlp.down_proj.weight by 5 %), which these numbers do not show"
    )


@pytest.mark.slow
def test_another_template_is_a_fact_beside_whatever_is_measured() -> None:
    other = found(chat_template="from character 5 on: `a` and `b`")
    for given, kind in ((with_exact(Dtype.BF16), "precision"), (case(clean(world(), Dtype.BF16)), "undecided")):
        verdict = judge(replace(given, preflight=other))
        assert verdict.kind == kind
        assert verdict.evidence[0].startswith("the chat templates of base and other differ: from character 5")
