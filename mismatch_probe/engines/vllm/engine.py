"""The started vLLM engine: sampling, prefill replay, settings."""

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mismatch_probe.children.messages import is_job, mapped_by, own_token, processes_in, remove_left
from mismatch_probe.children.servers import keep_engine
from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.base import CachedReplay, Engine, EngineStart, HeldWeight, Products
from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.engines.vllm.arguments import register_kernels
from mismatch_probe.engines.vllm.declared import LATE_TOKENIZER
from mismatch_probe.engines.vllm.effective import (
    check_applied,
    forget_prefixes,
    give_tokenizer,
    read_effective_settings,
    require_forgotten,
    send_weights,
    tokenizer_of,
    without_trial_of_chat,
)
from mismatch_probe.engines.vllm.failures import engine_failures, start_failure
from mismatch_probe.engines.vllm.launch import (
    FULL_VOCABULARY,
    FinishedRequests,
    ImageInputs,
    KeepFrozen,
    frozen_heap,
    meet_without_a_file,
    own_processes,
    plan_launch,
    use_own_shared_memory,
    use_own_sockets,
)
from mismatch_probe.engines.vllm.outputs import (
    num_missing,
    record_routing,
    replayed_scores,
    sampled_sequence,
    whole_distributions,
)
from mismatch_probe.engines.vllm.worker import serve_adapter, served_facts
from mismatch_probe.errors import RoutingUnseen, UsageError
from mismatch_probe.images import images_of
from mismatch_probe.provenance.checkpoint import placeholder_ids, read_config
from mismatch_probe.provenance.stored_tensors import Adapter
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import (
    EncodedPrompt,
    FloatArray,
    PromptImages,
    SampledSequence,
    SampleRequest,
    ScoredSequence,
    TokenSequence,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def start_vllm(how: EngineStart) -> "VllmEngine":
    """vLLM, started; errors as of `EngineProvider.start`."""
    launch = plan_launch(how)
    from vllm import LLM

    meet_without_a_file()
    use_own_shared_memory()
    use_own_sockets()
    register_kernels()
    keep_frozen = frozen_heap()
    try:
        is_late = LATE_TOKENIZER in launch.choices
        with keep_frozen(), own_processes(), without_trial_of_chat() if is_late else nullcontext():
            llm = LLM(**launch.arguments)
        if is_late:
            with keep_frozen():
                give_tokenizer(llm)
    except Exception as error:
        raise start_failure(error, how.checkpoint, how.dtype, how.engine.args) from error
    start = {"bounded_by_probe": launch.bounds, "chosen_by_probe": launch.choices, "environment": launch.environment}
    engine = VllmEngine(llm, how.checkpoint, how.sampling, start, how.products, keep_frozen)
    try:
        if launch.adapter is not None:
            engine.serve(launch.adapter)
        check_applied(engine.effective_settings(), how.dtype)
    except BaseException:
        engine.close()
        raise
    return engine


class VllmEngine(Engine):
    """A started `vllm.LLM` that samples with `sampling` and replays at its temperature.

    `start` is what only the starter knows and the effective settings are to hold.

    On a CPU vLLM makes `torch.set_num_threads` a no-op and seeds the global generators of the process it runs in, so
    nothing else should compute there.
    """

    def __init__(
        self,
        llm: Any,
        checkpoint: str,
        sampling: SamplingSettings,
        start: dict[str, Any],
        products: Products = nullcontext,
        keep_frozen: KeepFrozen = nullcontext,
    ) -> None:
        self.llm = llm
        self._products = products
        self._keep_frozen = keep_frozen
        self._checkpoint = checkpoint
        self._sampling = sampling
        self._longest: int = llm.model_config.max_model_len - 1
        llm.collective_rpc("probe_prepare")
        self._texts = TokenTexts(tokenizer_of(llm))
        self._adapter: Any = None
        self._placeholder_ids: list[int] = []
        self._settings = {**read_effective_settings(llm, sampling), "adapter": None, **start}

    def look_at(self, prompts: Sequence[EncodedPrompt]) -> None:
        images = images_of(prompts)
        if not images:
            return
        if not hasattr(self.llm, "renderer"):
            raise UsageError(
                "this version of vLLM prepares images in another place than 0.32, and what it makes of them cannot be "
                "compared; install that version, or give prompts of text"
            )
        with engine_failures(self._checkpoint, "preparing images for"):
            inputs = ImageInputs(self.llm)
            num_other = sum(not inputs.has_same_pixels(each) for each in images)
            attention: list[str | None] = self.llm.collective_rpc("probe_image_attention")
        self._placeholder_ids = placeholder_ids(read_config(Path(images[0].folder)))
        self._settings["images"] = {
            "num_prompts": len(images),
            "num_tokens": sum(each.num_tokens for each in images),
            "other_pixels": num_other,
            "attention": attention[0],
            "processor_arguments": inputs.arguments,
        }

    def serve(self, adapter: Adapter) -> None:
        """Compute every request with `adapter` from now on."""
        self._adapter = serve_adapter(self.llm, adapter)
        self._settings["adapter"] = served_facts(self.llm, adapter)

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        from vllm import SamplingParams

        self._same_distribution(sampling)
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=request.seed,
                max_tokens=min(sampling.max_new_tokens, self._room(request)),
                ignore_eos=sampling.ignore_eos,
                logprobs=1,
                flat_logprobs=True,
                detokenize=False,
                stop_token_ids=None if request.prompt.images is None else self._placeholder_ids,
            )
            for request in requests
        ]
        prompts = [_Prompt(request.prompt.token_ids, request.prompt.images) for request in requests]
        outputs = self._generate(prompts, params, "sampling from")
        responses = [
            sampled_sequence(request, output, self._texts) for request, output in zip(requests, outputs, strict=True)
        ]
        self._warn_of_missing_log_probs([response.scores for response in responses])
        return responses

    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        self._require_room_to_score(sequences)
        outputs = self._score_prompts([_whole_sequence(sequence) for sequence in sequences])
        return self._scores_of_outputs(sequences, outputs)

    def replay_cached(self, sequences: Sequence[TokenSequence]) -> list[CachedReplay]:
        if not self._settings["prefix_caching"]:
            raise UsageError("the engine runs without a prefix cache; set engine.prefix_caching = true to measure it")
        self._require_room_to_score(sequences)
        replays = []
        for sequence in sequences:
            forget_prefixes(self.llm)
            # The prompt's last token is left out: what follows it is the response's first log-prob.
            prefix = sequence.prompt_token_ids[:-1]
            if prefix:
                self._score_prompts([_Prompt(prefix, sequence.images)], behind_cache=True)
            outputs = self._score_prompts([_whole_sequence(sequence)], behind_cache=True)
            [scores] = self._scores_of_outputs([sequence], outputs)
            replays.append(CachedReplay(scores, int(outputs[0].num_cached_tokens or 0)))
        return replays

    def routing(self, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
        if self._settings["num_workers"] != 1 or not self._settings["enforce_eager"]:
            raise RoutingUnseen(
                "experts are read inside one vLLM worker that runs eagerly; give --vllm.enforce_eager true, and leave "
                "--vllm.tensor_parallel_size and its like at 1"
            )
        with record_routing(self.llm, sequences) as routing:
            self.replay(sequences)
        return routing

    @property
    def vocab_size(self) -> int:
        return int(self.llm.model_config.get_vocab_size())

    def distributions(self, contexts: Sequence[Sequence[int]]) -> FloatArray:
        from vllm import SamplingParams

        longest = max(len(context) for context in contexts)
        if longest > self._longest:
            raise UsageError(
                f"a context of {longest} tokens leaves no room for another in {self._longest}; "
                f"raise --vllm.max_model_len to {longest + 1}"
            )
        params = SamplingParams(
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            seed=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=FULL_VOCABULARY,
            flat_logprobs=True,
            detokenize=False,
        )
        prompts = [_Prompt(list(context)) for context in contexts]
        outputs = self._generate(prompts, [params] * len(prompts), "comparing distributions of")
        return whole_distributions(outputs, self.vocab_size)

    def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        with engine_failures(self._checkpoint, "sending weights to"):
            send_weights(self.llm, weights, in_process=not self._settings["multiprocessing"])

    def held_weights(self, names: Sequence[str]) -> list[dict[str, HeldWeight]]:
        with engine_failures(self._checkpoint, "reading weights of"), self._products():
            workers = self.llm.collective_rpc("probe_held_weights", args=(list(names),))
        return [{name: HeldWeight(**weight) for name, weight in worker.items()} for worker in workers]

    def effective_settings(self) -> dict[str, Any]:
        return dict(self._settings)

    def close(self) -> None:
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        in_processes = self._settings["multiprocessing"]
        files = mapped_by(processes_in(os.getpgrp())) if in_processes else set()
        with self._keep_frozen():
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            cleanup_dist_env_and_memory()
        remove_left(own_token(), files)
        if not is_job():
            keep_engine(own_token())

    def _score_prompts(self, prompts: "list[_Prompt]", *, behind_cache: bool = False) -> list[Any]:
        """Request outputs with the log-probs of each prompt's tokens; `behind_cache`, of those that are not cached."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=1,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            skip_reading_prefix_cache=not behind_cache,
        )
        self.llm.collective_rpc("probe_scale_logits", args=(self._sampling.temperature,))
        try:
            return self._generate(prompts, [params] * len(prompts), "replaying on", keeps_cache=behind_cache)
        finally:
            self.llm.collective_rpc("probe_scale_logits", args=(1.0,))

    def _generate(
        self, prompts: "list[_Prompt]", params: list[Any], doing: str, *, keeps_cache: bool = False
    ) -> list[Any]:
        """Request outputs in order. A batch must not profit from what earlier ones left in the prefix cache."""
        forgets = self._settings["prefix_caching"] and not keeps_cache
        if forgets:
            forget_prefixes(self.llm)
        count_requests = False if self.on_finished is None else partial(FinishedRequests, self.on_finished)
        with engine_failures(self._checkpoint, doing), self._products():
            if any(prompt.images for prompt in prompts):
                outputs = self._generate_with_images(prompts, params)
            else:
                inputs = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
                outputs = self.llm.generate(inputs, params, use_tqdm=count_requests, lora_request=self._adapter)
        if forgets:
            require_forgotten(outputs)
        return outputs

    def _generate_with_images(self, prompts: "list[_Prompt]", params: list[Any]) -> list[Any]:
        """As `llm.generate`, of ids whose placeholders stand there already: `llm.generate` would look for markers of
        images in them, and would merge tokens of a response.
        """
        engine, outputs = self.llm.llm_engine, {}
        inputs = ImageInputs(self.llm)
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            request = inputs.of_ids(prompt.token_ids, prompt.images)
            engine.add_request(str(number), request, each, lora_request=self._adapter)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
                    if self.on_finished is not None:
                        self.on_finished(len(outputs), len(prompts))
        return [outputs[str(number)] for number in range(len(prompts))]

    def _room(self, request: SampleRequest) -> int:
        """Response tokens that fit behind the prompt."""
        room = self._longest - len(request.prompt.token_ids)
        if room < 1:
            raise UsageError(
                f"prompt {request.prompt.prompt_id} has {len(request.prompt.token_ids)} tokens, which leaves no room "
                f"for a response in {self._longest}; shorten it or raise --vllm.max_model_len"
            )
        return room

    def _same_distribution(self, sampling: SamplingSettings) -> None:
        for name in ("temperature", "top_p", "top_k"):
            if getattr(sampling, name) != getattr(self._sampling, name):
                raise UsageError(
                    f"this engine was started for {name} {getattr(self._sampling, name)} and cannot sample with "
                    f"{getattr(sampling, name)}: its replay and its recorded settings would not match; start another"
                )

    def _require_room_to_score(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            if sequence.num_tokens > self._longest:
                raise UsageError(
                    f"{sequence.id} has {sequence.num_tokens} tokens, and the engine can score {self._longest}; "
                    f"raise --vllm.max_model_len to {sequence.num_tokens + 1}"
                )

    def _scores_of_outputs(self, sequences: Sequence[TokenSequence], outputs: list[Any]) -> list[ScoredSequence]:
        scores = [replayed_scores(sequence, output) for sequence, output in zip(sequences, outputs, strict=True)]
        self._warn_of_missing_log_probs(scores)
        return scores

    def _warn_of_missing_log_probs(self, sequences: list[ScoredSequence]) -> None:
        if missing := num_missing(sequences):
            logger.warning(
                "vLLM delivered no log-prob for %d of %d tokens",
                missing,
                sum(len(scores.logprobs) for scores in sequences),
            )


class _Prompt(NamedTuple):
    """Ids that vLLM is given, and the images whose placeholders are among them."""

    token_ids: list[int]
    images: PromptImages | None = None


def _whole_sequence(sequence: TokenSequence) -> _Prompt:
    return _Prompt([*sequence.prompt_token_ids, *sequence.token_ids], sequence.images)
