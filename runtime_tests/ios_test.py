"""The iOS demo with a real Swift toolchain on Linux: its tests on the shared vectors, and its sources' rules."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO = REPOSITORY / "ios_demo"
VECTORS = REPOSITORY / "runtime_tests" / "vectors"
SOURCES = [p for p in sorted(DEMO.rglob("*.swift")) if ".build" not in p.parts]
_NO_TOOLCHAIN = 3
_BUILD = ("--scratch-path", "../build/ios_demo")
_STRICT = ("-Xswiftc", "-strict-concurrency=complete", "-Xswiftc", "-warnings-as-errors")


def swift(*arguments: str, tool: str = "swift", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the toolchain in ios_demo; the test is skipped where there is none."""
    done = subprocess.run(
        [DEMO / "tools" / "swift.sh", *arguments],
        env={**os.environ, "TOOL": tool, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode == _NO_TOOLCHAIN:
        pytest.skip(done.stderr.strip())
    return done


@pytest.mark.slow
def test_swift_tests() -> None:
    """`swift test`, strict concurrency and warnings as errors; the benchmark's JSON is what the schema says."""
    bench = REPOSITORY / "build" / "ios_bench.json"
    tokens = REPOSITORY / "build" / "ios_tokens.json"
    swift("--version")  # skips without a toolchain, before anything is made
    bench.parent.mkdir(exist_ok=True)
    bench.unlink(missing_ok=True)
    _sample_tokens(tokens)
    done = swift("test", *_BUILD, *_STRICT, PIT_BENCH_JSON=str(bench), PIT_TOKENS=str(tokens))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    report = json.loads(bench.read_text(encoding="utf-8"))
    schema = json.loads((REPOSITORY / "pit_deploy/schemas/bench.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(report, schema)
    assert report["subjects"][0]["quality"]["positions"] > 0


def _sample_tokens(file: Path) -> None:
    """Texts with the ids of the sample's own tokenizer, as the shared vectors have them."""
    from pit_deploy.sample import write_sample

    directory = file.with_name("ios_sample_tokenizer")
    if not (directory / "tokenizer.json").is_file():
        write_sample(directory, overwrite=True)
        for weights in directory.glob("*.safetensors"):
            weights.unlink()
    make = [sys.executable, VECTORS / "make_tokens.py", "--tokenizer", directory / "tokenizer.json"]
    subprocess.run([*make, "--count", "3000", "--out", file], check=True, cwd=REPOSITORY)


@pytest.mark.slow
def test_what_needs_apples_frameworks() -> None:
    """Parsed, and type-checked against declarations written after Apple's documentation."""
    swift("--version")  # skips without a toolchain
    done = subprocess.run([DEMO / "tools" / "check_apple_sources.sh"], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "type-checked: AppModel" in done.stdout


def test_the_call_vectors_are_those_of_the_python_runtime() -> None:
    """coreml_calls.json is what its script writes, from pit_deploy/runtimes/coreml_sequence.py."""
    done = subprocess.run(
        [sys.executable, "-c", "import json, make_coreml_calls as m; print(json.dumps(m.documents()))"],
        cwd=VECTORS,
        capture_output=True,
        text=True,
        check=True,
    )
    for name, text in json.loads(done.stdout).items():
        assert (VECTORS / name).read_text(encoding="utf-8") == text


def _code(text: str) -> str:
    """Swift without comments and texts, so that signs in them do not count."""
    text = re.sub(r'"""[\s\S]*?"""', '""', text)
    text = re.sub(r'#"(?:.*?)"#', '""', text)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", "", text)


@pytest.mark.parametrize("file", SOURCES, ids=lambda p: p.relative_to(DEMO).as_posix())
def test_no_force_unwraps(file: Path) -> None:
    """No `try!`, no `as!`, no `x!`, no implicitly unwrapped types."""
    code = _code(file.read_text(encoding="utf-8"))
    found = re.findall(r"\btry!|\bas!|(?<=[\w)\]\}])!(?!=)[^\n]{0,20}", code)
    assert found == []
    assert "fatalError" not in code or "AppleStubs" in file.parts
    assert "nonisolated(unsafe)" not in code and ("@unchecked" not in code or "AppleStubs" in file.parts)


def test_the_checker_of_force_unwraps_finds_them() -> None:
    for text in ("try! f()", "let x = y!", "a[0]! + 1", "f()!.g", "x as! Int", "var v: Int!"):
        assert re.findall(r"\btry!|\bas!|(?<=[\w)\]\}])!(?!=)", _code(text)), text
    for text in ("if !x {", "a != b", '"no!"', "// no!", "f(!x)"):
        assert not re.findall(r"\btry!|\bas!|(?<=[\w)\]\}])!(?!=)", _code(text)), text


def test_the_core_imports_foundation_alone() -> None:
    imports = set()
    for file in (DEMO / "Sources" / "PITCore").rglob("*.swift"):
        imports |= set(re.findall(r"^\s*(?:@\w+\s+)?import\s+(\w+)", file.read_text(encoding="utf-8"), re.M))
    assert imports == {"Foundation", "CryptoKit"}  # CryptoKit is Apple's, behind canImport
    assert ".package(" not in (DEMO / "Package.swift").read_text(encoding="utf-8")
