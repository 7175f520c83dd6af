from pathlib import Path

import pytest

from mismatch_probe.train.memory import release_freed_memory

BLOCK = 64 * 2**10


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what is resident")
def test_memory_freed_between_living_blocks_goes_back() -> None:
    blocks = [bytearray(BLOCK) for _ in range(4000)]
    kept = blocks[::2]
    del blocks
    held = resident_bytes()
    release_freed_memory()
    assert held - resident_bytes() > 0.8 * len(kept) * BLOCK
