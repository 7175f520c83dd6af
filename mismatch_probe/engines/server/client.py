"""Who answers at an address, questions to it, and the checks that make its answer a measurement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mismatch_probe.engines.server.answers import (
    NoAnswer,
    Question,
    ServerAnswer,
    ServerFacts,
    ServerProtocol,
    member,
    most_bytes,
)
from mismatch_probe.engines.server.arguments import ServerArguments
from mismatch_probe.engines.server.connection import Connection, HttpRequest, Refused, Unserved, WantsKey
from mismatch_probe.engines.server.protocols import PROTOCOLS
from mismatch_probe.errors import EngineError, UsageError
from mismatch_probe.host import Closing
from mismatch_probe.inert import plain


@dataclass(frozen=True)
class Contact:
    """What is known of a server; None for what it does not report."""

    model: str
    """The name that it is asked by."""
    root: str | None
    """The path or hub id of that model."""
    max_model_len: int | None
    """Tokens."""
    software: str | None
    """Its software and version, as it calls itself."""
    dtype: str | None
    """What it computes in."""
    protocol: ServerProtocol


def contact(
    connection: Connection,
    arguments: ServerArguments,
    *,
    tries: int | None = None,
    protocol: ServerProtocol | None = None,
) -> Contact:
    """protocol: how it is asked; unset, as its side says, or in the first protocol that it serves.

    Raises:
        UsageError: what answers is no server that can be asked, wants a key, or serves another model.
        EngineError: nothing answers.
    """
    try:
        listing = connection.ask(HttpRequest("/v1/models"), tries=tries)
        models: list[Any] = member(listing, "data", list)
        names = [str(member(model, "id", str)) for model in models]
    except Unserved as error:
        raise UsageError(f"{_no_server(connection)}: it has no /v1/models ({error})") from error
    except NoAnswer as error:
        raise UsageError(f"{_no_server(connection)}: what it gives for /v1/models is no list of models") from error
    served_model = models[names.index(_model(connection, arguments, names, models))]
    longest, root = served_model.get("max_model_len"), served_model.get("root")
    version = _report_of(connection, "/version").get("version")
    facts = ServerFacts(
        model=served_model,
        model_info=_report_of(connection, "/model_info") or _report_of(connection, "/get_model_info"),
        server_info=_report_of(connection, "/server_info"),
        version=version if isinstance(version, str) else None,
    )
    software = next(filter(None, (protocol.software(facts) for protocol in PROTOCOLS.usable().values())), None)
    return Contact(
        model=served_model["id"],
        root=facts.model_info.get("model_path") or (root if isinstance(root, str) else None),
        max_model_len=longest if type(longest) is int and longest > 0 else None,
        software=None if software is None else plain(software),
        dtype=next(filter(None, (protocol.dtype(facts) for protocol in PROTOCOLS.usable().values())), None),
        protocol=_protocol(connection, arguments, facts) if protocol is None else protocol,
    )


def _no_server(connection: Connection) -> str:
    kinds = [f"{protocol.server or name}'s" for name, protocol in PROTOCOLS.usable().items()]
    return f"what answers at {connection.url} is no server of {', '.join(kinds[:-1])} or {kinds[-1]} kind"


def _model(connection: Connection, arguments: ServerArguments, names: list[str], models: list[Any]) -> str:
    served_names = ", ".join(map(plain, names)) or "nothing"
    if arguments.model is not None:
        if arguments.model not in names:
            raise UsageError(
                f"the server at {connection.url} serves {served_names}, and not {arguments.model}; give one of these"
            )
        return arguments.model
    own = [name for name, model in zip(names, models, strict=True) if model.get("parent") is None]
    if len(own) != 1:
        raise UsageError(f"the server at {connection.url} serves {served_names}; say which with model=NAME")
    return own[0]


def _report_of(connection: Connection, path: str) -> dict[str, Any]:
    """What a server reports of itself at a path that not all have; nothing where it has none."""
    try:
        content = connection.ask(HttpRequest(path), tries=1)
    except (Unserved, EngineError, UsageError):
        return {}
    return content if isinstance(content, dict) else {}


def _protocol(connection: Connection, arguments: ServerArguments, facts: ServerFacts) -> ServerProtocol:
    """The one that the side names, or the first that is served; an empty request shows that without any work."""
    if arguments.protocol is None:
        candidates = [protocol for protocol in PROTOCOLS.usable().values() if protocol.recognises(facts)]
    else:
        candidates = [PROTOCOLS.require(arguments.protocol, f"protocol = {arguments.protocol!r}")]
    for protocol in candidates:
        try:
            connection.ask(HttpRequest(protocol.path, {"model": facts.model["id"]}))
        except (Unserved, WantsKey):  # with a key, vLLM forbids what it does not serve
            continue
        except Refused:
            pass
        return protocol
    ability = "takes token ids" if arguments.protocol is None else f"is asked as {arguments.protocol}"
    raise UsageError(
        f"the server at {connection.url} has no endpoint that {ability}; start vLLM with --enable-scale-out, or see "
        "docs/servers.md"
    )


_FINISHED = ("stop", "length")


def check_answer(where: str, label: str, question: Question, answer: ServerAnswer, vocabulary: int | None) -> None:
    """where: the server; label: what was asked for, for a sentence.

    Raises:
        EngineError: the answer is not one to this question.
    """
    who = f"the server at {where}"
    num_tokens = len(answer.token_ids)
    if answer.prompt_ids is not None and not question.messages and answer.prompt_ids != question.prompt_ids:
        raise EngineError(
            f"{who} ran {label} on other token ids than those given ({_first_difference(question, answer)}): what is "
            "in front of it changes prompts, so that nothing it says belongs to what was asked; ask the server itself"
        )
    if answer.finish_reason not in _FINISHED:
        raise EngineError(f"{who} ended {label} with {answer.finish_reason!r} instead of finishing it")
    if answer.text is not None:
        return
    if num_tokens > question.max_tokens:
        raise EngineError(
            f"{who} gave {label} {num_tokens} tokens where at most {question.max_tokens} were asked for: it does not "
            "take max_tokens"
        )
    if answer.finish_reason == "length" and num_tokens < question.max_tokens:
        raise EngineError(
            f"{who} cut {label} off after {num_tokens} tokens where {question.max_tokens} were asked for: a limit of "
            f"its own is lower; give --max-new-tokens {max(num_tokens, 1)}, or raise the server's"
        )
    if question.ignore_eos and answer.finish_reason == "stop":
        raise EngineError(
            f"{who} ended {label} after {num_tokens} tokens although it was to ignore the end of sequence"
        )
    unknown_ids = [] if vocabulary is None else [token_id for token_id in answer.token_ids if token_id >= vocabulary]
    if unknown_ids:
        raise EngineError(
            f"{who} gave {label} the token id {unknown_ids[0]}, and the checkpoint knows {vocabulary}: it serves "
            "another model; give --model its checkpoint"
        )
    if len(set(answer.versions)) > 1:
        raise EngineError(
            f"{who} changed its weights within {label}, from {answer.versions[0]} to {answer.versions[-1]}: "
            "its response is of two policies; keep the weights while it is measured, then continue with --resume"
        )


def _first_difference(question: Question, answer: ServerAnswer) -> str:
    expected_ids, answer_ids = question.prompt_ids, answer.prompt_ids or []
    if len(expected_ids) != len(answer_ids):
        return f"{len(answer_ids)} of them instead of {len(expected_ids)}"
    place = next(place for place, (mine, its) in enumerate(zip(expected_ids, answer_ids, strict=True)) if mine != its)
    return f"{answer_ids[place]} instead of {expected_ids[place]} at position {place}"


KEEP_THEM: Final = "bring it back to the first weights and continue with --resume, or give another --out"
"""What to do with a server whose weights are not ours, and were to stay."""
SEND_THEM: Final = (
    "it was started again, or is sent weights by someone else: see to it, and continue with --resume, which sends them "
    "again"
)
"""What to do with one that was sent ours."""


class SameWeights:
    """Holds a server to the weights that it began with, or was sent, as far as it labels them."""

    def __init__(self, where: str, advice: str) -> None:
        self._where = where
        self.advice = advice
        self.version: str | None = None

    def set_version(self, version: str) -> None:
        """It was sent weights with this label."""
        self.version = version

    def check(self, answer: ServerAnswer) -> None:
        """Require the weights of the answers old it."""
        for version in answer.versions:
            self.require_version(version)

    def require_version(self, version: str) -> None:
        """
        Raises:
            EngineError: it is another label than before.
        """
        if self.version is not None and version != self.version:
            raise self._change_error(self.version, version)
        self.version = version

    def require(self, version: str | None) -> None:
        """
        Raises:
            EngineError: an earlier process recorded another label.
        """
        if None not in (version, self.version) and version != self.version:
            raise self._change_error(version, self.version)

    def _change_error(self, old: str | None, new: str | None) -> EngineError:
        return EngineError(
            f"the server at {self._where} changed its weights from {old} to {new} while it was measured: its "
            f"responses would be of two policies; {self.advice}"
        )


class Client(Closing):
    """Asks questions. Each raises EngineError where the server fails, or its answer is not one to the question."""

    def __init__(
        self, connection: Connection, contact: Contact, vocabulary: int | None, longest: int, advice: str = KEEP_THEM
    ) -> None:
        """longest: sequence, in tokens, prompt and response. advice: what to do where its weights change."""
        self._connection = connection
        self._contact = contact
        self._vocabulary = vocabulary
        self.longest = longest
        self.url = connection.url
        self.concurrency = connection.concurrency
        self.weights = SameWeights(connection.url, advice)

    def close(self) -> None:
        self._connection.close()

    def ask(self, question: Question) -> ServerAnswer:
        [answer] = self.ask_all([question])
        return answer

    def ask_for_several(self, questions: Sequence[Question]) -> list[ServerAnswer]:
        """As many responses to each as its `count` says, in order."""
        return [answer for answers in self._ask_server(questions, None, None) for answer in answers]

    def ask_all(
        self,
        questions: Sequence[Question],
        labels: Sequence[str] | None = None,
        on_finished: Callable[[int, int], None] | None = None,
    ) -> list[ServerAnswer]:
        """One response to each, in order; labels: what the questions are called in a sentence."""
        return [answers[0] for answers in self._ask_server(questions, labels, on_finished)]

    def _ask_server(
        self,
        questions: Sequence[Question],
        labels: Sequence[str] | None,
        on_finished: Callable[[int, int], None] | None,
    ) -> list[list[ServerAnswer]]:
        protocol = self._contact.protocol

        def read(number: int, content: Any) -> list[ServerAnswer]:
            label = "a first request" if labels is None else labels[number]
            try:
                answers = protocol.answers(content)
            except NoAnswer as error:
                raise EngineError(
                    f"what the server at {self.url} answers for {label} is no answer of {protocol.path}: {error}"
                ) from error
            if len(answers) != questions[number].count:
                raise EngineError(
                    f"the server at {self.url} gives {len(answers)} responses for {label} where "
                    f"{questions[number].count} were asked for"
                )
            for answer in answers:
                check_answer(self.url, label, questions[number], answer, self._vocabulary)
                self.weights.check(answer)
            return answers

        requests = [
            HttpRequest(protocol.path, protocol.body(question, self._contact.model), most_bytes=most_bytes(question))
            for question in questions
        ]
        try:
            return self._connection.ask_all(requests, read, on_finished)
        except Unserved as error:
            raise EngineError(f"the server at {self.url} no longer serves {self._contact.model}: {error}") from error
