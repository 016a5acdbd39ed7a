"""The benchmark: statistics on a worker that gives known numbers, processes that die, and a tiny real run."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy.benchmark import measure as benchmark_measure
from pit_deploy.benchmark import suite as benchmark
from pit_deploy.benchmark.bytes import onnx_bytes_per_token
from pit_deploy.benchmark.console import print_bench
from pit_deploy.benchmark.peers import Candidate
from pit_deploy.benchmark.plot import plot
from pit_deploy.benchmark.process import (
    WorkerError,
    WorkerProcess,
    artifact_files,
    drop_pages,
    read_pages,
    resident_share,
)
from pit_deploy.benchmark.report import SCHEMA_PATH, BenchReport, Samples, read_report, schema_text
from pit_deploy.benchmark.suite import bench
from pit_deploy.benchmark.worker import WorkerSpec, memory, read_bandwidth
from pit_deploy.conftest import build_tiny, write_tokenizer
from pit_deploy.errors import InputError

SMALL: dict[str, Any] = dict(threads=[1], prompt_tokens=[8, 24], depths=[0, 16], new_tokens=4, repeats=2)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pit_deploy.exporting import export

    room = tmp_path_factory.mktemp("bench")
    build_tiny("llama").save_pretrained(room / "plain")
    write_tokenizer(room / "plain")
    (room / "plain" / "generation_config.json").write_text('{"eos_token_id": 256}')
    export(room / "plain", room / "tiny", weights="fp32", tables="fp32", layout="shared", context=64)
    return room / "tiny"


@pytest.fixture(scope="session")
def report(bundle: Path) -> BenchReport:
    """A real run: two repeats of little work, in real processes."""
    return bench([bundle], **{**SMALL, "repeats": 2})


def test_a_real_report_fits_the_schema(report: BenchReport) -> None:
    import jsonschema

    schema = json.loads(SCHEMA_PATH.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    jsonschema.Draft202012Validator(schema).validate(data)
    assert read_report(data) == report
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({**data, "more": 1})


def test_the_schema_file_is_the_one_of_the_code() -> None:
    assert SCHEMA_PATH.read_text() == schema_text()


def test_the_page_names_every_field() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "benchmarks.md").read_text()
    schema = json.loads(SCHEMA_PATH.read_text())
    fields = {name for part in [schema, *schema["$defs"].values()] for name in part["properties"]}
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []


def test_decode_is_reported_at_both_depths(report: BenchReport) -> None:
    """Row 27 of the field reports."""
    run = report.subjects[0].runs[0]
    assert [d.depth for d in run.decode] == [0, 16]
    assert [p.tokens for p in run.prefill] == [8, 24]
    figures: list[Any] = [*run.decode, *run.prefill]
    for figure in figures:
        assert len(figure.tokens_per_second.samples) == 2
        assert figure.tokens_per_second.min > 0
    for prefill in run.prefill:
        times = [prefill.tokens / s for s in prefill.tokens_per_second.samples]
        assert prefill.time_to_first_token_seconds.samples == pytest.approx(times)


def test_size_on_disk_and_resident_memory_are_separate_figures(report: BenchReport, bundle: Path) -> None:
    """Row 3 of the field reports."""
    subject = report.subjects[0]
    assert subject.model_bytes == sum(p.stat().st_size for p in bundle.glob("model.onnx*"))
    assert subject.total_bytes == sum(p.stat().st_size for p in bundle.iterdir())
    found = subject.runs[0].memory
    assert found is not None and found.private_after_load_bytes is not None
    assert found.before_load_bytes.median < found.after_load_bytes.median <= found.peak_bytes.median
    # The peak is that of the child: this process, full of test frameworks, must not show through.
    assert found.private_after_load_bytes.median < found.after_load_bytes.median


def test_load_is_measured_cold_and_warm(report: BenchReport) -> None:
    load = report.subjects[0].runs[0].load
    assert load is not None and load.warm is not None
    assert load.warm.resident_share in (1.0, None)
    for times in filter(None, (load.cold, load.warm)):
        pairs = zip(times.seconds.samples, times.first_token_seconds.samples, strict=True)
        assert all(0 < seconds < first for seconds, first in pairs)


def test_bandwidth_and_the_share_of_it(report: BenchReport) -> None:
    limit = report.bandwidth[0].bytes_per_second.max
    assert limit > 1e8
    subject = report.subjects[0]
    decode = subject.runs[0].decode[0]
    assert subject.weight_bytes_per_token is not None
    expected = subject.weight_bytes_per_token * decode.tokens_per_second.median / limit
    assert decode.bandwidth_share == pytest.approx(expected)


def test_quality_of_an_exact_bundle(report: BenchReport) -> None:
    quality = report.subjects[0].quality
    assert quality is not None and quality.mean_kl < 1e-6 and quality.top1 == 1.0


def test_weights_read_for_a_token(bundle: Path) -> None:
    """By arithmetic: every matrix once, the table once though it is gathered from as well."""
    table, attention, mlp = 263 * 24, 24 * (32 + 2 * 16) + 32 * 24, 3 * 24 * 40
    floats = table + 2 * (attention + mlp + 2 * 24)
    found = onnx_bytes_per_token(bundle / "model.onnx")
    # The mask of rows without a token, a row of the rotation's tables, gains of the last norm, shape constants.
    assert 4 * floats <= found <= 4 * (floats + 263 + 24 + 64)


def test_printing_and_plotting(
    report: BenchReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_bench(report)
    assert "tiny" in capsys.readouterr().out
    for name in ("plot.svg", "plot.png"):
        plot(report, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(InputError, match=r"\.svg"):
        plot(report, tmp_path / "plot.jpg")


# --- with a worker that gives known numbers


class FakeWorker:
    """Stands in for `WorkerProcess`: seconds come from `times`, by subject's path and question."""

    times: dict[str, Iterator[float]]
    dies_at: dict[str, str]
    asked: list[tuple[str, str]]

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec, self.name = spec, Path(spec.path).name or spec.kind
        self.dead = False

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        type(self).asked.append((self.name, do))
        if self.dies_at.get(self.name) == do:
            raise WorkerError(f"the worker process ended during '{do}' with exit status -9", died=True)
        if do == "open":
            sizes = {"resident": 300, "private": 200, "peak": 310}
            return {
                "seconds": next(self.times["load"]),
                "before": {"resident": 100},
                "after": sizes,
                "runtime": "fake 1",
            }
        if do == "memory":
            return {"resident": 300, "private": 200, "peak": 400}
        if do == "bandwidth":
            return {"bytes_per_second": 1000.0}
        if do == "quality":
            return {"positions": 3, "mean_kl": 0.5, "top1": 1.0}
        return {"seconds": next(self.times[self.name]), "others": 0.0}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> type[FakeWorker]:
    """Two subjects: the tiny bundle, and a peer that takes twice as long each time."""

    def growing(factor: float) -> Iterator[float]:
        value = 1.0
        while True:
            yield factor * value
            value += 1

    def peer(*_: Any, **__: Any) -> list[Candidate]:
        path = bundle / "golden.json"  # any file will do
        return [Candidate("peer", "llama.cpp", path, "Q", 10, 10, 50, 64, range(40), ())]

    FakeWorker.times = {"load": growing(1), "tiny": growing(1), "golden.json": growing(2)}
    FakeWorker.dies_at, FakeWorker.asked = {}, []
    monkeypatch.setattr(benchmark_measure, "WorkerProcess", FakeWorker)
    monkeypatch.setattr(benchmark, "llama_cpp_candidates", peer)
    return FakeWorker


