"""Devices over adb, with a fake adb: what is pushed and when, lost connections, refusals, benchmarks."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from pit_deploy import export, verify
from pit_deploy.benchmark.app import bench_app
from pit_deploy.benchmark.devices import EMULATED, bench_devices
from pit_deploy.benchmark.report import SCHEMA_PATH
from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.runtimes import adb as adb_module
from pit_deploy.runtimes import arm64, open_runtime
from pit_deploy.runtimes.adb import Adb, DeviceLostError, choose_devices
from pit_deploy.runtimes.adb_thermal import Temperature, cool_down, governor, temperature

HERE = Path(__file__).parent
SMALL = {"threads": [1], "prompt_tokens": [4, 8], "depths": [0, 8], "new_tokens": 2, "repeats": 2}


@pytest.fixture(scope="module")
def bundle(make_checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("devices") / "bundle"
    export(make_checkpoint(num_hidden_layers=2), out, weights="fp32", context=288)
    return out


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """`devices(SERIAL, ...)` adds a fake device and returns its folder; adb is the fake one and so is the runner."""
    root, tools = tmp_path / "devices", tmp_path / "tools"
    root.mkdir()
    tools.mkdir()
    _script(tools / "adb", HERE / "fake_adb.py")
    _script(tools / "pit-runner", HERE / "fake_runner.py")
    (tools / "libonnxruntime.so.1").write_bytes(b"a library")
    monkeypatch.setenv("FAKE_ADB_ROOT", str(root))
    monkeypatch.setenv("PIT_DEPLOY_ADB", str(tools / "adb"))
    monkeypatch.setenv("PIT_DEPLOY_RUNNER", str(tools))

    def add(serial: str, **settings) -> Path:
        (root / serial).mkdir()
        (root / serial / "device.json").write_text(json.dumps(settings))
        return root / serial

    return add


def _script(path: Path, source: Path) -> None:
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {source} "$@"\n')
    path.chmod(0o755)


def _pushes() -> list[str]:
    lines = (Path(os.environ["FAKE_ADB_ROOT"]) / "adb.log").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
    return [Path(call[3]).name for call in calls if call[2:3] == ["push"]]


def _change(device: Path, **settings) -> None:
    file = device / "device.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def test_a_missing_adb_is_named(monkeypatch):
    monkeypatch.setenv("PIT_DEPLOY_ADB", "/nowhere/adb")
    with pytest.raises(
        InputError, match=r"PIT_DEPLOY_ADB names '/nowhere/adb', which is no program; install"
    ):
        choose_devices(None)
    monkeypatch.delenv("PIT_DEPLOY_ADB")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="adb is not on the PATH; install"):
        choose_devices(None)


def test_devices_are_chosen_or_refused(devices):
    with pytest.raises(InputError, match="adb knows no device; connect one"):
        choose_devices("all")
    devices("asleep", state="offline")
    with pytest.raises(InputError, match="The device asleep is offline; plug it in again"):
        choose_devices(None)
    devices("locked", state="unauthorized")
    with pytest.raises(InputError, match="locked is unauthorized; allow this computer in the dialog"):
        choose_devices("locked")
    devices("one")
    assert choose_devices(None) == choose_devices("all") == choose_devices("one") == ["one"]
    devices("two")
    assert choose_devices("all") == ["one", "two"]
    with pytest.raises(InputError, match=r"several devices \(one, two\); name one"):
        choose_devices(None)
    with pytest.raises(InputError, match="no device 'three'; adb knows asleep, locked, one, two"):
        choose_devices("three")


def test_a_bundle_is_pushed_once_and_known_again(bundle, devices):
    device = devices("one")
    names = sorted(e.path for e in Bundle.open(bundle).manifest.files)
    first = open_runtime(Bundle.open(bundle), "adb:one")
    logits = first.prefill([1, 2, 3])
    assert first.name == "adb:one" and first.position == 3
    assert sorted(_pushes()) == sorted([*names, "manifest.json", "pit-runner", "libonnxruntime.so.1"])
    again = open_runtime(Bundle.open(bundle), "adb:one")
    np.testing.assert_array_equal(again.prefill([1, 2, 3]), logits)
    assert len(_pushes()) == len(names) + 3
    # A file that was cut on the device is the only one that is pushed again.
    file = next(device.rglob("model.onnx_data"))
    file.write_bytes(file.read_bytes()[:-1])
    open_runtime(Bundle.open(bundle), "adb:one")
    assert _pushes()[len(names) + 3 :] == ["model.onnx_data"]


def test_a_byte_changed_on_the_way_is_found_by_its_hash(bundle, devices):
    devices("one", corrupt=["model.onnx_data"])
    open_runtime(Bundle.open(bundle), "adb:one").prefill([1])
    assert _pushes().count("model.onnx_data") == 2


def test_a_device_that_goes_away_is_waited_for_and_nothing_is_lost(bundle, devices):
    """The connection is lost in the middle of decoding: the new runner is fed what was in the cache."""
    devices("steady")
    devices("loose", drop_after=5)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = [open_runtime(Bundle.open(bundle), "adb:steady")]
    expected = [expected[0].decode(id) for id in ids]
    runtime = open_runtime(Bundle.open(bundle), "adb:loose")
    np.testing.assert_array_equal([runtime.decode(id) for id in ids], expected)
    assert (Path(os.environ["FAKE_ADB_ROOT"]) / "loose" / "did-drop").exists()
    assert _pushes().count("model.onnx_data") == 2  # once a device


def test_a_device_that_stays_away_is_an_error(bundle, devices, monkeypatch):
    devices("gone", drop_after=1, away_seconds=3600)
    monkeypatch.setattr(adb_module, "RECONNECT_SECONDS", 0.1)
    monkeypatch.setattr(Adb.wait, "__defaults__", (0.1,))
    monkeypatch.setattr(Adb.insist, "__kwdefaults__", {"seconds": 0.1})
    with pytest.raises(
        DeviceLostError, match=r"The device gone was lost .*; check the cable, and run the command again"
    ):
        open_runtime(Bundle.open(bundle), "adb:gone").prefill([1])


def test_a_full_device_is_refused_before_pushing(bundle, devices):
    devices("full", free_bytes=1000)
    with pytest.raises(
        PitDeployError, match=r"The device full has 0 MB free at /data/local/tmp, and \d+ MB are to be"
    ):
        open_runtime(Bundle.open(bundle), "adb:full")
    assert _pushes() == []


def test_another_processor_is_refused(bundle, devices):
    devices("old", properties={"ro.product.cpu.abi": "armeabi-v7a"})
    with pytest.raises(
        InputError, match="old has the processor armeabi-v7a, and the runner is for arm64-v8a"
    ):
        open_runtime(Bundle.open(bundle), "adb:old")


def test_a_missing_runner_names_the_command_that_builds_it(bundle, devices, monkeypatch, tmp_path):
    devices("one")
    monkeypatch.setenv("PIT_DEPLOY_RUNNER", str(tmp_path / "nothing"))
    with pytest.raises(
        InputError, match=r"has no pit-runner .* build it with: python -m pit_deploy\.runtimes\.native"
    ):
        open_runtime(Bundle.open(bundle), "adb:one")


def test_a_runner_that_dies_is_a_result_with_its_status(bundle, devices, monkeypatch):
    devices("one")
    monkeypatch.setenv("FAKE_RUNNER_DIES", "append:139")
    report = verify(bundle, runtime="adb:one")
    assert not report.passed and len(report.failures) == 1
    assert "ended with status 139 while running a token" in report.failures[0]
    assert "its last words: the last words" in report.failures[0]


def test_a_cut_file_is_refused_before_anything_is_pushed(bundle, devices, tmp_path):
    devices("one")
    shutil.copytree(bundle, tmp_path / "cut")
    data = tmp_path / "cut" / "model.onnx_data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model\.onnx_data has \d+ bytes, and the manifest says"):
        verify(tmp_path / "cut", runtime="adb:one")
    assert not (Path(os.environ["FAKE_ADB_ROOT"]) / "adb.log").exists()


def test_temperature_and_governor(devices):
    device = devices("warm")
    assert temperature(Adb("warm")) == Temperature(30.1, "battery")  # as dumpsys says, in tenths
    assert governor(Adb("warm")) is None
    for number, (kind, value) in enumerate(
        [("cpu-0-0", "52500"), ("cpu-1-0", "61"), ("modem", "90000"), ("cpu-x", "0")]
    ):
        zone = device / "sys/class/thermal" / f"thermal_zone{number}"
        zone.mkdir(parents=True)
        (zone / "type").write_text(kind + "\n")
        (zone / "temp").write_text(value + "\n")
    for core, name in enumerate(["schedutil", "schedutil", "performance"]):
        folder = device / f"sys/devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(name + "\n")
    assert temperature(Adb("warm")) == Temperature(61.0, "cpu-1-0")
    assert governor(Adb("warm")) == "schedutil, performance"

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            (device / "sys/class/thermal/thermal_zone1/temp").write_text("40\n")
            (device / "sys/class/thermal/thermal_zone0/temp").write_text("36000\n")

    cooled = cool_down(Adb("warm"), degrees=40.0, seconds=100, poll=5, sleep=sleep)
    assert cooled == Temperature(40.0, "cpu-1-0") and slept == [5, 5]
    late = cool_down(Adb("warm"), degrees=20.0, seconds=10, poll=5, sleep=sleep)
    assert late is not None and late.degrees == 40.0 and len(slept) == 4  # the limit ends the wait


def test_several_devices_are_measured_at_once(bundle, devices):
    devices("one", properties={"ro.product.model": "Phone 1", "ro.build.version.release": "15"})
    devices("two", drop_after=6)
    devices("small", free_bytes=1000)
    start = time.monotonic()
    results = {r.serial: r for r in bench_devices([bundle], "all", cool_seconds=0, **SMALL)}
    assert time.monotonic() - start < 120
    assert set(results) == {"one", "two", "small"}
    assert results["small"].report is None and "MB free" in str(results["small"].error)
    schema = json.loads(SCHEMA_PATH.read_text())
    for serial in ("one", "two"):
        report = results[serial].report
        jsonschema.validate(report.to_dict(), schema)
        run = report.subjects[0].runs[0]
        assert run.error is None
        # Every sample once, on the device whose connection was lost too.
        assert [len(p.time_to_first_token_seconds.samples) for p in run.prefill] == [2, 2]
        assert [len(d.tokens_per_second.samples) for d in run.decode] == [2, 2]
        assert len(run.load.cold.seconds.samples) == len(run.load.warm.seconds.samples) == 2
        assert run.thermal.zone == "battery" and run.thermal.degrees_before.samples == (30.1, 30.1)
        assert report.subjects[0].quality.positions == Bundle.open(bundle).manifest.golden.positions
    assert results["one"].report.machine.processor == "Phone 1"
    assert results["one"].report.machine.system == "Android 15, Linux 5.0"


def test_an_emulated_device_gives_no_speeds(bundle, devices):
    devices("emulator-5554", properties={"ro.boot.qemu": "1"})
    (result,) = bench_devices([bundle], "emulator-5554", cool_seconds=0, **SMALL)
    run = result.report.subjects[0].runs[0]
    assert (
        run.error == EMULATED and run.prefill == run.decode == () and run.memory is None and run.load is None
    )
    assert result.report.subjects[0].quality is not None


APP = """#!{python}
import json, os, sys, time
from pathlib import Path

