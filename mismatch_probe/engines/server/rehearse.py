"""Whether a server is there, found out before anything is loaded."""

from mismatch_probe.config.model import EngineSettings
from mismatch_probe.engines.server.arguments import ServerArguments
from mismatch_probe.engines.server.client import contact
from mismatch_probe.engines.server.connection import Connection


def reach(engine: EngineSettings) -> int | None:
    """The longest sequence that the server holds, in tokens; None where it does not say.

    Raises:
        UsageError: what answers is no server that can be asked, wants a key, or serves another model.
        EngineError: nothing answers.
    """
    arguments = ServerArguments(**engine.args)
    with Connection(arguments) as connection:
        return contact(connection, arguments, tries=2).max_model_len
