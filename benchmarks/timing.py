"""Wall-clock times of compiled functions, taken in turn so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np


def time_interleaved(
    runs: Mapping[str, Callable[[], object]], *, seconds: float, min_rounds: int, max_rounds: int
) -> dict[str, list[float]]:
    """Runs every function once a round, after one warm-up round that is not counted.

    Args:
      runs: Functions of no arguments; what they return is waited for.
      seconds: Rounds go on until this much time has passed. In seconds.
      min_rounds: Rounds that are run even if `seconds` has passed.
      max_rounds: Rounds after which it stops even if `seconds` has not passed.

    Returns:
      The wall-clock times of each function, in seconds, one a round.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    samples: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for finished in range(max_rounds):
        if finished >= min_rounds and time.perf_counter() - started > seconds:
            break
        for name, run in runs.items():
            before = time.perf_counter()
            jax.block_until_ready(run())
            samples[name].append(time.perf_counter() - before)
    return samples


def summarize(samples: list[float]) -> dict[str, float | int]:
    """Median and quartiles of times, in the unit of `samples`, and how many there were."""
    q1, median, q3 = (float(x) for x in np.percentile(samples, [25, 50, 75]))
    return {"median": median, "q1": q1, "q3": q3, "rounds": len(samples)}