def test_medians_spread_and_ratios_pair_by_pair(fake: type[FakeWorker], bundle: Path) -> None:
    report = bench([bundle], **{**SMALL, "repeats": 5}, against=["llama.cpp"])
    for subject in report.subjects:
        for decode in subject.runs[0].decode:
            kept = decode.tokens_per_second
            assert kept.median == statistics.median(kept.samples)
            assert (kept.min, kept.max) == (min(kept.samples), max(kept.samples))
            assert len(set(kept.samples)) == 5
    # The peer takes exactly twice as long in each pair, though times grow all along: every quotient is 2.
    assert [(r.what, r.at) for r in report.ratios] == [
        ("prefill", 8),
        ("prefill", 24),
        ("decode", 0),
        ("decode", 16),
    ]
    for ratio in report.ratios:
        assert ratio.ratio.samples == (2.0,) * 5
    share = report.subject("peer").runs[0].decode[0]
    assert share.bandwidth_share == pytest.approx(50 * share.tokens_per_second.median / 1000)


def test_subjects_are_asked_in_turn(fake: type[FakeWorker], bundle: Path) -> None:
    bench([bundle], **SMALL, against=["llama.cpp"])
    measured = [name for name, do in fake.asked if do == "decode"][-8:]  # 2 depths, 2 repeats, 2 subjects
    assert measured == ["tiny", "golden.json"] * 4


