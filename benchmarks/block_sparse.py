"""Time of block-sparse attention against the share of blocks that is kept: `python -m benchmarks.block_sparse`.

Each share keeps that many blocks of 128 x 128, drawn uniformly. `efficiency` is the time of the same kernel with every
block kept, times the share, over the time measured: 1 = zero blocks cost nothing. `speedup` is against the same call
without a block mask. Contenders take turns, each of programs that fill the device's queue; medians count.
Writes benchmarks/results/block-sparse-<date>-<device>.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxflash
from benchmarks import environment
from benchmarks.contenders import Shape
from benchmarks.device_timing import program, repeated, seconds, seconds_of_turns

BLOCK = 128
SHARES = (1.0, 0.25, 0.0625)
RESULTS = Path(__file__).parent / "results"


def blocks_of(share: float, length: int) -> jnp.ndarray:
    """[1, 1, length / BLOCK, length / BLOCK] bool, exactly that share of them True."""
    count = length // BLOCK
    kept = np.zeros(count * count, bool)
    kept[: round(share * kept.size)] = True
    return jnp.asarray(np.random.default_rng(0).permutation(kept).reshape(1, 1, count, count))


def measure(implementation: str, shape: Shape, has_backward: bool, options: argparse.Namespace) -> dict:
    """Milliseconds a call for each share, and without a block mask."""

    def attend(q, k, v, blocks=None):
        mask = None if blocks is None else jaxflash.BlockMask(blocks, BLOCK, BLOCK)
        return jaxflash.attention(q, k, v, block_mask=mask, implementation=implementation)

    run = functools.partial(program, attend, shape, has_backward, options.calls)
    contenders = {"no block mask": run()} | {str(share): run(blocks_of(share, shape.T)) for share in SHARES}
    shares = {"no block mask": 1.0} | {str(share): share for share in SHARES}
    turns = {name: repeated(contender, shares[name], options.turn) for name, contender in contenders.items()}
    for contender in contenders.values():
        seconds(contender)
    times = seconds_of_turns(turns, options.rounds)
    return {name: 1e3 * shares[name] * statistics.median(samples) / options.calls for name, samples in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementations", nargs="+", default=["fa2", "fa1"])
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="sequences a call")
    parser.add_argument("--hidden", type=int, default=2048, help="heads times head dim")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3, help="calls a program")
    parser.add_argument("--turn", type=float, default=1.0, help="work of a turn, in programs with every block kept")
    options = parser.parse_args()

    rows = []
    cells = itertools.product(options.implementations, options.batch, (64, 128), (False, True))
    for implementation, batch, head_dim, has_backward in cells:
        heads = options.hidden // head_dim
        shape = Shape(B=batch, T=options.length, S=options.length, N=heads, K=heads, H=head_dim)
        times = measure(implementation, shape, has_backward, options)
        for share in SHARES[1:]:
            row = {"implementation": implementation, "batch": batch, "head_dim": head_dim}
            row |= {"has_backward": has_backward, "share": share}
            row["milliseconds"] = times[str(share)]
            row["efficiency"] = share * times["1.0"] / times[str(share)]
            row["speedup"] = times["no block mask"] / times[str(share)]
            rows.append(row)
            kind = "forward+backward" if has_backward else "forward"
            print(
                f"{implementation} B={batch} d={head_dim:<4}{kind:17}{share:7.2%} of blocks: "
                f"{row['milliseconds']:7.3f} ms, efficiency {row['efficiency']:.3f}, "
                f"{row['speedup']:.2f} times as fast as without a block mask",
                flush=True,
            )
    facts = environment.describe()
    path = RESULTS / f"block-sparse-{facts['date'][:10]}-{environment.device_slug(facts)}.json"
    path.write_text(
        json.dumps({"environment": facts, "length": options.length, "hidden": options.hidden, "rows": rows}, indent=1)
        + "\n"
    )
    print(f"written: {path}")


if __name__ == "__main__":
    main()
