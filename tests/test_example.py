"""The GPT example from end to end, at a tiny size, in processes of its own as a user would start it."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.gpt import __main__ as program
from examples.gpt import data

ROOT = Path(__file__).parent.parent
TINY = ["--size", "tiny", "--seq-len", "32", "--batch-size", "8", "--steps", "24", "--eval-every", "8"]


def start(run_dir, *options):
    command = [
        sys.executable,
        "-m",
        "examples.gpt",
        *TINY,
        "--sample-length",
        "20",
        "--run-dir",
        str(run_dir),
        *options,
    ]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(run_dir.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment = {**os.environ, **cache, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


def losses_of(run_dir):
    return json.loads((run_dir / "losses.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An uninterrupted run and its output, one on two devices, and one resumed from the state after 16 of 24 steps."""
    folder = tmp_path_factory.mktemp("runs")
    whole, two_devices = (start(folder / "whole"), start(folder / "two", "--devices", "2"))
    (folder / "output").write_text(finish(whole))
    # What a run leaves that was stopped after its second checkpoint.
    shutil.copytree(folder / "whole" / "checkpoints" / "16", folder / "resumed" / "checkpoints" / "16")
    finish(start(folder / "resumed", "--resume"))
    finish(two_devices)
    return folder


def test_loss_falls(runs):
    losses = losses_of(runs / "whole")
    assert losses["unit"] == "nats/byte"
    assert len(losses["train"]) == 24
    assert losses["train"][0] > math.log(data.VOCABULARY) - 1  # an untrained model knows nothing
    assert np.mean(losses["train"][-4:]) < losses["train"][0] - 1
    assert [step for step, _ in losses["validation"]] == [8, 16, 24]
    assert losses["validation"][-1][1] < losses["validation"][0][1]


def test_run_leaves_its_files(runs):
    run = runs / "whole"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "sample.txt").read_text().startswith("import os")
    assert {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()} == {"16", "24"}


def test_run_prints_losses_sample_and_implementations(runs):
    out = (runs / "output").read_text()
    final = losses_of(runs / "whole")["validation"][-1][1]
    assert f"validation loss      {final:.3f} nats/byte = {final / math.log(2):.3f} bits/byte" in out
    assert "byte-unigram entropy" in out and "tokens/s" in out and "s left" in out
    assert "import os" in out
    for kind in ("training", "validation", "decoding"):
        assert f"{kind:14}{'cpu':16}ran: the fastest" in out
        assert f"{kind:14}{'reference':16}did not run: slower" in out


def test_resumed_run_equals_the_uninterrupted_one(runs):
    whole, resumed = losses_of(runs / "whole"), losses_of(runs / "resumed")
    assert resumed == whole
    assert (runs / "resumed" / "sample.txt").read_text() == (runs / "whole" / "sample.txt").read_text()


def test_two_devices_give_the_same_losses(runs):
    one, two = losses_of(runs / "whole"), losses_of(runs / "two")
    # Sums over the batch are taken in another order; 24 steps of training amplify the difference.
    np.testing.assert_allclose(two["train"], one["train"], rtol=1e-3)
    np.testing.assert_allclose(two["train"][0], one["train"][0], rtol=1e-6)


def refusal(capsys, *options):
    with pytest.raises(SystemExit) as stopped:
        program.main([*TINY, *options])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "huge"], "invalid choice: 'huge'"),
        (["--steps", "0"], "--steps must be at least 1, it was 0"),
        (["--seq-len", "-5"], "--seq-len must be at least 1, it was -5"),
        (["--learning-rate", "0"], "--learning-rate must be more than 0, it was 0.0"),
        (["--learning-rate", "nan"], "--learning-rate must be more than 0, it was nan"),
        (["--seed", "-1"], "--seed must be at least 0, it was -1"),
        (["--devices", "3"], "--batch-size (8) must be a multiple of --devices (3)"),
        (["--resume"], "--resume needs --run-dir"),
        (["--seq-len", "1000000000"], "each must be more than seq_len (1000000000)"),
        (["--prompt", ""], "--prompt must not be empty"),
        (["--implementation", "cuda"], "--implementation: implementation must be one of"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(options, message, capsys):
    assert message in refusal(capsys, *options)


def test_resume_needs_a_run_with_the_same_options(runs, tmp_path, capsys):
    assert "there is no checkpoint" in refusal(capsys, "--resume", "--run-dir", str(tmp_path / "new"))
    assert "is of another run; --resume goes on with it" in refusal(capsys, "--run-dir", str(runs / "whole"))
    error = refusal(capsys, "--resume", "--run-dir", str(runs / "whole"), "--seed", "7")
    assert "the checkpoint is of a run with other options: seed was 0, is now 7" in error


def test_batches_depend_on_seed_and_step_alone():
    corpus = data.Corpus(np.arange(1000, dtype=np.uint8), np.arange(200, dtype=np.uint8))
    first = corpus.train_batch(3, 5, batch_size=4, seq_len=7)
    assert first.shape == (4, 8) and first.dtype == np.uint8
    np.testing.assert_array_equal(np.diff(first.astype(int), axis=1) % 256, 1)  # consecutive bytes
    np.testing.assert_array_equal(first, corpus.train_batch(3, 5, batch_size=4, seq_len=7))
    assert not np.array_equal(first, corpus.train_batch(3, 6, batch_size=4, seq_len=7))
    assert not np.array_equal(first, corpus.train_batch(4, 5, batch_size=4, seq_len=7))
    validation = corpus.validation_batches(2, batch_size=3, seq_len=9)
    assert [batch.shape for batch in validation] == [(3, 10), (3, 10)]
    assert validation[0][0, 0] == 0 and validation[1][-1, -1] == 199  # from end to end


def test_unigram_entropy_of_known_bytes():
    uniform = data.Corpus(np.arange(256, dtype=np.uint8), np.zeros(1, np.uint8))
    assert uniform.unigram_entropy == pytest.approx(math.log(256))
    two = data.Corpus(np.array([1, 2, 2, 2], np.uint8), np.zeros(1, np.uint8))
    assert two.unigram_entropy == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))


def test_corpus_is_the_standard_library_split_by_file():
    corpus = data.load(seq_len=256)
    assert corpus.digest == data.load(seq_len=256).digest
    assert len(corpus.train) > 2_000_000 and len(corpus.validation) > 100_000
    assert 2.5 < corpus.unigram_entropy < 3.6
    with pytest.raises(FileNotFoundError, match="more than seq_len"):
        data.load(seq_len=10**9)
