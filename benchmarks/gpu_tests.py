"""Run the tests that need a GPU, one process a file and several at a time: Triton compiles on one core a process.

    python -m benchmarks.gpu_tests [--workers N] [--seconds S]

Files that are not done after S seconds are ended and count as failed, so that a machine which is lent for minutes still gets to the
benchmarks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_TESTS = 5  # what pytest returns where nothing was collected


def gpu_files(folders: Sequence[Path] = (ROOT / "tests", ROOT / "property_tests")) -> list[Path]:
    """Return the files with tests that are marked for a GPU, the longest first."""
    found = [path for folder in folders for path in folder.glob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    return sorted(found, key=lambda path: -path.stat().st_size)


def run_file(path: Path, deadline: float) -> tuple[int, str]:
    """Return pytest's exit code for a file and what it printed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(path)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(0.0, deadline - time.monotonic())
        )
    except subprocess.TimeoutExpired as stopped:
        printed = stopped.stdout or b""
        return 1, (printed if isinstance(printed, str) else printed.decode(errors="replace")) + "\nnot done in time"
    return (0 if done.returncode == _NO_TESTS else done.returncode), done.stdout + done.stderr


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a test fails or is not done in time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tests", description=__doc__)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes at a time")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all of them (default 240)")
    args = parser.parse_args(arguments)
    deadline, failed = time.monotonic() + args.seconds, 0
    paths = gpu_files()
    with ThreadPoolExecutor(args.workers) as pool:
        for path, (code, printed) in zip(paths, pool.map(lambda path: run_file(path, deadline), paths), strict=True):
            lines = printed.rstrip().splitlines()
            print(f"{path.name}: {lines[-1] if lines else 'nothing printed'}")
            if code:
                failed += 1
                print("\n".join(lines[-60:]))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
