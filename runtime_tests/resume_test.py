"""An export with error feedback goes on where it was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pit_deploy.conversion import convert
from pit_deploy.exporting import export

INT4 = {"weights": "int4", "tables": "int8", "context": 64}


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    room = tmp_path_factory.mktemp("resume")
    convert(checkpoint, room / "pit")
    return room


def interrupted_export(source: Path, out: Path, at: int = 1) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "quantise" and done == at:
            raise Interrupted

    with pytest.raises(Interrupted):
        export(source, out, progress=stop, **INT4)
    assert not out.exists()


def kept(cache: Path) -> list[Path]:
    return sorted(cache.rglob("layer-*.safetensors"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("pit_deploy.exporting.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_goes_on_with_the_same_bytes(made: Path, tmp_path: Path, cache: Path) -> None:
    export(made / "pit", tmp_path / "whole", **INT4)
    assert kept(cache) == []  # nothing is left of an export that is done
    interrupted_export(made / "pit", tmp_path / "out")
    (layer,) = kept(cache)
    written = layer.stat().st_mtime_ns
    seen: list[int] = []

    def watch(stage: str, done: int, total: int) -> None:
        if stage == "quantise" and layer.exists():
            seen.append(layer.stat().st_mtime_ns)

    export(made / "pit", tmp_path / "out", progress=watch, **INT4)
    assert set(seen) == {written}
    assert kept(cache) == []
    for name in ("model.onnx", "model.onnx_data"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_other_exports_leave_kept_layers_alone(made: Path, tmp_path: Path, cache: Path) -> None:
    interrupted_export(made / "pit", tmp_path / "out")
    layers = kept(cache)
    export(made / "pit", tmp_path / "fp32", weights="fp32", context=64)
    export(made / "pit", tmp_path / "int8", context=64)
    export(made / "pit", tmp_path / "feedback", quantizer="feedback", context=64)
    assert kept(cache) == layers != []


def test_a_cache_that_cannot_be_written_only_costs_the_resuming(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("pit_deploy.exporting.cache_folder", lambda: blocked)
    export(made / "pit", tmp_path / "out", **INT4)
    assert (tmp_path / "out" / "model.onnx").is_file()
    assert blocked.read_text() == ""
