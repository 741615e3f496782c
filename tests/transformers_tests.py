"""The tests that all models of Transformers share, as modules, out of the source distribution that `make test-transformers`
fetches; and stand-ins for those of their helpers that the distribution leaves out."""

import contextlib
import importlib
import os
import sys
import types
from pathlib import Path

import torch

PACKAGE = "transformers_tests_of_all_models"
FOLDER = os.environ.get("TRANSFORMERS_TESTS", "")


def as_module(name: str, **contents) -> None:
    module = types.ModuleType(f"{PACKAGE}.{name}")
    vars(module).update(contents)
    sys.modules[module.__name__] = module


def load(name: str) -> types.ModuleType:
    """A module of the folder that TRANSFORMERS_TESTS names."""
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [FOLDER]
        sys.modules[PACKAGE] = package
        for folder in ("generation", "exporters", "utils"):
            as_module(folder, __path__=[str(Path(FOLDER) / folder)])
        # What they check of generation is in test_generate.py and test_reports_cache.py.
        as_module("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
        as_module("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
        as_module("utils.test_configuration_utils", config_common_kwargs={"return_dict": False, "output_hidden_states": True})
        as_module(
            "distributed_testing_utils",
            run_distributed=run_distributed,
            _start_rank_processes=start_rank_processes,
            _get_distributed_backend=lambda: "gloo",
            _get_distributed_device_type=lambda: "cpu",
            _get_rank_device=lambda rank: torch.device("cpu"),
            _set_rank_device=lambda rank: None,
        )
    return importlib.import_module(f"{PACKAGE}.{name}")


# Starts one call in each of several processes; set by the test, which has the means.
start = None


def start_rank_processes(function, args, nprocs: int) -> None:
    start(nprocs, in_a_process, function.__module__, function.__name__, pickled(args), False)


def run_distributed(world_size: int):
    def of(function):
        return lambda *args: start(world_size, in_a_process, function.__module__, function.__name__, pickled(args), True)

    return of


class Named:
    """A function of one of these modules, which another process has to load first."""

    def __init__(self, function):
        self.module, self.name = function.__module__, function.__name__


def pickled(values: tuple) -> tuple:
    """Values that another process can read."""
    is_foreign = [isinstance(value, types.FunctionType) and value.__module__.startswith(PACKAGE) for value in values]
    values = tuple(Named(value) if foreign else value for value, foreign in zip(values, is_foreign, strict=True))
    return tuple(pickled(value) if type(value) is tuple else value for value in values)


def unpickled(values: tuple) -> tuple:
    found = []
    for value in values:
        if isinstance(value, Named):
            value = getattr(load(value.module.removeprefix(f"{PACKAGE}.")), value.name)
        found.append(unpickled(value) if type(value) is tuple else value)
    return tuple(found)


def in_a_process(module: str, name: str, args: tuple, joins: bool, say) -> None:
    """Runs the function with its rank first, inside a group of processes if it does not make one itself."""
    function = getattr(load(module.removeprefix(f"{PACKAGE}.")), name)
    with contextlib.ExitStack() as after:
        if joins:
            torch.distributed.init_process_group("gloo")
            after.callback(torch.distributed.destroy_process_group)
        function(int(os.environ["RANK"]), *unpickled(args))
