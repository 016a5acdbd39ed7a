"""For all tests: one thread. Tiny models gain nothing from two, and lose much where the other core is busy."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
