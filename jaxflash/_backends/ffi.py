"""Runs attention in the compiled library through the XLA FFI. The only module that imports the extension."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash import masks
from jaxflash._types import BACKWARD_ONLY, AttentionSpec, KernelCall, Operands, Problem

try:
    import jaxflash._C as _C
except ImportError as error:
    _C = None
    _IMPORT_ERROR = str(error)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """What one implementation of the library can run; None = no limit."""

    platform: str
    dtypes: tuple
    compute_capability: tuple[int, int] | None = None
    is_capability_exact: bool = False  # machine code for that one alone
    head_dim: int | None = None
    head_dim_multiple: int = 1
    batch_dims: int | None = None
    length: int | None = None
    features: int | None = None  # of one position, all heads together
    untaken: tuple[str, ...] = ()  # optional operands it does not take
    takes_soft_cap: bool = True
    takes_dropout: bool = True
    takes_any_scale: bool = True  # else positive ones


_KERNELS = {
    "fa3": _Kernels(
        platform="gpu",
        dtypes=(jnp.bfloat16, jnp.float16),
        compute_capability=(9, 0),
        is_capability_exact=True,
        head_dim=256,
        head_dim_multiple=8,
        batch_dims=4,
        length=2**30 - 1,
        untaken=("bias", "mask", "query_offsets"),
        takes_dropout=False,
        takes_any_scale=False,
    ),
    "fa2": _Kernels(
        platform="gpu",
        dtypes=(jnp.float32, jnp.bfloat16, jnp.float16),
        compute_capability=(8, 0),
        head_dim=256,
        batch_dims=4,
        length=2**30 - 1,
        features=2**26 - 1,
    ),
    "fa1": _Kernels(
        platform="gpu",
        dtypes=(jnp.bfloat16, jnp.float16),
        compute_capability=(8, 0),
        head_dim=128,
        batch_dims=4,
        length=2**23 - 1,
        untaken=("bias", "sinks", "query_offsets"),
        takes_soft_cap=False,
    ),
    "cpu": _Kernels(platform="cpu", dtypes=(jnp.float32, jnp.bfloat16, jnp.float16)),
}
_ARGUMENT = {"query_offsets": "packed sequences (cu_seqlens)"}  # what users call an operand, where it differs
_BIAS_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_FORWARD_OPERANDS = Operands._fields
_BACKWARD_OPERANDS = tuple(name for name in Operands._fields if name != "sinks") + BACKWARD_ONLY
_EMPTY_DTYPES = {  # dtype of the zero-element array that stands for an operand that was not given
    "bias": np.float32,
    "mask": np.bool_,
    "block_mask": np.bool_,
    "sinks": np.float32,
    "dropout_batch": np.uint32,
    "dropout_heads": np.uint32,
    "dlse": np.float32,
}


def supports(implementation: str, problem: Problem) -> str | None:
    """Why this implementation's kernels cannot run the problem, or None if they can."""
    return library_problem() or _build_problem(implementation) or refuses(implementation, problem)


def refuses(implementation: str, problem: Problem) -> str | None:
    """As `supports`, of a complete build."""
    kernels = _KERNELS[implementation]
    if problem.platform != kernels.platform:
        return f"runs on {kernels.platform.upper()} devices, this call is on {problem.platform!r}"
    needed, found = kernels.compute_capability, problem.compute_capability or (0, 0)
    if needed is not None and (found < needed or (kernels.is_capability_exact and found != needed)):
        return f"needs compute capability {_dotted(needed)}, {_device_text(problem)}"
    for name, dtypes in (("query", kernels.dtypes), ("bias", _BIAS_DTYPES)):
        dtype = problem.dtype(name)
        if dtype is not None and dtype not in dtypes:
            return f"takes {' and '.join(np.dtype(d).name for d in dtypes)}, {name} is {dtype}"
    shapes = dict(problem.shapes)
    for name in kernels.untaken:
        if name in shapes:
            return f"takes no {_ARGUMENT.get(name, name)}"
    if problem.spec.logits_soft_cap is not None and not kernels.takes_soft_cap:
        return "takes no logits_soft_cap"
    if problem.spec.dropout_rate > 0 and not kernels.takes_dropout:
        return "takes no dropout"
    if not problem.spec.softmax_scale > 0 and not kernels.takes_any_scale:
        return f"takes a scale above 0, this call has {problem.spec.softmax_scale}"
    return _shape_problem(kernels, shapes)


