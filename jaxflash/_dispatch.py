"""Which implementation runs a problem, decided once for forward and backward, and why the others do not."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys

from jaxflash._backends import ffi, reference
from jaxflash._types import Implementation, KernelConfig, Problem

# Fastest first.
_IMPLEMENTATIONS = {
    "fa3": functools.partial(ffi.supports, "fa3"),
    "fa2": functools.partial(ffi.supports, "fa2"),
    "fa1": functools.partial(ffi.supports, "fa1"),
    "cpu": functools.partial(ffi.supports, "cpu"),
    "reference": reference.supports,
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `jaxflash.why` answers.

    Attributes:
      chosen: The implementation that would run, or None.
      reasons: For each implementation, None if it can run the call, else why it refuses.
    """

    chosen: Implementation | None
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        lines = [f"chosen: {self.chosen}"]
        for name, reason in self.reasons.items():
            lines.append(f"  {name}: {'can run this call' if reason is None else 'refuses: ' + reason}")
        return "\n".join(lines)


def explain(problem: Problem, requested: Implementation | None) -> Explanation:
    """Asks every implementation; `requested=None` takes the first that supports the problem, fastest first."""
    reasons = {name: supports(problem) for name, supports in _IMPLEMENTATIONS.items()}
    candidates = list(reasons) if requested is None else [requested]
    if requested is None and _has_few_queries(problem):
        candidates = ["fa2", *candidates]
    chosen = next((name for name in candidates if reasons[name] is None), None)
    return Explanation(chosen, reasons)


def choose(problem: Problem, requested: Implementation | None) -> KernelConfig:
    """The configuration to run; a named implementation is used or refused, never replaced.

    Raises:
      NotImplementedError: the named implementation, or every one, refuses; the message lists each reason.
    """
    explanation = explain(problem, requested)
    if explanation.chosen is None:
        asked = "no implementation runs" if requested is None else f"implementation={requested!r} does not run"
        refusals = "; ".join(f"{name} refused: {why}" for name, why in explanation.reasons.items() if why)
        able = [name for name, why in explanation.reasons.items() if why is None]
        advice = f" These can: {', '.join(map(repr, able))}." if able else ""
        raise NotImplementedError(f"{asked} this call. {refusals}.{advice}")
    config = KernelConfig(explanation.chosen, problem.deterministic)
    if os.environ.get("JAXFLASH_LOG") == "dispatch":
        print(f"jaxflash: {config} for {problem.spec}", file=sys.stderr)
    return config


def _has_few_queries(problem: Problem) -> bool:
    """Whether fa2 splits the keys over the GPU (csrc/kernels/fa2_sm80/split_config.h); nothing else does."""
    shapes = dict(problem.shapes)
    T, S = shapes["query"][-3], shapes["key"][-3]
    return T <= 16 and S >= 16 * T and "query_offsets" not in shapes


def implementations() -> tuple[Implementation, ...]:
    """Every name that `implementation=` takes, in order of preference."""
    return tuple(_IMPLEMENTATIONS)
