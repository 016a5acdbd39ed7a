"""transformers' `Trainer` with a PIT interface: its parameter groups, its manifold, and saves that are whole.

A checkpoint of a run is a PIT checkpoint and, beside it, what an exact continuation needs: the optimiser, the
schedule, random states, and `L` in the form that is trained.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints

from pit_deploy.errors import InputError
from pit_deploy.model import PITForCausalLM
from pit_deploy.training.callbacks import Log, StayOnManifold, StepTable
from pit_deploy.training.data import Blocks
from pit_deploy.training.distributed import (
    Reshard,
    is_sharded,
    load_optimizer_part,
    save_optimizer_part,
)
from pit_deploy.training.optimizers import PITOptimizer, interface_of, parameter_groups, whole
from pit_deploy.training.options import TrainingOptions

EXACT_STATE = "trainer_state.safetensors"
"""`pit.raw_cholesky` and `pit.cholesky_anchor`: the checkpoint's `L` says the same, up to where it is counted from."""

_STAGING = ".saving"


class PITTrainer(Trainer):
    """A trainer of a `PITForCausalLM`, of one within a peft adapter, or of a plain model of transformers.

    `options` decide rates and method. A save that is interrupted leaves the checkpoints before it as they were.
    """

    model: Any
    lr_scheduler: Any

    def __init__(self, model: Any, options: TrainingOptions, **arguments: Any) -> None:
        self.options = options
        self._staging: Path | None = None
        super().__init__(model=model, **arguments)
        self.sharded = is_sharded(model)
        if self.sharded:
            # The model places its weights and reduces its gradients itself: no wrapper around it.
            self.is_distributed_loading_by_transformers = True
            model._is_fsdp_managed_module = True

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharded:
            save_optimizer_part(self.optimizer, Path(output_dir))
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.sharded and checkpoint is not None:
            load_optimizer_part(self.optimizer, Path(checkpoint))
            self.lr_scheduler.load_state_dict(
                torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            )
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            options = self.options
            groups = parameter_groups(
                self.model if model is None else model,
                learning_rate=options.learning_rate,
                interface_rate=options.interface_rate or options.learning_rate,
                transform_rate=options.transform_rate,
                weight_decay=options.weight_decay,
                optimizer=options.optimizer,
                as_table=steps_table(self.model, options),
            )
            self.optimizer = PITOptimizer(groups, lr=options.learning_rate)
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the backbone by its own norm, which is returned, and the interface by its own.

        Entries of `Z` are small and their gradients large: in one norm they would scale the backbone's down.
        """
        interface = interface_of(self.model)
        own = set() if interface is None else {id(p) for p in interface.parameters()}
        limit = self.args.max_grad_norm
        parameters = [p for p in model.parameters() if p.grad is not None]
        inside = [p for p in parameters if id(p) in own]
        if interface is not None and interface.table is not None:
            interface.table.clip_(limit)
        elif inside:
            self.accelerator.clip_grad_norm_(inside, limit)
        return self.accelerator.clip_grad_norm_([p for p in parameters if id(p) not in own], limit)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The library's schedule, for the memory to the power `memory_decay`."""
        scheduler: Any = super().create_scheduler(num_training_steps, optimizer)
        for number, group in enumerate(scheduler.optimizer.param_groups):
            if group["name"] == "memory":
                # A partial function: a schedule would write the attributes of other callables into its saved state.
                scheduler.lr_lambdas[number] = functools.partial(
                    _to_the_power,
                    schedule=scheduler.lr_lambdas[number],
                    exponent=self.options.memory_decay,
                )
        return scheduler

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the library's, into a folder beside, which gets its name when everything is in it and on the disk."""
        run = Path(str(self.args.output_dir))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._staging = run / _STAGING
        try:
            if self.args.should_save:
                shutil.rmtree(self._staging, ignore_errors=True)
            _barrier()
            super()._save_checkpoint(model, trial)
            _barrier()
            if self.args.should_save:
                publish(self._staging / name, run / name)
                rotate_checkpoints(str(run), self.args.save_total_limit)
            _barrier()
        finally:
            self._staging = None
            if self.args.should_save:
                shutil.rmtree(run / _STAGING, ignore_errors=True)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not isinstance(self.model, PITForCausalLM):  # a plain model, or an adapter around ours
            super()._save(output_dir, state_dict)
            return
        state = {
            k: whole(v) for k, v in self.model.state_dict().items()
        }  # every process takes part in gathering
        if not self.args.should_save:
            return
        directory = Path(output_dir or str(self.args.output_dir))
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory, state_dict=state)
        exact = {k: state[k].contiguous() for k in ("pit.raw_cholesky", "pit.cholesky_anchor")}
        safetensors.torch.save_file(exact, directory / EXACT_STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        if not isinstance(model, PITForCausalLM):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        load_exact_(model, Path(resume_from_checkpoint))


def _to_the_power(step: int, schedule: Any, exponent: float) -> float:
    return float(schedule(step)) ** exponent


def load_exact_(model: Any, checkpoint: Path) -> None:
    """Give `model` the weights of a run's checkpoint, to the last bit. Raises `InputError` where they do not fit."""
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.training.annealing import copy_

    opened = open_checkpoint(checkpoint)
    exact = safetensors.torch.load_file(checkpoint / EXACT_STATE)
    for name, target in model.state_dict().items():
        stored = exact[name] if name in exact else opened.read_torch(name.removeprefix("backbone."))
        if stored.shape != target.shape:
            raise InputError(
                f"{checkpoint}: {name} has shape {list(stored.shape)} and the model {list(target.shape)}; resume with "
                f"the checkpoint that the run began with."
            )
        copy_(target, stored.to(target.dtype))


def publish(staged: Path, target: Path) -> None:
    """Rename a complete folder to `target`, replacing it, once its bytes are on the disk."""
    for file in staged.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    if target.exists():
        shutil.rmtree(target)
    staged.rename(target)


def fit(
    model: Any,
    train_blocks: np.ndarray,
    eval_blocks: np.ndarray,
    options: TrainingOptions,
    *,
    directory: Path | None = None,
    resume: bool = False,
    log: Log | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    checkpoints: bool = True,
    eval_on_start: bool = True,
) -> Log:
    """Train `model` in place on blocks [count, length] and return the log.

    `directory` holds the run's checkpoints (None: none are written); with `resume` the last of them is continued.
    Every process of a distributed launch calls this with the same arguments.
    """
    import tempfile

    log = log or Log()
    span = options.batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    if len(eval_blocks) > span:  # whole batches: the mean loss is then the same on any number of processes
        eval_blocks = eval_blocks[: len(eval_blocks) // span * span]
    with tempfile.TemporaryDirectory(prefix="pit-deploy-train-") as scratch:
        place = Path(scratch) if directory is None else directory
        saving = checkpoints and directory is not None
        last = get_last_checkpoint(str(directory)) if resume and directory is not None else None
        arguments = _arguments(
            place, len(train_blocks), len(eval_blocks), options, saving, last is None and eval_on_start
        )
        manifold: list[TrainerCallback] = [Reshard()] if is_sharded(model) else []
        as_table = steps_table(model, options)
        if as_table:
            manifold.append(StepTable())
        elif interface_of(model) is not None:
            manifold.append(StayOnManifold())
        trainer = PITTrainer(
            model,
            options,
            args=arguments,
            train_dataset=Blocks(train_blocks),
            eval_dataset=Blocks(eval_blocks) if len(eval_blocks) else None,
            callbacks=[*manifold, *callbacks, log],
        )
        trainer.remove_callback(PrinterCallback)
        if last is not None and checkpoint_step(last) >= arguments.max_steps:
            trainer._load_from_checkpoint(last)  # only the result had not been written
            log.restore(arguments.max_steps)
        else:
            with trained_as_table(interface_of(model)) if as_table else contextlib.nullcontext():
                trainer.train(resume_from_checkpoint=last)
    return log


@contextlib.contextmanager
def trained_as_table(interface: Any) -> Iterator[None]:
    """Inside, `L` has no gradient of its own: it is part of the table's, and DDP would wait for it.

    A run that breaks off leaves an interface that computes what it did before the step.
    """
    before = interface.raw_cholesky.requires_grad
    interface.raw_cholesky.requires_grad_(False)
    try:
        yield
    except BaseException:
        if interface.table is not None:
            interface.table.abandon_()
        raise
    finally:
        interface.raw_cholesky.requires_grad_(before)


def steps_table(model: Any, options: TrainingOptions) -> bool:
    """Whether `Z` and `T` are stepped together (see `table_step`)."""
    interface = interface_of(model)
    return interface is not None and interface.memory.requires_grad and options.steps_table


def checkpoint_step(path: str | Path) -> int:
    """The step of a run's checkpoint, from its name."""
    return int(Path(path).name.rsplit("-", 1)[1])


def total_steps(blocks: int, options: TrainingOptions, processes: int = 1) -> int:
    """Steps of a run: as asked for, or one pass over the text."""
    return options.steps or max(1, blocks // (options.batch_size * options.accumulate * processes))


def _arguments(
    place: Path, train_count: int, eval_count: int, options: TrainingOptions, saving: bool, eval_first: bool
) -> TrainingArguments:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    steps = total_steps(train_count, options, processes)
    on_gpu = torch.cuda.is_available()
    every = options.eval_every or max(1, steps // 10)
    return TrainingArguments(
        output_dir=str(place),
        max_steps=steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": options.final_rate},
        warmup_steps=round(options.warmup * steps),
        max_grad_norm=options.max_grad_norm,
        bf16=options.precision == "bf16",
        use_cpu=not on_gpu,
        activation_checkpointing=options.gradient_checkpointing,
        eval_strategy="steps" if eval_count else "no",
        eval_steps=every,
        eval_on_start=bool(eval_count) and eval_first,
        prediction_loss_only=True,
        logging_steps=options.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps" if saving and options.save_every else "no",
        save_steps=options.save_every or 500,
        save_total_limit=options.keep,
        seed=options.seed,
        data_seed=options.seed,
        report_to=[],  # the log writes what there is, the interface's figures too
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=on_gpu,
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if processes > 1 and not on_gpu else None,
        accelerator_config={"split_batches": False, "dispatch_batches": False},
    )


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
