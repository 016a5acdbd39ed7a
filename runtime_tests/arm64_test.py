"""ARM64 under emulation: names, set-up, what is compared; and real ARM64 runtimes where the emulator is set up."""

import json
import os
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from pit_deploy import export, few_passes, run, verify
from pit_deploy.bundle import Bundle
from pit_deploy.console import print_generation
from pit_deploy.errors import ContextFullError, InputError, PitDeployError, RuntimeDiedError
from pit_deploy.gates import ARM64_FROM_X86
from pit_deploy.golden import GoldenRecord
from pit_deploy.parity import compare_in_full
from pit_deploy.runtimes import FullRuntime, Runtime, arm64, arm64_setup, open_runtime
from pit_deploy.runtimes.arm64 import Choice, Emulator, choice_of
from pit_deploy.runtimes.arm64_executorch import Arm64Executorch
from pit_deploy.runtimes.native import build

needs_emulator = pytest.mark.skipif(arm64.missing() is not None, reason=str(arm64.missing()))
needs_executorch = pytest.mark.skipif(
    arm64.missing("executorch") is not None, reason=str(arm64.missing("executorch"))
)
PROCESSORS = ["cortex-a76", "cortex-a72"]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("arm64")


@pytest.fixture(scope="module")
def fp32(make_checkpoint, room):
    export(make_checkpoint(num_hidden_layers=2), room / "fp32", weights="fp32", context=288)
    return room / "fp32"


@pytest.fixture(scope="module")
def int8(make_checkpoint, room):
    export(make_checkpoint(num_hidden_layers=2), room / "int8", context=288)
    return room / "int8"


@pytest.fixture(scope="module")
def int4(make_checkpoint, room):
    export(make_checkpoint(num_hidden_layers=2), room / "int4", weights="int4", quantizer="rtn", context=288)
    return room / "int4"


def test_names_choose_processor_and_kernels():
    assert choice_of("arm64-onnxruntime") == Choice("arm64-onnxruntime", "cortex-a76", True)
    chosen = choice_of("arm64-onnxruntime:cortex-a72:no-kleidiai")
    assert chosen == Choice("arm64-onnxruntime", "cortex-a72", False)
    assert chosen.label == "arm64-onnxruntime:cortex-a72:no-kleidiai"
    with pytest.raises(
        InputError, match=r"has the part 'cortex-a5'; known are cortex-a76, cortex-a72, no-kleidiai"
    ):
        choice_of("arm64-onnxruntime:cortex-a5")
    with pytest.raises(InputError, match=r"part 'no-kleidiai'; known are cortex-a76, cortex-a72\."):
        choice_of("arm64-executorch:no-kleidiai")


def test_unfit_names_are_refused(fp32):
    bundle = Bundle.open(fp32)
    for name in ("arm64-executorch", "onnxruntime:cortex-a76", "arm64"):
        with pytest.raises(InputError, match=f"the runtime '{name}' cannot open this onnx bundle; use "):
            open_runtime(bundle, name)
    with pytest.raises(InputError, match=r"onnxruntime takes nothing after a colon"):
        open_runtime(bundle, "onnxruntime:cortex-a76")
    with pytest.raises(InputError, match=r"transformers.js \(chromium takes nothing after a colon\)"):
        open_runtime(bundle, "chromium:foo")
    with pytest.raises(InputError, match="speculation is built for onnxruntime"):
        open_runtime(bundle, "arm64-onnxruntime", speculate=True)


def test_what_is_missing_is_said_with_the_command(fp32, monkeypatch, tmp_path):
    monkeypatch.setenv("PIT_DEPLOY_ARM64", str(tmp_path / "nothing"))
    monkeypatch.setattr(arm64.shutil, "which", lambda name: None)
    with pytest.raises(
        InputError, match="qemu-aarch64-static is not installed; run: apt-get install qemu-user-static"
    ):
        open_runtime(Bundle.open(fp32), "arm64-onnxruntime")
    monkeypatch.setattr(arm64.shutil, "which", lambda name: "/usr/bin/it")
    with pytest.raises(
        InputError, match=r"nothing has no ARM64 runner; run: python -m pit_deploy\.runtimes\.arm64_setup"
    ):
        open_runtime(Bundle.open(fp32), "arm64-onnxruntime")
    assert str(arm64.missing("executorch")).endswith(
        "run: python -m pit_deploy.runtimes.arm64_setup --executorch"
    )


