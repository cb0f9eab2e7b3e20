"""Compares attention implementations: prints a table, draws a plot, writes JSON.

python -m benchmarks.attention                      every contender, float32 and bfloat16, full and causal
python -m benchmarks.attention --lengths 512 4096   other lengths
python -m benchmarks.attention --check              only the bars that the CPU implementation must reach
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import jax.numpy as jnp

from benchmarks import bars, environment, report
from benchmarks.contenders import Shape, contenders
from benchmarks.measure import PASSES, Effort, Problem, measure, measure_matmul

RESULTS = Path(__file__).parent / "results"


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096], help="T = S, in tokens")
    parser.add_argument("--batch", type=int, default=1, help="B (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="query heads N (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=None, help="KV heads K (default: N)")
    parser.add_argument("--head-dim", type=int, default=64, help="H (default: %(default)s)")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=["full", "causal"])
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--contenders", nargs="+", default=None, choices=contenders(), help="default: all")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="measuring time of one problem (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="least measured calls of each contender")
    parser.add_argument(
        "--memory-limit", type=float, default=None, help="GiB of temporary memory (default: half of all)"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of the JSON and PNG (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="measure the CPU bars instead; exit 1 if one is missed")
    options = parser.parse_args(arguments)
    options.kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    sizes = [*options.lengths, options.batch, options.heads, options.kv_heads, options.head_dim, options.rounds]
    if min(sizes) < 1:
        parser.error("lengths, batch, heads, head dim and rounds must be at least 1")
    if not options.seconds >= 0:
        parser.error(f"--seconds must be at least 0, it was {options.seconds}")
    if options.heads % options.kv_heads:
        parser.error(f"--heads ({options.heads}) must be a multiple of --kv-heads ({options.kv_heads})")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    options = parse_options(arguments)
    effort = Effort(options.seconds, options.rounds, max(options.rounds, Effort.max_rounds))
    if options.check:
        met = []
        for bar in bars.check(effort):
            print(bar, flush=True)
            met.append(bar.is_met)
        return 0 if all(met) else 1

    facts = environment.describe()
    matmuls = [measure_matmul(jnp.dtype(dtype), effort) for dtype in options.dtypes]
    for matmul in matmuls:
        speed = matmul["flops_per_second"] / 1e9
        print(f"yardstick: {matmul['dtype']} matrix product of size {matmul['size']}: {speed:.1f} GFLOP/s")
    rows = []
    print(report.header(facts))
    for problem in problems(options):
        measured = measure(problem, _wanted(options), effort, _memory_limit(options))
        print(report.lines(facts, measured), flush=True)
        rows += measured
    print(report.refusals(rows))

    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / f"{facts['date'][:10]}-{environment.device_slug(facts)}"
    report.write_json(stem.with_suffix(".json"), facts, matmuls, rows)
    report.plot(stem.with_suffix(".png"), facts, matmuls, rows)
    print(f"wrote {stem}.json and {stem}.png")
    return 0


def problems(options: argparse.Namespace) -> list[Problem]:
    """Every problem the options ask for, in the order of the table."""
    return [
        Problem(
            Shape(B=options.batch, T=length, S=length, N=options.heads, K=options.kv_heads, H=options.head_dim),
            jnp.dtype(dtype),
            is_causal=mask == "causal",
            has_backward=direction == PASSES[1],
        )
        for dtype, mask, direction, length in itertools.product(
            options.dtypes, options.masks, options.passes, options.lengths
        )
    ]


def _wanted(options):
    return {name: contender for name, contender in contenders().items() if name in (options.contenders or contenders())}


def _memory_limit(options):
    return None if options.memory_limit is None else int(options.memory_limit * 2**30)


if __name__ == "__main__":
    sys.exit(main())
