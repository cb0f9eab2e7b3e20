"""FlashAttention-3 beside the attention that JAX users can install on Hopper: `python -m benchmarks.jax_peers`.

Scenarios:
  dense   16,384 tokens a batch, hidden size 2048, every head dim, mask, length, dtype and pass
  gqa     the same with eight query heads for each KV head, causal
  packed  a row of 16,384 tokens that is eight documents
  window  a row of 32,768 tokens of which a query sees itself and the 1,023 before it

Contenders: jaxflash; dew, the authors' own kernels (`pip install dew-flash-attn-cu13`); cuDNN through jax.nn; tokamax.
What is not installed is left out, what refuses a cell is recorded with its reason. They take turns, in a new random
order each round, on the same standard normal inputs, and a matrix product of 8192^3 takes its turn as well: such a card
is limited by its power, so a speed means little without one from the same minute. A turn is programs of calls on
different queries without command buffers, enough of them to fill the device's queue; the median over rounds counts.
Every contender's output is compared with the first one's.

Writes benchmarks/results/jax-peers-<date>-<device>.json after every cell. Let the machine do nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
from benchmarks import device_timing, environment
from benchmarks.contenders import Shape
from benchmarks.device_timing import compile_all, first_line, repeated, seconds

WINDOW = 1024
SCENARIOS = ("dense", "gqa", "packed", "window")
PASSES = {"forward": False, "forward+backward": True}
MASKS = {"full": False, "causal": True}
BARS = {"forward": 1.06, "forward+backward": 1.04}  # geometric mean of the speed relative to dew; no cell below 1
LARGEST_DIFFERENCE = 0.02  # of outputs, relative to their norm
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem, measured in one pass.

    Attributes:
      pairs: (query, key) pairs that count as work, of all heads and batch entries.
      documents: Where the documents of the only row begin, and its end; None = not packed.
    """

    scenario: str
    dtype: str
    shape: Shape
    is_causal: bool
    has_backward: bool
    pairs: float
    window: int | None = None
    documents: tuple[int, ...] | None = None

    @property
    def flops(self) -> float:
        """As `Shape.flops` counts them."""
        return 4.0 * self.pairs * self.shape.H * (3.5 if self.has_backward else 1.0)

    @property
    def longest(self) -> int:
        return max(end - begin for begin, end in itertools.pairwise(self.documents))

    def describe(self) -> dict:
        shape = {"head_dim": self.shape.H, "heads": self.shape.N, "kv_heads": self.shape.K}
        return (
            {"scenario": self.scenario, "dtype": self.dtype, "batch": self.shape.B, "length": self.shape.T}
            | shape
            | {"is_causal": self.is_causal, "has_backward": self.has_backward}
        )

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        passes = "fwd+bwd" if self.has_backward else "fwd"
        return f"{self.scenario:7}{self.dtype:9}{passes:8}d={self.shape.H:<4}T={self.shape.T:<6}{mask:7}"


