"""Checkpoints from which a run goes on exactly as if it had not been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from examples.gpt.train import History, TrainState


class Checkpoints:
    """The saved states of a run, the newest two of them, with the losses so far.

    Args:
      directory: Where they are; made if missing.
      identity: What must agree for a state to be used, ready for JSON.
    """

    def __init__(self, directory: Path, identity: dict[str, Any]):
        self.directory = directory
        self._identity = identity
        # Written before the next step, which reuses the state's memory and appends to the losses.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest_step(self) -> int | None:
        """The step of the newest state, None if there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, history: History) -> None:
        """Writes a state and the losses up to it."""
        record = {"identity": self._identity, "history": history._asdict()}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        self._manager.save(int(state.step), args=arguments)

    def restore(self, like: TrainState) -> tuple[TrainState, History]:
        """The newest state, with the shardings of `like`, and the losses up to it.

        Raises:
          ValueError: it belongs to a run with other options; the message names them.
        """
        step = self.latest_step()
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        saved = record["identity"]
        different = [
            f"{name} was {saved.get(name)!r}, is now {value!r}"
            for name, value in self._identity.items()
            if saved.get(name) != value
        ]
        if different:
            raise ValueError(f"the checkpoint is of a run with other options: {'; '.join(different)}.")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        state = self._manager.restore(step, args=arguments)["state"]
        history = record["history"]
        return state, History(history["train"], [(step, loss) for step, loss in history["validation"]])

    def close(self) -> None:
        """Releases the directory."""
        self._manager.close()
