"""vLLM's log set up once for every engine of a process and of its forks."""

from importlib import import_module


def configure_logging() -> None:
    """Do what vLLM does at the start of an engine, which does it again where its variables say otherwise then.

    Python's `dictConfig` looks for every logger at every other, a quarter of a second of processor time. Versions that
    set the log up as they are imported stay as they are.
    """
    try:
        config = import_module("vllm.config.logging").LoggingConfig()
        import_module("vllm.logger").configure_logging_if_needed(config)
    except (ModuleNotFoundError, AttributeError):
        return
