"""Runs every GPU kernel under compute-sanitizer: `python tests/sanitize.py`, or make sanitize.

Each tool sees more than 100 problems, forward and backward, that between them reach every instance: each
implementation, dtype, head dim class, plain and general features, atomics and deterministic, packed, few queries
(split keys) and bias gradients, with NaN in everything that is padding. Exits with 1 if any tool finds anything.

memcheck and initcheck watch every allocation by itself, so nothing hides in a pool. initcheck must see XLA's kernels
write to know what is initialised; the other tools watch only ours.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path

IMPLEMENTATIONS = ("fa2", "fa1", "fa3")
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
FLOAT32_HEAD_DIMS = ((64, 64), (128, 96), (256, 192))
HALF = ("bfloat16", "float16")
# racecheck does not follow a named barrier of some of a CTA's warps: it reports the hand-over of P between the roles.
# With __syncthreads in that barrier's place it reported nothing in nine problems (H200, 2026-12-01).
NOT_FOLLOWED = "backward_roles_kernel"


def problems(implementation: str):
    """(case, dtype, deterministic)"""
    import cases
    from test_gpu import adapted

    kinds = [(HEAD_DIMS[:4] if implementation == "fa1" else HEAD_DIMS, HALF)]
    if implementation == "fa2":
        kinds.append((FLOAT32_HEAD_DIMS, ("float32",)))
    index = 0
    for head_dims, dtypes in kinds:
        for H, Hv in head_dims:
            for option, fields in OPTIONS.items():
                sizes = {"batch": (2,), "T": 150, "S": 170, "N": 4, "K": 2, "H": H, "Hv": Hv}
                case = adapted(implementation, cases.Case(f"{option} {H}", **sizes | fields))
                index += 1
                yield case, dtypes[index % len(dtypes)], index % 3 == 0


def run_problems(implementation: str, shard: int, shards: int) -> None:
    import cases
    import numpy as np

    every = list(problems(implementation))
    for case, dtype, deterministic in every[shard::shards]:
        results = cases.forward_and_gradients(implementation, cases.build(case, dtype), deterministic=deterministic)
        if not all(np.all(np.isfinite(x.astype(np.float32))) for field, x in results.items() if field != "lse"):
            sys.exit(f"not finite: {implementation} {case} {dtype}")
    print(f"{len(every[shard::shards])} of {len(every)} problems ran forward and backward on {implementation}")


def start(tool: str, implementation: str, shard: int, shards: int) -> subprocess.Popen:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--print-limit", "5"]
    if tool != "initcheck":
        command += ["--kernel-regex", "kns=jaxflash"]
    if tool == "racecheck":
        command += ["--kernel-regex-exclude", f"kns={NOT_FOLLOWED}"]
    command += [sys.executable, __file__, "--run", f"{shard}", "--jobs", f"{shards}"]
    command += ["--implementations", implementation]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda,cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes a tool and implementation, which share its problems"
    )
    parser.add_argument("--run", type=int, help="run this process's share of the problems: what the tools start")
    options = parser.parse_args()
    if options.run is not None:
        run_problems(options.implementations[0], options.run, options.jobs)
        return
    kinds = itertools.product(options.tools, options.implementations, range(options.jobs))
    started = [(f"{tool} {name}", start(tool, name, shard, options.jobs)) for tool, name, shard in kinds]
    is_clean = True
    for what, process in started:
        lines = process.communicate()[0].strip().splitlines()
        is_clean &= process.returncode == 0
        reports = [line for line in lines if line.startswith("=========") and "Host Frame" not in line]
        # The first report tells why; the tool goes on with every API call that fails because of it.
        failed = [f"{what}: FAILED", *reports[:60], "...", *lines[-20:]]
        shown = [f"{what}: clean", *lines[-2:]] if process.returncode == 0 else failed
        print(*shown, sep="\n  ", flush=True)
    sys.exit(not is_clean)


if __name__ == "__main__":
    main()
