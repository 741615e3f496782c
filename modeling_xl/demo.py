"""What memory is good for, in a few minutes on two cores: `python -m modeling_xl.demo`.

Trains one small byte-level model with segment memory and one without on the same bytes of Shakespeare, compares both on
held-out text at several memory lengths, then loads the better one in a fresh process and lets it write.
"""

import argparse
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers.utils import logging

from .corpus import Corpus
from .evaluate import EvaluationResult, evaluate
from .evaluation_report import plot
from .text import SAMPLE_TEXT, byte_tokenizer
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
    parser.add_argument("--output-dir", default="demo_output", help="folder for the models and the plot")
    parser.add_argument("--max-steps", type=int, help="training steps, instead of those of configs/demo")
    args = parser.parse_args()
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()

    # Side by side: two processes with a core each are done sooner than one after the other with two.
    threads = max(1, torch.get_num_threads() // 2)
    jobs = [
        ("trained without memory", 0, args.max_steps, output_dir / "model_without_memory", threads),
        ("trained with memory", None, args.max_steps, output_dir / "model", threads),
    ]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        without, with_memory = pool.starmap(run, jobs, chunksize=1)
        pool.close()
        pool.join()  # leaving the block would kill the processes, which then leave their semaphores behind
    plot({jobs[0][0]: without, jobs[1][0]: with_memory}, output_dir / "memory.png")
    gain = report(without, with_memory)
    print(f"plot: {output_dir / 'memory.png'}, model: {output_dir / 'model'}\n")

    print("a fresh process loads the model and writes on, past the length of what it saw at once in training:", flush=True)
    command = [sys.executable, "-c", GENERATE, str(output_dir / "model"), "ROMEO:\n", "600"]
    subprocess.run(command, check=True, timeout=120)
    print(f"\nall in {time.perf_counter() - begin:.0f} s")
    if gain < MIN_GAIN:
        print(f"error: memory gained {gain:.3f} bits per byte, less than {MIN_GAIN}", file=sys.stderr)
        return 1
    return 0


def run(name: str, mem_len: int | None, max_steps: int | None, folder: Path, threads: int) -> list[EvaluationResult]:
    """Trains the model of configs/demo (its own memory length: None), saves it, and evaluates it at every MEM_LENS."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    tokenizer = byte_tokenizer()
    corpus, held_out = Corpus.from_files([SAMPLE_TEXT], tokenizer).split(0.05)
    config, stored = load_config("demo", mem_len=mem_len)
    settings = training_settings(stored, max_steps=max_steps)
    model = new_model(config, tokenizer, settings.seed)
    # One bar, for the slower of the two.
    training = train(model, corpus, settings, tokenizer, progress=mem_len is None, description=name)
    save(model, tokenizer, folder, overwrite=True)
    results = [evaluate(model, held_out, tokenizer, mem_len=length, streams=STREAMS) for length in MEM_LENS]
    print(
        f"{name}: {model.num_parameters():,} parameters, segment {config.segment_len}, memory {config.mem_len}; "
        f"{training.steps} steps on {training.num_bytes:,} bytes in {training.seconds:.0f} s, "
        f"evaluated in {sum(result.seconds for result in results):.0f} s",
        flush=True,
    )
    return results


def report(without: list[EvaluationResult], with_memory: list[EvaluationResult]) -> float:
    """Prints the table and the verdict; returns the gain over the model trained and evaluated without memory."""
    print(f"\nbits per byte on {without[0].num_bytes:,} held-out bytes, read as {STREAMS} streams")
    print(f"{'memory at evaluation':<42}" + "".join(f"{mem_len:>8}" for mem_len in MEM_LENS))
    baseline, given = without[0].bits_per_byte, [result.bits_per_byte for result in without[1:]]
    trained = [result.bits_per_byte for result in with_memory]
    rows: list[tuple[str, list[float | None]]] = [
        ("trained without memory", [baseline]),
        ("the same model, given memory at test time", [None, *given]),
        ("trained with memory", [*trained]),
    ]
    for name, values in rows:
        print(f"{name:<42}" + "".join(f"{'' if value is None else format(value, '.3f'):>8}" for value in values))
    best = {"trained without": baseline, "given memory at test time": min(given), "trained with": min(trained)}
    winner = min(best, key=lambda name: best[name])
    gain = baseline - min(trained)
    print(
        f"best: {winner}, {best[winner]:.3f}. Training with memory gains {gain:.3f} bits per byte over training and "
        f"evaluating without, {min(given) - min(trained):.3f} over memory at test time only."
    )
    return gain


if __name__ == "__main__":
    sys.exit(main())