def test_set_up_names_the_packages_of_missing_tools(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert arm64_setup.main([str(tmp_path / "folder")]) == 2
    assert "run: apt-get install apt dpkg qemu-user-static" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
    with pytest.raises(
        InputError, match=r"is not an Android NDK: it has no build/cmake/android\.toolchain\.cmake"
    ):
        build.build_android(tmp_path / "out", tmp_path)


def test_a_failed_command_is_one_sentence():
    script = "import sys; print('first', file=sys.stderr); sys.exit('last word')"
    with pytest.raises(PitDeployError, match="ended with status 1: first last word"):
        build.call([sys.executable, "-c", script])


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_emulated_system_shows_the_processor_that_runs(processor, tmp_path):
    """A library that finds another processor in /proc/cpuinfo than qemu executes ends in an illegal instruction."""
    emulator = Emulator(tmp_path)
    arm64_setup._make_view(tmp_path, emulator.root(processor), processor)
    text = (emulator.root(processor) / "proc" / "cpuinfo").read_text()
    assert text.count(f"CPU part\t: {arm64.PROCESSORS[processor].part}") == os.cpu_count()
    assert ("asimddp" in text) == (processor == "cortex-a76")
    assert (emulator.root(processor) / "lib").readlink() == Path("../root/lib")
    command = emulator.command(processor, "/bin/true", "x")
    assert command == [
        "qemu-aarch64-static",
        "-cpu",
        processor,
        "-L",
        str(emulator.root(processor)),
        "/bin/true",
        "x",
    ]


class Counting:
    """A runtime whose logits show the last id and its position; counts calls, and errs at a position of one kind."""

    name, context_length, vocab_size = "counting", 64, 100

    def __init__(self, wrong: tuple[str, int] | None = None) -> None:
        self.ids: list[int] = []
        self.wrong, self.calls = wrong, {"prefill": 0, "decode": 0}

    @property
    def position(self):
        return len(self.ids)

    def _row(self, kind: str) -> np.ndarray:
        row = np.zeros(self.vocab_size, np.float32)
        row[(self.ids[-1] + len(self.ids) - 1) % self.vocab_size] = 1.0 + (
            0.5 if self.wrong == (kind, len(self.ids) - 1) else 0.0
        )
        return row

    def prefill(self, ids):
        self.calls["prefill"] += 1
        self.ids += ids
        return self._row("prefill")

    def decode(self, id):
        self.calls["decode"] += 1
        self.ids.append(id)
        return self._row("decode")

    def reset(self):
        self.ids = []


class CountingAll(Counting):
    def all_logits(self, ids):
        rows = []
        self.reset()
        for id in ids:
            self.ids.append(id)
            rows.append(self._row("all"))
        self.reset()
        return np.stack(rows)

    def hidden_states(self, ids):
        raise NotImplementedError


def _compare(ids):
    def compare(offset: int, logits: np.ndarray) -> few_passes.Row:
        error = abs(float(logits[(ids[offset] + offset) % 100]) - 1.0)
        return error, error, error == 0

    return compare


def test_few_passes_compare_every_position_where_the_runtime_gives_them_all():
    ids = list(range(20))
    runtime = CountingAll()
    assert isinstance(runtime, FullRuntime)
    rows, difference = few_passes.rows_of_prompt(runtime, ids, _compare(ids), 100)
    assert rows == [(0.0, 0.0, True)] * 20 and difference == 0
    assert runtime.calls == {"prefill": 1, "decode": few_passes.STEPS}


@pytest.mark.parametrize("wrong", [("all", 11), ("decode", 2), ("prefill", 19)])
def test_few_passes_notice_an_error_of_any_way_to_run(wrong):
    ids = list(range(20))
    rows, difference = few_passes.rows_of_prompt(CountingAll(wrong), ids, _compare(ids), 100)
    assert [n for n, row in enumerate(rows) if not row[2]] == [wrong[1]]
    assert (difference == 0.5) == (wrong != ("all", 11))  # no second way was taken to position 11


def test_a_slow_runtime_with_last_logits_decodes_every_position():
    runtime = Counting()
    runtime.few_passes = True  # type: ignore[attr-defined]
    assert isinstance(runtime, Runtime) and few_passes.is_slow(runtime)
    assert not few_passes.wants_few_passes(runtime)
    assert few_passes.notes(runtime, 20, 8) == [
        "an emulated processor is slow: greedy decoding was cut to 8 tokens"
    ]
    assert few_passes.notes(Counting(), 20, 8) == []


def test_a_large_model_is_compared_in_few_passes_and_the_report_says_so(fp32, monkeypatch):
    from pit_deploy import parity, runtimes

    bundle = Bundle.open(fp32)
    assert not few_passes.is_large(bundle)
    monkeypatch.setattr(few_passes, "LARGE_BYTES", 1000)
    assert few_passes.is_large(bundle)
    opened = open_runtime(bundle, "onnxruntime")
    opened.few_passes = True  # type: ignore[attr-defined]
    monkeypatch.setattr(runtimes, "open_runtime", lambda *_, **__: opened)
    report = parity.verify(bundle)
    assert report.failures == [] and len(report.kl) == bundle.manifest.golden.positions
    assert report.greedy_tokens == few_passes.GREEDY_TOKENS
    assert "an emulated processor is slow" in report.notes[0]


def test_the_record_is_cut_after_its_first_positions(fp32):
    golden = GoldenRecord.load(fp32)
    first = len(golden.prompts[0].ids)
    cut = few_passes.first_positions(golden, first + 5)
    assert [len(p.ids) for p in cut.prompts] == [first, 5] and cut.starts == [0, first]
    assert cut.greedy_ids == golden.greedy_ids and len(cut.hidden_norm[0]) == first + 5
    short = few_passes.first_positions(golden, 3)
    assert [p.ids for p in short.prompts] == [golden.prompts[0].ids[:3]] and short.greedy_ids == []
    assert few_passes.first_positions(golden, 10**6).positions == golden.positions
    report = verify(fp32, positions=first + 5)
    assert report.failures == [] and report.notes == [
        f"only {first + 5} positions were compared; a gate wants 256"
    ]
    assert verify(fp32, positions=3).failures == []
    for positions, source in ((0, None), (5, "somewhere")):
        with pytest.raises(InputError, match=f"--positions {positions} cuts the golden record"):
            verify(fp32, positions=positions, source=source)


def test_times_of_an_emulator_are_not_shown(fp32, capsys):
    opened = open_runtime(Bundle.open(fp32), "onnxruntime")
    timed = run(fp32, "a", max_new_tokens=2, runtime=opened)
    assert timed.to_dict()["prefill_seconds"] > 0
    opened.emulated = True  # type: ignore[attr-defined]
    answer = run(fp32, "a", max_new_tokens=2, runtime=opened)
    found = answer.to_dict()
    assert found["prefill_seconds"] is found["decode_seconds"] is found["tokens_per_second"] is None
    print_generation(answer)
    shown = capsys.readouterr().err
    assert "1 prompt tokens, 2 tokens, ended by" in shown and " s," not in shown and "second" not in shown


FAKE_PACKAGE = """
    import os
    import numpy as np

    class Runtime:
        @classmethod
        def get(cls): return cls()
        def load_program(self, path): return self
        def load_method(self, name):
            assert name == "forward"
            return self.forward
        def forward(self, inputs):
            tokens, position = inputs
            if tokens[0, -1] == 13:
                os._exit(134)
            logits = np.zeros((1, 1, 300), np.float32)
            logits[0, 0, :2] = tokens.sum(), position[0]
            return [logits]
"""


class HereEmulator(Emulator):
    """Runs the worker in this Python, with a package that stands in for executorch-numpy-runtime."""

    def command(self, processor, program, *arguments):
        return [sys.executable, *arguments]


@pytest.fixture
def faked(fp32, tmp_path):
    """A runtime over the worker; the bundle says that it is for ExecuTorch's portable profile."""
    package = tmp_path / "site" / "executorch_numpy_runtime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(FAKE_PACKAGE))
    bundle = Bundle.open(fp32)
    manifest = bundle.manifest.model_copy(update={"runtime": "executorch", "profile": "portable"})
    faked = Bundle(bundle.path, manifest, [])
    return Arm64Executorch(faked, HereEmulator(tmp_path), Choice("arm64-executorch"))


def test_the_worker_keeps_the_position(faked):
    assert isinstance(faked, Runtime) and faked.name == "arm64-executorch:cortex-a76"
    assert faked.prefill([1, 2, 3])[:2].tolist() == [6, 0]
    assert faked.decode(5)[:2].tolist() == [5, 3] and faked.position == 4
    faked.reset()
    assert faked.decode(7)[:2].tolist() == [7, 0]
    with pytest.raises(ContextFullError):
        faked.prefill([1] * 288)
    faked.close()


def test_a_worker_that_dies_is_reported_and_started_anew(faked):
    with pytest.raises(
        RuntimeDiedError, match="ExecuTorch on an emulated cortex-a76 ended with status 134 while"
    ):
        faked.decode(13)
    with pytest.raises(PitDeployError, match="has ended; reset starts another"):
        faked.decode(1)
    faked.reset()
    assert faked.decode(1)[:2].tolist() == [1, 0]
    faked.close()


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("processor", PROCESSORS)
def test_fp32_equals_training_on_arm64(fp32, processor):
    report = verify(fp32, runtime=f"arm64-onnxruntime:{processor}", layers=True)
    assert report.failures == [] and report.greedy_equal == report.greedy_tokens
    assert len(report.kl) >= 256 and max(e.largest for e in report.layers) < 1e-4


@pytest.mark.slow
@needs_emulator
def test_the_portable_graph_runs_on_arm64(make_checkpoint, tmp_path):
    export(
        make_checkpoint(num_hidden_layers=2), tmp_path / "b", weights="fp32", profile="standard", context=288
    )
    report = verify(tmp_path / "b", runtime="arm64-onnxruntime")
    assert report.failures == []


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("name", list(ARM64_FROM_X86))
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_arm64_stays_close_to_x86(request, name, precision):
    """Each processor has kernels of its own; none is further from x86's than it was measured to be."""
    bundle = Bundle.open(request.getfixturevalue(precision))
    here, there = open_runtime(bundle, threads=1), open_runtime(bundle, f"arm64-onnxruntime:{name}")
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 250, 200)]
    kl, _, _ = compare_in_full(here.all_logits(ids), there.all_logits(ids))
    assert kl.mean() < ARM64_FROM_X86[name][precision]


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("name", list(ARM64_FROM_X86))
def test_int8_passes_on_arm64(int8, name):
    assert verify(int8, runtime=f"arm64-onnxruntime:{name}").failures == []


