"""Record generation.json, parity.json and golden/ from a tiny bundle: `python runtime_tests/vectors/make_recorded.py`.

Another machine may give other last digits, so these files are a record: nothing compares them with a second run.
`app_vectors_test.py` replays them through pit_deploy. With `--gates` it writes only the gates of parity.json anew.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.bundle import Bundle
from pit_deploy.chat import render_chat
from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.exporting import export
from pit_deploy.gates import GATES_BY_RUNTIME, NESTED_HEAD_MOST, NESTED_HEAD_ROOM, gate_for
from pit_deploy.generate import Generation, TextStream, generate
from pit_deploy.golden import GoldenRecord, Prompt, record
from pit_deploy.parity import _against_golden, _failures, compare_with_record
from pit_deploy.progress import silent
from pit_deploy.runtimes import open_runtime
from pit_deploy.runtimes.torch import open_plain
from pit_deploy.sampling import SamplingOptions

HERE = Path(__file__).resolve().parent
TOKENIZER = "tokenizers/byte_level.json"
CONTEXT = 48
_ROWS = 432
"""More rows than the tokenizer has ids: those past them are masked in the graph."""
_FIGURES = (
    "passed",
    "positions",
    "max_abs_logit_error",
    "mean_kl",
    "worst_kl",
    "top1",
    "one_pass_against_steps_max_abs",
    "greedy_tokens",
    "greedy_equal",
)


class Recorder:
    """A runtime that keeps what each call was asked and gave."""

    def __init__(self, runtime: Any, context_length: int | None = None) -> None:
        self._runtime = runtime
        self.name, self.vocab_size = runtime.name, runtime.vocab_size
        self.context_length = context_length or runtime.context_length
        self.runs: list[dict[str, Any]] = []
        self._cached: list[int] = []

    @property
    def position(self) -> int:
        return len(self._cached)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        logits: np.ndarray = self._runtime.prefill(list(ids))
        new = [int(i) for i in ids]
        run = {"cached": list(self._cached), "new": new, "logits": encode(logits)}
        if run not in self.runs:
            self.runs.append(run)
        self._cached += new
        return logits

    def decode(self, id: int) -> np.ndarray:
        return self.prefill([id])

    def reset(self) -> None:
        self._runtime.reset()
        self._cached = []


def encode(logits: np.ndarray) -> str:
    """Float32, little-endian, as base64."""
    return base64.b64encode(logits.astype("<f4").tobytes()).decode("ascii")


def write_checkpoint(directory: Path) -> None:
    """A random Llama of two layers, whose logits have no near ties, with the tokenizer of the vectors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=_ROWS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_end_ids()[0],
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0) if parameter.ndim == 2 else parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    shutil.copyfile(HERE / TOKENIZER, directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>", "bos_token": null}\n')
    (directory / "chat_template.jinja").write_text(_template(), encoding="utf-8")


def _template() -> str:
    templates = json.loads((HERE / "templates.json").read_text(encoding="utf-8"))["templates"]
    return str(templates["markers"])


def _end_ids() -> list[int]:
    tokens = json.loads((HERE / TOKENIZER).read_text(encoding="utf-8"))["added_tokens"]
    return [token["id"] for token in tokens if token["content"] == "<|end|>"]


def generations(bundle: Bundle) -> dict[str, Any]:
    """generation.json: chats and texts that a tiny bundle continues."""
    hot = {"temperature": 0.9, "seed": 5}
    filtered = {
        "temperature": 1.2,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "seed": 11,
    }
    question = [{"role": "user", "content": "Hé 🙂?"}]
    cases = [
        _case(bundle, "greedy", ["The token"], {}),
        _case(bundle, "greedy, the context fills", ["The token"], {}, new=40, context=20),
        _case(bundle, "a seed", ["The token"], hot),
        _case(bundle, "another seed", ["The token"], hot | {"seed": 2**64 - 1}),
        _case(bundle, "all options", ["Every token twice"], filtered),
        _case(bundle, "greedy with a penalty", ["aa aa"], {"repetition_penalty": 1.5}),
        _case(bundle, "a second turn", ["The token", " and more"], hot, new=6),
        _case(bundle, "a chat", [render_chat(_template(), question)], {}, new=10, messages=question),
    ]
    first = cases[0]["turns"][0]["expected"]["ids"]
    stop = [first[5], *bundle.manifest.end_ids]
    cases.append(_case(bundle, "a stop id", ["The token"], {}, stop=stop))
    return {"format": 1, "tokenizer": TOKENIZER, "template": "markers", "cases": cases}


def _case(
    bundle: Bundle,
    name: str,
    turns: list[str],
    options: dict[str, Any],
    *,
    new: int = 20,
    context: int | None = None,
    stop: list[int] | None = None,
    messages: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    runtime = Recorder(open_runtime(bundle, threads=1), context)
    chosen = SamplingOptions(**options)
    stop_ids = list(bundle.manifest.end_ids) if stop is None else stop
    history: list[int] = []
    pending: list[int] = []
    done = []
    for text in turns:
        ids = [*pending, *bundle.tokenizer.encode(text, add_special_tokens=False).ids]
        made, pieces = _generate(bundle, runtime, ids, new, chosen, stop_ids, history)
        history += [*ids, *made.ids]
        pending = list(made.pending_ids)
        expected = {
            "ids": list(made.ids),
            "finish_reason": made.finish_reason,
            "stop_id": made.stop_id,
            "pending_ids": pending,
            "position": runtime.position,
            "pieces": pieces,
        }
        done.append({"text": text, "prompt_ids": ids, "expected": expected})
    return {
        "name": name,
        "context_length": runtime.context_length,
        "vocab_size": runtime.vocab_size,
        "max_new_tokens": new,
        "stop_ids": stop_ids,
        "options": {**asdict(chosen), "seed": str(chosen.seed)},
        "messages": messages,
        "turns": done,
        "runs": runtime.runs,
    }


def _generate(
    bundle: Bundle,
    runtime: Recorder,
    ids: list[int],
    new: int,
    options: SamplingOptions,
    stop_ids: list[int],
    history: list[int],
) -> tuple[Generation, list[str]]:
    stream = TextStream(bundle.tokenizer)
    pieces: list[str] = []

    def on_token(id: int) -> None:
        pieces.append(stream.push(id))

    made = generate(
        runtime,
        ids,
        max_new_tokens=new,
        options=options,
        stop_ids=stop_ids,
        on_token=on_token,
        history=history,
    )
    return made, [*pieces, stream.finish()]


def parity(golden: GoldenRecord, bundles: dict[str, Bundle]) -> dict[str, Any]:
    """parity.json: two artifacts against the record, and single positions that were tampered with."""
    reports = []
    artifacts: dict[str, list[dict[str, Any]]] = {}
    for name, judged_as in (("fp32", "fp32"), ("int8", "int8"), ("int8", "fp32")):
        recorder = Recorder(open_runtime(bundles[name], threads=1))
        gate = gate_for("onnx", judged_as, judged_as)
        report = _against_golden(bundles[name], recorder, golden, gate, silent)
        report.failures = _failures(report)
        figures = {key: report.to_dict()[key] for key in _FIGURES}
        reports.append(
            {
                "name": f"{name}, judged as {judged_as}",
                "artifact": name,
                "runtime": "onnx",
                "weights": judged_as,
                "tables": judged_as,
                "expected": figures | {"failures": len(report.failures)},
            }
        )
        artifacts[name] = recorder.runs
    return {
        "format": 1,
        "golden": "golden",
        "context_length": CONTEXT,
        "end_ids": _end_ids(),
        "gates": gates(),
        "nested_head_room": [NESTED_HEAD_ROOM, NESTED_HEAD_MOST],
        "artifacts": artifacts,
        "reports": reports,
        "positions": _positions(golden, artifacts["fp32"]),
    }


def gates() -> list[dict[str, Any]]:
    """All of pit_deploy/gates.py."""
    return [
        {"runtime": runtime, "precision": precision, **asdict(gate)}
        for runtime, by_precision in GATES_BY_RUNTIME.items()
        for precision, gate in by_precision.items()
    ]


def _positions(golden: GoldenRecord, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Single comparisons: as recorded, scaled, the best two exchanged, tied, one far off, not a number."""
    rng = np.random.default_rng(4)
    prompt = golden.prompts[0].ids
    run = next(r for r in runs if r["cached"] == prompt[:1] and r["new"] == prompt[1:2])
    logits = np.frombuffer(base64.b64decode(run["logits"]), "<f4")
    best, second = golden.top_ids[1, :2]

    def change(name: str, make: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        changed = logits.copy()
        made = make(changed)
        changed = changed if made is None else np.asarray(made, np.float32)
        kl, error, agrees = compare_with_record(golden, 1, changed)
        expected = {"kl": _number(kl), "max_abs": _number(error), "top1": bool(agrees)}
        return {"name": name, "position": 1, "logits": encode(changed), "expected": expected}

    def exchange(x: np.ndarray) -> None:
        x[[best, second]] = x[[second, best]]

    def tie(x: np.ndarray) -> None:
        x[best] = x[second] - 1e-4

    def far(x: np.ndarray) -> None:
        x[int(golden.sampled_ids[3])] += 25

    def not_a_number(x: np.ndarray) -> None:
        x[second] = np.nan

    return [
        change("as it is", lambda x: None),
        change("all shifted by one", lambda x: x + 1),
        change("scaled", lambda x: x * 1.05),
        change("noise", lambda x: x + 0.1 * rng.standard_normal(x.size)),
        change("the best two exchanged", exchange),
        change("the second is the best", tie),
        change("one far off", far),
        change("flat", lambda x: np.zeros_like(x)),
        change("not a number", not_a_number),
    ]


def _number(value: float) -> float | str:
    return float(value) if np.isfinite(value) else "NaN" if np.isnan(value) else "Infinity"


def main() -> None:
    if sys.argv[1:] == ["--gates"]:
        document = json.loads((HERE / "parity.json").read_text(encoding="utf-8"))
        room = [NESTED_HEAD_ROOM, NESTED_HEAD_MOST]
        _write("parity.json", document | {"gates": gates(), "nested_head_room": room})
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        checkpoint = root / "tiny"
        checkpoint.mkdir()
        write_checkpoint(checkpoint)
        bundles = {}
        for precision in ("fp32", "int8"):
            export(checkpoint, root / precision, weights=precision, tables=precision, layout="shared")
            bundles[precision] = Bundle.open(root / precision, check_hashes=True)
        reference = open_plain(open_checkpoint(checkpoint))
        tokenizer = bundles["fp32"].tokenizer
        prompts = []
        for text in ("The token", "x = 3.14", "日本"):
            prompts.append(Prompt(text, tokenizer.encode(text, add_special_tokens=False).ids))
        length = bundles["fp32"].manifest.tokenizer_length
        golden = record(reference, prompts, tokenizer_length=length, end_ids=_end_ids())
        golden.greedy_ids, golden.greedy_margins = golden.greedy_ids[:12], golden.greedy_margins[:12]
        golden.how = {"runtime": golden.how["runtime"], "dtype": "float32"}
        (HERE / "golden").mkdir(exist_ok=True)
        golden.save(HERE / "golden")
        (HERE / "golden" / "golden.safetensors").chmod(0o644)
        _write("generation.json", generations(bundles["fp32"]))
        _write("parity.json", parity(golden, bundles))


def _write(name: str, value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    (HERE / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