files = Path(os.environ["FAKE_DEVICE"]) / "sdcard/Android/data/org.pitdeploy.demo/files"
files.mkdir(parents=True, exist_ok=True)
if "--es" in sys.argv:
    name = sys.argv[sys.argv.index("bundle") + 1]
    time.sleep(0.3)
    whole = (files / "bundles" / name / "manifest.json").is_file() and sys.argv[-3:] == ["--ez", "bench", "true"]
    given = Path(os.environ["FAKE_DEVICE"]) / "answer.json"
    file = files / ("benchmark_results.json" if whole and given.is_file() else "error.json")
    text = given.read_text() if given.is_file() else json.dumps({{"error": "It was too warm."}})
    (files / "partial").write_text(text)
    (files / "partial").rename(file)
"""


def _install(device: Path, answer: str | None) -> None:
    (device / "app").write_text(APP.format(python=sys.executable))
    (device / "app").chmod(0o755)
    if answer is not None:
        (device / "answer.json").write_text(answer)


def test_the_app_measures_and_its_file_comes_back(bundle, devices):
    devices("measured")
    (made,) = bench_devices([bundle], "measured", cool_seconds=0, **SMALL)
    (Path(os.environ["FAKE_ADB_ROOT"]) / "measured" / "device.json").unlink()
    _install(devices("good"), json.dumps(made.report.to_dict()))
    _install(devices("hot"), None)
    _install(devices("odd"), json.dumps({"format": "another"}))
    devices("bare")
    results = {
        r.serial: r for r in bench_app(bundle, "all", cool_seconds=0, sleep=lambda seconds: time.sleep(0.05))
    }
    assert results["good"].report == made.report and results["good"].error is None
    assert results["hot"].error == "The app on hot failed: It was too warm."
    assert "odd wrote a benchmark_results.json that is no bench object" in results["odd"].error
    assert "bare does not have the app org.pitdeploy.demo; install it" in results["bare"].error
    with pytest.raises(InputError, match="and the app opens onnx bundles"):
        manifest = json.loads((bundle / "manifest.json").read_text())
        other = bundle.parent / "executorch"
        shutil.copytree(bundle, other)
        (other / "manifest.json").write_text(
            json.dumps({**manifest, "runtime": "executorch", "profile": "portable"})
        )
        bench_app(other, "good")


@pytest.mark.slow
@pytest.mark.skipif(arm64.missing() is not None, reason=str(arm64.missing()))
def test_the_real_runner_end_to_end(bundle, devices, monkeypatch):
    """The ARM64 program and ONNX Runtime for ARM64, pushed to and run by a fake device under emulation."""
    emulator = arm64.find_emulator()
    monkeypatch.setenv("PIT_DEPLOY_RUNNER", str(emulator.runner.parent))
    monkeypatch.setenv("FAKE_ADB_SYSROOT", str(emulator.root("cortex-a76")))
    devices("one", properties={"ro.boot.qemu": "1"}, drop_after=40, away_seconds=0.2)
    report = verify(bundle, runtime="adb:one", layers=True)
    assert report.failures == [] and report.greedy_equal == report.greedy_tokens
    assert len(report.layers) == 3 and len(report.kl) >= 256
    assert (Path(os.environ["FAKE_ADB_ROOT"]) / "one" / "did-drop").exists()


@pytest.mark.slow
@pytest.mark.skipif(arm64.missing() is not None, reason=str(arm64.missing()))
def test_the_real_runner_measures(bundle, devices, monkeypatch):
    """Every figure that the schema has comes back; what it says is not looked at, as it is an emulator's."""
    emulator = arm64.find_emulator()
    monkeypatch.setenv("PIT_DEPLOY_RUNNER", str(emulator.runner.parent))
    monkeypatch.setenv("FAKE_ADB_SYSROOT", str(emulator.root("cortex-a76")))
    devices("one")
    (result,) = bench_devices([bundle], "one", cool_seconds=0, **SMALL)
    jsonschema.validate(result.report.to_dict(), json.loads(SCHEMA_PATH.read_text()))
    run = result.report.subjects[0].runs[0]
    assert run.error is None and run.memory is not None and run.load.warm is not None
    assert [p.tokens for p in run.prefill] == [4, 8] and [d.depth for d in run.decode] == [0, 8]
    assert result.report.subjects[0].quality.mean_kl < 1e-6
    assert "1.32.0" in result.report.subjects[0].runtime