# --- Cells ------------------------------------------------------------------------------------------------------------


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Those that the options select."""
    for scenario, dtype, name, head_dim in itertools.product(
        options.scenarios, options.dtypes, options.passes, options.head_dims
    ):
        heads = options.hidden // head_dim
        row = Shape(B=1, T=options.tokens, S=options.tokens, N=heads, K=heads, H=head_dim)
        new = functools.partial(Cell, scenario, dtype, has_backward=PASSES[name])
        masks = [MASKS[mask] for mask in options.masks]
        if scenario in ("dense", "gqa"):
            for is_causal, length in itertools.product(masks, options.lengths):
                kv_heads = heads if scenario == "dense" else max(heads // 8, 1)
                shape = dataclasses.replace(row, B=options.tokens // length, T=length, S=length, K=kv_heads)
                if scenario == "dense" or is_causal:
                    yield new(
                        shape, is_causal, pairs=shape.flops(is_causal=is_causal, has_backward=False) / 4 / head_dim
                    )
        elif scenario == "packed":
            documents = cut(options.tokens, 8)
            squares = sum((end - begin) ** 2 for begin, end in itertools.pairwise(documents))
            for is_causal in masks:
                pairs = heads * squares * (0.5 if is_causal else 1.0)
                yield new(row, is_causal, pairs=pairs, documents=documents)
        else:
            length, window = 2 * options.tokens, min(WINDOW, options.tokens)
            pairs = heads * (length * window - window * window / 2)
            yield new(dataclasses.replace(row, T=length, S=length), True, pairs=pairs, window=window)


def cut(tokens: int, count: int) -> tuple[int, ...]:
    """Ends of `count` documents, cut at random places."""
    places = np.random.default_rng(0).choice(np.arange(1, tokens), count - 1, replace=False)
    return (0, *(int(place) for place in np.sort(places)), tokens)


# --- Contenders: Cell -> attend(q, k, v) -> out; one that cannot run the cell raises ----------------------------------


def ours(implementation: str, cell: Cell) -> Callable:
    if cell.documents is None:
        window = None if cell.window is None else (cell.window - 1, 0)
        return functools.partial(
            jaxflash.attention, is_causal=cell.is_causal, local_window_size=window, implementation=implementation
        )
    offsets = np.asarray(cell.documents, np.int32)
    packed = functools.partial(
        jaxflash.flash_mha_varlen, cu_seqlens_q=offsets, is_causal=cell.is_causal, implementation=implementation
    )
    return lambda q, k, v: packed(q[0], k[0], v[0])[None]


def dew(cell: Cell) -> Callable:
    import dew_flash_attn

    window = (-1, -1) if cell.window is None else (cell.window - 1, 0)
    if cell.documents is None:
        return functools.partial(dew_flash_attn.flash_mha, is_causal=cell.is_causal, window_size=window)
    offsets = np.asarray(cell.documents, np.int32)

    def packed(q, k, v):
        return dew_flash_attn.flash_mha_varlen(q[0], k[0], v[0], offsets, cell.longest, is_causal=cell.is_causal)[None]

    return packed


def jax_nn(implementation: str, cell: Cell) -> Callable:
    return like_jax_nn(functools.partial(jax.nn.dot_product_attention, implementation=implementation), cell)


def tokamax(cell: Cell) -> Callable:
    import tokamax

    return like_jax_nn(functools.partial(tokamax.dot_product_attention, implementation="mosaic"), cell)


def like_jax_nn(attend: Callable, cell: Cell) -> Callable:
    if cell.documents is not None:
        raise NotImplementedError("takes no packed sequences")
    window = None if cell.window is None else (cell.window - 1, 0)
    return functools.partial(attend, is_causal=cell.is_causal, local_window_size=window)


PEERS: dict[str, tuple[str | None, Callable]] = {  # the package, and the contender
    "dew": ("dew_flash_attn", dew),
    "jax-cudnn": (None, functools.partial(jax_nn, "cudnn")),
    "tokamax": ("tokamax", tokamax),
}


def installed(names: list[str]) -> dict[str, Callable]:
    """The peers that can be imported; says which cannot."""
    found = {}
    for name in names:
        package, contender = PEERS[name]
        try:
            if package is not None:
                importlib.import_module(package)
        except Exception as error:  # a library that does not load raises OSError
            print(f"{name} is left out: {type(error).__name__}: {first_line(error)}")
        else:
            found[name] = contender
    return found


# --- Measuring --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Prepared:
    """The compiled programs of one cell, and why other contenders have none."""

    cell: Cell
    programs: dict[str, Callable]
    refusals: dict[str, str]


def prepare(group: list[Cell], peers: dict[str, Callable], options: argparse.Namespace) -> list[Prepared]:
    """Traces one after the other, and compiles on all cores: nothing is measured meanwhile."""
    prepared = []
    for cell in group:
        names = options.implementations if cell.scenario == "dense" else [*options.implementations, *options.beside]
        contenders = {f"jaxflash-{name}": functools.partial(ours, name) for name in dict.fromkeys(names)} | peers
        lowered, refusals = {}, {}
        for name, contender in contenders.items():
            try:
                attend = contender(cell)
                lowered[name] = device_timing.lower(
                    attend, cell.shape, cell.has_backward, options.calls, dtype=jnp.dtype(cell.dtype)
                )
            except Exception as error:
                refusals[name] = first_line(error)
        prepared.append(Prepared(cell, lowered, refusals))

    programs, errors = compile_all({(i, name): x for i, one in enumerate(prepared) for name, x in one.programs.items()})
    for i, one in enumerate(prepared):
        one.programs = {name: programs[i, name] for name in one.programs if (i, name) in programs}
        one.refusals |= {name: error for (place, name), error in errors.items() if place == i}
    return prepared


def matmul(size: int, dtype: str, turn_flops: float, calls: int = 4) -> tuple[Callable[[], object], float]:
    """A turn of products of square matrices."""
    keys = jax.random.split(jax.random.key(2), calls + 1)
    right, *left = (jax.random.normal(key, (size, size), dtype) for key in keys)
    every = jax.jit(lambda left, right: [x @ right for x in left])
    return repeated(lambda: every(left, right), 2.0 * size**3 * calls, turn_flops)


def output_of(result) -> np.ndarray:
    """The first head of the first call's output, in the first batch entry."""
    return np.asarray(jax.tree.leaves(result)[0][0, :, 0]).astype(np.float32)


