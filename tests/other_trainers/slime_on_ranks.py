"""Two ranks of slime, of which the first has a guards file that cannot be read: what each of them ends with.

python -m tests.other_trainers.slime_on_ranks FOLDER
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from mismatch_probe.adapters.slime import GUARDS_FILE, guards
from mismatch_probe.errors import UsageError


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    path = folder / f"guards-{dist.get_rank()}.toml"
    path.write_text("" if dist.get_rank() else "[[guard", encoding="utf-8")
    os.environ[GUARDS_FILE] = str(path)
    try:
        guards()
    except UsageError as error:
        print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
