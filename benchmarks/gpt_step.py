"""One training step of the example's GPT with each attention: `python -m benchmarks.gpt_step`.

The model, loss and optimizer are those of `examples/gpt` at its sizes 124M and 1.3B, bfloat16 over float32 parameters.
fa3, fa2 and fa1 are jaxflash's; cudnn and xla are `jax.nn.dot_product_attention`'s in the same model. The contenders
take turns on one training state; the median over rounds counts. Memory is what XLA reserves for the compiled step:
parameters, optimizer and everything that the step makes. What does not fit or refuses is recorded as such.
Writes benchmarks/results/gpt-step-<date>-<device>.json after every cell.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from pathlib import Path
from unittest import mock

import jax
from jax.sharding import AxisType

import jaxflash.flax.nnx
from benchmarks import environment
from benchmarks.device_timing import compile_all, first_line
from examples.gpt import data
from examples.gpt.model import SIZES
from examples.gpt.train import TrainConfig, Trainer

TOKENS = {"124M": 16_384, "1.3B": 8192}  # a step
OF_JAX = ("cudnn", "xla")
RESULTS = Path(__file__).parent / "results"


def patched(implementation: str) -> contextlib.AbstractContextManager:
    """Inside, the model's attention is JAX's, if the implementation is."""
    if implementation not in OF_JAX:
        return contextlib.nullcontext()

    def attention(query, key, value, *, is_causal, dropout_key, **others):
        del others  # of a training step: nothing that counts; as many queries as keys make both alignments the same
        if dropout_key is not None:
            raise NotImplementedError("takes no dropout")
        return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation=implementation)

    return mock.patch.object(jaxflash.flax.nnx, "attention", attention)


def make_trainer(size: str, length: int, batch: int, implementation: str, corpus: data.Corpus) -> Trainer:
    config = TrainConfig(
        size=size,
        seq_len=length,
        batch_size=batch,
        steps=1000,
        learning_rate=1e-4,
        dtype="bfloat16",
        implementation=None if implementation in OF_JAX else implementation,
        eval_every=1000,
        seed=0,
    )
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return Trainer(config, corpus, mesh)


def compile_steps(implementations, size: str, length: int, batch: int, corpus, tokens) -> tuple[dict, dict]:
    """The compiled step with each implementation, and why others have none. Compiles on all cores."""
    lowered, refusals = {}, {}
    for name in implementations:
        trainer = make_trainer(size, length, batch, name, corpus)
        try:
            with patched(name):
                lowered[name] = trainer.step.lower(jax.eval_shape(trainer.initial_state), tokens)
        except Exception as error:
            refusals[name] = first_line(error)

    compiled, errors = compile_all(lowered)
    return compiled, refusals | errors


def step_bytes(compiled: jax.stages.Compiled) -> int:
    sizes = compiled.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return held + sizes.temp_size_in_bytes


def measure(size: str, length: int, batch: int, corpus: data.Corpus, options: argparse.Namespace) -> list[dict]:
    """A row for each implementation."""
    tokens = jax.device_put(corpus.train_batch(0, 0, batch, length))
    compiled, refusals = compile_steps(options.implementations, size, length, batch, corpus, tokens)
    trainer = make_trainer(size, length, batch, "reference", corpus)  # for the state, which all of them share
    losses, samples = {}, {}
    state = None
    for name, step in compiled.items():
        state = None  # its memory is free before the next one is made
        state = trainer.initial_state()
        try:
            state, loss = step(state, tokens)
            losses[name] = float(loss)
        except Exception as error:
            refusals[name] = first_line(error)
            state = None
        else:
            samples[name] = []
    if state is None and samples:
        state = trainer.initial_state()
    for _, name in itertools.product(range(options.rounds), samples):
        start = time.perf_counter()
        for _ in range(options.steps):
            state, loss = compiled[name](state, tokens)
        jax.block_until_ready(loss)
        samples[name].append((time.perf_counter() - start) / options.steps)
    cell = {"size": size, "length": length, "batch": batch}
    return [
        cell
        | {"implementation": name, "refusal": refusals.get(name), "loss": losses.get(name)}
        | {"step_bytes": step_bytes(compiled[name]) if name in compiled else None}
        | {"seconds": statistics.median(samples[name]) if name in samples else None}
        for name in options.implementations
    ]


def header() -> str:
    return f"{'size':7}{'T':>6}{'B':>4}  {'attention':11}{'ms a step':>10}{'tokens/s':>11}{'GiB':>8}{'first loss':>12}"


def line(row: dict) -> str:
    start = f"{row['size']:7}{row['length']:>6}{row['batch']:>4}  {row['implementation']:11}"
    memory = "-" if row["step_bytes"] is None else f"{row['step_bytes'] / 2**30:.1f}"
    if row["seconds"] is None:
        return f"{start}{'-':>10}{'-':>11}{memory:>8}  {row['refusal']}"
    speed = row["batch"] * row["length"] / row["seconds"]
    return f"{start}{row['seconds'] * 1e3:>10.1f}{speed:>11,.0f}{memory:>8}{row['loss']:>12.4f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementations", nargs="+", default=["fa3", "fa2", "fa1", *OF_JAX])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(TOKENS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--tokens", type=int, help=f"a step (default: {TOKENS})")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)

    facts = environment.describe()
    path = options.output / f"gpt-step-{facts['date'][:10]}-{environment.device_slug(facts)}.json"
    rows = []
    print(header())
    for size, length in itertools.product(options.sizes, options.lengths):
        tokens = options.tokens or TOKENS[size]
        found = measure(size, length, max(tokens // length, 1), data.load(length), options)
        print("\n".join(line(row) for row in found), flush=True)
        rows += found
        path.write_text(json.dumps({"environment": facts, "unit": "seconds, medians", "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
