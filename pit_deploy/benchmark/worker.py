"""The child process of a benchmark: holds one artifact in one runtime and times what it is asked to run.

`python -m pit_deploy.benchmark.worker SPEC` with SPEC a JSON object reads one JSON request a line from
standard input and answers each with one line on standard output, `{"error": ...}` where it failed. Whatever a
runtime prints goes to standard error. Timing is in here, so that no pipe is in a figure.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pit_deploy.errors import InputError, PitDeployError

BANDWIDTH_BYTES = 256 * 2**20
"""Read for one figure of bandwidth: larger than the caches of processors that this meets."""
_WAKE_TOKENS = 4


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker holds. `context_length` is the room that peers allocate; a bundle has its own."""

    kind: str
    path: str
    threads: int
    context_length: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Held(Protocol):
    """An artifact in its runtime, with one sequence."""

    runtime: str

    def prefill(self, ids: Sequence[int]) -> int:
        """Append `ids` in one pass and return the greedy token after them."""
        ...

    def steps(self, ids: Sequence[int]) -> None:
        """As many single tokens as `ids` has, each with the choice of the greedy token after it."""
        ...

    def logits(self, id: int) -> np.ndarray:
        """Append one id and return its logits, [vocab_size]."""
        ...

    def reset(self) -> None:
        """Empty the cache."""
        ...


