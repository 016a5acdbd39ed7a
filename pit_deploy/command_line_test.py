"""Places for reports: nothing of a bundle and no input is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from pit_deploy.command_line import check_report
from pit_deploy.errors import InputError


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    (folder / "inner").mkdir(parents=True)
    (folder / "manifest.json").write_text('{"format": "pit-deploy bundle", "format_version": 1}')
    return folder


@pytest.mark.parametrize("place", ["manifest.json", "golden.json", "new.html", "inner/r.json"])
def test_nothing_in_a_bundle_is_replaced(bundle: Path, place: str) -> None:
    with pytest.raises(InputError, match="is inside the bundle"):
        check_report(bundle / place)


def test_no_input_is_replaced(tmp_path: Path) -> None:
    given = tmp_path / "bench.json"
    given.write_text("{}")
    with pytest.raises(InputError, match=r"bench.json is an input of this command"):
        check_report(tmp_path / "." / "bench.json", [given])
    assert given.read_text() == "{}"


def test_other_places_are_free(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "an app of the web"}')
    check_report(tmp_path / "report.html", [bundle])
    with pytest.raises(InputError, match="is not a folder"):
        check_report(tmp_path / "none" / "report.html")
