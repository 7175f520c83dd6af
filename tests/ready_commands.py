"""Imported once by a process that commands are forked from: what each would import and make anew, but for training."""

import pyarrow as pa

import mismatch_probe.cli.commands
import mismatch_probe.cli.compare_command
import mismatch_probe.cli.gate_command
import mismatch_probe.cli.report_command
import mismatch_probe.difference.console
import mismatch_probe.difference.runs
from mismatch_probe.report.rendering import PlotlyJs, _environment, scripts

pa.array([])  # which imports pandas
scripts(PlotlyJs.EMBED, draws=True)
for template in _environment().list_templates(extensions=["j2"]):
    _environment().get_template(template)
mismatch_probe.cli.commands._command()
