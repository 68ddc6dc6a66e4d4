"""Gradients: which inputs, which dtypes, checkpointing, what is refused, and what a call without gradients costs."""

import pytest
import torch
from bounds import relative_rms
from problems import TENSORS, Problem, make, with_gradients
from torch.utils.checkpoint import checkpoint

import flash_qla._call
from flash_qla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, recurrent_gated_delta_rule_pool

COMPUTED = Problem(tokens=9, gate="computed", beta="doubled", dim_k=4, dim_v=3)
F64 = {"dtype": torch.float64, "small_dtype": torch.float64, "state_dtype": torch.float64}


@pytest.mark.parametrize(
    "problem",
    [
        Problem(tokens=7, dim_k=4, dim_v=3, **F64),
        Problem(tokens=7, dim_k=4, dim_v=3, l2norm=False, state_v_first=True, scale=0.7, **F64),
        Problem(lengths=(3, 0, 4), slack=1, heads_qk=2, dim_k=4, dim_v=3, gate="computed", beta="doubled", **F64),
        Problem(tokens=6, dim_k=3, dim_v=2, gate="none", beta="one", **F64),
        Problem(tokens=6, dim_k=3, dim_v=2, gate="computed_without_bias", beta="sigmoid", **F64),
    ],
)
@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_gradcheck(problem, function):
    a = with_gradients(make(problem))
    names = [name for name in TENSORS if a.get(name) is not None]

    def call(*tensors):
        return function(**{**a, **dict(zip(names, tensors, strict=True))}, output_final_state=True)

    assert torch.autograd.gradcheck(call, [a[name] for name in names], fast_mode=False)


@pytest.mark.parametrize("name", TENSORS)
def test_gradient_of_each_input_alone(name):
    """requires_grad on any subset: the others' gradients are not computed, and the one asked for does not change."""
    a = make(COMPUTED)
    everything = with_gradients(a)
    o, state = chunk_gated_delta_rule(**everything, output_final_state=True)
    (o.square().sum() + state.square().sum()).backward()
    alone = {**a, name: a[name].clone().requires_grad_()}
    o, state = chunk_gated_delta_rule(**alone, output_final_state=True)
    (o.square().sum() + state.square().sum()).backward()
    assert torch.equal(alone[name].grad, everything[name].grad)
    assert all(a[other].grad is None for other in TENSORS)


