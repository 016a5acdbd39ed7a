"""For all tests: one thread. Tiny models gain nothing from two, and lose much where the other core is busy."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def unfinished_exports_stay_in_the_tests_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers kept for a later call go to the user's cache otherwise."""
    folder: Path = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr("pit_deploy.exporting.cache_folder", lambda: folder)
