"""The table of attention problems that the forward and backward tests run, and how a problem becomes arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jaxflash

DTYPES = ("float32", "bfloat16", "float16")
# Compiling takes most of the tests' time, and each program runs once.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
STATIC = ("is_causal", "causal_alignment", "local_window_size", "scale", "logits_soft_cap", "dropout_rate")


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem: sizes and options. Arrays follow from it and a seed.

    `bias`, `mask` and `block_dims` say the dims of those arrays with one letter a dim of [*batch, N, T, S]; "1" is a
    dim that is broadcast: "B1TS", "111S". A bias letter string of length 3 has no batch dims.
    """

    name: str
    batch: tuple[int, ...] = (2,)
    T: int = 37
    S: int = 53
    N: int = 4
    K: int = 2
    H: int = 24
    Hv: int = 40
    is_causal: bool = False
    causal_alignment: str = "top_left"
    local_window_size: int | tuple[int | None, int | None] | None = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    bias: str | None = None
    bias_dtype: str = "float32"
    has_infinite_bias: bool = False
    mask: str | None = None
    has_query_lengths: bool = False
    has_kv_lengths: bool = False
    segments: int = 0
    has_padding_segment: bool = False
    sinks: str | None = None  # dtype
    block_mask: tuple[int, int] | None = None
    block_dims: str = "11TS"
    dropout_rate: float = 0.0
    sequences: int = 0  # packed with this many sequences; T and S are totals and batch is ()
    input_scale: float = 1.0
    has_poison: bool = False  # NaN and Inf in everything that is padding
    has_dlse: bool = True

    def __post_init__(self):
        assert not self.sequences or (self.batch == () and self.mask is self.bias is self.block_mask is None)


@dataclasses.dataclass
class Problem:
    """The arrays (NumPy) and static options of a case."""

    case: Case
    arrays: dict[str, Any]
    static: dict[str, Any]
    dout: np.ndarray
    dlse: np.ndarray | None
    dropout_seed: np.ndarray | None

    @property
    def differentiable(self) -> list[str]:
        return [name for name in ("query", "key", "value", "bias", "sinks") if name in self.arrays]


