"""Training: the optimizer, one step, and the loop around it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from examples.gpt.data import Corpus
from examples.gpt.model import GPT, SIZES

_VALIDATION_BATCHES = 4
_STEPS_BETWEEN_LOSSES = 10  # the bar's loss is fetched this often; each fetch waits for the device


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything a run's losses depend on; a resumed run must have the same.

    Attributes:
      size: A key of `SIZES`.
      seq_len: Bytes a sequence.
      batch_size: Sequences a step, over all devices.
      steps: Length of the run; the learning rate falls to a tenth of its peak at the end.
      learning_rate: The peak, reached after a twentieth of the steps.
      dtype: Of the computation.
      implementation: Of attention, None = the fastest that can.
      eval_every: Steps from one validation to the next.
      seed: Of parameters, data order and dropout.
    """

    size: str
    seq_len: int
    batch_size: int
    steps: int
    learning_rate: float
    dtype: str
    implementation: str | None
    eval_every: int
    seed: int


class TrainState(NamedTuple):
    """What a step reads and replaces: pytrees of arrays."""

    step: jax.Array  # int32, steps taken
    params: Any
    optimizer: Any


class History(NamedTuple):
    """Losses in nats a byte."""

    train: list[float]  # one a step
    validation: list[tuple[int, float]]  # (steps taken, loss)


class Keys(NamedTuple):
    """A `jax.random.key` for each use of randomness in JAX."""

    parameters: jax.Array
    dropout: jax.Array
    sampling: jax.Array


def random_keys(seed: int) -> Keys:
    """The keys of a run, all different."""
    return Keys(*jax.random.split(jax.random.key(seed), len(Keys._fields)))


class Trainer:
    """Holds the compiled functions of a run; the state goes through them.

    Args:
      config: The run.
      corpus: Where its batches come from.
      mesh: One axis, "data", over which the batch is split; parameters are on every device.

    Attributes:
      step: (state, tokens [B, T + 1]) -> (state, loss), compiled; takes the state's memory.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, mesh: Mesh):
        self.config, self.corpus = config, corpus
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._over_batch = NamedSharding(mesh, PartitionSpec("data"))
        self._keys = random_keys(config.seed)
        rngs = nnx.Rngs(self._keys.parameters)
        model = GPT(SIZES[config.size], jnp.dtype(config.dtype), config.implementation, rngs)
        self._graph, self._params, self._rest = nnx.split(model, nnx.Param, ...)
        self._optimizer = make_optimizer(config)
        self.step = jax.jit(self._train_step, donate_argnums=0)
        self._loss = jax.jit(self._validation_loss)
        self._validation = [
            self._place(batch)
            for batch in corpus.validation_batches(_VALIDATION_BATCHES, config.batch_size, config.seq_len)
        ]

    def initial_state(self) -> TrainState:
        """The state before the first step, on every device."""

        def initialize(params):
            return TrainState(jnp.zeros((), jnp.int32), params, self._optimizer.init(params))

        return jax.jit(initialize, out_shardings=self._replicated)(self._params)

    def model(self, state: TrainState) -> GPT:
        """The network with the parameters of a state."""
        return nnx.merge(self._graph, state.params, self._rest)

    def run(self, state: TrainState, history: History, save: Callable[[TrainState, History], None]) -> TrainState:
        """Takes the remaining steps, appends to `history`, and calls `save` after each validation."""
        config = self.config
        start = int(state.step)
        pending: list[jax.Array] = []
        interval_started, interval_steps = time.perf_counter(), 0
        with tqdm(total=config.steps, initial=start, desc="training", unit="step", disable=None) as bar:
            for step in range(start, config.steps):
                batch = self.corpus.train_batch(config.seed, step, config.batch_size, config.seq_len)
                state, loss = self.step(state, self._place(batch))
                pending.append(loss)
                bar.update()
                interval_steps += 1
                is_last = step + 1 == config.steps
                is_evaluated = is_last or (step + 1) % config.eval_every == 0
                if not is_evaluated and len(pending) < _STEPS_BETWEEN_LOSSES:
                    continue
                history.train.extend(float(x) for x in pending)
                pending.clear()
                seconds_a_step = (time.perf_counter() - interval_started) / interval_steps
                tokens_a_second = config.batch_size * config.seq_len / seconds_a_step
                bar.set_postfix(loss=f"{history.train[-1]:.3f}", tokens_per_s=f"{tokens_a_second:,.0f}")
                if is_evaluated:
                    history.validation.append((step + 1, self.validation_loss(state)))
                    save(state, history)
                    bar.write(
                        f"step {step + 1:>6}/{config.steps}  loss {np.mean(history.train[-interval_steps:]):.3f}  "
                        f"validation {history.validation[-1][1]:.3f} nats/byte  {tokens_a_second:,.0f} tokens/s  "
                        f"{(config.steps - step - 1) * seconds_a_step:.0f} s left"
                    )
                    interval_started, interval_steps = time.perf_counter(), 0
        return state

    def validation_loss(self, state: TrainState) -> float:
        """Mean loss over the validation windows, without dropout, in nats a byte."""
        return float(np.mean([self._loss(state.params, tokens) for tokens in self._validation]))

    def _place(self, batch: np.ndarray) -> jax.Array:
        return jax.device_put(batch, self._over_batch)

    def _train_step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        # The key depends on the step alone, so that a resumed run drops the same elements.
        key = jax.random.fold_in(self._keys.dropout, state.step)

        def loss_of(params):
            model = nnx.merge(self._graph, params, self._rest)
            return next_byte_loss(model, tokens, deterministic=False, rngs=nnx.Rngs(dropout=key))

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer), loss

    def _validation_loss(self, params, tokens):
        return next_byte_loss(nnx.merge(self._graph, params, self._rest), tokens, deterministic=True)


def next_byte_loss(model: GPT, tokens: jax.Array, **options) -> jax.Array:
    """Mean cross-entropy of each byte of tokens [B, T + 1] but the first, in nats."""
    logits = model(tokens[:, :-1], **options)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].astype(jnp.int32)).mean()


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW after clipping the gradient's norm to 1, with warm-up and cosine decay; matrices alone decay."""
    warmup = min(max(1, config.steps // 20), config.steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=config.steps,
        end_value=0.1 * config.learning_rate,
    )

    def is_matrix(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix)
    )
