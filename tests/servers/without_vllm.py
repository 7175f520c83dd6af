"""`python -m mismatch_probe WORDS`, where neither it nor what it forks its jobs from finds a package named vllm."""

import importlib.machinery as machinery
import sys
from typing import Any

from mismatch_probe.__main__ import main


def hide_vllm() -> None:
    find_spec: Any = machinery.PathFinder.find_spec

    def find_others(cls: type, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] == "vllm" else find_spec(name, path, target)

    machinery.PathFinder.find_spec = classmethod(find_others)  # type: ignore[assignment]


if __name__ == "__main__":
    assert "vllm" not in sys.modules, "what the training path imports has imported it"
    hide_vllm()
    main()
