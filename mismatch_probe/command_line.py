"""A command of this tool as it can be copied into a shell."""

import shlex


def command_line(*words: object) -> str:
    """`mismatch-probe` and the words, those quoted that a shell would take apart."""
    return words_line("mismatch-probe", *words)


def words_line(*words: object) -> str:
    """The words, those quoted that a shell would take apart."""
    return shlex.join(map(str, words))
