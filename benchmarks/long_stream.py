"""Does the state grow with the text? Feeds one stream of 200,000 tokens and prints, for the first 10,000 after memory is full
and for the last, their time, and the bytes of the cache and the resident memory of the process behind them.

    python benchmarks/long_stream.py [--tokens 200000] [--position xl] [--memory recurrence] [--call 64]

The process ends with an error if one of the two grew by more than 1 %. (The peak of the process says less: two buffers that
happen to be held at once raise it for good.)
"""

import argparse
import sys
import time

import torch
from speed_worker import resident_mib

from modeling_xl import XLConfig, XLForCausalLM


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--position", default="xl")
    parser.add_argument("--memory", default="recurrence")
    parser.add_argument("--call", type=int, default=64, help="tokens a call; 1 is decoding")
    parser.add_argument("--mem-len", type=int, default=512)
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--sinks", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = XLConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        segment_len=128,
        mem_len=options.mem_len,
        position_type=options.position,
        memory_type=options.memory,
        attention_window=options.window,
        num_sink_tokens=options.sinks,
    )
    model = XLForCausalLM(config).eval()
    cache, fed, mark = None, 0, options.mem_len + config.segment_len
    figures = []
    started = time.perf_counter()
    with torch.inference_mode():
        while fed < options.tokens:
            ids = torch.randint(0, config.vocab_size, (1, min(options.call, options.tokens - fed)))
            cache = model(ids, cache=cache, logits_to_keep=1).cache
            fed += ids.shape[1]
            if fed >= mark:
                now = time.perf_counter()
                figures.append((fed, cache.nbytes, resident_mib("VmRSS"), now - started))
                started, mark = now, mark + 10_000
    figures = figures[1:]  # of the filling
    for tokens, nbytes, resident, seconds in (figures[0], figures[-1]):
        held = f"cache {nbytes:>10,} bytes, process {resident:6.1f} MiB"
        print(f"{tokens:>9,} tokens: {held}, last 10,000 tokens in {seconds:6.2f} s")
    first, last = figures[0], figures[-1]
    grew = max(last[1] / first[1], last[2] / first[2]) - 1
    print(f"the last took {last[3] / first[3]:.2f} of the time of the first")
    print(f"growth of cache or process from {first[0]:,} to {last[0]:,} tokens: {grew:.2%}")
    return int(grew > 0.01)


if __name__ == "__main__":
    sys.exit(main())
