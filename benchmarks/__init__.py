"""Benchmarks of jaxflash against JAX's own attention; run them with `python -m benchmarks.attention`."""
