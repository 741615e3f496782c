"""Does each mechanism learn, with each position scheme? Trains 35 small byte-level models on the same bytes, with the same
sizes and the same number of steps, and compares them on the first 100,000 bytes of a held-out file.

    python benchmarks/learning.py --train FILE... --valid FILE --output-dir DIR [--only 'recurrence-*' none-xl-0] [--jobs 2]

Runs are named memory-position-seed: 4 mechanisms x 5 schemes, seeds 0 and 1 for xl and rope, seed 0 for the others. In the
runs `linear_restarted` streams begin anew every 1,920 tokens, in training and in evaluation. Each run has
a process and a thread of its own, prints a line when it is done and leaves DIR/<name>.json; the same command again does only
what is missing or was made with other settings. At the end come the tables of bits per byte, and of parameters and seconds.

A query sees at most 192 keys: a block of 192 tokens (none), or a segment of 64 and 128 rows of memory; linear attention has
its state instead. The process ends with 1 if a run failed.
"""

import argparse
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from results import digest, read_result, with_hash, write_result
from transformers.utils import logging

from modeling_xl import XLConfig
from modeling_xl.evaluate import evaluate
from modeling_xl.text import InputError, byte_tokenizer, encode, read_text
from modeling_xl.train import TrainingSettings, new_model, train

