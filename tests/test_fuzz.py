"""Random problems over all sizes, options and dtypes at once, forward and backward, against the float64 reference.

A seed is a problem: `random_config(seed)` gives the same one everywhere, and a failure prints the line that repeats it.
"""

from __future__ import annotations

import cases
import jax
import numpy as np

CPU_CONFIGS = 1000
REFERENCE_CONFIGS = 10  # compiles slowly
FIRST_REFERENCE_SEED = 500_000
BATCH_OF_SEEDS = 50
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 95, 100, 127, 128, 129, 160, 193, 200)
HEAD_DIMS = (1, 2, 3, 4, 8, 15, 16, 17, 24, 32, 33, 40, 48, 64, 65, 72, 80, 96, 112, 128, 129, 160, 192, 256)
MAX_PAIRS = 60_000  # B * N * T * S, for the time the oracle takes


def random_config(seed: int, lengths=LENGTHS, max_pairs: int = MAX_PAIRS) -> tuple[cases.Case, str]:
    """A problem and a dtype."""
    rng = np.random.default_rng([seed, 20240607])
    chance = lambda probability: bool(rng.random() < probability)  # noqa: E731
    pick = lambda options: options[rng.integers(len(options))]  # noqa: E731

    is_packed = chance(0.15)
    batch = () if is_packed else tuple(int(rng.integers(1, 4)) for _ in range(pick((0, 1, 1, 1, 2))))
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.integers(1, 5))
    length, kv_length = (0 if chance(0.01) else int(pick(lengths)) for _ in range(2))
    if chance(0.25):
        kv_length = length
    while np.prod(batch, dtype=int) * heads * length * kv_length > max_pairs:
        length, kv_length = (length + 1) // 2, kv_length if kv_length < length else (kv_length + 1) // 2
    head_dim = int(pick(HEAD_DIMS))
    options = {
        "is_causal": chance(0.35),
        "causal_alignment": pick(("top_left", "bottom_right")),
        "local_window_size": random_window(rng, max(length, kv_length)) if chance(0.3) else None,
        "scale": float(rng.uniform(-0.5, 1) / head_dim**0.5) if chance(0.15) else None,
        "logits_soft_cap": float(rng.uniform(0.5, 20)) if chance(0.2) else None,
        "sinks": pick(cases.DTYPES) if chance(0.2) else None,
        "dropout_rate": float(pick((0.1, 0.5, 0.9, 1e-6, 1.0, rng.random()))) if chance(0.25) else 0.0,
        "input_scale": float(pick((1, 1, 1, 0.1, 3))),
        "has_poison": chance(0.8),
        "has_dlse": chance(0.7),
    }
    if is_packed:
        options["sequences"] = int(rng.integers(1, 7))
    else:
        has_segments = chance(0.15)
        options |= {
            "bias": random_dims(rng, len(batch)) if chance(0.3) else None,
            "bias_dtype": pick(cases.DTYPES),
            "has_infinite_bias": chance(0.3),
            "mask": random_dims(rng, len(batch)) if chance(0.3) else None,
            "has_query_lengths": chance(0.2),
            "has_kv_lengths": chance(0.25),
            "segments": int(rng.integers(1, 5)) if has_segments else 0,
            "has_padding_segment": chance(0.5),
            "block_mask": (int(rng.integers(1, 70)), int(rng.integers(1, 140))) if chance(0.15) else None,
            "block_dims": random_dims(rng, len(batch), shortest=len(batch) + 3),
        }
    case = cases.Case(
        f"fuzz-{seed}",
        batch=batch,
        T=length,
        S=kv_length,
        N=heads,
        K=kv_heads,
        H=head_dim,
        Hv=head_dim if chance(0.4) else int(pick(HEAD_DIMS)),
        **options,
    )
    return case, pick(cases.DTYPES)


def random_window(rng, longest: int):
    sides = [None if rng.random() < 0.25 else int(rng.integers(0, longest + 2)) for _ in range(2)]
    return sides[0] if sides[0] is not None and rng.random() < 0.15 else tuple(sides)


