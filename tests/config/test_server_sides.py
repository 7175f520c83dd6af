"""How people say that a server is a side, and what it is asked for."""

from pathlib import Path

import pytest

from mismatch_probe.cli.compare import side_values
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.preflight import with_typed_engines
from mismatch_probe.config.examinations import values_of_pair
from mismatch_probe.config.load import parse_settings, parse_side
from mismatch_probe.config.model import EngineSettings
from mismatch_probe.config.resuming import code_flags, resumed_comparison
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import UsageError
from tests.config.test_sides import FP8KV, settings

PROD = "prod:url=http://127.0.0.1:8000/,model=policy,concurrency=4"


def test_a_server_is_a_side_with_an_address() -> None:
    side = parse_side("infer", PROD)
    assert side == {"name": "prod", "url": "http://127.0.0.1:8000/", "args": {"model": "policy", "concurrency": "4"}}
    given = with_typed_engines(settings(infer=[side], pairs=[["bf16", "prod"]], engine={"args": {"block_size": 32}}))
    mu = given.mu("prod")
    assert mu.engine == EngineSettings(
        name="server",
        prefix_caching=True,
        prefill=False,
        args={"url": "http://127.0.0.1:8000", "model": "policy", "concurrency": 4},
    )
    assert (mu.dtype, mu.is_computed_here) == ("bf16", False)
    stages = [stage.name for stage in make_plan(given).stages]
    assert not {"replay-prod", "distributions-prod", "compare-full-bf16-prod", "replay-infer-prod-alone"} & {*stages}
    assert {"sample-prod", "sample-infer-prod-alone"} <= {*stages}


def test_a_server_is_asked_for_its_prefill_only_where_that_is_said() -> None:
    given = settings(infer=[parse_side("infer", f"{PROD},prefill=true")], pairs=[["bf16", "prod"]])
    stages = [stage.name for stage in make_plan(given).stages]
    assert "replay-prod" in stages
    assert "replay-infer-prod-alone" not in stages
    assert settings(infer=[parse_side("infer", "x:dtype=bf16,prefill=false")], pairs=[["bf16", "x"]]).mu(
        "x"
    ).engine == (EngineSettings(prefill=False))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prod:url=http://me:hunter2@host:1", "a key belongs into the environment"),
        ("prod:url=http://host:1/?key=hunter2", "a key belongs into the environment"),
        ("prod:url=ftp://hunter2", "begins with http:// or https://"),
        ("prod:url=http://hunter2:99999", "it is no address"),
        ("prod:url=http://", "begins with http:// or https://"),
    ],
)
def test_what_is_no_address_is_refused_and_not_repeated(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        parse_side("infer", text)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"api_key": "hunter2"}, "^--infer prod: api_key cannot be given: .*MISMATCH_PROBE_SERVER_KEY"),
        ({"key_variable": "hunter2"}, "key_variable.*name of an environment variable"),
        ({"concurrency": "0"}, "concurrency.*greater than 0"),
        ({"protocol": "grpc"}, "protocol = 'grpc' is none of .*; give one of .*completions"),
        ({"modle": "x"}, "'modle' is unknown; did you mean 'model'"),
    ],
)
def test_arguments_of_a_server_are_checked_and_no_key_is_among_them(args: dict[str, str], words: str) -> None:
    prod = {"name": "prod", "url": "http://host", "args": args}
    with pytest.raises(UsageError, match=words) as refused:
        with_typed_engines(settings(infer=[prod], pairs=[["bf16", "prod"]]))
    assert "hunter2" not in str(refused.value)


def test_a_server_is_no_engine_of_the_whole_run() -> None:
    with pytest.raises(UsageError, match="a server is a side of its own"):
        settings(engine={"name": "server", "args": {"url": "http://host"}})


def test_training_samples_from_no_server() -> None:
    given = {"model": {"path": "demo"}, "engine": {"name": "server"}}
    with pytest.raises(UsageError, match="a server is a side of a comparison with an address"):
        parse_settings(TrainSettings, given)


def test_a_server_has_no_counterpart_in_fp32_but_the_engine_here() -> None:
    given = settings(infer=[parse_side("infer", PROD)], pairs=[["bf16", "prod"], ["fp32", "fp32"]])
    assert given.exact_counterpart(("bf16", "prod")) is None
    train, infer = given.exact_sides(("bf16", "prod"))
    assert [side.name for side in train] == [side.name for side in infer] == ["bf16", "fp32"]
    assert given.mu("prod").differs_from(given.mu("bf16")) == ["url = http://127.0.0.1:8000"]
    with pytest.raises(UsageError, match="prod is a server, which nothing can look into"):
        values_of_pair(given, "bf16/prod")


def test_beside_a_server_of_an_adapter_stands_the_engine_here_with_that_adapter() -> None:
    side = parse_side("infer", f"{PROD},adapter=lora/3")
    given = settings(infer=[side], pairs=[["bf16", "prod"], ["fp32", "fp32"]])
    _, infer = given.exact_sides(("bf16", "prod"))
    assert [(side.name, side.dtype, side.adapter) for side in infer] == [
        ("prod-bf16", "bf16", "lora/3"), ("prod-fp32", "fp32", "lora/3"),
    ]  # fmt: skip


def test_an_address_is_given_again_when_a_run_goes_on() -> None:
    recorded = settings(infer=[parse_side("infer", PROD), FP8KV], pairs=[["bf16", "prod"], ["bf16", "fp8kv"]])
    [flag, text] = code_flags(recorded.model_dump(mode="json"))
    assert flag == "--infer"
    with pytest.raises(UsageError, match="nor is a server's address; give it again if you trust it"):
        resumed_comparison(Path("run"), recorded, {}, with_typed_engines)
    assert (
        resumed_comparison(Path("run"), recorded, {"infer": [parse_side("infer", text)]}, with_typed_engines)
        == recorded
    )
    moved = parse_side("infer", PROD.replace("8000", "9000"))
    with pytest.raises(UsageError, match="another side of the name prod"):
        resumed_comparison(Path("run"), recorded, {"infer": [moved]}, with_typed_engines)


def test_a_side_that_is_given_again_in_a_flags_words_is_the_one_that_is_recorded() -> None:
    text = "long:dtype=bf16,max_num_seqs=4,enforce_eager=true"
    recorded = with_typed_engines(settings(infer=[parse_side("infer", text)], pairs=[["bf16", "long"]]))
    assert recorded.infer[0].args["max_num_seqs"] == 4
    again = {"infer": [parse_side("infer", text)]}
    assert resumed_comparison(Path("run"), recorded, again, with_typed_engines) == recorded


def test_several_servers_are_a_side_each() -> None:
    text = 'prod:url=["http://one:8000/", "http://two:8000"],concurrency=4'
    sides = side_values(None, None, None, ["bf16"], [text])
    assert sides["pairs"] == [("bf16", "prod-1"), ("bf16", "prod-2")]
    given = settings(**sides)
    assert [given.mu(name).engine.args["url"] for name in ("prod-1", "prod-2")] == [
        "http://one:8000",
        "http://two:8000",
    ]  # type: ignore[union-attr]
    assert all(mu.engine is not None and mu.engine.args["concurrency"] == "4" for mu in given.infer_sides)


def test_what_is_wrong_with_one_of_several_servers_is_said_without_its_address() -> None:
    with pytest.raises(UsageError, match=r"--infer prod.*a key belongs into the environment") as refused:
        side_values(None, None, None, ["bf16"], ['prod:url=["http://one", "http://me:hunter2@two"]'])
    assert "hunter2" not in str(refused.value)
