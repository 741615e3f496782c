"""Does a token cost the same late in a text as early? Times 1,000 calls of one token after 1,000 tokens and 1,000 calls after
99,000, for every memory mechanism that is bounded.

    python benchmarks/token_time.py [--memory recurrence] [--position rope]

Both streams are fed in turn, 100 tokens at a time, so that what else the machine does meets both, and all of it three times,
each from a fork of the same states. Printed are the medians over these blocks, in microseconds of processor time a token (one
thread, so that waiting for a busy machine does not count), and the median of the ratios of neighbours. The process
ends with 1 if a ratio is above 1.05.
"""

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.text import InputError

MEMORIES: dict[str, dict[str, Any]] = {"recurrence": {}, "compressive": {"compressed_mem_len": 64}, "linear": {}}
SEGMENT = 128
EARLY = 1_000
LATE = EARLY + 766 * SEGMENT  # 99,048: at the same place in a segment, where a query sees as many keys
CALL, BLOCK, BLOCKS, ROUNDS = 4096, 100, 10, 3
LIMIT = 1.05


def model_of(memory: str, position: str) -> XLForCausalLM:
    torch.manual_seed(0)
    try:
        config = XLConfig(
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=256,
            position_type=position,
            clamp_len=64 if position == "xl" else None,
            memory_type=memory,
            segment_len=SEGMENT,
            mem_len=256,
            **MEMORIES[memory],
        )
    except Exception as error:  # several classes of error, according to which check of the config failed
        raise InputError.about(f"{memory} with {position}", error) from error
    return XLForCausalLM(config).eval()


def fed(model, cache, count: int, call: int):
    """The cache after `count` more random tokens, fed `call` at a time."""
    for part in torch.randint(0, model.config.vocab_size, (1, count)).split(call, dim=1):
        cache = model(part, cache=cache, logits_to_keep=1).cache
    return cache


@torch.inference_mode()
def measure(model) -> tuple[list[float], list[float]]:
    """Seconds of one token, in each block, early and late."""
    early = fed(model, None, EARLY, CALL)
    late = fed(model, copy.deepcopy(early), LATE - EARLY, CALL)
    seconds: tuple[list[float], list[float]] = ([], [])
    for warmed_up in (False, *[True] * ROUNDS):
        forks = copy.deepcopy((early, late))
        for block in range(BLOCKS if warmed_up else 1):
            for which in (0, 1) if block % 2 else (1, 0):
                begin = time.process_time()
                fed(model, forks[which], BLOCK, 1)  # the model changes the cache it is handed
                if warmed_up:
                    seconds[which].append((time.process_time() - begin) / BLOCK)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs="+", choices=list(MEMORIES), default=list(MEMORIES))
    parser.add_argument("--position", default="rope")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        models = {memory: model_of(memory, options.position) for memory in options.memory}
    except InputError as error:
        parser.error(str(error))

    worst = 0.0
    print(f"| memory, position {options.position} | µs a token from {EARLY:,} on | from {LATE:,} on | ratio |")
    print("| --- | --- | --- | --- |")
    for memory, model in models.items():
        early, late = measure(model)
        ratio = statistics.median(b / a for a, b in zip(early, late, strict=True))
        worst = max(worst, ratio)
        print(
            f"| {memory} | {statistics.median(early) * 1e6:,.0f} | {statistics.median(late) * 1e6:,.0f} | {ratio:.3f} |",
            flush=True,
        )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
