"""A18 strides, A02 A07 A21 packed sequences, A20 a state that continues, B09 dtypes and autocast."""

import itertools

import pytest
import torch
from bounds import bound, relative_rms
from conftest import implementations
from problems import TENSORS, Problem, for_oracle, make, with_gradients
from recurrence import recurrence

from flash_qla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

BOTH = pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])


def everything(arguments, d_o=None, function=chunk_gated_delta_rule):
    """o, final state and all gradients."""
    a = with_gradients(arguments)
    o, state = function(**a, output_final_state=True)
    torch.autograd.backward([o, state], [torch.ones_like(o) if d_o is None else d_o, torch.ones_like(state)])
    return {"o": o.detach(), "state": state.detach()} | {name: a[name].grad for name in TENSORS if a.get(name) is not None}


def assert_same_bits(x, y, where=""):
    assert x.keys() == y.keys()
    for name in x:
        assert torch.equal(x[name], y[name]), (name, where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strides", ["fused", "transposed", "expanded", "last"])
def test_A18_strides_equal_contiguous_copies(strides, dtype):
    a = make(Problem(batch=2, heads_qk=2, heads_v=4, strides=strides, dtype=dtype))
    assert not a["q"].is_contiguous() and not a["v"].is_contiguous()
    copies = {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in a.items()}
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        with torch.no_grad():
            assert all(map(torch.equal, function(**a, output_final_state=True), function(**copies, output_final_state=True)))
    assert_same_bits(everything(a), everything(copies))


def test_A18_columns_of_one_tensor_and_odd_addresses():
    a = make(Problem(gate="computed", beta="sigmoid"))
    expected = everything(a)
    gates = torch.stack([a["g"], a["beta"]], dim=-1)  # g and beta interleaved
    shifted = torch.zeros(a["v"].numel() + 1)[1:].view_as(a["v"]).copy_(a["v"])  # 4 bytes off the allocation
    both = torch.stack([a["A_log"], a["dt_bias"]], dim=-1)
    b = {**a, "g": gates[..., 0], "beta": gates[..., 1], "v": shifted, "A_log": both[:, 0], "dt_bias": both[:, 1]}
    b["initial_state"] = a["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    assert_same_bits(everything(b), expected)
    b["initial_state"] = a["initial_state"].transpose(2, 3).contiguous().transpose(2, 3)  # last dimension not contiguous
    assert_same_bits(everything(b), expected)


def test_A18_gradients_of_sums_have_zero_strides():
    for tokens in (0, 1, 70):
        a = with_gradients(make(Problem(tokens=tokens)))
        o, state = chunk_gated_delta_rule(**a, output_final_state=True)
        (o.sum() + state.sum()).backward()  # do and dht of stride 0
        expected = everything(make(Problem(tokens=tokens)))
        assert_same_bits(
            {n: a[n].grad for n in TENSORS if a.get(n) is not None}, {n: expected[n] for n in expected if n in TENSORS}
        )


def test_A18_outputs_are_contiguous_whatever_the_inputs():
    a = make(Problem(batch=2, strides="transposed"))
    o, state = chunk_gated_delta_rule(**a, output_final_state=True)
    assert o.is_contiguous() and state.is_contiguous()


@pytest.mark.parametrize("offsets", [[0, 0, 64], [0, 64, 64], [0, 64, 64, 128], [0, 0, 0, 5], [0, 0], [0]])
@pytest.mark.parametrize("state", [None, torch.float32])
def test_A02_empty_sequences(offsets, state):
    """Neighbours have the same bits as without them; the final state and its gradient pass through."""
    lengths = tuple(b - a for a, b in itertools.pairwise(offsets))
    a = make(Problem(lengths=lengths, state_dtype=state))
    kept = [n for n, length in enumerate(lengths) if length]
    got = everything(a)
    for n, length in enumerate(lengths):
        if not length:
            expected = torch.zeros(2, 16, 16) if state is None else a["initial_state"][n]
            assert torch.equal(got["state"][n], expected)
            if state is not None:
                assert torch.equal(got["initial_state"][n], torch.ones(2, 16, 16))
    if kept:
        without = {**a, "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths[n] for n in kept)])}
        if state is not None:
            without["initial_state"] = a["initial_state"][kept]
        alone = everything(without)
        for name in got:
            of_sequences = name in ("state", "initial_state")
            assert torch.equal(got[name][kept] if of_sequences else got[name], alone[name]), name


@BOTH
def test_A07_rows_past_the_last_offset(function):
    """o and every gradient are zero there, whatever the inputs and the freed memory hold."""
    a = make(Problem(lengths=(256,), slack=144))
    for name in ("q", "k", "v", "g", "beta"):
        a[name][:, 256:] = float("nan")
    got = everything(a, function=function)
    alone = {n: x[:, :256] if n in ("q", "k", "v", "g", "beta") else x for n, x in a.items()}
    expected = everything(alone, function=function)
    for name in ("o", "q", "k", "v", "g", "beta"):
        assert not got[name][:, 256:].any(), name
        assert torch.equal(got[name][:, :256], expected[name]), name
    assert torch.equal(got["state"], expected["state"]) and torch.equal(got["initial_state"], expected["initial_state"])


def test_A21_packed_sequences_do_not_see_each_other():
    a = make(Problem(lengths=(40, 24), gate="computed", beta="doubled"))
    first = everything(a)
    b = {**a, **{name: a[name].clone() for name in ("q", "k", "v", "g", "beta", "initial_state")}}
    for name in ("q", "k", "v", "g", "beta"):
        b[name][:, :40] = torch.randn_like(b[name][:, :40])
    b["initial_state"][0] = 7.0
    second = everything(b)
    for name in ("o", "q", "k", "v", "g", "beta"):
        assert torch.equal(first[name][:, 40:], second[name][:, 40:]), name
    assert torch.equal(first["state"][1], second["state"][1])
    assert torch.equal(first["initial_state"][1], second["initial_state"][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_A21_packed_equals_alone_bit_for_bit(dtype):
    lengths = (1, 64, 0, 130, 63)
    a = make(Problem(lengths=lengths, dtype=dtype))
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        with torch.no_grad():
            o, state = function(**a, output_final_state=True)
            for n, (begin, end) in enumerate(itertools.pairwise(a["cu_seqlens"].tolist())):
                alone = {name: x[:, begin:end] if name in ("q", "k", "v", "g", "beta") else x for name, x in a.items()}
                alone["initial_state"] = a["initial_state"][n : n + 1]
                alone.pop("cu_seqlens")
                o_alone, state_alone = function(**alone, output_final_state=True)
                assert torch.equal(o[:, begin:end], o_alone) and torch.equal(state[n], state_alone[0])


@BOTH
@pytest.mark.parametrize("cuts", [(32, 48), (64, 128), (1, 2, 3), (47,)])
def test_A20_a_second_call_continues(function, cuts, force):
    """The state of one call starts the next, for any length: whole = split, bitwise in chunks at multiples of 64."""
    problem = Problem(tokens=150)
    a = make(problem)
    truth = recurrence(**for_oracle(a))
    for implementation in implementations("chunk_forward" if function is chunk_gated_delta_rule else "recurrent_forward"):
        force(implementation)
        whole = function(**a, output_final_state=True)
        state, outputs = a["initial_state"], []
        for begin, end in itertools.pairwise((0, *cuts, 150)):
            part = {name: x[:, begin:end] if name in ("q", "k", "v", "g", "beta") else x for name, x in a.items()}
            o, state = function(**{**part, "initial_state": state}, output_final_state=True)
            outputs.append(o)
        o = torch.cat(outputs, dim=1)
        # The reference keeps the state in float64 inside a call, and in float32 between calls.
        exact = function is fused_recurrent_gated_delta_rule or all(cut % 64 == 0 for cut in cuts)
        if exact and implementation != "reference":
            assert torch.equal(o, whole[0]) and torch.equal(state, whole[1]), implementation
        limit = 2 * bound("o", torch.float32, torch.float32)
        assert relative_rms(o, truth[0]) < limit and relative_rms(state, truth[1]) < limit, implementation


def test_A20_prefill_then_single_tokens():
    a = make(Problem(tokens=48))
    truth = recurrence(**for_oracle(a))

    def part(begin, end):
        return {name: x[:, begin:end] if name in ("q", "k", "v", "g", "beta") else x for name, x in a.items()}

    o, state = chunk_gated_delta_rule(**part(0, 32), output_final_state=True)
    outputs = [o]
    for t in range(32, 48):
        o, state = fused_recurrent_gated_delta_rule(**{**part(t, t + 1), "initial_state": state}, output_final_state=True)
        outputs.append(o)
    assert relative_rms(torch.cat(outputs, dim=1), truth[0]) < 2e-6 and relative_rms(state, truth[1]) < 2e-6


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
@BOTH
def test_nothing_to_do(shape, function):
    a = make(Problem(batch=shape[0], tokens=shape[1]))
    got = everything(a, function=function)
    assert got["o"].shape == (*shape, 2, 16) and torch.equal(got["state"], a["initial_state"])


@BOTH
def test_B09_mixed_dtypes_are_an_error_that_names_the_tensor(function):
    a = make(Problem(dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"^v: expected bfloat16 as q and k, got float32"):
        function(**{**a, "v": a["v"].float()})


@BOTH
@pytest.mark.parametrize("dtype_qk", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype_v", [torch.float32, torch.bfloat16])
def test_B09_autocast(function, dtype_qk, dtype_v):
    """Under autocast q and k follow v: o has the dtype of v, every gradient that of its input."""
    a = make(Problem(gate="computed", beta="sigmoid"))
    a |= {"q": a["q"].to(dtype_qk), "k": a["k"].to(dtype_qk), "v": a["v"].to(dtype_v)}
    leaves = with_gradients(a)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = function(**leaves, output_final_state=True)
    assert o.dtype == dtype_v and state.dtype == torch.float32
    (o.float().sum() + state.sum()).backward()
    for name in TENSORS:
        assert leaves[name].grad.dtype == a[name].dtype, name
    cast = {**a, "q": a["q"].to(dtype_v), "k": a["k"].to(dtype_v)}
    with torch.no_grad():
        assert torch.equal(o, chunk_gated_delta_rule(**cast)[0])


def test_B09_layer_under_autocast_trains():
    """Parameters in float32, projections in bfloat16, the gate's parameters in float32."""
    torch.manual_seed(0)
    project = torch.nn.Linear(128, 3 * 2 * 32 + 4)
    A_log, dt_bias = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    x = torch.randn(1, 65, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v, g, beta = project(x).split([64, 64, 64, 2, 2], dim=-1)
        q, k, v = (y.unflatten(-1, (2, 32)) for y in (q, k, v))
        o, _ = chunk_gated_delta_rule(
            q, k, v.float(), g, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
    assert o.dtype == torch.float32
    o.square().sum().backward()
    for parameter in (*project.parameters(), A_log, dt_bias):
        assert parameter.grad.dtype == torch.float32 and torch.isfinite(parameter.grad).all() and parameter.grad.any()


def test_B09_loss_scaling_in_float16():
    a = make(Problem(dtype=torch.float16))
    plain, scaled = with_gradients(a), with_gradients(a)
    chunk_gated_delta_rule(**plain)[0].float().sum().backward()
    (65536 * 1e-3 * chunk_gated_delta_rule(**scaled)[0].float().sum()).backward()
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert relative_rms(scaled[name].grad.double() / 65.536, plain[name].grad) < 4e-3, name
