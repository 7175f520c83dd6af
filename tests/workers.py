"""Which tests stay together on one pytest worker."""

from typing import Final

from xdist.scheduler import LoadFileScheduling

SHARING: Final = {
    "a real server": ("tests/servers/",),
    "vLLM in this process": (
        "tests/engines/",
        "tests/headroom/test_before_training.py",
        "tests/localize/test_inside_vllm.py",
        "tests/tasks/test_demo_checkpoint.py",
        "tests/train/test_training_faults.py",
    ),
}
"""Files that share what takes long to start or to import; a file of any other folder stays together alone."""


class TogetherScheduling(LoadFileScheduling):
    """As `--dist loadfile`, and some files like one."""

    def _split_scope(self, nodeid: str) -> str:
        shared = (what for what, paths in SHARING.items() if nodeid.startswith(paths))
        return next(shared, str(super()._split_scope(nodeid)))
