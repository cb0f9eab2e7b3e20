"""Errors of each implementation against float64, as data: `python -m benchmarks.accuracy`.

Prints a table and writes benchmarks/results/accuracy-<date>-<device>.json. The judge is the reference in float64 on the
same, already rounded inputs; the peer is `jax.nn.dot_product_attention` in the inputs' dtype.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
from benchmarks import environment

B, T, N, K, H = 2, 1024, 4, 2, 64
CASES = {  # factor on queries and keys: the logits' standard deviation is its square
    "logits of order 1": 1.0,
    "logits of order 10": 3.2,
    "logits of order 1000": 32.0,
}
RESULTS = Path(__file__).parent / "results"


def _inputs(factor: float, dtype):
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    return tuple(jnp.asarray(x, dtype) for x in (q * factor, k * factor, v, dout))


@functools.partial(jax.jit, static_argnums=0)
def _run(attend, q, k, v, dout):
    out, pullback = jax.vjp(attend, q, k, v)
    return (out, *pullback(dout))


def _root_mean_square(errors) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def measure() -> list[dict]:
    """One row a case, dtype, contender and result: root mean square and largest error, and the result's own size."""
    contenders = {
        "cpu": functools.partial(jaxflash.attention, is_causal=True, implementation="cpu"),
        "reference": functools.partial(jaxflash.attention, is_causal=True, implementation="reference"),
        "jax-xla": functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
    }
    rows = []
    for case, factor in CASES.items():
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            inputs = _inputs(factor, dtype)
            with jax.enable_x64(True):
                wide = (jnp.asarray(np.asarray(x, np.float64)) for x in inputs)
                exact = [np.asarray(x) for x in _run(contenders["reference"], *wide)]
            for name, attend in contenders.items():
                if name == "jax-xla" and dtype == jnp.float16:
                    continue  # asks for a float16 product with float32 sums, which XLA's CPU backend lacks
                for result, ours, right in zip(("out", "dq", "dk", "dv"), _run(attend, *inputs), exact, strict=True):
                    error = np.asarray(ours, np.float64) - right
                    rows.append(
                        {
                            "case": case,
                            "dtype": jnp.dtype(dtype).name,
                            "contender": name,
                            "result": result,
                            "rms_error": _root_mean_square(error),
                            "max_error": float(np.max(np.abs(error))),
                            "rms_value": _root_mean_square(right),
                        }
                    )
    return rows


def table(rows: list[dict]) -> str:
    """Root mean square errors, as a Markdown table with a line for each case, dtype and contender."""
    lines = ["| case | dtype | implementation | out | dq | dk | dv |", "|---|---|---|---|---|---|---|"]
    for row in rows[::4]:
        key = [row[name] for name in ("case", "dtype", "contender")]
        errors = [r["rms_error"] for r in rows if [r[n] for n in ("case", "dtype", "contender")] == key]
        lines.append(f"| {' | '.join(key)} | {' | '.join(f'{e:.1e}' for e in errors)} |")
    return "\n".join(lines)


def main():
    rows = measure()
    print(table(rows))
    facts = environment.describe()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"accuracy-{facts['date'][:10]}-{environment.device_slug(facts)}.json"
    sizes = {"B": B, "T": T, "S": T, "N": N, "K": K, "H": H, "is_causal": True, "inputs": "standard normal, seed 0"}
    path.write_text(json.dumps({"environment": facts, "sizes": sizes, "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