def _shape_problem(kernels: _Kernels, shapes: dict[str, tuple[int, ...]]) -> str | None:
    *batch, length, heads, head_dim = shapes["query"]
    kv_length, _, value_head_dim = shapes["value"][-3:]
    for what, size, limit in (
        ("head dims", max(head_dim, value_head_dim), kernels.head_dim),
        ("lengths", max(length, kv_length), kernels.length),
        ("features of all heads together", heads * max(head_dim, value_head_dim), kernels.features),
        ("batch dims", len(batch), kernels.batch_dims),
    ):
        if limit is not None and size > limit:
            return f"takes {what} up to {limit}, this call has {size}"
    for size in (head_dim, value_head_dim):
        if size % kernels.head_dim_multiple != 0:
            return f"takes head dims that are multiples of {kernels.head_dim_multiple}, this call has {size}"
    return None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _device_text(problem: Problem) -> str:
    found = problem.compute_capability
    return "this device has none" if found is None else f"this device is {_dotted(found)}"


@functools.cache
def _build_problem(implementation: str) -> str | None:
    """Why the library was built without this implementation, or None."""
    if f"jaxflash_{implementation}_forward_v1" in _C.registrations():
        return None
    return f"{_C.build_info()['cuda']}; reinstall jaxflash with the CUDA toolkit present"


@functools.cache
def library_problem() -> str | None:
    """Why the compiled library cannot be used with the installed jaxlib, or None."""
    if _C is None:
        root = Path(__file__).parents[2]
        if (root / "pyproject.toml").exists():
            advice = f"jaxflash is its source folder {root}: run elsewhere, or reinstall with pip install -e ."
        else:
            advice = "reinstall jaxflash with a C++ compiler present"
        return f"the compiled library is missing ({_IMPORT_ERROR}); {advice}"
    built, installed = _C.build_info()["ffi_api_version"], _installed_api_version()
    if installed is not None and built > installed:
        return (
            f"the compiled library speaks XLA FFI {built[0]}.{built[1]}, this jaxlib only "
            f"{installed[0]}.{installed[1]}; upgrade jaxlib or rebuild jaxflash against it"
        )
    return None


