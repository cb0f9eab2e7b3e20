"""Memory that attention needs and bytes that it moves, against the length: `python -m benchmarks.memory_traffic`.

Two claims of FlashAttention (arXiv:2205.14135): memory beyond inputs and outputs grows linearly with the length, where
standard attention grows with its square; and with M bytes on chip the bytes read and written are O(T^2 d^2 / M), where
standard attention moves O(T d + T^2). Memory is what XLA reserves for the compiled forward and backward. Bytes are
counted by Nsight Compute in one forward call, caches flushed before each kernel: between the multiprocessors and the L2
cache (the paper's model, which has no L2) and between L2 and device memory.
Writes benchmarks/results/memory-traffic-<date>-<device>.json and .png. Needs ncu.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import functools
import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jaxflash
from benchmarks import environment
from benchmarks.contenders import Shape

RESULTS = Path(__file__).parent / "results"
SECTOR_BYTES = 32
METRICS = {  # what a row calls the sum of these counters
    "device_read_bytes": ("dram__bytes_read.sum", 1),
    "device_write_bytes": ("dram__bytes_write.sum", 1),
    "l2_bytes": ("lts__t_sectors_srcunit_tex.sum", SECTOR_BYTES),
}
MARKER = "sin"  # in the name of the kernel that runs before each length
CONTENDERS = {
    "jaxflash-fa3": functools.partial(jaxflash.attention, implementation="fa3"),
    "jaxflash-fa2": functools.partial(jaxflash.attention, implementation="fa2"),
    "jaxflash-fa1": functools.partial(jaxflash.attention, implementation="fa1"),
    "jax-xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
}


def shape_of(length: int, options) -> Shape:
    return Shape(B=1, T=length, S=length, N=options.heads, K=options.heads, H=options.head_dim)


def temp_bytes(attend, shape: Shape) -> int:
    """Of the compiled forward and backward."""
    q, k, v, dout = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shape.random_inputs(jnp.bfloat16))

    def forward_and_backward(q, k, v, dout):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(dout)

    return jax.jit(forward_and_backward).lower(q, k, v, dout).compile().memory_analysis().temp_size_in_bytes


def run_under_profiler(name: str, options) -> None:
    """One forward call for each length, each after a marker, while the profiler listens."""
    driver = ctypes.CDLL("libcuda.so.1")
    for length in options.lengths:
        q, k, v, _ = shape_of(length, options).random_inputs(jnp.bfloat16)
        attend = jax.jit(CONTENDERS[name], compiler_options={"xla_gpu_enable_command_buffer": ""})
        mark = jax.jit(jnp.sin)
        jax.block_until_ready((attend(q, k, v), mark(np.float32(length))))
        driver.cuProfilerStart()
        jax.block_until_ready(mark(np.float32(length)))
        jax.block_until_ready(attend(q, k, v))
        driver.cuProfilerStop()


def traffic(name: str, options) -> list[dict[str, float]]:
    """The counters of METRICS for each length, summed over the kernels of a call."""
    counters = ",".join(counter for counter, _ in METRICS.values())
    # The clocks are left as they are: bytes do not depend on them.
    profiler = ["ncu", "--csv", "--profile-from-start", "off", "--clock-control", "none", "--metrics", counters]
    lengths = [str(length) for length in options.lengths]
    sizes = ["--heads", str(options.heads), "--head-dim", str(options.head_dim), "--lengths", *lengths]
    child = [sys.executable, "-m", "benchmarks.memory_traffic", "--run", name, *sizes]
    finished = subprocess.run([*profiler, *child], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        sys.exit(f"ncu failed on {name}:\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}")
    table = finished.stdout[finished.stdout.index('"ID"') :]
    sums: list[dict[str, float]] = []
    seen = set()
    for row in csv.DictReader(io.StringIO(table)):
        if MARKER in row["Kernel Name"]:
            if row["ID"] not in seen:
                sums.append(dict.fromkeys(METRICS, 0.0) | {"kernels": 0})
                seen.add(row["ID"])
            continue
        if row["ID"] not in seen:
            sums[-1]["kernels"] += 1
            seen.add(row["ID"])
        for metric, (counter, factor) in METRICS.items():
            if row["Metric Name"] == counter:
                sums[-1][metric] += factor * bytes_of(row)
    if len(sums) != len(options.lengths) or not all(of_length["kernels"] for of_length in sums):
        sys.exit(f"ncu saw {len(sums)} calls of {name}, expected {len(options.lengths)}:\n{table[:3000]}")
    return sums


def bytes_of(row: dict[str, str]) -> float:
    scale = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 1, "": 1}
    return float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]]


def plot(rows: list[dict], options, path: Path) -> None:
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = (
        ("temp_bytes", "memory beyond inputs and outputs, forward+backward"),
        ("l2_bytes", "bytes between multiprocessors and L2, forward"),
        ("device_bytes", "bytes between L2 and device memory, forward"),
    )
    for axis, (field, title) in zip(axes, panels, strict=True):
        for name in CONTENDERS:
            values = [row[field] for row in rows if row["contender"] == name]
            axis.loglog(options.lengths, values, marker="o", label=name, base=2)
        axis.set(title=title, xlabel="length T = S", ylabel="bytes")
    axes[0].legend()
    figure.suptitle(f"B=1, N={options.heads}, H={options.head_dim}, bfloat16, not causal")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16_384])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--run", choices=CONTENDERS, help="only run this contender; what the profiler is started on")
    options = parser.parse_args()
    if options.run:
        run_under_profiler(options.run, options)
        return

    rows = []
    for name, attend in CONTENDERS.items():
        for length, counters in zip(options.lengths, traffic(name, options), strict=True):
            row = {"contender": name, "length": length, "temp_bytes": temp_bytes(attend, shape_of(length, options))}
            row |= counters | {"device_bytes": counters["device_read_bytes"] + counters["device_write_bytes"]}
            rows.append(row)
            mib = {field: f"{row[field] / 2**20:.1f}" for field in ("temp_bytes", "l2_bytes", "device_bytes")}
            print(f"{name:13} T={length:<6} MiB: {mib} in {row['kernels']} kernels", flush=True)
    facts = environment.describe()
    stem = RESULTS / f"memory-traffic-{facts['date'][:10]}-{environment.device_slug(facts)}"
    sizes = {"B": 1, "heads": options.heads, "head_dim": options.head_dim, "dtype": "bfloat16"}
    text = json.dumps({"environment": facts, "unit": "bytes", **sizes, "rows": rows}, indent=1)
    stem.with_suffix(".json").write_text(text + "\n")
    plot(rows, options, stem.with_suffix(".png"))
    print(f"written: {stem}.json and .png")


if __name__ == "__main__":
    main()
