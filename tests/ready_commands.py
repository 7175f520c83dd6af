"""Imported once by a process that commands are forked from: what each would import and make anew, but for training."""

import pyarrow as pa

import mismatch_probe.cli.commands
import mismatch_probe.cli.gate_answers
import mismatch_probe.compare.run
import mismatch_probe.difference.runs
import mismatch_probe.report.answers.diff
import mismatch_probe.report.answers.evaluate
import mismatch_probe.report.training.page
from mismatch_probe.report.rendering import PlotlyJs, _environment, scripts

pa.array([])  # which imports pandas
scripts(PlotlyJs.EMBED, draws=True)
for template in _environment().list_templates(extensions=["j2"]):
    _environment().get_template(template)
mismatch_probe.cli.commands._command()
