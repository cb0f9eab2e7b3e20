"""jaxflash's GPU kernels beside PyTorch's FlashAttention-2, in one process: `python -m benchmarks.torch_peer`.

Every cell of 16,384 tokens a batch and hidden size 2048. Contenders take turns. A turn is calls on different queries
that fill the device's queue: for JAX programs of several calls without command buffers, so that the calls run one after
the other, for PyTorch a loop. Launches are hidden, and the median over rounds counts. Inputs are standard normal.
Writes benchmarks/results/torch-peer-<date>-<device>.json. Needs PyTorch with CUDA; run with
XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both frameworks find memory.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import torch

import jaxflash
from benchmarks import environment
from benchmarks.contenders import Shape
from benchmarks.device_timing import program, repeated, seconds, seconds_of_turns

TOKENS, HIDDEN = 16_384, 2048
PASSES = {False: "forward", True: "forward+backward"}
RESULTS = Path(__file__).parent / "results"


def theirs(shape: Shape, is_causal: bool, has_backward: bool, calls: int) -> Callable[[], object]:
    """`calls` calls of PyTorch's flash backend (FlashAttention-2), not waited for."""
    size = (shape.B, shape.N, shape.T, shape.H)
    k, v, dout, *queries = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3 + calls))
    for x in (k, v, *queries):
        x.requires_grad_(has_backward)

    def one(q):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return (out, *torch.autograd.grad(out, (q, k, v), dout)) if has_backward else out

    def run():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return [one(q) for q in queries]

    return run


def wait(results) -> None:
    if any(isinstance(x, torch.Tensor) for x in jax.tree.leaves(results)):
        torch.cuda.synchronize()
    else:
        jax.block_until_ready(results)


def measure(shape: Shape, is_causal: bool, has_backward: bool, options: argparse.Namespace) -> dict:
    """Median TFLOP/s of each contender in one cell."""
    calls = options.calls
    contenders = {
        f"jaxflash-{name}": program(
            functools.partial(jaxflash.attention, implementation=name, is_causal=is_causal), shape, has_backward, calls
        )
        for name in options.implementations
        if shape.H <= 128 or name == "fa2"
    }
    contenders["torch-fa2"] = theirs(shape, is_causal, has_backward, calls)
    if not options.no_cudnn and shape.H <= 128:  # beyond, its backward and, for some lengths, its forward refuse
        cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=is_causal)
        contenders["jax-cudnn"] = program(cudnn, shape, has_backward, calls)
    flops = calls * shape.flops(is_causal=is_causal, has_backward=has_backward)
    turns = {name: repeated(run, flops, options.turn) for name, run in contenders.items()}
    for run in contenders.values():
        seconds(run, wait)
    times = seconds_of_turns(turns, options.rounds, wait)
    return {name: 1e-12 / statistics.median(samples) for name, samples in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementations", nargs="+", default=["fa3", "fa2", "fa1"])
    parser.add_argument("--no-cudnn", action="store_true", help="leave cuDNN through jax.nn out")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 16_384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=4, help="calls a program")
    parser.add_argument("--turn", type=float, default=5e12, help="FLOPs of a turn at least (default: about 15 ms)")
    options = parser.parse_args()

    rows = []
    try:
        for row in measure_cells(options):
            rows.append(row)
    finally:  # an interrupted run keeps what it has measured
        report(rows, options.implementations)


def measure_cells(options) -> Iterator[dict]:
    for has_backward, head_dim, is_causal, length in itertools.product(
        (False, True), options.head_dims, (False, True), options.lengths
    ):
        heads = HIDDEN // head_dim
        shape = Shape(B=TOKENS // length, T=length, S=length, N=heads, K=heads, H=head_dim)
        speeds = measure(shape, is_causal, has_backward, options)
        shown = "  ".join(f"{name} {speed:6.1f}" for name, speed in speeds.items())
        mask = "causal" if is_causal else "full"
        print(f"{PASSES[has_backward]:17}d={head_dim:<4}T={length:<6}{mask:7}{shown}", flush=True)
        cell = {"head_dim": head_dim, "length": length, "is_causal": is_causal, "has_backward": has_backward}
        yield cell | {"tflops": speeds}


def report(rows: list[dict], implementations: list[str]) -> None:
    for has_backward, name in itertools.product((False, True), implementations):
        speeds = [row["tflops"] for row in rows if row["has_backward"] == has_backward]
        ratios = [cell[f"jaxflash-{name}"] / cell["torch-fa2"] for cell in speeds if f"jaxflash-{name}" in cell]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"{name} {PASSES[has_backward]}: {mean:.3f} times torch-fa2, {min(ratios):.3f} to {max(ratios):.3f}")
    facts = environment.describe()
    facts["versions"] |= {"torch": torch.__version__}
    path = RESULTS / f"torch-peer-{facts['date'][:10]}-{environment.device_slug(facts)}.json"
    path.write_text(json.dumps({"environment": facts, "unit": "TFLOP/s, medians", "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
