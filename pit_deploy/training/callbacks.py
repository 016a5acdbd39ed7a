"""What happens between the steps of a run: the manifold, the log, and a stop where the loss is no number."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from pit_deploy.errors import InputError
from pit_deploy.progress import Progress
from pit_deploy.training.optimizers import interface_of, set_cholesky_, whole_cholesky
from pit_deploy.training.stiefel import local_rows, project_to_tangent_, retract_
from pit_deploy.training.table_step import SteppedTable


class StayOnManifold(TrainerCallback):
    """Before a step the memory's gradient is made tangent; after it the memory is retracted."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        memory = interface_of(model).memory
        if memory.grad is not None:
            rows, group = local_rows(memory.detach())
            gradient, _ = local_rows(memory.grad)
            project_to_tangent_(gradient, rows, group)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        memory = interface_of(model).memory
        if memory.requires_grad:
            rows, group = local_rows(memory.detach())
            with _explained(state.global_step + 1):
                retract_(rows, group)


class StepTable(TrainerCallback):
    """Trains `Z` and `T` as one table (see `table_step`), from the begin of a run to its end.

    Between steps the interface holds the table in its own form. Before an evaluation, a save and the end it gets its
    `Z` and `T`: what others read then, and what a resumed run begins with.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        interface = interface_of(model)
        interface.settle()  # a run of before may have been broken off
        set_cholesky_(interface, whole_cholesky(interface))
        with _explained(state.global_step):
            interface.table = SteppedTable(interface)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        with _explained(state.global_step + 1):
            interface_of(model).table.begin_()

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        with _explained(state.global_step + 1):
            interface_of(model).table.end_()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save:
            interface_of(model).settle()

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        interface = interface_of(model)
        interface.settle()
        interface.table = None


@contextlib.contextmanager
def _explained(step: int) -> Iterator[None]:
    """A ValueError of a step's arithmetic as the `InputError` that ends the run."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"Training failed at step {step}: {error}.") from error


class Log(TrainerCallback):
    """Keeps every record of a run, and appends it to a file of JSON lines, and to TensorBoard's in a folder.

    A record is what the trainer logs (`loss`, `grad_norm`, `learning_rate`, `eval_loss`, ...) with its `step`.
    Records past the step that a run is resumed from are dropped from the file.
    """

    def __init__(
        self, file: Path | None = None, progress: Progress | None = None, tensorboard: Path | None = None
    ) -> None:
        self.file, self.progress, self.tensorboard = file, progress, tensorboard
        self._events: Any = None
        self.records: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore(state.global_step, state.is_world_process_zero)

    def restore(self, step: int, writes: bool = True) -> None:
        """Take up the file's records up to `step`, and drop those after it. At step 0 the file begins anew."""
        if self.tensorboard is not None and writes:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(self.tensorboard), purge_step=step + 1 if step else None)
            for record in [] if step else self.records:  # what was measured before the run began
                self._add_events(record["step"], record)
        if self.file is None:
            return
        if step and self.file.is_file():
            lines = [json.loads(line) for line in self.file.read_text("utf-8").splitlines() if line]
            self.records = [record for record in lines if record["step"] <= step]
        if writes:
            self.file.write_text("".join(json.dumps(r) + "\n" for r in self.records), encoding="utf-8")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        logs = dict(logs or {})
        loss = logs.get("loss")
        if loss is not None and not math.isfinite(loss):
            raise InputError(
                f"The loss is {loss} at step {state.global_step}; lower --learning-rate or --interface-rate."
            )
        logs.pop("epoch", None)
        self.add(state.global_step, logs, state.is_world_process_zero)

    def add(self, step: int, values: dict[str, Any], writes: bool = True) -> None:
        record = {"step": step, **values}
        self.records.append(record)
        if self.file is not None and writes:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
        if self._events is not None and writes:
            self._add_events(step, values)

    def _add_events(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                self._events.add_scalar(name, value, step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._events is not None:
            self._events.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress("train", state.global_step, state.max_steps)

    def series(self, name: str) -> list[tuple[int, float]]:
        """The steps and values of one figure."""
        return [(r["step"], float(r[name])) for r in self.records if isinstance(r.get(name), (int, float))]
