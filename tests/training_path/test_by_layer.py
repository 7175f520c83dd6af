"""The reference layer by layer has the bits of one loaded whole, goes on where it was killed, or says why it cannot."""

import re
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3nTextConfig, GptOssConfig

from mismatch_probe.config.model import ReferenceSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, StorageError, UsageError
from mismatch_probe.notation import write_size
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.by_layer_model import weight_bytes, why_by_layer
from mismatch_probe.training_path.by_layer_scorer import HiddenStates, LayerByLayerScorer
from mismatch_probe.training_path.scorer import Scorer
from tests.tiny_models import FAMILIES, make_checkpoint, quantise_blocks

SETTINGS = TrainingPathSettings(batch_tokens=200)
LAYERS = 4


class KilledError(Exception):
    """What stands for a kill: nothing behind it runs."""


def layered(folder: Path, dtype: Dtype = Dtype.FP32, rounded_to: Dtype | None = None) -> LayerByLayerScorer:
    return LayerByLayerScorer.load_layered(folder, dtype, SETTINGS, why="asked for", rounded_to=rounded_to)


def batched(sequences: Sequence[TokenSequence]) -> dict[int, list[TokenSequence]]:
    batches = plan_batches([sequence.num_tokens for sequence in sequences], SETTINGS.batch_tokens)
    return {number: [sequences[row] for row in rows] for number, rows in enumerate(batches)}


def scores(
    scorer: LayerByLayerScorer,
    sequences: Sequence[TokenSequence],
    states: HiddenStates,
    layer_done: Callable[[int, int], None] = lambda done, of: None,
) -> list[ScoredSequence]:
    return [row for batch in scorer.score_batches(batched(sequences), states, layer_done) for row in batch.scores]


def score_at_once(scorer: Scorer, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
    return [row for batch in batched(sequences).values() for row in scorer.score_batch(batch)]


def assert_same_bits(first: Sequence[ScoredSequence], second: Sequence[ScoredSequence]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.id == other.id
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.top1_ids, other.top1_ids)
        np.testing.assert_array_equal(one.entropy_nats, other.entropy_nats)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "in_memory"), [*((family, True) for family in FAMILIES), ("llama", False), ("qwen3-moe", False)]
)
def test_it_gives_the_bits_of_a_reference_loaded_whole(
    family: str, in_memory: bool, sequences: list[TokenSequence], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, num_hidden_layers=LAYERS)
    with Scorer.load(folder, Dtype.FP32, SETTINGS, reference=True) as scorer:
        expected, expected_settings = score_at_once(scorer, sequences), scorer.effective_settings()
    with layered(folder) as scorer:
        found = scores(scorer, sequences, HiddenStates(tmp_path / "hidden", in_memory=in_memory))
        settings = scorer.effective_settings()
    assert_same_bits(found, expected)
    by_layer = settings.pop("by_layer")
    assert (by_layer["why"], by_layer["layers"]) == ("asked for", LAYERS)
    assert settings == expected_settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "rounded_to"),
    [
        ("gemma2", Dtype.FP64, None),
        ("gemma2", Dtype.FP32, Dtype.FP16),
        ("qwen3-moe", Dtype.FP64, None),
        ("qwen3-moe", Dtype.FP32, Dtype.BF16),
    ],
)
def test_it_does_so_in_fp64_and_with_rounded_weights(
    family: str, dtype: Dtype, rounded_to: Dtype | None, sequences: list[TokenSequence], tmp_path: Path
) -> None:
    folder = with_full_fp32_weights(make_checkpoint(tmp_path / "model", family, num_hidden_layers=LAYERS))
    with Scorer.load(folder, dtype, SETTINGS, reference=True, rounded_to=rounded_to) as scorer:
        expected, expected_settings = score_at_once(scorer, sequences), scorer.effective_settings()
    with layered(folder, dtype, rounded_to) as scorer:
        assert_same_bits(scores(scorer, sequences, HiddenStates(tmp_path / "hidden", in_memory=True)), expected)
        assert {**scorer.effective_settings(), "by_layer": 0} == {**expected_settings, "by_layer": 0}


