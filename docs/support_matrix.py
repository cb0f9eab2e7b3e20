"""Writes the table of what each implementation supports into README.md, by asking each about its own device.

python docs/support_matrix.py           rewrites the table
python docs/support_matrix.py --check   exits with 1 if it is out of date
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxflash
from jaxflash import _api, _dispatch
from jaxflash._backends import ffi

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- support matrix: python docs/support_matrix.py -->", "<!-- end of support matrix -->"

B, T, S, N, K, H = 2, 96, 128, 8, 2, 64


def _array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def _call(dtype=jnp.bfloat16, H=H, Hv=H, K=K, T=T, **options):
    return {"query": _array(B, T, N, H, dtype=dtype), "key": _array(B, S, K, H, dtype=dtype)} | {
        "value": _array(B, S, K, Hv, dtype=dtype),
        **options,
    }


_lengths = _array(B, dtype=jnp.int32)
FEATURES = {
    "float32": _call(jnp.float32),
    "bfloat16": _call(),
    "float16": _call(jnp.float16),
    "float64 (x64)": _call(jnp.float64),
    "any head dim (1 to 300 and more)": _call(H=300, Hv=300),
    "value head dim unlike query's": _call(H=192, Hv=128),
    "grouped-query and multi-query heads": _call(K=1),
    "causal, T != S, both alignments": _call(is_causal=True, causal_alignment="bottom_right"),
    "sliding window": _call(local_window_size=(32, 0)),
    "boolean mask, broadcast": _call(mask=_array(B, 1, 1, S, dtype=jnp.bool_)),
    "additive bias, with gradient": _call(bias=_array(1, N, T, S)),
    "logit soft cap": _call(logits_soft_cap=50.0),
    "sinks, with gradient": _call(sinks=_array(N)),
    "sequence lengths": _call(query_seq_lengths=_lengths, key_value_seq_lengths=_lengths),
    "segment ids": _call(
        query_segment_ids=_array(B, T, dtype=jnp.int32), key_value_segment_ids=_array(B, S, dtype=jnp.int32)
    ),
    "block-sparse mask": _call(block_mask=jaxflash.BlockMask(_array(1, 1, 6, 8, dtype=jnp.bool_), 16, 16)),
    "dropout": _call(dropout_rate=0.1, dropout_key=jax.random.key(0)),
    "deterministic gradients": _call(deterministic=True),
}
DEVICES = {  # what each implementation is asked about
    "fa3": {"platform": "gpu", "compute_capability": (9, 0)},
    "fa2": {"platform": "gpu", "compute_capability": (9, 0)},
    "fa1": {"platform": "gpu", "compute_capability": (9, 0)},
    "cpu": {"platform": "cpu", "compute_capability": None},
}
# What no call can say: fixed properties of an implementation.
PROPERTIES = {
    "packed sequences (`flash_mha_varlen`)": {
        "fa3": "no",
        "fa2": "yes",
        "fa1": "no",
        "cpu": "yes",
        "reference": "yes",
    },
    "differentiable lse": {"fa3": "yes", "fa2": "yes", "fa1": "yes", "cpu": "yes", "reference": "yes"},
    "forward mode and second derivatives": {
        "fa3": "no: reverse mode, once",
        "fa2": "no: reverse mode, once",
        "fa1": "no: reverse mode, once",
        "cpu": "no: reverse mode, once",
        "reference": "yes",
    },
    "memory beyond inputs and outputs": {
        "fa3": "O(B N T H): dq in float32",
        "fa2": "O(B N T H): dq in float32",
        "fa1": "O(B N T H): out and dq in float32",
        "cpu": "O(B N T)",
        "reference": "O(B N T S)",
    },
    "runs on": {
        "fa3": "NVIDIA GPUs of compute capability 9.0 (Hopper)",
        "fa2": "NVIDIA GPUs from compute capability 8.0",
        "fa1": "NVIDIA GPUs from compute capability 8.0",
        "cpu": "CPUs",
        "reference": "everything",
    },
}


def _reason(name: str, call: dict) -> str | None:
    """Why an implementation, on its own device, refuses a call."""
    if name not in DEVICES:
        return None  # the reference takes all
    problems = []
    static = {key: x for key, x in call.items() if not isinstance(x, jax.ShapeDtypeStruct)}
    arrays = {key: x for key, x in call.items() if key not in static and key != "block_mask"}
    blocks = static.pop("block_mask", None)
    jax.eval_shape(
        lambda arrays, blocks: problems.append(_api._problem(**arrays, block_mask=blocks, **static)[2]), arrays, blocks
    )
    return ffi.refuses(name, dataclasses.replace(problems[0], **DEVICES[name]))


def table() -> str:
    names = _dispatch.implementations()
    rows = [["", *(f"`{name}`" for name in names)], ["---"] * (len(names) + 1)]
    with jax.enable_x64(True):
        for feature, call in FEATURES.items():
            reasons = [_reason(name, call) for name in names]
            rows.append([feature, *("yes" if reason is None else f"no: {reason}" for reason in reasons)])
    rows += [[feature, *(cells[name] for name in names)] for feature, cells in PROPERTIES.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def rewritten(text: str) -> str:
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the table is up to date")
    check = parser.parse_args().check
    text = README.read_text()
    new = rewritten(text)
    if check and new != text:
        sys.exit("README.md: the support matrix is out of date; run python docs/support_matrix.py")
    if not check:
        README.write_text(new)


if __name__ == "__main__":
    main()
