"""How fast is it, beside others? Runs a reference and a candidate in turn, a step of one and a step of the other, for every
case in which they do the same work, and prints their ratio.

    python benchmarks/speed.py --output-dir DIR [--peers-env DIR] [--only TEXT ...] [--layers 12] [--threads 2] [--metric wall]

A ratio is the seconds a token of the reference over those of the candidate: above 1 the candidate is faster. It is the median
over the pairs of steps. Beside it stands the peak of the process above what it held before the model was made. The reference is
Transformers' Llama unless the table says otherwise. `speed_models.py` says what each case is.

`--metric cpu --threads 1 --layers 4` counts processor time instead of seconds on the wall, for a machine that has other work.
`--only` takes comparisons whose name holds one of the words, such as `decode` or `alibi-recurrence`.

Each comparison leaves its figures in DIR, and the same command does only what is missing there. DIR/speed.json holds all. The
former Transformers, x-transformers and others need another environment, by default DIR/peers, which is made if it is not there.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import prepare_environment
from results import read_result, with_hash, write_result

from modeling_xl.positions import POSITION_SCHEMES

PEERS = {
    "torch": "2.13.0",
    "transformers": "4.57.6",
    "x-transformers": "2.31.10",
    "compressive-transformer-pytorch": "0.4.0",
    "infini-transformer-pytorch": "0.2.1",
    "performer-pytorch": "1.1.4",
    "linear-attention-transformer": "0.19.1",
}
OF_PEERS = {
    "transfo_xl": "Transformers 4.57.6 TransfoXL",
    "x_rotary": "x-transformers, rotary, flash",
    "x_t5": "x-transformers, T5 bias",
    "x_alibi": "x-transformers, ALiBi",
    "compressive_transformer": "compressive-transformer-pytorch",
    "infini_transformer": "infini-transformer-pytorch",
    "performer": "performer-pytorch",
    "linear_transformer": "linear-attention-transformer",
}
WITH_MEMORY = [name for name in OF_PEERS if name not in ("performer", "linear_transformer")]
CASES: dict[str, dict[str, Any]] = {
    "train": {"kind": "train", "batch": 4, "tokens": 256, "memory": 256},
    "read 1600": {"kind": "read", "tokens": 128, "memory": 1600},
    "read 3800": {"kind": "read", "tokens": 128, "memory": 3800},
    "prefill 2048": {"kind": "prefill", "tokens": 2048, "memory": 1536},
    "decode 1600": {"kind": "decode", "memory": 1600},
    "decode 3800": {"kind": "decode", "memory": 3800},
    "train 2048": {"kind": "train", "tokens": 2048},
    "train 8192": {"kind": "train", "tokens": 8192},
    "decode 100k": {"kind": "decode", "memory": 100_000, "calls": 4},
    "train, 512 keys": {"kind": "train", "batch": 4, "tokens": 256, "memory": 512},
    "attention": {"kind": "attend", "tokens": 2048},
    "attention, trained": {"kind": "attend_train", "tokens": 2048},
}
TABLE_9 = (800, 1800, 2800, 3800)
SETTINGS = ("onednn", "bfloat16", "compile")
LEAST_SECONDS = 0.3  # a sample repeats shorter steps, as the first one after another process's turn finds nothing in caches


@dataclass(frozen=True)
class Comparison:
    column: str  # of the table
    reference: str
    reference_case: dict[str, Any]
    candidate: str
    candidate_case: dict[str, Any]

    @property
    def full_name(self) -> str:
        return f"{self.column} {self.candidate}"


def comparisons() -> Iterator[Comparison]:
    def against(name: str, *candidates: str, reference: str = "llama") -> Iterator[Comparison]:
        case = CASES[name]
        for candidate in candidates:
            yield Comparison(name, reference, case, candidate, case)

    rows = [f"{scheme}-recurrence" for scheme in POSITION_SCHEMES]
    slots = [f"{scheme}-compressive" for scheme in POSITION_SCHEMES]
    sums = [f"{scheme}-linear" for scheme in POSITION_SCHEMES]
    yield from against("train", *rows, *WITH_MEMORY)
    for name in ("read 1600", "read 3800", "decode 1600", "decode 3800"):
        # Where half of what is kept are slots, M is for the others what they hold in all.
        yield from against(name, *rows, *slots, *sums, "llama_static", *WITH_MEMORY)
    yield from against("prefill 2048", *rows, *slots, *sums)
    for name in ("train 2048", "train 8192"):
        yield from against(name, *sums, *(["performer", "linear_transformer"] if name == "train 2048" else []))
    yield from against("decode 100k", *sums, "llama_static")
    for row, slot in zip(rows, slots, strict=True):
        yield from against("train, 512 keys", slot, reference=row)
    for name in ("train", "read 3800", "decode 3800"):
        for setting in SETTINGS:
            yield Comparison(f"{name}, settings", "xl-recurrence", CASES[name], f"xl-recurrence+{setting}", CASES[name])
    for name in ("attention", "attention, trained"):
        yield from against(name, "attention_xl", reference="attention")
    for length in TABLE_9:
        window, read = {"kind": "window", "memory": length}, {"kind": "read", "tokens": 128, "memory": length}
        for candidate in ("xl-recurrence", "transfo_xl"):
            yield Comparison(f"window {length}", "llama", window, candidate, read)
        cached = {"kind": "decode", "memory": length, "calls": 16}
        yield Comparison(f"window {length}", "llama", window, "llama", cached)


class Process:
    """`speed_worker.py` in an environment."""

    def __init__(self, python: Path | str, options: argparse.Namespace):
        variables = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        variables |= {"TRUST_REMOTE_CODE": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        if options.metric == "cpu":  # threads that wait would count
            variables["OMP_WAIT_POLICY"] = "PASSIVE"
        worker = Path(__file__).with_name("speed_worker.py")
        self.process = subprocess.Popen(
            [python, worker, str(options.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=inherited | variables,
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self.process.wait()}, as for want of memory")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(comparison: Comparison, pythons: tuple[Path | str, Path | str], options: argparse.Namespace) -> dict[str, Any]:
    """The ratio of speeds, seconds a token of both, and their peaks. Fresh processes, whose memory is their own."""
    sides = [Process(python, options) for python in pythons]
    try:
        named = ((comparison.reference, comparison.reference_case), (comparison.candidate, comparison.candidate_case))
        for side, (name, case) in zip(sides, named, strict=True):
            side.ask(build=name, case={**case, "layers": options.layers})
        repeats = [max(1, round(LEAST_SECONDS / side.ask(step=1)["wall"])) for side in sides]
        pairs = []
        for _ in range(options.rounds):
            answers = [side.ask(step=number) for side, number in zip(sides, repeats, strict=True)]
            pairs.append([answer[options.metric] / answer["tokens"] for answer in answers])
        peaks = [side.ask(drop=True)["peak_mib"] for side in sides]
    finally:
        for side in sides:
            side.close()
    return {
        "ratio": statistics.median(reference / candidate for reference, candidate in pairs),
        "ratios": [reference / candidate for reference, candidate in pairs],
        "seconds_a_token": [statistics.median(side) for side in zip(*pairs, strict=True)],
        "peak_mib": peaks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--peers-env", type=Path, help="virtual environment of the other packages (default: DIR/peers)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="comparisons whose name holds one of these")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of steps a comparison")
    parser.add_argument("--metric", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    chosen = [c for c in comparisons() if any(word in c.full_name for word in options.only)]
    others: Path | str = ""
    if any(c.candidate in OF_PEERS for c in chosen):
        others = prepare_environment(options.peers_env or options.output_dir / "peers", PEERS)
    run = {"layers": options.layers, "threads": options.threads, "rounds": options.rounds, "metric": options.metric}
    results = []
    for comparison in chosen:
        settings = with_hash({"name": comparison.full_name.replace(" ", "_"), **asdict(comparison), **run, "packages": PEERS})
        result = read_result(options.output_dir, settings)
        if result is None:
            try:
                python = others if comparison.candidate in OF_PEERS else sys.executable
                figures = compare(comparison, (sys.executable, python), options)
            except RuntimeError as error:
                figures = {"error": str(error)}
            result = {"settings": settings, **figures}
            write_result(options.output_dir, result)
        results.append(result)
        print(f"{comparison.full_name}: {cell(result)}", flush=True)
    print()
    print_tables(results)
    write_result(options.output_dir, {"settings": {"name": "speed"}, "machine": machine(), "results": results})
    return int(any("error" in result and "NotImplemented" not in result["error"] for result in results))


def cell(result: dict[str, Any]) -> str:
    if "error" in result:
        return "-" if "NotImplemented" in result["error"] else f"failed ({result['error']})"
    return f"{result['ratio']:.2f} [{result['peak_mib'][1]:,.0f}]"


def print_tables(results: list[dict[str, Any]]) -> None:
    """One line a candidate, one column a case, in several tables as candidates differ by case."""
    of = {(r["settings"]["column"], r["settings"]["candidate"]): r for r in results}
    groups: dict[tuple[str, ...], list[str]] = {}
    columns = list(dict.fromkeys(name for name, _ in of))
    for column in columns:
        groups.setdefault(tuple(candidate for name, candidate in of if name == column), []).append(column)
    for candidates, names in groups.items():
        print(f"| speed as a ratio [peak MiB] | {' | '.join(names)} |")
        print("| --- " * (1 + len(names)) + "|")
        peaks = [f"1.00 [{of[name, candidates[0]]['peak_mib'][0]:,.0f}]" for name in names]
        print(f"| {of[names[0], candidates[0]]['settings']['reference']} (reference) | {' | '.join(peaks)} |")
        for candidate in candidates:
            cells = [cell(of[name, candidate]) for name in names]
            print(f"| {OF_PEERS.get(candidate, candidate)} | {' | '.join(cells)} |")
        print()


def machine() -> dict[str, Any]:
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
