"""The number of arenas as glibc itself reports it."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from pit_deploy.memory import one_arena

if sys.argv[1] == "one":
    assert one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
meet = threading.Barrier(4)

def allocate():
    meet.wait()
    for _ in range(1000):
        libc.malloc(5000)
    meet.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
assert libc.malloc_info(0, file) == 0
libc.fclose(file)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_threads_share_one_arena(tmp_path):
    arenas = {}
    for how in ("one", "several"):
        report = tmp_path / how
        subprocess.run([sys.executable, "-c", PROGRAM, how, str(report)], check=True, timeout=60)
        arenas[how] = report.read_text().count("<heap nr=")
    assert arenas["one"] == 1 < arenas["several"]
