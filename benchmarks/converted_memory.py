"""What does a converted model gain from fine-tuning with memory? Converts a model trained with full attention, fine-tunes
it twice on the same text for the same steps, with memory and without, and compares both with the converted model as it is.

    python benchmarks/converted_memory.py SOURCE --train FILE... --valid FILE --output-dir DIR [--mem-len 128] [--seeds 0 1]

SOURCE is the folder of any model that `modeling-xl convert` takes, with its tokenizer. Prints a line for each run and a table
of bits per byte on the first bytes of the held-out file: a row for each model, and each evaluated on segments alone, with
memory and sink tokens, and on longer segments alone, as long as segment and memory together. Below it stands what fine-tuning
with memory gains against each of the other cells. "Without memory" means without sink tokens too.

Each run leaves DIR/<name>.json; the same command again does only what is missing or was made with other settings. Nothing
is drawn at random in fine-tuning a model without dropout, so a seed says where in the text the reading begins.
"""

import argparse
import re
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from results import digest, read_result, with_hash, write_result
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_xl.conversion.convert import Memory, convert
from modeling_xl.evaluate import evaluate, overridden
from modeling_xl.text import InputError, encode, read_text
from modeling_xl.train import TrainingSettings, load_config, pretrained_model, train

MODELS = {
    "converted": "converted, not fine-tuned",
    "without": "fine-tuned without memory",
    "with": "fine-tuned with memory",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help="UTF-8 text, read in the given order")
    parser.add_argument("--valid", required=True, metavar="FILE")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--join-lines", action="store_true", help="of hard-wrapped texts make one line of each paragraph")
    parser.add_argument("--valid-bytes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--streams", type=int, default=16, help="in training and in evaluation")
    parser.add_argument("--segment-len", type=int, default=64)
    parser.add_argument("--mem-len", type=int, default=128)
    parser.add_argument("--sink-tokens", type=int, default=4)
    parser.add_argument("--stream-len", type=int, help="in training, begin anew with an empty memory after so many tokens")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], metavar="N")
    options = parser.parse_args()
    logging.disable_progress_bar()
    try:
        return run_all(options)
    except InputError as error:
        parser.error(str(error))


