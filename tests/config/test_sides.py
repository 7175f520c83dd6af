"""How people say which sides are compared, and what follows from a side: names, settings, what differs."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.cli.compare import side_values
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.preflight import with_typed_engines
from mismatch_probe.compare.stages import ScoreStage
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings, parse_side, write_side
from mismatch_probe.config.model import EngineSettings
from mismatch_probe.config.resuming import code_flags, resumed_comparison, with_one_spelling
from mismatch_probe.config.sides import response_of, sampler_of
from mismatch_probe.errors import UsageError

FP8KV = {"name": "fp8kv", "dtype": "bf16", "args": {"kv_cache_dtype": "fp8"}}
STALE = {"name": "stale", "dtype": "bf16", "checkpoint": "last/week"}
AUTOCAST = {"name": "autocast", "dtype": "bf16", "precision": "autocast"}


def settings(**given: Any) -> CompareSettings:
    return parse_settings(CompareSettings, {"model": {"path": "demo"}, **given})


def test_a_side_is_written_as_a_name_or_a_name_with_settings() -> None:
    assert parse_side("infer", "bf16") == {"name": "bf16", "dtype": "bf16"}
    assert parse_side("infer", "fp8kv:dtype=bf16,kv-cache-dtype=fp8") == FP8KV
    assert parse_side("infer", "stale:dtype=bf16,checkpoint=last/week") == STALE
    assert parse_side("train", "autocast:dtype=bf16,precision=autocast") == AUTOCAST
    assert parse_side("infer", "c:dtype=bf16,prefix_caching=true")["prefix_caching"] is True


def test_commas_in_an_engine_argument_divide_no_settings() -> None:
    side = parse_side("infer", 'long:dtype=bf16,hf_overrides={"a": 1, "b": [2, 3]},max_num_seqs=4')
    assert side["args"] == {"hf_overrides": {"a": 1, "b": [2, 3]}, "max_num_seqs": "4"}
    nested = parse_side("infer", 'x:dtype=bf16,compilation_config={"level":3,"pass_config":{"a":1}},checkpoint="a,b"')
    assert nested["args"] == {"compilation_config": {"level": 3, "pass_config": {"a": 1}}}
    assert nested["checkpoint"] == "a,b"


@pytest.mark.parametrize(
    "side",
    [
        FP8KV,
        STALE,
        {**STALE, "checkpoint": "123"},
        {**STALE, "checkpoint": 'a,"b'},
        {**FP8KV, "args": {"hf_overrides": {"a": [1, {"b": 2}]}, "x": "1", "list": ["a,b"]}},
    ],
)
def test_a_written_side_reads_as_it_was(side: dict[str, Any]) -> None:
    assert parse_side("infer", write_side(side)) == side


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x:dtype", "'dtype' is not written as key=value"),
        ("x:dtype=bf16,a=1,a=2", "gives a twice"),
        ("x:dtype=bf16,dtype=fp16", "gives dtype twice"),
        ("x:name=y", "name is no setting; the side's name stands before the colon"),
        ("x:dtype=bf16,args={}", "args is no setting; each of the engine's arguments stands by its own name"),
        (":dtype=bf16", "begins without a name"),
        ("fp8kv", "says no dtype, and its name is none; write fp8kv:dtype=bf16$"),
        ("x:kv_cache_dtype=fp8", "says no dtype, and its name is none; write x:dtype=bf16,kv_cache_dtype=fp8$"),
        ("x:dtype=int8", "nothing computes in it alone; quantization and kv_cache_dtype of an engine"),
        ("x:dtype=bf16 kv_cache_dtype=fp8", "put a comma before the next setting"),
        ("x:dtype=bf16,sizes=1,2", "a value with commas as JSON"),
        ("x:dtype=bf16,prefix_caching=yes", "setting 'prefix_caching' is not usable: give true or false, not 'yes'"),
        ("x:dtype=bf16,precision=autocast", "precision is a setting of the other side; give it to --train"),
        ('x:dtype=bf16,a={"b":', "value of a is no JSON"),
        ("x:dtype=bf16,a={}b=1", "put a comma there"),
    ],
)
def test_a_side_that_cannot_be_read_is_quoted(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_side("infer", text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x:dtype=bf16,precison=autocast", "has no setting precison; did you mean 'precision'"),
        ("x:dtype=bf16,max_num_seqs=8", "has no setting max_num_seqs; an engine's arguments belong to --infer"),
        ("x:dtype=bf16,prefix_caching=true", "prefix_caching is a setting of the other side; give it to --infer"),
        ("x:dtype=bf16,attention=flash", "'sdpa', 'eager' or 'flash_attention_2'"),
    ],
)
def test_a_training_side_that_cannot_be_read_is_quoted(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        parse_side("train", text)
    assert f"--train {text!r}" in str(refused.value)


def test_an_argument_that_the_engine_does_not_know_names_its_side() -> None:
    unknown = settings(infer=[{**FP8KV, "args": {"kv_cach_dtype": "fp8"}}], pairs=[["bf16", "fp8kv"]])
    with pytest.raises(UsageError, match=r"^--infer fp8kv: vLLM has no argument 'kv_cach_dtype'; did you mean kv_c"):
        with_typed_engines(unknown)


def test_each_training_side_meets_each_inference_side_unless_pairs_are_given() -> None:
    given = settings(**side_values(None, None, None, ["bf16"], ["bf16", "fp8kv:dtype=bf16,kv_cache_dtype=fp8"]))
    assert given.pairs == (("bf16", "bf16"), ("bf16", "fp8kv"))
    given = settings(infer=[FP8KV], train=[AUTOCAST])
    assert given.pairs == (("autocast", "fp8kv"),)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"infer": [FP8KV]}, "--train and --infer go together"),
        ({"infer": [FP8KV], "pairs": [["bf16", "bf16"]]}, "--infer fp8kv is in no pair"),
        ({"infer": [FP8KV, FP8KV], "pairs": [["bf16", "fp8kv"]]}, "--infer fp8kv is given twice"),
        ({"pairs": [["bf16", "fp8kv"]]}, "'fp8kv' cannot be used.*--infer fp8kv:dtype=bf16"),
        ({"infer": [{**FP8KV, "name": "fp16"}], "pairs": [["bf16", "fp16"]]}, "--infer fp16 has settings of its own"),
        ({"infer": [{**FP8KV, "name": "bf16"}], "pairs": [["bf16", "bf16"]]}, "--infer bf16 has settings of its own"),
        ({"infer": 5, "train": True}, "infer.*valid tuple"),
        ({"infer": [{**STALE, "checkpoint": ""}], "train": [AUTOCAST]}, "infer.0.checkpoint.*at least 1"),
        ({"infer": [{**FP8KV, "name": "a/b"}], "pairs": [["bf16", "a/b"]]}, "a side's name is at most 48"),
        ({"infer": [{**FP8KV, "precision": "to"}], "pairs": [["bf16", "fp8kv"]]}, "'infer.0.precision' is unknown"),
    ],
)
def test_sides_that_do_not_fit_their_pairs_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings(**given)


def test_dtype_flags_and_sides_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="leave --dtype"):
        side_values(["bf16"], None, None, ["bf16"], ["bf16"])
    with pytest.raises(UsageError, match="go together"):
        settings(**side_values(None, None, None, ["bf16"], None))


def test_a_side_without_settings_of_its_own_is_the_runs_and_makes_the_names_of_a_dtype() -> None:
    given = settings(engine={"args": {"block_size": 32}}, training={"precision": "to"})
    mu, pi = given.mu("bf16"), given.pi("bf16")
    assert mu.engine == given.engine
    assert pi.training == given.training
    assert (mu.stage("sample"), mu.leg("decode"), pi.stage("score"), pi.leg()) == (
        "sample-bf16",
        "infer-bf16-decode",
        "score-train-bf16",
        "train-bf16",
    )
    row = mu.row_id("p-1", 0)
    assert (row, sampler_of(row), response_of(row)) == ("p-1/0@infer-bf16", "infer-bf16", "p-1/0")


def test_a_sides_own_settings_stand_before_the_runs() -> None:
    given = settings(
        infer=[FP8KV, STALE], train=[AUTOCAST], engine={"args": {"block_size": 32, "kv_cache_dtype": "auto"}},
        pairs=[["bf16", "fp8kv"], ["bf16", "stale"], ["autocast", "bf16"]],
    )  # fmt: skip
    mu, pi = given.mu("fp8kv"), given.pi("autocast")
    assert mu.engine is not None
    assert pi.training is not None
    assert mu.engine.args == {"block_size": 32, "kv_cache_dtype": "fp8"}
    assert pi.training.precision == "autocast"
    assert given.mu("stale").model.path == "last/week"
    assert mu.differs_from(given.mu("bf16")) == ["kv_cache_dtype = fp8"]
    assert given.mu("stale").differs_from(given.mu("bf16")) == ["checkpoint = last/week"]
    assert pi.differs_from(given.pi("bf16")) == ["precision = autocast"]
    assert given.mu("bf16").differs_from(given.mu("fp16")) == []


def test_fp32_decides_for_the_pairs_that_differ_from_it_in_their_dtypes_alone() -> None:
    fp32kv = {**FP8KV, "name": "fp32kv", "dtype": "fp32"}
    pairs = [["bf16", "bf16"], ["fp32", "fp32"], ["bf16", "fp8kv"], ["fp32", "fp32kv"]]
    given = settings(infer=[FP8KV, fp32kv], pairs=pairs)
    assert given.exact_counterpart(("bf16", "bf16")) == ("fp32", "fp32")
    assert given.exact_counterpart(("bf16", "fp8kv")) == ("fp32", "fp32kv")
    alone = settings(infer=[FP8KV], pairs=pairs[:3])
    assert alone.exact_counterpart(("bf16", "fp8kv")) is None


def test_an_argument_with_its_default_value_makes_no_other_side() -> None:
    values = {**FP8KV, "args": {"kv_cache_dtype": "fp8", "tensor_parallel_size": "1"}}
    fp32kv = {**FP8KV, "name": "fp32kv", "dtype": "fp32"}
    given = settings(infer=[values, fp32kv], pairs=[["bf16", "fp8kv"], ["fp32", "fp32kv"]])
    assert with_typed_engines(given).exact_counterpart(("bf16", "fp8kv")) == ("fp32", "fp32kv")
    of_two = with_typed_engines(given.model_copy(update={"engine": EngineSettings(args={"tensor_parallel_size": 2})}))
    assert of_two.mu("fp8kv").engine.args["tensor_parallel_size"] == 1, "it stands against the run's own"
    assert of_two.exact_counterpart(("bf16", "fp8kv")) is None


def test_what_only_names_a_dtype_is_no_declared_side() -> None:
    given = settings(train=[{"name": "bf16", "dtype": "bf16"}], infer=[FP8KV])
    assert given.train == ()
    assert given == settings(infer=[FP8KV], pairs=[["bf16", "fp8kv"]])


def test_a_folder_spelled_otherwise_holds_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "m")
    spellings = ["./m", "m/", str(tmp_path / "m"), "link"]
    sides = [{"name": f"s{n}", "dtype": "bf16", "checkpoint": path} for n, path in enumerate([*spellings, "other"])]
    pairs = [["bf16", side["name"]] for side in sides]
    given = with_one_spelling(settings(model={"path": "m"}, infer=sides, pairs=pairs))
    same = [given.mu(side["name"]).has_weights_of(given.pi("bf16")) for side in sides]
    assert same == [True] * len(spellings) + [False]
    adapters = settings(training={"adapter": "./m"}, engine={"adapter": str(tmp_path / "m")})
    assert with_one_spelling(adapters).mu("bf16").has_weights_of(with_one_spelling(adapters).pi("bf16"))
    again = {"infer": sides, "pairs": pairs}
    assert resumed_comparison(tmp_path, given, again, with_typed_engines).infer == given.infer
    again["infer"] = [{**side, "checkpoint": "other"} for side in sides]
    with pytest.raises(UsageError, match="another side of the name s0"):
        resumed_comparison(tmp_path, given, again, with_typed_engines)


def test_a_run_without_a_reference_scores_none() -> None:
    legs = {stage.leg for stage in make_plan(settings(reference={"dtype": "none"})).leg_stages}
    assert not any(leg.startswith("ref-") for leg in legs)
    with pytest.raises(UsageError, match="too coarse"):
        settings(reference={"dtype": "bf16"})


def test_each_training_sides_weights_have_a_reference_and_the_same_weights_share_one() -> None:
    own = {"name": "own", "dtype": "bf16", "checkpoint": "tuned"}
    wide = {**own, "name": "wide", "dtype": "fp32"}
    pairs = [["own", "bf16"], ["bf16", "stale"], ["wide", "stale"]]
    plan = make_plan(settings(train=[own, wide], infer=[STALE], pairs=pairs))
    scored = {stage.leg: stage.samplers for stage in plan.jobs[-1].stages if isinstance(stage, ScoreStage)}
    assert {leg: samplers for leg, samplers in scored.items() if leg.startswith("ref-")} == {
        "ref-fp32": ("infer-stale",),
        "ref-fp32-weights-bf16": ("infer-stale",),
        "ref-fp32-of-own": ("infer-bf16", "infer-stale"),
        "ref-fp32-of-own-weights-bf16": ("infer-bf16", "infer-stale"),
    }


def test_names_that_make_the_same_leg_are_refused() -> None:
    given = settings(
        train=[{"name": "a", "dtype": "bf16"}, {"name": "a-b", "dtype": "bf16"}],
        infer=[{"name": "b-c", "dtype": "bf16"}, {"name": "c", "dtype": "bf16"}],
        pairs=[["a", "b-c"], ["a-b", "c"]],
    )
    with pytest.raises(UsageError, match="make the same leg, full-a-b-c"):
        make_plan(given)


def test_more_sides_are_added_to_those_of_a_run(tmp_path: Any) -> None:
    recorded = settings(infer=[FP8KV], pairs=[["bf16", "fp8kv"]])
    grown = resumed_comparison(tmp_path, recorded, {"infer": [STALE], "pairs": [["bf16", "stale"]]}, with_typed_engines)
    assert grown.pairs == (("bf16", "fp8kv"), ("bf16", "stale"))
    assert [side.name for side in grown.infer] == ["fp8kv", "stale"]
    assert resumed_comparison(tmp_path, recorded, {}, with_typed_engines) == recorded
    other = {**FP8KV, "args": {"kv_cache_dtype": "fp8_e5m2"}}
    with pytest.raises(UsageError, match="another side of the name fp8kv"):
        resumed_comparison(tmp_path, recorded, {"infer": [other], "pairs": [["bf16", "fp8kv"]]}, with_typed_engines)


def test_a_sides_own_checkpoint_runs_code_where_the_runs_is_trusted_to() -> None:
    recorded = settings(infer=[STALE], pairs=[["bf16", "stale"]], model={"path": "m", "trust_remote_code": True})
    assert code_flags(recorded.model_dump(mode="json")) == [
        "--trust-remote-code",
        "--infer",
        "stale:dtype=bf16,checkpoint=last/week",
    ]


def test_the_runs_checkpoint_named_again_is_the_runs(tmp_path: Any) -> None:
    same = {"name": "same", "dtype": "bf16", "checkpoint": "m"}
    given = settings(infer=[same], pairs=[["bf16", "same"]], model={"path": "m", "revision": "r1"})
    assert given.mu("same").model == given.model


def test_names_that_make_the_same_stage_are_refused() -> None:
    sides = [{"name": "x", "dtype": "bf16"}, {"name": "infer-x-alone", "dtype": "bf16"}]
    with pytest.raises(UsageError, match="make the same stage, replay-infer-x-alone"):
        make_plan(settings(infer=sides, pairs=[["bf16", "x"], ["bf16", "infer-x-alone"]]))


def test_a_sides_engine_argument_that_runs_code_counts_only_when_it_is_given_now(tmp_path: Any) -> None:
    evil = {**FP8KV, "args": {"worker_cls": "evil.Worker"}}
    recorded = settings(infer=[evil], pairs=[["bf16", "fp8kv"]])
    assert code_flags(recorded.model_dump()) == ["--infer", "fp8kv:dtype=bf16,worker_cls=evil.Worker"]
    with pytest.raises(UsageError, match=r"--infer fp8kv:dtype=bf16,worker_cls=evil\.Worker.*what runs code"):
        resumed_comparison(tmp_path, recorded, {}, with_typed_engines)
    given = {"infer": [evil], "pairs": [["bf16", "fp8kv"]]}
    assert resumed_comparison(tmp_path, recorded, given, with_typed_engines) == recorded
