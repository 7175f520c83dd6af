from mismatch_probe.api.compare_logprobs import compare_logprobs as compare_logprobs
from mismatch_probe.api.comparison import Comparison as Comparison
from mismatch_probe.api.comparison import open_run as open_run
from mismatch_probe.errors import MismatchProbeError as MismatchProbeError
from mismatch_probe.errors import UsageError as UsageError
from mismatch_probe.guards.answers import Decision as Decision
from mismatch_probe.guards.batch import Batch as Batch
from mismatch_probe.guards.guards import Guards as Guards
from mismatch_probe.guards.probe import Probe as Probe
from mismatch_probe.guards.sums import Sums as Sums

__version__: str
