"""From the keywords of the public functions to the arguments that every op starts with.

Only what the C++ library cannot see is checked here: keywords that contradict each other or that belong to the peers. See
docs/math.md for the formulas.
"""

import warnings

import torch
from torch import Tensor

_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def op_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple:
    """The arguments that bindings/torch/schema.cpp calls inputs."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: doubles the sigmoid computed inside, so it needs use_beta_sigmoid_in_kernel=True")
    needed = {"use_gate_in_kernel": {"A_log": A_log, "g": g}} if use_gate_in_kernel else {}
    if use_beta_sigmoid_in_kernel:
        needed["use_beta_sigmoid_in_kernel"] = {"beta": beta}
    for option, tensors in needed.items():
        for name, value in tensors.items():
            if value is None:
                raise ValueError(f"{name}: expected a tensor, which {option}=True needs, got None")
    if use_gate_in_kernel:
        gate = "computed"
    else:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name}: belongs to use_gate_in_kernel=True; without it g is the log decay itself")
        gate = "none" if g is None else "log_decay"
    if use_beta_sigmoid_in_kernel:
        beta_mode = "doubled_sigmoid" if allow_neg_eigval else "sigmoid"
    else:
        beta_mode = "one" if beta is None else "given"
    if isinstance(q, Tensor) and isinstance(v, Tensor) and isinstance(k, Tensor) and not (q.dtype == k.dtype == v.dtype):
        q, k = under_autocast(q, k, v)
    offsets = choose_offsets(cu_seqlens, cu_seqlens_cpu, on_cuda=isinstance(q, Tensor) and q.is_cuda)
    return q, k, v, g, beta, A_log, dt_bias, offsets, scale, gate, beta_mode, use_qk_l2norm_in_kernel, state_v_first


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast, q and k that differ from v are cast to v's dtype; so o has v's dtype there as everywhere."""
    if torch.is_autocast_enabled(v.device.type) and all(x.dtype in _CASTABLE for x in (q, k, v)):
        return q.to(v.dtype), k.to(v.dtype)
    return q, k


def expect_tensors(**named: object) -> None:
    """For arguments that Python code looks into, or that an op takes as optional."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected Tensor, got {type(value).__name__}")


def choose_offsets(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, *, on_cuda: bool) -> Tensor | None:
    """The copy on the CPU, if there is one. Not with tensors on a CUDA device, whose kernels read the offsets there."""
    if cu_seqlens_cpu is None:
        return cu_seqlens
    if cu_seqlens is None:
        if on_cuda:
            raise ValueError("cu_seqlens: needed on the device of q; cu_seqlens_cpu alone is enough for tensors on the CPU only")
        return cu_seqlens_cpu
    expect_tensors(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    if cu_seqlens.shape != cu_seqlens_cpu.shape:
        raise ValueError(
            f"cu_seqlens_cpu: expected a copy of cu_seqlens, shape {tuple(cu_seqlens.shape)}, got {tuple(cu_seqlens_cpu.shape)}"
        )
    on_cpu = (
        cu_seqlens.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(cu_seqlens) is type(cu_seqlens_cpu) is Tensor
    )
    if on_cpu and cu_seqlens is not cu_seqlens_cpu and (cu_seqlens != cu_seqlens_cpu).any():
        raise ValueError(f"cu_seqlens_cpu: expected a copy of cu_seqlens, {cu_seqlens.tolist()}, got {cu_seqlens_cpu.tolist()}")
    return cu_seqlens if on_cuda else cu_seqlens_cpu


def state_order(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """state_v_first, which is also known by a name of long ago."""
    if transpose_state_layout is None:
        return state_v_first
    warnings.warn("transpose_state_layout is deprecated: use state_v_first", FutureWarning, stacklevel=3)
    if state_v_first and not transpose_state_layout:
        raise ValueError("transpose_state_layout: False contradicts state_v_first=True; give state_v_first alone")
    return transpose_state_layout


def refuse_peer_options(*, chunk_size: int = 64, cp_context: object = None, head_first: bool = False) -> None:
    """Options of the peers that cannot be honoured are refused; none is ignored."""
    if head_first:
        raise ValueError("head_first: only [batch, tokens, heads, ...] is taken; transpose(1, 2) the inputs and o")
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size: expected 16, 32 or 64 (the result does not depend on it), got {chunk_size!r}")
    if cp_context is not None:
        raise NotImplementedError("cp_context: must be None, context parallelism over several devices does not exist here yet")


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record a call on these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def refuse_gradient(name: str, *tensors: Tensor | None) -> None:
    """For functions that write into memory of the caller."""
    if wants_gradient(*tensors):
        raise NotImplementedError(f"{name} has no gradient: call it under torch.no_grad(), or train with chunk_gated_delta_rule")
