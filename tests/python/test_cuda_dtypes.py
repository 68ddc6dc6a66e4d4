"""B09 on a CUDA device: mixed dtypes and autocast do what they do on the CPU: results and gradients of the same dtypes, or the
same error, which names the tensor."""

import itertools

import pytest
import torch
from bounds import bound, relative_rms
from on_cuda import moved_all, skip_without_cuda
from problems import TENSORS, Problem, make, with_gradients

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_pool,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_pool,
)

skip_without_cuda()

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
TRAINED = pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
POOLS = pytest.mark.parametrize("function", [chunk_gated_delta_rule_pool, recurrent_gated_delta_rule_pool])
AUTOCAST = pytest.mark.parametrize("autocast", [BF16, F16])


def problem(**options):
    return make(Problem(tokens=70, gate="computed", beta="sigmoid", **options))


def outcome(function, arguments, device, autocast):
    """Dtypes of results and of gradients; or the error. And the results."""
    leaves = with_gradients(moved_all(arguments, device))
    try:
        with torch.autocast(device, dtype=autocast or BF16, enabled=autocast is not None):
            o, state = function(**leaves, output_final_state=True)
        (o.float().sum() + state.sum()).backward()
    except (TypeError, ValueError, NotImplementedError) as error:
        return (type(error), str(error)), None
    gradients = {name: leaves[name].grad for name in TENSORS if leaves.get(name) is not None}
    dtypes = {"o": o.dtype, "state": state.dtype} | {name: x.dtype for name, x in gradients.items()}
    return dtypes, {"o": o.detach(), "state": state.detach()} | gradients


@TRAINED
@AUTOCAST
@pytest.mark.parametrize("dtype_v", DTYPES)
def test_B09_autocast_as_on_the_cpu(function, autocast, dtype_v):
    """q and k follow v: as if they had been cast before, bit for bit, gradients rounded to the dtypes of their inputs."""
    for dtype_q, dtype_k in itertools.product(DTYPES, repeat=2):
        a = problem()
        a |= {"q": a["q"].to(dtype_q), "k": a["k"].to(dtype_k), "v": a["v"].to(dtype_v)}
        expected, _ = outcome(function, a, "cpu", autocast)
        dtypes, got = outcome(function, a, "cuda", autocast)
        assert dtypes == expected, (dtype_q, dtype_k)
        assert dtypes["o"] == dtype_v and all(dtypes[name] == a[name].dtype for name in TENSORS), (dtype_q, dtype_k)
        cast = a | {"q": a["q"].to(dtype_v), "k": a["k"].to(dtype_v)}
        _, truth = outcome(function, cast, "cuda", None)
        for name, x in got.items():
            assert torch.equal(x, truth[name].to(x.dtype)), (name, dtype_q, dtype_k)


@TRAINED
def test_B09_without_autocast_the_tensor_is_named(function):
    for dtypes in itertools.product(DTYPES, repeat=3):
        a = problem()
        a |= {name: a[name].to(dtype) for name, dtype in zip("qkv", dtypes, strict=True)}
        expected, _ = outcome(function, a, "cpu", None)
        got, _ = outcome(function, a, "cuda", None)
        assert got == expected, dtypes
        assert isinstance(got, dict) == (len(set(dtypes)) == 1), dtypes