def random_dims(rng, num_batch: int, shortest: int = 3) -> str:
    """Letters of a broadcast shape; see `cases.Case`."""
    letters = ("B" * num_batch + "NTS")[rng.integers(0, num_batch + 4 - shortest) and num_batch :]
    return "".join(letter if rng.random() < 0.6 else "1" for letter in letters)


def check_seeds(implementation: str, seeds, config_of=random_config, repeat: str = "") -> None:
    """Checks the problem of each seed, config_of(seed) -> (case, dtype). repeat: the command before a failed seed."""
    failures = []
    for seed in seeds:
        case, dtype = config_of(seed)
        try:
            cases.check(implementation, cases.build(case, dtype, seed))
        except Exception as error:  # each seed is reported on its own line, whatever it raised
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            failures.append(f"{line}\n  {case!r} {dtype}\n  {repeat or 'seed'} {seed}")
    jax.clear_caches()  # no program is used twice
    assert not failures, f"{len(failures)} of {len(seeds)} configurations failed:\n" + "\n".join(failures)


def pytest_generate_tests(metafunc):
    if "chunk" not in metafunc.fixturenames:
        return
    count, first = metafunc.config.getoption("--fuzz"), metafunc.config.getoption("--seed")
    chunks = []
    defaults = (("cpu", CPU_CONFIGS, 0), ("reference", REFERENCE_CONFIGS, FIRST_REFERENCE_SEED))
    for implementation, default, offset in defaults:
        # Without --fuzz the reference takes seeds of its own; with it, the ones asked for.
        total, start = (default, first + offset) if count is None else (count, first)
        chunks += [
            (implementation, range(begin, min(begin + BATCH_OF_SEEDS, start + total)))
            for begin in range(start, start + total, BATCH_OF_SEEDS)
        ]
    metafunc.parametrize("chunk", chunks, ids=lambda chunk: f"{chunk[0]}-seeds-{chunk[1].start}-{chunk[1].stop - 1}")


def test_random_problems(chunk):
    implementation, seeds = chunk
    repeat = f"repeat: python -m pytest tests/test_fuzz.py -k {implementation} --fuzz 1 --seed"
    check_seeds(implementation, seeds, repeat=repeat)


def test_a_seed_is_one_problem():
    assert random_config(7) == random_config(7)
    assert len({random_config(seed) for seed in range(200)}) == 200


def test_the_generator_reaches_every_option():
    """Every field of Case takes a value other than its default, and every pair of options occurs together."""
    configs = [random_config(seed)[0] for seed in range(CPU_CONFIGS)]
    on = {
        "causal": lambda c: c.is_causal,
        "bottom_right": lambda c: c.causal_alignment == "bottom_right",
        "window": lambda c: c.local_window_size is not None,
        "scale": lambda c: c.scale is not None,
        "soft_cap": lambda c: c.logits_soft_cap is not None,
        "sinks": lambda c: c.sinks is not None,
        "dropout": lambda c: c.dropout_rate > 0,
        "bias": lambda c: c.bias is not None,
        "mask": lambda c: c.mask is not None,
        "query_lengths": lambda c: c.has_query_lengths,
        "kv_lengths": lambda c: c.has_kv_lengths,
        "segments": lambda c: c.segments > 0,
        "blocks": lambda c: c.block_mask is not None,
        "packed": lambda c: c.sequences > 0,
        "gqa": lambda c: 1 < c.K < c.N,
        "two_batch_dims": lambda c: len(c.batch) == 2,
    }
    dense_only = {"bias", "mask", "query_lengths", "kv_lengths", "segments", "blocks", "two_batch_dims"}
    for a in on:
        for b in on:
            if "packed" in (a, b) and {a, b} & dense_only:
                continue
            assert any(on[a](c) and on[b](c) for c in configs), f"{a} and {b} never occur together"
