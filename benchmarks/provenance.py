"""Where a figure comes from: machine, versions, commit, date. No result is written without it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """Return the processor's name as Linux tells it, or what Python knows."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def slug(device: str) -> str:
    """Return the folder of a device's results: the GPU's name, or "cpu"."""
    if device != "cuda":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=RESULTS.parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def commit() -> str:
    """Return the commit, marked where files of the tree differ from it."""
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return head if changed in ("", "unknown") else f"{head} with changes"


def provenance(device: str) -> dict[str, str]:
    """Return where figures measured now on a device come from."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
    }
    if hasattr(os, "getloadavg"):
        facts["load"] = f"{os.getloadavg()[0]:.1f} processes wanted a core in the last minute, this one included"
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        facts["cuda"] = str(torch.version.cuda or torch.version.hip)
        facts |= {peer: _version(peer) for peer in ("vllm", "flashinfer-python", "sglang", "sgl-kernel")}
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
