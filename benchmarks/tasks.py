"""Every task by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from benchmarks.cases import Case
from benchmarks.sizes import Size
from benchmarks.tasks_planning import attention, calibration, confidence, packing, scheduler
from benchmarks.tasks_sampling import markov, rejection
from benchmarks.tasks_training import losses

TASKS: dict[str, tuple[str, Callable[[Size, str], Case]]] = {
    "markov": ("markov", markov),
    "markov, recomputed": ("markov", functools.partial(markov, keep_logits=False)),
    "confidence": ("confidence", confidence),
    "calibration": ("calibration", calibration),
    "scheduler": ("scheduler", scheduler),
    "verification, pack": ("verification", packing),
    "verification, attention": ("verification", attention),
    "rejection": ("rejection", rejection),
    "losses": ("losses", losses),
}
"""Task name: its component, and what builds it from a size and a device."""
