"""What a compiled kernel uses, read from its intermediate code and its binary: registers, spills, shared memory, load widths.

A load is attributed to a kernel argument exactly: Triton's LLVM IR is in SSA form and names every pointer, so the pointer of each
load is followed through `getelementptr`, `phi` and `select` back to a parameter. PTX or machine code would not tell.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WIDE = 16
"""Bytes of the widest load that every supported GPU has."""

UNTRACED = "?"
"""Stands for a load whose pointer leads to no argument, as when a tile of pointers changes its layout through shared memory."""

SHARED_LIMITS = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""Bytes of shared memory a program can have: beyond it a kernel compiles but cannot be launched."""

_DEFINITION = re.compile(r"^\s*(%[\w.]+) = (.*)$", re.MULTILINE)
_ESCAPE = re.compile(r"\\[0-9A-F]{2}")
_PTX_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)\b")
_PTX_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, (0x[0-9a-fA-F]+|\d+)")
_IR_LOAD = re.compile(r"^load (?:volatile )?(<[^>]+>|\w+), ptr addrspace\([18]\) ")
_IR_CALL_LOAD = re.compile(r"^(?:tail )?call (<[^>]+>|\w+) @llvm\.[\w.]*\bload\b[\w.]*\(")
_GLOBAL_POINTER = re.compile(r"ptr addrspace\([18]\) (?:[a-z]\w*(?:\([^)]*\))? )*(%[\w.]+)")
_PHI_POINTERS = re.compile(r"\[ (%[\w.]+), ")
_ASSIGNMENT = re.compile(
    r"^\s*%([\w.$]+) = ([\w.]+) ?([^:{\n]*?) ?(?:\{[^}\n]*\} )?: (.*?)(?: loc\(.*)?$", re.MULTILINE
)
_SHAPE_STEPS = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"}
_POINTER_STEPS = {*_SHAPE_STEPS, "tt.addptr", "tt.bitcast", "arith.select"}
_ARITHMETIC = {f"arith.{name}" for name in ("addi", "subi", "muli", "shli", "extsi", "extui")}
_CONSTANT, _PRODUCT = "a constant", "a product of 32 bits"
_VALUE = re.compile(r"%([\w.$]+)")
_WAITING = re.compile(
    r"\b(?:ld\.(?:volatile|acquire)|atom\.\S*(?:cas|exch|acq)|red\.\S*acq|nanosleep|s_sleep|\w*_cmpswap)"
)
_TYPE_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What compiling one variant for one architecture gave.

    Attributes:
        variant: its name.
        arch: "sm_90", "gfx942", ...
        registers: a thread; vector registers on AMD.
        spilled_bytes: of stack a thread: Triton kernels have no arrays, so whatever lies there was spilled.
        shared_bytes: of shared memory a program.
        loads: for each pointer argument, how many load instructions there are of each width in bytes.
        problems: why `python -m dsspark compile` exits with 1; empty if all is well.
        seconds: of a processor that compiling took, the assembler's included.
    """

    variant: str
    arch: str
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    loads: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


def load_widths(llvm_ir: str, arguments: Sequence[str]) -> dict[str, dict[int, int]]:
    """Return, for each argument that is read through, the number of load instructions by width in bytes.

    Args:
        llvm_ir: the text of one kernel.
        arguments: the names of its parameters, in order; parameters beyond them are Triton's own.
    """
    parameters = _parameters(llvm_ir)
    names = dict(zip(parameters, arguments, strict=False))
    definitions = dict(_DEFINITION.findall(llvm_ir))
    found: dict[str, Counter[int]] = {}
    for line in llvm_ir.splitlines():
        instruction = line.strip().partition(" = ")[2] or line.strip()
        for width in _widths(instruction):
            for root in _roots(instruction, definitions):
                found.setdefault(names.get(root, UNTRACED), Counter())[width] += 1
    return {name: dict(sorted(widths.items())) for name, widths in sorted(found.items())}


def _parameters(llvm_ir: str) -> list[str]:
    """Return the SSA names of the kernel's parameters."""
    start = re.search(r"^define .*? @\w+\(", llvm_ir, re.MULTILINE)
    if start is None:
        raise ValueError("llvm_ir: got no function definition, expected the LLVM IR of one kernel; pass asm['llir']")
    depth, names, word = 1, [], ""
    for character in llvm_ir[start.end() :]:
        depth += (character == "(") - (character == ")")
        if depth == 0 or (character == "," and depth == 1):
            names.append(word.split()[-1])
            word = ""
        else:
            word += character
        if depth == 0:
            break
    return names


