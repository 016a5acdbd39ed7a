"""A stand-in for the native runner, in Python: the same requests and answers, and logits that a hash makes.

What it gives depends on all ids in the cache, so that a cache that was not restored shows. `FAKE_RUNNER_DIES` names
a request during which it ends with a status (`append:139`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


class Refused(Exception):
    """A request that fails; `kind` is the runner's word for why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FakeRunner:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = {}
        self.ids: list[int] = []

    def answer(self, do: str, values: dict[str, Any]) -> tuple[dict[str, Any], Arrays]:
        if do == "hello":
            machine = {"system": "Linux 5.0", "architecture": "aarch64", "cores": 8}
            return {
                "runner": "1",
                "onnxruntime": "0.0",
                "machine": machine | {"memory_bytes": 1, "load_average": 0},
            }, {}
        if do == "check":
            return self.check(values.get("hashes", False))
        if do == "open":
            self.check(False)
            return {"seconds": 0.5, "before": self.memory(), "after": self.memory()}, {}
        if do in ("drop", "read", "share", "memory", "bandwidth"):
            return {"dropped": True, "share": 1.0, "bytes_per_second": 1e9, **self.memory()}, {}
        if do == "reset":
            self.ids = []
            return {}, {}
        if do == "append":
            self.ids += values["ids"]
            return {"position": len(self.ids)}, {"logits": self.logits()[None]}
        if do == "probe":
            rows = []
            for n in range(len(values["ids"])):
                self.ids = values["ids"][: n + 1]
                rows.append(self.logits())
            self.ids = []
            width = self.manifest["architecture"]["hidden_size"]
            states = np.zeros([len(rows), width], np.float32)
            return {}, {
                name: np.stack(rows) if name == "logits" else states for name in sorted(values["outputs"])
            }
        if do in ("first", "prefill", "decode"):
            return {"seconds": 0.25, "others": 0.0, "token": 1}, {}
        raise Refused("bad_request", f"the request '{do}' is not known")

    def check(self, hashes: bool) -> tuple[dict[str, Any], Arrays]:
        self.manifest = json.loads((self.folder / "manifest.json").read_text())
        for entry in self.manifest["files"]:
            file = self.folder / entry["path"]
            if not file.is_file() or file.stat().st_size != entry["size"]:
                raise Refused("wrong_size", f"{file} is not whole")
            if hashes and hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
                raise Refused("wrong_hash", f"{file} has changed")
        return {"files": len(self.manifest["files"])}, {}

    def logits(self) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(json.dumps(self.ids).encode()).digest()[:4], "little")
        return np.random.default_rng(seed).standard_normal(self.manifest["vocab_size"]).astype(np.float32)

    def memory(self) -> dict[str, int]:
        return {"resident": 1000, "private": 500, "peak": 2000}


def main() -> None:
    runner = FakeRunner(Path(sys.argv[1]))
    dies, _, status = os.environ.get("FAKE_RUNNER_DIES", "").partition(":")
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        if do == dies:
            print("the last words", file=sys.stderr)
            os._exit(int(status))
        try:
            head, arrays = runner.answer(do, request)
            head["ok"] = True
        except Refused as error:
            head, arrays = {"ok": False, "kind": error.kind, "error": str(error)}, {}
        head["arrays"] = {name: ["<f4", list(value.shape)] for name, value in arrays.items()}
        sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
        for value in arrays.values():
            sys.stdout.buffer.write(value.tobytes())
        sys.stdout.flush()


if __name__ == "__main__":
    main()
