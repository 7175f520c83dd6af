"""Arrays compared: the numbers and the verdict of a run, whatever holds them, and one sentence for what cannot be."""

import copy
import json
import math
import pickle
from dataclasses import asdict

import numpy as np
import pytest

import mismatch_probe as mp
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.sequences import Sequences, TokenPair
from tests.api.test_open_run import LARGEST_CELL
from tests.guards.steps import RESPONSES, batch

STEP = batch(1)
MASK = np.asarray(STEP.mask)
LENGTHS = MASK.sum(1)
PROMPTS = np.repeat(np.arange(4), 4)


def rows(values: np.ndarray) -> list[np.ndarray]:
    return [row[kept] for row, kept in zip(values, MASK, strict=True)]


@pytest.mark.slow
def test_the_estimates_are_those_of_a_run() -> None:
    pair = TokenPair(
        Sequences.of_lengths(LENGTHS, PROMPTS), STEP.log_pi[MASK], STEP.log_mu[MASK], entropy_pi=STEP.entropy[MASK]
    )
    compared = mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK, entropy=STEP.entropy, prompt_ids=PROMPTS)
    estimates, unavailable = pair_metrics(pair)
    assert compared.metrics == estimates
    assert compared.unavailable == unavailable
    assert asdict(compared.length) == asdict(length_law(pair))
    assert compared.length_budget.value > 0
    assert compared.metrics["kl_k3"].num_prompts == 4


@pytest.mark.slow
def test_lists_padded_arrays_and_tensors_give_the_same() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    padded = mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK).to_dict()
    ragged = mp.compare_logprobs(rows(STEP.log_pi), rows(STEP.log_mu)).to_dict()
    tensors = [torch.tensor(np.asarray(values), requires_grad=True) for values in (STEP.log_pi, STEP.log_mu)]
    assert mp.compare_logprobs(*tensors, torch.tensor(MASK)).to_dict() == padded == ragged
    halves = [values.detach().to(torch.bfloat16) for values in tensors]
    assert mp.compare_logprobs(*halves, MASK).metrics["kl_k3"].num_tokens == MASK.sum()


@pytest.mark.slow
def test_a_column_of_lists_is_a_list_of_rows() -> None:
    columns = []
    for side in (STEP.log_pi, STEP.log_mu):
        column = np.empty(RESPONSES, dtype=object)
        column[:] = [row.tolist() for row in rows(side)]
        columns.append(column)
    assert mp.compare_logprobs(*columns).metrics == mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK).metrics


def without(place: int, value: float = np.nan) -> np.ndarray:
    """mu with another value at one token that counts."""
    return np.where(np.arange(MASK.size).reshape(MASK.shape) == place, value, STEP.log_mu)


@pytest.mark.slow
@pytest.mark.parametrize("value", [-100.0, -101.0, -900.0])
def test_a_log_prob_at_which_no_sampler_draws_a_token_is_missing_of_mu_and_measured_of_pi(value: float) -> None:
    compared = mp.compare_logprobs(STEP.log_pi, without(3, value), MASK)
    assert compared.pair.counts.left_out_tokens == 1
    low = mp.compare_logprobs(np.where(without(3, value) == value, value, STEP.log_pi), STEP.log_mu, MASK)
    assert low.metrics["abs_logprob_diff_max"].value > 50


@pytest.mark.slow
@pytest.mark.parametrize("side", ["log_pi", "log_mu"])
def test_zeros_that_the_other_side_refutes_are_counted_and_honest_ones_are_not(side: str) -> None:
    given = {"log_pi": np.array(STEP.log_pi), "log_mu": np.array(STEP.log_mu)}
    for values in given.values():
        values[np.asarray(STEP.log_mu) > -1e-4] = 0.0
    honest = mp.compare_logprobs(**given, mask=MASK).pair.counts
    assert (honest.left_out_tokens, honest.zeros_for_missing) == (0, 0)
    unsure = np.flatnonzero(MASK & (np.asarray(STEP.log_mu) < -1.2) & (np.asarray(STEP.log_pi) < -1.2))[:4]
    given[side].ravel()[unsure] = 0.0
    counts = mp.compare_logprobs(**given, mask=MASK).pair.counts
    assert counts.zeros_for_missing == counts.left_out_tokens >= unsure.size


