import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from inspect import getsource
from pathlib import Path

import pytest
import torch

from mismatch_probe.host import join_thread, no_collections, release_freed_memory

pytestmark = pytest.mark.slow

BLOCK = 64 * 2**10
ROOT = Path(__file__).parents[1]
PAGES_OF_A_TENSOR = 8 * 2**20 // os.sysconf("SC_PAGE_SIZE")
ON_LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what is resident")

FAULTS = """
import resource
from mismatch_probe.host import prepare_process
{prepare}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(8 * 2**20)
before = faults()
for _ in range(20):
    bytearray(8 * 2**20)
print(faults() - before)
"""


def message_of(script: str, **environment: str) -> str:
    """Of a process whose environment has none of what `prepare` looks at but what is given."""
    set_here = ("OMP_", "GOMP_", "MALLOC_", "ONEDNN_", "LRU_")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(set_here)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=bare | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


@ON_LINUX
def test_memory_freed_between_living_blocks_goes_back() -> None:
    blocks = [bytearray(BLOCK) for _ in range(4000)]
    kept = blocks[::2]
    del blocks
    held = resident_bytes()
    release_freed_memory()
    assert held - resident_bytes() > 0.8 * len(kept) * BLOCK


@ON_LINUX
def test_the_next_tensor_takes_the_memory_of_the_last_one() -> None:
    assert int(message_of(FAULTS.format(prepare="prepare_process()"))) < PAGES_OF_A_TENSOR
    assert int(message_of(FAULTS.format(prepare=""), MALLOC_MMAP_THRESHOLD_="131072")) > 10 * PAGES_OF_A_TENSOR


@ON_LINUX
def test_an_allocator_that_the_user_has_set_up_is_left_alone() -> None:
    faults = message_of(FAULTS.format(prepare="prepare_process()"), MALLOC_MMAP_THRESHOLD_="131072")
    assert int(faults) > 10 * PAGES_OF_A_TENSOR


def test_waiting_threads_sleep_soon_unless_the_user_says_how_they_wait() -> None:
    script = (
        "import os; from mismatch_probe.host import prepare_process; prepare_process(); "
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    assert int(message_of(script)) < 100_000
    assert message_of(script, OMP_WAIT_POLICY="active") == "None"
    assert message_of(script, GOMP_SPINCOUNT="7") == "7"


SHAPES = f"""
from pathlib import Path
from mismatch_probe.host import prepare_process
{{prepare}}
import torch
{getsource(resident_bytes)}
torch.set_num_threads(1)
weight = torch.randn(256, 64)
def multiply(sizes):
    for rows in sizes:
        torch.ops.mkldnn._linear_pointwise(torch.randn(rows, 64), weight, None, "none", [], "")
    return resident_bytes()
few = multiply(range(100, 200))
print(multiply(range(200, 500)) - few)
"""


@ON_LINUX
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
def test_products_of_ever_new_shapes_leave_nothing_behind() -> None:
    kept, piled_up = (int(message_of(SHAPES.format(prepare=call))) for call in ("prepare_process()", ""))
    assert piled_up > 4 * max(kept, 2**20)


@pytest.fixture
def late_thread() -> Iterator[threading.Thread]:
    """A thread that the C library ends for 0.3 s after Python has joined it: the destructor of its value sleeps."""
    libc = ctypes.CDLL(None)
    key = ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0
    yield threading.Thread(target=libc.pthread_setspecific, args=(key, ctypes.c_void_p(300_000)))
    libc.pthread_key_delete(key)


def is_listed(thread: threading.Thread) -> bool:
    return Path(f"/proc/self/task/{thread.native_id}").exists()


@ON_LINUX
def test_a_joined_thread_is_gone_from_the_system_where_join_alone_returns_before(late_thread: threading.Thread) -> None:
    late_thread.start()
    late_thread.join()
    assert is_listed(late_thread)
    join_thread(late_thread)
    assert not is_listed(late_thread)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_nothing_is_collected_inside_the_block_and_the_collector_is_as_before_it(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        with suppress(ValueError), no_collections():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()
