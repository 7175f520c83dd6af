"""What is peculiar to the answers of servers and to traces."""

from pathlib import Path

import pytest

from mismatch_probe.errors import UsageError
from tests.logs.reading import DATA, lines_of, read, written


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
        rows = lines_of(DATA / "sglang_responses" / "generate.jsonl")
        rows[1]["output_ids"][0] += 1
        with pytest.raises(UsageError, match=r"line 2 .* output_ids are others"):
            read(written(tmp_path / "a.jsonl", rows))


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