@pytest.mark.parametrize("part", ["o", "state", "neither"])
def test_gradient_through_one_result(part):
    a = with_gradients(make(COMPUTED))
    o, state = chunk_gated_delta_rule(**a, output_final_state=True)
    if part == "neither":
        assert torch.autograd.grad((0 * o).sum(), a["v"])[0].abs().max() == 0
    else:
        ({"o": o, "state": state}[part]).square().sum().backward()
        assert a["v"].grad.abs().max() > 0
        assert (a["q"].grad.abs().max() > 0) == (part == "o")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("small_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_B09_every_gradient_has_the_dtype_of_its_input(dtype, small_dtype, state_dtype):
    a = with_gradients(
        make(Problem(tokens=5, gate="computed", beta="sigmoid", dtype=dtype, small_dtype=small_dtype, state_dtype=state_dtype))
    )
    o, state = chunk_gated_delta_rule(**a, output_final_state=True)
    assert o.dtype == dtype and state.dtype == torch.float32
    (o.float().sum() + state.sum()).backward()
    for name in TENSORS:
        assert a[name].grad.dtype == a[name].dtype and a[name].grad.shape == a[name].shape


def test_retain_graph_and_twice_the_same():
    a = with_gradients(make(Problem(gate="computed", beta="sigmoid")))
    o, _ = chunk_gated_delta_rule(**a)
    wanted = [a[name] for name in TENSORS]
    first = torch.autograd.grad(o.sum(), wanted, retain_graph=True)
    second = torch.autograd.grad(o.sum(), wanted)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time|already been freed|freed"):
        torch.autograd.grad(o.sum(), wanted)


@pytest.mark.parametrize("lengths", [None, (100, 0, 64, 33)])
def test_recompute_in_backward(lengths):
    """With nothing kept for the backward the gradients are the same, up to the order of some sums."""
    problem = Problem(tokens=150, gate="computed", beta="sigmoid", lengths=lengths)
    kept, recomputed = with_gradients(make(problem)), with_gradients(make(problem))
    chunk_gated_delta_rule(**kept)[0].square().sum().backward()
    chunk_gated_delta_rule(**recomputed, recompute_in_backward=True)[0].square().sum().backward()
    for name in TENSORS:
        torch.testing.assert_close(kept[name].grad, recomputed[name].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    plain, saved = with_gradients(make(Problem())), with_gradients(make(Problem()))
    chunk_gated_delta_rule(**plain)[0].square().sum().backward()

    def layer(q, v):
        return chunk_gated_delta_rule(**{**saved, "q": q, "v": v})[0]

    checkpoint(layer, saved["q"], saved["v"], use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(plain["q"].grad, saved["q"].grad) and torch.equal(plain["v"].grad, saved["v"].grad)


def test_initial_state_is_never_written():
    a = make(Problem())
    before = a["initial_state"].clone()
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        _, state = function(**a, output_final_state=True)
        assert torch.equal(a["initial_state"], before) and state.data_ptr() != a["initial_state"].data_ptr()


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_second_derivatives_are_refused_by_name(function):
    a = with_gradients(make(Problem()))
    (dq,) = torch.autograd.grad(function(**a)[0].sum(), a["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_qla.*second derivatives"):
        dq.sum().backward()


def test_vmap_is_refused_by_name():
    a = make(Problem(batch=3, state_dtype=None))
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):

        def one(v, function=function):
            return function(**{**a, "v": v})[0]

        with pytest.raises(NotImplementedError, match="flash_qla.*vmap.*batch dimension"):
            torch.func.vmap(one)(torch.randn(4, *a["v"].shape))
    v = a["v"].requires_grad_()
    o, _ = chunk_gated_delta_rule(**{**a, "v": v})
    # Batched gradients are not vmap of the operation: torch runs the backward once for each.
    batched = torch.randn(2, *o.shape)
    (got,) = torch.autograd.grad(o, v, batched, is_grads_batched=True, retain_graph=True)
    for one_gradient, d_o in zip(got, batched, strict=True):
        assert torch.equal(one_gradient, torch.autograd.grad(o, v, d_o, retain_graph=True)[0])


def test_pool_form_refuses_gradients_by_name():
    a = make(Problem(state_dtype=None))
    a["v"].requires_grad_()
    call = {**a, "state_pool": torch.zeros(4, 2, 16, 16), "read_rows": torch.tensor([0])}
    with pytest.raises(NotImplementedError, match="recurrent_gated_delta_rule_pool has no gradient.*no_grad"):
        recurrent_gated_delta_rule_pool(**call)
    with torch.no_grad():
        recurrent_gated_delta_rule_pool(**call)


@pytest.fixture
def called(monkeypatch):
    """Names of the ops that run, in order."""
    names = []

    def spy(name, op):
        def run(*arguments):
            names.append(name)
            return op(*arguments)

        return run

    for name, op in flash_qla._call.OPS.items():
        if not name.startswith("explain_"):
            monkeypatch.setitem(flash_qla._call.OPS, name, spy(name, op))
    return names


def test_without_gradients_one_op_without_autograd_runs(called):
    """A call costs one op, and that op has no autograd kernel in Python on its way."""
    a = make(Problem())
    chunk_gated_delta_rule(**a)
    fused_recurrent_gated_delta_rule(**a)
    a["v"].requires_grad_()
    with torch.no_grad():
        chunk_gated_delta_rule(**a)
        fused_recurrent_gated_delta_rule(**a)
    with torch.inference_mode():
        chunk_gated_delta_rule(**a)
    assert called == ["chunk_forward", "recurrent_forward", "chunk_forward", "recurrent_forward", "chunk_forward"]
    for name in ("chunk_forward", "recurrent_forward", "chunk_forward_pool", "recurrent_forward_pool", "chunk_forward_low_level"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"flashqla::{name}", "Autograd"), name


def test_with_gradients_the_recurrent_function_runs_the_chunked_operation(called):
    a = with_gradients(make(Problem()))
    fused_recurrent_gated_delta_rule(**a)[0].sum().backward()
    assert called == ["chunk_forward_training", "chunk_backward"]


def test_A22_rows_of_zeros_have_finite_gradients():
    """All-zero q and k under the norm inside, and padding that changes nothing after it."""
    a = make(Problem(tokens=64, state_dtype=None))
    for name in ("q", "k", "v", "g", "beta"):
        a[name][:, :10] = 0
    padded = with_gradients(a)
    alone = with_gradients(
        {name: value[:, 10:].clone() if isinstance(value, torch.Tensor) else value for name, value in a.items()}
    )
    o, state = chunk_gated_delta_rule(**padded, output_final_state=True)
    o_alone, state_alone = chunk_gated_delta_rule(**alone, output_final_state=True)
    assert relative_rms(o[:, 10:], o_alone) < 2e-6 and relative_rms(state, state_alone) < 2e-6
    (o[:, 10:].square().sum() + state.square().sum()).backward()
    (o_alone.square().sum() + state_alone.square().sum()).backward()
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.isfinite(padded[name].grad).all(), name
        assert relative_rms(padded[name].grad[:, 10:], alone[name].grad) < 2e-5, name


def test_B01_gate_gradients_under_strong_decay():
    """dg, dA_log and ddt_bias against float64 for decays up to -16 softplus(x + 1) a token; relative L2."""
    from problems import for_oracle
    from recurrence import recurrence

    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 1e-2)):
        a = make(Problem(tokens=193, heads_v=4, gate="computed", dtype=dtype, state_dtype=None, dim_k=32, dim_v=32))
        a["A_log"] = torch.tensor([0.01, 1.0, 8.0, 16.0]).log()
        a["dt_bias"] = torch.ones(4)
        got, expected = with_gradients(a), with_gradients(a)
        chunk_gated_delta_rule(**got)[0].float().square().sum().backward()
        recurrence(**for_oracle(expected))[0].square().sum().backward()
        for head in range(4):
            assert relative_rms(got["g"].grad[..., head], expected["g"].grad[..., head]) < limit, (dtype, head)
        assert relative_rms(got["A_log"].grad, expected["A_log"].grad) < limit
        assert relative_rms(got["dt_bias"].grad, expected["dt_bias"].grad) < limit
        first = got["g"].grad[:, 0].abs().max()  # there is no state yet for the first token's decay to act on
        assert first <= 1e-6 * got["g"].grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B08_normalisation_at_all_amplitudes(dtype):
    """Rows of amplitude 1 to 1e-4 and 0: eps is added to the sum of squares, forward and backward; l2norm() agrees."""
    from problems import for_oracle
    from recurrence import recurrence

    a = make(Problem(tokens=6, dim_k=128, dtype=dtype, state_dtype=None))
    amplitudes = torch.tensor([1, 0.1, 0.01, 1e-3, 1e-4, 0.0])[None, :, None, None]
    a["q"], a["k"] = (
        (a[name].double() / a[name].double().norm(dim=-1, keepdim=True) * amplitudes).to(dtype) for name in ("q", "k")
    )
    got, expected = with_gradients(a), with_gradients(a)
    o = chunk_gated_delta_rule(**got)[0]
    o_expected = recurrence(**for_oracle(expected))[0]
    o.double().sum().backward()
    o_expected.sum().backward()
    limit = 5e-6 if dtype == torch.float32 else 8e-3
    for t in range(6):
        assert relative_rms(o[:, t], o_expected[:, t]) < limit, t
        for name in ("q", "k"):
            assert relative_rms(got[name].grad[:, t], expected[name].grad[:, t]) < 2 * limit, (name, t)
    outside = {**a, "q": flash_qla.utils.l2norm(a["q"]), "k": flash_qla.utils.l2norm(a["k"]), "use_qk_l2norm_in_kernel": False}
    assert relative_rms(chunk_gated_delta_rule(**outside)[0], o_expected) < limit


def test_B08_l2norm_function():
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(flash_qla.utils.l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert torch.autograd.gradcheck(flash_qla.utils.l2norm, [x])
    y = flash_qla.utils.l2norm(torch.randn(4, 8, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert flash_qla.utils.l2norm(y, output_dtype=torch.float32).dtype == torch.float32
    assert not flash_qla.utils.l2norm(torch.zeros(2, 4)).any()
