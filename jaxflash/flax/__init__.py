"""Adapters for Flax: `jaxflash.flax.linen` and `jaxflash.flax.nnx`. Importing either needs the `flax` package."""
