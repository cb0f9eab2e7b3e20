"""Where a call will run."""

from __future__ import annotations

import re

import jax


def platform_of(*arrays) -> str:
    """The platform the arrays are committed to, else the default one: "cpu", "gpu", "tpu"."""
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return next(iter(x.devices())).platform
    default = jax.config.jax_default_device
    if default is None:
        return jax.default_backend()
    return default if isinstance(default, str) else default.platform


def compute_capability_of(platform: str) -> tuple[int, int] | None:
    """The lowest compute capability among this process's NVIDIA GPUs, None where the platform is another."""
    if platform != "gpu":
        return None
    try:
        devices = jax.local_devices(backend="gpu")
    except RuntimeError:  # an export for GPUs on a machine without one
        return None
    texts = [getattr(device, "compute_capability", "") for device in devices]
    if not all(re.fullmatch(r"\d+\.\d+", text) for text in texts):
        return None
    return min(tuple(int(part) for part in text.split(".")) for text in texts)
