"""How much a forward and backward call raises the peak memory of a fresh process; prints one JSON line.

A process of its own, because a peak only ever rises. Run with `python -m benchmarks.peak_memory --length 32768`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.contenders import Shape, contenders
from benchmarks.measure import Problem, compile_contender


def peak_growth(contender: str, length: int, *, heads: int, head_dim: int, is_causal: bool) -> int:
    """Bytes by which the peak resident memory passes what was resident before the call, outputs included."""
    shape = Shape(B=1, T=length, S=length, N=heads, K=heads, H=head_dim)
    problem = Problem(shape, jnp.dtype("float32"), is_causal, has_backward=True)
    program = compile_contender(contenders()[contender], problem)
    inputs = jax.block_until_ready(shape.random_inputs(problem.dtype))
    before = _resident_bytes()
    jax.block_until_ready(program(*inputs))
    return _peak_resident_bytes() - before


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():  # no current value: the peak so far, at most too large
        return _peak_resident_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """Measures what the command line asks for and prints {"growth_bytes": ...}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", default="jaxflash-cpu", choices=contenders())
    parser.add_argument("--length", type=int, default=32768, help="T = S (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    growth = peak_growth(
        options.contender, options.length, heads=options.heads, head_dim=options.head_dim, is_causal=options.causal
    )
    print(json.dumps({"growth_bytes": growth}))


if __name__ == "__main__":
    main()
