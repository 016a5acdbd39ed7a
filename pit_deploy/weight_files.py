"""Safetensors files: what is in them, and writing them in shards. Never pickle."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pit_deploy.errors import InputError
from pit_deploy.json_files import read_json, write_json

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
SHARD_BYTES = 2_000_000_000
"""A shard is held in memory while it is written."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is, known from the header alone."""

    file: Path
    dtype: str
    """As safetensors spells it: F32, BF16, ..."""
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        bits = re.search(r"\d+", self.dtype)
        return max(1, int(bits.group()) // 8) if bits else 1


def check_dtype(dtype: str | None) -> None:
    """Raise `InputError` for a `--dtype` that is not written; None passes."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype} is not known; choose {', '.join(DTYPES)}.")


def cast(name: str, tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """A float tensor in `dtype` (None: as it is). Raises `InputError` where that cannot hold a value."""
    import torch

    if dtype is None or not tensor.is_floating_point():
        return tensor
    result = tensor.to(getattr(torch, dtype))
    if not bool(torch.isfinite(result).all()):
        largest = float(tensor.abs().max())
        raise InputError(f"{name} reaches {largest:.4g}, which is not a finite {dtype}; choose float32.")
    return result


def write_safetensors(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> int:
    """Write tensors to model.safetensors, or to shards with an index where they exceed `shard_bytes`.

    At most one shard is held in memory. Tensors that share memory are written apart. Returns the bytes of the
    tensors.
    """
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0
    directory.mkdir(exist_ok=True)

    def flush() -> None:
        nonlocal pending, size
        save_file(pending, directory / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending, size = {}, 0

    for name, tensor in tensors:
        tensor = tensor.contiguous()
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
        place = tensor.untyped_storage().data_ptr()
        shared = any(place == other.untyped_storage().data_ptr() for other in pending.values())
        pending[name] = tensor.clone() if shared else tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / "shard-0.safetensors").rename(directory / "model.safetensors")
        return total
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}.safetensors").rename(directory / file)
        places.update(dict.fromkeys(names, file))
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places}
    )
    return total


def read_index(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint directory by name, from the headers alone. Pickle is refused."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.is_file():  # first, as in transformers, so that both read the same where both are there
        tensors = _header(single)
    elif index.is_file():
        tensors = _shards(path, index)
    else:
        _refuse_pickle(path)
        raise InputError(
            f"{path} has no weights: model.safetensors or model.safetensors.index.json is expected."
        )
    if not tensors:
        raise InputError(f"{path} has weight files without any tensor; fetch them again.")
    return tensors


def _shards(path: Path, index: Path) -> dict[str, TensorInfo]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise InputError(f"{index}: weight_map is missing or not an object of file names.")
    files = sorted(set(places.values()))
    escaped = [f for f in files if Path(f).name != f or "\\" in f]
    if escaped:
        raise InputError(f"{index}: the shard '{escaped[0]}' is not a file of the same folder.")
    missing = [f for f in files if not (path / f).is_file()]
    if missing:
        raise InputError(f"{index} names {len(missing)} shard(s) that are not there: {', '.join(missing)}.")
    tensors = {k: v for f in files for k, v in _header(path / f).items()}
    absent = sorted(set(places) - set(tensors))
    if absent:
        raise InputError(
            f"{index} names tensors that no shard holds: {', '.join(absent[:5])} ({len(absent)})."
        )
    return tensors


def _refuse_pickle(path: Path) -> None:
    pickles = sorted(p.name for p in [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if pickles:
        raise InputError(
            f"{path} holds its weights only as pickle ({', '.join(pickles[:3])}), which can run code when "
            f'opened; convert it where you trust it: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{path}').save_pretrained('{path}-safetensors')\""
        )


def _header(file: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes; the library checks that the declared sizes are those of the file."""
    import safetensors

    try:
        with safetensors.safe_open(file, framework="np") as opened:
            slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 (not a dict)
            return {
                name: TensorInfo(file, part.get_dtype(), tuple(part.get_shape())) for name, part in slices
            }
    except PermissionError:
        raise
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{file} cannot be read as safetensors ({file.stat().st_size} bytes): {error}; it is damaged or "
            f"was not downloaded whole, so fetch it again."
        ) from error