@pytest.mark.slow
def test_what_vllm_writes_for_no_log_prob_is_missing_in_bf16_too() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    written = torch.tensor(without(3, -9999.0))
    for kind in (torch.bfloat16, torch.float16, torch.float64):
        assert mp.compare_logprobs(STEP.log_pi, written.to(kind), MASK).pair.counts.missing_mu == 1


@pytest.mark.slow
@pytest.mark.parametrize("column", ["log_pi", "log_mu", "log_ref", "entropy"])
def test_a_token_that_lacks_a_value_is_left_out_and_counted(column: str) -> None:
    given = {"log_pi": STEP.log_pi, "log_mu": STEP.log_mu, "entropy": STEP.entropy, "log_ref": STEP.log_pi - 1e-4}
    given = {name: np.array(values) for name, values in given.items()}
    given[column][0, 2] = np.nan
    mask = MASK.copy()
    mask[0, 2] = False
    compared, expected = mp.compare_logprobs(**given, mask=MASK), mp.compare_logprobs(**given, mask=mask)
    assert (compared.pair.counts.left_out_tokens, compared.pair.counts.partial_responses) == (1, 1)
    for name in ("kl_k3", "abs_logprob_diff", "ess_token"):
        assert compared.metrics[name] == expected.metrics[name]
    others = mp.compare_logprobs(**{name: values[1:] for name, values in given.items()}, mask=MASK[1:])
    assert compared.metrics["ess_seq"].value == others.metrics["ess_seq"].value
    assert f"Left out: 1 token ({100 / MASK.sum():.2g} %) with" in str(compared)
    assert compared.verdict.kind != "broken"


def test_where_each_response_lacks_a_token_there_is_no_length_law_and_no_correction() -> None:
    log_mu = np.array(STEP.log_mu)
    log_mu[:, 0] = np.nan
    compared = mp.compare_logprobs(STEP.log_pi, log_mu, MASK)
    assert (compared.length, compared.length_budget, compared.corrections) == (None, None, [])
    assert "no response has the log-probs of all its tokens" in compared.unavailable["ess_seq"]
    assert "kl_k3" in str(compared)
    assert compared._repr_html_().startswith("<iframe")


def test_a_metric_of_another_name_is_answered_with_the_nearest_or_with_why_it_cannot_be_had() -> None:
    log_mu = np.array(STEP.log_mu)
    log_mu[:, 0] = np.nan
    metrics = mp.compare_logprobs(STEP.log_pi, log_mu, MASK).metrics
    with pytest.raises(KeyError, match="no metric 'kl_k33'; did you mean 'kl_k3'"):
        metrics["kl_k33"]
    with pytest.raises(KeyError, match="metric ess_seq cannot be had: no response has the log-probs of all its tokens"):
        metrics["ess_seq"]
    with pytest.raises(KeyError, match="no metric 'nothing_like_it'; give one of the "):
        metrics["nothing_like_it"]
    assert metrics.get("ess_seq") is None
    assert dict(metrics) == copy.deepcopy(metrics) == pickle.loads(pickle.dumps(metrics))


def test_more_than_a_twentieth_without_a_value_is_refused() -> None:
    spoiled = np.where(np.arange(MASK.size).reshape(MASK.shape) % 10 == 0, np.nan, STEP.log_mu)
    with pytest.raises(mp.UsageError, match=r"log_mu holds no value at .* where at most 5 % of the tokens, and of"):
        mp.compare_logprobs(STEP.log_pi, spoiled, MASK)


@pytest.mark.slow
def test_prompts_may_be_told_by_their_token_ids() -> None:
    by_number = mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK, prompt_ids=PROMPTS)
    ids = [[7, prompt] for prompt in PROMPTS]
    for given in (ids, np.array(ids), [str(prompt) for prompt in PROMPTS]):
        assert mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK, prompt_ids=given).metrics == by_number.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "dtypes", "kind", "code"),
    [
        ({}, ("bf16", "bf16"), "undecided", "unexplained"),
        ({"noise": 1e-7}, ("fp32", "fp32"), "clean", "clean"),
        ({"noise": 0.05}, ("fp32", "fp32"), "bug", "unexplained"),
        ({"temperature": 0.7, "noise": 1e-4}, ("fp32", "fp32"), "bug", "temperature"),
    ],
    ids=["BF16", "FP32 that agrees", "FP32 that does not", "one side's temperature"],
)
def test_the_verdict_is_that_of_a_run(changed: dict, dtypes: tuple[str, str], kind: str, code: str) -> None:
    step = batch(2, **changed)
    compared = mp.compare_logprobs(
        step.log_pi, step.log_mu, step.mask, entropy=step.entropy, train_dtype=dtypes[0], infer_dtype=dtypes[1]
    )
    assert (compared.verdict.kind, compared.verdict.code) == (kind, code)
    assert not any("RUN" in advice or "mismatch-probe" in advice for advice in compared.verdict.advice)


