"""The FFI targets called with what Python would never send: a clean error, and the process goes on."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from jaxflash import _C
from jaxflash._backends import ffi
from jaxflash._types import AttentionSpec

B, T, S, N, K, H, Hv = 2, 5, 7, 4, 2, 8, 12
SOURCES = Path(__file__).parents[1] / "csrc"

QKV = {"q": ((B, T, N, H), "float32"), "k": ((B, S, K, H), "float32"), "v": ((B, S, K, Hv), "float32")}
OPTIONAL = {
    "bias": "float32",
    "mask": "bool",
    "block_mask": "bool",
    "query_lengths": "int32",
    "kv_lengths": "int32",
    "query_segment_ids": "int32",
    "kv_segment_ids": "int32",
    "query_offsets": "int32",
    "kv_offsets": "int32",
    "sinks": "float32",
    "dropout_batch": "uint32",
    "dropout_heads": "uint32",
}
FORWARD = QKV | {name: ((0,), dtype) for name, dtype in OPTIONAL.items()}
BACKWARD = {name: x for name, x in FORWARD.items() if name != "sinks"} | {
    "out": ((B, T, N, Hv), "float32"),
    "lse": ((B, T, N), "float32"),
    "lse_low": ((B, T, N), "float32"),
    "dout": ((B, T, N, Hv), "float32"),
    "dlse": ((0,), "float32"),
}


def results(direction: str) -> dict:
    workspace = ((2, _C.cpu_workspace_floats(H, Hv)[direction == "backward"]), "float32")
    if direction == "forward":
        statistics = {name: ((B, T, N), "float32") for name in ("lse", "lse_low")}
        return {"out": ((B, T, N, Hv), "float32"), **statistics, "workspace": workspace}
    gradients = {"dq": QKV["q"], "dk": QKV["k"], "dv": QKV["v"], "dbias": ((0,), "float32")}
    return gradients | {"delta": ((B, T, N), "float32"), "workspace": workspace}


@pytest.fixture(scope="module", autouse=True)
def registered():
    jaxflash.attention(*(jnp.ones(shape) for shape, _ in QKV.values()), implementation="cpu")


def call(direction: str, operands=None, result_changes=None, attributes=None, drop_attribute=None):
    """Calls a target with zeros of the given shapes and dtypes."""
    shapes = (FORWARD if direction == "forward" else BACKWARD) | (operands or {})
    given = ffi.attributes(AttentionSpec(0.5)) | (attributes or {})
    given.pop(drop_attribute, None)
    outputs = [jax.ShapeDtypeStruct(*x) for x in (results(direction) | (result_changes or {})).values()]
    function = jax.ffi.ffi_call(f"jaxflash_cpu_{direction}_v1", outputs)
    return jax.block_until_ready(function(*(jnp.zeros(*x) for x in shapes.values()), **given))


def expect_error(match: str, direction: str, **changes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        call(direction, **changes)
    call(direction)  # the process and the target are as usable as before


DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


@DIRECTIONS
def test_the_right_call_runs(direction):
    for x, (shape, dtype) in zip(call(direction), results(direction).values(), strict=True):
        assert x.shape == shape and x.dtype == dtype


@DIRECTIONS
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["int32", "int8", "complex64", "bfloat16"])
def test_wrong_dtype_of_qkv(direction, name, dtype):
    expect_error("jaxflash: q", direction, operands={name: (QKV[name][0], dtype)})


@DIRECTIONS
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (N, H)),
        ("q", ()),
        ("q", (B + 1, T, N, H)),
        ("q", (B, T, N, H + 1)),
        ("q", (B, T, 3, H)),
        ("k", (S, K, H)),
        ("k", (B, S + 1, K, H)),
        ("k", (B, S, K + 1, H)),
        ("v", (B, S, 1, Hv)),
        ("v", (1, B, S, K, Hv)),
        ("k", (B, S, 0, H)),
    ],
)
def test_wrong_shape_of_qkv(direction, name, shape):
    expect_error("jaxflash: .*q", direction, operands={name: (shape, "float32")})


WRONG_OPTIONAL = {
    "bias": [((B, N, T, S), "int32"), ((B, N, T, S + 1), "float32"), ((N, T, S), "float32"), ((1,), "float32")],
    "mask": [((B, N, T, S), "float32"), ((B, N, S, T), "bool"), ((1, 1, 1), "bool"), ((3, 1, 1, 1), "bool")],
    "block_mask": [((1, 1, 2, 2), "int8"), ((1, 1, 2, 2), "bool")],
    "query_lengths": [((B,), "float32"), ((B + 1,), "int32"), ((B, 1), "int32")],
    "kv_lengths": [((B,), "uint32"), ((3,), "int32"), ((1, B), "int32")],
    "query_segment_ids": [((B, T), "float32"), ((B, S), "int32"), ((T,), "int32"), ((B, T), "int32")],
    "kv_segment_ids": [((B, S), "float32"), ((B, T), "int32"), ((S,), "int32"), ((B, S), "int32")],
    "query_offsets": [((B, 3), "int32"), ((3,), "int32"), ((B, 3), "float32")],
    "kv_offsets": [((B, 3), "int32"), ((3,), "int32"), ((B, 3), "float32")],
    "dropout_batch": [((B, 2), "uint32"), ((B, 3), "int32"), ((3,), "uint32")],
    "dropout_heads": [((B, K), "uint32"), ((B, N), "int32"), ((N,), "uint32")],
}


@DIRECTIONS
@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, wrong) for name, all_wrong in WRONG_OPTIONAL.items() for wrong in all_wrong],
    ids=lambda x: x if isinstance(x, str) else f"{x[1]}{list(x[0])}",
)
def test_wrong_optional_operand(direction, name, wrong):
    expect_error(f"jaxflash: .*{name}", direction, operands={name: wrong})


@pytest.mark.parametrize("wrong", [((B, N), "bfloat16"), ((N,), "float32"), ((B, K), "float32")])
def test_wrong_sinks(wrong):
    expect_error("jaxflash: sinks", "forward", operands={"sinks": wrong})


@pytest.mark.parametrize("name", ["bias", "mask", "query_lengths", "query_segment_ids"])
def test_packed_sequences_take_no_other_visibility(name):
    shape = {"bias": (1, 1, 1, 1), "mask": (1, 1, 1, 1), "query_lengths": (B,), "query_segment_ids": (B, T)}[name]
    packed = {x: ((B, 3), "int32") for x in ("query_offsets", "kv_offsets")}
    ids = {"kv_segment_ids": ((B, S), "int32")} if name == "query_segment_ids" else {}
    expect_error("packed", "forward", operands=packed | ids | {name: (shape, OPTIONAL[name])})


@DIRECTIONS
def test_dropout_needs_its_state(direction):
    expect_error("dropout needs", direction, attributes={"dropout_threshold": np.int32(100)})


@pytest.mark.parametrize(
    ("direction", "name"),
    [("forward", name) for name in ("out", "lse", "lse_low")]
    + [("backward", name) for name in ("dq", "dk", "dv", "delta")],
)
@pytest.mark.parametrize("change", ["dtype", "shape", "rank"])
def test_wrong_results(direction, name, change):
    shape, dtype = results(direction)[name]
    wrong = {"dtype": (shape, "int32"), "shape": ((*shape[:-1], shape[-1] + 1), dtype), "rank": (shape[1:], dtype)}
    expect_error(f"jaxflash: {name}", direction, result_changes={name: wrong[change]})


@pytest.mark.parametrize("name", ["out", "lse", "lse_low", "dout", "dlse"])
@pytest.mark.parametrize("change", ["dtype", "shape", "rank"])
def test_wrong_backward_operands(name, change):
    shape, dtype = BACKWARD["lse" if name == "dlse" else name]
    wrong = {"dtype": (shape, "int32"), "shape": ((*shape[:-1], shape[-1] + 1), dtype), "rank": (shape[1:], dtype)}
    expect_error(f"jaxflash: {name}", "backward", operands={name: wrong[change]})


@pytest.mark.parametrize("wrong", [((B, N, T, S), "bfloat16"), ((1, N, T, S), "float32"), ((S,), "float32")])
def test_wrong_bias_gradient(wrong):
    expect_error(
        "jaxflash: dbias",
        "backward",
        operands={"bias": ((B, N, T, S), "float32")},
        result_changes={"dbias": wrong},
    )


def test_bias_gradient_without_bias():
    expect_error("jaxflash: dbias", "backward", result_changes={"dbias": ((B, N, T, S), "float32")})


def test_cotangent_of_lse_is_optional():
    call("backward", operands={"dlse": ((B, T, N), "float32")})


@DIRECTIONS
@pytest.mark.parametrize("workspace", [((0, 1000), "float32"), ((2, 1), "float32"), ((2000,), "float32")])
def test_wrong_workspace(direction, workspace):
    expect_error("jaxflash: workspace", direction, result_changes={"workspace": workspace})


@DIRECTIONS
@pytest.mark.parametrize("name", ffi.attributes(AttentionSpec(0.5)))
def test_missing_attribute(direction, name):
    expect_error("decode.*\n.*\nWrong number of attributes", direction, drop_attribute=name)


@DIRECTIONS
@pytest.mark.parametrize("name", ffi.attributes(AttentionSpec(0.5)))
def test_attribute_of_another_type(direction, name):
    expect_error("decode.*\n.*\nWrong attribute type", direction, attributes={name: "text"})


def test_too_few_operands():
    operands = [jnp.zeros(*x) for x in QKV.values()]
    outputs = [jax.ShapeDtypeStruct(*x) for x in results("forward").values()]
    with pytest.raises(jax.errors.JaxRuntimeError, match="takes 15 operands and 4 results, got 3 and 4"):
        jax.block_until_ready(
            jax.ffi.ffi_call("jaxflash_cpu_forward_v1", outputs)(*operands, **ffi.attributes(AttentionSpec(0.5)))
        )
    call("forward")


def members_of_attrs_header() -> dict[str, str]:
    """name -> C++ type, as csrc/ffi/attrs.h declares them."""
    text = (SOURCES / "ffi" / "attrs.h").read_text()
    body = re.search(r"struct AttentionAttrs \{(.*?)\};", text, re.DOTALL)[1]
    members = {name: kind for kind, name in re.findall(r"^\s*(\w+) (\w+);", body, re.MULTILINE)}
    decoded = {name: kind for kind, name in re.findall(r'StructMember<(\w+)>\("(\w+)"\)', text)}
    assert members == decoded, "the struct and its registration differ"
    return members


def test_attributes_are_those_of_the_header():
    types = {"float": np.float32, "int32_t": np.int32, "int64_t": np.int64, "bool": bool}
    specs = [
        AttentionSpec(0.5),
        AttentionSpec(1, (3, 2**31 - 1), "bottom_right", 4, dropout_rate=1, mask_block=(np.int32(64), 128)),
    ]
    header = members_of_attrs_header()
    for spec in specs:
        given = ffi.attributes(spec)
        assert list(given) == list(header)
        for name, value in given.items():
            assert type(value) is types[header[name]], f"{name} is {type(value)}, the header says {header[name]}"


@DIRECTIONS
def test_operand_order_is_that_of_the_handlers(direction):
    text = (SOURCES / "ffi" / "checks.cc").read_text()
    names = {
        what: re.findall(r'"(\w+)"', re.search(rf"k{direction.title()}{what} = {{(.*?)}};", text, re.DOTALL)[1])
        for what in ("Operands", "Results")
    }
    assert names == {
        "Operands": list(FORWARD if direction == "forward" else BACKWARD),
        "Results": list(results(direction)),
    }


def test_targets_are_registered_under_versioned_names():
    assert set(ffi.targets()) >= {"jaxflash_cpu_forward_v1", "jaxflash_cpu_backward_v1"}
    assert all(re.fullmatch(r"jaxflash_\w+_(forward|backward)_v\d+", name) for name in ffi.targets())