def measure(one: Prepared, product: tuple[Callable[[], object], float], options: argparse.Namespace) -> dict:
    """Median TFLOP/s of each contender and of the matrix product in one cell."""
    arrays = device_timing.inputs(one.cell.shape, options.calls, jnp.dtype(one.cell.dtype))
    turns = {"matmul": product}
    outputs = {}
    for name, compiled in one.programs.items():
        run = functools.partial(compiled, *arrays, ())
        try:
            outputs[name] = output_of(run())
        except Exception as error:
            one.refusals[name] = first_line(error)
        else:
            turns[name] = repeated(run, one.cell.flops * options.calls, options.turn)
    times = device_timing.seconds_of_turns(turns, options.rounds, order=random.Random(0))
    samples = {name: [1e-12 / x for x in found] for name, found in times.items()}
    expected = next(iter(outputs.values()), None)
    return one.cell.describe() | {
        "tflops": {name: float(f"{statistics.median(x):.5g}") for name, x in samples.items()},
        "slowest": {name: float(f"{min(x):.5g}") for name, x in samples.items()},
        "fastest": {name: float(f"{max(x):.5g}") for name, x in samples.items()},
        "differences": {name: relative_difference(x, expected) for name, x in outputs.items()},
        "refusals": one.refusals,
    }


def relative_difference(x: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(x - expected) / np.linalg.norm(expected))


# --- What is shown ----------------------------------------------------------------------------------------------------


def line(cell: Cell, row: dict) -> str:
    speeds = "  ".join(f"{name} {speed:6.1f}" for name, speed in row["tflops"].items())
    wrong = [name for name, x in row["differences"].items() if not x < LARGEST_DIFFERENCE]
    notes = [f"  DIFFERENT OUTPUT: {', '.join(wrong)}"] if wrong else []
    notes += [f"\n    {name} did not run: {reason}" for name, reason in row["refusals"].items()]
    return f"{cell}{speeds}{''.join(notes)}"


def summary(rows: list[dict], names: list[str]) -> str:
    """For each scenario and pass: the first name's speed relative to everyone else's, and the bars."""
    lines = []
    first, *others = [f"jaxflash-{name}" for name in names]
    for scenario, (name, has_backward) in itertools.product(SCENARIOS, PASSES.items()):
        found = [
            row
            for row in rows
            if row["scenario"] == scenario and row["has_backward"] == has_backward and first in row["tflops"]
        ]
        for other in [*PEERS, *others, "matmul"]:
            both = [row for row in found if other in row["tflops"]]
            ratios = [row["tflops"][first] / row["tflops"][other] for row in both]
            if not ratios:
                continue
            mean = statistics.geometric_mean(ratios)
            text = f"{scenario:7}{name:17}{first} / {other:13}{mean:6.3f}, {min(ratios):.3f} to {max(ratios):.3f}, "
            text += f"{len(ratios)} of {len(found)} cells"
            if scenario == "dense" and other == "dew":
                is_met = mean >= BARS[name] and min(ratios) >= 1.0
                text += f"; bars {BARS[name]} and 1.00: {'met' if is_met else 'MISSED'}"
                text += "".join(
                    f"\n    {ratio:.3f}  {row['dtype']} d={row['head_dim']} T={row['length']} "
                    f"{'causal' if row['is_causal'] else 'full'}"
                    for ratio, row in sorted(zip(ratios, both, strict=True), key=lambda pair: pair[0])[:8]
                )
            lines.append(text)
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementations", nargs="+", default=["fa3"], help="of jaxflash; the first one is compared")
    parser.add_argument("--beside", nargs="*", default=["fa2"], help="of jaxflash, in the scenarios other than dense")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 16_384])
    parser.add_argument("--tokens", type=int, default=16_384, help="a batch")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--matmul", type=int, default=8192, help="size of the matrix product")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=4, help="calls a program")
    parser.add_argument("--turn", type=float, default=1e13, help="FLOPs of a turn at least (default: 15 ms)")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of matrix products before the first cell")
    parser.add_argument("--ahead", type=int, default=8, help="cells that are compiled together")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    peers = installed(options.peers)
    facts = environment.describe()
    facts["versions"] |= {name: version for name in peers if (version := version_of(PEERS[name][0]))}
    path = options.output / f"jax-peers-{facts['date'][:10]}-{environment.device_slug(facts)}.json"
    products = {dtype: matmul(options.matmul, dtype, options.turn) for dtype in options.dtypes}
    for run, _ in products.values():
        seconds(run)
    spent = 0.0
    while spent < options.warm:
        spent += sum(seconds(run) for run, _ in products.values())

    everything, rows = list(cells(options)), []
    for start in range(0, len(everything), options.ahead):
        for one in prepare(everything[start : start + options.ahead], peers, options):
            row = measure(one, products[one.cell.dtype], options)
            print(line(one.cell, row), flush=True)
            rows.append(row)
            asked = {name: value for name, value in vars(options).items() if name != "output"}
            record = {"environment": facts, "unit": "TFLOP/s, medians", "options": asked, "rows": rows}
            path.write_text(json.dumps(record, indent=1) + "\n")
    print(summary(rows, list(dict.fromkeys([*options.implementations, *options.beside]))))
    print(f"written: {path}")


def version_of(package: str | None) -> str | None:
    distributions = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.version(distributions[0]) if distributions else None


if __name__ == "__main__":
    main()