@pytest.mark.slow
@needs_emulator
def test_a_processor_that_lacks_an_instruction_is_a_result(int8, monkeypatch):
    """cpuinfo of one processor, instructions of another: the process ends, and the report is still written."""
    kept = arm64.PROCESSORS
    emulator = arm64.find_emulator()

    def command(self, processor, program, *arguments):
        return ["qemu-aarch64-static", "-cpu", "cortex-a72", "-L", str(emulator.root("cortex-a76")), str(program),
                *arguments]  # fmt: skip

    monkeypatch.setattr(Emulator, "command", command)
    assert kept["cortex-a76"].part != kept["cortex-a72"].part
    report = verify(int8, runtime="arm64-onnxruntime")
    assert not report.passed and "SIGILL" in report.failures[0]
    json.dumps(report.to_dict())


@pytest.mark.slow
@needs_emulator
def test_a_changed_graph_is_refused_by_onnx_runtime_in_one_sentence(fp32, tmp_path):
    import shutil

    import onnx

    from pit_deploy.bundle import sha256

    shutil.copytree(fp32, tmp_path / "b")
    path = tmp_path / "b" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.node[-1].op_type = "NoSuchOperator"
    path.write_bytes(model.SerializeToString())
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    entry = next(e for e in manifest["files"] if e["path"] == "model.onnx")
    entry["size"], entry["sha256"] = path.stat().st_size, sha256(path)
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PitDeployError, match="NoSuchOperator"):
        verify(tmp_path / "b", runtime="arm64-onnxruntime")


@pytest.mark.slow
@needs_executorch
@pytest.mark.parametrize("profile", ["portable", "xnnpack"])
def test_executorch_equals_training_on_arm64(make_checkpoint, tmp_path, profile):
    pytest.importorskip("executorch.exir")
    checkpoint = make_checkpoint(num_hidden_layers=2)
    export(checkpoint, tmp_path / "b", to="executorch", weights="fp32", profile=profile, context=288)
    report = verify(tmp_path / "b", runtime="arm64-executorch")
    assert report.failures == [] and report.greedy_equal == report.greedy_tokens
