"""Where the program starts and ends: every failure is one sentence on stderr and a documented exit code."""

import atexit
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import Final

from mismatch_probe.cli.process import (
    as_error,
    end_at_once,
    expect_report,
    heed_interrupts,
    ignore_interrupts,
    interruption_that_came,
    keep_standard_streams,
    was_interrupted,
)
from mismatch_probe.errors import INSTALL_ENGINES, ExitCode, MismatchProbeError
from mismatch_probe.host import renew_thread_pool
from mismatch_probe.inert import cut_text, lines_of_width, plain

_ENGINES: Final = ("torch", "transformers", "vllm")
_MOST_CHARACTERS: Final = 8000
_ENDED_FROM_OUTSIDE: Final = (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.HUNG_UP)


def main() -> None:
    """The process: its streams may go away, Ctrl-C may come again and again. 1 always means that the answer is no."""
    code = ExitCode.INTERRUPTED
    try:
        heed_interrupts()
        keep_standard_streams()
        renew_thread_pool()
        code = run(sys.argv[1:])
        if code == ExitCode.INTERRUPTED:
            end_jobs()
    except KeyboardInterrupt as interrupt:  # it came before it was heeded
        ignore_interrupts()
        code = report_error(as_error(interrupt), debug=False)
    finally:
        ignore_interrupts()
    if code in _ENDED_FROM_OUTSIDE:
        end_at_once(code)  # Python frees what it holds before it ends: seconds of a large process
    sys.exit(code)


def end_jobs() -> None:
    """End what the process started, so that who pressed Ctrl-C finds nothing that still runs."""
    atexit._run_exitfuncs()


def run(words: Sequence[str]) -> ExitCode:
    """One command line, in this process and on its streams as they are."""
    debug = "--debug" in words
    try:
        from mismatch_probe.cli.commands import invoke
        from mismatch_probe.host import prepare_process

        prepare_process()
        return invoke([word for word in words if word != "--debug"])
    except KeyboardInterrupt as interrupt:
        return report_error(as_error(interrupt), debug=debug)
    except Exception as error:  # noqa: BLE001 - the boundary of the program: Python's own exit code is 1
        return report_error(as_error(interruption_that_came()) if was_interrupted() else error, debug=debug)


def report_error(error: Exception, *, debug: bool) -> ExitCode:
    is_expected = isinstance(error, MismatchProbeError)
    expect_report()
    if debug:
        for line in traceback.format_exc().splitlines():
            print(plain(line), file=sys.stderr)
    sentence = plain(cut_text(str(error) if is_expected else _surprise(error), _MOST_CHARACTERS, keep="start"))
    for line in _lines_for_people(f"mismatch-probe: {sentence}"):
        print(line, file=sys.stderr)
    return error.exit_code if isinstance(error, MismatchProbeError) else ExitCode.ENVIRONMENT


def _lines_for_people(sentence: str) -> list[str]:
    """On a terminal broken at blanks; elsewhere one line."""
    if not sys.stderr.isatty():
        return [sentence]
    return lines_of_width(sentence, shutil.get_terminal_size().columns)


def _surprise(error: Exception) -> str:
    """What an error that nobody raised on purpose comes to: a part that is not installed, or a surprise."""
    if isinstance(error, ModuleNotFoundError) and error.name in _ENGINES:
        return f"this command runs real engines, and {error.name} cannot be found here; run {INSTALL_ENGINES}"
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"unexpected {what}; the same command with --debug shows where"


if __name__ == "__main__":
    main()
