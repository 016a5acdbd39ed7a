"""The folder that leaves `export`: opening it with every check made first, and writing its manifest."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output
from pit_deploy.manifest import BundleError, FileEntry, Manifest, ManifestBody, TokenizedText
from pit_deploy.manifest_reader import format_manifest, parse_json, parse_manifest, show, validate_manifest

MANIFEST = "manifest.json"
_BIGGEST_MANIFEST = 16 * 2**20  # read whole into memory, so its size is checked like any other
_AGAIN = "export the bundle again, or fetch it again from where it came."

# Carried from the checkpoint byte for byte, where it has them.
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_CHECKPOINT = re.compile(r"config\.json|.*\.safetensors|.*\.gguf|pytorch_model.*\.bin")
_LEGAL = re.compile(r"(licen[sc]e|notice)", re.IGNORECASE)


class Bundle:
    """A bundle that was checked when it was opened. Make one by `Bundle.open`; the folder is only read.

    `unlisted` has the files of the folder that the manifest doesn't name, sorted; nothing vouches for them.
    """

    def __init__(self, path: Path, manifest: Manifest, unlisted: list[str]) -> None:
        self.path, self.manifest, self.unlisted = path, manifest, unlisted

    @classmethod
    def open(cls, path: Path | str, *, check_hashes: bool = False) -> Bundle:
        """Read the manifest and check that every file is there, inside the folder and of the declared size.

        With `check_hashes` all bytes are read and compared too. Raises `BundleError` for whatever doesn't
        hold; no runtime has seen a byte by then.
        """
        path = Path(path)
        manifest = parse_manifest(_read_manifest(path), path / MANIFEST)
        for entry in manifest.files:
            _check_file(path, entry)
        unlisted = sorted(_walk(path) - {entry.path for entry in manifest.files} - {MANIFEST})
        bundle = cls(path, manifest, unlisted)
        if check_hashes:
            bundle.check_hashes()
        return bundle

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r}, runtime={self.manifest.runtime!r})"

    def check_hashes(self) -> None:
        """Read every listed file and raise `BundleError` at the first whose SHA-256 is another."""
        for entry in self.manifest.files:
            self.check_hash(entry.path)

    def check_hash(self, relative: str) -> None:
        """Read one listed file; raises `BundleError` where its SHA-256 is another."""
        file = self.file(relative)
        expected = next(entry.sha256 for entry in self.manifest.files if entry.path == relative)
        found = sha256(file)
        if found != expected:
            raise BundleError(
                "wrong_hash",
                f"{file} has changed: its SHA-256 starts with {found[:12]} and the "
                f"manifest says {expected[:12]}; {_AGAIN}",
            )

    def file(self, relative: str) -> Path:
        """Where a listed file, or a folder of listed files, is; `BundleError` where the manifest has none."""
        paths = [entry.path for entry in self.manifest.files]
        if relative in paths or any(path.startswith(relative + "/") for path in paths):
            return self.path / relative
        raise BundleError("missing_file", f"The bundle {self.path} has no file {show(relative)}; {_AGAIN}")

    @property
    def model_path(self) -> Path:
        """What the runtime opens."""
        return self.file(self.manifest.model_file)

    @property
    def total_bytes(self) -> int:
        """Bytes of the listed files and of the manifest."""
        return sum(entry.size for entry in self.manifest.files) + (self.path / MANIFEST).stat().st_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, set to cut and pad nothing."""
        return load_tokenizer(self.file("tokenizer.json"))

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; empty where the bundle has none."""
        return self._json("config.json")

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json; empty where the bundle has none."""
        return self._json("tokenizer_config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, all its fields; empty where the bundle has none."""
        return self._json("generation_config.json")

    def check_tokenizer(self) -> None:
        """Encode the manifest's check texts; raise `BundleError` at the first whose ids are others."""
        for check in self.manifest.tokenizer_checks:
            ids = _encode(self.tokenizer, check.text)
            if ids != list(check.ids):
                raise BundleError(
                    "tokenizer_mismatch",
                    f"The tokenizer of {self.path} encodes {check.text!r} as {ids}, and the manifest says "
                    f"{list(check.ids)}; install the release of tokenizers that made the bundle "
                    f"({self.manifest.created_by.get('tokenizers', 'not recorded')}), or export it again.",
                )

    def check_end_ids(self) -> None:
        """Raise `BundleError` where the manifest ends texts at other ids than the bundle's own configurations do."""
        from pit_deploy.generation_config import end_ids

        named = end_ids(
            self.generation_config, self.config, self.tokenizer_config, self.tokenizer.token_to_id
        )
        if list(self.manifest.end_ids) != named:
            raise BundleError(
                "bad_end_id",
                f"{self.path} ends a text at {list(self.manifest.end_ids)} by its manifest, and at {named} by "
                f"generation_config.json, config.json and tokenizer_config.json; {_AGAIN}",
            )

    def _json(self, name: str) -> dict[str, Any]:
        if not any(entry.path == name for entry in self.manifest.files):
            return {}
        data = parse_json((self.path / name).read_bytes(), self.path / name)
        if not isinstance(data, dict):
            raise BundleError("bad_json", f"{self.path / name} is not a JSON object; {_AGAIN}")
        return data


def _read_manifest(path: Path) -> bytes:
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        advice = "give the folder that holds manifest.json"
        raise BundleError("not_a_bundle", f"{path} {found}, and a bundle is a folder; {advice}.")
    file = path / MANIFEST
    if not file.is_symlink() and not file.exists():
        raise BundleError("not_a_bundle", _what_instead(path))
    _check_inside(path, MANIFEST)
    try:
        size = file.stat().st_size
        if size > _BIGGEST_MANIFEST:
            raise BundleError(
                "wrong_size",
                f"{file} has {size} bytes, and a manifest has {_BIGGEST_MANIFEST} at most; {_AGAIN}",
            )
        return file.read_bytes()
    except OSError as error:
        message = f"{file} cannot be read ({error.strerror}); check that it is a file which you may read."
        raise BundleError("unreadable_file", message) from error


def _what_instead(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir())
    exported = any(name.endswith((".onnx", ".pte", ".mlpackage")) for name in names)
    marks = [n for n in names if n != "golden.safetensors" and _CHECKPOINT.fullmatch(n)]
    if marks and not exported:
        found = ", ".join(marks[:3])
        advice = f"export it first: pit-deploy export {path} OUT --to onnx"
        return f"{path} is a checkpoint ({found}), not a bundle; {advice}"
    found = ", ".join(show(n) for n in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{path} has no manifest.json (it holds {found or 'nothing'}); "
        f"give the folder that pit-deploy export wrote."
    )


def _check_inside(root: Path, relative: str) -> Path:
    """The real path of a file of the bundle; `BundleError` where it is not there or a link leads outside."""
    file = root / relative
    try:
        real = file.resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        if _leads_out(root, file):
            raise _escape(root, relative) from None
        raise BundleError(
            "missing_file", f"{file} is missing, and the manifest of {root} lists it; {_AGAIN}"
        ) from None
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        message = f"{file} cannot be read ({getattr(error, 'strerror', None) or error}); {_AGAIN}"
        raise BundleError("unreadable_file", message) from error
    if not real.is_relative_to(root.resolve()):
        raise _escape(root, relative)
    return real


def _leads_out(root: Path, file: Path) -> bool:
    """Whether a link leaves the bundle; one that goes in circles counts too."""
    try:
        return not file.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        return True


def _escape(root: Path, relative: str) -> BundleError:
    return BundleError(
        "path_escape",
        f"{root / relative} leads outside the bundle by a link, which is not followed; make a copy of the "
        f"bundle with the files in place of links, for example with cp -rL.",
    )


def _check_file(root: Path, entry: FileEntry) -> None:
    real = _check_inside(root, entry.path)
    if not real.is_file():
        found = "is a folder" if real.is_dir() else "is not a plain file"
        raise BundleError(
            "missing_file", f"{root / entry.path} {found}, and the manifest lists a file; {_AGAIN}"
        )
    size = real.stat().st_size
    if size != entry.size:
        raise BundleError(
            "wrong_size",
            f"{root / entry.path} has {size} bytes, and the manifest says {entry.size}; {_AGAIN}",
        )


def _walk(root: Path) -> set[str]:
    """Paths of all files below `root`, with `/`. Links to folders count as files and are not entered.

    Raises `BundleError` where a link leads outside, listed or not: a model may name any file beside it.
    """
    found = set()
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for file in (Path(folder) / name for name in [*names, *links]):
            relative = file.relative_to(root).as_posix()
            if file.is_symlink() and _leads_out(root, file):
                raise _escape(root, relative)
            found.add(relative)
    return found


def write_manifest(directory: Path | str, body: ManifestBody) -> Manifest:
    """Hash every file in `directory`, add them to `body` and write manifest.json, last and in one step.

    An .mlpackage folder is hashed file by file. A manifest.json that is there already is replaced. Raises
    `BundleError` and writes nothing where the folder holds links, or the files don't agree with `body`.
    """
    directory = Path(directory)
    left = f".{MANIFEST}."  # what a killed run of this function leaves; `atomic_output` removes it
    paths = sorted(path for path in _walk(directory) if path != MANIFEST and not path.startswith(left))
    for path in paths:
        if (directory / path).is_symlink():
            raise BundleError(
                "path_escape", f"{directory / path} is a link; put the file itself into the bundle."
            )
    files = [
        {"path": path, "size": (directory / path).stat().st_size, "sha256": sha256(directory / path)}
        for path in paths
    ]
    manifest = validate_manifest(body.model_dump(mode="json") | {"files": files}, directory / MANIFEST)
    with atomic_output(directory / MANIFEST, overwrite=True, directory=False) as partial:
        partial.write_bytes(format_manifest(manifest).encode())
    return manifest


def sha256(path: Path | str) -> str:
    """SHA-256 of a file in hexadecimal, read in pieces."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def carry_files(source_dir: Path | str, target_dir: Path | str) -> list[str]:
    """Copy tokenizer, chat templates, generation config and legal texts byte for byte; return their names.

    `target_dir` has to exist; files of the same names in it are replaced. Raises `InputError` before copying
    where there is no tokenizer.json.
    """
    source, target = Path(source_dir), Path(target_dir)
    if not (source / "tokenizer.json").is_file():
        raise InputError(
            f"{source} has no tokenizer.json, the only form of tokenizer that phones read; convert it with: "
            f'python -c "from transformers import AutoTokenizer as A; d = {str(source)!r}; '
            f'A.from_pretrained(d).save_pretrained(d)"'
        )
    names = [name for name in CARRIED if (source / name).is_file()]
    names += sorted(p.name for p in source.iterdir() if _LEGAL.match(p.name) and p.is_file())
    # Where a tokenizer has more chat templates than one, transformers keeps the others here.
    names += sorted(
        p.relative_to(source).as_posix() for p in source.glob("additional_chat_templates/*.jinja")
    )
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names


def load_tokenizer(file: Path | str) -> Tokenizer:
    """Read a tokenizer.json, and turn off the cutting and padding that it may ask for."""
    file = Path(file)
    if not file.is_file():
        raise InputError(
            f"{file} is missing; save the checkpoint's tokenizer in the fast form, tokenizer.json."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        message = (
            f"{file} cannot be read as a tokenizer ({error}); save it anew with this release of tokenizers."
        )
        raise BundleError("unreadable_file", message) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_length(directory: Path | str) -> int:
    """1 + the largest id of tokenizer.json, added tokens included. Ids may have holes; this counts them."""
    file = Path(directory) / "tokenizer.json"
    ids = load_tokenizer(file).get_vocab(with_added_tokens=True).values()
    if not ids:
        raise InputError(f"{file} has no tokens; save the checkpoint's tokenizer again.")
    return 1 + max(ids)


# Each kind of text is one that some port of a tokenizer got wrong: scripts without spaces, composed and
# decomposed accents, emoji of several code points, runs of spaces, control characters.
_CHECK_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "I don't think they're what we'd call \"simple\" - it's 3.14159, 1,000,000 or 2026?",
    "Ça a coûté cher à l'élève; größer, naïve, señor, İstanbul.",
    "e\u0301le\u0300ve, A\u030angstro\u0308m",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "العربية ١٢٣ עברית שלום",
    "हिन्दी में लिखा हुआ वाक्य। ภาษาไทยไม่มีช่องว่าง",
    "今天天气很好，我们去公园吧。日本語の文章です。한국어 문장입니다.",
    "👋 🇩🇪 👩‍👩‍👧‍👦 👍🏽 ❤️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "def f(x):\n    if x:\n\t\treturn  [x ** 2]   # done\n\n\n    return None\r\n",
    "   three spaces before and after   ",
    "\n\n \n\t\n",
    "\u0000\u0001\u001b[0m\u007f\u0085",
    "no\u00a0break, zero\u200bwidth, soft\u00adhyphen, \ufeffmark, \ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!!!!!!!!!________________",
    "https://example.org/a?b=c&d=%20#e <a href='x'>y</a> {\"k\": [1, null]}",
)
_MOST_SPECIAL = 16


def tokenizer_checks(tokenizer: Tokenizer, special_tokens: Sequence[str]) -> list[TokenizedText]:
    """Texts of many kinds with their ids, encoded without added special tokens.

    Each of the first 16 special tokens stands once inside a text; `tokenizer` is not changed.
    """
    if tokenizer.truncation or tokenizer.padding:
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    specials = list(dict.fromkeys(token for token in special_tokens if token))[:_MOST_SPECIAL]
    texts = [*_CHECK_TEXTS, *(f"one{token} two {token}\n" for token in specials)]
    return [TokenizedText(text=text, ids=tuple(_encode(tokenizer, text))) for text in texts]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
