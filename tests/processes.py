"""Processes of a test: started, listened to, ended, and joined through gloo as torchrun joins them."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest


@pytest.fixture(scope="module")
def forks(request):
    """Starts processes, all forked from one that has made the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([request.module.__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()

    def start(call, *args, **variables) -> tuple[BaseProcess, Connection]:
        """Runs call(*args, say), where say(...) sends something here, with these environment variables."""
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(sender, variables, call, *args), daemon=True)
        process.start()
        sender.close()
        return process, receiver

    return start


def child(sender, variables, call, *args) -> None:
    os.environ.update(variables)
    for stream in (1, 2):  # progress and warnings, which nobody reads
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        call(*args, sender.send)
    except BaseException:
        sender.send(traceback.format_exc())
        raise


def end(*started: tuple[BaseProcess, Connection], timeout=200) -> None:
    """Waits until all are done, or one has failed, which others may wait for; all must succeed."""
    late = time.monotonic() + timeout
    said: list[list] = [[] for _ in started]
    while True:
        codes = [process.exitcode for process, _ in started]
        for (_, receiver), heard in zip(started, said, strict=True):
            with contextlib.suppress(EOFError):
                while receiver.poll():
                    heard.append(receiver.recv())
        if all(code == 0 for code in codes) or any(codes) or time.monotonic() > late:
            break
        time.sleep(0.02)
    for process, receiver in started:
        process.kill()
        process.join()
        receiver.close()
    assert codes == [0] * len(codes), [heard[-1:] for heard in said]


def as_processes(forks, number: int, call, *args) -> None:
    """Runs call(*args) in processes that find each other through gloo, as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(number)}
    end(*[forks(call, *args, RANK=str(n), LOCAL_RANK=str(n), **common) for n in range(number)])
