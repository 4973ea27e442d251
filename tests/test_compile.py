"""`python -m dsspark compile` sees each planted fault, traces loads to arguments, and accepts a sound kernel."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")

import planted_kernels as planted
from planted_crash import CRASHING

from dsspark.kernels import compile as aot
from dsspark.kernels.compile_worker import Job, compile_job
from dsspark.kernels.inspection import (
    SHARED_LIMITS,
    UNTRACED,
    Report,
    amd_resources,
    find_problems,
    load_widths,
    narrow_offsets,
    uses_tf32,
    waits,
)

FAULTS = [
    (planted.NARROW, ["loads through x_ptr narrower than 16 bytes", "loads through w2_ptr narrower than 16 bytes"]),
    (planted.TF32, ["multiplies float32 as tf32"]),
    (planted.UNUSED, ["never loads through out_ptr"]),
    (planted.MISNAMED, ["does not compile: variant misnamed: aligned or wide_loads name ['w3_ptr']"]),
    (planted.SPILLING, ["spills "]),
    (planted.WAITING, ["has instructions that wait for another program"]),
    (planted.OVERFLOWING, ["adds offsets that were multiplied in 32 bits to x_ptr"]),
    (planted.UNDEFINED, ["does not compile: "]),
    (CRASHING, ["does not compile: the compiling process died with status 3"]),
]
SOUND = [planted.GOOD, planted.IEEE]


@pytest.fixture(scope="module")
def reports():
    """Compile every planted kernel for sm_90 in one go, the crash first: the others must survive it."""
    seen = []
    found = aot.compile_variants(
        [CRASHING, *SOUND, *(variant for variant, _ in FAULTS[:-1])], "sm_90", on_report=seen.append
    )
    assert sorted(seen, key=str) == sorted(found, key=str)
    return {report.variant: report for report in found}


@pytest.mark.parametrize(("variant", "expected"), FAULTS, ids=[variant.name for variant, _ in FAULTS])
def test_each_planted_fault_is_found(variant, expected, reports):
    problems = reports[variant.name].problems
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize("variant", SOUND, ids=lambda variant: variant.name)
def test_a_sound_kernel_has_no_problem(variant, reports):
    report = reports[variant.name]
    assert report.problems == ()
    assert 16 <= report.registers <= 255
    assert report.spilled_bytes == 0
    assert 0 < report.shared_bytes <= SHARED_LIMITS["sm_90"]
    assert report.loads.keys() == {"x_ptr", "w2_ptr", "latent_ptr"}
    assert all(set(widths) == {16} for widths in report.loads.values())


def test_every_load_of_an_unaligned_kernel_is_counted(reports):
    tile, threads = 16 * 64, 128
    expected = {"x_ptr": tile // threads, "w2_ptr": 64 * 64 // threads, "latent_ptr": tile // threads}
    assert {name: widths[2] for name, widths in reports["narrow"].loads.items()} == expected


def test_every_architecture_compiles_without_a_gpu():
    found = aot.compile_variants([planted.GOOD, planted.SPILLING], aot.ARCHITECTURES[::-1], jobs=1)
    assert [report.arch for report in found] == [arch for arch in aot.ARCHITECTURES[::-1] for _ in range(2)]
    for good, spilling in zip(found[::2], found[1::2], strict=True):
        assert good.problems == ()
        assert good.loads.keys() == {"x_ptr", "w2_ptr", "latent_ptr"}
        assert set(good.loads["w2_ptr"]) == {16}
        # gfx942 has 512 registers a thread, its accumulators counted: the planted kernel fits there, and shows as larger
        assert spilling.spilled_bytes > 0 or (spilling.arch == "gfx942" and spilling.registers > 2 * good.registers)
        assert bool(spilling.problems) == (spilling.arch == "sm_90")


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"arch: got \['sm_12'\]"):
        aot.compile_variants([planted.GOOD], "sm_12")
    with pytest.raises(ValueError, match="component: got 'nothing'"):
        aot.kernel_variants("nothing")
    assert aot.compile_variants([], "sm_90") == []


def test_one_per_kernel_keeps_the_first():
    chosen = aot.one_per_kernel([planted.NARROW, planted.SPILLING, planted.GOOD])
    assert [variant.name for variant in chosen] == ["narrow", "spilling"]


def test_variants_are_described_well_enough_to_compile():
    variants = aot.kernel_variants()
    assert {variant.name.split("/")[0] for variant in variants} >= {"verification"}
    for variant in variants:
        described = [*variant.signature, *variant.constexprs]
        assert sorted(described) == sorted(variant.kernel.arg_names), variant.name
        assert set(variant.aligned) | set(variant.wide_loads) <= set(variant.signature), variant.name


NVIDIA_IR = """
define ptx_kernel void @k(ptr addrspace(1) %0, ptr addrspace(1) noundef align(4, 8) %1, i32 %2, ptr addrspace(1) %3) {
  %4 = getelementptr i8, ptr addrspace(1) %0, i64 %.idx
  %5 = phi ptr addrspace(1) [ %4, %6 ], [ %7, %8 ]
  %7 = getelementptr bfloat, ptr addrspace(1) %5, i64 64
  %9 = tail call i32 asm sideeffect "mov.u32 $0, 0x0;\\0A\\09ld.global.b16 { $0 }, [ $1 + 0 ];", "=r,l"(ptr addrspace(1) %7)
  %10 = select i1 %c, ptr addrspace(1) %1, ptr addrspace(1) %0
  %11 = call { i32, i32 } asm sideeffect "@$4 ld.global.L1::evict_last.v2.b32 { $0, $1 }, [ $2 + 0 ];", "=r"(ptr addrspace(1) %10)
  tail call void asm "cp.async.cg.shared.global [ $0 + 0 ], [ $1 + 0 ], 0x10;", "r,l"(ptr addrspace(3) %s, ptr addrspace(1) %1)
  tail call void asm sideeffect "st.global.b32 [ $0 + 0 ], { $1 };", "l,r"(ptr addrspace(1) %3, i32 %9)
  %12 = inttoptr i64 %x to ptr addrspace(1)
  %13 = load i32, ptr addrspace(1) %12, align 4
  %14 = load i32, ptr addrspace(3) %s, align 4
"""

AMD_IR = """
define amdgpu_kernel void @k(ptr addrspace(1) inreg readonly captures(none) %0, ptr addrspace(1) %1, ptr addrspace(1) %2) {
  %3 = load <8 x bfloat>, ptr addrspace(1) %0, align 16
  %4 = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %1, i16 0, i64 2147483646, i32 159744)
  %5 = call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %4, i32 %n, i32 0, i32 0)
  %6 = getelementptr i8, ptr addrspace(1) %2, i64 %m
  %7 = load half, ptr addrspace(1) %6, align 2