def with_full_fp32_weights(folder: Path) -> Path:
    """The checkpoint with weights that no narrower format holds."""
    path = folder / "model.safetensors"
    save_file(
        {name: weight * (1 + 2**-12) for name, weight in load_file(path).items()}, path, metadata={"format": "pt"}
    )
    return folder


@pytest.mark.slow
def test_shards_stored_in_bf16_and_attention_sinks_give_the_same_bits(
    sequences: list[TokenSequence], tmp_path: Path
) -> None:
    config = GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="40KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > LAYERS
    with Scorer.load(tmp_path / "model", Dtype.FP32, SETTINGS, reference=True) as scorer:
        expected = score_at_once(scorer, sequences)
    with layered(tmp_path / "model") as scorer:
        assert_same_bits(scores(scorer, sequences, HiddenStates(tmp_path / "hidden", in_memory=True)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_killed_one_goes_on_from_the_layer_it_had_reached(
    in_memory: bool, sequences: list[TokenSequence], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=LAYERS)

    def until_the_second(done: int, of: int) -> None:
        if done == 2:
            raise KilledError

    with layered(folder) as scorer:
        expected = scores(scorer, sequences, HiddenStates(tmp_path / "other", in_memory=True))
        states = HiddenStates(tmp_path / "hidden", in_memory=in_memory)
        states._saving_seconds = 0.0
        with pytest.raises(KilledError):
            scores(scorer, sequences, states, until_the_second)
    heard: list[int] = []
    with layered(folder) as scorer:
        again = HiddenStates(tmp_path / "hidden", in_memory=in_memory)
        assert_same_bits(scores(scorer, sequences, again, lambda done, of: heard.append(done)), expected)
    assert heard in ([3, 4], [2, 3, 4])
    assert in_memory or heard == [3, 4]


def test_hidden_states_of_other_passes_are_not_gone_on_from(tmp_path: Path) -> None:
    states = HiddenStates(tmp_path, in_memory=False)
    assert states.open(0, [[0, 1]]) == 0
    states.put(0, 3, [torch.ones(2, 5, 8)])
    assert HiddenStates(tmp_path, in_memory=False).open(0, [[0, 1]]) == 3
    assert HiddenStates(tmp_path, in_memory=True).open(0, [[0], [1]]) == 0
    states.forget(0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [0, 10, 700])
def test_damaged_hidden_states_are_computed_anew(left: int, tmp_path: Path) -> None:
    states = HiddenStates(tmp_path, in_memory=False)
    states.open(0, [[0, 1]])
    states.put(0, 3, [torch.ones(2, 5, 8)])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:left])
    assert HiddenStates(tmp_path, in_memory=True).open(0, [[0, 1]]) == 0


