import re
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.train.objectives.catalogue import OBJECTIVES, Correction, CriticRule, Ratio, build_objective

MANUAL = (Path(__file__).parents[3] / "docs" / "train.md").read_text(encoding="utf-8")


def test_the_manual_has_a_row_for_every_objective_in_order_and_each_names_its_source():
    [rows] = re.findall(r"^\| name \| advantage \|.*\n\|---.*\n((?:\|.*\n)+)", MANUAL, re.MULTILINE)
    assert re.findall(r"^\| `([\w-]+)`", rows, re.MULTILINE) == list(OBJECTIVES)
    assert all(OBJECTIVES[name] == build_objective(name) and OBJECTIVES[name].source for name in OBJECTIVES)


def test_no_two_objectives_are_the_same_rule():
    rules = {(one.advantage, one.ratio, one.correction, one.normaliser) for one in OBJECTIVES.values()}
    assert len(rules) == len(OBJECTIVES)


def test_a_name_says_whether_the_rule_truncates_or_masks():
    for name, objective in OBJECTIVES.items():
        assert (objective.correction.action == "truncate") == name.endswith("-tis")
        assert (objective.correction.action == "mask") == name.endswith("-mis")


def test_defaults_are_those_of_the_sources():
    assert OBJECTIVES["gspo"].ratio == Ratio("sequence", 3e-4, 4e-4)
    assert OBJECTIVES["dr-grpo"].ratio == Ratio("token", 0.2, 0.28)
    assert OBJECTIVES["grpo-token-tis"].correction == Correction("token", "truncate", 3.0)
    assert OBJECTIVES["ppo"].critic == CriticRule(discount=1.0, gae_lambda=1.0, value_clip=0.5)
    assert {name for name, one in OBJECTIVES.items() if one.critic} == {"ppo"}


@pytest.mark.parametrize(("given", "meant"), [("grop", "grpo"), ("seq-mis", "pg-seq-mis"), ("dr_grpo", "dr-grpo")])
def test_an_unknown_name_is_refused_with_the_nearest_known_one(given, meant):
    with pytest.raises(UsageError, match=rf"did you mean '\S*{meant}'\? give --objective one of reinforce, grpo"):
        build_objective(given)


def test_a_name_like_none_of_them_gets_the_list_alone():
    with pytest.raises(UsageError, match=r"'zzz' is unknown; give --objective one of") as error:
        build_objective("zzz")
    assert "did you mean" not in str(error.value)


def test_overrides_change_what_they_name_and_nothing_else():
    found = build_objective("grpo-seq-mis", {"threshold": 2.0, "clip_high": 0.28})
    assert found.correction == Correction("sequence", "mask", 2.0)
    assert found.ratio == Ratio("token", 0.2, 0.28)
    assert (found.advantage, found.normaliser) == (OBJECTIVES["grpo"].advantage, OBJECTIVES["grpo"].normaliser)


def test_a_choice_put_in_place_of_another_comes_with_its_own_defaults():
    found = build_objective("pg-seq-is", {"ratio": "token", "correction": "icepop", "advantage": "gae"})
    assert found.ratio == Ratio("token", 0.2, 0.2)
    assert found.correction == Correction("token", "mask", 5.0, floor=0.5)
    assert found.critic == CriticRule()


def test_the_clip_of_an_objective_stays_where_its_own_ratio_is_named_again():
    assert build_objective("dr-grpo", {"ratio": "token"}) == OBJECTIVES["dr-grpo"]


def test_without_its_advantage_ppo_needs_no_critic():
    assert build_objective("ppo", {"advantage": "group-mean"}).critic is None


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("reinforce", {"clip_high": 0.3}, "no use for clip_high, because its ratio is none"),
        ("grpo", {"ratio": "none", "clip_low": 0.3}, "no use for clip_low"),
        ("pg-seq-is", {"dual_clip": 3.0}, "no use for dual_clip"),
        ("grpo", {"dual_clip": 1.0}, "'dual_clip' is not usable"),
        ("grpo", {"threshold": 3}, "no use for threshold"),
        ("pg-seq-is", {"threshold": 3}, "no use for threshold"),
        ("grpo", {"gae_lambda": 0.9}, "no use for gae_lambda, because it has no critic"),
        ("ppo", {"advantage": "reward", "value_clip": 0.9}, "no use for value_clip"),
        ("gspo", {"advantage": "gae"}, "choose the ratio 'token' or 'none'"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ("grpo", {"clip_low": 0}, "'clip_low' is not usable"),
        ("grpo", {"clip_high": float("nan")}, "'clip_high' is not usable"),
        ("pg-seq-mis", {"threshold": 1}, "'threshold' is not usable"),
        ("grpo", {"advantage": "mean"}, "'advantage' is not usable: Input should be 'reward'"),
        ("grpo", {"correction": "seq-rs"}, "'correction' is not usable"),
    ],
)
def test_an_override_without_use_or_out_of_range_is_refused(name, overrides, reason):
    with pytest.raises(UsageError, match=reason):
        build_objective(name, overrides)


@pytest.mark.slow
def test_the_catalogue_loads_no_torch():
    code = "import sys, mismatch_probe.train.objectives.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
