"""The evaluation on one screen; plain lines where the output is no terminal."""

from rich.console import Console

from mismatch_probe.records.evaluation import Evaluation
from mismatch_probe.report.evaluation.answer import sentence, tables
from mismatch_probe.report.screen import print_fitting, print_line, print_room


def render_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Accuracy of every engine, of every pair under both policies, and a sentence a pair."""
    print_room(console)
    for number, table in enumerate(tables(evaluation)):
        if number:
            print_line(console, "")
        print_fitting(console, table, can_lack=set())
    for pair in evaluation.pairs:
        print_line(console, sentence(pair))