def build(case: Case, dtype: str, seed: int = 0) -> Problem:
    """Draws the arrays of a case."""
    rng = np.random.default_rng([seed, sum(map(ord, case.name))])
    batch = case.batch
    normal = lambda *shape: (case.input_scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype))  # noqa: E731
    arrays: dict[str, Any] = {
        "query": normal(*batch, case.T, case.N, case.H),
        "key": normal(*batch, case.S, case.K, case.H),
        "value": normal(*batch, case.S, case.K, case.Hv),
    }
    full = (*batch, case.N, case.T, case.S)
    if case.bias is not None:
        bias = rng.standard_normal(_shape(case.bias, full))
        if case.has_infinite_bias:
            bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
        arrays["bias"] = bias.astype(jnp.dtype(case.bias_dtype))
    if case.mask is not None:
        arrays["mask"] = rng.random(_shape(case.mask, full)) < 0.7
    if case.has_query_lengths:
        arrays["query_seq_lengths"] = _lengths(rng, batch, case.T)
    if case.has_kv_lengths:
        arrays["key_value_seq_lengths"] = _lengths(rng, batch, case.S)
    if case.segments:
        arrays["query_segment_ids"] = _segments(rng, case, case.T)
        arrays["key_value_segment_ids"] = _segments(rng, case, case.S)
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.N).astype(jnp.dtype(case.sinks))
    if case.block_mask:
        block_q, block_kv = case.block_mask
        blocks = rng.random(_shape(case.block_dims, (*full[:-2], -(-case.T // block_q), -(-case.S // block_kv)))) < 0.6
        arrays["block_mask"] = jaxflash.BlockMask(blocks, block_q, block_kv)
    if case.sequences:
        arrays["cu_seqlens_q"] = _offsets(rng, case.sequences, case.T)
        arrays["cu_seqlens_k"] = _offsets(rng, case.sequences, case.S)
    dropout_seed = None
    if case.dropout_rate > 0:
        arrays["dropout_key"] = jax.random.key(seed)
        dropout_seed = np.asarray(jax.random.bits(arrays["dropout_key"], (2,), jnp.uint32))
    static = {name: getattr(case, name) for name in STATIC}
    # Rows of different size, so that a result that mixes rows up cannot pass.
    dout = rng.standard_normal((*batch, case.T, case.N, case.Hv)) * rng.uniform(0.5, 2, (case.T, 1, 1))
    dlse = rng.standard_normal((*batch, case.T, case.N)).astype(np.float32) if case.has_dlse else None
    problem = Problem(case, arrays, static, dout.astype(jnp.dtype(dtype)), dlse, dropout_seed)
    if case.has_poison:
        _poison(rng, problem)
    return problem


def _shape(letters: str, full) -> tuple[int, ...]:
    sizes = full[len(full) - len(letters) :]
    return tuple(1 if letter == "1" else size for letter, size in zip(letters, sizes, strict=True))


def _lengths(rng, batch, limit):
    """Any length, both ends more often than chance has them."""
    lengths = rng.integers(0, limit + 1, batch)
    choice = rng.random(batch)
    return np.where(choice < 0.15, 0, np.where(choice < 0.3, limit, lengths)).astype(np.int32)


def _segments(rng, case, length):
    """Runs of equal ids, each batch element cut differently; a negative last one is padding."""
    ids = np.sort(rng.integers(0, case.segments, (*case.batch, length)), axis=-1)
    if case.has_padding_segment:
        ids = np.where(ids == case.segments - 1, -1, ids)
    return ids.astype(np.int32)


def _offsets(rng, sequences, total):
    """cu_seqlens with empty sequences among them, and unused tokens at the end."""
    used = int(rng.integers(total // 2, total + 1))
    return np.concatenate([[0], np.sort(rng.integers(0, used + 1, sequences - 1)), [used]]).astype(np.int32)


def _poison(rng, problem: Problem):
    case, arrays = problem.case, problem.arrays
    if case.sequences:
        row_valid = np.arange(case.T) < arrays["cu_seqlens_q"][-1]
        key_valid = np.arange(case.S) < arrays["cu_seqlens_k"][-1]
    else:
        visibility = {name: x for name, x in arrays.items() if name.endswith(("lengths", "ids"))}
        _, row_valid, key_valid = oracle.visible_pairs(case.batch, 1, case.T, case.S, **visibility)
    for name, valid in (("query", row_valid), ("key", key_valid), ("value", key_valid)):
        bad = rng.choice([np.nan, np.inf, -np.inf], arrays[name].shape).astype(arrays[name].dtype)
        arrays[name] = np.where(valid[..., None, None], arrays[name], bad)
    problem.dout = np.where(row_valid[..., None, None], problem.dout, np.asarray(np.nan, problem.dout.dtype))
    if problem.dlse is not None:
        problem.dlse = np.where(row_valid[..., None], problem.dlse, np.float32(np.nan))


# --- Running a problem ----------------------------------------------------------------------------------------------


def call(implementation: str, problem: Problem, arrays: dict[str, Any], **options):
    """out and lse of jaxflash for a problem, with the given arrays in place of its own."""
    static = problem.static | {"implementation": implementation, "return_residual": True} | options
    if not problem.case.sequences:
        return jaxflash.attention(**arrays, **static)
    window = static.pop("local_window_size")
    sides = window if isinstance(window, tuple) else (window, window)
    return jaxflash.flash_mha_varlen(
        **arrays,
        softmax_scale=static.pop("scale"),
        window_size=tuple(-1 if side is None else side for side in sides),
        **static,
    )


def forward(implementation: str, problem: Problem, **options) -> dict[str, np.ndarray]:
    """{"out", "lse"} under jit."""
    run = jax.jit(lambda arrays: call(implementation, problem, arrays, **options), compiler_options=QUICK_COMPILE)
    out, lse = run(problem.arrays)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


def forward_and_gradients(implementation: str, problem: Problem, **options) -> dict[str, np.ndarray]:
    """{"out", "lse", "dquery", "dkey", "dvalue"} and "dbias", "dsinks" where they are given, under one jit."""
    traced = {name: problem.arrays[name] for name in problem.differentiable}

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(differentiable, fixed, dout, dlse):
        def function(x):
            return call(implementation, problem, fixed | x, **options)

        (out, lse), pullback = jax.vjp(function, differentiable)
        (gradients,) = pullback((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        return {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}

    fixed = {name: x for name, x in problem.arrays.items() if name not in traced}
    return {name: np.asarray(x) for name, x in run(traced, fixed, problem.dout, problem.dlse).items()}


def expected(problem: Problem, gradients: bool = True) -> tuple[oracle.Result, oracle.Result]:
    """(baseline, reference) of a problem."""
    arrays = {name: x for name, x in problem.arrays.items() if name != "dropout_key"}
    options = dict(problem.static)
    if problem.dropout_seed is not None:
        options["dropout_seed"] = problem.dropout_seed
    if gradients:
        options |= {"dout": problem.dout, "dlse": problem.dlse}
    if problem.case.sequences:
        return (
            oracle.packed(oracle.naive, **arrays, **options),
            oracle.packed(oracle.attention64, **arrays, **options),
        )
    return oracle.naive(**arrays, **options), oracle.attention64(**arrays, **options)


def check(implementation: str, problem: Problem, gradients: bool = True, **options) -> dict[str, np.ndarray]:
    """Runs a problem, compares every result with the reference, and returns the results."""
    with np.errstate(invalid="ignore"):
        baseline, right = expected(problem, gradients)
    ours = (forward_and_gradients if gradients else forward)(implementation, problem, **options)
    for name in ours:
        primal = problem.arrays.get(name[1:], problem.arrays["query"])
        wanted = np.dtype(np.float32) if name == "lse" else primal.dtype
        assert ours[name].dtype == wanted, f"{name} is {ours[name].dtype}, expected {wanted}"
    oracle.assert_no_worse_than(ours, baseline, right, f"{problem.case.name} {implementation}: ")
    return ours


# --- The table ------------------------------------------------------------------------------------------------------

# Sizes differ pairwise within a case and lie beside multiples of 16, 32, 64 and 128.
CASES = (
    Case("plain"),
    Case("one-tile", batch=(3,), T=16, S=16, N=2, K=1, H=8, Hv=8),
    Case("tile-plus-one", batch=(3,), T=65, S=129, N=4, K=2, H=33, Hv=17),
    Case("tile-minus-one", batch=(3,), T=127, S=63, N=4, K=1, H=31, Hv=64),
    Case("one-query", batch=(3,), T=1, S=67, N=8, K=2, H=32, Hv=48),
    Case("one-key", batch=(3,), T=33, S=1, N=4, K=2, H=16, Hv=24),
    Case("one-pair", batch=(5,), T=1, S=1, N=4, K=2, H=7, Hv=3),
    Case("long-keys", batch=(1,), T=5, S=1031, N=2, K=1, H=16, Hv=12),
    Case("long-queries", batch=(1,), T=517, S=7, N=2, K=1, H=16, Hv=12),
    Case("wide-heads", batch=(2,), T=19, S=35, N=4, K=1, H=257, Hv=130),
    Case("narrow-heads", batch=(2,), T=19, S=35, N=6, K=3, H=1, Hv=2),
    Case("mha", batch=(2,), T=41, S=29, N=5, K=5, H=16, Hv=20),
    Case("mqa", batch=(2,), T=41, S=29, N=7, K=1, H=16, Hv=20),
    Case("gqa-odd-groups", batch=(2,), T=41, S=29, N=9, K=3, H=16, Hv=20),
    Case("no-batch", batch=(), T=37, S=53),
    Case("two-batch-dims", batch=(2, 3), T=11, S=23, bias="A1NTS", mask="1B11S"),
    Case("causal", T=77, S=77, is_causal=True),
    Case("causal-more-keys", T=37, S=90, is_causal=True),
    Case("causal-more-queries", T=90, S=37, is_causal=True),
    Case("causal-bottom-right-more-keys", T=37, S=90, is_causal=True, causal_alignment="bottom_right"),
    Case("causal-bottom-right-more-queries", T=90, S=37, is_causal=True, causal_alignment="bottom_right"),
    Case("window-both", T=83, S=101, local_window_size=(13, 6)),
    Case("window-int", T=83, S=101, local_window_size=9),
    Case("window-left", T=83, S=101, local_window_size=(13, None)),
    Case("window-right", T=101, S=83, local_window_size=(None, 5)),
    Case("window-zero", T=35, S=35, local_window_size=(0, 0)),
    Case("window-causal", T=83, S=101, is_causal=True, local_window_size=(17, 9)),
    Case("window-bottom-right", T=101, S=83, local_window_size=(11, 3), causal_alignment="bottom_right"),
    Case("window-huge", T=45, S=21, local_window_size=(2**31 - 1, 2**31 - 1), causal_alignment="bottom_right"),
    Case("scale", scale=0.3),
    Case("scale-negative", scale=-0.2),
    Case("scale-zero", scale=0.0),
    Case("soft-cap", logits_soft_cap=1.5, input_scale=2.0),
    Case("soft-cap-bias-causal", logits_soft_cap=4.0, bias="B1TS", is_causal=True),
    Case("bias-full", bias="BNTS"),
    Case("bias-three-dims", bias="NTS"),
    Case("bias-heads", bias="1NTS"),
    Case("bias-keys", bias="B11S"),
    Case("bias-rows", bias="BNT1"),
    Case("bias-scalar", bias="1111"),
    Case("bias-bf16", bias="1NTS", bias_dtype="bfloat16"),
    Case("bias-f16", bias="BN1S", bias_dtype="float16"),
    Case("bias-infinite", bias="B1TS", has_infinite_bias=True),
    Case("mask-full", mask="BNTS"),
    Case("mask-keys", mask="B11S"),
    Case("mask-rows", mask="1NT1"),
    Case("mask-bias-causal", mask="1NTS", bias="B1TS", is_causal=True),
    Case("kv-lengths", batch=(5,), has_kv_lengths=True, has_poison=True),
    Case("query-lengths", batch=(5,), has_query_lengths=True, has_poison=True),
    Case("lengths-causal", batch=(5,), has_query_lengths=True, has_kv_lengths=True, is_causal=True, has_poison=True),
    Case(
        "lengths-bottom-right-window",
        batch=(5,),
        T=67,
        S=45,
        has_query_lengths=True,
        has_kv_lengths=True,
        causal_alignment="bottom_right",
        local_window_size=(9, 4),
        has_poison=True,
    ),
    Case("segments", batch=(3,), T=70, S=66, segments=3),
    Case("segments-padding", batch=(3,), T=70, S=66, segments=4, has_padding_segment=True, has_poison=True),
    Case("segments-causal-bias", batch=(3,), T=66, S=66, segments=3, is_causal=True, bias="B1TS"),
    Case("sinks", sinks="float32"),
    Case("sinks-causal-lengths", batch=(5,), sinks="bfloat16", has_kv_lengths=True, is_causal=True, has_poison=True),
    Case("sinks-mask", mask="BNT1", sinks="float32"),
    Case("blocks", T=100, S=150, block_mask=(32, 64), block_dims="11TS"),
    Case("blocks-small", T=33, S=57, block_mask=(5, 7), block_dims="BNTS"),
    Case("blocks-causal", T=90, S=130, block_mask=(16, 48), block_dims="1NTS", is_causal=True),
    Case("blocks-rows", T=90, S=130, block_mask=(64, 128), block_dims="B1T1"),
    Case("dropout", dropout_rate=0.3),
    Case("dropout-causal-gqa", T=67, S=131, N=6, K=3, dropout_rate=0.5, is_causal=True),
    Case("dropout-bias-sinks", bias="1NTS", sinks="float32", dropout_rate=0.2, mask="B1TS"),
    Case("dropout-all", dropout_rate=1.0),
    Case("packed", batch=(), T=130, S=170, sequences=5, has_poison=True),
    Case("packed-causal", batch=(), T=130, S=170, sequences=5, is_causal=True, has_poison=True),
    Case(
        "packed-window-sinks-dropout",
        batch=(),
        T=90,
        S=110,
        sequences=4,
        local_window_size=(7, 3),
        causal_alignment="bottom_right",
        sinks="float32",
        dropout_rate=0.25,
        has_poison=True,
    ),
    Case("large-logits", input_scale=6.0),
    Case("out-only", has_dlse=False),
)

assert len({case.name for case in CASES}) == len(CASES), "two cases have one name"


def triples(every_dtype: tuple[str, ...]) -> list[tuple[str, Case, str]]:
    """(implementation, case, dtype): float32 and one half-precision type, turn about, on the implementations named.

    The others, which compile slowly, run one of the three dtypes a case, turn about.
    """
    halves = DTYPES[1:]
    return [
        (implementation, case, dtype)
        for implementation in ("reference", "cpu")
        for i, case in enumerate(CASES)
        for dtype in (("float32", halves[i % 2]) if implementation in every_dtype else DTYPES[i % 3 : i % 3 + 1])
    ]


def triple_id(triple) -> str:
    implementation, case, dtype = triple
    sizes = f"B{'x'.join(map(str, case.batch)) or '-'}-T{case.T}-S{case.S}-N{case.N}-K{case.K}-H{case.H}-Hv{case.Hv}"
    return f"{implementation}-{case.name}-{sizes}-{dtype}"


# --- Problems of one's own ------------------------------------------------------------------------------------------


def normal(seed: int, *shape: int, dtype: str = "float32", size: float = 1.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(jnp.dtype(dtype))


def qkv(seed: int, batch, T, S, N, K, H, Hv=None, dtype: str = "float32", size: float = 1.0) -> dict[str, np.ndarray]:
    """query, key and value of one seed."""
    batch = (batch,) if isinstance(batch, int) else tuple(batch)
    shapes = {"query": (*batch, T, N, H), "key": (*batch, S, K, H), "value": (*batch, S, K, Hv or H)}
    return {name: normal(seed + i, *x, dtype=dtype, size=size) for i, (name, x) in enumerate(shapes.items())}


def problem(arrays: dict[str, Any], seed: int = 0, has_dlse: bool = True, **static) -> Problem:
    """A problem from given arrays and static options, with random cotangents."""
    *batch, length, heads, head_dim = arrays["query"].shape
    (kv_length, kv_heads), value_dim = arrays["key"].shape[-3:-1], arrays["value"].shape[-1]
    sequences = len(arrays["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in arrays else 0
    case = Case("given", tuple(batch), length, kv_length, heads, kv_heads, head_dim, value_dim, sequences=sequences)
    defaults = {name: getattr(case, name) for name in STATIC}
    dropout_seed = None
    if "dropout_key" in arrays:
        dropout_seed = np.asarray(jax.random.bits(arrays["dropout_key"], (2,), jnp.uint32))
    dout = normal(seed + 1000, *batch, length, heads, value_dim, dtype=arrays["query"].dtype)
    dlse = normal(seed + 2000, *batch, length, heads) if has_dlse else None
    return Problem(case, arrays, defaults | static, dout, dlse, dropout_seed)


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Every array of a equals that of b, bit by bit."""
    assert a.keys() == b.keys()
    for name in a:
        same = a[name] == b[name]
        assert np.all(same), f"{name} differs in {np.sum(~same)} of {same.size} elements"