def _installed_api_version() -> tuple[int, int] | None:
    """The FFI version of the installed jaxlib. A handler with a newer one would break the whole backend."""
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    found = [re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    return tuple(int(match[1]) for match in found) if all(found) else None


# On import, so that a program exported earlier runs without calling anything here first.
if library_problem() is None:
    for _name, (_capsule, _platform) in _C.registrations().items():
        jax.ffi.register_ffi_target(_name, _capsule, platform=_platform)


def targets() -> tuple[str, ...]:
    """Names of the FFI targets, as they appear in lowered programs."""
    return () if _C is None else tuple(_C.registrations())


def build_info() -> dict[str, object]:
    """Facts about the compiled library."""
    return _C.build_info()


def run(call: KernelCall, *arrays) -> tuple[jax.Array, ...]:
    """One kernel call on the arrays of one device; returns the arrays that `call.result_names` names."""
    operands, extra = call.operands(arrays)
    if call.config.implementation != "cpu" and operands.query_offsets is not None:
        operands = _clamp_offsets(operands)  # the CPU's handler does it itself
    given = {**operands._asdict(), "dlse": None, **extra}
    names = _FORWARD_OPERANDS if call.direction == "forward" else _BACKWARD_OPERANDS
    inputs = [_absent(name) if given[name] is None else given[name] for name in names]
    result_names = ("out", "lse", "lse_low") if call.direction == "forward" else ("dq", "dk", "dv", "dbias", "delta")
    result_types = [_result_type(name, call, operands) for name in result_names]
    result_types.append(_workspace_type(call, operands))
    varying = _varying_axes(arrays)
    results = jax.ffi.ffi_call(
        f"jaxflash_{call.config.implementation}_{call.direction}_v1",
        [_with_varying_axes(t, varying, arrays) for t in result_types],
    )(*inputs, **attributes(call.spec, call.config.deterministic))
    named = dict(zip(result_names, results, strict=False))
    return tuple(named[name] for name in call.result_names)


def _clamp_offsets(operands: Operands) -> Operands:
    """With offsets that do not fall and stay inside the arrays: a GPU kernel's blocks look at them one by one."""
    return operands._replace(
        query_offsets=masks.clamp_offsets(operands.query_offsets, operands.query.shape[-3]),
        kv_offsets=masks.clamp_offsets(operands.kv_offsets, operands.key.shape[-3]),
    )


def _absent(name: str) -> jax.Array:
    return jnp.zeros((0,), _EMPTY_DTYPES.get(name, np.int32))


def attributes(spec: AttentionSpec, deterministic: bool = False) -> dict[str, object]:
    """The members of `AttentionAttrs` (csrc/ffi/attrs.h), each cast to the type that is decoded there."""
    left, right = (-1 if side is None else side for side in spec.window)
    block_q, block_kv = spec.mask_block or (0, 0)
    return {
        "softmax_scale": np.float32(spec.softmax_scale),
        "logits_soft_cap": np.float32(spec.logits_soft_cap or 0.0),
        "window_left": np.int64(left),
        "window_right": np.int64(right),
        "is_bottom_right": spec.causal_alignment == "bottom_right",
        "dropout_threshold": np.int32(spec.dropout_threshold),
        "dropout_scale": np.float32(spec.dropout_scale),
        "mask_block_q": np.int64(block_q),
        "mask_block_kv": np.int64(block_kv),
        "is_deterministic": deterministic,
    }


def _result_type(name: str, call: KernelCall, operands: Operands) -> jax.ShapeDtypeStruct:
    if name == "dbias":
        dtype = np.float32 if operands.bias is None else operands.bias.dtype
        return jax.ShapeDtypeStruct(operands.shape_of(name) if call.bias_gradient else (0,), dtype)
    dtype = jnp.float32 if name in ("lse", "lse_low", "delta") else operands.query.dtype
    return jax.ShapeDtypeStruct(operands.shape_of(name), dtype)


def _workspace_type(call: KernelCall, operands: Operands) -> jax.ShapeDtypeStruct:
    """Scratch, float32 [slots, floats of a slot]."""
    sizes = _cpu_workspace if call.config.implementation == "cpu" else _cuda_workspace
    return jax.ShapeDtypeStruct(sizes(call, operands), jnp.float32)


def _cpu_workspace(call: KernelCall, operands: Operands) -> tuple[int, int]:
    """One slot for each thread that may run the kernel."""
    forward, backward = _C.cpu_workspace_floats(operands.query.shape[-1], operands.value.shape[-1])
    return _num_slots(), forward if call.direction == "forward" else backward


def _cuda_workspace(call: KernelCall, operands: Operands) -> tuple[int, Any]:
    """Grows linearly with the batch, which may therefore be symbolic (jax.export)."""
    batch = math.prod(operands.query.shape[:-3])
    if isinstance(batch, int):
        return 1, _cuda_workspace_floats(call, operands, batch)
    if call.bias_gradient:
        raise NotImplementedError(
            f"{call.config.implementation} cannot export the gradient of a bias with a symbolic batch, it was {batch}: "
            "export with a number, or differentiate with implementation='reference'."
        )
    first, second = (_cuda_workspace_floats(call, operands, b) for b in (1, 2))
    return 1, (2 * first - second) + (second - first) * batch


def _cuda_workspace_floats(call: KernelCall, operands: Operands, batch: int) -> int:
    length, heads, head_dim = operands.query.shape[-3:]
    kv_length, kv_heads, value_head_dim = operands.value.shape[-3:]
    forward, backward = _C.cuda_workspace_floats(
        call.config.implementation,
        B=batch,
        T=length,
        S=kv_length,
        N=heads,
        K=kv_heads,
        H=head_dim,
        Hv=value_head_dim,
        num_sequences=-1 if operands.query_offsets is None else operands.query_offsets.shape[-1] - 1,
        dbias_elements=_separate_dbias_elements(call, operands),
        is_deterministic=call.config.deterministic,
    )
    return forward if call.direction == "forward" else backward


def _separate_dbias_elements(call: KernelCall, operands: Operands) -> int:
    """Elements of a bias gradient that cannot be summed in its own array, for want of float32 or of atomics."""
    if not call.bias_gradient or (operands.bias.dtype == jnp.float32 and not call.config.deterministic):
        return 0
    return operands.bias.size


def _num_slots() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _varying_axes(arrays) -> frozenset:
    """The manual mesh axes over which any of the arrays differs between devices (shard_map with check_vma)."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def _with_varying_axes(result: jax.ShapeDtypeStruct, varying: frozenset, arrays) -> jax.ShapeDtypeStruct:
    if not varying:
        return result
    mesh = next(m for x in arrays if not (m := jax.typeof(x).sharding.mesh).empty)
    return jax.ShapeDtypeStruct(
        result.shape,
        result.dtype,
        sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
        manual_axis_type=jax.sharding.ManualAxisType(varying=varying),
    )
