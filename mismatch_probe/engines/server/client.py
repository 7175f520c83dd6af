"""Questions to a server in its own protocol, and answers that are what was asked for."""

from collections.abc import Callable, Sequence
from typing import Any

from mismatch_probe.closing import Closing
from mismatch_probe.engines.server.answers import Answer, NoAnswer, Question, most_bytes
from mismatch_probe.engines.server.checks import KEEP_THEM, SameWeights, check_answer
from mismatch_probe.engines.server.connection import Connection, Request, Unserved
from mismatch_probe.engines.server.contact import Contact
from mismatch_probe.errors import EngineError


class Client(Closing):
    """Raises, of every question: EngineError where the server fails, or its answer is none to the question."""

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

    def ask(self, question: Question) -> Answer:
        [answer] = self.ask_all([question])
        return answer

    def ask_for_several(self, questions: Sequence[Question]) -> list[Answer]:
        """As many responses to each as its `count` says, in order."""
        return [answer for answers in self._ask(questions, None, None) for answer in answers]

    def ask_all(
        self,
        questions: Sequence[Question],
        labels: Sequence[str] | None = None,
        on_finished: Callable[[int, int], None] | None = None,
    ) -> list[Answer]:
        """One response to each, in order; labels: what the questions are called in a sentence."""
        return [answers[0] for answers in self._ask(questions, labels, on_finished)]

    def _ask(
        self,
        questions: Sequence[Question],
        labels: Sequence[str] | None,
        on_finished: Callable[[int, int], None] | None,
    ) -> list[list[Answer]]:
        protocol = self._contact.protocol

        def read(number: int, content: Any) -> list[Answer]:
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
            Request(protocol.path, protocol.body(question, self._contact.model), most_bytes=most_bytes(question))
            for question in questions
        ]
        try:
            return self._connection.ask_all(requests, read, on_finished)
        except Unserved as error:
            raise EngineError(f"the server at {self.url} no longer serves {self._contact.model}: {error}") from error