@TRAINED
@AUTOCAST
@pytest.mark.parametrize("small_dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_B09_gates_and_states_keep_their_dtypes(function, autocast, small_dtype, state_dtype):
    """Beside q, k and v of any dtype, under autocast as without: it does not touch them, so neither do the bits differ."""
    for dtype in DTYPES:
        a = problem(dtype=dtype, small_dtype=small_dtype, state_dtype=state_dtype)
        expected, _ = outcome(function, a, "cpu", autocast)
        dtypes, under = outcome(function, a, "cuda", autocast)
        _, without = outcome(function, a, "cuda", None)
        assert dtypes == expected, dtype
        assert all(torch.equal(x, without[name]) for name, x in under.items()), dtype


@TRAINED
def test_B09_each_of_the_small_tensors_has_a_dtype_of_its_own(function):
    for dtypes in [(BF16, F32, F16, F32), (F32, BF16, F32, F16), (F16, F16, BF16, BF16)]:
        a = problem(dtype=BF16)
        a |= {name: a[name].to(dtype) for name, dtype in zip(("g", "beta", "A_log", "dt_bias"), dtypes, strict=True)}
        expected, _ = outcome(function, a, "cpu", None)
        got, _ = outcome(function, a, "cuda", None)
        assert got == expected and all(got[name] == a[name].dtype for name in TENSORS), dtypes


@POOLS
@AUTOCAST
def test_B09_pools_under_autocast(function, autocast):
    a = moved_all(problem(state_dtype=None))
    rows = torch.tensor([1], device="cuda")

    def run(dtype_q, enabled):
        pool = torch.zeros(2, 2, 16, 16, device="cuda", dtype=BF16)
        mixed = a | {"q": a["q"].to(BF16).to(dtype_q), "k": a["k"].to(BF16).to(dtype_q), "v": a["v"].to(BF16)}
        with torch.autocast("cuda", dtype=autocast, enabled=enabled):
            return function(**mixed, state_pool=pool, read_rows=rows), pool

    (o, pool), (o_cast, pool_cast) = run(F32, True), run(BF16, False)
    assert o.dtype == BF16 and torch.equal(o, o_cast) and torch.equal(pool, pool_cast)
    with pytest.raises(TypeError, match="^v: expected float32 as q and k, got bfloat16"):
        run(F32, False)


@AUTOCAST
@pytest.mark.parametrize("float_v", [False, True])
def test_B09_layer_under_autocast_trains(autocast, float_v):
    """Parameters in float32, projections in the type of autocast, the gate's parameters in float32."""
    torch.manual_seed(0)
    project = torch.nn.Linear(128, 3 * 2 * 32 + 4).cuda()
    A_log, dt_bias = (torch.nn.Parameter(torch.zeros(2, device="cuda")) for _ in range(2))
    x = torch.randn(1, 65, 128).cuda()
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    with torch.autocast("cuda", dtype=autocast):
        q, k, v, g, beta = project(x).split([64, 64, 64, 2, 2], dim=-1)
        q, k, v = (y.unflatten(-1, (2, 32)) for y in (q, k, v))
        v = v.float() if float_v else v
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **options)
    assert o.dtype == (F32 if float_v else autocast)
    o.float().square().sum().backward()
    for parameter in (*project.parameters(), A_log, dt_bias):
        assert parameter.grad.dtype == F32 and torch.isfinite(parameter.grad).all() and parameter.grad.any()


def test_B09_loss_scaling_in_float16():
    """Gradients 65.536 times as large as plain ones, which float16 holds only where they are small."""
    a = moved_all(make(Problem(dtype=F16)))
    plain, scaled = with_gradients(a), with_gradients(a)
    chunk_gated_delta_rule(**plain)[0].float().sum().backward()
    (65536 * 1e-3 * chunk_gated_delta_rule(**scaled)[0].float().sum()).backward()
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert relative_rms(scaled[name].grad.double() / 65.536, plain[name].grad) < 2 * bound("gradient", F16, F16), name


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_B09_a_gradient_of_another_dtype(dtype):
    """The low-level backward with a gradient of o in float32, which autograd never gives: refused by name, or taken."""
    a = moved_all(make(Problem(dtype=dtype, l2norm=False)))
    a = {name: a[name] for name in ("q", "k", "v", "g", "beta", "initial_state")}
    g, A, o, *_ = chunk_gated_delta_rule_fwd(**a)
    given = torch.ones_like(o)
    expected = chunk_gated_delta_rule_bwd(**a | {"g": g}, A=A, do=given)
    try:
        got = chunk_gated_delta_rule_bwd(**a | {"g": g}, A=A, do=given.float())
    except NotImplementedError as error:
        assert f"d_o in the type of q, which is {str(dtype).removeprefix('torch.')}, not float32" in str(error)
    else:
        assert all(map(torch.equal, got, expected))
