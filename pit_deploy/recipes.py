"""Recipes: named sets of export options, as TOML. `android`, `ios`, `web` and `desktop` come with pit-deploy."""

from __future__ import annotations

import inspect
import sys
import tomllib
from pathlib import Path
from typing import Any

from pit_deploy.errors import InputError

_TABLE_NAMES = ("embedding", "embeddings", "embed_tokens", "head", "lm_head")
_NOT_IN_RECIPES = ("source", "out", "golden", "overwrite", "progress")


def load_recipe(name: str | Path) -> dict[str, Any]:
    """The export options of a recipe file, or of a recipe that comes with pit-deploy.

    Raises `InputError` for an unknown recipe, key or type, listing what is known.
    """
    path = _find(name)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}.") from error
    unknown = sorted(set(content) - {"description", "export"})
    if unknown or not isinstance(content.get("export"), dict):
        raise InputError(
            f"{path}: a recipe has a text 'description' and a table [export]; found {', '.join(content) or 'nothing'}."
        )
    return _checked(path, content["export"])


def recipe_names() -> list[str]:
    """Recipes that come with pit-deploy, sorted."""
    return sorted({p.stem for folder in _folders() if folder.is_dir() for p in folder.glob("*.toml")})


def _find(name: str | Path) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if path.parent == Path() and not path.suffix:
        for folder in _folders():
            if (folder / f"{name}.toml").is_file():
                return folder / f"{name}.toml"
    raise InputError(f"--recipe {name} is neither a file nor one of {', '.join(recipe_names())}.")


def _folders() -> list[Path]:
    """Where recipes lie: in a source checkout, and in an installed distribution."""
    checkout = Path(__file__).parent.parent / "export" / "recipes"
    return [checkout, Path(sys.prefix) / "share" / "pit-deploy" / "recipes"]


def _checked(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    from pit_deploy.exporting import export

    known = {
        n: p.default for n, p in inspect.signature(export).parameters.items() if n not in _NOT_IN_RECIPES
    }
    for key, value in options.items():
        if key in _TABLE_NAMES:
            raise InputError(
                f"{path}: '{key}' is not an export option: one setting, tables, governs the embedding and the head, "
                f"since they may be one table; set tables."
            )
        if key not in known:
            raise InputError(f"{path}: '{key}' is not an export option; known are {', '.join(known)}.")
        wanted = _type_of(key, known[key])
        if wanted is float and type(value) is int:
            options = {**options, key: (value := float(value))}
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise InputError(f"{path}: {key} is {value!r}; a value of type {wanted.__name__} is expected.")
    return dict(options)


def _type_of(key: str, default: Any) -> type:
    special = {"context": int, "block_size": int, "max_bytes": int, "max_kl": float, "symmetric": bool}
    if key in special:
        return special[key]
    return str if default is None else type(default)
