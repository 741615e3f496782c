"""Environments of other packages, which cannot live beside this one's."""

import subprocess
import sys
from pathlib import Path


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
