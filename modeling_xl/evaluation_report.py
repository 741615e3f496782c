"""What was measured, as tables of text and as plots. It measures nothing."""

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .costs import Costs
from .effective_context import ReclResult
from .evaluate import EvaluationResult
from .inspection import KINDS, AttentionMass
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


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


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
        losses = ({b.first: f"{b.loss:.4f}" for b in result.position_curve} for result in results.values())
        rows.append([_span(place.first, place.last), str(place.num_tokens), *(found.get(place.first, "") for found in losses)])
    return _table(rows)


def recl_table(results: Mapping[str, ReclResult]) -> str:
    """A line for each model: its length at each ratio."""
    ratios = [found.ratio for found in next(iter(results.values())).lengths]
    rows = [["RECL (tokens)", *(f"r = {ratio}" for ratio in ratios)]]
    return _table(rows + [[name, *map(str, result.lengths)] for name, result in results.items()])


def require_matplotlib() -> None:
    """Raises InputError where no plot can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("a plot needs matplotlib; install it with `pip install matplotlib`")


@contextlib.contextmanager
def _figure(path: str | Path, width: float = 7) -> Iterator[Any]:
    """A figure to draw in; what is drawn becomes a PNG file, which appears whole or not at all."""
    require_matplotlib()
    from matplotlib.figure import Figure  # not pyplot, which would touch the caller's backend

    figure = Figure(figsize=(width, 4.5), layout="constrained")
    yield figure
    path = Path(path)
    temporary = path.with_name(f".{path.name}")
    try:
        figure.savefig(temporary, dpi=150, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _axes(path: str | Path) -> Iterator[Any]:
    """Axes of a figure with one plot."""
    with _figure(path) as figure:
        axes = figure.subplots()
        yield axes
        axes.grid(alpha=0.3)
        axes.legend()


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


def _kinds(result: AttentionMass) -> list[str]:
    """The kinds of keys that any layer looks at."""
    return [kind for kind in KINDS if any(layer.shares[kind] for layer in result.layers)]


def attention_table(result: AttentionMass) -> str:
    """A line for each layer: the share of its attention on each kind of key, in per cent."""
    kinds = _kinds(result)
    rows = [["layer", "type", *kinds]]
    rows += [[str(at.layer), at.memory_type, *(f"{at.shares[kind]:.1%}" for kind in kinds)] for at in result.layers]
    return _table(rows)


def distance_table(result: AttentionMass) -> str:
    """A line for each bin of distances: the share of each layer's attention that falls there, in per cent."""
    longest = max((layer.curve for layer in result.layers), key=len)
    rows = [["tokens back", *(f"layer {layer.layer}" for layer in result.layers)]]
    for number, place in enumerate(longest):
        found = (layer.curve[number].mass if number < len(layer.curve) else 0.0 for layer in result.layers)
        rows.append([_span(place.first, place.last), *(f"{mass:.1%}" for mass in found)])
    return _table(rows)


def plot_attention(result: AttentionMass, path: str | Path) -> None:
    """Draws for each layer the shares by kind of key, those of each head on what is not its segment, and the shares by
    distance, into a PNG file."""
    layers = result.layers
    with _figure(path, width=14) as figure:
        by_kind, by_head, by_distance = figure.subplots(1, 3)
        left = [0.0] * len(layers)
        for kind in _kinds(result):
            shares = [layer.shares[kind] for layer in layers]
            by_kind.barh([str(layer.layer) for layer in layers], shares, left=left, label=kind)
            left = [before + share for before, share in zip(left, shares, strict=True)]
        by_kind.invert_yaxis()
        by_kind.set_xlim(0, 1)
        by_kind.set_xlabel("share of attention, by what it falls on")
        by_kind.set_ylabel("layer")
        by_kind.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(KINDS))

        outside = [[1 - own for own in layer.by_head["segment"]] for layer in layers]
        image = by_head.imshow(outside, vmin=0, vmax=1, aspect="auto")
        by_head.set_yticks(range(len(layers)), [str(layer.layer) for layer in layers])
        by_head.xaxis.get_major_locator().set_params(integer=True)
        by_head.set_xlabel("head")
        by_head.set_title("share on what is not the query's segment", fontsize="medium")
        figure.colorbar(image, ax=by_head)

        for number, layer in enumerate(layers):
            shade = 0.3 + 0.7 * number / max(1, len(layers) - 1)
            places = [place.first or 0.5 for place in layer.curve]  # the token itself, beside the logarithmic scale
            by_distance.plot(
                places,
                [place.mass for place in layer.curve],
                marker="o",
                color=(0.1, 0.3, 0.6, shade),
                label=f"layer {layer.layer}",
            )
        by_distance.set_xscale("log", base=2)
        by_distance.set_xlabel("tokens back (first of each bin; leftmost: the token itself)")
        by_distance.set_ylabel("share of attention")
        by_distance.grid(alpha=0.3)
        by_distance.legend(fontsize="small", ncols=2)


def costs_table(found: Sequence[Costs]) -> str:
    """What costs of one config depend on, and a line for each memory length and length of text."""

    def mebibytes(count: int | None) -> str:
        return "" if count is None else f"{count / 2**20:,.2f}"

    header = [
        *("memory", "reach", "layers x memory", "tokens before", "cache, MiB", "as layer inputs, MiB"),
        *("decoding, M MACs", "reading, M MACs"),
    ]
    rows = [header]
    for costs in found:
        product = "" if costs.layers_times_memory is None else f"{costs.layers_times_memory:,}"
        rows.append(
            [
                "" if costs.mem_len is None else f"{costs.mem_len:,}",
                "no end" if costs.max_context is None else f"{costs.max_context:,}",
                *(product, f"{costs.tokens:,}", mebibytes(costs.cache_bytes), mebibytes(costs.hidden_cache_bytes)),
                *(f"{count / 1e6:,.2f}" for count in (costs.decoding_macs, costs.reading_macs)),
            ]
        )
    first = found[0]
    return (
        f"{first.num_parameters:,} parameters, segment {first.segment_len}, dtype {first.dtype}, one stream\n\n{_table(rows)}"
    )