class _OfRuntime:
    """Anything with the runtime protocol."""

    def __init__(self, opened: Any, runtime: str) -> None:
        self._opened, self.runtime = opened, runtime
        self.logits, self.reset = opened.decode, opened.reset

    def prefill(self, ids: Sequence[int]) -> int:
        return int(self._opened.prefill(ids).argmax())

    def steps(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._opened.decode(id).argmax()


class _Genai:
    """onnxruntime-genai's own loop. One call appends the first id; every further one is the greedy token's."""

    def __init__(self, og: Any, path: str, threads: int, context_length: int) -> None:
        config = og.Config(path)
        sizes = json.loads((Path(path) / "genai_config.json").read_text())["model"]
        session = {"session_options": {"intra_op_num_threads": threads}}
        # A sequence that ends would stop the measurement: the end becomes an id that text does not lead to.
        changes = {"decoder": session, "eos_token_id": sizes["vocab_size"] - 1}
        config.overlay(json.dumps({"model": changes}))
        self._model = og.Model(config)
        params = og.GeneratorParams(self._model)
        params.set_search_options(max_length=min(context_length, sizes["context_length"]), do_sample=False)
        self._generator = og.Generator(self._model, params)
        self.runtime = f"onnxruntime-genai {version('onnxruntime-genai')}"

    def prefill(self, ids: Sequence[int]) -> int:
        self._generator.append_tokens(np.array(ids, np.int32))
        self._generator.generate_next_token()  # picks from the logits that are there: no second pass
        return int(self._generator.get_next_tokens()[0])

    def steps(self, ids: Sequence[int]) -> None:
        self._generator.append_tokens(np.array(ids[:1], np.int32))
        for _ in ids:
            if self._generator.is_done():
                raise PitDeployError("onnxruntime-genai ended the sequence before all tokens were decoded.")
            self._generator.generate_next_token()

    def fill(self, ids: Sequence[int]) -> None:
        if ids:
            self._generator.append_tokens(np.array(ids, np.int32))

    def logits(self, id: int) -> np.ndarray:
        self._generator.append_tokens(np.array([id], np.int32))
        return np.asarray(self._generator.get_logits(), np.float32).reshape(-1)

    def reset(self) -> None:
        self._generator.rewind_to(0)


def opener(spec: WorkerSpec) -> Callable[[], Held]:
    """Import what `spec` needs; the function returned does no more than open the artifact."""
    if spec.kind == "bundle":
        return _bundle_opener(spec)
    if spec.kind == "llama.cpp":
        from pit_deploy.benchmark import llama_cpp as llama

        llama.library()
        name = llama.llama_cpp_version()
        return lambda: _OfRuntime(llama.LlamaCpp(spec.path, spec.context_length, spec.threads), name)
    if spec.kind == "genai":
        from pit_deploy.extras import require

        og = require("onnxruntime_genai", "bench")
        return lambda: _Genai(og, spec.path, spec.threads, spec.context_length)
    raise InputError(f"the kind of subject {spec.kind!r} is not known.")


def _bundle_opener(spec: WorkerSpec) -> Callable[[], Held]:
    from pit_deploy.bundle import Bundle
    from pit_deploy.extras import require
    from pit_deploy.runtimes import open_runtime

    name = Bundle.open(spec.path).manifest.runtime
    if name == "onnx":
        runtime = f"onnxruntime {require('onnxruntime', 'onnx').__version__}"
        require("onnx", "onnx")
        import pit_deploy.runtimes.onnxruntime  # noqa: F401 -- an import is not part of opening
    elif name == "executorch":
        from pit_deploy.runtimes.executorch import import_kernels

        import_kernels()
        runtime = f"executorch {version('executorch')}"
    else:
        runtime = name
    return lambda: _OfRuntime(open_runtime(Bundle.open(spec.path), threads=spec.threads), runtime)


class Worker:
    """Answers requests: each method that is no helper is one, with JSON values in and out."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._held: Held | None = None
        self._array: np.ndarray | None = None

    def open(self) -> dict[str, Any]:
        """Open the artifact: seconds, and the process's memory before and after."""
        open_it = opener(self._spec)
        before = memory()
        start = time.perf_counter()
        held = self._held = open_it()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "before": before, "after": memory(), "runtime": held.runtime}

    def wake(self, ids: list[int]) -> dict[str, Any]:
        """Run a little, untimed: threads wake up, caches hold what they will."""
        held = self._reset()
        held.prefill(ids[: 2 * _WAKE_TOKENS])
        held.reset()
        held.steps(ids[:_WAKE_TOKENS])
        return {}

    def first(self, ids: list[int]) -> dict[str, Any]:
        """Seconds of the prompt, without anything run before."""
        assert self._held is not None
        return _timed(partial(self._held.prefill, ids))

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Seconds from the ids to the first token, from an empty cache."""
        self.wake(ids)
        return _timed(partial(self._reset().prefill, ids))

    def decode(self, context: list[int], ids: list[int]) -> dict[str, Any]:
        """Seconds of decoding as many tokens as `ids` has, after `context`."""
        self.wake(ids)
        held = self._reset()
        if context:
            held.fill(context) if isinstance(held, _Genai) else held.prefill(context)
        return _timed(partial(held.steps, ids))

    def memory(self) -> dict[str, Any]:
        """Memory of the process now, and its peak."""
        return memory()

    def bandwidth(self) -> dict[str, Any]:
        """Bytes a second that this number of threads reads, the best of a few passes in two ways."""
        if self._array is None:
            self._array = np.ones(BANDWIDTH_BYTES // 8, np.uint64)
        return {"bytes_per_second": read_bandwidth(self._array, self._spec.threads)}

    def quality(self, directory: str) -> dict[str, Any]:
        """KL and top-1 against the golden record in `directory`, step by step."""
        from pit_deploy.golden import GoldenRecord
        from pit_deploy.parity import compare_with_record

        golden, held, rows = GoldenRecord.load(Path(directory)), self._reset(), []
        for start, prompt in zip(golden.starts, golden.prompts, strict=True):
            held.reset()
            for offset, id in enumerate(prompt.ids):
                logits = held.logits(id)
                if len(logits) != golden.vocab_size:
                    raise InputError(
                        f"the vocabulary has {len(logits)} rows, and the record {golden.vocab_size}."
                    )
                rows.append(compare_with_record(golden, start + offset, logits))
        kl, _, top1 = zip(*rows, strict=True)
        return {"positions": len(rows), "mean_kl": float(np.mean(kl)), "top1": float(np.mean(top1))}

    def _reset(self) -> Held:
        assert self._held is not None
        self._held.reset()
        return self._held


def read_bandwidth(array: np.ndarray, threads: int, passes: int = 3) -> float:
    """Bytes a second at which `threads` threads together read `array` (uint64): the fastest pass.

    A bitwise or and a dot product keep up with memory on different processors; numpy lets go of its lock in both.
    """
    fastest = np.inf
    for view, read in ((array, np.bitwise_or.reduce), (array.view(np.float64), _dot)):
        parts = np.array_split(view, threads)
        for _ in range(passes):
            barrier = threading.Barrier(threads + 1)
            runners = [threading.Thread(target=_after, args=(barrier, read, part)) for part in parts]
            for runner in runners:
                runner.start()
            barrier.wait()
            start = time.perf_counter()
            for runner in runners:
                runner.join()
            fastest = min(fastest, time.perf_counter() - start)
    return array.nbytes / float(fastest)


def _dot(values: np.ndarray) -> Any:
    return values.dot(values)


def _after(barrier: threading.Barrier, read: Callable[[np.ndarray], Any], part: np.ndarray) -> None:
    barrier.wait()
    read(part)


def memory() -> dict[str, int | None]:
    """Resident bytes, the part of them that is not file pages, and the peak.

    Linux tells all three of this program alone; elsewhere only the peak is known, which is then the resident
    figure too.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"resident": peak, "private": None, "peak": peak}
    values = {line.split(":")[0]: line.split(":")[1] for line in lines if line.endswith(" kB")}
    # VmHWM and not ru_maxrss: the latter takes over the peak of the process that started this one.
    found = {key: values.get(name) for key, name in _STATUS.items()}
    return {key: None if text is None else 1024 * int(text.split()[0]) for key, text in found.items()}


_STATUS = {"resident": "VmRSS", "private": "RssAnon", "peak": "VmHWM"}


def _timed(call: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a call, and the seconds of processor time that other processes took meanwhile."""
    busy, own = busy_seconds(), time.process_time()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    own, after = time.process_time() - own, busy_seconds()
    others = None if busy is None or after is None else max(after - busy - own, 0.0)
    return {"seconds": seconds, "others": others}


def busy_seconds() -> float | None:
    """Processor time of all cores spent since the system started; None where it does not tell."""
    try:
        times = [int(t) for t in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks


def serve(spec: WorkerSpec, requests: Any, answers: Any) -> None:
    """Answer every line of `requests` with a line in `answers`, until they end."""
    worker = Worker(spec)
    for line in requests:
        request = json.loads(line)
        name = request.pop("do")
        try:
            answer = getattr(worker, name)(**request)
        except PitDeployError as error:
            answer = {"error": str(error)}
        except Exception as error:  # runtimes raise classes of their own; one line reaches the report
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where they like; answers have a stream of their own
    serve(WorkerSpec(**json.loads(sys.argv[1])), sys.stdin, answers)


if __name__ == "__main__":
    main()
