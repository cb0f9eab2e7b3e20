"""What each idea of the FlashAttention-3 forward is worth: `python -m benchmarks.ablation`.

After Table 2 of arXiv:2407.08608. Compiles benchmarks/ablation.cu once for each variant with nvcc, which must be on the
path, and times them by CUDA events in one process, bfloat16, 16,384 tokens a batch, hidden size 2048, standard normal
inputs. They take turns, in a new random order each round; medians over rounds count. One head's output is compared with
JAX's own attention. Writes benchmarks/results/ablation-<date>-<device>.json and .png. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from benchmarks import environment
from benchmarks.contenders import Shape

SOURCE = Path(__file__).parent / "ablation.cu"
RESULTS = Path(__file__).parent / "results"
VARIANTS = {  # the name in ablation.cu, and in words
    "Complete": "complete",
    "NoPingPong": "without ping-pong",
    "NoOverlap": "without overlap inside a warpgroup",
    "NoHeldWait": "wait where ptxas puts it",
    "NoSpecialisation": "without warp specialisation",
}
TAKE_NO_MASK = ("NoSpecialisation",)
FLAGS = ["-std=c++20", "-O3", "--use_fast_math", "-gencode", "arch=compute_90a,code=sm_90a", "-shared"]
TURN_FLOPS = 1e13
TOKENS, HIDDEN = 16_384, 2048


def build(variant: str, folder: Path) -> ctypes.CDLL:
    """Compiles a variant, unless the folder has it."""
    library = folder / f"{variant}.so"
    if not library.exists():
        compile_variant(variant, library)
    loaded = ctypes.CDLL(str(library))
    loaded.forward_milliseconds.restype = ctypes.c_float
    return loaded


def compile_variant(variant: str, library: Path) -> None:
    includes = ["-I", str(SOURCE.parent.parent / "csrc"), "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *FLAGS, *includes, f"-DVARIANT={variant}", str(SOURCE), "-o", str(library)], check=True)


def measure(libraries: dict[str, ctypes.CDLL], shape: Shape, is_causal: bool, rounds: int) -> tuple[dict, dict]:
    """Median TFLOP/s of each variant that takes the cell, and how far its output is from JAX's own."""
    q, k, v, _ = shape.random_inputs(jnp.bfloat16)
    scratch = jnp.zeros(2 * shape.B * shape.T * shape.N + 1, jnp.float32)
    outputs = {name: q + 0 for name in libraries}  # memory of their own, which the kernels fill
    jax.block_until_ready((q, k, v, scratch, outputs))
    flops = shape.flops(is_causal=is_causal, has_backward=False)
    calls = max(2, round(TURN_FLOPS / flops))

    def milliseconds(name: str, calls: int) -> float:
        arrays = (q, k, v, outputs[name], scratch)
        pointers = [ctypes.c_void_p(x.unsafe_buffer_pointer()) for x in arrays]
        sizes = [ctypes.c_int64(x) for x in (shape.B, shape.T, shape.N, shape.H)]
        found = libraries[name].forward_milliseconds(*pointers, *sizes, int(is_causal), calls)
        if found < 0:
            raise RuntimeError(f"{name}: CUDA error {-found:.0f}")
        return found

    samples: dict[str, list[float]] = {name: [] for name in libraries}
    for name in libraries:
        milliseconds(name, 1)
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(samples), len(samples)):
            samples[name].append(milliseconds(name, calls))
    expected = first_head(jax.nn.dot_product_attention(*(x[:1, :, :1] for x in (q, k, v)), is_causal=is_causal))
    heads = {name: first_head(outputs[name]) for name in samples}
    differences = {name: float(np.linalg.norm(x - expected) / np.linalg.norm(expected)) for name, x in heads.items()}
    return {name: flops / statistics.median(times) / 1e9 for name, times in samples.items()}, differences


def first_head(x: jax.Array) -> np.ndarray:
    return np.asarray(x[0, :, 0]).astype(np.float32)


def plot(rows: list[dict], facts: dict, path: Path) -> None:
    """Bars of TFLOP/s for each length, a panel for each head dim and mask."""
    panels = list(dict.fromkeys((row["head_dim"], row["is_causal"]) for row in rows))
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    for axis, (head_dim, is_causal) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        here = [row for row in rows if (row["head_dim"], row["is_causal"]) == (head_dim, is_causal)]
        width = 0.8 / len(VARIANTS)
        for i, (name, words) in enumerate(VARIANTS.items()):
            places = [(j + i * width, row["tflops"][name]) for j, row in enumerate(here) if name in row["tflops"]]
            if places:
                axis.bar(*zip(*places, strict=True), width=width, color=f"C{i}", label=words)
        axis.set_xticks([j + 0.4 - width / 2 for j in range(len(here))], [f"{row['length']:,}" for row in here])
        axis.set(title=f"head dim {head_dim}, {'causal' if is_causal else 'full'}", xlabel="length T = S")
        axis.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("TFLOP/s, forward, bfloat16")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(f"{environment.device_slug(facts)}, {facts['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=120)


def line(row: dict) -> str:
    mask = "causal" if row["is_causal"] else "full"
    whole = row["tflops"]["Complete"]
    speeds = "  ".join(
        f"{name} {speed:5.0f} ({speed / whole:.3f}{'' if row['differences'][name] < 0.02 else ', WRONG'})"
        for name, speed in row["tflops"].items()
    )
    return f"d={row['head_dim']:<4}T={row['length']:<6}{mask:7}{speeds}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="Complete is added")
    parser.add_argument("--head-dims", type=int, nargs="+", choices=(64, 128), default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16_384])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--libraries", type=Path, help="keep the compiled variants here, and take them from here")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)

    names = list(dict.fromkeys(["Complete", *options.variants]))
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        folder = options.libraries or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        built = pool.map(lambda name: build(name, folder), names)
        libraries = dict(zip(names, built, strict=True))
        for head_dim, is_causal, length in itertools.product(options.head_dims, (False, True), options.lengths):
            heads = HIDDEN // head_dim
            able = {name: x for name, x in libraries.items() if not (is_causal and name in TAKE_NO_MASK)}
            shape = Shape(B=TOKENS // length, T=length, S=length, N=heads, K=heads, H=head_dim)
            speeds, differences = measure(able, shape, is_causal, options.rounds)
            row = {"head_dim": head_dim, "length": length, "is_causal": is_causal}
            rows.append(row | {"tflops": speeds, "differences": differences})
            print(line(rows[-1]), flush=True)
    facts = environment.describe()
    stem = options.output / f"ablation-{facts['date'][:10]}-{environment.device_slug(facts)}"
    record = {"environment": facts, "unit": "TFLOP/s, medians", "variants": VARIANTS, "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    plot(rows, facts, stem.with_suffix(".png"))
    print(f"written: {stem}.json and .png")


if __name__ == "__main__":
    main()
