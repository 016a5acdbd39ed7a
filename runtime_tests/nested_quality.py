"""What a nested head changes: the full head of the same rounded table beside it, in one graph.

python -m runtime_tests.nested_quality BUNDLE [FILE.json]
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from pit_deploy.bundle import Bundle, load_tokenizer
from pit_deploy.chat import render_directory
from pit_deploy.quantize.calibration import evaluation_text
from pit_deploy.runtimes.onnxruntime import OnnxRuntime, probe_model

FULL = "full_logits"
WINDOW, STEP = 256, 32
RESERVED = "pit.table.rest"
CODE_MODULES = ("argparse", "csv", "inspect", "shutil")
LANGUAGES = Path(__file__).with_name("languages.txt")
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain what a hash table is.",
    "How do I boil an egg?",
    "Give me three facts about whales.",
    "What does the word 'ubiquitous' mean?",
    "Write a Python function that reverses a list.",
    "Who wrote Romeo and Juliet?",
    "Summarise the water cycle in two sentences.",
    "What is the difference between a virus and a bacterium?",
    "Suggest a name for a cat.",
    "How far away is the moon?",
    "Translate 'good morning' into Spanish.",
    "What should I pack for a week in the mountains?",
    "Why is the sky blue?",
    "List five uses of baking soda.",
    "What is 17 times 6?",
    "Describe a sunset to someone who has never seen one.",
    "How does a bicycle stay upright?",
    "Tell me a joke.",
)


def with_full_logits(model_path: Path, *, all_positions: bool = True) -> bytes:
    """The graph with a further output: the full head's logits, from both blocks of the table.

    The rest meets float activations, as in the nested head: what differs is what the shortlist leaves out, and not
    how near ties are rounded.
    """
    model = (
        onnx.load_from_string(probe_model(model_path, []))
        if all_positions
        else onnx.load(model_path, load_external_data=False)
    )
    graph = model.graph
    leading = next(
        n for n in graph.node if n.op_type == "MatMulNBits" and n.input[1].endswith("leading.codes")
    )
    gather = next(
        n for n in graph.node if n.op_type == "GatherBlockQuantized" and n.input[0] == f"{RESERVED}.code_rows"
    )
    rows = next(t for t in graph.initializer if t.name == f"{RESERVED}.code_rows")
    attributes = {a.name: a.i for a in leading.attribute}
    columns = rows.dims[1] * 8 // attributes["bits"]
    codes = onnx.TensorProto()
    codes.CopyFrom(rows)
    codes.name = f"{RESERVED}.codes"
    del codes.dims[:]
    blocks = columns // attributes["block_size"]
    codes.dims.extend([rows.dims[0], blocks, rows.dims[1] // blocks])
    graph.initializer.append(codes)
    graph.node.extend(
        [
            helper.make_node(
                "MatMulNBits",
                ["pit.table.state.rest", codes.name, *gather.input[2:]],
                ["full.rest"],
                domain="com.microsoft",
                **{**attributes, "K": columns, "accuracy_level": 0},
            ),
            helper.make_node("Add", [leading.output[0], "full.rest"], [FULL]),
        ]
    )
    graph.output.append(helper.make_tensor_value_info(FULL, TensorProto.FLOAT, None))
    serialized: bytes = model.SerializeToString()
    return serialized


class BothHeads:
    """Runs windows of ids and gives the logits of both heads, `STEP` positions at a time."""

    def __init__(self, bundle: Bundle) -> None:
        self._runtime = OnnxRuntime(bundle.model_path, bundle.manifest.context_length, threads=1)
        self._session = self._runtime._open(with_full_logits(bundle.model_path))
        self._states = [v for v in self._session.get_inputs() if v.name.startswith("past_key_values")]

    def __call__(self, ids: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        past = {v.name: np.zeros([1, v.shape[1], 0, v.shape[3]], np.float32) for v in self._states}
        presents = [name.replace("past_key_values", "present") for name in past]
        for start in range(0, len(ids), STEP):
            tokens = np.array([ids[start : start + STEP]], np.int64)
            mask = np.ones([1, start + tokens.shape[1]], np.int64)
            feeds = {"input_ids": tokens, "attention_mask": mask, **past}
            nested, full, *values = self._session.run(["logits", FULL, *presents], feeds)
            past = dict(zip(past, values, strict=True))
            yield nested[0], full[0]


def texts(bundle: Bundle) -> dict[str, list[list[int]]]:
    """Windows of ids by kind of text; chat is questions with the answers that the bundle gives."""
    tokenizer = load_tokenizer(bundle.path / "tokenizer.json")
    code = "".join(
        Path(importlib.import_module(name).__file__ or "").read_text(encoding="utf-8")[4000:10000]
        for name in CODE_MODULES
    )
    found = {
        "prose": tokenizer.encode(evaluation_text()).ids,
        "code": tokenizer.encode(code).ids,
        "languages": tokenizer.encode(LANGUAGES.read_text(encoding="utf-8")).ids,
    }
    windows = {
        kind: [ids[n : n + WINDOW] for n in range(0, len(ids), WINDOW)][:7] for kind, ids in found.items()
    }
    runtime = OnnxRuntime(bundle.model_path, bundle.manifest.context_length, threads=1)
    windows["chat"] = [prompt + greedy(runtime, prompt, 40) for prompt in chat_prompts(bundle)]
    return windows


def chat_prompts(bundle: Bundle) -> list[list[int]]:
    """The questions in the model's chat form."""
    tokenizer = load_tokenizer(bundle.path / "tokenizer.json")
    return [
        tokenizer.encode(
            render_directory(bundle.path, [{"role": "user", "content": question}]), add_special_tokens=False
        ).ids
        for question in QUESTIONS
    ]


