"""`train`: a PIT checkpoint and a text in, a PIT checkpoint out, with a run folder beside it that can be resumed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.files import atomic_output, check_output, check_room
from pit_deploy.json_files import read_json, write_json
from pit_deploy.progress import Progress, silent
from pit_deploy.training.options import TrainingOptions

if TYPE_CHECKING:
    from pit_deploy.checkpoint import Checkpoint

DEFAULT_BLOCK = 512
_STATE = "run.json"
_MAY_CHANGE = ("save_every", "keep", "log_every", "tensorboard")
"""Options that a resumed run may be given anew; all others must be as they were."""


@dataclass
class TrainingReport:
    """What `train` did and measured. Losses are nats per token of the held-out text."""

    out: str
    run_folder: str
    steps: int
    tokens: int
    resumed_from: int
    loss_before: float | None
    loss: float | None
    evaluations: list[tuple[int, float]]
    interface_error: float
    orthonormality_error: float
    condition: float
    bridge: str
    memory: str
    spikes: int
    seconds: float
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(
    source: str | Path,
    out: str | Path,
    *,
    text: Sequence[str | Path],
    evaluation: Sequence[str | Path] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> TrainingReport:
    """Train the PIT checkpoint `source` on `text` and write the result to `out`, a PIT checkpoint.

    `text` and `evaluation` are text files, .jsonl files, or `datasets:NAME`; without `evaluation` the end of the
    text is held out. `options` are the fields of `TrainingOptions`. The folder `<out>.run` keeps the log, the
    diagnostics and the checkpoints; with `resume` its last checkpoint is continued, to the last bit on one
    machine. `out` appears when training is over and its checkpoint is whole.

    Raises `InputError` before any work for what cannot be used. An interrupted run leaves its last checkpoint.
    """
    require("torch", "train")
    require("accelerate", "train")
    chosen = TrainingOptions(**options)
    if chosen.tensorboard:
        require("tensorboard", "train")
    out, run_folder = Path(out), Path(f"{out}.run")
    main_process = int(os.environ.get("RANK", "0")) == 0
    if main_process:
        check_output(out, overwrite=overwrite or resume, source=source, inputs=(*text, *(evaluation or ())))
    from pit_deploy.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(source)
    try:
        if checkpoint.kind != "pit":
            raise InputError(f"{source} is a {checkpoint.kind} checkpoint; run pit-deploy convert first.")
        asked = {"source": str(source), "text": [str(t) for t in text], "options": asdict(chosen)}
        if resume:
            _check_same_run(run_folder, asked)
        elif main_process:
            _check_room_for_run(run_folder, overwrite)

        def begin() -> None:
            if main_process and not resume:
                _make_run_folder(run_folder, asked)

        return _train(checkpoint, out, run_folder, begin, text, evaluation, chosen, resume, progress)
    finally:
        checkpoint.close()


def _check_same_run(folder: Path, asked: dict[str, Any]) -> None:
    """Raise `InputError` where `folder` holds no run, or one of other settings."""
    if not (folder / _STATE).is_file():
        raise InputError(f"{folder} holds no run that could be resumed; leave --resume out to start one.")
    before = read_json(folder / _STATE)
    changed = [
        name
        for name, value in asked["options"].items()
        if name not in _MAY_CHANGE and before["options"].get(name) != value
    ]
    changed += [name for name in ("source", "text") if before.get(name) != asked[name]]
    if changed:
        raise InputError(
            f"{folder} belongs to a run with other settings ({', '.join(changed)}); give the same ones, or "
            f"--overwrite without --resume to start anew."
        )


def _check_room_for_run(folder: Path, overwrite: bool) -> None:
    """Raise `InputError` where `folder` is there and may not be replaced."""
    if not folder.exists():
        return
    if not overwrite:
        raise InputError(
            f"{folder} is there from an earlier run; pass --resume to go on with it or --overwrite to start anew."
        )
    if not (folder / _STATE).is_file() and any(folder.iterdir()):
        raise InputError(f"{folder} holds something that is no training run; choose another output.")


def _make_run_folder(folder: Path, asked: dict[str, Any]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_json(folder / _STATE, asked)


def _train(
    checkpoint: Checkpoint,
    out: Path,
    run_folder: Path,
    begin: Callable[[], None],
    text: Sequence[str | Path],
    evaluation: Sequence[str | Path] | None,
    options: TrainingOptions,
    resume: bool,
    progress: Progress,
) -> TrainingReport:
    """Read and check everything, call `begin`, which makes the run folder, and train."""
    import torch

    from pit_deploy.bundle import load_tokenizer
    from pit_deploy.model import PITForCausalLM, stored_dtype
    from pit_deploy.training.callbacks import Log
    from pit_deploy.training.data import pack, read_tokens, split_held_out
    from pit_deploy.training.diagnostics import Diagnostics, spikes
    from pit_deploy.training.trainer import fit

    start = time.perf_counter()
    if not checkpoint.is_tokenized():
        raise InputError(f"{checkpoint.label} has no tokenizer.json, which the text is read with; add it.")
    checkpoint.check_vocabulary()
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    end_id = _end_id(checkpoint)
    length = _block_length(checkpoint, options)
    progress("read text", 0, 1)
    blocks = pack(read_tokens(text, tokenizer, end_id), length)
    if evaluation:
        held_out = pack(read_tokens(evaluation, tokenizer, end_id), length)
        if not len(held_out):
            raise InputError(
                f"The evaluation text has fewer than {length} tokens, which is one block; give more."
            )
    else:
        blocks, held_out = split_held_out(blocks, options.eval_share)
    _check_count(len(blocks), options)
    progress("read text", 1, 1)
    model = PITForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    check_room(out, sum(p.numel() for p in model.parameters()) * (4 + 12 * bool(options.save_every)))
    notes = [*checkpoint.notes, *_set_up_interface(model, options)]
    stored = stored_dtype(checkpoint)
    annealing = None
    if options.anneal_bridge is not None:
        from pit_deploy.training.annealing import AnnealBridge

        annealing = AnnealBridge(model, options.anneal_bridge)
    trained: Any = model
    if options.lora is not None:
        from pit_deploy.training.adaptation import add_lora

        torch.manual_seed(options.seed)
        trained = add_lora(model, options.lora)
    if options.fsdp:
        from pit_deploy.training.distributed import shard_

        shard_(model)
    begin()
    events = run_folder / "tensorboard" if options.tensorboard else None
    log = Log(run_folder / "log.jsonl", progress, events)
    diagnostics = Diagnostics(log)
    diagnostics.measure(model.pit)  # where drift is counted from, in a resumed run too
    begun = _last_step(run_folder) if resume else 0
    fit(
        trained,
        blocks,
        held_out,
        options,
        directory=run_folder,
        resume=resume,
        log=log,
        callbacks=[*([annealing] if annealing else []), diagnostics],
    )
    if annealing is not None:
        annealing.finish(model)
    losses = log.series("eval_loss")
    steps = max((r["step"] for r in log.records), default=0)
    interface = model.pit
    figures = diagnostics.measure(interface)
    report = TrainingReport(
        out=str(out),
        run_folder=str(run_folder),
        steps=steps,
        tokens=steps
        * options.batch_size
        * options.accumulate
        * length
        * int(os.environ.get("WORLD_SIZE", "1")),
        resumed_from=begun,
        loss_before=losses[0][1] if losses else None,
        loss=losses[-1][1] if losses else None,
        evaluations=[(step, value) for step, value in losses],
        interface_error=figures["interface_error"],
        orthonormality_error=figures["orthonormality_error"],
        condition=figures["condition"],
        bridge=interface.bridge_kind,
        memory=interface.memory_kind,
        spikes=len(spikes(log.series("loss"))),
        seconds=time.perf_counter() - start,
        notes=notes,
    )
    _write(trained, model, checkpoint, out, options, stored)
    if int(os.environ.get("RANK", "0")) == 0:
        write_json(run_folder / "report.json", report.to_dict())
        _write_page(log, run_folder, report)
    return report


def _write(
    trained: Any, model: Any, checkpoint: Checkpoint, out: Path, options: TrainingOptions, dtype: Any
) -> None:
    """The result: a PIT checkpoint, or with `adapter` the adapter alone, which names its base."""
    from pit_deploy.training.optimizers import whole

    if options.lora is not None and not options.adapter:
        trained.merge_and_unload()
    # `state_dict` gathers what is spread over processes, so all of them come this way.
    state = {name: whole(value) for name, value in model.state_dict().items()}
    if int(os.environ.get("RANK", "0")) != 0:
        return
    with atomic_output(out, overwrite=True) as partial:
        if options.adapter:
            trained.peft_config["default"].base_model_name_or_path = str(checkpoint.path.resolve())
            trained.save_pretrained(partial)
            return
        state = {k: v if k.startswith("pit.") else v.to(dtype) for k, v in state.items()}
        model.config.dtype = dtype
        model.save_pretrained(partial, state_dict=state, companions=checkpoint.path)


def _write_page(log: Any, folder: Path, report: TrainingReport) -> None:
    """The diagnostics as a page, where what draws it is installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") and find_spec("jinja2"):
        from pit_deploy.training.pages import write_training_page

        write_training_page(log, folder / "diagnostics.html", report.to_dict())
    else:
        report.notes.append("there is no diagnostics.html: drawing it needs pip install 'pit-deploy[bench]'")


