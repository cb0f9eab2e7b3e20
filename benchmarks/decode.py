"""Few queries against many keys, beside PyTorch's FlashAttention-2 and cuDNN: `python -m benchmarks.decode`.

Device time: a program of many calls (JAX: one jit, each call on the output of the one before; PyTorch: a CUDA graph)
runs several times before anyone waits, on keys and values that the device's cache no longer holds. The median over
rounds counts. The share of the bandwidth is the bytes of keys and values over the time, relative to a copy on the same
device. Inputs are standard normal. Writes benchmarks/results/decode-<date>-<device>.json. Needs PyTorch with CUDA; run
with XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both frameworks find memory.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import torch

import jaxflash
from benchmarks import environment
from benchmarks.device_timing import first_line

HEAD_DIM = 128
HEADS = ((32, 8), (32, 32))  # query heads, KV heads
CACHE_BYTES = 200e6  # of keys and values that must pass before a call may see the same again
ROUND_BYTES = 50e9  # of keys and values that a round reads, so that starting it does not count
LARGEST_BYTES = 40e9  # of keys and values; larger cells are left out
RESULTS = Path(__file__).parent / "results"


def jax_calls(attend: Callable, q: torch.Tensor, pairs: list, calls: int) -> Callable[[], jax.Array]:
    """A program of `calls` calls, not waited for."""
    arrays = [tuple(map(jnp.from_dlpack, pair)) for pair in pairs]

    @jax.jit
    def chain(x, arrays):
        for i in range(calls):
            x = attend(x, *arrays[i % len(arrays)])
        return x

    query = jnp.from_dlpack(q)
    return lambda: chain(query, arrays)


def torch_calls(q: torch.Tensor, pairs: list, calls: int) -> Callable[[], None]:
    """The same as a CUDA graph of PyTorch's flash backend."""

    def run():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            for i in range(calls):
                k, v = (x.transpose(1, 2) for x in pairs[i % len(pairs)])
                torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), k, v, enable_gqa=q.shape[2] != k.shape[1]
                )

    return torch_graph(run).replay


def torch_graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What `run` launches, captured after a first run outside."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def copy_bandwidth() -> float:
    """Bytes read and written a second by a kernel that goes once through 4 GB."""
    source = torch.zeros(2**30, device="cuda")
    target = torch.empty_like(source)
    copy = torch_graph(lambda: torch.add(source, 1.0, out=target)).replay
    (seconds,) = seconds_a_run({"copy": copy}, rounds=5, repeats=1).values()
    return 2 * source.nbytes / seconds


def seconds_a_run(runs: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, float]:
    """Median time of each contender's run; they take turns, and the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for counts in [False] + [True] * rounds:
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                result = run()
            jax.block_until_ready(result)
            torch.cuda.synchronize()
            if counts:
                seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(times) for name, times in seconds.items()}


def measure(T: int, S: int, B: int, N: int, K: int, rounds: int) -> dict[str, float | str]:
    """Median microseconds a call of each contender in one cell, or why it did not run."""
    kv_bytes = 4 * B * S * K * HEAD_DIM
    copies = max(1, round(CACHE_BYTES / kv_bytes))
    calls = max(copies, min(50, round(2e9 / kv_bytes)), 2)
    repeats = max(1, min(10, round(ROUND_BYTES / (calls * kv_bytes))))
    new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q = new(B, T, N, HEAD_DIM)
    pairs = [(new(B, S, K, HEAD_DIM), new(B, S, K, HEAD_DIM)) for _ in range(copies)]
    makers = {
        "jaxflash-fa2": lambda: jax_calls(functools.partial(jaxflash.attention, implementation="fa2"), q, pairs, calls),
        "jax-cudnn": lambda: jax_calls(
            functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), q, pairs, calls
        ),
        "torch-fa2": lambda: torch_calls(q, pairs, calls),
    }
    results: dict[str, float | str] = {}
    runs = {}
    for name, make in makers.items():
        try:
            run = make()
            jax.block_until_ready(run())
        except Exception as error:  # recorded in place of a time
            results[name] = first_line(error)
        else:
            runs[name] = run
    for name, seconds in seconds_a_run(runs, rounds, repeats).items():
        results[name] = seconds / calls * 1e6
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 32_768, 131_072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for (N, K), T, S, B in itertools.product(HEADS, options.queries, options.keys, options.batches):
        kv_bytes = 4 * B * S * K * HEAD_DIM
        if kv_bytes > LARGEST_BYTES:
            continue
        times = measure(T, S, B, N, K, options.rounds)
        shares = {name: kv_bytes / (time * 1e-6) / bandwidth for name, time in times.items() if isinstance(time, float)}
        torch.cuda.empty_cache()
        rows.append({"T": T, "S": S, "B": B, "N": N, "K": K, "microseconds": times, "share_of_copy": shares})
        shown = "  ".join(
            f"{name} {time:9.1f} ({shares[name]:4.0%})" if name in shares else f"{name} refuses"
            for name, time in times.items()
        )
        print(f"T={T:<3}S={S:<7}B={B:<3}N={N:<3}K={K:<3}{shown}", flush=True)

    facts = environment.describe()
    facts["versions"] |= {"torch": torch.__version__}
    facts |= {"head_dim": HEAD_DIM, "copy_bytes_a_second": bandwidth}
    path = RESULTS / f"decode-{facts['date'][:10]}-{environment.device_slug(facts)}.json"
    path.write_text(json.dumps({"environment": facts, "unit": "microseconds, medians", "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