@pytest.mark.parametrize(("question", "kept"), [("decode", True), ("open", False)])
def test_a_worker_that_dies_leaves_the_rest(
    fake: type[FakeWorker], bundle: Path, question: str, kept: bool
) -> None:
    fake.dies_at = {"golden.json": question}
    report = bench([bundle], **SMALL, against=["llama.cpp"])
    ours, theirs = report.subjects[0].runs[0], report.subject("peer").runs[0]
    assert theirs.error is not None and "exit status -9" in theirs.error and theirs.decode == ()
    assert ours.error is None and len(ours.decode) == 2
    assert (theirs.load is not None) is kept
    assert not [ratio for ratio in report.ratios if ratio.what == "decode"]


# --- processes


def test_a_crash_is_an_error_with_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing_worker.py").write_text(
        "import os, sys\n"
        "for line in sys.stdin:\n"
        "    if 'open' in line: print('{}', flush=True)\n"
        "    else:\n"
        "        print('out of luck', file=sys.stderr, flush=True)\n"
        f"        os.kill(os.getpid(), {int(signal.SIGSEGV)})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    spec = WorkerSpec("bundle", "nowhere", 1, 64)
    with WorkerProcess(spec, module="crashing_worker") as worker:
        assert worker.ask("open") == {}
        for _ in range(2):  # it stays dead
            with pytest.raises(WorkerError, match=r"during 'decode'.*-11 \(SIGSEGV\): out of luck") as caught:
                worker.ask("decode")
            assert caught.value.died


def test_an_error_in_a_worker_is_told(tmp_path: Path) -> None:
    with (
        WorkerProcess(WorkerSpec("bundle", str(tmp_path / "none"), 1, 64)) as worker,
        pytest.raises(WorkerError, match="does not exist") as caught,
    ):
        worker.ask("open")
    assert not caught.value.died


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory by kind is Linux's")
def test_memory_of_this_process() -> None:
    before = memory()
    block = np.ones(64 * 2**20, np.uint8)
    after = memory()
    assert before["private"] is not None and after["private"] is not None and after["peak"] is not None
    assert after["private"] - before["private"] > 0.9 * block.nbytes
    assert after["peak"] >= (after["resident"] or 0)


@pytest.mark.skipif(sys.platform != "linux", reason="posix_fadvise and mincore")
def test_pages_are_dropped_and_read(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * (4 << 20))
    files = artifact_files(tmp_path)
    assert files == [file]
    read_pages(files)
    assert resident_share(files) == 1.0
    assert drop_pages(files)
    assert resident_share(files) in (0.0, 1.0)  # 1 on a file system in memory


def test_bandwidth_of_two_threads_counts_every_byte_once() -> None:
    array = np.ones(1 << 20, np.uint64)
    assert read_bandwidth(array, 2, passes=1) > 1e7


# --- options


