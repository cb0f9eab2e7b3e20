"""The benchmarks of the GPU kernels, as far as they run without one: cells, tables, what is missing or refuses."""

import dataclasses
import json
import re

import numpy as np
import pytest

from benchmarks import ablation, environment, gpt_step, jax_peers
from examples.gpt.model import SIZES

TINY = ["--tokens", "64", "--hidden", "128", "--head-dims", "16", "--lengths", "32", "--matmul", "32"]
QUICK = ["--rounds", "2", "--warm", "0", "--turn", "1", "--ahead", "3"]


def tiny_cells(*arguments):
    return list(jax_peers.cells(jax_peers.make_parser().parse_args([*TINY, *arguments])))


@pytest.mark.parametrize("scenario", jax_peers.SCENARIOS)
def test_work_is_what_the_queries_see(scenario):
    for cell in tiny_cells("--scenarios", scenario, "--dtypes", "bfloat16"):
        row, key = np.arange(cell.shape.T)[:, None], np.arange(cell.shape.S)
        sees = np.ones((cell.shape.T, cell.shape.S)) * (row >= key if cell.is_causal else True)
        if cell.window is not None:
            sees *= row - key < cell.window
        if cell.documents is not None:
            document = np.searchsorted(cell.documents, np.arange(cell.shape.T), side="right")
            sees *= document[:, None] == document
        seen = cell.shape.B * cell.shape.N * sees.sum()
        # The formula takes half of a square for a triangle, which leaves out half of its diagonal.
        diagonal = cell.shape.B * cell.shape.N * (cell.window or cell.shape.T) / 2 if cell.is_causal else 0
        assert cell.pairs == pytest.approx(seen - diagonal)


def test_scenarios_have_the_heads_and_documents_they_name():
    grouped, packed = tiny_cells("--scenarios", "gqa")[0], tiny_cells("--scenarios", "packed")[0]
    assert grouped.shape.N == 8 * grouped.shape.K
    assert len(packed.documents) == 9 and packed.documents[0] == 0 and packed.documents[-1] == packed.shape.T
    assert np.all(np.diff(packed.documents) > 0)


@pytest.fixture(scope="module")
def peers_run(tmp_path_factory):
    """A run on a CPU, with a peer that is not installed: what it printed and wrote."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(jax_peers.PEERS, "dew", ("a_package_that_is_not_there", jax_peers.dew))
        printed = []
        patch.setattr("builtins.print", lambda *text, **options: printed.append(" ".join(map(str, text))))
        names = ["--implementations", "cpu", "--beside", "reference", "--peers", "dew", "jax-cudnn"]
        jax_peers.main([*TINY, *QUICK, *names, "--dtypes", "float16", "--masks", "causal", "--output", str(folder)])
    (path,) = folder.glob("*.json")
    return "\n".join(printed), json.loads(path.read_text())


def test_run_says_what_is_missing_and_records_what_refuses(peers_run):
    printed, record = peers_run
    assert "dew is left out: ModuleNotFoundError" in printed
    assert len(record["rows"]) == 2 * len(jax_peers.SCENARIOS)  # passes
    for row in record["rows"]:
        ours = {"jaxflash-cpu"} | ({"jaxflash-reference"} if row["scenario"] != "dense" else set())
        assert row["tflops"].keys() == {"matmul"} | ours
        assert row["refusals"].keys() == {"jax-cudnn"}
        assert all(x < jax_peers.LARGEST_DIFFERENCE for x in row["differences"].values())
        assert all(row["slowest"][name] <= speed <= row["fastest"][name] for name, speed in row["tflops"].items())


def test_summary_judges_the_bars():
    row = {"scenario": "dense", "has_backward": False, "dtype": "float16", "head_dim": 64, "length": 512}
    row |= {"is_causal": True}

    def judged(*speeds):
        rows = [row | {"tflops": {"jaxflash-fa3": speed, "dew": 100.0}} for speed in speeds]
        return jax_peers.summary(rows, ["fa3"])

    assert "met" in judged(101.0, 120.0) and "1.101" in judged(101.0, 120.0)
    assert "MISSED" in judged(99.0, 130.0) and "0.990  float16 d=64 T=512 causal" in judged(99.0, 130.0)
    assert "MISSED" in judged(104.0, 105.0)


def test_gpt_step_gives_every_attention_the_same_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "tiny", dataclasses.replace(SIZES["tiny"], dropout_rate=0.0))
    names = ["--implementations", "cpu", "xla", "fa3"]
    sizes = ["--sizes", "tiny", "--lengths", "32", "--tokens", "64", "--rounds", "1", "--steps", "1"]
    gpt_step.main([*names, *sizes, "--output", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    rows = {row["implementation"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["cpu"]["batch"] == 2 and rows["cpu"]["step_bytes"] > 0 and rows["cpu"]["seconds"] > 0
    assert rows["cpu"]["loss"] == pytest.approx(rows["xla"]["loss"], abs=0.01)
    assert rows["fa3"]["seconds"] is None and "fa3" in rows["fa3"]["refusal"]
    assert "first loss" in capsys.readouterr().out


def test_gpt_step_does_not_drop_dropout(tmp_path):
    gpt_step.main(
        ["--implementations", "xla", "--sizes", "tiny", "--lengths", "32", "--tokens", "32", "--output", str(tmp_path)]
    )
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["rows"][0]["refusal"] == "takes no dropout"


def test_ablation_names_what_its_source_has_and_draws_it(tmp_path):
    assert list(ablation.VARIANTS) == re.findall(r"^struct (\w+) :", ablation.SOURCE.read_text(), re.MULTILINE)
    row = {"head_dim": 64, "is_causal": False, "tflops": dict.fromkeys(ablation.VARIANTS, 1.0)}
    row |= {"differences": dict.fromkeys(ablation.VARIANTS, 0.0)}
    rows = [row | {"length": length} for length in (512, 1024)]
    rows.append(row | {"length": 512, "is_causal": True, "tflops": {"Complete": 2.0}})
    ablation.plot(rows, environment.describe(), tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    assert "NoOverlap     1 (1.000)" in ablation.line(rows[0])
