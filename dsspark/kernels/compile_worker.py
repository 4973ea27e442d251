"""The process that compiles: reads pickled `Job`s from standard input, writes pickled `Report`s to standard output.

It must start without `TRITON_INTERPRET`: a kernel decorated under the interpreter cannot be compiled. It needs no GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dsspark.kernels.inspection import (
    Report,
    amd_resources,
    cuda_resources,
    find_problems,
    load_widths,
    narrow_offsets,
    uses_tf32,
    waits,
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A `Variant` for one architecture, its kernel given by the name under which another process can import it."""

    variant: str
    module: str
    path: str
    function: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    aligned: tuple[str, ...]
    wide_loads: tuple[str, ...]
    num_warps: int
    num_stages: int
    arch: str


def compile_job(job: Job) -> Report:
    """Compile one job; whatever goes wrong is a problem in its report."""
    start = _processor_seconds()
    try:
        report = _compile(job)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()) or type(error).__name__
        problem = f"does not compile: {text[-500:]} ({Path(last.filename).name}:{last.lineno})"
        return Report(variant=job.variant, arch=job.arch, problems=(problem,), seconds=_processor_seconds() - start)
    return report


def _processor_seconds() -> float:
    """Return what this process and the assemblers that it ran have used, which no busy machine adds to."""
    return sum(os.times()[:4])


def _compile(job: Job) -> Report:
    start = _processor_seconds()
    kernel: Any = getattr(_module(job.module, job.path), job.function)
    names: list[str] = kernel.arg_names
    _check_names(job, names)
    compiled = _compiled(job, kernel)
    code, nvidia = compiled.asm, job.arch.startswith("sm_")
    loads = load_widths(code["llir"], [name for name in names if name in job.signature])
    registers, spilled_bytes = cuda_resources(code["cubin"]) if nvidia else amd_resources(code["amdgcn"])
    shared_bytes = int(compiled.metadata.shared)
    text = code["ptx" if nvidia else "amdgcn"]
    pointers = [name for name, kind in job.signature.items() if kind.startswith("*")]
    problems = find_problems(
        *(job.arch, spilled_bytes, shared_bytes, uses_tf32(text), loads, job.wide_loads),
        waiting=waits(text),
        offsets=narrow_offsets(code["ttir"], pointers),
    )
    return Report(
        variant=job.variant,
        arch=job.arch,
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=shared_bytes,
        loads=loads,
        problems=problems,
        seconds=_processor_seconds() - start,
    )


def _compiled(job: Job, kernel: Any) -> Any:
    """Return what Triton makes of a kernel for the architecture of a job."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia, names = job.arch.startswith("sm_"), kernel.arg_names
    source = ASTSource(
        kernel,
        {name: job.signature.get(name, "constexpr") for name in names},
        dict(job.constexprs),
        {(names.index(name),): [["tt.divisibility", 16]] for name in job.aligned},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", int(job.arch[3:]), 32) if nvidia else GPUTarget("hip", job.arch, 64),
        options={"num_warps": job.num_warps, "num_stages": job.num_stages, "enable_fp_fusion": False},
    )


def _check_names(job: Job, names: list[str]) -> None:
    """Raise `ValueError` unless the variant describes each argument of its kernel once."""
    described = sorted((*job.signature, *job.constexprs))
    if described != sorted(names):
        difference = sorted(set(described) ^ set(names)) or "a name given twice"
        raise ValueError(f"variant {job.variant}: signature and constexprs differ from the arguments in {difference}")
    unknown = sorted({*job.aligned, *job.wide_loads} - set(job.signature))
    if unknown:
        raise ValueError(f"variant {job.variant}: aligned or wide_loads name {unknown}, which the signature lacks")


@functools.cache
def _module(name: str, path: str) -> ModuleType:
    """Import a kernel's module: by name within the package, by file elsewhere (a test's own kernels)."""
    if name.partition(".")[0] == "dsspark":
        return importlib.import_module(name)
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_compiled", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name} from {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve jobs until standard input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints must not get between the replies
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(compile_job(job), replies)
        replies.flush()


if __name__ == "__main__":
    main()
