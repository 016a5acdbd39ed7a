import re
import sys
from pathlib import Path

import numpy as np
import pytest

from pit_deploy.runtimes import huge_pages
from pit_deploy.runtimes.huge_pages import HUGE_PAGE, join_pages


def huge_bytes(array: np.ndarray) -> int:
    """Bytes in huge pages of the region that holds `array`, from the kernel's own account."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= array.ctypes.data < int(match[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no region holds the array")


def anonymous(pages: int) -> np.ndarray:
    """Memory that no allocator has asked huge pages for."""
    import mmap

    return np.frombuffer(mmap.mmap(-1, pages * HUGE_PAGE, flags=mmap.MAP_PRIVATE), np.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and MADV_COLLAPSE are Linux's")
def test_pages_in_use_are_joined_and_keep_their_contents() -> None:
    array = anonymous(8)
    array[:] = np.arange(len(array)) % 251
    before = huge_bytes(array)
    if not join_pages():
        pytest.skip("this kernel has no MADV_COLLAPSE, or no memory in one piece")
    assert huge_bytes(array) >= max(before, 4 * HUGE_PAGE)
    assert (array == np.arange(len(array)) % 251).all()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and MADV_COLLAPSE are Linux's")
def test_memory_that_is_hardly_used_is_left_alone() -> None:
    array = anonymous(8)
    array[:: HUGE_PAGE // 4] = 1  # four pages of each 512
    before = huge_bytes(array)
    join_pages()
    assert huge_bytes(array) == before


def test_a_system_without_the_call_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda _: object())
    assert join_pages() == 0
