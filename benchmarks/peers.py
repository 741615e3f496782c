"""Other packages: their environments, which cannot live beside this one's, and the former Transformers' Transformer-XL."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any


def prepare_environment(folder: Path, packages: dict[str, str]) -> Path:
    """The Python of an environment with these versions of packages, `torch` first; it is made, or made whole, if need be."""
    python = folder / "bin" / "python"
    wanted = (
        f"from importlib.metadata import version as v; assert all(v(n).split('+')[0] == x for n, x in {list(packages.items())})"
    )
    if python.exists() and subprocess.run([python, "-c", wanted], capture_output=True, check=False).returncode == 0:
        return python
    print(f"making the environment {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pinned = [f"{name}=={version}" for name, version in packages.items()]
    # PyTorch first and alone: as somebody else's dependency it may come as another build.
    for part in (pinned[:1], [*pinned[1:], "numpy"]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *part], check=True)
    return python


@functools.cache  # what it mends is mended once
def former_classes() -> tuple[Any, Any]:
    """Config and model of the former Transformers, with its one call mended that no PyTorch accepts.

    In double precision it would mask the scores in single; that is mended too.
    """
    import torch

    as_it_is, as_single = torch.Tensor.type_as, torch.Tensor.float
    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else as_single(self)
    torch.Tensor.type_as = lambda self, other=None, dtype=None: self.to(dtype) if other is None else as_it_is(self, other)
    from transformers.models.deprecated.transfo_xl import TransfoXLConfig, TransfoXLLMHeadModel

    return TransfoXLConfig, TransfoXLLMHeadModel


def former_config(vocab: int, width: int, heads: int, inner: int, layers: int, memory: int, **fields: Any) -> Any:
    """One without clusters, clamped distances or dropout, in which each projection is its own."""
    return former_classes()[0](
        vocab_size=vocab,
        cutoffs=[],
        d_model=width,
        d_embed=width,
        n_head=heads,
        d_head=width // heads,
        d_inner=inner,
        n_layer=layers,
        div_val=1,
        mem_len=memory,
        clamp_len=-1,
        same_length=False,
        proj_share_all_but_first=False,
        dropout=0.0,
        dropatt=0.0,
        **fields,
    )
