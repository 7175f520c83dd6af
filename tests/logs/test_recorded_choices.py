"""Experts and sets as each system's files hold them."""

import json
import pickle
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mismatch_probe.errors import UsageError
from mismatch_probe.logs.pickles import NUMPY_NAMES, NumpyArray, load
from mismatch_probe.records.sequences import IntArray, LoggedResponse
from tests.logs.choices import rows_of, with_experts, with_sets
from tests.logs.reading import DATA, lines_of, read, written
from tests.logs.test_formats import TestSkyrl, written_batch

PATH_OF_GENERATE = DATA / "sglang_responses" / "generate.jsonl"
EXPERTS = np.arange(24).reshape(4, 3, 2)
ROW = {"prompt_token_ids": [1, 2], "token_ids": [5, 6, 7], "logprobs": [-0.1, -0.2, -0.3]}


def npy(array: IntArray) -> str:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return b64encode(buffer.getvalue()).decode()


def only(path: Path) -> LoggedResponse:
    [response], _ = read(path)
    return response


def test_the_plain_format_has_lists_and_nulls(tmp_path: Path) -> None:
    experts = EXPERTS.tolist()
    experts[1] = None
    rows = [ROW | {"routed_experts": experts, "kept_token_ids": [[5, 9], None, []]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for path in (written(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"):
        response = only(path)
        assert response.experts is not None
        assert response.kept is not None
        assert response.experts[0].tolist() == EXPERTS[0].tolist()
        assert (response.experts[1] == -1).all()
        assert (response.kept.ids.tolist(), response.kept.sizes.tolist()) == ([5, 9], [2, 0, 0])


@pytest.mark.parametrize(
    "column",
    [
        {"routed_experts": [[1, 2], [3, 4]]},
        {"routed_experts": [[[0.5, 1.0]]]},
        {"routed_experts": "nothing"},
        {"routed_experts": npy(np.zeros((2, 2, 2)))},
        {"routed_experts": npy(EXPERTS)[:-24]},
        {"kept_token_ids": [1, 2, 3]},
        {"kept_token_ids": [[-1], [2], [3]]},
        {"kept_token_ids": [["a"], [2], [3]]},
    ],
)
def test_what_is_neither_experts_nor_sets_is_refused_with_its_column(tmp_path: Path, column: dict) -> None:
    path = written(tmp_path / "rows.jsonl", [ROW | column])
    with pytest.raises(UsageError, match=f"line 1.*{next(iter(column))}"):
        read(path)


def test_a_header_that_promises_more_than_there_is_takes_no_memory(tmp_path: Path) -> None:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i4", "fortran_order": False, "shape": (2**30, 64, 8)})
    row = ROW | {"routed_experts": b64encode(buffer.getvalue()).decode()}
    with pytest.raises(UsageError, match="routed_experts"):
        read(written(tmp_path / "rows.jsonl", [row]))


def test_answers_of_vllm_have_experts_in_base64_and_sets_as_lists(tmp_path: Path) -> None:
    rows = lines_of(DATA / "vllm_responses" / "answers.jsonl")
    choice = next(choice for row in rows for choice in row["choices"] if choice.get("token_ids"))
    choice |= {"routed_experts": npy(EXPERTS.astype(np.uint8)), "sampling_mask": [[one] for one in choice["token_ids"]]}
    responses, _ = read(written(tmp_path / "answers.jsonl", rows))
    [response] = [response for response in responses if response.experts is not None]
    assert response.experts is not None
    assert response.kept is not None
    assert response.experts.tolist() == EXPERTS.tolist()
    assert response.kept.ids.tolist() == response.token_ids.tolist()


def sglang(tmp_path: Path, experts: list[IntArray], num_prompt: int = 5) -> list[LoggedResponse]:
    """Answers as SGLang's `/generate` writes them, whose experts are the base64 text of a flat int32 array."""
    rows = []
    for array in experts:
        length = len(array) + 1 - num_prompt
        meta = {
            "prompt_tokens": num_prompt,
            "input_token_logprobs": [[None, 27, None], *[[-1.5, 27, None]] * (num_prompt - 1)],
            "output_token_logprobs": [[-0.5, 26, None]] * length,
            "routed_experts": b64encode(array.astype("<i4").tobytes()).decode(),
        }
        rows.append({"text": "a", "output_ids": [26] * length, "meta_info": meta})
    return read(written(tmp_path / "answers.jsonl", rows))[0]


def drawn(num_tokens: int, layers: int, size: int, num_experts: int, seed: int = 0) -> IntArray:
    """Experts of a router, each once a token and layer."""
    order = np.random.default_rng(seed).random((num_tokens, layers, num_experts)).argsort(axis=2)
    return order[:, :, :size]


@pytest.mark.parametrize(("layers", "size", "num_experts"), [(48, 8, 128), (48, 10, 512), (61, 8, 256), (24, 4, 32)])
def test_experts_of_sglang_have_as_many_a_layer_as_come_once(
    tmp_path: Path, layers: int, size: int, num_experts: int
) -> None:
    experts = [drawn(length, layers, size, num_experts, seed) for seed, length in enumerate((90, 20, 70))]
    responses = sglang(tmp_path, experts)
    for response, array in zip(responses, experts, strict=True):
        assert response.experts is not None
        assert response.experts.tolist() == array.tolist()


def test_a_short_answer_of_sglang_and_one_of_other_tokens_have_no_experts_and_no_error(tmp_path: Path) -> None:
    short, other = drawn(20, 4, 2, 8), drawn(90, 4, 2, 8).reshape(-1)[:-3]
    assert sglang(tmp_path, [short])[0].experts is None
    rows = lines_of(PATH_OF_GENERATE)
    rows[0]["meta_info"]["routed_experts"] = b64encode(other.astype("<i4").tobytes()).decode()
    assert read(written(tmp_path / "other.jsonl", rows))[0][0].experts is None
    rows[0]["meta_info"]["routed_experts"] = "no base64"
    with pytest.raises(UsageError, match="routed_experts is no base64 text of int32"):
        read(written(tmp_path / "bad.jsonl", rows))


@pytest.mark.parametrize("packed", [None, "int8", "int16", "int32"])
def test_nemo_gym_has_lists_or_what_nemo_rl_packs(tmp_path: Path, packed: str | None) -> None:
    rows = lines_of(DATA / "nemo_gym" / "rollouts.jsonl")
    output = next(item for item in rows[0]["response"]["output"] if item.get("generation_token_ids"))
    num_tokens = len(output["prompt_token_ids"]) + len(output["generation_token_ids"])
    experts = drawn(num_tokens, 4, 2, 8)
    text = b64encode(experts.astype(packed or "int8").tobytes()).decode()
    output["routed_experts"] = experts.tolist() if packed is None else f"nrlre1:{packed}:{num_tokens}x4x2:{text}"
    first = read(written(tmp_path / "rollouts.jsonl", rows))[0][0]
    assert first.experts is not None
    assert first.experts.tolist() == experts.tolist()


@pytest.mark.parametrize(
    "text", ["nrlre1:int16", "nrlre1:int16:2x1x2:AAAB", "nrlre1:float:1x1x1:AAAA", "nrlre1:int8:-1x1x1:"]
)
def test_what_nemo_rl_packs_otherwise_is_refused(tmp_path: Path, text: str) -> None:
    rows = lines_of(DATA / "nemo_gym" / "rollouts.jsonl")
    output = next(item for item in rows[0]["response"]["output"] if item.get("generation_token_ids"))
    output["routed_experts"] = text
    with pytest.raises(UsageError, match="routed_experts is no array as NeMo-RL packs it"):
        read(written(tmp_path / "rollouts.jsonl", rows))


def with_support(rows: list[dict]) -> list[dict]:
    """As a NeMo rollout that replays its cut writes it: a set for each token of the policy, none for others, all padded
    with -1 to the largest set.
    """
    for row in rows:
        [ids], [own] = row["token_ids"], row["token_loss_mask"]
        tokens = zip(ids, own, strict=True)
        row["sampling_support_token_ids"] = [[[one, 7, -1] if is_own else [-1] * 3 for one, is_own in tokens]]
    return rows


def test_nemo_rl_has_a_set_for_each_token_of_the_policy(tmp_path: Path) -> None:
    rows = with_support(lines_of(DATA / "nemo_rl" / "train_data_step1.jsonl"))
    for response in read(written(tmp_path / "train_data_step1.jsonl", rows))[0]:
        assert response.kept is not None
        assert response.kept.sizes.tolist() == [2 * int(one) for one in response.sampled]
        sampled = response.token_ids[response.sampled]
        assert response.kept.ids.reshape(-1, 2).tolist() == [[one, 7] for one in sampled]


def test_sets_of_nemo_rl_for_fewer_tokens_are_refused(tmp_path: Path) -> None:
    rows = with_support(lines_of(DATA / "nemo_rl" / "train_data_step1.jsonl"))
    rows[0]["sampling_support_token_ids"][0].pop()
    with pytest.raises(UsageError, match=r"line 1.*sampling_support_token_ids has sets of \d+ tokens"):
        read(written(tmp_path / "train_data_step1.jsonl", rows))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
@pytest.mark.parametrize("folder", ["train_data", "rollout_data"])
def test_slime_has_arrays_of_numpy(tmp_path: Path, folder: str, dtype: str) -> None:
    """As its rollout keeps what SGLang answered: `np.frombuffer(...).reshape(...)`, in `torch.save`."""
    content = torch.load(DATA / "slime" / folder / "0.pt", weights_only=True)
    arrays = [drawn(len(sample["tokens"]) - 1, 4, 2, 8, seed) for seed, sample in enumerate(content["samples"])]
    for sample, array in zip(content["samples"], arrays, strict=True):
        sample["rollout_routed_experts"] = np.frombuffer(array.astype(dtype).tobytes(), dtype).reshape(array.shape)
        sample["metadata"] = {"picture": np.array([None, "x"], dtype=object), "share": np.float64(0.5)}
    torch.save(content, tmp_path / "0.pt")
    responses, _ = read(tmp_path / "0.pt")
    for response, array in zip(responses, arrays, strict=True):
        assert response.experts is not None
        assert response.experts.tolist() == array.tolist()


def test_an_array_of_numpy_by_columns_is_read_and_one_that_is_cut_is_not() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3))
    numpy = load(pickle.dumps(array, protocol=2), NUMPY_NAMES)
    assert isinstance(numpy, NumpyArray)
    numbers = numpy.numbers()
    assert numbers is not None
    assert numbers.tolist() == array.tolist()
    version, shape, kind, is_by_column, data = numpy._state
    for state in (
        (version, (2, 4), kind, is_by_column, data),
        (version, (-2, -3), kind, is_by_column, data),
        (version, shape, "i2", is_by_column, data),
        (version, shape, kind, is_by_column, "text"),
        (version, shape),
        None,
    ):
        numpy.__setstate__(state)
        assert numpy.numbers() is None


@pytest.mark.parametrize("folder", ["train_data", "rollout_data"])
def test_slime_has_tensors_of_experts_and_ragged_sets(tmp_path: Path, folder: str) -> None:
    content = torch.load(DATA / "slime" / folder / "0.pt", weights_only=True)
    for sample in content["samples"]:
        length = int(sample["response_lengths" if folder == "train_data" else "response_length"])
        sample |= {
            "rollout_routed_experts": torch.ones(len(sample["tokens"]) - 1, 4, 2, dtype=torch.int32),
            "rollout_top_p_token_ids": torch.arange(2 * length, dtype=torch.int32),
            "rollout_top_p_token_offsets": torch.arange(0, 2 * length + 1, 2, dtype=torch.int32),
            "rollout_top_p_log_probs": torch.full((2 * length,), -0.7),
        }
    torch.save(content, tmp_path / "0.pt")
    responses, _ = read(tmp_path / "0.pt")
    assert responses
    for response in responses:
        assert response.experts is not None
        assert response.kept is not None
        assert response.kept.logprobs is not None
        assert response.experts.shape == (response.prompt_token_ids.size + response.token_ids.size - 1, 4, 2)
        assert (response.kept.sizes == 2).all()


def test_skyrl_pads_experts_and_sets_as_its_sequences(tmp_path: Path) -> None:
    def add(columns: dict) -> None:
        rows, width = columns["sequences"]["shape"]
        length = columns["response_mask"]["shape"][1]
        experts = np.broadcast_to(np.arange(width)[None, :, None, None], (rows, width, 3, 2)).astype(np.int16)
        support = np.broadcast_to(np.array([7, -1]), (rows, length, 2)).astype(np.int32)
        for name, array in (("rollout_expert_indices", experts), ("rollout_sample_support", support)):
            columns[name] = {
                "format": "numpy",
                "data": array.tobytes(),
                "shape": array.shape,
                "dtype": str(array.dtype),
            }

    responses, _ = read(written_batch(tmp_path, TestSkyrl.FILE.read_bytes(), add))
    for response in responses:
        assert response.experts is not None
        assert response.kept is not None
        num_tokens = response.prompt_token_ids.size + response.token_ids.size
        assert len(response.experts) == num_tokens
        assert response.experts[0, 0, 0] == response.num_padding
        assert response.kept.sizes.tolist() == [1] * response.token_ids.size


PACKED = TestSkyrl.FILE.with_name("global_step_2_training_input.pkl")
"""Of SkyRL 0.4, which packs what was chosen and names the formats of its tensors by a class."""


def test_skyrl_packs_experts_and_sets() -> None:
    responses, _ = read(PACKED)
    assert len(responses) == 3
    for response in responses:
        assert response.experts is not None
        assert response.kept is not None
        assert response.experts.shape == (response.prompt_token_ids.size + response.token_ids.size, 3, 2)
        assert (response.experts[-1] == -1).all(), "the router has not seen the last token"
        assert (response.experts[:-1, :, 0] != response.experts[:-1, :, 1]).all()
        sets = np.split(response.kept.ids, response.kept.ends[:-1])
        for token, is_sampled, ids in zip(response.token_ids, response.sampled, sets, strict=True):
            assert (token in ids) == is_sampled
            assert (ids.size > 0) == is_sampled


@pytest.mark.parametrize("name", ["rollout_expert_indices", "rollout_sample_support"])
def test_packed_choices_of_other_tokens_are_refused(tmp_path: Path, name: str) -> None:
    def with_ends(change) -> Path:
        def edit(columns: dict) -> None:
            ends = columns[name]["cu_seqlens"]
            values = change(np.frombuffer(ends["data"], np.int32).copy())
            ends |= {"data": values.tobytes(), "shape": values.shape}

        return written_batch(tmp_path, PACKED.read_bytes(), edit)

    same, _ = read(with_ends(lambda ends: ends))
    assert all(response.experts is not None and response.kept is not None for response in same)
    with pytest.raises(UsageError, match="other tokens than its cu_seqlens says"):
        read(with_ends(lambda ends: ends - 1))
    with pytest.raises(UsageError, match="other tokens than its cu_seqlens says"):
        read(with_ends(lambda ends: np.append(ends, ends[-1] + 5)))
    with pytest.raises(UsageError, match="the recorded choices are of other tokens than its sequences"):
        read(with_ends(lambda ends: ends - np.eye(ends.size, dtype=np.int32)[1]))
    with pytest.raises(UsageError, match="its columns are not of the same rows"):
        read(with_ends(lambda ends: ends[[0, -1]]))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_array_of_numpy_is_read_from_each_protocol(protocol: int) -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for each in (array, np.asfortranarray(array)):
        numpy = load(pickle.dumps(each, protocol=protocol), NUMPY_NAMES)
        assert isinstance(numpy, NumpyArray)
        numbers = numpy.numbers()
        assert numbers is not None
        assert numbers.tolist() == array.tolist()


@pytest.mark.parametrize("column", [{"format": "tensor_list", "items": []}, {"values": {}, "cu_seqlens": {}}, None])
def test_choices_that_skyrl_packs_otherwise_are_left_out_and_its_batch_is_read(tmp_path: Path, column: object) -> None:
    def add(columns: dict) -> None:
        columns |= dict.fromkeys(("rollout_expert_indices", "rollout_sample_support"), column)

    responses, _ = read(written_batch(tmp_path, TestSkyrl.FILE.read_bytes(), add))
    assert responses
    assert all(response.experts is None and response.kept is None for response in responses)


def test_verl_has_jagged_experts_with_a_row_of_zeros_at_the_end() -> None:
    """The first file of `data/verl`, to which tensordict 0.15.3 wrote `routed_experts`, a layer of them dense."""
    responses, _ = read(Path(__file__).parent / "recorded")
    assert len(responses) == 3
    for response in responses:
        assert response.experts is not None
        num_tokens = response.prompt_token_ids.size + response.token_ids.size
        assert response.experts.shape == (num_tokens, 4, 2)
        assert not response.experts[-1].any()
        assert not response.experts[:, 0].any()


def test_the_plain_lines_of_a_log_are_the_log(tmp_path: Path) -> None:
    for log in (with_experts(1, responses=2), with_sets(1, responses=2)):
        responses, _ = read(written(tmp_path / "rows.jsonl", json.loads(json.dumps(rows_of(log)))))
        for one, other in zip(responses, log, strict=True):
            if other.experts is not None:
                assert np.array_equal(np.asarray(one.experts), other.experts)
            if other.kept is not None:
                assert one.kept is not None
                assert np.array_equal(one.kept.ends, other.kept.ends)
