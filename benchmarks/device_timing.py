"""Times on a GPU without the cost of launching: many calls in one program, and the device's queue kept full."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.contenders import Shape


def program(attend: Callable, shape: Shape, has_backward: bool, calls: int, *options, dtype=jnp.bfloat16) -> Callable:
    """A function of no arguments that starts `calls` calls of attend(q, k, v, *options), each on its own queries.

    They are one program without command buffers, so that they run one after the other and none is left out.
    """
    q, k, v, dout = shape.random_inputs(dtype)
    queries = [jax.random.normal(key, q.shape, q.dtype) for key in jax.random.split(jax.random.key(1), calls)]

    def one(q, k, v, dout, options):
        if not has_backward:
            return attend(q, k, v, *options)
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, *options), q, k, v)
        return out, pullback(dout)

    @functools.partial(jax.jit, compiler_options={"xla_gpu_enable_command_buffer": ""})
    def every(queries, k, v, dout, options):
        return [one(q, k, v, dout, options) for q in queries]

    return lambda: every(queries, k, v, dout, options)


def seconds(run: Callable[[], object], wait: Callable[[object], object] = jax.block_until_ready) -> float:
    """Wall-clock time of a run and of waiting for its results."""
    start = time.perf_counter()
    wait(run())
    return time.perf_counter() - start
