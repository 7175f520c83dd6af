"""The evaluation on one screen; plain lines where the output is no terminal."""

from rich.console import Console

from mismatch_probe.records.evaluation import Evaluation
from mismatch_probe.report.evaluation.answer import advice, capital, headline, sentence, tables
from mismatch_probe.report.screen import print_advice, print_fitting, print_line, print_room


def render_evaluation(evaluation: Evaluation, console: Console) -> None:
    """The answer, accuracy of engines and of pairs under both policies, a sentence a pair, and what to do next."""
    answer = headline(evaluation.pairs)
    print_room(console)
    print_line(console, answer, style="bold")
    for table in tables(evaluation):
        print_line(console, "")
        print_fitting(console, table, can_lack=set())
    told = [said for pair in evaluation.pairs if (said := f"{capital(sentence(pair))}.") != answer]
    if told:
        print_line(console, "")
    for said in told:
        print_line(console, said)
    if todo := advice(evaluation):
        print_line(console, "")
        print_advice(console, todo)