def _set_up_interface(model: Any, options: TrainingOptions) -> list[str]:
    """Apply `memory`, `scale` and `multiplier`. Returns notes. Raises `InputError` where they do not fit."""
    import torch

    from pit_deploy.interface import PITInterface

    interface = model.pit
    if options.memory is not None:
        interface.memory_kind = options.memory
        interface.memory.requires_grad_(options.memory == "stiefel")
    if options.scale is None and options.multiplier is None:
        return []
    cholesky = interface.cholesky.detach()
    size = len(cholesky)
    if float((cholesky - cholesky[0, 0] * torch.eye(size)).abs().max()) > 1e-6 * float(cholesky[0, 0]):
        raise InputError(
            "--scale and --multiplier set the start of a model from scratch, and this T is no multiple of I any "
            "more; leave them out."
        )
    if interface.bridge is not None:
        raise InputError("--scale and --multiplier do not go with a matrix bridge; leave them out.")
    scale = float(cholesky[0, 0]) ** 2 if options.scale is None else options.scale
    multiplier = interface.embedding_multiplier
    if options.multiplier is not None:
        multiplier = torch.tensor(options.multiplier)
    fresh = PITInterface(
        interface.memory.detach(), torch.eye(size) * scale**0.5, multiplier, memory_kind=interface.memory_kind
    )
    model.pit = fresh
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        end.__dict__["interface"] = fresh
    return [f"training starts from T = {scale:.4g} I"]


