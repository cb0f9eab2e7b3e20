"""Times on a GPU without the cost of launching: many calls in one program, and the device's queue kept full."""

from __future__ import annotations

import functools
import math
import os
import random
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import jax.numpy as jnp

from benchmarks.contenders import Shape

Name = TypeVar("Name", bound=Hashable)


def lower(
    attend: Callable, shape: Shape, has_backward: bool, calls: int, *options, dtype=jnp.bfloat16
) -> jax.stages.Lowered:
    """A program of `calls` calls of attend(q, k, v, *options), each on its own queries, that takes `inputs`' arrays.

    They are one program without command buffers, so that they run one after the other and none is left out.
    """

    @jax.jit  # traced once for all calls
    def one(q, k, v, dout, options):
        if not has_backward:
            return attend(q, k, v, *options)
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, *options), q, k, v)
        return out, pullback(dout)

    @functools.partial(jax.jit, compiler_options={"xla_gpu_enable_command_buffer": ""})
    def every(queries, k, v, dout, options):
        return [one(q, k, v, dout, options) for q in queries]

    return every.lower(*jax.eval_shape(lambda: inputs(shape, calls, dtype)), options)


def inputs(shape: Shape, calls: int, dtype=jnp.bfloat16) -> tuple:
    """Queries for each call, and k, v and dout for all; standard normal."""
    q, k, v, dout = shape.random_inputs(dtype)
    queries = [jax.random.normal(key, q.shape, q.dtype) for key in jax.random.split(jax.random.key(1), calls)]
    return queries, k, v, dout


def program(attend: Callable, shape: Shape, has_backward: bool, calls: int, *options, dtype=jnp.bfloat16) -> Callable:
    """A function of no arguments that starts the program of `lower` on `inputs`."""
    compiled = lower(attend, shape, has_backward, calls, *options, dtype=dtype).compile()
    arrays = inputs(shape, calls, dtype)
    return lambda: compiled(*arrays, options)


def repeated(run: Callable[[], object], work: float, turn_work: float) -> tuple[Callable[[], object], float]:
    """A turn: `run`, of so much work, until it has done turn_work, none waited for; and the work of the turn.

    It returns the last result. A turn far longer than the start of a program hides all starts but the first.
    """
    count = max(1, math.ceil(turn_work / work))

    def runs():
        for _ in range(count - 1):
            run()
        return run()

    return runs, count * work


def seconds(run: Callable[[], object], wait: Callable[[object], object] = jax.block_until_ready) -> float:
    """Wall-clock time of a run and of waiting for its results."""
    start = time.perf_counter()
    wait(run())
    return time.perf_counter() - start


def seconds_of_turns(
    turns: Mapping[str, tuple[Callable[[], object], float]],
    rounds: int,
    wait: Callable[[object], object] = jax.block_until_ready,
    order: random.Random | None = None,
) -> dict[str, list[float]]:
    """Seconds a unit of work of each turn (`repeated`), one a round; `order` shuffles each round anew."""
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name in turns if order is None else order.sample(list(turns), len(turns)):
            run, work = turns[name]
            samples[name].append(seconds(run, wait) / work)
    return samples


def compile_all(lowered: Mapping[Name, jax.stages.Lowered]) -> tuple[dict[Name, jax.stages.Compiled], dict[Name, str]]:
    """Compiles on all cores, so nothing may be measured meanwhile: the programs, and why others do not compile."""

    def compile_one(name):
        try:
            return lowered[name].compile()
        except Exception as error:
            return first_line(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(lowered, pool.map(compile_one, lowered), strict=True))
    programs = {name: x for name, x in results.items() if not isinstance(x, str)}
    return programs, {name: x for name, x in results.items() if isinstance(x, str)}


def first_line(error: Exception) -> str:
    """What a table shows of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
