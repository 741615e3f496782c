"""One side of a comparison: a process that builds what it is told to and takes steps when it is told to.

    python speed_worker.py THREADS

Reads a JSON object a line on standard input and answers each with one on standard output: {"build": candidate, "case": {...}},
{"step": repeats}, {"drop": true}. So two environments with different packages take turns, and only one of them computes at a
time. `speed.py` is at the other end.
"""

import ctypes
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import speed_models
import torch


def resident_mib(line: str) -> float:
    """VmRSS, what the process holds, or VmHWM, its peak."""
    with open("/proc/self/status") as status:
        return next(int(entry.split()[1]) / 1024 for entry in status if entry.startswith(line))


class Worker:
    def __init__(self) -> None:
        self.step: Callable[[], int] | None = None
        self.before = 0.0

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "build" in asked:
            self.drop()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as peak:
                peak.write("5")  # VmHWM begins anew
            self.before = resident_mib("VmRSS")
            torch.manual_seed(0)
            self.step = speed_models.build(asked["build"], **asked["case"])
            self.step()
            return {}
        if "step" in asked and self.step is not None:
            begin, cpu, tokens = time.perf_counter(), time.process_time(), 0
            for _ in range(asked["step"]):
                tokens += self.step()
            return {"wall": time.perf_counter() - begin, "cpu": time.process_time() - cpu, "tokens": tokens}
        peak = resident_mib("VmHWM") - self.before
        self.drop()
        return {"peak_mib": peak}

    def drop(self) -> None:
        self.step = None
        gc.collect()


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # whatever a package raises is a result of the comparison
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
