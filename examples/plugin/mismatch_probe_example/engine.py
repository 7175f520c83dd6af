"""An engine: transformers' `generate` as the sampler, for instance in another dtype than the training path."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine, EngineProvider, EngineStart
from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.provenance.checkpoint import has_tokenizer
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence

if TYPE_CHECKING:
    import torch

_ATTENTIONS: Final = ("sdpa", "eager")


class Transformers(EngineProvider):
    """What is known of the engine before it is started; torch is imported by `start` alone."""

    def start(self, how: EngineStart) -> "TransformersEngine":
        if how.engine.adapter is not None:
            raise UsageError("this engine computes no adapter; give a checkpoint that it is merged into")
        return TransformersEngine(how)

    def read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        unknown = next((name for name in arguments if name != "attention"), None)
        if unknown is not None:
            raise UsageError(f"engine.args.{unknown} is no argument of this engine; it has attention alone")
        if arguments.get("attention", _ATTENTIONS[0]) not in _ATTENTIONS:
            raise UsageError(
                f"engine.args.attention is one of {' and '.join(_ATTENTIONS)}, not {arguments['attention']!r}"
            )
        return dict(arguments)

    def default_arguments(self) -> Mapping[str, Any]:
        return {"attention": _ATTENTIONS[0]}

    def check_limits(self, dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
        if sampling.top_p != 1 or sampling.top_k:
            raise UsageError("this engine samples from the whole vocabulary; leave top_p and top_k out")
        if engine.prefix_caching:
            raise UsageError("this engine has no prefix cache; leave engine.prefix_caching out")


class TransformersEngine(Engine):
    """Samples and scores each sequence alone, so that no result depends on what else is in a call."""

    def __init__(self, how: EngineStart) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._how = how
        self._longest = how.max_model_len - 1
        self._attention = how.engine.args.get("attention", _ATTENTIONS[0])
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(
            how.checkpoint,
            revision=how.revision,
            dtype=getattr(torch, how.dtype.torch_name),
            attn_implementation=self._attention,
            trust_remote_code=how.trust_remote_code,
        )
        self._model: Any = model.to(self._device).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends: list[int] = ends if isinstance(ends, list) else [ends] if ends is not None else []
        self._model.generation_config = GenerationConfig()  # no sampling default of the checkpoint slips in
        self._texts = TokenTexts(_tokenizer(how))

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        if sampling.temperature != self._how.sampling.temperature:
            raise UsageError("this engine was started for another temperature, at which it replays too; start another")
        sampled = []
        for number, request in enumerate(requests, start=1):
            sampled.append(self._sampled(request, sampling))
            if self.on_finished is not None:
                self.on_finished(number, len(requests))
        return sampled

    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        return [self._scored(sequence) for sequence in sequences]

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    def distributions(self, contexts: Sequence[Sequence[int]]) -> FloatArray:
        import torch

        rows = [self._log_probs(list(context))[-1] for context in contexts]
        return torch.stack(rows).numpy()

    def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        import torch

        held = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in held:
                    raise EngineError(f"the model has no weight {name}")
                held[name].copy_(tensor)

    def effective_settings(self) -> dict[str, Any]:
        return {
            "engine": "transformers",
            "dtype": Dtype.parse(str(self._model.dtype)),
            "attention": self._attention,
            "device": self._device,
            "prefix_caching": False,
            "logprobs_mode": "processed_logprobs",
            "decode_support": "full vocabulary",
            "replay_support": "full vocabulary",
            "replay_temperature": self._how.sampling.temperature,
        }

    def close(self) -> None:
        self._model = None

    def _sampled(self, request: SampleRequest, sampling: SamplingSettings) -> SampledSequence:
        import torch

        prompt = list(request.prompt.token_ids)
        room = self._longest - len(prompt)
        if room < 1:
            raise UsageError(f"{request.prompt.label} leaves no room for a response in {self._longest} tokens")
        with torch.random.fork_rng():
            torch.manual_seed(request.seed)
            output = self._model.generate(
                torch.tensor([prompt], device=self._device),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long, device=self._device),
                do_sample=True,
                temperature=sampling.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=min(sampling.max_new_tokens, room),
                eos_token_id=None if sampling.ignore_eos or not self._ends else self._ends,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        token_ids = output.sequences[0, len(prompt) :].cpu()
        log_probs = torch.log_softmax(torch.cat(output.scores).float().cpu(), dim=-1)
        ended = not sampling.ignore_eos and int(token_ids[-1]) in self._ends
        sequence = TokenSequence(request.id, prompt, token_ids.tolist())
        return SampledSequence(
            sequence,
            _scores(sequence, log_probs),
            "stop" if ended else "length",
            self._texts(sequence.token_ids),
        )

    def _scored(self, sequence: TokenSequence) -> ScoredSequence:
        if sequence.num_tokens > self._longest:
            raise UsageError(f"{sequence.id} has {sequence.num_tokens} tokens, and this engine scores {self._longest}")
        log_probs = self._log_probs([*sequence.prompt_token_ids, *sequence.token_ids])
        return _scores(sequence, log_probs[len(sequence.prompt_token_ids) - 1 : -1])

    def _log_probs(self, token_ids: list[int]) -> "torch.Tensor":
        """Of each next token [T, V] (nats, FP32), at the temperature that is sampled at."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids], device=self._device)).logits[0].float().cpu()
        return torch.log_softmax(logits / self._how.sampling.temperature, dim=-1)


def _scores(sequence: TokenSequence, log_probs: "torch.Tensor") -> ScoredSequence:
    """The log-probs of a response's tokens, and the most likely ids, from those of the whole vocabulary."""
    import torch

    chosen = log_probs.gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0]
    return ScoredSequence(sequence.id, chosen.numpy(), log_probs.argmax(dim=-1).to(torch.int32).numpy())


def _tokenizer(how: EngineStart) -> Any:
    """None where the checkpoint has none."""
    if not has_tokenizer(Path(how.checkpoint)):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(how.checkpoint, trust_remote_code=how.trust_remote_code)


TRANSFORMERS: Final = Transformers()
