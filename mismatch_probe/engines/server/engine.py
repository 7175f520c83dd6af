"""A server as an engine: it samples, scores by prefill, and reports its settings."""

import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.engines.base import Engine, EngineStart, HeldWeight
from mismatch_probe.engines.server.answers import Candidates, Question, ServerAnswer, StandingQuestion
from mismatch_probe.engines.server.arguments import ServerArguments
from mismatch_probe.engines.server.asking import ServerFindings, effective_settings, find_out, made_up_prompt
from mismatch_probe.engines.server.client import KEEP_THEM, SEND_THEM, Client, contact
from mismatch_probe.engines.server.connection import Connection, HttpRequest, Unserved
from mismatch_probe.engines.server.transfer import WeightTransfer, ask_once
from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.provenance.checkpoint import has_tokenizer, read_config, vocab_size
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence

if TYPE_CHECKING:
    import torch


_PATH: Final = "/metrics"
_STARTED: Final = re.compile(r"^process_start_time_seconds ([0-9.e+]+)$", re.MULTILINE)
"""When the process that answers was started, as Prometheus's client for Python says it."""
_TIMES: Final = 16
_MOST_BYTES: Final = 2**24


def count_processes(connection: Connection) -> int | None:
    """How many were met in a few requests at once, over as many connections as are allowed; None where none says so."""
    requests = [HttpRequest(_PATH, is_text=True, most_bytes=_MOST_BYTES)] * _TIMES

    def start_of(number: int, text: str) -> str | None:
        match = _STARTED.search(text)
        return None if match is None else match[1]

    try:
        times = connection.ask_all(requests, start_of)
    except (Unserved, UsageError, EngineError):
        return None
    return len({*times} - {None}) or None


def sampled_scores(sequence_id: str, answer: ServerAnswer) -> ScoredSequence:
    """Of the tokens that were sampled; id -1 where no most likely token was named."""
    top1 = [_most_likely(candidates) for candidates in answer.candidates]
    top1 += [-1] * (len(answer.token_ids) - len(top1))
    return ScoredSequence(sequence_id, answer.logprobs, np.asarray(top1, dtype=np.int32))


def prefill_scores(where: str, sequence: TokenSequence, answer: ServerAnswer) -> ScoredSequence:
    """Of a response's tokens, from the log-probs of a prompt that holds them; NaN where one is missing.

    Raises:
        EngineError: there are none, of another number of tokens, or of other tokens.
    """
    candidates = answer.prompt_candidates
    if candidates is None or len(candidates) != sequence.num_tokens:
        count = "none" if candidates is None else str(len(candidates))
        raise EngineError(
            f"the server at {where} gave {count} of {sequence.num_tokens} prompt log-probs for {sequence.id}; leave "
            "prefill out"
        )
    of_response = candidates[len(sequence.prompt_token_ids) :]
    pairs = list(zip(sequence.token_ids, of_response, strict=True))
    absent_ids = [token_id for token_id, entry in pairs if entry and token_id not in entry]
    if absent_ids:
        raise EngineError(
            f"the server at {where} gave prompt log-probs of other tokens than {sequence.id} has: not of "
            f"{absent_ids[0]}"
        )
    logprobs = [entry[token_id] if entry else np.nan for token_id, entry in pairs]
    top1 = [_most_likely(entry or {}) for entry in of_response]
    return ScoredSequence(sequence.id, np.asarray(logprobs, dtype=np.float32), np.asarray(top1, dtype=np.int32))


def _most_likely(candidates: Candidates) -> int:
    finite = {token_id: value for token_id, value in candidates.items() if not np.isnan(value)}
    return max(finite, key=lambda token_id: finite[token_id]) if finite else -1


logger = logging.getLogger(__name__)


def start_asking(how: EngineStart) -> "ServerEngine":
    """A server that serves `how.checkpoint` (a folder) in `how.dtype`, as the user says; errors as of
    `EngineProvider.start`. Of `how` the seed, the number of sequences and the products do not reach a server.
    """
    checkpoint, engine, sampling = how.checkpoint, how.engine, how.sampling
    arguments = ServerArguments(**engine.args)
    vocabulary = vocab_size(read_config(Path(checkpoint)))
    if vocabulary is None:
        raise UsageError(f"the configuration of {checkpoint} has no vocab_size, and a server is held to it; add it")
    if engine.prefill and arguments.transfer is None:
        _require_short(how.max_model_len - 1, arguments.longest_prefill)
    connection = Connection(arguments)
    try:
        server = contact(connection, arguments)
        longest = min(how.max_model_len, server.max_model_len or how.max_model_len) - 1
        client = Client(connection, server, vocabulary, longest, KEEP_THEM if arguments.transfer is None else SEND_THEM)
        transfer = None
        if arguments.transfer is not None:  # first of all: a request ends a server in the middle of an update
            transfer = WeightTransfer(connection, arguments.transfer, arguments.timeout_seconds)
        prompt = made_up_prompt(vocabulary, longest)
        findings = ask_once(lambda: find_out(client, sampling, prompt, vocabulary, count_processes(connection)))
        if transfer is not None:
            _require_sampled_log_probs(findings, sampling, connection.url)
        standing = StandingQuestion(client.ask, client.url, client.weights.advice, prompt, findings.own_noise)
    except BaseException:
        connection.close()
        raise
    says = None if transfer is None else transfer.says_what_is_held
    settings = effective_settings(
        how.dtype, engine, sampling, server, findings, standing.answer, says_what_it_holds=says
    )
    texts = TokenTexts(_tokenizer(Path(checkpoint), trust_remote_code=how.trust_remote_code))
    return ServerEngine(client, standing, engine, sampling, settings, vocabulary, texts, transfer)


