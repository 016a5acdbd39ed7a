from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy import report as report_module
from pit_deploy import report_figures as figures
from pit_deploy.conversion import ConversionReport
from pit_deploy.errors import InputError, MissingExtraError
from pit_deploy.exporting import ExportReport
from pit_deploy.gates import GATES
from pit_deploy.manifest_reader import parse_manifest
from pit_deploy.parity import LayerError, ParityReport
from pit_deploy.report import (
    ChatAnswer,
    gated_figures,
    number,
    require_report_packages,
    sizes_by_part,
    table_bytes,
    write_demo_report,
    write_parity_report,
)

ROOT = Path(__file__).parents[1]
HOSTILE = "<script>alert('x')</script>\"'&{{ 7 * 7 }}</title>"
FETCHING = {
    "src",
    "href",
    "xlink:href",
    "srcset",
    "data",
    "action",
    "poster",
    "background",
    "formaction",
    "ping",
}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """What a page holds; `feed` fails where tags are not closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = {k: v or "" for k, v in attrs}
        assert not any(k.startswith("on") for k in given)
        self.fetched += [v for k, v in given.items() if k in FETCHING]
        self.ids += [v for k, v in given.items() if k == "id"]
        if tag == "svg":
            assert given["role"] == "img"
            self.labels.append(given["aria-label"])
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def parity(precision: str = "fp32", positions: int = 280, **changes: Any) -> ParityReport:
    rng = np.random.default_rng(0)
    size = {"fp32": 5e-5, "int8": 0.4}[precision]
    given = ParityReport(
        bundle=f"/b/onnx-{precision}",
        runtime="onnxruntime",
        precision=precision,
        gate=GATES[precision],
        reference="golden record",
        kl=np.minimum(size**2 * rng.lognormal(size=positions), 6e-3) / 20,
        max_abs=size * rng.lognormal(sigma=0.5, size=positions),
        top1=np.ones(positions, bool),
        prompt_lengths=[44, 40, 60, positions - 144],
        prefill_max_abs=2e-5,
        greedy_tokens=64,
        greedy_equal=64,
        layers=[LayerError(i, 1e-6 * 1.2**i, 4e-6 * 1.2**i) for i in range(31)],
        total_bytes=155_000_000,
    )
    return replace(given, **changes)


def conversion(**changes: Any) -> ConversionReport:
    given = ConversionReport(
        "/b/pit",
        "polar",
        "matrix",
        "stiefel",
        49152,
        576,
        condition=91.3,
        interface_error_source=1.1e4,
        interface_error=3.4e-6,
        loss_source=2.911,
        loss=2.911,
        max_logit_difference=1.4e-4,
    )
    return replace(given, **changes)


def exported(precision: str, out: str | Path | None = None) -> ExportReport:
    size = {"fp32": 541_000_000, "int8": 150_000_000}[precision]
    report = ExportReport(str(out or f"/b/onnx-{precision}"), "onnx", "shared", precision, precision, 2048)
    report.parts = {
        "model.onnx": 400_000,
        "model.onnx_data": size,
        "tokenizer.json": 2_100_000,
        "chat_template.jinja": 400,
        "golden.safetensors": 1_500_000,
        "golden.json": 9_000,
        "config.json": 900,
        "LICENSE": 11_000,
        "manifest.json": 30_000,
    }
    report.total_bytes = sum(report.parts.values())
    report.folds = ["final_norm_gain", "bridge", "transform"]
    return report


CHAT: ChatAnswer = {"prompt": "What is the capital of France?", "answer": "Paris.", "tokens_per_second": 45.6}


def write_demo(path: Path, **changes: Any) -> Page:
    given: dict[str, Any] = {
        "conversion": conversion(),
        "exports": [exported("fp32"), exported("int8")],
        "parities": [parity("fp32"), parity("int8")],
        "chat": CHAT,
        "timings": {"convert": 12.3, "export fp32": 20.0},
    }
    write_demo_report(path, **(given | changes))
    return checked(path)


def write_parity(path: Path, report: ParityReport, **options: Any) -> Page:
    write_parity_report(report, path, **options)
    return checked(path)


def checked(path: Path) -> Page:
    """The page, after what holds for each: nothing to fetch, no script, unique ids, small."""
    page, text = Page(path), path.read_text(encoding="utf-8")
    assert all(reference.startswith("#") for reference in page.fetched)
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert text.replace("url(#", "").count("url(") == 0
    assert not {"script", "link", "iframe", "object", "img", "base", "form"} & set(page.tags)
    assert len(set(page.ids)) == len(page.ids)
    assert not any(colour in text.split("</style>")[1] for colour in figures.COLOURS.values())
    assert path.stat().st_size < 1_500_000
    return page


def test_a_parity_report_that_passed(tmp_path: Path) -> None:
    page = write_parity(tmp_path / "r.html", parity())
    assert page.tags.count("svg") == 4
    assert "Passed." in page.text and "Failed." not in page.text
    assert "onnx-fp32" in page.text and "280 of 280" in page.text and "64 of 64" in page.text
    assert "at most 0.001" in page.text and "100.00% (280 of 280) at least 100% within" in page.text
    assert page.labels[0].startswith("Logit error by position. Median ")


def test_a_parity_report_that_failed_says_why_and_where(tmp_path: Path) -> None:
    layers = [LayerError(0, 1e-6, 1e-5), LayerError(1, 0.5, 2.0), LayerError(2, 0.7, 3.0)]
    top1 = np.arange(280) != 9
    report = parity(
        top1=top1, layers=layers, failures=["top-1 agreement 99.64% is below 100.0%"], notes=["a note"]
    )
    page = write_parity(tmp_path / "r.html", report, title="A title")
    assert "A title" in page.text and "Failed." in page.text and "Passed." not in page.text
    assert "top-1 agreement 99.64% is below 100.0%" in page.text and "a note" in page.text
    assert "99.64% (279 of 280) at least 100% out" in page.text
    assert "The first median past its gate is that after layer 0." in page.text
    assert "another token is largest" in page.text


def test_figures_against_gates() -> None:
    ungated = {r.name: r for r in gated_figures(parity("int8"))}
    assert ungated["Largest logit error"].gate == "no gate" and ungated["Largest logit error"].met is None
    assert ungated["Greedy tokens that agree"].met is None
    assert ungated["Mean KL"].gate == "at most 0.005" and ungated["Mean KL"].met
    assert ungated["Top-1 agreement"].gate == "at least 95%"
    rows = {
        r.name: r.met for r in gated_figures(parity(max_abs=np.array([1e-3, 1.01e-3] * 140), greedy_equal=63))
    }
    assert rows["Largest logit error"] is False and rows["Greedy tokens that agree"] is False
    rows = {r.name: r.met for r in gated_figures(parity(max_abs=np.full(280, np.nan)))}
    assert rows["Largest logit error"] is False and rows["Positions with finite logits"] is False


STRANGE = [0.0, 1e-320, 1e-20, 1e300, np.nan, np.inf, -0.0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "values",
    [[0.0] * 7, [np.nan] * 7, [np.inf] * 7, [1e300] * 7, [3e-5] * 7, STRANGE],
    ids=["zero", "nan", "inf", "huge", "same", "mixed"],
)
def test_strange_values(tmp_path: Path, values: list[float]) -> None:
    array = np.array(values)
    layers = [LayerError(i, v, v) for i, v in enumerate(values)]
    report = parity(kl=array, max_abs=array, top1=np.zeros(7, bool), prompt_lengths=[1, 6], layers=layers)
    page = write_parity(tmp_path / "r.html", report)
    assert page.tags.count("svg") == 4
    assert ("not finite" in page.text) == (not np.isfinite(array).all())
    write_demo(tmp_path / "d.html", parities=[parity("int8"), replace(report, bundle="/b/onnx-fp32")])


def test_no_layers_one_prompt_one_position(tmp_path: Path) -> None:
    one = np.array([1e-5])
    page = write_parity(
        tmp_path / "r.html",
        parity(kl=one, max_abs=one, top1=np.array([True]), prompt_lengths=[1], layers=[], total_bytes=None),
    )
    assert page.tags.count("svg") == 3
    assert "Hidden states were not compared." in page.text and "not measured" in page.text


def test_texts_of_strangers_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    report = parity(bundle=HOSTILE, runtime=HOSTILE, reference=HOSTILE, failures=[HOSTILE], notes=[HOSTILE])
    page = write_parity(path, report, title=HOSTILE)
    assert HOSTILE in page.text and "<script" not in path.read_text()
    export = replace(exported("fp32", HOSTILE), layout=HOSTILE, folds=[HOSTILE], notes=[HOSTILE])
    page = write_demo(
        path,
        conversion=conversion(out=HOSTILE, notes=[HOSTILE]),
        exports=[export],
        parities=[parity(bundle=HOSTILE, failures=["$x^{$ " + HOSTILE])],
        chat={"prompt": HOSTILE, "answer": HOSTILE, "tokens_per_second": 1.0},
        timings={HOSTILE: 1.0},
    )
    assert HOSTILE in page.text and "<script" not in path.read_text()
    assert any(HOSTILE in label for label in page.labels)


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    page = write_parity(tmp_path / "r.html", parity(bundle=b"/b/\xff".decode("utf-8", "surrogateescape")))
    assert "/b/?" in page.text


def test_a_demo_report(tmp_path: Path) -> None:
    page = write_demo(tmp_path / "d.html")
    assert page.tags.count("svg") == 5  # two by position, two by layer, sizes
    for words in (
        "Passed.",
        "49,152 rows by 576",
        "a matrix bridge",
        "1.1e+04",
        "91.3",
        "45.6",
        "Paris.",
        "32.3",
    ):
        assert words in page.text
    assert "final norm gain, bridge, transform" in page.text and "2.1 MB" in page.text
    assert "pit-deploy run /b/onnx-int8 --chat" in page.text
    assert "pit-deploy bench /b/onnx-int8" in page.text


def test_a_demo_report_with_a_failure_and_one_without_a_check(tmp_path: Path) -> None:
    page = write_demo(tmp_path / "d.html", parities=[parity("int8", failures=["mean KL 0.1 is above 0.005"])])
    assert "Failed." in page.text and "int8 shared: mean KL 0.1 is above 0.005" in page.text
    assert "not verified" in page.text and page.tags.count("svg") == 3
    page = write_demo(tmp_path / "d.html", parities=[])
    assert "Incomplete." in page.text and "Passed." not in page.text and page.tags.count("svg") == 1
    with pytest.raises(InputError, match="at least one exported bundle"):
        write_demo(tmp_path / "d.html", exports=[])


def test_paths_with_spaces_are_quoted_in_commands(tmp_path: Path) -> None:
    page = write_demo(tmp_path / "d.html", exports=[exported("int8", "/my bundles/int8")])
    assert "pit-deploy run '/my bundles/int8' --chat" in page.text


def test_sizes_by_part(tmp_path: Path) -> None:
    manifest = json.loads((ROOT / "runtime_tests/vectors/manifests/good_onnx.json").read_text())
    manifest["vocab_size"], manifest["architecture"]["hidden_size"], manifest["layout"] = 49152, 576, "shared"
    manifest["precision"] |= {"tables": "int8", "block_size": 32, "symmetric": True}
    export = exported("int8", tmp_path)
    without = sizes_by_part(export)
    assert without["tables"] == 0 and without["weights"] == 150_400_000
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    found = sizes_by_part(export)
    assert found == {
        "tables": 49152 * (576 + 18 * 4),  # a byte a code, a float32 scale for each 32
        "weights": 150_400_000 - 49152 * 648,
        "tokenizer": 2_100_400,
        "golden": 1_509_000,
        "other": 41_900,
    }
    assert sum(found.values()) == export.total_bytes


def test_table_bytes() -> None:
    manifest = json.loads((ROOT / "runtime_tests/vectors/manifests/good_onnx.json").read_text())
    manifest["vocab_size"], manifest["architecture"]["hidden_size"], manifest["layout"] = 200, 72, "untied"
    for precision, expected in (
        ({"tables": "fp32"}, 72 * 4),
        ({"tables": "fp16"}, 72 * 2),
        ({"tables": "int8", "block_size": None, "symmetric": True}, 72 + 4),
        (
            {"tables": "int4", "block_size": 32, "symmetric": False},
            36 + 3 * 4 + 2,
        ),  # 3 zero points in 2 bytes
    ):
        manifest["precision"] |= precision
        assert table_bytes(parse_manifest(json.dumps(manifest))) == 2 * 200 * expected
    coreml = json.loads((ROOT / "runtime_tests/vectors/manifests/good_coreml.json").read_text())
    rows, width, block = coreml["vocab_size"], coreml["architecture"]["hidden_size"], 32
    coreml["layout"] = "shared"
    coreml["precision"] |= {"tables": "int8", "block_size": block, "symmetric": True}
    assert table_bytes(parse_manifest(json.dumps(coreml))) == rows * (width + 2 * width // block)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_parity_report(parity(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_many_positions_stay_small_and_keep_the_worst(tmp_path: Path) -> None:
    report = parity("int8", 20_000, top1=np.zeros(20_000, bool))
    report.max_abs[12_345] = 77.7
    page = write_parity(tmp_path / "r.html", report)
    assert "largest 77.7 at position 12345" in page.text and "Of every 10 positions" in page.text
    kept = figures._worst_of_each(report.max_abs)
    assert len(kept) == figures.MAX_POINTS and 12_345 in kept
    assert len(figures._worst_of_each(np.zeros(1999))) == 1999


def test_limits_are_whole_decades() -> None:
    assert figures.log_limits(np.array([3e-5, 2e-4]), 1e-3) == pytest.approx((1e-5, 1e-3))
    assert figures.log_limits(np.array([0.0, 3e-5])) == pytest.approx((1e-6, 1e-4))
    assert figures.log_limits(np.array([np.nan, 1.0])) == pytest.approx((1, 10))
    assert figures.log_limits(np.array([0.0])) == pytest.approx((1e-9, 1e-6))
    assert figures.log_limits(np.array([5e-324, 1e308])) == pytest.approx((figures.FLOOR, figures.CEILING))


def test_numbers() -> None:
    assert [number(v) for v in (None, float("nan"), float("inf"), 0.0, 1.23456e-5)] == [
        "not measured",
        "not a number",
        "infinite",
        "0",
        "1.235e-05",
    ]


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_parity_report(parity(), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_parity_report(parity(), path)
    assert path.read_text().startswith("<!DOCTYPE html>") and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_package_is_said_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def require(package: str, extra: str) -> None:
        if package == missing:
            raise MissingExtraError(package, extra)

    monkeypatch.setattr(report_module, "require", require)
    with pytest.raises(MissingExtraError, match=rf"'{missing}'.*pit-deploy\[bench\]"):
        require_report_packages()
    for write in (
        lambda: write_parity_report(parity(), tmp_path / "r.html"),
        lambda: write_demo(tmp_path / "d.html"),
    ):
        with pytest.raises(MissingExtraError):
            write()
    assert list(tmp_path.iterdir()) == []


def test_the_style_of_the_process_is_left_alone(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    write_parity_report(parity(), tmp_path / "r.html")
    assert dict(matplotlib.rcParams) == before


def test_every_marker_has_a_colour_of_the_page(tmp_path: Path) -> None:
    """A marker without a style is black, and unseen on a dark page."""
    write_parity_report(parity(), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    styled = set(re.findall(r'<path id="([^"]+)"[^>]*style="[^"]*var\(--', page))
    uses = re.findall(r'<use xlink:href="#([^"]+)"[^>]*>', page)
    assert len(uses) > 100
    for whole in re.finditer(r'<use xlink:href="#([^"]+)"[^>]*>', page):
        assert whole.group(1) in styled or "var(--" in whole.group(0), whole.group(0)
