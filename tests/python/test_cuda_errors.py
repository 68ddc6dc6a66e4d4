"""What calls on a CUDA device are refused for, and how: the types and messages of the CPU, with every tensor's device checked."""

import pytest
import torch
from on_cuda import moved_all, skip_without_cuda
from problems import Problem, make

import flash_qla
from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_pool,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_pool,
)

skip_without_cuda()

BF16 = torch.bfloat16


def arguments_of(**options):
    return moved_all(make(Problem(dtype=BF16, lengths=(40, 30), gate="computed", **options)))


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"])
def test_a_tensor_on_another_device_is_named(function, name):
    a = arguments_of()
    with pytest.raises(ValueError, match=rf"^{name}: expected device cuda:0 as q, got cpu"):
        function(**a | {name: a[name].cpu()})


def test_q_on_the_cpu():
    a = arguments_of()
    with pytest.raises(ValueError, match="^k: expected device cpu as q, got cuda:0"):
        chunk_gated_delta_rule(**a | {"q": a["q"].cpu()})


@pytest.mark.parametrize("function", [chunk_gated_delta_rule_pool, recurrent_gated_delta_rule_pool])
@pytest.mark.parametrize("name", ["state_pool", "read_rows", "write_rows"])
def test_a_pool_on_another_device_is_named(function, name):
    a = arguments_of(state_dtype=None)
    rows = torch.tensor([0, 1], device="cuda")
    a |= {"state_pool": torch.zeros(2, 2, 16, 16, device="cuda"), "read_rows": rows, "write_rows": rows}
    with pytest.raises(ValueError, match=rf"^{name}: expected device cuda:0 as q, got cpu"):
        function(**a | {name: a[name].cpu()})


def test_the_offsets_must_be_on_the_device():
    a = arguments_of()
    offsets = a.pop("cu_seqlens")
    with pytest.raises(ValueError, match="^cu_seqlens: needed on the device of q"):
        chunk_gated_delta_rule(**a, cu_seqlens_cpu=offsets.cpu())
    o, _ = chunk_gated_delta_rule(**a, cu_seqlens=offsets, cu_seqlens_cpu=offsets.cpu())
    assert torch.equal(o, chunk_gated_delta_rule(**a, cu_seqlens=offsets)[0])


@pytest.mark.parametrize(
    "dim_k, dim_v, dtype, reason",
    [(24, 16, BF16, "multiples of 16"), (16, 8, BF16, "multiples of 16"), (16, 16, torch.float64, "float")],
)
def test_what_no_kernel_takes_is_refused_with_the_reason(dim_k, dim_v, dtype, reason):
    a = moved_all(make(Problem(dim_k=dim_k, dim_v=dim_v, dtype=dtype)))
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        with pytest.raises(NotImplementedError, match=f"(?s)no implementation takes this.*cuda-portable.*{reason}"):
            function(**a)
    answer = flash_qla.explain(**a)
    assert answer.implementation is None and reason in str(answer)


def test_values_are_checked_as_on_the_cpu():
    a = arguments_of()
    with pytest.raises(ValueError, match="^beta: expected shape"):
        chunk_gated_delta_rule(**a | {"beta": a["beta"][:, 1:]})
    with pytest.raises(TypeError, match="^v: expected"):
        chunk_gated_delta_rule(**a | {"v": a["v"].float()})
    with pytest.raises(TypeError, match="^cu_seqlens: expected"):
        chunk_gated_delta_rule(**a | {"cu_seqlens": a["cu_seqlens"].float()})


def test_explain_and_support():
    a = arguments_of()
    assert flash_qla.device_support("cuda") is None and flash_qla.device_support("cuda:0") is None
    assert "no CUDA device 99" in flash_qla.device_support("cuda:99")
    for operation in ("chunk_forward", "recurrent_forward"):
        assert flash_qla.explain(**a, operation=operation).implementation.startswith("cuda-")
    with pytest.raises(ValueError, match="^beta: expected shape"):
        flash_qla.explain(**a | {"beta": a["beta"][:, 1:]})
    with pytest.raises(ValueError, match="^k: expected device"):
        flash_qla.explain(**a | {"k": a["k"].cpu()})


def test_another_implementation_is_asked_for(force):
    force("cpu-scalar")
    with pytest.raises(NotImplementedError, match="FLASHQLA_IMPL=cpu-scalar asks for another"):
        chunk_gated_delta_rule(**arguments_of())


def test_the_low_level_forward_says_what_it_lacks_or_computes():
    """Its gates and inverse, if the device's kernels compute them, have the CPU's shapes; h has rows for any offsets."""
    a = make(Problem(dtype=BF16, lengths=(70, 30), l2norm=False, state_dtype=None))
    a = {name: a[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    try:
        g, A, o, h, state, _ = chunk_gated_delta_rule_fwd(**moved_all(a), output_h=True)
    except NotImplementedError as error:
        pytest.skip(str(error))
    expected = chunk_gated_delta_rule_fwd(**a, output_h=True)
    for got, truth in zip((g, A, o, state), (*expected[:3], expected[4]), strict=True):
        assert got.shape == truth.shape and got.dtype == truth.dtype
    chunks = expected[3].shape[1]
    assert h.shape[1] == 100 // 64 + 2 and h.shape[1] >= chunks


def test_out_of_memory_has_its_own_type():
    """Results of 2^46 bytes: the inputs share one element's memory."""
    x = torch.zeros(1, 1, 1, 16, device="cuda", dtype=BF16).expand(1, 1 << 31, 1024, 16)
    with pytest.raises(torch.OutOfMemoryError, match="could not allocate 70368744177664 bytes on cuda:0"):
        fused_recurrent_gated_delta_rule(x, x, x)
