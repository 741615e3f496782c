"""Does this package's Transformer-XL learn as well as others? Trains four small byte-level models on the same bytes, with about
as many parameters and the same optimiser, schedule and steps, and compares them on 100,000 bytes of held-out text.

    python benchmarks/quality.py --shared ../shared --output-dir DIR [--peers-env DIR] [--jobs 1] [--steps 900]

The models: this package's in the form of the original Transformer-XL; the former Transformers' TransfoXLLMHeadModel; that of
x-transformers with memory and rotary positions; Transformers' Llama, which has no memory, on blocks as long as segment and
memory together. The first two begin with the same weights, which the second makes, and read the same bytes in the same steps,
so that their losses have to lie on each other. All four are trained and evaluated by the same loop, the one in this file.

Prints a line for each run, a table of bits per byte (novels: three seeds; Python code: one), and how far the losses of the
first two lie apart. Training makes much of little differences in rounding, so four more runs say what these do: the first two
models in double precision, for a third of the steps, and the first from first weights that differ in the last bit.

Writes DIR/curves.png, the losses of all. Each run has a process and a thread of its own and leaves DIR/<name>.json; the same
command again does only what is missing or was made with other settings.

The former Transformers and x-transformers need another environment, by default DIR/peers; it is made if it is not there. A
seed says with which weights a model begins and where in the text the reading begins.
"""

import argparse
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from peers import former_classes, former_config, prepare_environment
from results import digest, read_result, with_hash, write_result
from torch.nn import functional as F

STEPS = 900
SEGMENT, MEMORY = 64, 128
WINDOW = SEGMENT + MEMORY  # what a query sees at most; the block of the model without memory
STREAMS = 15  # 960 tokens a step, as are 5 rows of 192
VALID_BYTES, VALID_STREAMS = 100_000, 16
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, MAX_GRAD_NORM, BETAS = 2e-3, 100, 0.01, 1.0, (0.9, 0.99)
VOCAB, WIDTH, LAYERS, HEADS, INIT_STD = 256, 128, 3, 4, 0.05
INNER = {"xl": 256, "transfo_xl": 256, "x_transformers": 277, "llama": 214}  # so that all have about as many parameters
MODELS = {
    "xl": "modeling_xl, as the original Transformer-XL",
    "transfo_xl": "Transformers 4.57.6 TransfoXLLMHeadModel",
    "x_transformers": "x-transformers 2.31.10, memory, rotary",
    "llama": f"Transformers Llama, blocks of {WINDOW}",
}
OF_PEERS = ("weights", "transfo_xl", "x_transformers")  # these run in the other environment
PEERS = {"torch": "2.13.0", "transformers": "4.57.6", "x-transformers": "2.31.10"}
SEEDS = {"prose": (0, 1, 2), "code": (0,)}
TEXT_SEEDS = [(text, seed) for text, seeds in SEEDS.items() for seed in seeds]
TEXTS = {
    "prose": (["train/middlemarch.txt", "train/bleak_house.txt", "train/david_copperfield.txt"], "valid/vanity_fair.txt"),
    "code": (["code/cpython_stdlib_train.txt"], "code/cpython_stdlib_test.txt"),
}
# A partial result compares all models: first one seed of each text, then the other seeds.
NAMES = sorted(
    (f"{text}-{model}-{seed}" for text, seed in TEXT_SEEDS for model in MODELS),
    key=lambda name: int(name[-1]),
)
CHECKS = ["double-xl-0", "double-transfo_xl-0", "rounded-xl-0", "rounded_code-xl-0"]
TEXT_OF = {"double": "prose", "rounded": "prose", "rounded_code": "code"} | {text: text for text in TEXTS}

