"""One module per JAX transformation, outermost first: autodiff, batching, partition."""
