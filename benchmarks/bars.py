"""The speed and memory that the CPU implementation must reach, as checks that pass or fail."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from benchmarks.contenders import BASELINE, Shape, contenders
from benchmarks.measure import PASSES, Effort, Problem, compile_contender, measure, temp_bytes

OURS = "jaxflash-cpu"
FLOAT32 = jnp.dtype("float32")
# (is_causal, has_backward) -> least speed relative to the baseline at T = S = 2048
LEAST_SPEEDUP = {(False, False): 2.5, (True, False): 4.0, (False, True): 1.5, (True, True): 3.0}
LEAST_TEMP_RATIO = 10.0  # baseline's temporary memory / ours, forward and backward, T = S = 4096
MOST_PEAK_GROWTH = 2 * 2**30  # bytes, forward and backward, T = S = 32768


@dataclasses.dataclass(frozen=True)
class Bar:
    """One check: what was measured, and whether it suffices."""

    text: str
    is_met: bool

    def __str__(self) -> str:
        return f"{'ok    ' if self.is_met else 'FAILED'} {self.text}"


def check(effort: Effort) -> Iterator[Bar]:
    """Measures and yields every bar, float32, B=1 N=8 H=64."""
    refusal = contenders()[OURS].refusal(FLOAT32)
    if refusal is not None:
        yield Bar(f"{OURS} does not run here: {refusal}", False)
        return
    for (is_causal, has_backward), least in LEAST_SPEEDUP.items():
        yield _speed(_problem(2048, is_causal, has_backward), least, effort)
    yield _temp_memory(_problem(4096, False, True))
    yield _peak_memory(32768)


def _problem(length: int, is_causal: bool, has_backward: bool) -> Problem:
    return Problem(Shape(B=1, T=length, S=length, N=8, K=8, H=64), FLOAT32, is_causal, has_backward)


def _speed(problem: Problem, least: float, effort: Effort) -> Bar:
    compared = {name: contenders()[name] for name in (OURS, BASELINE)}
    ours, _ = measure(problem, compared, effort)
    speedup = ours["speedup_over_baseline"]
    name = f"{PASSES[problem.has_backward]}, {'causal' if problem.is_causal else 'full'}, T=S={problem.shape.T}"
    return Bar(f"{name}: {speedup:.2f}x the speed of {BASELINE}, at least {least}x", speedup >= least)


def _temp_memory(problem: Problem) -> Bar:
    ours, baseline = (temp_bytes(compile_contender(contenders()[name], problem)) for name in (OURS, BASELINE))
    text = (
        f"temporary memory, forward+backward, T=S={problem.shape.T}: {ours / 2**20:.1f} MiB, {BASELINE} "
        f"{baseline / 2**20:.1f} MiB, at most 1/{LEAST_TEMP_RATIO:.0f} of it"
    )
    return Bar(text, ours * LEAST_TEMP_RATIO <= baseline)


def _peak_memory(length: int) -> Bar:
    command = [sys.executable, "-m", "benchmarks.peak_memory", "--contender", OURS, "--length", str(length), "--causal"]
    finished = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        return Bar(f"peak memory at T=S={length}: the measuring process failed:\n{finished.stderr}", False)
    growth = json.loads(finished.stdout.splitlines()[-1])["growth_bytes"]
    text = f"peak memory growth, forward+backward, causal, T=S={length}: {growth / 2**30:.2f} GiB, less than 2 GiB"
    return Bar(text, growth < MOST_PEAK_GROWTH)
