"""Shows measurements: a table for the terminal, a JSON file, and a plot."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import environment

UNITS = {
    "seconds": "s, wall clock of one call",
    "flops_per_second": "FLOP/s; forward 4*B*N*T*S*H, half if causal, 3.5 times with backward",
    "speedup_over_baseline": "median time of jax-xla / median time of the contender",
    "temp_bytes": "bytes of temporary memory of the compiled program",
}


def header(facts: dict) -> str:
    """The first line of the table."""
    unit, _ = _speed_unit(facts)
    return (
        f"{'dtype':9}{'mask':7}{'pass':17}{'T':>6}{'S':>7}  {'contender':19}{'median ms':>11}{'quartiles':>19}"
        f"{unit:>9}{'vs xla':>8}{'temp MiB':>10}"
    )


def lines(facts: dict, rows: list[dict]) -> str:
    """The rows that were measured, as lines of the table under `header`."""
    return "\n".join(_line(facts, row) for row in rows if row["seconds"] is not None)


def refusals(rows: list[dict]) -> str:
    """Each contender that was not run, with its reason and where; one line a reason."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["skipped"] is not None:
            where.setdefault((row["contender"], row["skipped"]), []).append(f"{row['dtype']} T={row['T']}")
    return "\n".join(
        f"{contender} was not run ({', '.join(dict.fromkeys(places))}): {reason}"
        for (contender, reason), places in where.items()
    )


def _line(facts, row):
    _, factor = _speed_unit(facts)
    mask = "causal" if row["is_causal"] else "full"
    median, q1, q3 = (row["seconds"][name] * 1e3 for name in ("median", "q1", "q3"))
    ratio = row["speedup_over_baseline"]
    return (
        f"{row['dtype']:9}{mask:7}{row['pass']:17}{row['T']:>6}{row['S']:>7}  {row['contender']:19}"
        f"{median:>11.2f}{f'{q1:.2f} - {q3:.2f}':>19}{row['flops_per_second'] / factor:>9.1f}"
        f"{'-' if ratio is None else f'{ratio:.2f}x':>8}{row['temp_bytes'] / 2**20:>10.1f}"
    )


def _speed_unit(facts):
    return ("GFLOP/s", 1e9) if facts["device"]["platform"] == "cpu" else ("TFLOP/s", 1e12)


def write_json(path: Path, facts: dict, matmuls: list[dict], rows: list[dict]) -> None:
    """Everything that was measured and on what."""
    record = {**facts, "inputs": "standard normal", "units": UNITS, "matmul": matmuls, "results": rows}
    path.write_text(json.dumps(record, indent=1) + "\n")


def plot(path: Path, facts: dict, matmuls: list[dict], rows: list[dict]) -> None:
    """FLOP/s against T, one panel for each dtype, mask and pass, with the matrix product's as a dotted line."""
    panels = [(dtype, mask) for dtype in _distinct(rows, "dtype") for mask in _distinct(rows, "is_causal")]
    passes = _distinct(rows, "pass")
    figure = Figure(figsize=(4 * len(panels), 3.2 * len(passes)), layout="tight")
    axes = figure.subplots(len(passes), len(panels), sharex=True, squeeze=False)
    unit, factor = _speed_unit(facts)
    colors = {name: f"C{i}" for i, name in enumerate(_distinct(rows, "contender"))}
    for (i, direction), (j, (dtype, is_causal)) in itertools.product(enumerate(passes), enumerate(panels)):
        axis = axes[i, j]
        for name, color in colors.items():
            wanted = {"contender": name, "pass": direction, "dtype": dtype, "is_causal": is_causal}
            found = [row for row in rows if row["seconds"] and all(row[key] == x for key, x in wanted.items())]
            if found:
                speeds = [row["flops_per_second"] / factor for row in found]
                axis.plot([row["T"] for row in found], speeds, "o-", color=color, label=name, markersize=4)
        for matmul in matmuls:
            if matmul["dtype"] == dtype:
                label = f"matmul {matmul['size']}"
                axis.axhline(matmul["flops_per_second"] / factor, color="gray", linestyle=":", label=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{direction}, {dtype}, {'causal' if is_causal else 'full'}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length T = S")
    for axis in axes[:, 0]:
        axis.set_ylabel(unit)
    figure.suptitle(_title(facts, rows), fontsize=10)
    figure.savefig(path, dpi=120)


def _title(facts: dict, rows: list[dict]) -> str:
    sizes = [f"{name}={rows[0][name]}" for name in "BNKH"]
    machine = [environment.device_slug(facts), f"{facts['cores']} cores"]
    return ", ".join([*machine, *sizes, f"jax {facts['versions']['jax']}", facts["date"][:10]])


def _distinct(rows, key):
    return list(dict.fromkeys(row[key] for row in rows))