STEPS = 1200
SEGMENT, STREAMS = 64, 15  # 960 tokens a step, as are 5 rows of 192
VALID_BYTES, VALID_STREAMS = 100_000, 16
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "initializer_range": 0.07,
}
MEMORIES: dict[str, dict[str, Any]] = {
    "none": {"segment_len": 3 * SEGMENT},  # no memory: only the length of a block
    "recurrence": {"segment_len": SEGMENT, "mem_len": 128},
    "compressive": {
        "segment_len": SEGMENT,
        "mem_len": 64,
        "compressed_mem_len": 64,
        "compression_rate": 4,
        "compression_fn": "conv",
    },
    "linear": {"segment_len": SEGMENT, "feature_map": "elu"},
    "linear_restarted": {"segment_len": SEGMENT, "feature_map": "elu"},
}
STREAM_LEN = {"linear_restarted": 1920}
POSITIONS: dict[str, dict[str, Any]] = {"xl": {"clamp_len": 64}, "t5": {}, "rope": {}, "alibi": {}, "none": {}}
NAMES = [
    f"{memory}-{position}-{seed}"
    for memory in MEMORIES
    for position in POSITIONS
    for seed in ((0, 1) if position in ("xl", "rope") else (0,))
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help="UTF-8 text, read in the given order")
    parser.add_argument("--valid", required=True, metavar="FILE")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="runs, or patterns such as 'linear-*'")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--max-steps", type=int, default=STEPS)
    options = parser.parse_args()
    try:
        chosen = [name for name in NAMES if any(fnmatch(name, pattern) for pattern in options.only)]
        for pattern in options.only:
            if not any(fnmatch(name, pattern) for name in NAMES):
                raise InputError(f"--only {pattern}: no such run; the runs are {', '.join(NAMES)}")
        texts = texts_of(options.train, options.valid, options.max_steps)
        digests = [digest(text.numpy().tobytes()) for text in texts]
        settings = {name: settings_of(name, options.max_steps, digests) for name in chosen}
    except InputError as error:
        parser.error(str(error))

    options.output_dir.mkdir(parents=True, exist_ok=True)
    todo = [name for name in chosen if read_result(options.output_dir, settings[name]) is None]
    print(f"{len(chosen) - len(todo)} of {len(chosen)} runs are there, {len(todo)} to do", flush=True)
    # Inherited by the processes; threads that wait must not spin where others work.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {
            pool.submit(in_process, settings[name], options.train, options.valid, options.output_dir): name for name in todo
        }
        try:
            for future in as_completed(waiting):
                name, code = waiting[future], future.result()
                result = read_result(options.output_dir, settings[name])
                if code or result is None:
                    failed.append(name)
                    print(f"{name}: FAILED, exit code {code}", flush=True)
                else:
                    print(
                        f"{name}: {result['bits_per_byte']:.4f} bits per byte, {result['parameters']:,} parameters, "
                        f"{result['steps']} steps in {result['seconds']:.0f} s",
                        flush=True,
                    )
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else those that wait would begin
            raise
    results = [result for name in chosen if (result := read_result(options.output_dir, settings[name]))]
    print_tables(results, options.max_steps)
    print(f"\npython {shlex.join(sys.argv)}")
    if failed:
        print(f"error: {len(failed)} run(s) failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def texts_of(train_files: list[str], valid_file: str, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens to train on and to evaluate on. Of a long text every run reads the same bytes, once, from all over it."""
    tokens = encode(read_text(train_files), byte_tokenizer())
    if len(tokens) < STREAMS * 3 * SEGMENT:
        raise InputError(f"--train: {len(tokens)} bytes are too few; give {STREAMS * 3 * SEGMENT} at least")
    parts = tokens[: len(tokens) // STREAMS * STREAMS].view(STREAMS, -1)
    return parts[:, : steps * SEGMENT].flatten(), encode(read_text([valid_file]), byte_tokenizer())[:VALID_BYTES]


def settings_of(name: str, steps: int, text_digests: list[str]) -> dict[str, Any]:
    """All that the result of the run `name` depends on, and a hash of it. Raises InputError where the config refuses it."""
    memory, position, seed = name.split("-")
    config = {
        **SIZES,
        **MEMORIES[memory],
        **POSITIONS[position],
        "memory_type": memory.split("_")[0],
        "position_type": position,
    }
    try:
        XLConfig(**config)
    except Exception as error:  # several classes of error, according to which check of the config failed
        raise InputError.about(name, error) from error
    if unknown := set(config) - {field.name for field in fields(XLConfig)}:
        raise InputError(f"{name}: XLConfig has no field {', '.join(sorted(unknown))}")
    training = TrainingSettings(
        max_steps=steps,
        batch_size=STREAMS * SEGMENT // config["segment_len"],
        stream_len=STREAM_LEN.get(memory),
        learning_rate=3e-3,
        warmup_steps=100,
        seed=int(seed),
    )
    settings = {
        "name": name,
        "config": config,
        "training": asdict(training),
        "train_text": text_digests[0],
        "valid_text": text_digests[1],
        "valid_bytes": VALID_BYTES,
        "valid_streams": round(VALID_BYTES / STREAM_LEN[memory]) if memory in STREAM_LEN else VALID_STREAMS,
    }
    return with_hash(settings)


def in_process(*arguments) -> int | None:
    """Does one run in a process of its own, so that nothing that happens there ends the others."""
    process = multiprocessing.get_context("spawn").Process(target=run, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def run(settings: dict[str, Any], train_files: list[str], valid_file: str, folder: Path) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    tokenizer = byte_tokenizer()
    training = TrainingSettings(**settings["training"])
    tokens, valid = texts_of(train_files, valid_file, training.max_steps)
    begin = time.perf_counter()
    model = new_model(XLConfig(**settings["config"]), tokenizer, training.seed)
    trained = train(model, tokens, training, tokenizer)
    evaluated = evaluate(model, valid, tokenizer, streams=settings["valid_streams"])
    result = {
        "bits_per_byte": evaluated.bits_per_byte,
        "training_bits_per_byte": trained.bits_per_byte,
        "parameters": model.num_parameters(),
        "steps": trained.steps,
        "bytes": trained.num_bytes,
        "seconds": trained.seconds,
        "seconds_in_all": time.perf_counter() - begin,
        "evaluation": evaluated.to_dict(),
        "settings": settings,
    }
    write_result(folder, result)


def print_tables(results: list[dict[str, Any]], steps: int) -> None:
    """Markdown: rows are mechanisms, columns position schemes."""
    print(f"\nbits per byte after {steps} steps of {STREAMS * SEGMENT} bytes: mean (each seed)\n")
    print_table(results, lambda bits: " ".join([f"{statistics.mean(bits):.3f}", seeds(bits)]).strip(), "bits_per_byte")
    print("\nparameters\n")
    print_table(results, lambda counts: f"{counts[0]:,}", "parameters")
    print("\nseconds of training: mean\n")
    print_table(results, lambda seconds: f"{statistics.mean(seconds):.0f}", "seconds")


def seeds(bits: list[float]) -> str:
    return f"({', '.join(f'{value:.3f}' for value in bits)})" if len(bits) > 1 else ""


def print_table(results: list[dict[str, Any]], shown, key: str) -> None:
    print(f"| memory | {' | '.join(POSITIONS)} |")
    print("| --- " * (len(POSITIONS) + 1) + "|")
    for memory in MEMORIES:
        cells = []
        for position in POSITIONS:
            values = [result[key] for result in results if result["settings"]["name"].startswith(f"{memory}-{position}-")]
            cells.append(shown(values) if values else "")
        print(f"| {memory} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
