"""What memory is good for, in a few minutes on two cores: `python -m modeling_xl.demo`.

Trains one small byte-level model with segment memory and one without on the same bytes of Shakespeare, compares both on
held-out text at several memory lengths, then loads the better one in a fresh process and lets it write.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from transformers.utils import logging

from .data import SAMPLE_TEXT, byte_tokenizer, encode, read_text, split_text
from .evaluate import EvaluationResult, evaluate, plot
from .train import load_config, new_model, save, train, training_settings

MEM_LENS = [0, 16, 32, 64, 128, 256]
STREAMS = 32
MIN_GAIN = 0.05  # bits per byte: a smaller gain is a fault of the model or of its training

GENERATE = """
import sys, torch, modeling_xl
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
torch.manual_seed(0)
prompt = tokenizer(sys.argv[2], add_special_tokens=False, return_tensors="pt").input_ids
text = model.generate(prompt, max_new_tokens=int(sys.argv[3]), do_sample=True, temperature=0.7, top_k=0)
print(tokenizer.decode(text[0], skip_special_tokens=True))
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m modeling_xl.demo", description=__doc__)
    parser.add_argument("--output-dir", default="demo_output", help="folder for the model and the plot")
    parser.add_argument("--max-steps", type=int, help="training steps, instead of those of configs/demo")
    args = parser.parse_args()
    logging.disable_progress_bar()
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()

    tokenizer = byte_tokenizer()
    text, held_out = split_text(read_text([SAMPLE_TEXT]), 0.05)
    tokens, held_out_tokens = encode(text, tokenizer), encode(held_out, tokenizer)
    results: dict[str, list[EvaluationResult]] = {}
    for name, mem_len in [("trained without memory", 0), ("trained with memory", None)]:
        config, stored = load_config("demo", mem_len=mem_len)
        settings = training_settings(stored, max_steps=args.max_steps)
        model = new_model(config, tokenizer, settings.seed)
        print(
            f"{name}: {model.num_parameters():,} parameters, segment {config.segment_len}, memory {config.mem_len}",
            flush=True,
        )
        training = train(model, tokens, settings, tokenizer, progress=True, description=name)
        print(f"  {training.steps} steps, {training.num_bytes:,} bytes, {training.seconds:.0f} s", flush=True)
        results[name] = [evaluate(model, held_out_tokens, tokenizer, mem_len=m, streams=STREAMS) for m in MEM_LENS]
    save(model, tokenizer, output_dir / "model", overwrite=True)
    plot(results, output_dir / "memory.png")

    without, with_memory = results.values()
    gain = report(without, with_memory)
    print(f"plot: {output_dir / 'memory.png'}, model: {output_dir / 'model'}\n")
    print("a fresh process loads the model and writes on, past the length of what it was trained to see at once:")
    subprocess.run([sys.executable, "-c", GENERATE, str(output_dir / "model"), "ROMEO:\n", "600"], check=True, timeout=120)
    print(f"\nall in {time.perf_counter() - begin:.0f} s")
    if gain < MIN_GAIN:
        print(f"error: memory gained {gain:.3f} bits per byte, less than {MIN_GAIN}", file=sys.stderr)
        return 1
    return 0


def report(without: list[EvaluationResult], with_memory: list[EvaluationResult]) -> float:
    """Prints the table and the verdict; returns the gain over the model trained and evaluated without memory."""
    scored, seconds = without[0], sum(r.seconds for r in [*without, *with_memory])
    print(f"\nbits per byte on {scored.num_bytes:,} held-out bytes in {scored.streams} streams ({seconds:.0f} s)")
    print(f"{'memory at evaluation':<42}" + "".join(f"{mem_len:>8}" for mem_len in MEM_LENS))
    baseline, given = without[0].bits_per_byte, [r.bits_per_byte for r in without[1:]]
    trained = [r.bits_per_byte for r in with_memory]
    rows: list[tuple[str, list[float | None]]] = [
        ("trained without memory", [baseline]),
        ("the same model, given memory at test time", [None, *given]),
        ("trained with memory", [*trained]),
    ]
    for name, values in rows:
        print(f"{name:<42}" + "".join(f"{'' if value is None else format(value, '.3f'):>8}" for value in values))
    best = {"the model trained without memory": baseline, "the same model given memory at test time": min(given)}
    best["the model trained with memory"] = min(trained)
    winner = min(best, key=lambda name: best[name])
    gain = baseline - min(trained)
    print(
        f"best: {winner}, {best[winner]:.3f}. Training with memory gains {gain:.3f} bits per byte over training and "
        f"running without, {min(given) - min(trained):.3f} over memory at test time only."
    )
    return gain


if __name__ == "__main__":
    sys.exit(main())
