"""The corpus: every Python source file of the running interpreter's standard library, as bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 256  # bytes

# Tests, installed packages, and tables that are data rather than code.
_EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data"}
_VALIDATION_EVERY = 12  # every 12th file is kept for validation


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes to be judged on, from different files.

    Attributes:
      train: uint8 [bytes].
      validation: uint8 [bytes].
    """

    train: np.ndarray
    validation: np.ndarray

    @property
    def digest(self) -> str:
        """Tells two corpora apart: Python releases differ."""
        return hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()[:16]

    @property
    def unigram_entropy(self) -> float:
        """Entropy of single bytes, in nats: the loss of a model that knows only how often each one occurs."""
        counts = np.bincount(self.train, minlength=VOCABULARY)
        p = counts[counts > 0] / counts.sum()
        return float(-np.sum(p * np.log(p)))

    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> np.ndarray:
        """uint8 [batch_size, seq_len + 1], from random places that depend on seed and step alone."""
        generator = np.random.default_rng([seed, step])
        starts = generator.integers(0, len(self.train) - seq_len, size=batch_size)
        return _windows(self.train, starts, seq_len)

    def validation_batches(self, count: int, batch_size: int, seq_len: int) -> list[np.ndarray]:
        """`count` arrays uint8 [batch_size, seq_len + 1], always from the same places, evenly spread."""
        starts = np.linspace(0, len(self.validation) - seq_len - 1, count * batch_size).astype(int)
        return [_windows(self.validation, part, seq_len) for part in np.split(starts, count)]


def load(seq_len: int) -> Corpus:
    """The standard library, in the same order on every machine with the same Python.

    Args:
      seq_len: The longest window that will be asked for, in bytes.

    Raises:
      FileNotFoundError: the interpreter's standard library is not there as source files, or is too small.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not _EXCLUDED & set(path.relative_to(root).parts)]
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    files = [path.read_bytes() for path in paths]
    train = b"".join(text for i, text in enumerate(files) if i % _VALIDATION_EVERY)
    validation = b"".join(files[::_VALIDATION_EVERY])
    if min(len(train), len(validation)) <= seq_len:
        raise FileNotFoundError(
            f"{root} holds {len(train)} bytes of Python source to train on and {len(validation)} to validate, "
            f"each must be more than seq_len ({seq_len}); choose a smaller one, or a Python whose library is complete."
        )
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8))


def _windows(text: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(seq_len + 1)]
