"""What is peculiar to the answers of servers and to traces."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.errors import UsageError
from tests.logs.reading import DATA, lines_of, read, written

PATH_OF_GENERATE = DATA / "sglang_responses" / "generate.jsonl"


class TestResponses:
    FILE = DATA / "vllm_responses" / "answers.jsonl"

    def test_a_batch_file_holds_answers_too(self, tmp_path):
        rows = [
            {"id": str(n), "custom_id": str(n), "response": {"status_code": 200, "body": answer}, "error": None}
            for n, answer in enumerate(lines_of(self.FILE))
        ]
        rows.append({"id": "f", "custom_id": "f", "response": None, "error": {"message": "no"}})
        one, other = read(written(tmp_path / "a.jsonl", rows))[0], read(self.FILE)[0]
        assert [each.token_ids.tolist() for each in one] == [each.token_ids.tolist() for each in other]

    @pytest.mark.parametrize(
        ("drop", "advice"),
        [("prompt_token_ids", "no ids of the prompt"), ("token_ids", "ask the server for them with return_token_ids")],
    )
    def test_what_was_not_asked_for_is_named(self, tmp_path, drop, advice):
        def without(answer: dict) -> dict:
            kept = {key: value for key, value in answer.items() if key != drop}
            for choice in kept["choices"]:
                choice.pop(drop, None)
                if drop == "token_ids" and "tokens" in choice["logprobs"]:
                    choice["logprobs"]["tokens"] = ["a"] * len(choice["logprobs"]["tokens"])
            return kept

        with pytest.raises(UsageError, match=advice):
            read(written(tmp_path / "a.jsonl", [without(answer) for answer in lines_of(self.FILE)]))

    def test_ids_that_differ_inside_an_answer_are_refused(self, tmp_path):
        rows = lines_of(PATH_OF_GENERATE)
        rows[1]["output_ids"][0] += 1
        with pytest.raises(UsageError, match=r"line 2 .* output_ids are others"):
            read(written(tmp_path / "a.jsonl", rows))


def test_sglang_has_the_sets_that_tokens_were_drawn_from_and_log_probs_in_them(tmp_path: Path) -> None:
    """`return_sampling_mask` of SGLang 0.5.23, with a log-prob a token, or in `support` mode one of each id."""
    responses, rows = read(PATH_OF_GENERATE)[0], lines_of(PATH_OF_GENERATE)
    with_sets = {index for index, row in enumerate(rows) if "output_token_sampling_mask" in row["meta_info"]}
    assert with_sets == {0, 2, 4}
    for index, response in enumerate(responses):
        assert (response.kept is not None) == (index in with_sets)
        if response.kept is None:
            continue
        sets = np.split(response.kept.ids, response.kept.ends[:-1])
        assert all(token in ids for token, ids in zip(response.token_ids, sets, strict=True))
        raw = np.array([value for value, _, _ in rows[index]["meta_info"]["output_token_logprobs"]])
        assert response.log_mu is not None
        assert np.allclose(response.log_mu - raw, 0.1, atol=1e-6), "what was sampled is surer than without the cut"
        assert (response.kept.logprobs is not None) == (index == 2)
    in_support = responses[2].kept
    assert in_support is not None
    assert in_support.logprobs is not None
    assert np.allclose(np.add.reduceat(np.exp(in_support.logprobs), in_support.ends - in_support.sizes), 1, atol=1e-6)
    for row in rows:
        row["meta_info"].pop("output_token_sampling_mask", None)
    without, _ = read(written(tmp_path / "answers.jsonl", rows))
    assert all(response.kept is None for response in without)
    assert without[0].log_mu[0] == np.float32(raw_of(rows[0], 0)), "without sets the log-probs are the raw ones"


def raw_of(row: dict, index: int) -> float:
    return row["meta_info"]["output_token_logprobs"][index][0]


@pytest.mark.parametrize(
    ("column", "change", "why"),
    [
        ("output_token_sampling_mask", lambda sets: sets[:-1], "has sets of 12 tokens where there are 13"),
        ("output_token_sampling_logprobs", lambda values: values[:-1], "output_token_sampling_logprobs has"),
        ("output_token_sampling_logprobs", lambda values: [*values[:-1], -0.5], "a list for some tokens"),
        ("output_token_sampling_logprobs", lambda values: [values[0] + values[1][:1], values[1][1:], *values[2:]],
         "has other lengths than output_token_sampling_mask"),
    ],
)  # fmt: skip
def test_sets_of_sglang_for_other_tokens_are_refused(tmp_path: Path, column: str, change, why: str) -> None:
    rows = lines_of(PATH_OF_GENERATE)
    meta = rows[2]["meta_info"]
    meta[column] = change(meta[column])
    with pytest.raises(UsageError, match=why):
        read(written(tmp_path / "answers.jsonl", rows))


def test_a_choice_of_sglang_has_the_ids_and_sets_in_its_metadata(tmp_path: Path) -> None:
    """With `return_meta_info` the OpenAI form holds what `/generate` does."""
    [row, *_], [response, *_] = lines_of(PATH_OF_GENERATE), read(PATH_OF_GENERATE)[0]
    message = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "message": message, "logprobs": None, "meta_info": row["meta_info"]}
    choice["prompt_token_ids"] = row["prompt_token_ids"]
    answer = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    [other], _ = read(written(tmp_path / "answers.jsonl", [answer]))
    assert other.token_ids.tolist() == response.token_ids.tolist()
    assert other.log_mu.tolist() == response.log_mu.tolist()
    assert other.kept.ids.tolist() == response.kept.ids.tolist()
    del choice["meta_info"]
    with pytest.raises(UsageError, match="it has no token ids"):
        read(written(tmp_path / "answers.jsonl", [answer]))


def test_sglang_omni_has_pairs_without_a_text(tmp_path: Path) -> None:
    rows = lines_of(PATH_OF_GENERATE)
    for row in rows:
        for column in ("input_token_logprobs", "output_token_logprobs"):
            row["meta_info"][column] = [pair[:2] for pair in row["meta_info"][column]]
    for one, other in zip(read(written(tmp_path / "a.jsonl", rows))[0], read(PATH_OF_GENERATE)[0], strict=True):
        assert one.prompt_token_ids.tolist() == other.prompt_token_ids.tolist()
        assert one.log_mu.tolist() == other.log_mu.tolist()


class TestPrimeRlTraces:
    FILE = DATA / "prime_rl_traces" / "rollouts" / "step_1" / "train" / "all" / "traces.jsonl"

    def branched(self, path: Path, parent: int) -> Path:
        """The first episode with a second answer to its prompt, a copy of the first that hangs on node `parent`."""
        episode = lines_of(self.FILE)[0]
        nodes = episode["traces"][0]["nodes"]
        nodes.append(nodes[1] | {"parent": parent})
        return written(path, [episode])

    def test_a_shared_stretch_counts_once(self, tmp_path):
        first, second = read(self.branched(tmp_path / "a.jsonl", 1))[0], read(self.FILE)[0][0]
        [both] = first
        assert both.sampled.sum() == 2 * second.sampled.sum(), "one path of two turns"
        siblings, _ = read(self.branched(tmp_path / "b.jsonl", 0))
        assert [each.sampled.sum() for each in siblings] == [second.sampled.sum()] * 2
        episode = lines_of(self.branched(tmp_path / "c.jsonl", 1))[0]
        nodes = episode["traces"][0]["nodes"]
        nodes.append(nodes[2])
        first, other = read(written(tmp_path / "c.jsonl", [episode]))[0]
        assert first.sampled.all()
        assert other.token_ids.tolist() == first.token_ids.tolist()
        assert other.sampled.tolist() == [False] * 23 + [True] * 23

    def test_a_parent_that_comes_later_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match=r"line 1 .* parent of node 2 is 2"):
            read(self.branched(tmp_path / "a.jsonl", 2))

    def test_more_log_probs_than_sampled_tokens_are_refused(self, tmp_path):
        episode = lines_of(self.FILE)[0]
        episode["traces"][0]["nodes"][1]["logprobs"].append(-0.5)
        with pytest.raises(UsageError, match="logprobs has 24 entries where the tokens are 23"):
            read(written(tmp_path / "a.jsonl", [episode]))

    def test_paths_without_end_are_refused(self, tmp_path):
        node = {"token_ids": [], "mask": [], "message": {}}
        nodes = [node | ({"parent": index - 1} if index else {}) for index in range(5000)]
        nodes += [node | {"parent": 4999}] * 5000
        episode = lines_of(self.FILE)[0] | {"traces": [{"nodes": nodes}]}
        with pytest.raises(UsageError, match="too many and too long"):
            read(written(tmp_path / "a.jsonl", [episode]))