@pytest.mark.parametrize("base", [2, 10])
def test_entropies_in_another_base_are_warned_of_and_accuse_no_sampler(base: int) -> None:
    steps = [batch(step) for step in range(4)]
    sides = [
        np.concatenate([getattr(step, name) for step in steps]) for name in ("log_pi", "log_mu", "mask", "entropy")
    ]
    with pytest.warns(UserWarning, match=f"entropy looks like logarithms to base {base}"):
        compared = mp.compare_logprobs(*sides[:3], entropy=sides[3] / np.log(base))
    assert compared.verdict.kind != "bug"


@pytest.mark.slow
def test_it_shows_itself_as_text_as_json_and_in_a_notebook() -> None:
    compared = mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK, log_ref=STEP.log_pi - 1e-4, entropy=STEP.entropy)
    text = str(compared)
    assert text.startswith(f"undecided: {compared.verdict.sentence}")
    assert all(words in text for words in ("kl_k3", "length budget", "16 responses", "Next\n  FP32 against FP32"))
    assert json.loads(compared.to_json()) == compared.to_dict()
    assert compared.to_dict()["metrics"]["kl_k3"]["value"] == compared.metrics["kl_k3"].value
    assert "↵" not in text, "a line is one line"
    assert max(map(len, text.splitlines())) <= 120
    assert "16 responses" in repr(compared)
    page = compared._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "What corrections would leave" in page
    assert len(page.encode()) < LARGEST_CELL
    assert 'src="http' not in compared.to_html(), "the page of a file needs no network"
    assert {rule.name for rule in compared.corrections} >= {"token_truncate_3", "sequence_mask_3"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"log_mu": STEP.log_mu[:, :-1]}, "log_mu is 16 x 39 and log_pi is 16 x 40"),
        ({"log_mu": rows(STEP.log_mu)}, "log_mu is 16 rows of .* and log_pi is 16 x 40"),
        ({"log_mu": without(3, np.inf)}, f"log_mu is infinite at 1 of {MASK.sum()} tokens"),
        ({"log_mu": np.full_like(STEP.log_mu, np.nan)}, f"log_mu holds no value at {MASK.sum():,} of"),
        ({"log_pi": -STEP.log_pi}, "log_pi reaches .* and no log-prob is above 0"),
        ({"log_pi": np.exp(STEP.log_pi)}, "log_pi lies between 0 and 1, as probabilities do"),
        ({"log_mu": np.zeros_like(STEP.log_mu)}, "log_mu is 0 everywhere, so it was not recorded"),
        ({"mask": np.zeros_like(MASK)}, "no token counts"),
        ({"log_pi": [], "log_mu": [], "mask": []}, "no token counts"),
        ({"mask": [[2] * 40] * 16}, "mask holds something besides 0 and 1"),
        ({"log_mu": STEP.log_pi}, "log_pi equals log_mu bit for bit"),
        ({"log_mu": np.float32(STEP.log_pi)}, "log_pi equals log_mu bit for bit"),
        ({"entropy": -STEP.entropy}, "entropy holds what is no entropy"),
        ({"train_dtype": "bf17"}, "train_dtype 'bf17' is no number format; did you mean 'bf16'"),
        ({"level": 95}, "level 95 is none of an interval"),
        ({"prompt_ids": [1, 2]}, "prompt_ids has 2 values for 16 responses"),
        ({"log_pi": np.zeros((2, 2, 2))}, "log_pi is no list of responses"),
    ],
)
def test_bad_input_is_one_clear_sentence(given: dict[str, object], sentence: str) -> None:
    arguments = {"log_pi": STEP.log_pi, "log_mu": STEP.log_mu, "mask": MASK, **given}
    with pytest.raises(mp.UsageError, match=sentence) as error:
        mp.compare_logprobs(**arguments)
    assert "\n" not in str(error.value)


