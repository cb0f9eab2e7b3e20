"""Text from a model, byte by byte, each step reading the keys and values of all earlier ones from the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.gpt.model import GPT


def generate(model: GPT, prompt: bytes, length: int, *, key: jax.Array, temperature: float = 0.7) -> bytes:
    """Continues a prompt.

    Args:
      model: Trained model; its caches are replaced.
      prompt: At least one byte, read in one call.
      length: How many bytes to add, one call each.
      key: A `jax.random.key`; the same key gives the same text.
      temperature: Above 0; lower is more predictable.

    Returns:
      The added bytes.
    """
    model.init_cache(batch_size=1, max_length=len(prompt) + length)
    graph, cache, rest = nnx.split(model, nnx.Cache, ...)

    def call(cache, rest, tokens):
        """Logits [1, 256] of the byte after `tokens` [1, T], and the cache with them appended."""
        model = nnx.merge(graph, cache, rest)
        logits = model(tokens, decode=True)[:, -1]
        return nnx.state(model, nnx.Cache), logits

    @jax.jit
    def continue_prompt(cache, rest, prompt, key):
        def add_byte(carry, key):
            cache, logits = carry
            byte = jax.random.categorical(key, logits / temperature)
            return call(cache, rest, byte[:, None]), byte[0]

        _, added = jax.lax.scan(add_byte, call(cache, rest, prompt), jax.random.split(key, length))
        return added

    tokens = jnp.asarray(np.frombuffer(prompt, np.uint8), jnp.int32)[None]
    return np.asarray(continue_prompt(cache, rest, tokens, key)).astype(np.uint8).tobytes()