@pytest.mark.device
def test_a_real_device(bundle):
    """The only device that is connected: everything is pushed, run and compared there."""
    report = verify(bundle, runtime="adb", layers=True)
    assert report.failures == [] and report.greedy_equal == report.greedy_tokens
    (result,) = bench_devices([bundle], choose_devices(None)[0], **SMALL)
    assert result.error is None and result.report is not None


def _command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_command_line(bundle, devices, tmp_path):
    devices("one")
    devices("full", free_bytes=1000)
    small = ["--threads", "1", "--prompt-tokens", "4", "--depth", "0", "--new-tokens", "2", "--repeats", "1"]
    bench = ["bench", bundle, *small, "--cool-down", "0", "--device"]
    done = _command(*bench, "all", "--json", tmp_path / "all.json")
    assert done.returncode == 2 and "full: The device full has 0 MB free" in done.stderr
    found = json.loads((tmp_path / "all.json").read_text())["devices"]
    assert [d["serial"] for d in found] == ["full", "one"]
    assert found[0]["report"] is None and found[1]["error"] is None
    schema = json.loads(SCHEMA_PATH.read_text())
    jsonschema.validate(found[1]["report"], schema)
    done = _command(*bench, "one", "--json", tmp_path / "one.json")
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads((tmp_path / "one.json").read_text()), schema)
    done = _command("verify", bundle, "--device", "one", "--json")
    assert done.returncode == 1  # the fake runner's logits are a hash's
    assert json.loads(done.stdout)["runtime"] == "adb:one"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify", "--device", "three"], "There is no device 'three'; adb knows one."),
        (["verify", "--device", "all"], "One device at a time is opened; name it in place of all."),
        (
            ["verify", "--device", "one", "--runtime", "onnxruntime"],
            "--device has a runtime of its own; leave",
        ),
        (
            ["bench", "--device", "one", "--against", "genai"],
            "--against, --gguf and --source run on this machine",
        ),
        (
            ["bench", "--device", "all", "--plot", "x.svg"],
            "--plot draws one device; name it in place of all.",
        ),
        (["bench", "--app"], "--app measures on a device; name it with --device."),
        (["bench", "--device", "one", "--app"], "does not have the app org.pitdeploy.demo"),
    ],
)
def test_the_command_line_refuses(bundle, devices, arguments, message):
    devices("one")
    done = _command(arguments[0], bundle, *arguments[1:])
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") <= 3
    assert "Traceback" not in done.stderr
