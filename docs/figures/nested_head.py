"""Time the nested head on models of random weights, and draw docs/figures/nested_head_*.svg.

python docs/figures/nested_head.py build FOLDER     writes the graphs (some GB)
python docs/figures/nested_head.py time FOLDER      runs them, one thread, into nested_head_times.json
python docs/figures/nested_head.py choice SRC FILE  miss rates and KL of a PIT checkpoint on held-out text
python docs/figures/nested_head.py                  draws both figures from the JSON files beside this script
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
CONTEXT, BLOCK, TOKENS, ROUNDS = 256, 64, 48, 5

SHAPES: dict[str, dict[str, Any]] = {
    "Gemma-3-270M": dict(
        model_type="gemma3_text",
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "Qwen3-0.6B": dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
}
HEADS = {"Gemma-3-270M": (128, 512), "Qwen3-0.6B": (128, 512)}
VOCABULARIES = (32768, 65536, 131072, 262144)


def random_model(config: dict[str, Any]) -> Any:
    """A folded model of layout `shared`: gains of 1 and matrices that `random_plan` replaces."""
    from pit_deploy.architecture import DecoderConfig
    from pit_deploy.folding import FoldedModel, SharedTable

    shapes, size = DecoderConfig.from_hf(config).backbone_shapes(), config["hidden_size"]

    class RandomModel(FoldedModel):
        def tensor_names(self) -> list[str]:
            return sorted(shapes)

        def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
            return np.broadcast_to(dtype(1), shapes[name])

    table = np.broadcast_to(np.float32(0), (config["vocab_size"], size))
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    source: Any = SimpleNamespace(name="random", label="random", tensors=tensors)
    return RandomModel(source, config, SharedTable(table, np.eye(size), np.eye(size)), [])


def random_plan(head: tuple[int, int] | None) -> Any:
    """Random codes instead of rounded weights: an int4 body with zero points and an int8 table."""
    from pit_deploy.quantize.nested import NestedHead
    from pit_deploy.quantize.plan import QuantizationPlan
    from pit_deploy.quantize.tensor import QuantizedTensor

    rng = np.random.default_rng(0)

    class RandomPlan(QuantizationPlan):
        def encode(self, name: str, weight: np.ndarray, role: str) -> QuantizedTensor:
            rows, columns = weight.shape
            bits = 8 if role == "tables" else 4
            shape = (rows, columns // BLOCK)
            codes = rng.integers(0, 1 << bits, weight.shape, dtype=np.uint8)
            scales = np.full(shape, 0.5 / (columns**0.5 * (1 << (bits - 1))), np.float32)
            points = np.full(shape, 8, np.uint8) if bits == 4 else None
            return QuantizedTensor(codes, scales, points, bits, BLOCK, columns)

    return RandomPlan("int4", "int8", BLOCK, nested=None if head is None else NestedHead(*head))


def write(config: dict[str, Any], head: tuple[int, int] | None, directory: Path) -> None:
    """A graph; `head` is (columns, shortlist), None the full head."""
    from pit_deploy.architecture import DecoderConfig
    from pit_deploy.export_options import ExportOptions
    from pit_deploy.progress import silent
    from pit_export.onnx import OnnxExporter

    directory.mkdir(parents=True, exist_ok=True)
    options = ExportOptions(context=CONTEXT, weights="int4", tables="int8", block_size=BLOCK)
    decoder, rows = DecoderConfig.from_hf(config), config["vocab_size"]
    OnnxExporter().write(random_model(config), decoder, options, random_plan(head), rows, directory, silent)


def settings() -> dict[str, tuple[dict[str, Any], tuple[int, int] | None]]:
    """Name to config and head: both shapes, and one of them by vocabulary size."""
    found: dict[str, tuple[dict[str, Any], tuple[int, int] | None]] = {}
    for name, config in SHAPES.items():
        for head in (None, HEADS[name]):
            found[f"{name} {'full' if head is None else 'nested'}"] = (config, head)
    small = SHAPES["Gemma-3-270M"]
    for rows in VOCABULARIES[:-1]:
        for head in (None, HEADS["Gemma-3-270M"]):
            name = f"Gemma-3-270M V{rows} {'full' if head is None else 'nested'}"
            found[name] = ({**small, "vocab_size": rows}, head)
    return found


def time_pair(folder: Path, names: list[str]) -> dict[str, dict[str, float]]:
    """Milliseconds of a decoded token and of its head, by turns, so that both meet the same machine."""
    from pit_deploy.runtimes.onnxruntime import OnnxRuntime

    runtimes = {name: OnnxRuntime(folder / name / "model.onnx", CONTEXT, threads=1) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, runtime in runtimes.items():
            runtime.reset()
            runtime.prefill([1, 2, 3, 4])
            for token in range(5, 5 + TOKENS):
                start = time.thread_time()  # one thread: its own time, whatever else the machine does
                runtime.decode(token)
                samples[name].append(1e3 * (time.thread_time() - start))
    token = {name: median(values) for name, values in samples.items()}
    del runtimes
    return {name: {"token": token[name], "head": head_time(folder / name)} for name in names}


def head_time(directory: Path) -> float:
    """Milliseconds of what comes after the last position: norm's output to logits, as a graph of its own."""
    import onnx
    import onnxruntime
    from onnx.utils import Extractor

    model = onnx.load(directory / "model.onnx", load_external_data=False)
    size = next(t for t in model.graph.initializer if t.name == "pit.head_map").dims[0]
    state = onnx.helper.make_tensor_value_info("last_position", onnx.TensorProto.FLOAT, [1, 1, size])
    model.graph.value_info.append(state)
    head = Extractor(model).extract_model(["last_position"], ["logits"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory))
    session = onnxruntime.InferenceSession(head.SerializeToString(), options, ["CPUExecutionProvider"])
    rng, samples = np.random.default_rng(0), []
    for _ in range(TOKENS):
        x = rng.standard_normal((1, 1, size), dtype=np.float32)
        start = time.thread_time()
        session.run(None, {"last_position": x})
        samples.append(1e3 * (time.thread_time() - start))
    return median(samples[5:])