"""


def test_loads_are_traced_to_arguments():
    names = ["x_ptr", "w2_ptr", "n", "out_ptr"]
    expected = {UNTRACED: {4: 1}, "w2_ptr": {8: 1, 16: 1}, "x_ptr": {2: 1, 8: 1}}
    assert load_widths(NVIDIA_IR, names) == expected
    assert load_widths(AMD_IR, ["x_ptr", "w2_ptr", "y_ptr"]) == {"x_ptr": {16: 1}, "w2_ptr": {16: 1}, "y_ptr": {2: 1}}
    with pytest.raises(ValueError, match="llvm_ir: got no function"):
        load_widths("", names)


def test_problems():
    fine = {"w2_ptr": {16: 4, 32: 1}, "stats_ptr": {4: 1}, UNTRACED: {4: 1}}
    assert find_problems("sm_90", 0, 232_448, False, fine, ()) == ()
    assert find_problems("sm_90", 0, 0, False, {"w2_ptr": {16: 1}}, ("w2_ptr",)) == ()
    assert "shared memory" in find_problems("gfx942", 0, 65_537, False, {}, ())[0]
    assert find_problems("sm_80", 8, 0, False, {}, ()) == ()
    assert "?" in find_problems("sm_90", 0, 0, False, fine, ("w2_ptr",))[0]
    assert "in 32 bits to x_ptr, y_ptr" in find_problems("sm_80", 0, 0, False, fine, (), offsets=["x_ptr", "y_ptr"])[0]
    assert "wait for another" in find_problems("gfx942", 0, 0, False, fine, (), waiting=True)[0]
    assert "1 of 8" in find_problems("sm_100", 0, 0, False, {"w2_ptr": {8: 1, 16: 9}}, ("w2_ptr",))[0]
    assert find_problems("gfx942", 0, 0, False, {"w2_ptr": {8: 1}}, ("w2_ptr",)) == ()


def test_reduced_precision_is_recognised():
    assert uses_tf32("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { ...")
    assert uses_tf32("v_mfma_f32_16x16x8_xf32 a[0:3], v[0:1]")
    assert not uses_tf32(".visible .entry not_tf32_kernel( mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")


TTIR = """
  tt.func public @k(%x_ptr: !tt.ptr<bf16> {tt.divisibility = 16 : i32}, %y_ptr: !tt.ptr<f32>, %stride: i32, %n: i64) {
    %cst = arith.constant dense<16> : tensor<64xi32> loc(#loc1)
    %0 = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32> loc(#loc1)
    %lanes = arith.muli %0, %cst : tensor<64xi32> loc(#loc1)
    %1 = tt.splat %stride : i32 -> tensor<64xi32> loc(#loc1)
    %2 = arith.muli %0, %1 : tensor<64xi32> loc(#loc1)
    %late = arith.extsi %2 : tensor<64xi32> to tensor<64xi64> loc(#loc1)
    %long = arith.extsi %0 : tensor<64xi32> to tensor<64xi64> loc(#loc1)
    %wide = arith.muli %long, %n : tensor<64xi64> loc(#loc1)
    %3 = tt.splat %x_ptr : !tt.ptr<bf16> -> tensor<64x!tt.ptr<bf16>> loc(#loc1)
    %4 = tt.addptr %3, %lanes : tensor<64x!tt.ptr<bf16>>, tensor<64xi32> loc(#loc1)
    %5 = tt.addptr %4, %FIRST : tensor<64x!tt.ptr<bf16>>, tensor<64xi64> loc(#loc1)
    %6 = tt.addptr %y_ptr, %stride : !tt.ptr<f32>, i32 loc(#loc1)
    %7 = tt.splat %6 : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>> loc(#loc1)
    %8 = tt.addptr %7, %SECOND : tensor<64x!tt.ptr<f32>>, tensor<64xi32> loc(#loc1)
"""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("wide", "lanes", []),
        ("wide", "1", []),
        ("wide", "2", ["y_ptr"]),
        ("late", "0", ["x_ptr"]),
        ("late", "2", ["x_ptr", "y_ptr"]),
    ],
)
def test_products_of_32_bits_are_found_where_they_become_offsets(first, second, expected):
    code = TTIR.replace("FIRST", first).replace("SECOND", second)
    assert narrow_offsets(code, ["x_ptr", "y_ptr"]) == expected
    again = code.replace("%1 =", "%9 =").replace("%0, %1 ", "%0, %9 ") + "    %2 = arith.constant 0 : i32 loc(#loc1)\n"
    assert narrow_offsets(again, ["x_ptr"]) == [name for name in expected if name == "x_ptr"]


def test_instructions_that_wait_are_recognised():
    for line in ("atom.global.gpu.acq_rel.cas.b32 %r1, [%rd1], 0, 1;", "ld.acquire.gpu.global.u32 %r1, [%rd1];"):
        assert waits(line)
    assert waits("ld.volatile.global.u32 %r1, [%rd1];")
    assert waits("global_atomic_cmpswap v1, v[2:3], v[4:5], off glc")
    assert not waits("atom.global.gpu.relaxed.add.u32 %r1, [%rd1], 1; ld.global.v4.b32 {%r1}, [%rd1]; bar.sync 0;")


def test_a_second_run_compiles_nothing(tmp_path):
    found = []
    for _ in range(2):
        reports = aot.compile_variants([planted.UNUSED, planted.GOOD], jobs=1, cache=str(tmp_path))
        written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        found.append(([(report.problems, report.loads, report.registers) for report in reports], written))
    assert found[0] == found[1]
    assert found[0][0][0] != found[0][0][1]  # one kernel, compiled once, of which more is asked the first time
    assert {path.name for path in found[0][1]} >= {"product_kernel.cubin", "product_kernel.ttir"}


@pytest.mark.parametrize(("does", "least", "most"), [("time.sleep(2)", 0, 1), ("subprocess.run(BURN)", 1, 60)])
def test_seconds_are_of_the_processor_and_count_the_assembler(does, least, most, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    burn = [sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"]
    path = tmp_path / f"kernels_{most}.py"
    path.write_text(f"import subprocess, time\nBURN = {burn!r}\n{does}\n", encoding="utf-8")
    sizes = {"aligned": (), "wide_loads": (), "num_warps": 4, "num_stages": 2, "arch": "sm_90"}
    report = compile_job(
        Job(variant="v", module=path.stem, path=str(path), function="f", signature={}, constexprs={}, **sizes)
    )
    assert "has no attribute 'f'" in report.problems[0]
    assert least <= report.seconds < most


def test_amd_resources_are_read_from_the_metadata():
    text = "    .private_segment_fixed_size: 12\n    .vgpr_count:     59\n    .vgpr_spill_count: 3\n"
    assert amd_resources(text) == (59, 12)
    with pytest.raises(RuntimeError, match="this Triton version is not known"):
        amd_resources("")


def command(*words):
    parser = argparse.ArgumentParser()
    aot.add_arguments(parser)
    return aot.run(parser.parse_args(words))


@pytest.mark.parametrize(("problem", "status"), [((), 0), (("spills 8 bytes a thread",), 1)])
def test_the_command_reports_and_exits(problem, status, monkeypatch, capsys):
    asked = []

    def fake(variants, arch, *, jobs, cache, on_report):
        asked.append(([variant.name for variant in variants], arch, jobs, cache))
        return [Report(variant="a", arch="sm_90"), Report(variant="b", arch="sm_90", registers=40, problems=problem)]

    monkeypatch.setattr(aot, "compile_variants", fake)
    monkeypatch.setattr(aot, "kernel_variants", lambda component: [planted.GOOD, planted.NARROW])
    assert command("--json", "--arch", "sm_90", "--one-per-kernel", "--jobs", "1") == status
    printed = json.loads(capsys.readouterr().out)
    assert (printed["compiled"], printed["failed"]) == (2, status)
    assert printed["reports"][1]["registers"] == 40
    assert asked == [(["good"], ["sm_90"], 1, None)]
    for words in ((), ("--brief", "--cache", "there")):
        assert command(*words) == status
        assert asked[-1] == (["good", "narrow"], list(aot.ARCHITECTURES), 2, "there" if words else None)
        out = capsys.readouterr().out
        assert ("b on sm_90: spills 8 bytes a thread" in out) == bool(problem)
        assert ("bytes a load" in out) == (not words)
        assert "sm_90: 2 variants in 0 processor seconds, 0 spill" in out
        assert "2 compiled with Triton" in out
    with pytest.raises(ValueError, match="--jobs: got 0"):
        command("--jobs", "0")
