"""What does a training step cost, by length? Forward and backward of one call of 256 ... 16384 tokens, linear attention
against recurrence (a) with segment and memory as long as the call, the memory filled, and (b) with both of 512 tokens
(of the call's length, where that is less).

    python benchmarks/training_length.py [--lengths 256 512 1024] [--position rope] [--threads 1] [--memory recurrence]

Prints for each length seconds of a step (the least of three after a warm-up that fills the memory; of one, where a step
takes long) and the MiB by which the peak of the process exceeds what it held before the first step; then the ratios linear
to recurrence, and from which length on linear is cheaper. Each figure is measured in a process of its own.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import psutil
import torch

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.text import InputError

LENGTHS = [2**power for power in range(8, 15)]
FIXED = 512  # segment and memory of the second recurrence column
LONG = 20.0  # seconds after which one step is enough
COLUMNS = {"linear": ["linear"], "recurrence": ["recurrence n", f"recurrence {FIXED}"]}


def config_of(column: str, tokens: int, position: str) -> XLConfig:
    memory = column.split()[0]
    length = tokens if column.endswith(" n") else min(tokens, FIXED)
    try:
        return XLConfig(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            position_type=position,
            clamp_len=64 if position == "xl" else None,  # linear needs it
            memory_type=memory,
            segment_len=length,
            mem_len=length,
        )
    except Exception as error:  # several classes of error, according to which check of the config failed
        raise InputError.about(f"{memory} with {position}", error) from error


def measure(column: str, tokens: int, position: str, threads: int) -> tuple[float, float]:
    """Seconds of a step, and the MiB it needs beside model and gradients."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = XLForCausalLM(config_of(column, tokens, position)).eval()  # nothing in it depends on the mode

    def step(length: int, cache):
        ids = torch.randint(0, model.config.vocab_size, (1, length))
        begin = time.perf_counter()
        output = model(ids, labels=ids, cache=cache, use_cache=True)
        output.loss.backward()
        return time.perf_counter() - begin, output.cache

    step(min(tokens, 8), None)  # gradients, which stay, and the libraries' own buffers
    before = psutil.Process().memory_info().rss
    _, cache = step(tokens, None)
    seconds = []
    while len(seconds) < 3 and sum(seconds) < LONG:
        spent, cache = step(tokens, cache)
        seconds.append(spent)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return min(seconds), (peak - before) / 2**20


def in_process(*arguments) -> tuple[float, float] | None:
    """Measures in a fresh process, whose peak is its own; None where it was killed, as for memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, *arguments).result()
        except BrokenProcessPool:
            return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--position", default="rope")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    options = parser.parse_args()
    lengths = sorted(options.lengths)
    columns = [column for memory in COLUMNS if memory in options.memory for column in COLUMNS[memory]]
    try:
        for column in columns:
            config_of(column, lengths[0], options.position)
    except InputError as error:
        parser.error(str(error))

    print(f"one call of n tokens, forward and backward, position {options.position}, {options.threads} thread(s)\n")
    print(f"| tokens | {' | '.join(f'{column}: s | MiB' for column in columns)} |")
    print("| --- " * (1 + 2 * len(columns)) + "|")
    found: dict[str, list[tuple[float, float] | None]] = {column: [] for column in columns}
    for tokens in lengths:
        cells = []
        for column in columns:
            figures = in_process(column, tokens, options.position, options.threads)
            found[column].append(figures)
            cells += ["killed", ""] if figures is None else [f"{figures[0]:.3f}", f"{figures[1]:,.0f}"]
        print(f"| {tokens:,} | {' | '.join(cells)} |", flush=True)
    if "linear" in columns:
        for column in columns[1:]:
            print_ratios(lengths, found["linear"], found[column], column)
    return 0


def print_ratios(lengths, linear, other, name: str) -> None:
    pairs = [(n, a, b) for n, a, b in zip(lengths, linear, other, strict=True) if a and b]
    print(f"\n| tokens | linear / {name}: time | memory |\n| --- | --- | --- |")
    for n, a, b in pairs:
        print(f"| {n:,} | {a[0] / b[0]:.2f} | {a[1] / b[1]:.2f} |")
    for what, index in (("faster", 0), ("smaller", 1)):
        first = None
        for n, a, b in reversed(pairs):
            if a[index] >= b[index]:
                break
            first = n
        print(f"linear is {what} " + (f"from {first:,} tokens on" if first else f"at no length up to {lengths[-1]:,}"))


if __name__ == "__main__":
    sys.exit(main())
