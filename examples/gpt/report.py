"""What a run leaves behind: its losses as JSON, their plot, and which attention implementation ran."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jaxflash
from examples.gpt.model import SIZES
from examples.gpt.train import History, TrainConfig


def explain_attention(config: TrainConfig) -> dict:
    """`jaxflash.why` for each kind of attention call of the run.

    Raises:
      ValueError: there is no implementation of the configured name.
    """
    model = SIZES[config.size]

    def why(batch_size, length, keys, **options):
        query, key = (
            jax.ShapeDtypeStruct((batch_size, tokens, heads, model.head_dim), jnp.dtype(config.dtype))
            for tokens, heads in ((length, model.num_heads), (keys, model.num_kv_heads))
        )
        alignment = {"is_causal": True, "causal_alignment": "bottom_right"}
        return jaxflash.why(query, key, key, implementation=config.implementation, **alignment, **options)

    dropout = {"dropout_rate": model.dropout_rate, "dropout_key": jax.random.key(0)}
    lengths = {"key_value_seq_lengths": jax.ShapeDtypeStruct((1,), jnp.int32)}
    return {
        "training": why(config.batch_size, config.seq_len, config.seq_len, **dropout),
        "validation": why(config.batch_size, config.seq_len, config.seq_len),
        "decoding": why(1, 1, config.seq_len, **lengths),
    }


def attention_table(explanations: dict, requested: str | None) -> str:
    """`explain_attention` as text: one line for each kind of call and implementation."""
    lines = [f"{'attention in':14}{'implementation':16}"]
    for kind, explanation in explanations.items():
        for name, reason in explanation.reasons.items():
            if name == explanation.chosen:
                verdict = "ran: " + ("asked for" if requested else "the fastest that can run this call")
            else:
                verdict = "did not run: " + (reason or ("not asked for" if requested else "slower"))
            lines.append(f"{kind:14}{name:16}{verdict}")
    return "\n".join(lines)


def loss_summary(history: History, unigram_entropy: float) -> str:
    """The final validation loss beside the entropy of single bytes, both in nats and in bits."""

    def both_units(nats):
        return f"{nats:.3f} nats/byte = {nats / math.log(2):.3f} bits/byte"

    return (
        f"validation loss      {both_units(history.validation[-1][1])}\n"
        f"byte-unigram entropy {both_units(unigram_entropy)}"
    )


def write_losses(path: Path, history: History, unigram_entropy: float) -> None:
    """All losses as JSON, in nats a byte."""
    path.write_text(json.dumps({"unit": "nats/byte", "unigram_entropy": unigram_entropy, **history._asdict()}) + "\n")


def plot_losses(path: Path, history: History, unigram_entropy: float, title: str) -> None:
    """Training and validation loss against the step, with the entropy of single bytes as a line."""
    figure = Figure(figsize=(7, 4.5), layout="tight")
    axis = figure.subplots()
    steps = np.arange(1, len(history.train) + 1)
    axis.plot(steps, history.train, color="C0", alpha=0.3, linewidth=0.8, label="train, each step")
    window = max(1, len(steps) // 50)
    smooth = np.convolve(history.train, np.ones(window) / window, mode="valid")
    axis.plot(steps[window - 1 :], smooth, color="C0", label=f"train, mean of {window} steps")
    axis.plot(*zip(*history.validation, strict=True), "o-", color="C1", markersize=4, label="validation")
    axis.axhline(unigram_entropy, color="gray", linestyle="--", label="byte-unigram entropy")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats/byte)")
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
