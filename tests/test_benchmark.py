"""The benchmark: its formula, its clock, and a whole run at a tiny size."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, bars, contenders, measure, report, timing

SHAPE = contenders.Shape(B=2, T=24, S=40, N=6, K=3, H=8)


def test_flops_are_those_of_the_matrix_products():
    # Counted from the definition: every query head multiplies [T, H] by [H, S] and [T, S] by [S, H].
    a_product = 2 * SHAPE.T * SHAPE.S * SHAPE.H
    forward = SHAPE.B * SHAPE.N * 2 * a_product
    assert SHAPE.flops(is_causal=False, has_backward=False) == forward == 4 * 2 * 6 * 24 * 40 * 8
    assert SHAPE.flops(is_causal=True, has_backward=False) == forward / 2
    # The backward has 5 products: the scores again, dP, dV, dQ, dK.
    assert SHAPE.flops(is_causal=False, has_backward=True) == forward + SHAPE.B * SHAPE.N * 5 * a_product
    assert SHAPE.flops(is_causal=True, has_backward=True) == 3.5 * forward / 2


def test_inputs_are_standard_normal_and_shaped():
    q, k, v, dout = SHAPE.random_inputs(jnp.dtype("float32"))
    assert q.shape == dout.shape == (2, 24, 6, 8)
    assert k.shape == v.shape == (2, 40, 3, 8)
    assert abs(np.mean(q)) < 0.1 and abs(np.std(q) - 1) < 0.1
    assert not np.array_equal(k, v)


def test_contenders_take_turns():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    samples = timing.time_interleaved(runs, seconds=0.0, min_rounds=3, max_rounds=10)
    assert calls == list("ab" * 4)  # one warm-up round, three measured
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3}
    assert timing.summarize([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "rounds": 5}


@pytest.mark.parametrize("is_causal", [False, True])
def test_contenders_compute_the_same(is_causal):
    problem = measure.Problem(SHAPE, jnp.dtype("float32"), is_causal, has_backward=True)
    inputs = SHAPE.random_inputs(problem.dtype)
    able = {name: x for name, x in contenders.contenders().items() if x.refusal(problem.dtype) is None}
    assert {"jaxflash-cpu", "jaxflash-reference", "jax-xla"} <= able.keys()
    results = {name: measure.compile_contender(x, problem)(*inputs) for name, x in able.items()}
    for name, result in results.items():
        for ours, expected in zip(result, results[contenders.BASELINE], strict=True):
            np.testing.assert_allclose(ours, expected, atol=2e-5, err_msg=name)


def test_a_contender_that_cannot_run_says_why():
    dtype = jnp.dtype("float32")
    everyone = contenders.contenders()
    (cudnn,) = measure.measure(
        measure.Problem(SHAPE, dtype, False, False), {"jax-cudnn": everyone["jax-cudnn"]}, measure.Effort(0.0, 1, 1)
    )
    assert cudnn["seconds"] is None and cudnn["flops_per_second"] is None
    assert "GPU" in cudnn["skipped"]
    (too_large,) = measure.measure(
        measure.Problem(SHAPE, dtype, False, False),
        {"jax-xla": everyone["jax-xla"]},
        measure.Effort(0.0, 1, 1),
        memory_limit=0,
    )
    assert too_large["seconds"] is None and "GiB" in too_large["skipped"]
    assert "jax-xla was not run (float32 T=24)" in report.refusals([too_large, too_large])


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    sizes = ["--lengths", "16", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"]
    status = attention.main([*sizes, "--dtypes", "float32", "--seconds", "0", "--rounds", "2", "--output", str(folder)])
    assert status == 0
    return folder


def test_run_writes_json_with_all_that_a_reader_needs(tiny_run):
    (path,) = tiny_run.glob("*.json")
    record = json.loads(path.read_text())
    assert path.stem.startswith(record["date"][:10])
    assert record["versions"]["jax"] == jax.__version__
    assert record["versions"].keys() == {"python", "jax", "jaxlib", "jaxflash"}
    assert record["device"]["platform"] == "cpu" and record["cpu_model"] and record["cores"] >= 1
    assert "git_commit" in record and record["units"].keys() >= {"seconds", "flops_per_second", "temp_bytes"}
    assert [matmul["dtype"] for matmul in record["matmul"]] == ["float32"]
    rows = record["results"]
    assert len(rows) == 2 * 2 * 2 * len(contenders.contenders())  # masks, passes, lengths
    for row in rows:
        if row["seconds"] is None:
            assert row["skipped"]
            continue
        seconds, shape = (row["seconds"], contenders.Shape(*(row[name] for name in "BTSNKH")))
        flops = shape.flops(is_causal=row["is_causal"], has_backward=row["pass"] != "forward")
        assert seconds["q1"] <= seconds["median"] <= seconds["q3"] and seconds["rounds"] == 2
        assert row["flops_per_second"] == pytest.approx(flops / seconds["median"])
        assert row["temp_bytes"] >= 0
    assert {row["speedup_over_baseline"] for row in rows if row["contender"] == "jax-xla"} == {1.0}


def test_run_draws_a_plot(tiny_run):
    (path,) = tiny_run.glob("*.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "6", "--kv-heads", "4"], "multiple of --kv-heads"),
        (["--lengths", "0"], "at least 1"),
        (["--contenders", "torch"], "jax-xla"),
        (["--seconds", "-1"], "--seconds"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        attention.parse_options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("speedup", "is_met"), [(2.4, False), (2.6, True)])
def test_check_judges_the_measured_speed(monkeypatch, speedup, is_met):
    def measured(problem, compared, effort):
        return [{"contender": name, "speedup_over_baseline": speedup} for name in compared]

    monkeypatch.setattr(bars, "measure", measured)
    monkeypatch.setattr(bars, "LEAST_SPEEDUP", {(False, False): 2.5})
    monkeypatch.setattr(bars, "_temp_memory", lambda problem: bars.Bar("memory", True))
    monkeypatch.setattr(bars, "_peak_memory", lambda length: bars.Bar("peak", True))
    found = list(bars.check(measure.Effort()))
    assert [bar.is_met for bar in found] == [is_met, True, True]
    assert f"{speedup:.2f}x" in str(found[0])


def test_peak_memory_is_measured_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(bars, "OURS", "jaxflash-reference")  # materialises the scores
    monkeypatch.setattr(bars, "MOST_PEAK_GROWTH", 8 * 1024 * 1024 * 4)  # one float32 [8, 1024, 1024]
    bar = bars._peak_memory(1024)
    assert not bar.is_met and "GiB" in bar.text and "failed" not in bar.text
