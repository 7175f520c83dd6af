"""Logs that each system's own writer made of the same six rollouts (`data/README.md`)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.logs import FORMATS, Holds, LogFinding, recognise
from mismatch_probe.records.sequences import LoggedResponse

DATA = Path(__file__).parent / "data"
GENERATE = DATA.parent / "answers" / "generate.jsonl"


@dataclass(frozen=True)
class Sample:
    """A log in `data`. first_step: how its system counts the first step; tells: codes of what is told as it is read.
    marks_tools: the log says which tokens a tool wrote. decimals: of its log-probs, where the writer rounds them."""

    name: str
    holds: Holds
    has: tuple[str, ...] = ()
    first_step: int | None = 1
    tells: tuple[str, ...] = ()
    marks_tools: bool = True
    decimals: int | None = None


SAMPLES = [
    Sample("plain", Holds.BOTH_SIDES, ("log_ref", "entropy_nats", "weight_version", "temperature", "group")),
    Sample("nemo_rl", Holds.BOTH_SIDES),
    Sample("prime_rl", Holds.BOTH_SIDES, ("entropy_nats",), tells=("unfinished_step",)),
    Sample(
        "prime_rl_traces",
        Holds.BOTH_SIDES,
        ("log_ref", "entropy_nats", "weight_version", "temperature", "group"),
        decimals=4,
    ),
    Sample("slime", Holds.BOTH_SIDES, ("log_ref", "entropy_nats", "weight_version", "group"), first_step=0),
    Sample("skyrl", Holds.BOTH_SIDES, ("log_ref",), tells=("padding_rows",)),
    Sample("miles", Holds.SAMPLER, first_step=0),
    Sample("open_instruct", Holds.SAMPLER, ("group",)),
    Sample("tinker", Holds.SAMPLER, ("temperature", "group"), marks_tools=False),
    Sample("verl", Holds.SAMPLER, ("weight_version", "group")),
    Sample("vllm_responses", Holds.SAMPLER, ("group",), first_step=None, marks_tools=False),
    Sample("sglang_responses", Holds.SAMPLER, ("weight_version",), first_step=None, marks_tools=False),
    Sample("nemo_gym", Holds.SAMPLER, ("group",), first_step=None, marks_tools=False),
    Sample("harbor", Holds.SAMPLER, ("group",), first_step=None, marks_tools=False),
    Sample("rllm", Holds.SAMPLER, ("weight_version", "group"), first_step=None, marks_tools=False),
]


@pytest.fixture(scope="module")
def source() -> dict[bytes, LoggedResponse]:
    """The rollouts that every log was written from, by their ids."""
    path = DATA / "plain" / "rollouts.jsonl"
    return {key(response): response for response in FORMATS.built_in["plain"].read(path, pytest.fail)}


def key(response: LoggedResponse) -> bytes:
    return response.prompt_token_ids.tobytes() + b"|" + response.token_ids.tobytes()


def deviations(responses: list[LoggedResponse]) -> np.ndarray:
    return np.concatenate([(each.log_pi - each.log_mu)[each.sampled] for each in responses])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_log_holds_what_was_written(sample, source):
    findings: list[LogFinding] = []
    known = recognise(DATA / sample.name)
    assert (known.name, known.holds) == (sample.name, sample.holds)
    read = list(known.read(DATA / sample.name, findings.append))
    assert [finding.code for finding in findings] == list(sample.tells)
    assert sorted(key(response) for response in read) == sorted(source)
    for response in read:
        written = source[key(response)]
        assert np.array_equal(response.sampled, written.sampled | (not sample.marks_tools))
        assert_written(response, written, "log_mu", sample.decimals)
        assert response.step == (None if sample.first_step is None else written.step - 1 + sample.first_step)
        for column in ("log_ref", "entropy_nats"):
            if column in sample.has:
                assert_written(response, written, column, sample.decimals)
        assert response.temperature == (written.temperature if "temperature" in sample.has else None)
        if "weight_version" in sample.has:
            assert response.weight_version == written.weight_version
        assert (response.group is None) == ("group" not in sample.has)
    assert sum(response.sampled.sum() for response in read) == (90 if sample.marks_tools else 96)
    if sample.holds == Holds.BOTH_SIDES:
        of_source = [source[key(response)] for response in read]
        rel = 1e-6 if sample.decimals is None else 0.01
        assert np.abs(deviations(read)).mean() == pytest.approx(np.abs(deviations(of_source)).mean(), rel=rel)


def assert_written(response: LoggedResponse, written: LoggedResponse, column: str, decimals: int | None) -> None:
    sampled = response.sampled
    values = np.float32(getattr(written, column)[sampled])
    if decimals is None:
        assert np.array_equal(getattr(response, column)[sampled], values), column
    else:
        assert np.allclose(getattr(response, column)[sampled], values, rtol=0, atol=0.51 * 10**-decimals), column


def test_every_format_with_log_probs_has_a_sample():
    of_another = {"slime_rollout"}  # a folder of slime's sample
    readable = {
        name
        for name, known in FORMATS.built_in.items()
        if known.holds in (Holds.BOTH_SIDES, Holds.SAMPLER) and not known.why_not
    }
    assert readable == {sample.name for sample in SAMPLES} | of_another


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_each_file_is_of_one_format(sample):
    known = recognise(DATA / sample.name)
    for source_file in known.sources(DATA / sample.name):
        assert recognise(source_file.path) is known
        assert source_file.num_bytes == source_file.path.stat().st_size


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_the_name_of_a_file_decides_nothing(sample, tmp_path):
    known = recognise(DATA / sample.name)
    for number, source_file in enumerate(known.sources(DATA / sample.name)):
        renamed = tmp_path / f"{number}.log"
        renamed.write_bytes(source_file.path.read_bytes())
        assert recognise(renamed) is known
        assert list(known.read(renamed, lambda finding: None))


@pytest.mark.parametrize("path", [DATA / "slime", GENERATE], ids=["slime", "generate"])
def test_experts_and_sets_of_a_sample_fit_its_tokens(path):
    for response in recognise(path).read(path, pytest.fail):
        num_tokens = response.prompt_token_ids.size + response.token_ids.size
        assert response.experts.shape == (num_tokens - 1, 3, 2)
        assert response.kept.ends.size == response.token_ids.size
        assert response.kept.sizes[response.sampled].min() > 0


def test_an_agent_that_is_not_trained_sampled_nothing_of_the_policy(tmp_path):
    source = next(DATA.glob("prime_rl_traces/**/step_1/**/traces.jsonl"))
    traces = tmp_path / "traces.jsonl"
    traces.write_text(source.read_text().replace('"trainable":true', '"trainable":false', 1))
    first, *others = recognise(traces).read(traces, pytest.fail)
    assert not first.sampled.any()
    assert all(response.sampled.any() for response in others)


def test_answers_of_the_endpoint_of_tokens_are_those_of_a_server(source):
    known = recognise(GENERATE)
    assert (known.name, known.holds) == ("vllm_responses", Holds.SAMPLER)
    read = list(known.read(GENERATE, pytest.fail))
    assert sorted(key(response) for response in read) == sorted(source)
    for response in read:
        assert_written(response, source[key(response)], "log_mu", None)
        assert response.weight_version == source[key(response)].weight_version
        assert response.group is not None
