from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from pit_deploy.bundle import (
    Bundle,
    carry_files,
    load_tokenizer,
    sha256,
    tokenizer_checks,
    tokenizer_length,
    write_manifest,
)
from pit_deploy.errors import InputError
from pit_deploy.manifest import BundleError, ManifestBody, TokenizedText

ROOT = Path(__file__).parents[1]
GOOD = json.loads((ROOT / "runtime_tests/vectors/manifests/good_onnx.json").read_text(encoding="utf-8"))
SPECIALS = ["<s>", "</s>", "<|im_start|>"]


def byte_tokenizer() -> Tokenizer:
    """256 bytes as ids 0..255, then the special tokens 256, 257, 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


def body(**changes: Any) -> ManifestBody:
    data: dict[str, Any] = {k: v for k, v in GOOD.items() if k != "files"}
    data |= {"vocab_size": 300, "tokenizer_length": 259, "golden": None, "end_ids": [257, 258], "bos_id": 256}
    data["tokenizer_checks"] = [c.model_dump() for c in tokenizer_checks(byte_tokenizer(), SPECIALS)]
    return ManifestBody.model_validate(data | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small bundle with an .mlpackage beside the graph and a name beyond ASCII."""
    folder = tmp_path / "tiny"
    (folder / "model.mlpackage/Data").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "model.onnx_data").write_bytes(bytes(range(256)) * 16)
    (folder / "model.mlpackage/Data/weight.bin").write_bytes(b"weights")
    (folder / "Größe 模型 👋.txt").write_text("unicode")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 258], "top_p": 0.9}')
    write_manifest(folder, body())
    return folder


def refusal(folder: Path | str, **options: bool) -> BundleError:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return caught.value


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), encoding="utf-8")


def test_open_a_written_bundle(folder: Path) -> None:
    bundle = Bundle.open(folder, check_hashes=True)
    assert [entry.path for entry in bundle.manifest.files] == [
        "Größe 模型 👋.txt",
        "generation_config.json",
        "model.mlpackage/Data/weight.bin",
        "model.onnx",
        "model.onnx_data",
        "tokenizer.json",
    ]
    sizes = {entry.path: entry.size for entry in bundle.manifest.files}
    assert sizes["model.onnx_data"] == 4096 and sizes["model.onnx"] == 5
    digests = {entry.path: entry.sha256 for entry in bundle.manifest.files}
    assert digests["model.onnx"] == hashlib.sha256(b"graph").hexdigest()
    assert bundle.model_path == folder / "model.onnx"
    assert bundle.file("model.mlpackage").is_dir()
    assert bundle.file("Größe 模型 👋.txt").read_text() == "unicode"
    assert bundle.total_bytes == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert bundle.unlisted == []
    assert bundle.generation_config == {"eos_token_id": [257, 258], "top_p": 0.9}
    assert bundle.config == {} and bundle.tokenizer_config == {}
    bundle.check_tokenizer()
    with pytest.raises(BundleError, match=r"no file 'nothing\.bin'"):
        bundle.file("nothing.bin")


