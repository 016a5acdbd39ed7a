"""The page of several bench reports: what is merged, what is drawn, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pit_deploy.benchmark import report_series as series
from pit_deploy.benchmark.report import BenchReport, read_report
from pit_deploy.benchmark.report_page import write_bench_report
from pit_deploy.errors import InputError


def samples(*values: float) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "median": ordered[len(ordered) // 2],
        "min": ordered[0],
        "max": ordered[-1],
        "samples": list(values),
    }


def run(threads: int, decode: dict[int, tuple[float, ...]], share: float | None) -> dict[str, Any]:
    return {
        "threads": threads,
        "error": None,
        "other_cores": 0.0,
        "load": None,
        "memory": None,
        "prefill": [
            {
                "tokens": 128,
                "tokens_per_second": samples(500.0, 510.0, 490.0),
                "time_to_first_token_seconds": samples(0.25, 0.26, 0.27),
            }
        ],
        "decode": [
            {"depth": depth, "tokens": 8, "tokens_per_second": samples(*speeds), "bandwidth_share": share}
            for depth, speeds in decode.items()
        ],
    }


def subject(name: str, size: int, kl: float | None, *runs: dict[str, Any]) -> dict[str, Any]:
    quality = None if kl is None else {"reference": "b", "positions": 300, "mean_kl": kl, "top1": 0.95}
    return {
        "name": name,
        "kind": "bundle",
        "runtime": "onnxruntime 1.32.0",
        "path": f"/x/{name}",
        "precision": "int8",
        "model_bytes": size,
        "total_bytes": size + 1000,
        "weight_bytes_per_token": size,
        "quality": quality,
        "runs": list(runs),
        "notes": [],
    }


def bench_report(*subjects: dict[str, Any], processor: str = "A chip", ratios: Any = ()) -> BenchReport:
    return read_report(
        {
            "format": "pit-deploy bench",
            "format_version": 1,
            "created_by": {"pit-deploy": "0"},
            "machine": {
                "system": "Linux",
                "architecture": "x86_64",
                "processor": processor,
                "cores": 2,
                "memory_bytes": 10**9,
                "load_average": 0.1,
            },
            "settings": {
                "threads": [1, 2],
                "prompt_tokens": [128],
                "depths": [0, 512],
                "new_tokens": 8,
                "repeats": 3,
                "text": "some",
            },
            "bandwidth": [],
            "subjects": list(subjects),
            "ratios": list(ratios),
            "notes": ["the machine was busy"],
        }
    )


INT8 = subject(
    "int8",
    150_000_000,
    3e-3,
    run(2, {0: (200.0, 210.0, 190.0), 512: (100.0, 90.0, 110.0)}, 0.9),
    run(1, {512: (80.0, 80.0, 80.0), 0: (125.0, 100.0, 130.0)}, 0.5),
)
INT4 = subject("int4", 90_000_000, 0.0, run(1, {0: (150.0, 150.0, 150.0)}, None))


def write(path: Path, report: BenchReport) -> Path:
    path.write_text(json.dumps(report.to_dict()))
    return path


def test_points_are_those_of_the_figures() -> None:
    (group,) = series.merge([("a", bench_report(INT8, INT4))])
    int8, int4 = group.entries
    assert series.latency_by_depth(int8, 1) == [
        series.Point(0, 8.0, 1000 / 130, 10.0),
        series.Point(512, 12.5, 12.5, 12.5),
    ]
    assert [p.y for p in series.latency_by_depth(int8, 2)] == [5.0, 10.0]
    assert series.latency_by_depth(int4, 2) == []
    assert [(p.x, p.y) for p in series.decode_by_threads(int8)] == [(1, 125.0), (2, 200.0)]
    assert series.bandwidth_shares(int8) == {2: 0.9, 1: 0.5} and series.bandwidth_shares(int4) == {}
    point = series.bytes_and_kl(int8)
    assert point is not None and (point.x, point.y) == (150.0, 3e-3)


def test_reports_of_one_machine_become_one_group() -> None:
    ratio = {
        "subject": "int4",
        "against": "int8",
        "threads": 1,
        "what": "decode",
        "at": 0,
        "ratio": samples(1.5),
    }
    first, second = bench_report(INT8), bench_report(INT8, INT4, ratios=[ratio])
    other = bench_report(INT8, processor="Another chip")
    one, two = series.merge([("a", first), ("b", second), ("c", other), ("b", second)])
    labels = ["int8", "int8 (b)", "int4", "int8 (b, 2)", "int4 (b)"]
    assert [e.label for e in one.entries] == labels and [e.label for e in two.entries] == ["int8"]
    assert [(r.subject, r.against) for r in one.ratios] == [("int4", "int8 (b)"), ("int4 (b)", "int8 (b, 2)")]
    assert one.notes == ["the machine was busy"] and "Another chip" in two.name and "2 cores" in two.name


def test_the_page_stands_alone_and_has_every_plot(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "here.json", bench_report(INT8, INT4)),
        write(tmp_path / "phone <1>.json", bench_report(INT8, processor="Phone & co")),
    ]
    page = tmp_path / "report.html"
    write_bench_report(files, page)
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"<h3>(.*?)</h3>\s*<svg", text)
    assert titles[:5] == [
        "Latency against context depth, 1 thread",
        "Latency against context depth, 2 threads",
        "Decoding against threads",
        "Bytes against KL",
        "Share of the bandwidth limit",
    ]
    assert len(titles) == 10 and text.count("<svg") == 10
    assert "<script" not in text and not re.search(r'(src|href)="(?!#)', text)
    assert 'name="viewport"' in text and "@media (max-width: 40rem)" in text
    assert "Phone &amp; co" in text and "phone &lt;1&gt;.json" in text
    assert 'data-label="Decode, tokens/s">200<' in text.replace("\n", "")


def test_missing_figures_are_named_and_empty_plots_left_out(tmp_path: Path) -> None:
    failed = {**run(1, {}, None), "error": "it died", "prefill": []}
    write_bench_report(
        [write(tmp_path / "a.json", bench_report(subject("b", 1000, None, failed)))], tmp_path / "r.html"
    )
    text = (tmp_path / "r.html").read_text()
    assert "b, 1 thread: it died" in text and "<svg" not in text and "not compared" in text


def test_the_devices_of_a_file_are_reports_of_their_own(tmp_path: Path) -> None:
    measured = bench_report(INT8).to_dict()
    devices = [
        {"serial": "one", "report": measured, "error": None},
        {"serial": "two", "report": None, "error": "gone"},
    ]
    (tmp_path / "all.json").write_text(json.dumps({"devices": devices}))
    (found,) = series.read_reports([tmp_path / "all.json"])
    assert found[0] == "all one" and found[1].to_dict() == measured
    (tmp_path / "none.json").write_text(json.dumps({"devices": devices[1:]}))
    with pytest.raises(InputError, match=r"none.json has 1 devices and no report of any"):
        series.read_reports([tmp_path / "none.json"])


def test_what_is_no_report_is_refused_and_nothing_written(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    (tmp_path / "bad.json").write_text('{"format": "pit-deploy bench"}')
    with pytest.raises(InputError, match=r"bad.json is no bench report: created_by: Field required"):
        write_bench_report([tmp_path / "bad.json"], page)
    with pytest.raises(InputError, match=r"none.json"):
        write_bench_report([tmp_path / "none.json"], page)
    with pytest.raises(InputError, match=r"nothing to show"):
        write_bench_report([], page)
    assert page.read_text() == "old"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from typer.testing import CliRunner

    from pit_deploy.cli import app

    file = write(tmp_path / "a.json", bench_report(INT8))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", str(file)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").stat().st_size > 10_000
