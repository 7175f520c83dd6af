"""What was there to measure, and what was not usable."""

from mismatch_probe.notation import ABSENT, write_count
from mismatch_probe.records.summary import Counts, Summary
from mismatch_probe.report.names import pair_label
from mismatch_probe.report.view import Section, Table

_LABELS = {
    "num_sequences": "responses measured",
    "num_prompts": "prompts they answer",
    "num_tokens": "tokens measured",
    "missing_mu": "log-probs missing under mu",
    "missing_pi": "log-probs missing under pi",
    "nonfinite_mu": "log-probs not finite under mu",
    "nonfinite_pi": "log-probs not finite under pi",
    "positive_mu": "log-probs above 0 under mu",
    "positive_pi": "log-probs above 0 under pi",
    "void_checks": "responses with void prefill or reference log-probs",
    "mismatched_ids": "responses with other token ids",
    "truncated_responses": "responses cut at the length limit",
    "left_out_tokens": "tokens of the log left out for lack of a log-prob",
    "left_out_surprisal": "share of the surprisal that they have",
    "partial_responses": "responses measured in part, in no number of whole responses",
}


def counts(summary: Summary) -> Section:
    rows = [
        [
            _LABELS.get(name, name.replace("_", " ")),
            *(_written(name, getattr(pair.counts, name)) for pair in summary.pairs),
        ]
        for name in Counts.model_fields
    ]
    columns = ["", *map(pair_label, summary.pairs)]
    return Section(
        "counts",
        "What was measured, what was not",
        "Missing and non-finite values are counted and named; they are never averaged, dropped in silence or set "
        "to zero.",
        [Table("Data of each pair", columns, rows, stacked=True)],
    )


def _written(name: str, number: float | None) -> str:
    if name == "left_out_surprisal" and number is not None:
        return f"{100 * number:.3g} %"
    return ABSENT if number is None else write_count(int(number))
