"""What pit-deploy itself writes into config.json, `pit` and `pit_fold`, and the tensors that these announce."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pit_deploy.errors import InputError

OWN_VERSION = 1
"""The newest `pit` and `pit_fold` record that is read, and the one that is written."""

Shapes = Mapping[str, tuple[int, ...]]


def check_own_record(path: Path, config: dict[str, Any]) -> None:
    """The fields `pit` and `pit_fold` of config.json: one of them, of a known version, with known words."""
    file = path / "config.json"
    if config.get("pit") is not None and config.get("pit_fold") is not None:
        raise InputError(
            f"{file}: the fields pit and pit_fold exclude each other (a PIT checkpoint, a folded one); remove the "
            f"one that does not describe the tensors."
        )
    words: dict[str, dict[str, tuple[str, ...]]] = {
        "pit": {"memory": ("frozen", "stiefel"), "bridge": ("none", "scalar", "matrix")},
        "pit_fold": {"layout": ("untied", "shared")},
    }
    for key, allowed in words.items():
        own = config.get(key)
        if own is None:
            continue
        version = own.get("version") if isinstance(own, dict) else None
        if type(version) is not int:  # true is an int to isinstance
            raise InputError(f"{file}: the field {key} must be an object with a version number.")
        if version > OWN_VERSION:
            raise InputError(
                f"{file}: {key}.version is {version} and this pit-deploy reads up to {OWN_VERSION}; update "
                f"pit-deploy."
            )
        if version < 1:
            raise InputError(f"{file}: {key}.version is {version}; versions start at 1.")
        for name, values in allowed.items():
            if own.get(name) not in values:
                raise InputError(
                    f"{file}: {key}.{name} is {own.get(name)!r}; it must be {' or '.join(values)}."
                )
        _check_names(file, key, own)


def _check_names(file: Path, key: str, own: dict[str, Any]) -> None:
    """What the records say in free words: the backbone's family, and the folds done."""
    model_type = own.get("backbone_model_type")
    needed = key == "pit" or own["layout"] == "shared"
    if not isinstance(model_type, str) and (needed or model_type is not None):
        raise InputError(
            f"{file}: {key}.backbone_model_type is {model_type!r}; it must name the backbone's family, for example "
            f'"llama".'
        )
    for name in ("folds", "backbone_architectures"):
        value = own.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise InputError(f"{file}: {key}.{name} is {value!r}; it must be a list of names.")


def check_own_tensors(config: dict[str, Any], shapes: Shapes, where: str) -> None:
    """Raise `InputError` where the tensors `pit.*` are not those that a checked record announces."""
    if config.get("pit") is not None:
        _check_interface(config["pit"]["bridge"], shapes, where)
    elif config.get("pit_fold") is not None and config["pit_fold"]["layout"] == "shared":
        _check_square(shapes, where, "pit.table", ("pit.head_map", "pit.embedding_map"))


def _check_interface(bridge: str, shapes: Shapes, where: str) -> None:
    _check_square(
        shapes,
        where,
        "pit.memory",
        ("pit.cholesky", "pit.bridge") if bridge == "matrix" else ("pit.cholesky",),
    )
    announced = {"matrix": {"pit.bridge"}, "scalar": {"pit.embedding_multiplier"}}.get(bridge, set())
    found = {"pit.bridge", "pit.embedding_multiplier"} & set(shapes)
    if found != announced:
        raise InputError(
            f"{where}: config.json says pit.bridge {bridge}, which goes with "
            f"{', '.join(announced) or 'no tensor'}, and the checkpoint has {', '.join(sorted(found)) or 'none'}."
        )
    if bridge == "scalar" and shapes["pit.embedding_multiplier"] != ():
        raise InputError(f"{where}: pit.embedding_multiplier must be a single number of shape [].")


def _check_square(shapes: Shapes, where: str, table: str, maps: Iterable[str]) -> None:
    """The table is [V, d], and each map [d, d]."""
    missing = [name for name in (table, *maps) if name not in shapes]
    if missing:
        raise InputError(f"{where}: the tensors {', '.join(missing)} are missing.")
    shape = shapes[table]
    if len(shape) != 2:
        raise InputError(f"{where}: {table} has shape {list(shape)}; [vocab_size, hidden_size] is due.")
    for name in maps:
        if shapes[name] != (shape[1], shape[1]):
            raise InputError(
                f"{where}: {table} is {list(shape)} and {name} {list(shapes[name])}; "
                f"the second must be {[shape[1], shape[1]]}."
            )
