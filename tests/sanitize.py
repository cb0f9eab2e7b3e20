"""Runs every GPU kernel under compute-sanitizer: `python tests/sanitize.py`, or make sanitize.

One process a tool runs at least 100 problems, forward and backward, that between them reach every instance: each
implementation, dtype, head dim class, plain and general features, atomics and deterministic, packed, few queries
(split keys) and bias gradients, with NaN in everything that is padding. Exits with 1 if any tool finds anything.

memcheck and initcheck watch every allocation by itself, so nothing hides in a pool. initcheck must see XLA's kernels
write to know what is initialised; the other tools watch only ours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
ROOT = Path(__file__).parents[1]
OPTIONS = {  # of cases.Case; None = no option
    "plain": {},
    "causal": {"is_causal": True, "causal_alignment": "bottom_right"},
    "lengths": {"has_query_lengths": True, "has_kv_lengths": True, "has_poison": True},
    "packed": {"batch": (), "sequences": 4, "is_causal": True, "has_poison": True},
    "masks": {"mask": "B1TS", "segments": 3, "has_padding_segment": True, "has_poison": True, "dropout_rate": 0.3},
    "blocks": {"block_mask": (32, 64), "local_window_size": (90, 30)},
    "bias": {"bias": "1NTS", "logits_soft_cap": 5.0, "sinks": "float32"},
    "broadcast bias": {"bias": "B11S", "bias_dtype": "bfloat16"},
    "few queries": {"T": 3, "S": 2100, "has_kv_lengths": True, "has_poison": True},
}
HEAD_DIMS = ((64, 64), (33, 57), (128, 128), (96, 80), (256, 256), (192, 130))


def problems():
    """(implementation, case, dtype, deterministic)"""
    import cases
    from test_gpu import adapted

    index = 0
    for name in ("fa2", "fa1"):
        for H, Hv in HEAD_DIMS if name == "fa2" else HEAD_DIMS[:4]:
            for option, fields in OPTIONS.items():
                sizes = {"batch": (2,), "T": 150, "S": 170, "N": 4, "K": 2, "H": H, "Hv": Hv}
                case = adapted(name, cases.Case(f"{option} {H}", **sizes | fields))
                index += 1
                yield name, case, ("bfloat16", "float16")[index % 2], index % 3 == 0


def run_problems(limit: int) -> None:
    import cases
    import numpy as np

    count = 0
    for name, case, dtype, deterministic in problems():
        if count == limit:
            break
        results = cases.forward_and_gradients(name, cases.build(case, dtype), deterministic=deterministic)
        if not all(np.all(np.isfinite(x.astype(np.float32))) for field, x in results.items() if field != "lse"):
            sys.exit(f"not finite: {name} {case} {dtype}")
        count += 1
    print(f"{count} problems ran forward and backward")


def check(tool: str, limit: int) -> bool:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--print-limit", "5"]
    if tool != "initcheck":
        command += ["--kernel-regex", "kns=jaxflash"]
    command += [sys.executable, __file__, "--run", "--limit", str(limit)]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda,cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    is_clean = finished.returncode == 0
    lines = (finished.stdout + finished.stderr).strip().splitlines()
    print(f"{tool}: {'clean' if is_clean else 'FAILED'}", *(lines[-2:] if is_clean else lines[-60:]), sep="\n  ")
    return is_clean


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--limit", type=int, default=-1, help="problems a tool; default all")
    parser.add_argument(
        "--run", action="store_true", help="run the problems in this process: what the tools are started on"
    )
    options = parser.parse_args()
    if options.run:
        run_problems(options.limit)
        return
    sys.exit(not all([check(tool, options.limit) for tool in options.tools]))


if __name__ == "__main__":
    main()
