"""The text of `manifest.json`: read with one sentence for each fault, written, and its JSON Schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pit_deploy.manifest import FORMAT, FORMAT_VERSION, KINDS, BundleError, Kind, Manifest, ManifestBody

SCHEMA_PATH = Path(__file__).with_name("schemas") / "manifest.schema.json"


def parse_manifest(text: bytes | str, where: Path | str = "manifest.json") -> Manifest:
    """Read a manifest and raise `BundleError`, one sentence that names `where`, for anything wrong with it.

    Looks at the text alone: the files that it lists are the business of `Bundle.open`.
    """
    data = parse_json(text, where)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = (
            f"'format' is {show(data.get('format'))}" if isinstance(data, dict) else f"it is {_kind(data)}"
        )
        raise BundleError(
            "not_a_bundle",
            f"{where} is not the manifest of a pit-deploy bundle ({found}, and a manifest is an object whose "
            f"'format' is '{FORMAT}'); give the folder that pit-deploy export wrote.",
        )
    _check_version(data, where)
    return validate_manifest(data, where)


def validate_manifest(data: Mapping[str, Any], where: Path | str) -> Manifest:
    """The manifest in `data`, as JSON has it; `BundleError` that names `where` for what is wrong."""
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        raise _bundle_error(error, data, where) from None


def _check_version(data: Mapping[str, Any], where: Path | str) -> None:
    if "format_version" not in data:
        raise BundleError("missing_field", _sentence(where, "the field 'format_version' is missing"))
    version = data["format_version"]
    if type(version) is not int:
        found = f"the field 'format_version' is {show(version)}: it should be an integer"
        raise BundleError("bad_value", _sentence(where, found))
    both = f"{where} has format version {show(version)}, and this pit-deploy reads version {FORMAT_VERSION}"
    if version > FORMAT_VERSION:
        raise BundleError("newer_version", f"{both}; update pit-deploy: pip install --upgrade pit-deploy")
    if version < FORMAT_VERSION:
        raise BundleError("older_version", f"{both}; export the bundle again with this pit-deploy.")


def _bundle_error(error: ValidationError, data: Mapping[str, Any], where: Path | str) -> BundleError:
    """One sentence about the first thing that pydantic found in `data`: field, value, file, what to do."""
    details = error.errors(include_url=False)
    first, more = details[0], len(details) - 1
    context = first.get("ctx", {})
    field = ".".join(filter(None, [_dotted(first, data), context.get("field")]))
    kind = cast(Kind, first["type"]) if first["type"] in KINDS else "bad_value"
    value = show(context.get("value", first["input"]))
    if first["type"] == "missing":
        kind, found = "missing_field", f"the field '{field}' is missing"
    elif first["type"] == "extra_forbidden":
        kind, found = (
            "unknown_field",
            f"format version {FORMAT_VERSION} has no field '{field}' (it is {value})",
        )
    else:
        found = f"the field '{field}' is {value}: " + _reason(first["msg"])
    if more:
        found += f" (and {more} more such problem{'s' if more > 1 else ''})"
    return BundleError(kind, _sentence(where, found))


def _reason(message: str) -> str:
    message = re.sub(r"^(Input|Tuple|String|Dictionary|Value) should", "it should", message)
    return message.replace(" after validation", "")


def _sentence(where: Path | str, found: str) -> str:
    return f"{where}: {found}; export the bundle again, or fetch it again from where it came."


def _dotted(error: ErrorDetails, data: Any) -> str:
    """The field as in `inputs.0.shape.1`, without the names of a union's branches, which pydantic adds."""
    parts: list[str] = []
    for part in error["loc"]:
        known = (
            part in data
            if isinstance(data, dict)
            else isinstance(data, list | tuple) and isinstance(part, int)
        )
        if known:
            data = data[part]
        elif error["type"] != "missing":
            break
        name = str(part)
        parts.append(name if re.fullmatch(r"\w{1,64}", name) else show(name).strip("'\""))
    return ".".join(parts)


def show(value: Any) -> str:
    """A value from a stranger's file, fit for a terminal: escaped and short."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(data: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(data), "a number")


def parse_json(text: bytes | str, where: Path | str) -> Any:
    """JSON in UTF-8 without repeated keys, NaN or infinities, of which readers make different things."""
    advice = "export the bundle again, or fetch it again from where it came."
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        json.dumps(data, ensure_ascii=False).encode()  # finds halves of surrogate pairs
        return data
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise BundleError(
            "bad_json", f"{where} is not valid JSON at {place} ({error.msg}); {advice}"
        ) from None
    except UnicodeEncodeError:
        reason = "an escape in it is half a surrogate pair, which is no character"
        raise BundleError("bad_json", f"{where} is not usable JSON ({reason}); {advice}") from None
    except UnicodeDecodeError as error:
        raise BundleError("bad_json", f"{where} is not UTF-8 at byte {error.start}; {advice}") from None
    except RecursionError:
        raise BundleError("bad_json", f"{where} is nested too deeply to be read; {advice}") from None
    except ValueError as error:
        reason = str(error).split(";")[0]
        raise BundleError("bad_json", f"{where} is not usable JSON ({reason}); {advice}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {show(twice)} is there twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def format_manifest(manifest: ManifestBody) -> str:
    """The text of manifest.json: a line for each field, and for each item where a field lists objects."""
    lines = []
    for key, value in manifest.model_dump(mode="json").items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            body = "[\n  " + ",\n  ".join(_dump(item) for item in value) + "\n ]"
        else:
            body = _dump(value)
        lines.append(f" {_dump(key)}: {body}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of manifest.json.

    It says all but the rules between fields, which `Manifest` checks.
    """
    # In the mode "serialization" the fields that have a default are required too, as in every written file.
    schema = Manifest.model_json_schema(mode="serialization")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"manifest.json of a {FORMAT}, format version {FORMAT_VERSION}",
    }
    return head | _plain(schema)


def _plain(node: Any, properties: bool = False) -> Any:
    """A copy without pydantic's titles and defaults, which repeat names and differ between its versions."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = () if properties else ("title", "default")
    plain = {k: _plain(v, k in ("properties", "$defs")) for k, v in node.items() if k not in dropped}
    if not properties and "description" in plain:
        plain["description"] = " ".join(plain["description"].split())
    return plain


def schema_text() -> str:
    """The schema as it stands in the file `SCHEMA_PATH`; `python -m pit_deploy.manifest_reader` prints it."""
    return json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
