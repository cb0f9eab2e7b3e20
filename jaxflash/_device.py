"""Where a call will run."""

from __future__ import annotations

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
