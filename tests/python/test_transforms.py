"""Transforms of torch that the operation does not have are refused by name, in a fresh process as well as in a warm one."""

import pytest
import torch
from problems import Problem, make
from torch.autograd import forward_ad

from flash_qla import (
    _call,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_pool,
)

BOTH = pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])


@pytest.fixture(params=[True, False], ids=["first call", "later call"])
def known(request, monkeypatch):
    """Whether calls of this kind have been seen: the first one also asks what would run."""
    if request.param:
        monkeypatch.setattr(_call, "_known", set())


@BOTH
@pytest.mark.parametrize("name", ["q", "v", "beta"])
@pytest.mark.parametrize("gradient", [False, True])
def test_vmap(function, name, gradient, known):
    a = make(Problem())
    mapped = a[name][None].clone().requires_grad_(gradient)
    with pytest.raises(NotImplementedError, match=r"^flash_qla: vmap over the gated delta rule does not exist"):
        torch.vmap(lambda x: function(**{**a, name: x})[0])(mapped)


@BOTH
@pytest.mark.parametrize("name", ["v", "beta"])
@pytest.mark.parametrize("gradient", [False, True])
def test_forward_mode(function, name, gradient, known):
    a = make(Problem())
    with forward_ad.dual_level():
        function(**a)  # nothing dual: no reason to refuse
        dual = forward_ad.make_dual(a[name].clone().requires_grad_(gradient), torch.ones_like(a[name]))
        with pytest.raises(NotImplementedError, match=r"^flash_qla: forward-mode derivatives .* do not exist"):
            function(**{**a, name: dual})
    with pytest.raises(NotImplementedError, match=r"^flash_qla: forward-mode derivatives .* do not exist"):
        torch.func.jvp(lambda x: function(**{**a, name: x})[0], (a[name],), (a[name],))


def test_forward_mode_of_functions_without_gradient():
    a = make(Problem(l2norm=False, state_dtype=None))
    with forward_ad.dual_level():
        a["v"] = forward_ad.make_dual(a["v"], torch.ones_like(a["v"]))
        with pytest.raises(NotImplementedError, match=r"^flash_qla: forward-mode"):
            chunk_gated_delta_rule_fwd(*(a[n] for n in ("q", "k", "v", "g", "beta")))
        with pytest.raises(NotImplementedError, match=r"^flash_qla: forward-mode"):
            recurrent_gated_delta_rule_pool(**a, state_pool=torch.zeros(1, 2, 16, 16), read_rows=torch.tensor([0]))


@BOTH
def test_torch_func_grad(function, known):
    a = make(Problem())
    with pytest.raises(NotImplementedError, match=r"^flash_qla: torch.func.grad and its like do not exist"):
        torch.func.grad(lambda v: function(**{**a, "v": v})[0].sum())(a["v"])


@BOTH
def test_several_gradients_at_once(function, known):
    a = make(Problem())
    v = a["v"].requires_grad_()
    o, _ = function(**a)
    directions = torch.randn(3, *o.shape)
    (together,) = torch.autograd.grad(o, v, directions, is_grads_batched=True, retain_graph=True)
    for d_o, d_v in zip(directions, together, strict=True):
        assert torch.equal(torch.autograd.grad(o, v, d_o, retain_graph=True)[0], d_v)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@BOTH
def test_jit_trace(function, known):
    a = make(Problem())
    traced = torch.jit.trace(lambda v: function(**{**a, "v": v})[0], a["v"], check_trace=False)
    assert torch.equal(traced(a["v"]), function(**a)[0])
