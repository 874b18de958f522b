"""What one runs around training: the environment.

    ./run.sh doctor                          what is installed, what each path will use, and what is wrong
    python check.py requirements FILE ...    exit 1 with the pip line for what the active environment lacks

Only the standard library is imported here, and no Neuron device is touched: a running job keeps its cores.
"""

import importlib.metadata
import shlex
import sys
from pathlib import Path


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(files: list[str]) -> int:
    """Compare the active environment with the pinned requirement files."""
    lines = [line.strip() for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    missing = [f"{name}=={version}" for name, version in pins.items() if installed(name) is None]
    if missing:
        print(f"error: this environment lacks {', '.join(missing)}. Install it with:", file=sys.stderr)
        print(f"  {shlex.quote(sys.executable)} -m pip install {' '.join(missing)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(requirements(sys.argv[2:]))
