"""Linear attention by blocks against causal softmax attention of torch on the same queries, keys and values (8 heads of 64),
feature maps and normaliser included. Prints the ratio of times, forward and forward + backward, for each position scheme.

    python benchmarks/linear_attention.py [--lengths 2048 8192] [--feature-map elu] [--positions none rope] [--blocks 64]

The process ends with an error where the plain form (position none, elu, the package's own block) takes more than 0.30 of
the time at 2,048 tokens, or more than 0.12 at 8,192.
"""

import argparse
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from modeling_xl import XLCache, XLConfig, XLModel, linear_xl
from modeling_xl.grid_xl import plan_call
from modeling_xl.positions import POSITION_SCHEMES

HEADS, SIZE = 8, 64
LIMITS = {2048: 0.30, 8192: 0.12}


def seconds(run, inputs, gradient: bool, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        given = [tensor.clone().requires_grad_(gradient) for tensor in inputs]
        started = time.perf_counter()
        with torch.set_grad_enabled(gradient):
            output = run(*given)
            if gradient:
                output.sum().backward()
        best = min(best, time.perf_counter() - started)
    return best


def linear(position: str, feature_map: str, length: int):
    """A function of queries, keys and values that runs the mechanism of one layer over one piece."""
    config = XLConfig(
        hidden_size=HEADS * SIZE,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        position_type=position,
        memory_type="linear",
        feature_map=feature_map,
        clamp_len=128,
    )
    model = XLModel(config)
    attention = model.layers[0].self_attn

    def run(query, key, value):
        cache = XLCache(config)
        cache.start(1)
        plan = plan_call(
            cache,
            torch.tensor([length]),
            document_ids=None,
            position_ids=None,
            device=query.device,
            segment_len=None,
            longest_piece=None,
            bptt_segments=0,
            needs_row_lines=False,
            kept_rows=0,
            undo_limit=0,
            context=model._position_context(cache),
            wants_weights=False,
            wants_aux_loss=False,
        )
        attention.project = lambda _: (query, key, value)
        return attention.memory.attend(attention, query, None, plan.pieces[0]).output

    return run


def softmax(query, key, value):
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048, 8192])
    parser.add_argument("--positions", nargs="+", default=list(POSITION_SCHEMES))
    parser.add_argument("--feature-map", default="elu")
    parser.add_argument("--blocks", type=int, nargs="+", default=[linear_xl.BLOCK], help="queries a block")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    own, missed = linear_xl.BLOCK, False
    print(f"{options.threads} threads, {options.feature_map}; time / softmax: forward | forward + backward")
    for length in options.lengths:
        inputs = [torch.randn(1, HEADS, length, SIZE) for _ in range(3)]
        reference = {gradient: seconds(softmax, inputs, gradient) for gradient in (False, True)}
        print(f"{length:>6,} tokens: softmax {reference[False] * 1e3:.1f} | {reference[True] * 1e3:.1f} ms")
        for block in options.blocks:
            linear_xl.BLOCK = block
            for position in options.positions:
                run = linear(position, options.feature_map, length)
                ratios = {g: seconds(run, inputs, g) / reference[g] for g in (False, True)}
                print(f"    block {block:>4}  {position:<6} {ratios[False]:.2f} | {ratios[True]:.2f}", flush=True)
                is_plain = position == "none" and options.feature_map == "elu" and block == own
                missed |= is_plain and ratios[False] > LIMITS.get(length, float("inf"))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