@pytest.mark.slow
def test_a_padded_row_that_is_not_finite_is_computed_again_alone(
    sequences: list[TokenSequence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=LAYERS)
    alike = [TokenSequence(f"a{number}", [1, 2], list(range(40 + number))) for number in range(3)]
    with layered(folder) as scorer:
        monkeypatch.setattr(scorer, "_plan_batch", lambda batch: [list(range(len(batch)))])
        expected = [scorer.score_batch([sequence])[0].logprobs for sequence in alike]
        compute, calls = scorer._score_padded, []

        def with_infinity(*arguments: object) -> list[ScoredSequence]:
            calls.append(arguments)
            scored = compute(*arguments)  # type: ignore[arg-type]
            if len(scored) > 1:
                scored[-1].logprobs[3] = np.inf
            return scored

        monkeypatch.setattr(scorer, "_score_padded", with_infinity)
        found = scores(scorer, alike, HiddenStates(tmp_path / "hidden", in_memory=True))
    assert len(calls) == 2
    assert {row.id for row in found} == {"a0", "a1", "a2"}
    for row in found:
        np.testing.assert_allclose(row.logprobs, expected[int(row.id[1:])], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_layers_that_share_keys_and_values_are_refused_in_one_sentence(tmp_path: Path) -> None:
    config = Gemma3nTextConfig(
        vocab_size=320, vocab_size_per_layer_input=320, hidden_size=64, hidden_size_per_layer_input=8,
        intermediate_size=[64] * 4, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        num_kv_shared_layers=2, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"cannot be computed layer by layer: layer \d .*reference\.by_layer = false"):
        layered(tmp_path)


def test_quantised_weights_and_an_adapter_are_refused(tmp_path: Path) -> None:
    folder = quantise_blocks(make_checkpoint(tmp_path, hidden_size=128, intermediate_size=128, head_dim=128))
    with pytest.raises(UsageError, match=r"are quantised.*--train NAME:checkpoint"):
        layered(folder)
    plain, with_adapter = make_checkpoint(tmp_path / "plain"), TrainingPathSettings(adapter="a")
    with pytest.raises(UsageError, match="merge a into"):
        LayerByLayerScorer.load_layered(plain, Dtype.FP32, with_adapter, why="asked for")


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_hidden_layers=LAYERS)
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks 1 weight of .* such as model\.layers\.2\.mlp\.up_proj\.weight"):
        layered(folder)


def other_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["both", "the head"])
def test_what_a_config_ties_is_what_the_files_hold(kept: str, sequences: list[TokenSequence], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=LAYERS)
    embeddings, head = "model.embed_tokens.weight", "lm_head.weight"

    def with_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if kept == "the head":
            return {head if name == embeddings else name: weight for name, weight in weights.items()}
        return {**weights, head: weights[embeddings].flip(0).contiguous()}

    other_weights(folder, with_head)
    with Scorer.load(folder, Dtype.FP32, SETTINGS, reference=True) as scorer:
        expected = score_at_once(scorer, sequences)
    with layered(folder) as scorer:
        assert_same_bits(scores(scorer, sequences, HiddenStates(tmp_path / "hidden", in_memory=True)), expected)


@pytest.mark.slow
def test_a_missing_buffer_that_files_should_hold_is_named(tmp_path: Path) -> None:
    config = DeepseekV3Config(
        vocab_size=320, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    other_weights(tmp_path, lambda weights: {name: weight for name, weight in weights.items() if name != bias})
    with pytest.raises(UsageError, match=rf"lacks 1 weight of .* such as {re.escape(bias)}"):
        layered(tmp_path)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    states = HiddenStates(tmp_path, in_memory=False)
    states.open(0, [[0]])
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, limits[1]))
        with pytest.raises(StorageError, match=r"cannot write .*-hidden\.pt: File too large"):
            states.put(0, 1, [torch.ones(1, 512, 512)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_it_is_chosen_where_the_whole_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path)

    def why(free: int, reference: ReferenceSettings | None = None, **training: str) -> str | None:
        monkeypatch.setattr("mismatch_probe.training_path.by_layer_model.free_memory", lambda device: free)
        settings = TrainingPathSettings.model_validate({"device": "cpu", **training})
        return why_by_layer(folder, Dtype.FP32, settings, reference or ReferenceSettings())

    assert why(2**30) is None
    needed = weight_bytes(folder, Dtype.FP32)
    assert needed == sum(weight.numel() * 4 for weight in load_file(folder / "model.safetensors").values())
    assert why(needed) == f"its weights in fp32 take {write_size(needed)}, and {write_size(needed)} are free (cpu)"
    assert why(2**30, ReferenceSettings(by_layer=True)) == "reference.by_layer asks for it"
    assert why(needed, ReferenceSettings(by_layer=False)) is None
    assert why(needed, device_map="auto") is None