def _end_id(checkpoint: Checkpoint) -> int | None:
    """The id that ends a document: the model's first end id. None where it names none."""
    from pit_deploy.json_files import read_json_if_there

    for config in (read_json_if_there(checkpoint.path / "generation_config.json"), checkpoint.config):
        value = config.get("eos_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return None


def _block_length(checkpoint: Checkpoint, options: TrainingOptions) -> int:
    limit = checkpoint.config.get("max_position_embeddings")
    limit = limit if isinstance(limit, int) else DEFAULT_BLOCK
    if options.block_length is not None and options.block_length > limit:
        raise InputError(
            f"--block-length is {options.block_length} and {checkpoint.label} has positions up to {limit}; "
            f"give a shorter one."
        )
    return options.block_length or min(DEFAULT_BLOCK, limit)


def _check_count(count: int, options: TrainingOptions) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    needed = options.batch_size * processes
    if count < needed:
        raise InputError(
            f"The text makes {count} blocks and one step takes {needed}; give more text, or a smaller --batch-size "
            f"or --block-length."
        )


def _last_step(folder: Path) -> int:
    from transformers.trainer_utils import get_last_checkpoint

    from pit_deploy.training.trainer import checkpoint_step

    last = get_last_checkpoint(str(folder))
    return 0 if last is None else checkpoint_step(last)