def _widths(instruction: str) -> list[int]:
    """Return the bytes that each global load in one LLVM instruction reads a lane."""
    if " asm " in instruction:
        instruction = _ESCAPE.sub(" ", instruction)  # "\0A\09ld.global" is one word otherwise
        loads = [int(lanes or 1) * int(bits) // 8 for lanes, bits in _PTX_LOAD.findall(instruction)]
        return loads + [int(size, 0) for size in _PTX_ASYNC_COPY.findall(instruction)]
    match = _IR_LOAD.match(instruction) or _IR_CALL_LOAD.match(instruction)
    return [] if match is None else [_type_bits(match[1]) // 8]


def _type_bits(name: str) -> int:
    vector = re.fullmatch(r"<(\d+) x (\w+)>", name)
    if vector is not None:
        return int(vector[1]) * _type_bits(vector[2])
    return _TYPE_BITS[name] if name in _TYPE_BITS else int(name.removeprefix("i"))


def _roots(instruction: str, definitions: Mapping[str, str]) -> set[str]:
    """Return the values that the pointers of an instruction come from: parameters, or what cannot be followed."""
    pending, seen, roots = _GLOBAL_POINTER.findall(instruction), set(), set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        definition = definitions.get(value)
        if definition is None:
            roots.add(value)
            continue
        sources = _PHI_POINTERS if definition.startswith("phi ") else _GLOBAL_POINTER
        pointers = [] if _widths(definition) else sources.findall(definition)
        pending += pointers
        if not pointers:
            roots.add(value)
    return roots


def cuda_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and spilled bytes a thread, from the binary that would run."""
    import triton.backends.nvidia as nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return _number(r"\bREG:(\d+)", text), _number(r"\bSTACK:(\d+)", text) + _number(r"\bLOCAL:(\d+)", text)


def amd_resources(assembly: str) -> tuple[int, int]:
    """Return vector registers and spilled bytes a thread, from the metadata of the assembly."""
    return (
        _number(r"^\s*\.vgpr_count:\s*(\d+)", assembly),
        _number(r"^\s*\.private_segment_fixed_size:\s*(\d+)", assembly),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise RuntimeError(
            f"resources: found no {pattern!r} in the tool's output, expected one; this Triton version is not known"
        )
    return int(match[1])


def uses_tf32(code: str) -> bool:
    """Return whether an instruction of the PTX (or AMD assembly) multiplies float32 in reduced precision."""
    return re.search(r"\.tf32\b|_xf32\b", code) is not None


def waits(code: str) -> bool:
    """Return whether the PTX (or AMD assembly) has what a wait for another program is made of: locks, ordered loads, sleep."""
    return _WAITING.search(code) is not None


def narrow_offsets(ttir: str, arguments: Sequence[str]) -> list[str]:
    """Return the pointer arguments to which an offset is added that was multiplied in 32 bits, and so could overflow: row * stride.

    An index that is not multiplied, or by a constant of the kernel, counts entries or programs, of which there are fewer.

    Args:
        ttir: Triton's first intermediate code of one kernel, whose parameters have the names of the source.
        arguments: which parameters to look at.
    """
    origin: dict[str, str | None] = {name: name for name in arguments}
    values: dict[str, str | None] = {}
    found = set()
    for result, operation, operands, types in _ASSIGNMENT.findall(ttir):
        names = _VALUE.findall(operands)
        source = next((origin[name] for name in names if origin.get(name)), None)
        value = _value(operation, types, [values.get(name) for name in names])
        pointer = source if operation in _POINTER_STEPS else None
        if pointer and operation == "tt.addptr" and values.get(names[1]) == _PRODUCT:
            found.add(pointer)
        origin[result], values[result] = pointer, value  # a name may have meant another value before
    return sorted(found)


def _value(operation: str, types: str, operands: Sequence[str | None]) -> str | None:
    """Return what is known of the result of an operation, given the same of its operands."""
    if operation == "arith.constant":
        return _CONSTANT
    if operation in _SHAPE_STEPS:
        return operands[0]
    if operation not in _ARITHMETIC:
        return None
    narrow = operation == "arith.muli" and types.rstrip("> ").endswith("i32") and _CONSTANT not in operands
    return _PRODUCT if narrow or _PRODUCT in operands else None


def find_problems(
    arch: str,
    spilled_bytes: int,
    shared_bytes: int,
    tf32: bool,
    loads: Mapping[str, Mapping[int, int]],
    wide_loads: Sequence[str],
    *,
    waiting: bool = False,
    offsets: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return what a compiled variant breaks; empty if all is well.

    Every load through a pointer in `wide_loads` must be at least 16 bytes on NVIDIA, and there must be one. Where a variant has
    such pointers, a narrow load that cannot be traced to an argument counts as broken too. On AMD a wave has 64 lanes, so that the
    same tile gives each half as much: widths are reported there, not judged.

    `offsets` names the pointers to which offsets are added that were multiplied in 32 bits; `waiting` tells whether the code could wait
    for another program.
    """
    problems = []
    if waiting:
        problems.append("has instructions that wait for another program, which may not be running")
    if offsets:
        problems.append(f"adds offsets that were multiplied in 32 bits to {', '.join(offsets)}")
    if arch == "sm_90" and spilled_bytes:
        problems.append(f"spills {spilled_bytes} bytes a thread")
    if shared_bytes > SHARED_LIMITS[arch]:
        problems.append(f"needs {shared_bytes} bytes of shared memory, {arch} has {SHARED_LIMITS[arch]}")
    if tf32:
        problems.append("multiplies float32 as tf32")
    for name in wide_loads:
        if name not in loads and UNTRACED not in loads:
            problems.append(f"never loads through {name}")
    for name in (*wide_loads, UNTRACED) if wide_loads and arch.startswith("sm_") else ():
        narrow = {width: count for width, count in loads.get(name, {}).items() if width < WIDE}
        if narrow:
            listed = ", ".join(f"{count} of {width}" for width, count in narrow.items())
            problems.append(f"loads through {name} narrower than {WIDE} bytes: {listed}")
    return tuple(problems)
