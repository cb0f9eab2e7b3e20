"""Which implementation a call takes, every reason for refusing, and what is printed about it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash
from jaxflash import _device, _dispatch
from jaxflash._backends import ffi
from jaxflash._types import AttentionSpec, KernelConfig


@pytest.fixture(autouse=True)
def no_log(monkeypatch):
    monkeypatch.delenv("JAXFLASH_LOG", raising=False)


def qkv(dtype="float32", make=jnp.zeros):
    return make((2, 5, 4, 8), dtype), make((2, 7, 2, 8), dtype), make((2, 7, 2, 12), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernel_is_first_choice(dtype):
    explanation = jaxflash.why(*qkv(dtype))
    assert explanation.chosen == "cpu"
    assert explanation.reasons["fa2"] is not None  # needs a GPU
    assert explanation.reasons["cpu"] is explanation.reasons["reference"] is None


def test_every_option_at_once_still_runs_on_the_kernel():
    explanation = jaxflash.why(
        *qkv(), jnp.zeros((2, 4, 5, 7), "bfloat16"), jnp.ones((2, 1, 1, 7), bool), is_causal=True,
        causal_alignment="bottom_right", query_seq_lengths=[1, 2], key_value_seq_lengths=[3, 4],
        query_segment_ids=jnp.zeros((2, 5), "int32"), key_value_segment_ids=jnp.zeros((2, 7), "int32"),
        local_window_size=3, logits_soft_cap=2.0, sinks=jnp.zeros(4), dropout_rate=0.1,
        block_mask=jaxflash.BlockMask(jnp.ones((1, 1, 1, 1), bool), 64, 64), dropout_key=jax.random.key(0),
        deterministic=True, return_residual=True,
    )  # fmt: skip
    assert explanation.chosen == "cpu"


class TestRefusals:
    def test_library_missing(self, monkeypatch):
        monkeypatch.setattr(ffi, "library_problem", lambda: "the compiled library is missing (no such file)")
        explanation = jaxflash.why(*qkv())
        assert explanation.chosen == "reference"
        assert explanation.reasons["cpu"] == "the compiled library is missing (no such file)"
        with pytest.raises(NotImplementedError, match="cpu refused: the compiled library is missing"):
            jaxflash.attention(*qkv(), implementation="cpu")
        assert jaxflash.attention(*qkv()).shape == (2, 5, 4, 12)

    def test_import_error_becomes_the_reason(self, monkeypatch):
        monkeypatch.setattr(ffi, "_C", None)
        monkeypatch.setattr(ffi, "_IMPORT_ERROR", "libfoo.so.1: cannot open", raising=False)
        reason = ffi.library_problem.__wrapped__()
        assert "libfoo.so.1: cannot open" in reason and "reinstall" in reason

    def test_library_newer_than_jaxlib(self, monkeypatch):
        installed = ffi._installed_api_version()

        class Newer:
            @staticmethod
            def build_info():
                return {"ffi_api_version": (installed[0], installed[1] + 1)}

        monkeypatch.setattr(ffi, "_C", Newer)
        reason = ffi.library_problem.__wrapped__()
        assert f"speaks XLA FFI {installed[0]}.{installed[1] + 1}" in reason and "upgrade jaxlib" in reason

    @pytest.mark.parametrize("platform", ["gpu", "tpu"])
    def test_other_platform(self, monkeypatch, platform):
        monkeypatch.setattr(_device, "platform_of", lambda *arrays: platform)
        explanation = jaxflash.why(*qkv())
        assert explanation.chosen == "reference"
        assert explanation.reasons["cpu"] == f"runs on CPU devices, this call is on '{platform}'"

    def test_float64(self):
        with jax.enable_x64(True):
            explanation = jaxflash.why(*qkv("float64"))
            assert explanation.chosen == "reference"
            assert "query is float64" in explanation.reasons["cpu"]
            with pytest.raises(NotImplementedError, match="query is float64.*These can: 'reference'"):
                jaxflash.attention(*qkv("float64"), implementation="cpu")

    def test_float64_bias(self):
        with jax.enable_x64(True):
            arrays = (*qkv(), jnp.zeros((1, 1, 5, 7), "float64"))
            assert "bias is float64" in jaxflash.why(*arrays).reasons["cpu"]

    def test_every_reason_is_listed(self, monkeypatch):
        table = {"cpu": lambda problem: "is out of order", "reference": lambda problem: "is on strike"}
        monkeypatch.setattr(_dispatch, "_IMPLEMENTATIONS", table)
        with pytest.raises(
            NotImplementedError,
            match="no implementation runs this call. cpu refused: is out of order; reference refused: is on strike",
        ):
            jaxflash.attention(*qkv())


class TestNamedImplementation:
    @pytest.mark.parametrize("name", ["cpu", "reference"])
    def test_is_taken(self, name):
        assert jaxflash.why(*qkv(), implementation=name).chosen == name

    @pytest.mark.parametrize("name", ["cpu", "reference"])
    def test_is_never_replaced(self, monkeypatch, name):
        def refuse(problem):
            return "is out of order"

        monkeypatch.setitem(_dispatch._IMPLEMENTATIONS, name, refuse)
        assert jaxflash.why(*qkv(), implementation=name).chosen is None
        with pytest.raises(NotImplementedError, match=f"implementation='{name}' does not run.*is out of order"):
            jaxflash.attention(*qkv(), implementation=name)

    @pytest.mark.parametrize(("name", "is_called"), [("cpu", True), ("reference", False)])
    def test_is_what_runs(self, name, is_called):
        text = jax.jit(lambda *x: jaxflash.attention(*x, implementation=name)).lower(*qkv()).as_text()
        assert ("jaxflash_cpu_forward_v1" in text) == is_called

    def test_unknown_name_lists_the_known(self):
        known = "'fa3', 'fa2', 'fa1', 'cpu', 'reference'"
        with pytest.raises(ValueError, match=f"implementation must be one of {known}, it was 'fa9'"):
            jaxflash.attention(*qkv(), implementation="fa9")


class TestWhy:
    def test_takes_shapes(self):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv()]
        assert jaxflash.why(*shapes) == jaxflash.why(*qkv())
        mask = jax.ShapeDtypeStruct((2, 1, 5, 7), jnp.bool_)
        assert jaxflash.why(*shapes, mask=mask, is_causal=True).chosen == "cpu"

    def test_takes_numpy(self):
        assert jaxflash.why(*qkv(make=np.zeros)).chosen == "cpu"

    def test_takes_shapes_inside_a_block_mask(self):
        blocks = jaxflash.BlockMask(jax.ShapeDtypeStruct((1, 1, 2, 2), jnp.bool_), 4, 4)
        assert jaxflash.why(*qkv(), block_mask=blocks).chosen == "cpu"

    def test_takes_keywords_and_return_residual(self):
        query, key, value = qkv()
        assert jaxflash.why(query=query, key=key, value=value, return_residual=True).chosen == "cpu"

    def test_runs_nothing(self, monkeypatch):
        monkeypatch.setattr(ffi, "run", lambda *arguments: pytest.fail("ran"))
        jaxflash.why(*qkv())

    @pytest.mark.parametrize("shape", [(3, 7, 2, 8), (2, 7, 3, 8), (2, 7, 2, 9)])
    def test_refuses_what_attention_refuses(self, shape):
        query, _, value = qkv()
        with pytest.raises(ValueError, match="key"):
            jaxflash.why(query, jax.ShapeDtypeStruct(shape, jnp.float32), value)

    def test_text(self, monkeypatch):
        monkeypatch.setattr(ffi, "library_problem", lambda: "the library is away")
        assert str(jaxflash.why(*qkv())).splitlines() == [
            "chosen: reference",
            "  fa3: refuses: the library is away",
            "  fa2: refuses: the library is away",
            "  fa1: refuses: the library is away",
            "  cpu: refuses: the library is away",
            "  reference: can run this call",
        ]


class TestLog:
    def test_prints_constructor_calls(self, monkeypatch, capsys):
        monkeypatch.setenv("JAXFLASH_LOG", "dispatch")
        jaxflash.attention(*qkv(), is_causal=True, deterministic=True, implementation="reference")
        line = capsys.readouterr().err.strip()
        assert line.startswith("jaxflash: ")
        config, spec = line.removeprefix("jaxflash: ").split(" for ")
        names = {"KernelConfig": KernelConfig, "AttentionSpec": AttentionSpec}
        assert eval(config, names) == KernelConfig("reference", deterministic=True)
        assert eval(spec, names) == AttentionSpec(1 / math.sqrt(8), window=(None, 0))

    @pytest.mark.parametrize("value", ["", "1", "other"])
    def test_is_silent_otherwise(self, monkeypatch, capsys, value):
        monkeypatch.setenv("JAXFLASH_LOG", value)
        jaxflash.attention(*qkv())
        assert capsys.readouterr() == ("", "")


class TestPlatform:
    def test_of_committed_arrays(self):
        assert _device.platform_of(jax.device_put(jnp.zeros(2), jax.devices("cpu")[1])) == "cpu"

    def test_of_the_default_device(self):
        with jax.default_device(jax.devices("cpu")[0]):
            assert _device.platform_of(np.zeros(2)) == "cpu"

    def test_of_traced_arrays(self):
        jax.eval_shape(lambda x: pytest.fail("other") if _device.platform_of(x) != "cpu" else x, jnp.zeros(2))


def test_names_are_in_order_of_preference():
    assert _dispatch.implementations() == ("fa3", "fa2", "fa1", "cpu", "reference")


@pytest.fixture
def hopper(monkeypatch):
    """A complete build and an H100, as far as dispatch can tell."""
    monkeypatch.setattr(ffi, "library_problem", lambda: None)
    monkeypatch.setattr(ffi, "_build_problem", lambda name: None)
    monkeypatch.setattr(_device, "platform_of", lambda *arrays: "gpu")
    monkeypatch.setattr(_device, "compute_capability_of", lambda platform: (9, 0))


def half_precision(T=128, S=128, N=8, K=2, H=64):
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, T, N, H), (2, S, K, H), (2, S, K, H))]


@pytest.mark.parametrize(
    ("sizes", "implementation", "reason"),
    [
        ({"H": 257}, "fa2", "takes head dims up to 256, this call has 257"),
        (
            {"N": 2**19, "H": 128},
            "fa2",
            f"takes features of all heads together up to {2**26 - 1}, this call has {2**26}",
        ),
        ({"S": 2**30}, "fa2", f"takes lengths up to {2**30 - 1}, this call has {2**30}"),
        ({"S": 2**23}, "fa1", f"takes lengths up to {2**23 - 1}, this call has {2**23}"),
        ({"H": 136}, "fa1", "takes head dims up to 128, this call has 136"),
        ({"H": 60}, "fa3", "takes head dims that are multiples of 8, this call has 60"),
    ],
    ids=str,
)
def test_sizes_that_gpu_kernels_refuse(hopper, sizes, implementation, reason):
    assert jaxflash.why(*half_precision(**sizes)).reasons[implementation] == reason


def test_fa3_is_for_hopper(hopper, monkeypatch):
    arrays = half_precision()
    assert jaxflash.why(*arrays).chosen == "fa3"
    monkeypatch.setattr(_device, "compute_capability_of", lambda platform: (10, 0))
    explanation = jaxflash.why(*arrays)
    assert explanation.chosen == "fa2"
    assert "needs compute capability 9.0" in explanation.reasons["fa3"]


def test_fa3_refuses_packed_sequences(hopper):
    q, k, v = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in half_precision())
    offsets = jax.ShapeDtypeStruct((3,), jnp.int32)
    attend = functools.partial(jaxflash.flash_mha_varlen, implementation="fa3")
    with pytest.raises(NotImplementedError, match=r"fa3 refused: takes no packed sequences \(cu_seqlens\)"):
        jax.eval_shape(attend, q, k, v, offsets, offsets)


@pytest.mark.parametrize(("T", "S", "chosen"), [(16, 256, "fa2"), (16, 255, "fa3"), (17, 4096, "fa3"), (1, 16, "fa2")])
def test_few_queries_are_split_over_the_keys(hopper, T, S, chosen):
    assert jaxflash.why(*half_precision(T=T, S=S)).chosen == chosen
    assert jaxflash.why(*half_precision(T=T, S=S), implementation="fa3").chosen == "fa3"