def test_a_context_that_is_too_short_is_refused_with_the_numbers(bundle: Path) -> None:
    with pytest.raises(InputError, match=r"holds 64 tokens, and 68 are asked for.*4 new tokens after 64"):
        bench([bundle], **{**SMALL, "depths": [0, 64]})
    with pytest.raises(InputError, match=r"holds 64 tokens, and 65 are asked for \(a prompt of 65"):
        bench([bundle], **{**SMALL, "prompt_tokens": [65]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(threads=[0]), "--threads 0"),
        (dict(prompt_tokens=[0]), "--prompt-tokens 0"),
        (dict(depths=[-1]), "--depth -1"),
        (dict(new_tokens=0), "--new-tokens 0"),
        (dict(repeats=0), "--repeats 0"),
        (dict(against=["ollama"]), "--against ollama"),
    ],
)
def test_options_that_cannot_hold(bundle: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench([bundle], **{**SMALL, **changes})


def test_no_bundle_and_a_bundle_twice(bundle: Path) -> None:
    with pytest.raises(InputError, match="at least one bundle"):
        bench([], **SMALL)
    with pytest.raises(InputError, match="twice"):
        bench([bundle, bundle], **SMALL)


def test_few_repeats_are_noted(fake: type[FakeWorker], bundle: Path) -> None:
    assert any("at least 5" in note for note in bench([bundle], **SMALL).notes)


def test_the_text_is_repeated_where_it_is_short() -> None:
    settings = benchmark.make_settings([1], [8], [0], 3, 5, [])
    candidate = Candidate("a", "bundle", Path(), "", 0, 0, None, 64, [1, 2, 3])
    assert benchmark_measure.text_ids(candidate, settings) == [1, 2, 3, 1, 2, 3, 1, 2]
    with pytest.raises(InputError, match="no ids"):
        benchmark_measure.text_ids(replace(candidate, ids=[]), settings)


def test_samples() -> None:
    samples = Samples.of([3, 1, 2, 10])
    assert (samples.median, samples.min, samples.max, samples.samples) == (2.5, 1, 10, (3, 1, 2, 10))


def test_another_models_gguf_is_refused(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((263, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="32, 2, 263 against 24, 2, 263"):
        bench([bundle], **SMALL, against=["llama.cpp"], gguf=tmp_path / "other.gguf")


@pytest.mark.slow
def test_the_sample_against_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from pit_deploy.benchmark.peers import llama_cpp_logits
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.exporting import export
    from pit_deploy.parity import compare_in_full
    from pit_deploy.quantize.calibration import evaluation_text
    from pit_deploy.runtimes.torch import open_plain
    from pit_deploy.sample import sample_gguf, write_sample

    sample = write_sample(tmp_path / "sample")
    export(sample, tmp_path / "bundle")
    report = bench([tmp_path / "bundle"], threads=[1], repeats=5, against=["llama.cpp"])
    assert [s.kind for s in report.subjects] == ["bundle", "llama.cpp", "llama.cpp", "llama.cpp"]
    assert all(run.error is None for subject in report.subjects for run in subject.runs)
    assert len(report.ratios) == 3 * 4
    own = report.subject("llama.cpp Q4_1")
    assert own.quality is not None and own.quality.mean_kl < 0.02

    reference = open_plain(open_checkpoint(sample))
    from pit_deploy.bundle import Bundle

    ids = Bundle.open(tmp_path / "bundle").tokenizer.encode(evaluation_text()).ids[:300]
    kl, _, top1 = compare_in_full(reference.all_logits(ids), llama_cpp_logits(sample_gguf(), ids))
    assert kl.mean() < 0.02 and top1.mean() > 0.9


def test_the_worker_answers_only_json(bundle: Path) -> None:
    """What a library prints on standard output must not be taken for an answer."""
    with WorkerProcess(WorkerSpec("bundle", str(bundle), 1, 64)) as worker:
        assert worker.ask("open")["runtime"].startswith("onnxruntime")
        assert worker.ask("prefill", ids=[1, 2, 3])["seconds"] > 0
        assert worker.ask("decode", context=[1] * 8, ids=[5, 6])["seconds"] > 0
        with pytest.raises(WorkerError, match="context is full"):
            worker.ask("decode", context=[1] * 63, ids=[5, 6])
