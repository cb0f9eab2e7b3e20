"""Measures contenders on one problem: times, FLOP/s, and the temporary memory that the compiled program asks for."""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.contenders import BASELINE, Contender, Shape

PASSES = ("forward", "forward+backward")
MATMUL_SIZE = 2048


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row group of the table: what all contenders compute."""

    shape: Shape
    dtype: jnp.dtype
    is_causal: bool
    has_backward: bool

    @property
    def flops(self) -> float:
        """Floating point operations, by `Shape.flops`."""
        return self.shape.flops(is_causal=self.is_causal, has_backward=self.has_backward)


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: see `timing.time_interleaved`."""

    seconds: float = 2.0
    min_rounds: int = 5
    max_rounds: int = 50


def compile_contender(contender: Contender, problem: Problem) -> jax.stages.Compiled:
    """The program (q, k, v, dout) -> out, or (out, dq, dk, dv), compiled for the problem."""
    attend = functools.partial(contender.attend, is_causal=problem.is_causal)

    def forward(q, k, v, dout):
        del dout
        return attend(q, k, v)

    def forward_and_backward(q, k, v, dout):
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(dout)

    function = forward_and_backward if problem.has_backward else forward
    inputs = jax.eval_shape(functools.partial(problem.shape.random_inputs, problem.dtype))
    return jax.jit(function).lower(*inputs).compile()


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of temporary memory, inputs and outputs apart, as XLA's buffer assignment has it."""
    return compiled.memory_analysis().temp_size_in_bytes


def measure(
    problem: Problem, contenders: dict[str, Contender], effort: Effort, memory_limit: int | None = None
) -> list[dict[str, object]]:
    """One JSON-ready row for each contender, with times or the reason why there are none.

    Args:
      problem: What is computed.
      contenders: By name; ratios are against `BASELINE`, if it is among them.
      effort: How long to measure.
      memory_limit: Contenders whose temporary memory is larger are not run. In bytes; default half of the machine's.
    """
    limit = _machine_memory() // 2 if memory_limit is None else memory_limit
    skipped, compiled = {}, {}
    for name, contender in contenders.items():
        skipped[name] = contender.refusal(problem.dtype)
        if skipped[name] is None:
            compiled[name] = compile_contender(contender, problem)
            if temp_bytes(compiled[name]) > limit:
                skipped[name] = f"needs {temp_bytes(compiled[name]) / 2**30:.1f} GiB, the limit is {limit / 2**30:.1f}"
    inputs = problem.shape.random_inputs(problem.dtype)
    runs = {name: functools.partial(program, *inputs) for name, program in compiled.items() if skipped[name] is None}
    samples = timing.time_interleaved(runs, **dataclasses.asdict(effort))
    summaries = {name: timing.summarize(times) for name, times in samples.items()}
    return [
        _row(name, problem, summaries.get(name), summaries.get(BASELINE), compiled.get(name), skipped[name])
        for name in contenders
    ]


def measure_matmul(dtype: jnp.dtype, effort: Effort) -> dict[str, object]:
    """The machine's yardstick: a square matrix product of MATMUL_SIZE, normal inputs."""
    x, y = (jax.random.normal(key, (MATMUL_SIZE, MATMUL_SIZE), dtype) for key in jax.random.split(jax.random.key(0)))
    product = jax.jit(jnp.matmul).lower(x, y).compile()
    samples = timing.time_interleaved({"matmul": functools.partial(product, x, y)}, **dataclasses.asdict(effort))
    summary = timing.summarize(samples["matmul"])
    return {
        "dtype": dtype.name,
        "size": MATMUL_SIZE,
        "seconds": summary,
        "flops_per_second": 2.0 * MATMUL_SIZE**3 / summary["median"],
    }


def _row(name, problem, summary, baseline, compiled, skipped):
    return {
        "contender": name,
        **dataclasses.asdict(problem.shape),
        "dtype": problem.dtype.name,
        "is_causal": problem.is_causal,
        "pass": PASSES[problem.has_backward],
        "seconds": summary,
        "flops_per_second": summary and problem.flops / summary["median"],
        "speedup_over_baseline": summary and baseline and baseline["median"] / summary["median"],
        "temp_bytes": compiled and temp_bytes(compiled),
        "skipped": skipped,
    }


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
