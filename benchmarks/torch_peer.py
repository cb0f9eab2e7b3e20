"""jaxflash's GPU kernels beside PyTorch's FlashAttention-2, in one process: `python -m benchmarks.torch_peer`.

Every cell of 16,384 tokens a batch and hidden size 2048. Contenders take turns; each round times a run of calls that
fill the device's queue, so that launches are hidden, and the median over rounds counts. Inputs are standard normal.
Writes benchmarks/results/torch-peer-<date>-<device>.json. Needs PyTorch with CUDA; run with
XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both frameworks find memory.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import torch

import jaxflash
from benchmarks import environment
from benchmarks.contenders import Shape

TOKENS, HIDDEN = 16_384, 2048
RESULTS = Path(__file__).parent / "results"


def ours(attend: Callable, shape: Shape, is_causal: bool, has_backward: bool) -> Callable[[], object]:
    """One call of a JAX function, not waited for."""
    q, k, v, dout = shape.random_inputs(jnp.bfloat16)
    attend = functools.partial(attend, is_causal=is_causal)

    def forward_and_backward(q, k, v, dout):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(dout)

    if has_backward:
        run = jax.jit(forward_and_backward)
        return lambda: run(q, k, v, dout)
    run = jax.jit(attend)
    return lambda: run(q, k, v)


def theirs(shape: Shape, is_causal: bool, has_backward: bool) -> Callable[[], object]:
    """One call of PyTorch's flash backend (FlashAttention-2), not waited for."""
    size = (shape.B, shape.N, shape.T, shape.H)
    q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(has_backward)

    def run():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            return torch.autograd.grad(out, (q, k, v), dout) if has_backward else out

    return run


def wait(result) -> None:
    if isinstance(result, torch.Tensor) or (isinstance(result, tuple) and isinstance(result[0], torch.Tensor)):
        torch.cuda.synchronize()
    else:
        jax.block_until_ready(result)


def seconds_a_call(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = run()
    wait(result)
    return (time.perf_counter() - start) / calls


def measure(shape: Shape, is_causal: bool, has_backward: bool, rounds: int, calls: int) -> dict:
    """Median TFLOP/s of each contender in one cell."""
    contenders = {
        "jaxflash-fa2": ours(
            functools.partial(jaxflash.attention, implementation="fa2"), shape, is_causal, has_backward
        ),
        "torch-fa2": theirs(shape, is_causal, has_backward),
        "jax-cudnn": ours(
            functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), shape, is_causal, has_backward
        ),
    }
    if shape.H > 128:
        del contenders["jax-cudnn"]  # its backward and, for some lengths, its forward refuse
    seconds = {name: [] for name in contenders}
    for run in contenders.values():
        wait(run())
    for _ in range(rounds):
        for name, run in contenders.items():
            seconds[name].append(seconds_a_call(run, calls))
    flops = shape.flops(is_causal=is_causal, has_backward=has_backward)
    return {name: flops / statistics.median(times) / 1e12 for name, times in seconds.items()}


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 16_384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=10, help="calls a round")
    options = parser.parse_args()

    rows = []
    cells = itertools.product((False, True), options.head_dims, (False, True), options.lengths)
    for has_backward, head_dim, is_causal, length in cells:
        heads = HIDDEN // head_dim
        shape = Shape(B=TOKENS // length, T=length, S=length, N=heads, K=heads, H=head_dim)
        speeds = measure(shape, is_causal, has_backward, options.rounds, options.calls)
        rows.append({"head_dim": head_dim, "length": length, "is_causal": is_causal, "has_backward": has_backward})
        rows[-1]["tflops"] = speeds
        shown = "  ".join(f"{name} {speed:6.1f}" for name, speed in speeds.items())
        kind = "forward+backward" if has_backward else "forward"
        print(f"{kind:17}d={head_dim:<4}T={length:<6}{'causal' if is_causal else 'full':7}{shown}", flush=True)
    for has_backward in (False, True):
        ratios = [
            row["tflops"]["jaxflash-fa2"] / row["tflops"]["torch-fa2"]
            for row in rows
            if row["has_backward"] == has_backward
        ]
        kind = "forward+backward" if has_backward else "forward"
        print(f"{kind}: {statistics.geometric_mean(ratios):.3f} times torch-fa2, at least {min(ratios):.3f}")

    facts = environment.describe()
    facts["versions"] |= {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver_version()}
    path = RESULTS / f"torch-peer-{facts['date'][:10]}-{environment.device_slug(facts)}.json"
    path.write_text(json.dumps({"environment": facts, "unit": "TFLOP/s, medians", "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
