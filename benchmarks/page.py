"""The page of the documentation: the table and the plots, from the results of a run."""

from __future__ import annotations

import json
from pathlib import Path

from .harness import HEADER, Figure

BEGIN, END = "<!-- from performance.json: begin -->", "<!-- end -->"


def read_results(path: Path) -> tuple[dict[str, str], list[Figure]]:
    """The environment of a run, and its figures."""
    results = json.loads(path.read_text())
    return results["environment"], [Figure(**figure) for figure in results["figures"]]


def table(measured_in: dict[str, str], figures: list[Figure]) -> str:
    """What stands between the marks of the page."""
    lines = [", ".join(f"{name} {value}" for name, value in measured_in.items()), ""]
    lines += [f"| {' | '.join(HEADER)} |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(figure.cells())} |" for figure in figures if figure.topic != "scale"]
    return "\n".join(lines)


def write_page(path: Path) -> None:
    """Renew the table in ``performance.md`` beside ``path``, and the plots."""
    measured_in, figures = read_results(path)
    page = path.with_suffix(".md")
    head, _, rest = page.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n{table(measured_in, figures)}\n{END}{tail}")
    _plot_scale(figures, path.with_name("performance_scale.svg"))
    _plot_peers(figures, path.with_name("performance_peers.svg"))


def _plot_scale(figures: list[Figure], target: Path) -> None:
    import matplotlib.pyplot as plt

    curves: dict[str, list[tuple[int, float]]] = {}
    for figure in figures:
        name, _, count = figure.name.rpartition(": ")
        if figure.topic == "scale":
            curves.setdefault(name, []).append((int(count), min(figure.values)))
            if figure.reference:
                curves.setdefault(figure.reference, []).append((int(count), min(figure.reference_values)))
    axes = plt.figure(figsize=(7, 5)).add_subplot()
    for name, points in curves.items():
        counts, seconds = zip(*points, strict=True)
        axes.loglog(counts, seconds, marker="o", linestyle="--" if name in ("raw pipe", "barrier") else "-")
        axes.annotate(name, (counts[-1], seconds[-1]), textcoords="offset points", xytext=(6, -3), fontsize=8)
    axes.set(xlabel="workers on 2 cores", ylabel="seconds, best of three", xlim=(0.9, 1800))
    _save(axes.figure, target)


def _plot_peers(figures: list[Figure], target: Path) -> None:
    import matplotlib.pyplot as plt

    beside_peers = [f for f in figures if f.topic in ("calls", "data") and f.ratio and "clone" not in f.reference]
    axes = plt.figure(figsize=(7, 0.4 * len(beside_peers) + 1)).add_subplot()
    names = [f"{figure.name}  |  {figure.reference}" for figure in beside_peers]
    axes.barh(names, [figure.ratio or 0 for figure in beside_peers])
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="time of nn_parallel as a multiple of the reference's (less is better)")
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    _save(axes.figure, target)


def _save(figure: object, target: Path) -> None:
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})  # type: ignore[attr-defined]
