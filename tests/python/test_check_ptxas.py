"""tools/check_ptxas.py: reads what nvcc says, and tells more from less."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("check_ptxas", ROOT / "tools/check_ptxas.py")
check_ptxas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_ptxas)
Resources = check_ptxas.Resources

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Zk' for 'sm_80'
ptxas info    : Function properties for _Zk
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 44 registers, used 1 barriers, 16 bytes cumulative stack size, 512 bytes smem, 520 bytes cmem[0]
ptxas info    : Compile time = 115.950 ms
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function '_Zk'
ptxas info    : Function properties for _Zcalled
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
seconds 2.791 0.609
"""


def test_report():
    kernels, remarks, seconds = check_ptxas.read_report(REPORT)
    assert kernels == {("sm_80", "_Zk"): Resources(44, 16, 12, 8, 512)}
    assert [arch for arch, _ in remarks] == ["sm_80"] and "wgmma" in remarks[0][1]
    assert seconds == pytest.approx(3.4)


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("void a::b::steps<(int)64, (a::Layout)1>(a::P)", "steps<64, 1>"),
        ("a::(anonymous namespace)::kernel(a::P, int)", "kernel"),
        ("void a::states<__nv_bfloat16, 128, 2>(a::P<(int)3>)", "states<bf16, 128, 2>"),
    ],
)
def test_short_name(demangled, short):
    assert check_ptxas.short_name(demangled) == short


def compared(now, remarks=frozenset(), compiler="nvcc 1"):
    key, before = ("x.cu", "sm_80", "k<1>"), Resources(40, 8, 4, 4, 16)
    text = check_ptxas.table_text("nvcc 1", {key: before}, {("x.cu", "sm_80", "ptxas warning: old")})
    table = check_ptxas.read_table(text)
    assert table == ("nvcc 1", {key: before}, {("x.cu", "sm_80", "ptxas warning: old")})
    return check_ptxas.compare(({key: now}, set(remarks)), table, compiler)


@pytest.mark.parametrize("more", [(41, 8, 4, 4, 16), (40, 9, 4, 4, 16), (40, 8, 5, 4, 16), (40, 8, 4, 5, 16), (40, 8, 4, 4, 17)])
def test_more_fails(more):
    fails, told = compared(Resources(*more))
    assert len(fails) == 1 and "x.cu: k<1> (sm_80)" in fails[0] and not told


def test_less_is_told():
    fails, told = compared(Resources(39, 0, 0, 0, 0))
    assert not fails and len(told) == 5


def test_a_new_remark_fails():
    assert not compared(Resources(40, 8, 4, 4, 16), remarks={("x.cu", "sm_80", "ptxas warning: old")})[0]
    assert len(compared(Resources(40, 8, 4, 4, 16), remarks={("x.cu", "sm_80", "ptxas warning: new")})[0]) == 1


def test_another_compiler_spreads_registers_otherwise():
    fails, told = compared(Resources(48, 8, 4, 4, 16), compiler="nvcc 2")
    assert not fails and len(told) == 2
    assert len(compared(Resources(48, 8, 9, 4, 16), compiler="nvcc 2")[0]) == 1


def test_new_kernels_and_architectures():
    table = ("nvcc 1", {("x.cu", "sm_80", "k"): Resources()}, set())
    built = {("x.cu", "sm_80", "new"): Resources(), ("x.cu", "sm_120", "k"): Resources()}
    fails, told = check_ptxas.compare((built, set()), table, "nvcc 1")
    assert len(fails) == 1 and "new" in fails[0]
    assert any("sm_120" in line for line in told) and any("gone" in line for line in told)