def test_writing_leaves_one_manifest_and_can_be_repeated(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    write_manifest(folder, body())
    assert (folder / "manifest.json").read_bytes() == before
    assert not [p for p in folder.iterdir() if "partial" in p.name]


def test_writing_refuses_what_reading_would(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(BundleError, match="model_file") as caught:
        write_manifest(folder, body(model_file="model.pte"))
    assert caught.value.kind == "unlisted_file"
    (folder / "back\\slash").write_bytes(b"")
    with pytest.raises(BundleError, match=r"files\.\d+\.path") as caught:
        write_manifest(folder, body())
    assert caught.value.kind == "path_escape"
    (folder / "back\\slash").unlink()
    (folder / "link").symlink_to("model.onnx")
    with pytest.raises(BundleError, match="is a link") as caught:
        write_manifest(folder, body())
    assert (folder / "manifest.json").read_bytes() == before


def test_unlisted_files_are_returned(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "more/deep").mkdir(parents=True)
    (folder / "more/deep/ü.bin").write_bytes(b"")
    (folder / "shortcut").symlink_to("more")
    assert Bundle.open(folder).unlisted == ["more/deep/ü.bin", "notes.txt", "shortcut"]


@pytest.mark.parametrize("cut", [-1, 1])
def test_one_byte_less_or_more(folder: Path, cut: int) -> None:
    file = folder / "model.onnx_data"
    data = file.read_bytes()
    file.write_bytes(data[:-1] if cut < 0 else data + b"x")
    error = refusal(folder)
    assert error.kind == "wrong_size"
    assert (
        "model.onnx_data" in str(error) and f"{4096 + cut} bytes" in str(error) and "says 4096" in str(error)
    )


def test_one_flipped_byte(folder: Path) -> None:
    file = folder / "model.onnx_data"
    data = bytearray(file.read_bytes())
    right = hashlib.sha256(data).hexdigest()
    data[2048] ^= 1
    file.write_bytes(data)
    bundle = Bundle.open(folder)  # sizes alone don't show it
    with pytest.raises(BundleError):
        bundle.check_hashes()
    error = refusal(folder, check_hashes=True)
    assert error.kind == "wrong_hash"
    assert right[:12] in str(error) and hashlib.sha256(data).hexdigest()[:12] in str(error)


def test_sizes_are_checked_before_a_byte_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").write_bytes(b"")
    monkeypatch.setattr("pit_deploy.bundle.sha256", lambda path: pytest.fail("read before the sizes agreed"))
    assert refusal(folder, check_hashes=True).kind == "wrong_size"


def test_missing_and_misplaced_files(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    error = refusal(folder)
    assert error.kind == "missing_file" and "model.onnx is missing" in str(error)
    (folder / "model.onnx").mkdir()
    error = refusal(folder)
    assert error.kind == "missing_file" and "is a folder" in str(error)
    (folder / "model.onnx").rmdir()
    os.mkfifo(folder / "model.onnx")  # opening it would wait for ever
    error = refusal(folder)
    assert error.kind == "missing_file" and "not a plain file" in str(error)


def test_a_listed_file_below_a_file(folder: Path) -> None:
    edit(folder, files=[{"path": "model.onnx/x", "size": 0, "sha256": "0" * 64}])
    assert refusal(folder).kind == "missing_file"


def test_links_out(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (folder / "model.onnx").rename(outside)
    (folder / "model.onnx").symlink_to(outside)
    error = refusal(folder)
    assert error.kind == "path_escape" and "cp -rL" in str(error)
    outside.write_bytes(b"longer than declared")
    assert refusal(folder).kind == "path_escape"  # the size of a file outside is not told
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").symlink_to("../nothing")
    assert refusal(folder).kind == "path_escape"  # whether the target exists is not told


def test_a_folder_link_out(folder: Path, tmp_path: Path) -> None:
    (folder / "model.mlpackage/Data").rename(tmp_path / "Data")
    (folder / "model.mlpackage/Data").symlink_to(tmp_path / "Data")
    assert refusal(folder).kind == "path_escape"


def test_an_unlisted_link_out_is_refused_too(folder: Path) -> None:
    (folder / "extra").symlink_to("/etc")
    assert refusal(folder).kind == "path_escape"


def test_a_manifest_that_is_a_link_out(folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").rename(tmp_path / "m.json")
    (folder / "manifest.json").symlink_to(tmp_path / "m.json")
    assert refusal(folder).kind == "path_escape"
    (tmp_path / "m.json").write_text("not JSON")
    assert refusal(folder).kind == "path_escape"  # refused before it is read


def test_links_in_circles(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").symlink_to("model.onnx")
    assert refusal(folder).kind == "unreadable_file"


def test_links_inside_and_a_linked_bundle(folder: Path, tmp_path: Path) -> None:
    (folder / "blobs").mkdir()
    (folder / "model.onnx").rename(folder / "blobs/x")
    (folder / "model.onnx").symlink_to("blobs/x")
    (tmp_path / "alias").symlink_to(folder)
    bundle = Bundle.open(tmp_path / "alias", check_hashes=True)
    assert bundle.unlisted == ["blobs/x"] and bundle.path == tmp_path / "alias"


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "a/../model.onnx"])
def test_paths_that_leave(folder: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "outside").write_bytes(b"")
    edit(folder, files=[{"path": path, "size": 0, "sha256": "0" * 64}])
    error = refusal(folder)
    assert error.kind == "path_escape" and path in str(error)


def test_versions(folder: Path) -> None:
    edit(folder, format_version=3, novelty=True)
    error = refusal(folder)
    assert error.kind == "newer_version"
    assert "version 3" in str(error) and "version 1" in str(error) and "update pit-deploy" in str(error)
    edit(folder, format_version=0)
    assert refusal(folder).kind == "older_version"


def test_not_a_bundle(folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in str(refusal(tmp_path / "nowhere"))
    assert "is a file" in str(refusal(folder / "model.onnx"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds nothing" in str(refusal(empty))
    for i in range(7):
        (empty / f"{i}.txt").touch()
    error = refusal(empty)
    assert error.kind == "not_a_bundle" and "'0.txt'" in str(error) and "and 2 more" in str(error)
    (folder / "manifest.json").unlink()
    (folder / "config.json").write_text("{}")
    (folder / "golden.safetensors").touch()
    assert "has no manifest.json" in str(refusal(folder))  # an export that has not ended is no checkpoint


def test_a_checkpoint_is_told_from_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    error = refusal(tmp_path)
    assert error.kind == "not_a_bundle"
    assert "is a checkpoint (config.json, model.safetensors)" in str(error)
    assert f"export it first: pit-deploy export {tmp_path} OUT" in str(error)


@pytest.mark.parametrize(
    ("text", "kind"),
    [(b"", "bad_json"), (b"[]", "not_a_bundle"), (b"{}", "not_a_bundle"), (b"{", "bad_json")],
)
def test_damaged_manifests(folder: Path, text: bytes, kind: str) -> None:
    (folder / "manifest.json").write_bytes(text)
    assert refusal(folder).kind == kind


def test_a_huge_manifest_is_not_read(folder: Path) -> None:
    with (folder / "manifest.json").open("wb") as stream:
        stream.truncate(2**40)  # sparse: takes no room
    error = refusal(folder)
    assert error.kind == "wrong_size" and str(2**40) in str(error)


def test_a_manifest_that_is_a_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    assert refusal(folder).kind == "unreadable_file"


def test_huge_declared_sizes_take_no_memory(folder: Path) -> None:
    edit(folder, files=[{"path": "model.onnx", "size": 2**53 - 1, "sha256": "0" * 64}])
    error = refusal(folder)
    assert error.kind == "wrong_size" and str(2**53 - 1) in str(error)


def test_damaged_side_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 1,}')
    (folder / "tokenizer.json").write_text('{"model": 3}')
    (folder / "config.json").write_text("[]")
    write_manifest(folder, body())
    bundle = Bundle.open(folder)
    with pytest.raises(BundleError, match=r"generation_config\.json is not valid JSON at line 1"):
        _ = bundle.generation_config
    with pytest.raises(BundleError, match=r"config\.json is not a JSON object"):
        _ = bundle.config
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        _ = bundle.tokenizer


def test_another_tokenizer_is_noticed(folder: Path) -> None:
    other = byte_tokenizer()
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    other.save(str(folder / "tokenizer.json"))
    write_manifest(folder, body(tokenizer_checks=[TokenizedText(text="aé", ids=(64, 127, 103)).model_dump()]))
    bundle = Bundle.open(folder)
    with pytest.raises(BundleError) as caught:
        bundle.check_tokenizer()
    assert caught.value.kind == "tokenizer_mismatch"
    got = other.encode("aé", add_special_tokens=False).ids
    assert (
        "'aé'" in str(caught.value)
        and str(got) in str(caught.value)
        and "[64, 127, 103]" in str(caught.value)
    )


def test_check_texts(folder: Path) -> None:
    checks = tokenizer_checks(byte_tokenizer(), [*SPECIALS, "<s>", ""])
    by_text = {check.text: check.ids for check in checks}
    assert len(by_text) == len(checks)
    # In a tokenizer of bytes the number of ids is that of UTF-8 bytes, and no <s> is put in front.
    for text, ids in by_text.items():
        if not any(token in text for token in SPECIALS):
            assert len(ids) == len(text.encode()), text
    assert by_text["one</s> two </s>\n"].count(257) == 2
    assert len(checks) == len(tokenizer_checks(byte_tokenizer(), [])) + 3
    kinds = {
        "control": "\x00",
        "emoji": "👩‍👩",
        "code": "    if",
        "chinese": "今天",
        "arabic": "العربية",
        "hindi": "हिन्दी",
    }
    for kind, part in kinds.items():
        assert any(part in text for text in by_text), kind


def test_cutting_and_padding_of_a_tokenizer_file_are_turned_off(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    checks = tokenizer_checks(tokenizer, SPECIALS)
    assert checks == tokenizer_checks(byte_tokenizer(), SPECIALS)
    assert tokenizer.truncation is not None and tokenizer.padding is not None  # the caller's is left alone
    tokenizer.save(str(folder / "tokenizer.json"))
    write_manifest(folder, body())
    bundle = Bundle.open(folder)
    bundle.check_tokenizer()
    assert len(bundle.tokenizer.encode("x" * 50, add_special_tokens=False).ids) == 50


def test_tokenizer_length(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_length(tmp_path) == 259
    # Ids with a hole: the length is that of the table's rows that can be used, not the count of tokens.
    Tokenizer(models.WordLevel({"a": 0, "b": 41}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_length(tmp_path) == 42
    Tokenizer(models.WordLevel({}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="has no tokens"):
        tokenizer_length(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="is missing"):
        tokenizer_length(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(InputError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_carried_files_are_the_same_bytes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    # Spacing, unknown fields, their order, spellings of numbers: parsing and writing would change them.
    config = b'{ "eos_token_id":[1, 106],\r\n"top_p":0.950,"_from":null,"x-unknown":{"b":1,"a":2},"pad":1e0 }'
    contents = {
        "generation_config.json": config,
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"chat_template": "{{ x }}"}\n',
        "special_tokens_map.json": b"{}",
        "added_tokens.json": b"{}",
        "chat_template.jinja": b"{% for m in messages %}\r\n\xf0\x9f\x91\x8b{% endfor %}",
        "vocab.json": b"{}",
        "merges.txt": b"#version\n",
        "tokenizer.model": b"\x00\x01\xff",
        "LICENSE": b"terms",
        "License-more.txt": b"terms",
        "NOTICE.md": b"notice",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    }
    left = {"config.json": b"{}", "model.safetensors": b"", "README.md": b"", "unlicensed.txt": b""}
    for name, data in (contents | left).items():
        (source / name).write_bytes(data)
    names = carry_files(source, target)
    assert sorted(names) == sorted(contents)
    found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == contents


def test_a_slow_tokenizer_is_refused_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(InputError, match=r"has no tokenizer\.json.*save_pretrained"):
        carry_files(tmp_path, tmp_path / "target")
    assert not list((tmp_path / "target").iterdir())


def test_sha256_of_a_known_text(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")  # the example of FIPS 180-2
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