def test_a_copy_but_for_the_first_token_of_each_response_is_refused() -> None:
    copied = np.array(STEP.log_pi)
    copied[:, 0] = np.asarray(STEP.log_mu)[:, 0]
    arguments = {"log_pi": STEP.log_pi, "log_mu": copied, "mask": MASK}
    with pytest.raises(mp.UsageError, match=r"bit for bit at \d+ of \d+ tokens below -0.01 \(9\d %\), as where"):
        mp.compare_logprobs(**arguments)
    assert mp.compare_logprobs(**arguments, computed_apart=True).metrics["kl_k3"].value > 0
    assert mp.compare_logprobs(**arguments, train_dtype="fp32", infer_dtype="fp32").metrics["kl_k3"].value > 0


@pytest.mark.parametrize("side", ["log_pi", "log_mu"])
def test_a_reference_that_was_copied_from_a_side_is_no_format_of_the_other(side: str) -> None:
    copied = np.array(getattr(STEP, side))
    with pytest.raises(
        mp.UsageError, match=f"log_ref equals {side} bit for bit at all \\d+ tokens below -0.01.*a copy"
    ):
        mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK, log_ref=copied)


@pytest.mark.slow
def test_a_side_in_fp32_may_equal_its_reference() -> None:
    arguments = {"log_ref": STEP.log_pi, "train_dtype": "fp32"}
    assert mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK, **arguments).verdict.kind != "broken"
    computed = mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK, log_ref=STEP.log_pi, computed_apart=True)
    assert computed.verdict.code == "one_sided_dtype"


HIDDEN = {name: np.ma.masked_array(np.where(MASK, getattr(STEP, name), -77.0), ~MASK) for name in ("log_pi", "log_mu")}


@pytest.mark.slow
@pytest.mark.parametrize("masked", [("log_pi", "log_mu"), ("log_pi",), ("log_mu",)])
def test_what_a_masked_array_hides_does_not_count(masked: tuple[str, ...]) -> None:
    given = {name: HIDDEN[name] if name in masked else HIDDEN[name].data for name in HIDDEN}
    expected = mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK)
    assert mp.compare_logprobs(**given).to_dict() == expected.to_dict()
    assert mp.compare_logprobs(**{name: list(rows) for name, rows in given.items()}).to_dict() == expected.to_dict()


@pytest.mark.slow
def test_a_masked_mask_counts_what_it_shows() -> None:
    mask = np.ma.masked_array(np.ones(MASK.shape, dtype=int), ~MASK)
    expected = mp.compare_logprobs(STEP.log_pi, STEP.log_mu, MASK)
    assert mp.compare_logprobs(STEP.log_pi, STEP.log_mu, mask).to_dict() == expected.to_dict()


def test_pandas_na_is_a_log_prob_that_is_missing() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    for row in ([pandas.NA, -1.0, -2.0], pandas.array([pandas.NA, -1.0, -2.0], dtype="Float64")):
        with pytest.raises(mp.UsageError, match="log_mu holds no value at 1 of 6 tokens"):
            mp.compare_logprobs([[-1.0] * 3] * 2, [row, [-1.0] * 3])
    frame = pandas.DataFrame([[pandas.NA, -1.0]] * 2, dtype="Float64")
    with pytest.raises(mp.UsageError, match="log_mu holds no value at 2 of 4 tokens"):
        mp.compare_logprobs([[-1.0] * 2] * 2, frame)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_a_list_of_rows() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    expected = mp.compare_logprobs(rows(STEP.log_pi), rows(STEP.log_mu)).to_dict()
    for layout in (torch.jagged, torch.strided):
        sides = [
            torch.nested.nested_tensor([torch.tensor(row) for row in rows(side)], layout=layout)
            for side in (STEP.log_pi, STEP.log_mu)
        ]
        assert mp.compare_logprobs(*sides).to_dict() == expected
    with pytest.raises(mp.UsageError, match=r"log_mu is no dense array .*give a dense one"):
        mp.compare_logprobs(STEP.log_pi, torch.tensor(STEP.log_mu).to_sparse(), MASK)


@pytest.mark.slow
def test_equal_bits_are_believed_where_both_sides_were_computed() -> None:
    compared = mp.compare_logprobs(STEP.log_pi, STEP.log_pi, MASK, computed_apart=True)
    assert compared.verdict.kind == "clean"
    assert math.isclose(compared.metrics["bitwise_equal"].value, 1.0)


def test_a_response_without_a_token_is_left_out() -> None:
    mask = MASK.copy()
    mask[3] = False
    compared = mp.compare_logprobs(STEP.log_pi, STEP.log_mu, mask, prompt_ids=PROMPTS)
    assert compared.metrics["kl_k3"].num_sequences == RESPONSES - 1
