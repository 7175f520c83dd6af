"""Which tests stay together on one pytest worker."""

from typing import Final

from xdist.scheduler import LoadFileScheduling

SHARING: Final = "tests/servers/"
"""Folders whose files share what takes long to start, here a real server; a file of any other stays together alone."""


class TogetherScheduling(LoadFileScheduling):
    """As `--dist loadfile`, and the files of some folders like one."""

    def _split_scope(self, nodeid: str) -> str:
        return SHARING if nodeid.startswith(SHARING) else str(super()._split_scope(nodeid))