def choose(source: str, text: str) -> list[dict[str, Any]]:
    """Miss rate and KL of each (columns, shortlist) on the text of a file, which calibration doesn't see."""
    from pit_deploy.bundle import load_tokenizer
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.folding import SharedTable, load_folded
    from pit_deploy.quantize.calibration import read_calibration
    from pit_deploy.quantize.nested_choice import SHORTLISTS, measure
    from pit_deploy.reference import calibrate
    from pit_deploy.runtimes.torch import open_training

    checkpoint = open_checkpoint(source)
    learned = calibrate(checkpoint, 2048)
    tables = load_folded(checkpoint, "shared").tables
    assert isinstance(tables, SharedTable)
    runtime = open_training(checkpoint)
    ids = load_tokenizer(checkpoint.path / "tokenizer.json").encode(read_calibration(text)).ids
    windows = [ids[start : start + 256] for start in range(0, len(ids), 256)]
    states = np.concatenate([runtime.final_states(window)[0] for window in windows])
    columns = (64, 96, 128, 160, 192, 256, 320)
    found = measure(tables, learned.state_second_moment, states, columns, SHORTLISTS)
    return [
        {"columns": r, "shortlist": k, "miss": float(found.miss_rates[i, j]), "kl": float(found.kl[i, j])}
        for i, r in enumerate(columns)
        for j, k in enumerate(SHORTLISTS)
    ]


def build(folder: Path) -> None:
    for name, (config, head) in settings().items():
        if not (folder / name / "model.onnx").is_file():
            write(config, head, folder / name)
            print(name, flush=True)


def time_all(folder: Path) -> list[dict[str, Any]]:
    """Full and nested of each setting, by turns."""
    rows = []
    for name, (config, head) in settings().items():
        if head is not None:
            continue
        pair = [name, name.replace(" full", " nested")]
        for measured, figures in time_pair(folder, pair).items():
            kind = measured.rsplit(" ", 1)[1]
            shape = measured.split(" ")[0]
            rows.append({"shape": shape, "vocabulary": config["vocab_size"], "head": kind, "ms": figures})
            print(rows[-1], flush=True)
    return rows


def draw() -> None:
    """Both figures from the JSON files beside this script."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "pit-deploy", "svg.fonttype": "none"}
    from matplotlib import pyplot

    rows = json.loads((FOLDER / "nested_head_choice.json").read_text())["rows"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for columns in sorted({row["columns"] for row in rows}):
        of_columns = [row for row in rows if row["columns"] == columns]
        shortlists = [row["shortlist"] for row in of_columns]
        left.plot(shortlists, [max(row["miss"], 1e-4) for row in of_columns], marker="o", label=f"{columns}")
        right.plot(shortlists, [row["kl"] for row in of_columns], marker="o", label=f"{columns}")
    for axes, label in (
        (left, "best token missed, share of positions"),
        (right, "KL to the full head, nats"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("shortlist")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3, which="both")
    left.legend(title="columns of 576", frameon=False, fontsize=8)
    save(figure, "nested_head_choice.svg")
    rows = json.loads((FOLDER / "nested_head_times.json").read_text())["rows"]
    rows = [row for row in rows if row["shape"].startswith("Gemma")]
    figure, axes = pyplot.subplots(figsize=(6, 3.8))
    for head, style in (("full", "-"), ("nested", "--")):
        for part, marker in (("token", "s"), ("head", "o")):
            points = sorted((row["vocabulary"], row["ms"][part]) for row in rows if row["head"] == head)
            axes.plot(*zip(*points, strict=True), style, marker=marker, label=f"{part}, {head} head")
    axes.set_xlabel("vocabulary")
    axes.set_ylabel("ms a token, one thread")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    save(figure, "nested_head_times.svg")


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / name, metadata={"Date": None})


def main() -> None:
    match sys.argv[1:]:
        case ["build", folder]:
            build(Path(folder))
        case ["time", folder]:
            write_rows("nested_head_times.json", time_all(Path(folder)))
        case ["choice", source, text]:
            write_rows("nested_head_choice.json", choose(source, text))
        case []:
            draw()
        case _:
            sys.exit(__doc__)


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    (FOLDER / name).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
