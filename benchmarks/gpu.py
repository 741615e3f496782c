"""What a GPU makes of the package: whether it is right there, and how fast.

    python benchmarks/gpu.py [--output FILE.json] [--only right | fast] [--device cuda]

First small models of every position scheme and memory run on the GPU, in float32 and bfloat16 and with each attention
function: a text in one call with gradients, and token by token, by calls and, where the memory has a fixed size, by a CUDA
graph. Logits and gradients are compared with those of the same model in float64 on the CPU, relative to the largest of them;
the process ends with 1 where float32 is off by more than 1e-3, or bfloat16 by more than 0.1. Then the cases of `speed.py`, side
by side in one process, in both number formats; what cannot run says why, and the others go on.

Linear attention uses the kernel of flash-linear-attention where that is installed. Matrix products of float32 are exact here
(no TF32). `--device cpu` runs the first part where there is no GPU, without graphs, which tests the script.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import speed_models
import torch
from results import write_result
from speed import CASES

from modeling_xl import XLCache, XLConfig, XLForCausalLM
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES

LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
LENGTH, SEGMENT, DECODED = 150, 32, 5
OF_FIXED_SIZE = ("recurrence", "linear")  # as `export_step` asks for
FAST_CASES = ("train", "read 1600", "read 3800", "prefill 2048", "decode 1600", "decode 3800", "train 8192")
CANDIDATES = [*(f"{scheme}-recurrence" for scheme in POSITION_SCHEMES), "rope-compressive", "rope-linear", "alibi-linear"]
DECODERS = ["llama_static", "llama_static+graph", "xl-recurrence+graph", "rope-recurrence+graph", "rope-linear+graph"]
ROUNDS = 5


def small_model(position: str, memory: str, implementation: str) -> XLForCausalLM:
    torch.manual_seed(0)
    config = XLConfig(
        vocab_size=100,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
        position_type=position,
        memory_type=memory,
        clamp_len=40 if (position, memory) == ("xl", "linear") else None,
        segment_len=SEGMENT,
        mem_len=48,
        compressed_mem_len=16,
        initializer_range=0.1,
        attn_implementation=implementation,
    )
    return XLForCausalLM(config)


@torch.no_grad()
def decoded(model: XLForCausalLM, ids: torch.Tensor, by_graph: bool) -> torch.Tensor:
    """Logits of the last tokens, fed one by one behind the others."""
    cache = XLCache(model.config)
    model(ids[:, :-DECODED], cache=cache, logits_to_keep=1)
    call = speed_models.captured(model, cache) if by_graph else lambda token: model(token, cache=cache).logits
    return torch.cat([call(token).clone() for token in ids[:, -DECODED:].split(1, 1)], 1)


def outcome(model: XLForCausalLM, ids: torch.Tensor, has_graph: bool = False) -> dict[str, torch.Tensor]:
    """Logits of a call and of tokens behind it, and the gradient of all parameters, in float64 on the CPU."""
    model.zero_grad()
    output = model(ids[:, :-DECODED], labels=ids[:, :-DECODED])
    output.loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        logits = model(ids[:, :-DECODED]).logits
    found = {"gradients": torch.cat(gradients), "logits": logits, "decoded": decoded(model, ids, by_graph=False)}
    if has_graph:
        found["decoded by graph"] = decoded(model, ids, by_graph=True)
    return {name: tensor.double().cpu() for name, tensor in found.items()}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def check(device: torch.device) -> list[dict[str, Any]]:
    ids = torch.randint(0, 100, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    results = []
    for position in POSITION_SCHEMES:
        for memory in MEMORY_MECHANISMS:
            exact = small_model(position, memory, "eager").double()
            expected = outcome(exact, ids)
            expected["decoded by graph"] = expected["decoded"]
            for implementation in ("eager", "sdpa", "flex_attention"):
                if implementation != "eager" and memory == "linear":
                    continue  # it has no softmax
                for dtype, limit in LIMITS.items():
                    model = small_model(position, memory, implementation)
                    model.load_state_dict(exact.state_dict())
                    has_graph = implementation == "eager" and memory in OF_FIXED_SIZE
                    found = outcome(model.to(device, dtype), ids.to(device), has_graph)
                    off = {name: relative(tensor, expected[name]) for name, tensor in found.items()}
                    is_right = max(off.values()) < limit
                    combination = {"position": position, "memory": memory, "attention": implementation, "dtype": str(dtype)}
                    results.append({**combination, **off, "right": is_right})
                    words = " ".join(combination.values())
                    print(f"{'right' if is_right else 'WRONG'}: {words}, off by {max(off.values()):.1e}", flush=True)
    return results


def seconds(step: speed_models.Step) -> float:
    """Of a token."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tokens = step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / tokens


def compare(name: str, candidate: str) -> dict[str, float]:
    """How many times as fast as Llama the candidate is, and the peak of its memory."""
    case = {**CASES[name], "layers": 12}
    torch.cuda.reset_peak_memory_stats()
    steps = [speed_models.build("llama", **case)]
    before = torch.cuda.memory_allocated()
    steps.append(speed_models.build(candidate, **case))
    for step in steps:
        step()
    pairs = [[seconds(step) for step in steps] for _ in range(ROUNDS)]
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {
        "ratio": statistics.median(a / b for a, b in pairs),
        "tokens_a_second": 1 / min(b for _, b in pairs),
        "peak_mib": peak,
    }


def table(dtype: torch.dtype) -> list[dict[str, Any]]:
    speed_models.DEVICE, speed_models.DTYPE = torch.device("cuda"), dtype
    results = []
    print(f"\n{dtype}, speed over Llama's | {' | '.join(FAST_CASES)}")
    for candidate in [*CANDIDATES, *DECODERS]:
        cells = []
        for name in FAST_CASES:
            only_decodes = candidate in DECODERS and not name.startswith("decode")
            if only_decodes or (name == "train 8192" and "linear" not in candidate):
                cells.append("")
                continue
            result = {"dtype": str(dtype), "case": name, "candidate": candidate}
            try:
                result |= compare(name, candidate)
                cells.append(f"{result['ratio']:.2f}")
            except (RuntimeError, TypeError) as error:  # such as memory that does not suffice
                result["error"] = f"{type(error).__name__}: {error}"[:200]
                cells.append(result["error"])
            results.append(result)
        print(f"{candidate} | {' | '.join(cells)}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--only", choices=("right", "fast"), help="one of the two parts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is there; --device cpu --only right tests the script")
    if options.device == "cpu" and options.only != "right":
        parser.error("--device cpu goes with --only right; speed.py compares speeds on CPUs")
    torch.set_float32_matmul_precision("highest")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found: dict[str, Any] = {"settings": {"name": "gpu"}, "device": name, "torch": torch.__version__}
    if options.only != "fast":
        found["right"] = check(torch.device(options.device))
    if options.only != "right":
        found["fast"] = [result for dtype in LIMITS for result in table(dtype)]
    if options.output:
        found["settings"]["name"] = options.output.stem
        write_result(options.output.parent, found)
    print(json.dumps({"device": name, "wrong": sum(not r["right"] for r in found.get("right", []))}))
    return int(any(not result["right"] for result in found.get("right", [])))


if __name__ == "__main__":
    sys.exit(main())
