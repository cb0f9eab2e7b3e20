"""Trains a GPT with jaxflash's attention on the standard library's source, samples from it, and says how it went.

    python -m examples.gpt                                            a few minutes on two CPU cores
    python -m examples.gpt --devices 2                                the batch split over two virtual CPU devices
    python -m examples.gpt --size large --dtype bfloat16 --seq-len 2048 --batch-size 32 --steps 5000      on a GPU
    python -m examples.gpt --run-dir runs/mine --resume               go on from the last checkpoint

Writes losses.json, loss.png, sample.txt and checkpoints/ into the run's directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
import time
from pathlib import Path

import jax
from jax.sharding import AxisType

from examples.gpt import data, report
from examples.gpt.checkpoints import Checkpoints
from examples.gpt.model import SIZES
from examples.gpt.sample import generate
from examples.gpt.train import History, TrainConfig, Trainer, TrainState, random_keys


def make_parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.gpt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=256, help="bytes a sequence (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="training steps (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak (default: %(default)s)")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between validations (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the computation")
    parser.add_argument("--implementation", default=None, help="of attention (default: the fastest that can)")
    parser.add_argument("--devices", type=int, default=1, help="split the batch over this many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, data order and dropout")
    parser.add_argument("--run-dir", type=Path, default=None, help="where results go (default: runs/gpt-<time>)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --run-dir")
    parser.add_argument("--prompt", default="import os\n\n\ndef ", help="what the printed sample continues")
    parser.add_argument("--sample-length", type=int, default=400, help="bytes to sample (default: %(default)s)")
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with a sentence if the options do not fit together."""
    for name in ("seq_len", "batch_size", "steps", "eval_every", "devices", "sample_length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, it was {getattr(options, name)}")
    if not options.learning_rate > 0:
        parser.error(f"--learning-rate must be more than 0, it was {options.learning_rate}")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, it was {options.seed}")
    if options.batch_size % options.devices:
        parser.error(f"--batch-size ({options.batch_size}) must be a multiple of --devices ({options.devices})")
    if not options.prompt:
        parser.error("--prompt must not be empty")
    if options.resume and options.run_dir is None:
        parser.error("--resume needs --run-dir, the directory of the run to go on with")


def make_mesh(parser: argparse.ArgumentParser, count: int) -> jax.sharding.Mesh:
    """The first `count` devices; a CPU is split into that many virtual ones."""
    if count > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)  # no effect on other platforms
    devices = jax.devices()
    if len(devices) < count:
        parser.error(
            f"--devices must be at most {len(devices)}, the {devices[0].platform} devices here; it was {count}"
        )
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:count])


def explain_attention(parser: argparse.ArgumentParser, config: TrainConfig) -> dict:
    """Which implementation each kind of call will take; ends the program if there is none."""
    try:
        explanations = report.explain_attention(config)
    except ValueError as error:
        parser.error(f"--implementation: {error}")
    for kind, explanation in explanations.items():
        if explanation.chosen is None:
            parser.error(f"--implementation {config.implementation} cannot run the attention in {kind}:\n{explanation}")
    return explanations


def main(arguments: list[str] | None = None) -> int:
    """Trains, samples, reports; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    check_options(parser, options)
    mesh = make_mesh(parser, options.devices)
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    config = TrainConfig(**{name: getattr(options, name) for name in names})
    explanations = explain_attention(parser, config)
    try:
        corpus = data.load(config.seq_len)
    except FileNotFoundError as error:
        parser.error(str(error))
    trainer = Trainer(config, corpus, mesh)

    run_dir = options.run_dir or Path("runs") / f"gpt-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    checkpoints = Checkpoints(run_dir / "checkpoints", {**dataclasses.asdict(config), "corpus": corpus.digest})
    state, history = begin(parser, options.resume, checkpoints, trainer)

    print(describe(config, state, corpus, mesh))
    started = time.perf_counter()
    state = trainer.run(state, history, checkpoints.save)
    checkpoints.close()
    print(f"trained in {time.perf_counter() - started:.0f} s\n")

    prompt, key = options.prompt.encode(), random_keys(config.seed).sampling
    text = (prompt + generate(trainer.model(state), prompt, options.sample_length, key=key)).decode(errors="replace")
    entropy = corpus.unigram_entropy
    (run_dir / "sample.txt").write_text(text + "\n")
    report.write_losses(run_dir / "losses.json", history, entropy)
    report.plot_losses(run_dir / "loss.png", history, entropy, f"GPT ({config.size}) on Python's standard library")
    print(f"--- sample ---\n{text}\n--------------\n")
    print(f"{report.attention_table(explanations, config.implementation)}\n")
    print(f"{report.loss_summary(history, entropy)}\nresults are in {run_dir}")
    return 0


def begin(
    parser: argparse.ArgumentParser, is_resumed: bool, checkpoints: Checkpoints, trainer: Trainer
) -> tuple[TrainState, History]:
    """The state to start from; ends the program if the directory does not hold what was asked for."""
    latest = checkpoints.latest_step()
    if not is_resumed:
        if latest is not None:
            parser.error(f"{checkpoints.directory} is of another run; --resume goes on with it, or choose a --run-dir")
        return trainer.initial_state(), History([], [])
    if latest is None:
        parser.error(f"--resume: there is no checkpoint in {checkpoints.directory}")
    try:
        return checkpoints.restore(trainer.initial_state())
    except ValueError as error:
        parser.error(f"--resume: {error}")


def describe(config: TrainConfig, state: TrainState, corpus: data.Corpus, mesh: jax.sharding.Mesh) -> str:
    """One paragraph on what is about to run."""
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    device = mesh.devices.flat[0]
    return (
        f"model {config.size}: {parameters:,} parameters, {SIZES[config.size]}\n"
        f"corpus: {len(corpus.train):,} bytes to train on, {len(corpus.validation):,} to validate on\n"
        f"batch: {config.batch_size} x {config.seq_len} bytes, {config.dtype}, on {mesh.size} x {device.device_kind}"
    )


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # a pipe shows progress at once
    sys.exit(main())