def greedy(runtime: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """The ids that the runtime finds most likely, one after another; an end id does not end it."""
    runtime.reset()
    logits, ids = runtime.prefill(prompt), []
    for _ in range(tokens):
        ids.append(int(logits.argmax()))
        logits = runtime.decode(ids[-1])
    return ids


def quality(bundle: Bundle) -> dict[str, Any]:
    """Misses, KL and total variation by kind of text and by how often the model expects the true token."""
    heads = BothHeads(bundle)
    rows: list[dict[str, Any]] = []
    known = bundle.manifest.tokenizer_length
    counts: dict[int, int] = {}
    kinds = texts(bundle)
    for windows in kinds.values():
        for window in windows:
            for id in window:
                counts[id] = counts.get(id, 0) + 1
    for kind, windows in kinds.items():
        for window in windows:
            at = 0
            for nested, full in heads(window):
                p, q = (log_softmax(x[:, :known].astype(np.float64)) for x in (full, nested))
                for n in range(len(p)):
                    following = window[at + 1] if at + 1 < len(window) else None
                    rows.append(
                        {
                            "kind": kind,
                            "seen": None if following is None else counts[following],
                            "same": bool(p[n].argmax() == q[n].argmax()),
                            "kl": float((np.exp(p[n]) * (p[n] - q[n])).sum()),
                            "variation": float(np.abs(np.exp(p[n]) - np.exp(q[n])).sum() / 2),
                        }
                    )
                    at += 1
    groups = {kind: [r for r in rows if r["kind"] == kind] for kind in kinds}
    groups["all"] = rows
    groups["true token once in the text"] = [r for r in rows if r["seen"] == 1]
    groups["true token 2 to 20 times"] = [r for r in rows if r["seen"] and 2 <= r["seen"] <= 20]
    groups["true token more often"] = [r for r in rows if r["seen"] and r["seen"] > 20]
    return {name: summary(group) for name, group in groups.items()}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "positions": len(rows),
        "same_top1": float(np.mean([row["same"] for row in rows])),
        "kl": float(np.mean([row["kl"] for row in rows])),
        "median_kl": float(np.median([row["kl"] for row in rows])),
        "variation": float(np.mean([row["variation"] for row in rows])),
    }


def log_softmax(x: np.ndarray) -> np.ndarray:
    top = x.max(-1, keepdims=True)
    result: np.ndarray = x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))
    return result


if __name__ == "__main__":
    result = quality(Bundle.open(sys.argv[1]))
    for name, figures in result.items():
        print(f"{name:32}", "  ".join(f"{key} {value:.5g}" for key, value in figures.items()))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(result, indent=1) + "\n")