State = Any  # what a model carries from segment to segment; None at the start
Call = Callable[[torch.Tensor, State], tuple[torch.Tensor, State]]  # tokens (B, T), state -> logits (B, T, V), state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="the folder that holds data/train and so on")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--peers-env", type=Path, help="virtual environment of the other packages (default: DIR/peers)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a thread each")
    parser.add_argument("--steps", type=int, default=STEPS, help="a multiple of 3")
    parser.add_argument("--only-table", action="store_true", help="run nothing; show what is there")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 3 or options.steps % 3:
        parser.error(f"--steps {options.steps}: must be a multiple of 3, so that blocks of {WINDOW} hold the same bytes")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    if options.run:
        run(options.run, options)
        return 0
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    names = NAMES + CHECKS
    digests = {text: [digest(part.numpy().tobytes()) for part in texts_of(text, options.shared)] for text in TEXTS}
    settings = {name: settings_of(name, options.steps, digests[TEXT_OF[name.split("-")[0]]]) for name in names}
    todo = [name for name in names if read_result(options.output_dir, settings[name]) is None]
    failed = []
    if todo and not options.only_table:
        print(f"{len(names) - len(todo)} of {len(names)} runs are there, {len(todo)} to do", flush=True)
        peers = options.peers_env or options.output_dir / "peers"
        peers_python = prepare_environment(peers, PEERS)
        for seed in sorted({name.split("-")[2] for name in todo}):
            if not weights_folder(options.output_dir, seed).exists():
                in_process(f"weights-{seed}", peers_python, options).check_returncode()
        with ThreadPoolExecutor(options.jobs) as pool:
            waiting = {
                pool.submit(in_process, name, peers_python if name.split("-")[1] in OF_PEERS else sys.executable, options): name
                for name in todo
            }
            try:
                for future in as_completed(waiting):
                    name, code = waiting[future], future.result().returncode
                    result = read_result(options.output_dir, settings[name])
                    if code or result is None:
                        failed.append(name)
                        print(f"{name}: FAILED, exit code {code}", flush=True)
                    else:
                        print(line(result), flush=True)
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)  # else those that wait would begin
                raise
    results = {name: result for name in names if (result := read_result(options.output_dir, settings[name]))}
    print_table(results, options.steps)
    print_curves(results)
    draw(results, options.output_dir / "curves.png")
    print(f"\npython {shlex.join(sys.argv)}")
    if failed:
        print(f"error: {len(failed)} run(s) failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def in_process(name: str, python: Path | str, options: argparse.Namespace) -> subprocess.CompletedProcess:
    """One run, or the making of first weights, by this file in a process of its own."""
    arguments = ["--shared", options.shared, "--output-dir", options.output_dir, "--steps", str(options.steps), "--run", name]
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    one_thread = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run([python, __file__, *arguments], env=os.environ | one_thread | quiet, check=False)


def texts_of(text: str, shared: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and to evaluate on."""
    train_files, valid_file = TEXTS[text]
    parts = [
        "".join((shared / "data" / file).read_text(encoding="utf-8") for file in files) for files in (train_files, [valid_file])
    ]
    if text == "prose":
        # One line a paragraph. Where lines are wrapped at a width, a memory wins bits by telling where the next line ends.
        parts = [re.sub(r"(?<=\S)[^\S\n]*\r?\n(?=\S)", " ", part) for part in parts]
    train, valid = (torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8).long() for part in parts)
    return train, valid[:VALID_BYTES]


def reading(tokens: torch.Tensor, steps: int, seed: int) -> torch.Tensor:
    """What one run reads: streams (15, steps * 64 + 1) from all over the text, from a place on that the seed draws."""
    start = int(torch.randint(len(tokens), (), generator=torch.Generator().manual_seed(seed)))
    tokens = tokens.roll(-start)
    parts = tokens[: len(tokens) // STREAMS * STREAMS].view(STREAMS, -1)
    if parts.shape[1] < steps * SEGMENT + 1:
        raise SystemExit(f"the text is too short for {steps} steps; lower --steps")
    return parts[:, : steps * SEGMENT + 1]


def batch(streams: torch.Tensor, step: int, steps: int, has_memory: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step: of each stream a segment; without memory, of every third stream a block three times as
    long. Then a third of the steps reads a third of the streams, and all steps together read the same pairs."""
    if has_memory:
        rows, begin, length = streams, step * SEGMENT, SEGMENT
    else:
        third, block = divmod(step, steps // 3)
        rows, begin, length = streams[third::3], block * WINDOW, WINDOW
    return rows[:, begin : begin + length], rows[:, begin + 1 : begin + length + 1]


def build(model: str, seed: int, output_dir: Path) -> tuple[torch.nn.Module, Call]:
    """A model with its first weights, and how it is called."""
    torch.manual_seed(seed)
    built, call = {"xl": xl, "transfo_xl": transfo_xl, "x_transformers": x_transformers, "llama": llama}[model](
        weights_folder(output_dir, seed)
    )
    return built.float().train(), call


def weights_folder(output_dir: Path, seed: int | str) -> Path:
    return output_dir / f"weights-{seed}"


def xl(weights: Path) -> tuple[torch.nn.Module, Call]:
    from transformers import AutoModelForCausalLM

    import modeling_xl  # noqa: F401  registers the classes that load the former model's folder

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)

    def call(tokens: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        outputs = model(input_ids=tokens, cache=state, use_cache=True)
        return outputs.logits, outputs.cache

    return model, call


def transfo_xl(weights: Path) -> tuple[torch.nn.Module, Call]:
    model = former_classes()[1].from_pretrained(weights)

    def call(tokens: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        # Without labels it gives log-probabilities of every token, whose cross-entropy is the loss. With labels it would
        # shift them itself, and leave out the target that is the next segment's first token.
        outputs = model(tokens, mems=state)
        return outputs.prediction_scores, outputs.mems

    return model, call


def make_weights(seed: int, output_dir: Path) -> None:
    """First weights for the first two models, as the former Transformers makes and saves them."""
    _, model_class = former_classes()
    config = former_config(VOCAB, WIDTH, HEADS, INNER["transfo_xl"], LAYERS, MEMORY, init_std=INIT_STD)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=output_dir) as folder:
        model_class(config).save_pretrained(Path(folder) / "model")
        (Path(folder) / "model").rename(weights_folder(output_dir, seed))


def x_transformers(_: Path) -> tuple[torch.nn.Module, Call]:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=WIDTH,
        depth=LAYERS,
        heads=HEADS,
        attn_dim_head=WIDTH // HEADS,
        ff_mult=INNER["x_transformers"] / WIDTH,
        rotary_pos_emb=True,
        rotary_emb_dim=WIDTH // HEADS,
        attn_flash=True,
    )
    # Its output table is one of its own, as is its default: tied to the input it learns far slower from its first weights.
    model = TransformerWrapper(
        num_tokens=VOCAB, max_seq_len=WINDOW, max_mem_len=MEMORY, use_abs_pos_emb=False, attn_layers=layers
    )
    return model, lambda tokens, state: model(tokens, mems=state, return_mems=True)


def llama(_: Path) -> tuple[torch.nn.Module, Call]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER["llama"],
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=WINDOW,
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    return model, lambda tokens, _: (model(input_ids=tokens).logits, None)


def run(name: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if name.startswith("weights-"):
        make_weights(int(name.split("-")[1]), options.output_dir)
        return
    text, kind, seed = name.split("-")
    tokens, valid = texts_of(TEXT_OF[text], options.shared)
    settings = settings_of(name, options.steps, [digest(part.numpy().tobytes()) for part in (tokens, valid)])
    begin = time.perf_counter()
    model, call = build(kind, int(seed), options.output_dir)
    if text == "double":
        model.double()
    if text.startswith("rounded"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.nextafter(torch.tensor(math.inf)))
    steps = settings["steps"]
    losses = train(model, call, reading(tokens, steps, int(seed)), steps, kind != "llama")
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time()
    model.eval()
    loss, num_targets = evaluate(call, valid, kind != "llama")
    result = {
        "bits_per_byte": loss / math.log(2),
        "targets": num_targets,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "seconds_in_all": time.perf_counter() - begin,
        "losses": losses,
        "settings": settings,
    }
    write_result(options.output_dir, result)


def train(model: torch.nn.Module, call: Call, streams: torch.Tensor, steps: int, has_memory: bool) -> list[float]:
    """Trains in place; the loss of each step, in nats a byte."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    warmup = min(WARMUP_STEPS, steps // 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
        ),
    )
    losses: list[float] = []
    state: State = None
    for step in range(steps):
        inputs, targets = batch(streams, step, steps, has_memory)
        logits, state = call(inputs, state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]} at step {step}")
    return losses


@torch.no_grad()
def evaluate(call: Call, tokens: torch.Tensor, has_memory: bool) -> tuple[float, int]:
    """Nats a byte over 16 streams of the text, each from an empty memory, and how many bytes were targets.

    Each segment is scored with what was before: in the memory, or, without one, as the 128 tokens before, read again.
    """
    length = (len(tokens) - 1) // VALID_STREAMS
    rows = torch.arange(VALID_STREAMS)[:, None] * length + torch.arange(length + 1)
    streams = tokens[rows]
    total, state = 0.0, None
    for begin in range(0, length, SEGMENT):
        end = min(begin + SEGMENT, length)
        first = begin if has_memory else max(0, begin - MEMORY)
        logits, state = call(streams[:, first:end], state)
        scored = logits[:, begin - first :].double()
        total += F.cross_entropy(scored.flatten(0, 1), streams[:, begin + 1 : end + 1].flatten(), reduction="sum").item()
    return total / (VALID_STREAMS * length), VALID_STREAMS * length


def settings_of(name: str, steps: int, text_digests: list[str]) -> dict[str, Any]:
    """All that the result of a run depends on, and a hash of it."""
    text, model, seed = name.split("-")
    settings = {
        "name": name,
        "text": text,
        "model": model,
        "seed": int(seed),
        "steps": steps // 3 if text == "double" else steps,
        "texts": text_digests,
        "sizes": [VOCAB, WIDTH, LAYERS, HEADS, INNER[model], INIT_STD],
        "lengths": [SEGMENT, MEMORY, STREAMS, VALID_STREAMS],
        "training": [LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, MAX_GRAD_NORM, *BETAS],
    }
    return with_hash(settings)


def line(result: dict[str, Any]) -> str:
    settings = result["settings"]
    return (
        f"{settings['name']}: {result['bits_per_byte']:.4f} bits per byte, {result['parameters']:,} parameters, "
        f"{settings['steps']} steps in {result['seconds']:.0f} s, {result['seconds_in_all']:.0f} s in all"
    )


def print_table(results: dict[str, dict[str, Any]], steps: int) -> None:
    """Markdown: rows are models, columns texts."""
    print(f"\nbits per byte after {steps} steps of {STREAMS * SEGMENT} bytes: mean, spread (each seed)\n")
    print("| model | parameters | prose | code | CPU seconds to the end of training, mean |")
    print("| --- | --- | --- | --- | --- |")
    for model, title in MODELS.items():
        found = [results[name] for name in NAMES if name in results and name.split("-")[1] == model]
        cells = [shown([result["bits_per_byte"] for result in found if result["settings"]["text"] == text]) for text in TEXTS]
        seconds = f"{statistics.mean(result['cpu_seconds'] for result in found):.0f}" if found else ""
        parameters = f"{found[0]['parameters']:,}" if found else ""
        print(f"| {title} | {parameters} | {' | '.join(cells)} | {seconds} |")


def shown(bits: list[float]) -> str:
    if len(bits) < 2:
        return f"{bits[0]:.4f}" if bits else ""
    return f"{statistics.mean(bits):.4f}, {max(bits) - min(bits):.4f} ({', '.join(f'{value:.4f}' for value in bits)})"


def pairs(results: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The runs that begin with the same weights, and those that say what rounding does; by what the tables call them."""
    names = {f"{text}, seed {seed}": [f"{text}-{model}-{seed}" for model in ("xl", "transfo_xl")] for text, seed in TEXT_SEEDS}
    names["prose, seed 0, in double precision"] = ["double-xl-0", "double-transfo_xl-0"]
    names["prose, seed 0, modeling_xl and itself from weights a bit apart"] = ["rounded-xl-0", "prose-xl-0"]
    names["code, seed 0, modeling_xl and itself from weights a bit apart"] = ["rounded_code-xl-0", "code-xl-0"]
    return {title: (results[a], results[b]) for title, (a, b) in names.items() if a in results and b in results}


def print_curves(results: dict[str, dict[str, Any]]) -> None:
    print("\nlosses of the first two models, nats a byte: largest difference; and of their evaluation, bits a byte\n")
    print("| run | first step | first 25 steps | first 50 steps | all steps | mean of the last 100 steps | evaluation |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for title, (ours, theirs) in pairs(results).items():
        apart = [a - b for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
        largest = [max(map(abs, apart[:count])) for count in (1, 25, 50, len(apart))]
        bits = ours["bits_per_byte"] - theirs["bits_per_byte"]
        last = f"{statistics.mean(apart[-100:]):+.1e}"
        print(f"| {title} | {' | '.join(f'{value:.1e}' for value in largest)} | {last} | {bits:+.1e} |")


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """The losses of training, each point a mean of 25 steps, and above the distance of the first two."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which would touch the caller's backend
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    if not results:
        return
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, height_ratios=(2, 1))
    styles = {"xl": "-", "transfo_xl": "--", "x_transformers": "-", "llama": "-"}
    for column, text in enumerate(TEXTS):
        for number, model in enumerate(MODELS):
            if result := results.get(f"{text}-{model}-0"):
                losses = result["losses"]
                means = [statistics.mean(losses[i : i + 25]) / math.log(2) for i in range(0, len(losses) - 24, 25)]
                steps = [25 * i + 12.5 for i in range(len(means))]
                width = 3 if model == "xl" else 1.5
                axes[0, column].plot(steps, means, styles[model], color=f"C{number}", linewidth=width, label=MODELS[model])
        axes[0, column].set(title=f"{text}, seed 0", xlabel="step", ylabel="bits per byte in training", ylim=(None, 4.0))
        axes[0, column].legend(fontsize="small")
        for title, (ours, theirs) in pairs(results).items():
            if title.startswith(text):
                apart = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
                axes[1, column].plot([max(value, 1e-16) for value in apart], linewidth=0.7, label=title)
        axes[1, column].set(xlabel="step", ylabel="distance of the losses of two runs, nats", yscale="log")
        if axes[1, column].lines:
            axes[1, column].legend(fontsize="small")
    for each in axes.flat:
        each.grid(alpha=0.3)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, dpi=130, format="png")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
