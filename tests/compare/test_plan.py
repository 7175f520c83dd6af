from itertools import groupby

from mismatch_probe.compare.plan import fixed_batches, make_plan, model_length, sample_requests
from mismatch_probe.compare.stages import FloorStage, ReplayStage, RoutingStage, SampleStage, ScoreStage, TrainingStage
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.records.sequences import EncodedPrompt

LEG_PREFIXES = ("infer-", "train-", "ref-", "full-")
PROMPTS = [EncodedPrompt("p0", [1, 2, 3], "x"), EncodedPrompt("p1", [1], "y")]


def settings(**changes: object) -> CompareSettings:
    return parse_settings(CompareSettings, {"model": {"path": "demo"}, **changes})


def test_the_default_run_has_one_engine_job_a_dtype_and_one_training_job() -> None:
    plan = make_plan(settings())
    assert [job.name for job in plan.jobs] == ["engine-bf16", "engine-fp16", "engine-fp32", "training-path"]
    scored = {stage.leg for stage in plan.jobs[-1].stages if isinstance(stage, ScoreStage)}
    assert scored == {
        "ref-fp32",
        "ref-fp32-weights-bf16",
        "ref-fp32-weights-fp16",
        "train-bf16",
        "train-fp16",
        "train-fp32",
    }


def test_every_training_dtype_measures_its_floors_on_the_model_that_is_loaded_but_for_other_attention() -> None:
    stages = make_plan(settings(pairs=[("bf16", "bf16"), ("fp32", "bf16")])).jobs[-1].stages
    for dtype in ("bf16", "fp32"):
        floors = [stage for stage in stages if isinstance(stage, FloorStage) and stage.side.dtype == dtype]
        assert [stage.leg.removeprefix(f"train-{dtype}-") for stage in floors] == ["alone", "again", "other-attention"]
        pi = settings().pi(dtype)
        assert [stage.model for stage in floors[:2]] == [pi, pi]
        assert floors[2].model == pi.with_attention("eager")


def test_stages_that_share_a_model_stand_in_a_row() -> None:
    stages = make_plan(settings(pairs=[("bf16", "fp16"), ("bf16", "fp32"), ("fp32", "fp32")])).jobs[-1].stages
    models = [stage.model for stage in stages if isinstance(stage, TrainingStage)]
    assert len(models) == len(stages)
    loads = [model for model, _ in groupby(models)]
    assert all(loads.count(model) == 1 for model in loads)


def test_eager_attention_is_held_against_sdpa() -> None:
    stages = make_plan(settings(training={"attention": "eager"})).stages
    assert {stage.attention for stage in stages if isinstance(stage, FloorStage)} == {None, "sdpa"}


def test_every_pair_reads_the_distributions_of_its_engine() -> None:
    plan = make_plan(settings(pairs=[("bf16", "fp16"), ("fp32", "fp16"), ("bf16", "bf16")]))
    readers = {stage.side.name: [reader.leg for reader in plan.readers(stage)] for stage in plan.distributions_stages}
    assert readers == {"fp16": ["full-bf16-fp16", "full-fp32-fp16"], "bf16": ["full-bf16-bf16"]}


def test_experts_are_recorded_on_both_sides_of_every_pair_where_there_are_any() -> None:
    pairs = [("bf16", "fp16"), ("bf16", "bf16")]
    assert not [stage for stage in make_plan(settings(pairs=pairs)).stages if "routing" in stage.name]
    stages = make_plan(settings(pairs=pairs, experts={"num_sequences": 4})).leg_stages
    assert [stage.leg for stage in stages if "routing" in stage.name] == [
        "infer-fp16-routing",
        "infer-bf16-routing",
        "train-bf16-routing",
    ]
    [pi] = [stage for stage in stages if isinstance(stage, RoutingStage)]
    assert pi.samplers == ("infer-fp16", "infer-bf16")


def test_close_looks_can_be_switched_off() -> None:
    plan = make_plan(settings(floors={"num_sequences": 0}, full_vocabulary={"positions": 0}))
    assert all(isinstance(stage, SampleStage | ReplayStage | ScoreStage) for stage in plan.stages)


def test_a_cross_product_scores_each_training_leg_on_every_engine_it_is_paired_with() -> None:
    plan = make_plan(settings(pairs=[("bf16", "fp16"), ("bf16", "fp32"), ("fp32", "fp32")]))
    legs = {stage.leg: stage for stage in plan.jobs[-1].stages if isinstance(stage, ScoreStage)}
    assert legs["train-bf16"].samplers == ("infer-fp16", "infer-fp32")
    assert legs["train-fp32"].samplers == ("infer-fp32",)
    assert legs["ref-fp32"].samplers == ("infer-fp16", "infer-fp32")
    assert legs["ref-fp32-weights-fp16"].samplers == ("infer-fp16",)


def test_no_two_stages_write_the_same_file() -> None:
    plan = make_plan(settings(pairs=[(a, b) for a in ("bf16", "fp16", "fp32") for b in ("bf16", "fp16", "fp32")]))
    outputs = [output for stage in plan.stages for output in stage.outputs if output.startswith(LEG_PREFIXES)]
    names = [stage.name for stage in plan.stages]
    assert {stage.leg for stage in plan.leg_stages} == set(outputs)
    assert len(set(outputs)) == len(outputs)
    assert len(set(names)) == len(names)


def test_requests_are_the_same_for_every_engine_but_for_the_id() -> None:
    given = settings(sampling={"samples_per_prompt": 2})
    bf16, fp16 = (sample_requests(PROMPTS, given.sampling, given.mu(dtype)) for dtype in ("bf16", "fp16"))
    assert [request.id for request in bf16] == [
        "p0/0@infer-bf16",
        "p0/1@infer-bf16",
        "p1/0@infer-bf16",
        "p1/1@infer-bf16",
    ]
    assert [request.seed for request in bf16] == [request.seed for request in fp16]
    assert len({request.seed for request in bf16}) == 4


def test_batches_cover_every_row_once_in_order() -> None:
    assert fixed_batches(5, 2) == [[0, 1], [2, 3], [4]]
    assert fixed_batches(0, 2) == []


def test_the_engine_holds_prompt_response_and_the_replay_token_unless_the_context_ends() -> None:
    given = settings(sampling={"max_new_tokens": 10})
    assert model_length(PROMPTS, given, None) == 14
    assert model_length(PROMPTS, given, 13) == 13
