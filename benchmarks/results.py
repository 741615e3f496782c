"""Results of a benchmark's runs, a file each, by which the same command does only what is missing.

Standard library only: benchmarks also run in environments of other packages.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def with_hash(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, `name` among them, and a hash of them: a result made with others does not count."""
    return {**settings, "hash": digest(json.dumps(settings, sort_keys=True).encode())}


def read_result(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The finished run with these settings, or None."""
    try:
        result = json.loads((folder / f"{settings['name']}.json").read_text())
        return result if result["settings"]["hash"] == settings["hash"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_result(folder: Path, result: dict[str, Any]) -> None:
    path = folder / f"{result['settings']['name']}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(temporary, path)