def run_all(options: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(options.source)
    texts = [read_text(files) for files in (options.train, [options.valid])]
    if options.join_lines:
        texts = [join_lines(text) for text in texts]
    tokens = encode(texts[0], tokenizer)
    if len(tokens) < options.streams * options.segment_len:
        raise InputError(f"--train: {len(tokens)} tokens are too few; give {options.streams * options.segment_len} at least")
    valid = encode(texts[1].encode()[: options.valid_bytes].decode(errors="ignore"), tokenizer)
    shared = {
        "source": digest(*(path.read_bytes() for path in sorted(options.source.iterdir()) if path.is_file())),
        "train_text": digest(tokens.numpy().tobytes()),
        "valid_text": digest(valid.numpy().tobytes()),
        **{name: getattr(options, name) for name in ("streams", "segment_len", "mem_len", "sink_tokens")},
    }
    runs = [settings_of("converted", None, options, shared)]
    runs += [settings_of(name, seed, options, shared) for seed in options.seeds for name in ("without", "with")]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    todo = [settings for settings in runs if read_result(options.output_dir, settings) is None]
    print(f"{len(runs) - len(todo)} of {len(runs)} runs are there, {len(todo)} to do", flush=True)
    if todo:
        with tempfile.TemporaryDirectory(prefix=".converted-", dir=options.output_dir) as folder:
            converted = Path(folder) / "xl"
            memory = Memory("recurrence", options.mem_len, options.segment_len, options.sink_tokens)
            report = convert(options.source, converted, memory=memory)
            for note in report.notes:
                print(f"note: {note}")
            for settings in todo:
                result = run(settings, converted, tokenizer, tokens, valid)
                write_result(options.output_dir, result)
                print(line(result), flush=True)
    print_table([read_result(options.output_dir, settings) for settings in runs], options)
    print(f"\npython {shlex.join(sys.argv)}")
    return 0


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    if not source.is_dir():
        raise InputError(f"{source}: is not a folder")
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # several classes of error, according to what is missing
        raise InputError.about(f"{source}: no tokenizer could be loaded", error) from error


def join_lines(text: str) -> str:
    """One line a paragraph. Where lines are wrapped at a width, a memory wins bits by telling where the next line ends."""
    return re.sub(r"(?<=\S)[^\S\n]*\r?\n(?=\S)", " ", text)


def settings_of(kind: str, seed: int | None, options: argparse.Namespace, shared: dict[str, Any]) -> dict[str, Any]:
    """All that the result of a run depends on, and a hash of it. `converted` is a run without training."""
    settings: dict[str, Any] = {"name": kind if seed is None else f"{kind}-{seed}", "kind": kind, **shared}
    if seed is not None:
        training = TrainingSettings(
            max_steps=options.steps,
            batch_size=options.streams,
            stream_len=options.stream_len,
            learning_rate=options.learning_rate,
            warmup_steps=options.warmup_steps,
            seed=seed,
        )
        settings["training"] = asdict(training)
    return with_hash(settings)


def run(
    settings: dict[str, Any],
    converted: Path,
    tokenizer: PreTrainedTokenizerBase,
    tokens: torch.Tensor,
    valid: torch.Tensor,
) -> dict[str, Any]:
    begin = time.perf_counter()
    config, _ = load_config(converted)
    model = pretrained_model(converted, config, tokenizer)
    result: dict[str, Any] = {"parameters": model.num_parameters()}
    if "training" in settings:
        training = TrainingSettings(**settings["training"])
        part = reading(tokens, training, settings["segment_len"])
        with overridden(model, **({"mem_len": 0, "num_sink_tokens": 0} if settings["kind"] == "without" else {})):
            trained = train(model, part, training, tokenizer)
        result |= {"training": asdict(trained)}
    segment_len, mem_len = settings["segment_len"], settings["mem_len"]
    views = {
        "alone": {"segment_len": segment_len, "mem_len": 0, "num_sink_tokens": 0},
        "memory": {"segment_len": segment_len, "mem_len": mem_len, "num_sink_tokens": settings["sink_tokens"]},
        "longer": {"segment_len": segment_len + mem_len, "mem_len": 0, "num_sink_tokens": 0},
    }
    result["evaluation"] = {}
    for view, values in views.items():
        with overridden(model, **values):
            result["evaluation"][view] = evaluate(model, valid, tokenizer, streams=settings["streams"]).to_dict()
    return {**result, "seconds_in_all": time.perf_counter() - begin, "settings": settings}


def reading(tokens: torch.Tensor, training: TrainingSettings, segment_len: int) -> torch.Tensor:
    """What one run reads: of a long text some of each stream's part, from a place on that the seed draws."""
    generator = torch.Generator().manual_seed(training.seed)
    tokens = tokens.roll(-int(torch.randint(len(tokens), (), generator=generator)))
    parts = tokens[: len(tokens) // training.batch_size * training.batch_size].view(training.batch_size, -1)
    return parts[:, : training.max_steps * segment_len].flatten()


def line(result: dict[str, Any]) -> str:
    bits = ", ".join(f"{view} {found['bits_per_byte']:.4f}" for view, found in result["evaluation"].items())
    text = f"{result['settings']['name']}: bits per byte {bits}"
    if "training" not in result:
        return text
    training = result["training"]
    return f"{text}; {training['steps']} steps on {training['num_bytes']:,} bytes in {training['seconds']:.0f} s"


def print_table(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Markdown: rows are models, columns what they are given in evaluation."""
    cells = {
        (kind, view): [r["evaluation"][view]["bits_per_byte"] for r in results if r["settings"]["kind"] == kind]
        for kind in MODELS
        for view in ("alone", "memory", "longer")
    }
    segment_len, mem_len = options.segment_len, options.mem_len
    columns = {
        "alone": f"segments of {segment_len} alone",
        "memory": f"segments of {segment_len}, memory {mem_len}, {options.sink_tokens} sinks",
        "longer": f"segments of {segment_len + mem_len} alone",
    }
    print(f"\nbits per byte after {options.steps} steps of {options.streams * segment_len} tokens: mean (each seed)\n")
    print(f"| | {' | '.join(columns.values())} |")
    print("| --- " * (len(columns) + 1) + "|")
    for kind, title in MODELS.items():
        print(f"| {title} | {' | '.join(shown(cells[kind, view]) for view in columns)} |")
    print("\nbits per byte that fine-tuning with memory, evaluated with memory, gains against: mean (each seed)\n")
    for (kind, view), bits in cells.items():
        if (kind, view) != ("with", "memory"):
            best = cells["with", "memory"]
            others = bits * len(best) if len(bits) == 1 else bits
            print(f"- {MODELS[kind]}, {columns[view]}: {shown([b - a for a, b in zip(best, others, strict=True)])}")


def shown(bits: list[float]) -> str:
    each = f" ({', '.join(f'{value:.3f}' for value in bits)})" if len(bits) > 1 else ""
    return f"{statistics.mean(bits):.3f}{each}"


if __name__ == "__main__":
    sys.exit(main())
