"""Exact attention for JAX: FlashAttention's algorithms as XLA custom calls, with gradients, vmap and sharding."""

from importlib.metadata import version as _version

from jaxflash._api import attention, export_checks, flash_mha, flash_mha_varlen, why
from jaxflash._types import BlockMask

__version__ = _version("jaxflash")

__all__ = ["BlockMask", "attention", "export_checks", "flash_mha", "flash_mha_varlen", "why"]
