"""What was measured, as tables of text and as plots. It measures nothing."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .effective_context import ReclResult
from .evaluate import EvaluationResult
from .text import InputError


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def memory_table(results: Mapping[str, Sequence[EvaluationResult]]) -> str:
    """A line for each result, by name and memory length."""
    rows = [["model", "memory", "bits/byte", "bits/character", "perplexity", "nats/token"]]
    for name, line in results.items():
        for r in line:
            numbers = (r.bits_per_byte, r.bits_per_character, r.perplexity, r.loss)
            rows.append([name, str(r.mem_len), *(f"{number:.4f}" for number in numbers)])
    return _table(rows)


def position_table(results: Mapping[str, EvaluationResult]) -> str:
    """A line for each bin of positions: its tokens, then nats per token of each named result."""
    longest = max((result.position_curve for result in results.values()), key=len)
    rows = [["tokens before", "tokens", *results]]
    for place in longest:
        span = f"{place.first}" if place.first == place.last else f"{place.first}-{place.last}"
        losses = ({b.first: f"{b.loss:.4f}" for b in result.position_curve} for result in results.values())
        rows.append([span, str(place.num_tokens), *(found.get(place.first, "") for found in losses)])
    return _table(rows)


def recl_table(results: Mapping[str, ReclResult]) -> str:
    """A line for each model: its length at each ratio."""
    ratios = [found.ratio for found in next(iter(results.values())).lengths]
    rows = [["RECL (tokens)", *(f"r = {ratio}" for ratio in ratios)]]
    return _table(rows + [[name, *map(str, result.lengths)] for name, result in results.items()])


@contextlib.contextmanager
def _axes(path: str | Path) -> Iterator[Any]:
    """Axes to draw on; what is drawn becomes a PNG file."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which would touch the caller's backend
    except ImportError:
        raise InputError("a plot needs matplotlib; install it with `pip install modeling-xl[train]`") from None

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, format="png")


def plot(results: Mapping[str, Sequence[EvaluationResult]], path: str | Path) -> None:
    """Draws bits per byte against memory length, a line for each named list of results, into a PNG file."""
    with _axes(path) as axes:
        for name, line in results.items():
            axes.plot([str(r.mem_len) for r in line], [r.bits_per_byte for r in line], marker="o", label=name)
        axes.set_xlabel("memory length at evaluation (tokens)")
        axes.set_ylabel("bits per byte (lower is better)")


def plot_positions(results: Mapping[str, EvaluationResult], path: str | Path) -> None:
    """Draws nats per token against the number of tokens before, a line for each named result, into a PNG file."""
    with _axes(path) as axes:
        for name, result in results.items():
            curve = result.position_curve
            axes.plot([place.first for place in curve], [place.loss for place in curve], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of the stream or document before (first of each bin)")
        axes.set_ylabel("nats per token (lower is better)")


def plot_recl(results: Mapping[str, ReclResult], path: str | Path) -> None:
    """Draws the relative effective context lengths as bars, a group for each ratio, into a PNG file."""
    with _axes(path) as axes:
        width = 0.8 / len(results)
        for index, (name, result) in enumerate(results.items()):
            places = [group + index * width for group in range(len(result.lengths))]
            bars = axes.bar(places, [found.length for found in result.lengths], width, label=name)
            axes.bar_label(bars, [str(found) for found in result.lengths])
        ratios = [found.ratio for found in next(iter(results.values())).lengths]
        axes.set_xticks([group + 0.4 - width / 2 for group in range(len(ratios))], [f"r = {ratio}" for ratio in ratios])
        axes.set_ylabel("relative effective context length (tokens)")
        axes.margins(y=0.2)  # room for the legend