class ServerEngine(Engine):
    """A server that answered as one should, and goes on doing so: each batch ends with the standing question."""

    def __init__(
        self,
        client: Client,
        standing: StandingQuestion,
        engine: EngineSettings,
        sampling: SamplingSettings,
        settings: dict[str, Any],
        vocabulary: int,
        texts: TokenTexts,
        transfer: WeightTransfer | None = None,
    ) -> None:
        self._client = client
        self._standing = standing
        self._engine = engine
        self._sampling = sampling
        self._settings = settings
        self._vocabulary = vocabulary
        self._texts = texts
        self._transfer = transfer

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        for name in ("temperature", "top_p", "top_k"):
            if getattr(sampling, name) != getattr(self._sampling, name):
                raise UsageError(f"this server was asked about sampling with another {name}; start another")
        questions = [self._question(request, sampling) for request in requests]
        answers = self._client.ask_all(questions, [request.id for request in requests], self.on_finished)
        self._standing.check()
        if self._transfer is not None:
            self._client.weights.require_version(self._transfer.version())
        responses = [self._sampled_sequence(request, answer) for request, answer in zip(requests, answers, strict=True)]
        self._warn_of_missing_scores([response.scores for response in responses])
        return responses

    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        """One sequence after the other: a server sets no memory aside for prompt log-probs."""
        if not self._engine.prefill:
            raise UsageError("prompt log-probs can end a server, so they are asked for with prefill=true alone")
        return ask_once(lambda: self._scores_of_server(sequences))

    @property
    def vocab_size(self) -> int:
        return self._vocabulary

    def distributions(self, contexts: Sequence[Sequence[int]]) -> FloatArray:
        raise EngineError("a server is not asked for whole distributions: each would be a megabyte of text")

    def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        if self._transfer is None:
            raise EngineError("the weights of a server are left as they are, where no transfer=gloo or nccl is given")
        version = self._transfer.send(weights)
        self._client.weights.set_version(version)
        self._standing.renew()
        self._settings |= {"weight_version": version, "weights_are_labelled": True}

    @property
    def scores_given_tokens(self) -> bool:
        return self._engine.prefill

    def held_weights(self, names: Sequence[str]) -> list[dict[str, HeldWeight]]:
        return [] if self._transfer is None else self._transfer.held_weights(names)

    def require_same_policy(self, record: Mapping[str, Any]) -> None:
        self._client.weights.require(record.get("weight_version"))
        self._standing.require(record.get("standing_answer", self._standing.answer))

    def effective_settings(self) -> dict[str, Any]:
        return dict(self._settings)

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
        self._client.close()

    def _scores_of_server(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        longest = ServerArguments(**self._engine.args).longest_prefill
        scores = []
        for number, sequence in enumerate(sequences):
            scores.append(self._score_sequence(sequence, longest))
            if self.on_finished is not None:
                self.on_finished(number + 1, len(sequences))
        self._standing.check()
        return scores

    def _question(self, request: SampleRequest, sampling: SamplingSettings) -> Question:
        room = self._client.longest - len(request.prompt.token_ids)
        if room < 1:
            raise UsageError(
                f"{request.prompt.label} has {len(request.prompt.token_ids)} tokens, which leaves no room for a "
                f"response in the {self._client.longest} that the server at {self._client.url} holds; shorten it"
            )
        return Question(
            list(request.prompt.token_ids),
            min(sampling.max_new_tokens, room),
            request.seed,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.ignore_eos,
            cache_salt=None if self._engine.prefix_caching else secrets.token_hex(16),
        )

    def _sampled_sequence(self, request: SampleRequest, answer: ServerAnswer) -> SampledSequence:
        return SampledSequence(
            sequence=TokenSequence(request.id, list(request.prompt.token_ids), answer.token_ids),
            scores=sampled_scores(request.id, answer),
            finish_reason=answer.finish_reason,
            token_texts=self._texts(answer.token_ids),
        )

    def _score_sequence(self, sequence: TokenSequence, longest: int) -> ScoredSequence:
        _require_short(sequence.num_tokens, longest)
        ids = [*sequence.prompt_token_ids, *sequence.token_ids]
        [answer] = self._client.ask_all([Question(ids, 1, seed=0, ignore_eos=True, prefill=True)], [sequence.id])
        return prefill_scores(self._client.url, sequence, answer)

    def _warn_of_missing_scores(self, sequences: list[ScoredSequence]) -> None:
        num_missing = sum(int(np.isnan(scores.logprobs).sum()) for scores in sequences)
        if num_missing:
            total = sum(len(scores.logprobs) for scores in sequences)
            logger.warning("the server gave no log-prob for %d of %d tokens", num_missing, total)


def _require_sampled_log_probs(findings: ServerFindings, sampling: SamplingSettings, where: str) -> None:
    """
    Raises:
        UsageError: its log-probs are not of the distribution that it samples from, which training would learn from.
    """
    if findings.log_probs == "before temperature" and sampling.temperature != 1:
        raise UsageError(
            f"the server at {where} gives log-probs of before temperature, and --temperature is "
            f"{sampling.temperature}: they are not of what is sampled from; start it with --logprobs-mode "
            "processed_logprobs, or train at temperature 1"
        )


def _require_short(num_tokens: int, longest: int) -> None:
    """
    Raises:
        UsageError: a sequence is too long to be scored by a server's prefill.
    """
    if num_tokens > longest:
        raise UsageError(
            f"prefill=true would ask for the prompt log-probs of {num_tokens} tokens at once, and the limit is "
            f"{longest}: they need memory that a server does not set aside; lower --max-new-tokens, or give "
            f"longest_prefill={num_tokens} if the server has it"
        )


def _tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """None where the checkpoint has none."""
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
