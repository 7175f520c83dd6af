"""What is peculiar to one format."""

import pickle
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import LogChecks, recognise, tables
from mismatch_probe.records.sequences import LoggedResponse
from tests.logs.reading import DATA, lines_of, read, written


def codes(responses: list[LoggedResponse]) -> list[str]:
    checks = LogChecks()
    for response in responses:
        checks.add(response)
    return [finding.code for finding in checks.findings() if finding.code != "mask_counts"]


class TestPlain:
    def test_parquet_and_lines_are_the_same(self, tmp_path):
        path = DATA / "plain" / "rollouts.jsonl"
        pq.write_table(pa.Table.from_pylist(lines_of(path)), tmp_path / "rollouts.parquet", row_group_size=2)
        for one, other in zip(read(path)[0], read(tmp_path / "rollouts.parquet")[0], strict=True):
            for field in one.__dataclass_fields__.keys() - {"where"}:
                assert np.array_equal(getattr(one, field), getattr(other, field)), field

    def test_what_is_absent_is_none_and_what_has_no_number_is_nan(self, tmp_path):
        rows = [{"prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": [None, -0.5]}]
        [response] = read(written(tmp_path / "a.jsonl", rows))[0]
        assert np.isnan(response.log_mu[0])
        assert (response.log_pi, response.step, response.group) == (None, None, None)
        assert response.sampled.all()

    def test_nulls_in_parquet_are_nan(self, tmp_path):
        table = pa.table({"prompt_token_ids": [[1]], "token_ids": [[2, 3]], "logprobs": [[None, -0.5]]})
        pq.write_table(table, tmp_path / "a.parquet")
        [response] = read(tmp_path / "a.parquet")[0]
        assert np.isnan(response.log_mu[0])

    @pytest.mark.parametrize(("length", "rows_at_once"), [(1, 1024), (2**14, 8), (2**20, 1)])
    def test_of_long_rows_few_are_in_memory_at_once(self, tmp_path, length, rows_at_once):
        table = pa.table({"token_ids": [np.zeros(length, np.int32)] * 2})
        pq.write_table(table, tmp_path / "a.parquet")
        assert tables.rows_at_once(pq.read_metadata(tmp_path / "a.parquet")) == rows_at_once

    def test_a_column_that_is_not_read_is_named(self, tmp_path):
        rows = [{"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-0.5], "train_logprob": [-0.5]}]
        _, [finding] = read(written(tmp_path / "a.jsonl", rows))
        assert finding.sentence.endswith("not read: train_logprob")


class TestNemoRl:
    FILE = DATA / "nemo_rl" / "train_data_step1.jsonl"

    def test_an_uncomputed_column_never_reads_as_a_mismatch(self, tmp_path):
        rows = [row | {"prev_logprobs": [[0.0] * len(row["token_ids"][0])]} for row in lines_of(self.FILE)]
        responses, _ = read(written(tmp_path / "train_data_step7.jsonl", rows))
        assert codes(responses) == ["all_zero"]
        assert {response.step for response in responses} == {7}

    def test_a_bypass_copy_never_reads_as_perfect(self, tmp_path):
        rows = [row | {"prev_logprobs": row["generation_logprobs"]} for row in lines_of(self.FILE)]
        assert codes(read(written(tmp_path / "a.jsonl", rows))[0]) == ["copied"]

    def test_literals_that_json_lacks_are_no_numbers(self, tmp_path):
        rows = lines_of(self.FILE)
        start = rows[0]["token_loss_mask"][0].index(1)
        rows[0]["prev_logprobs"][0][start : start + 2] = [float("nan"), float("-inf")]
        assert codes(read(written(tmp_path / "a.jsonl", rows))[0]) == ["some_missing", "sentinels"]

    def test_a_sample_outside_the_loss_has_no_token_that_counts(self, tmp_path):
        rows = lines_of(self.FILE)
        rows[0]["sample_loss_mask"] = [0.0]
        responses, _ = read(written(tmp_path / "a.jsonl", rows))
        assert responses[0].token_ids.size == 23
        assert not responses[0].sampled.any()

    def test_padding_on_the_other_side_is_refused(self, tmp_path):
        rows = lines_of(self.FILE)
        rows[1]["token_loss_mask"][0].reverse()
        with pytest.raises(UsageError, match=r"line 2 .* behind input_lengths, 11: the padding is elsewhere"):
            read(written(tmp_path / "a.jsonl", rows))

    def test_the_order_of_keys_says_nothing(self, tmp_path):
        rows = [dict(reversed(row.items())) for row in lines_of(self.FILE)]
        assert len(read(written(tmp_path / "a.jsonl", rows))[0]) == 3


class TestPrimeRl:
    FILE = DATA / "prime_rl" / "token_exports" / "step_1" / "rank_0.jsonl"

    def test_the_filler_before_the_first_token_is_no_log_prob(self, tmp_path):
        rows = [row | {"loss_mask": [True] * len(row["token_ids"])} for row in lines_of(self.FILE)]
        responses, _ = read(written(tmp_path / "a.jsonl", rows))
        assert all(np.isnan(response.log_pi[0]) and np.isnan(response.log_mu[0]) for response in responses)
        assert all(np.isfinite(response.log_pi[1:]).all() for response in responses)

    def test_minus_9999_is_told(self, tmp_path):
        rows = lines_of(self.FILE)
        rows[0]["inference_logprobs"][-1] = -9999.0
        assert codes(read(written(tmp_path / "a.jsonl", rows))[0]) == ["sentinels"]

    def test_a_column_of_nulls_was_not_recorded(self, tmp_path):
        rows = [row | {"trainer_logprobs": [None] * len(row["token_ids"])} for row in lines_of(self.FILE)]
        assert codes(read(written(tmp_path / "a.jsonl", rows))[0]) == ["no_numbers"]

    def test_another_schema_is_refused(self, tmp_path):
        rows = [row | {"schema_version": 2} for row in lines_of(self.FILE)]
        with pytest.raises(UsageError, match="schema_version is another than 1"):
            read(written(tmp_path / "a.jsonl", rows))

    def test_a_step_is_complete_where_it_is_marked(self):
        sources = recognise(DATA / "prime_rl").sources(DATA / "prime_rl")
        assert [(source.step, source.complete) for source in sources] == [(1, True)] * 2 + [(2, False)] * 2


class TestSlime:
    def test_versions_come_from_the_rollout_dump_or_are_told_missing(self, tmp_path):
        shutil.copytree(DATA / "slime" / "train_data", tmp_path / "train_data")
        responses, findings = read(tmp_path)
        assert {response.weight_version for response in responses} == {None}
        assert [finding.code for finding in findings] == ["no_weight_versions"] * 2

    def test_the_rollout_dump_alone_has_the_samplers_side(self):
        responses, _ = read(DATA / "slime" / "rollout_data")
        assert [response.weight_version for response in responses] == ["0"] * 3 + ["1"] * 3
        assert sum(response.sampled.sum() for response in responses) == 90
        assert {response.log_pi for response in responses} == {None}
        assert {response.finish_reason for response in responses} == {"stop"}

    @staticmethod
    def changed(path: Path, change) -> Path:
        content = torch.load(DATA / "slime" / "train_data" / "0.pt", weights_only=True)
        change(content)
        torch.save(content, path)
        return path

    def test_an_uncomputed_column_is_absent(self, tmp_path):
        path = self.changed(tmp_path / "0.pt", lambda it: [sample.pop("log_probs") for sample in it["samples"]])
        assert {response.log_pi for response in read(path)[0]} == {None}

    def test_another_version_is_refused(self, tmp_path):
        path = self.changed(tmp_path / "0.pt", lambda content: content.update(format_version=3))
        with pytest.raises(UsageError, match="another format_version than 2"):
            read(path)

    def test_bf16_is_read_as_it_is(self, tmp_path):
        path = self.changed(
            tmp_path / "0.pt",
            lambda it: [sample.update(log_probs=sample["log_probs"].bfloat16()) for sample in it["samples"]],
        )
        exact = read(DATA / "slime" / "train_data" / "0.pt")[0]
        for rounded, response in zip(read(path)[0], exact, strict=True):
            assert np.array_equal(rounded.log_pi, torch.tensor(response.log_pi).bfloat16().float().numpy())

    def test_an_evaluation_is_left_out(self, tmp_path):
        shutil.copy(DATA / "slime" / "rollout_data" / "0.pt", tmp_path / "eval_0.pt")
        shutil.copy(DATA / "slime" / "rollout_data" / "0.pt", tmp_path / "0.pt")
        responses, findings = read(tmp_path)
        assert (len(responses), [finding.code for finding in findings]) == (3, ["evaluation_left_out"])


class TestSkyrl:
    FILE = DATA / "skyrl" / "dumped_data" / "global_step_1_training_input.pkl"

    def test_a_skipped_forward_leaves_no_column(self, tmp_path):
        pickled = self.FILE.read_bytes()
        responses, _ = read(written_batch(tmp_path, pickled, lambda columns: columns.update(action_log_probs=None)))
        assert {response.log_pi for response in responses} == {None}

    def test_padding_on_the_right_is_read_too(self, tmp_path):
        def to_the_right(columns: dict) -> None:
            for name, column in columns.items():
                array = column and np.frombuffer(column["data"], column["dtype"]).reshape(column["shape"])
                if array is None:
                    continue
                mask = "attention_mask" if name in ("sequences", "attention_mask") else "response_mask"
                length = sum(np.frombuffer(original[mask]["data"], np.int64).reshape(3, -1).T)
                rolled = [np.roll(row, int(count)) for row, count in zip(array, length, strict=True)]
                columns[name] = column | {"data": np.stack(rolled).tobytes()}

        original: dict = {}

        def change(columns: dict) -> None:
            original.update(columns)
            to_the_right(columns)

        responses, _ = read(written_batch(tmp_path, self.FILE.read_bytes(), change))
        for one, other in zip(responses, read(self.FILE)[0], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.log_pi, other.log_pi)

    def test_what_numpy_lacks_is_read_from_torch_save(self, tmp_path):

        def in_bf16(columns: dict) -> None:
            column = columns["action_log_probs"]
            array = np.frombuffer(column["data"], np.float32).reshape(column["shape"])
            buffer = BytesIO()
            torch.save(torch.tensor(array).bfloat16(), buffer)
            columns["action_log_probs"] = {"format": "torch", "data": buffer.getvalue()}

        responses, _ = read(written_batch(tmp_path, self.FILE.read_bytes(), in_bf16))
        for one, other in zip(responses, read(self.FILE)[0], strict=True):
            assert np.allclose(one.log_pi, other.log_pi, rtol=2**-8, atol=0)

    def test_steps_of_a_trajectory_are_its_turns(self, tmp_path):
        """As `generator.step_wise_trajectories` writes them."""
        path = written_batch(tmp_path, self.FILE.read_bytes(), lambda columns: None, trajectory_ids=["a", "a", "b"])
        assert [response.trajectory for response in read(path)[0]] == ["a", "a", "b"]
        assert {response.trajectory for response in read(self.FILE)[0]} == {None}


def written_batch(folder: Path, pickled: bytes, change, **metadata) -> Path:
    """SkyRL's pickle with columns changed: unpickled by names of the test's own, and pickled under SkyRL's names."""
    module = b"skyrl.backends.skyrl_train.training_batch"

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str):
            if module.startswith("numpy"):
                return super().find_class(module, name)
            return {"_rebuild_tensor_batch": lambda kind, state: state, "TensorFormat": str}.get(name, lambda *_: None)

    state = Names(BytesIO(pickled)).load()
    change(state["batch_dict"])
    state["metadata"] |= metadata
    body = pickle.dumps((None, state), protocol=3)[2:-1]
    path = folder / "global_step_1_training_input.pkl"
    path.write_bytes(b"\x80\x03c" + module + b"\n_rebuild_tensor_batch\n" + body + b"R.")
    return path


def test_the_train_dump_of_miles_is_refused_with_what_to_do():
    path = DATA / "miles" / "train_data" / "0_0.pt"
    with pytest.raises(UsageError, match="give the folder dashboard_columns beside it"):
        read(path)
    assert recognise(DATA / "miles").name == "miles"


def test_open_instruct_may_have_no_log_probs(tmp_path):
    rows = [row | {"logprobs": None} for row in lines_of(next((DATA / "open_instruct").iterdir()))]
    responses, _ = read(written(tmp_path / "a.jsonl", rows))
    assert {response.log_mu for response in responses} == {None}
    assert all(response.sampled.all() for response in responses)


def test_a_failed_call_of_tinker_is_no_response(tmp_path):
    path = DATA / "tinker" / "capture" / "sample.jsonl"
    [first, *others] = lines_of(path)
    failed = {key: value for key, value in first.items() if key != "samples"} | {"status": "error"}
    assert len(read(written(tmp_path / "a.jsonl", [others[0], failed]))[0]) == len(others[0]["samples"])
