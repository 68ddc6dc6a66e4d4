"""chunk_gated_delta_rule_fwd and _bwd: order, meaning and dtypes of everything they return."""

import pytest
import torch
from bounds import relative_rms
from problems import Problem, for_oracle, make, with_gradients
from recurrence import recurrence

from flash_qla import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

PROBLEMS = [
    Problem(tokens=150, batch=2, heads_qk=2, heads_v=4, l2norm=False),
    Problem(lengths=(3, 0, 64, 70), slack=5, l2norm=False, state_v_first=True),
    Problem(tokens=150, l2norm=False, dtype=torch.bfloat16, small_dtype=torch.bfloat16, state_dtype=torch.bfloat16),
    Problem(tokens=70, l2norm=False, state_dtype=None, gate="none"),
]


def call(a):
    inputs = [a[name] for name in ("q", "k", "v", "g", "beta")]
    options = {name: a[name] for name in ("initial_state", "cu_seqlens", "state_v_first", "scale") if name in a}
    return inputs, options


def chunks(a, tokens):
    """(batch entry, begin, end) of every 64-token chunk of every sequence."""
    offsets = a["cu_seqlens"].tolist() if "cu_seqlens" in a else None
    spans = (
        [(0, x, y) for x, y in zip(offsets, offsets[1:], strict=False)]
        if offsets
        else [(b, 0, tokens) for b in range(a["q"].shape[0])]
    )
    return [(b, t, min(t + 64, end)) for b, begin, end in spans for t in range(begin, end, 64)]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_forward_results(problem):
    a = make(problem)
    inputs, options = call(a)
    results = chunk_gated_delta_rule_fwd(*inputs, **options, output_h=True)
    assert isinstance(results, tuple) and len(results) == 6
    g, A, o, h, final, cache = results
    batch, tokens, heads = a["v"].shape[:3]
    assert (
        cache is None
        and g.dtype == torch.float32
        and A.dtype == h.dtype == o.dtype == problem.dtype
        and final.dtype == torch.float32
    )
    assert A.shape == (batch, tokens, heads, 64)
    o_expected, final_expected = chunk_gated_delta_rule(**a, output_final_state=True)
    assert torch.equal(o, o_expected) and torch.equal(final, final_expected)

    _, _, states = recurrence(**for_oracle(a))
    group = heads // a["q"].shape[2]
    k = a["k"].double().repeat_interleave(group, dim=2)
    decay = torch.zeros(batch, tokens, heads, dtype=torch.float64) if a["g"] is None else a["g"].double()
    covered = torch.zeros(batch, tokens, dtype=torch.bool)
    limit = 2e-6 if problem.dtype == torch.float32 else 5e-3
    starts = []
    for b, begin, end in chunks(a, tokens):
        covered[b, begin:end] = True
        assert relative_rms(g[b, begin:end], decay[b, begin:end].cumsum(0)) < 1e-6
        for head in range(heads):
            keys = k[b, begin:end, head]
            lower = (a["beta"][b, begin:end, head].double()[:, None] * (keys @ keys.T)).tril(-1)
            expected = torch.linalg.inv(torch.eye(end - begin, dtype=torch.float64) + lower)
            got = A[b, begin:end, head]
            assert relative_rms(got[:, : end - begin], expected) < limit
            assert not got[:, end - begin :].any() and not got[:, : end - begin].triu(1).any()
            assert (got.diagonal() == 1).all()
        starts.append((b, begin))
    assert not g[~covered].any() and not A[~covered].any() and not o[~covered].any()

    sequences = [n for n, s in enumerate(states) for _ in range((len(s) + 63) // 64)]
    chunk_of = [i for s in states for i in range((len(s) + 63) // 64)]
    flat = h.flatten(0, 1)
    sizes = (16, 16)
    assert h.shape == ((1 if "cu_seqlens" in a else batch), len(starts) // (1 if "cu_seqlens" in a else batch), heads, *sizes)
    for row, (n, i) in enumerate(zip(sequences, chunk_of, strict=True)):
        if i:
            expected = states[n][64 * i - 1]
        else:
            expected = torch.zeros(heads, 16, 16) if a.get("initial_state") is None else a["initial_state"][n]
        assert relative_rms(flat[row], expected) < limit


@pytest.mark.parametrize("problem", PROBLEMS)
def test_backward_results(problem):
    a = make(problem)
    inputs, options = call(a)
    g, A, o, h, final, _ = chunk_gated_delta_rule_fwd(*inputs, **options)
    assert h is None
    q, k, v, _, beta = inputs
    do, dht = torch.randn(o.shape).to(problem.dtype), torch.randn(final.shape)
    results = chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, do, dht, **options)
    dq, dk, dv, db, dg, dh0 = results
    assert dq.dtype == dk.dtype == dv.dtype == problem.dtype and db.dtype == beta.dtype and dg.dtype == torch.float32
    expected = with_gradients(a)
    if expected["g"] is None:
        expected["g"] = torch.zeros(v.shape[:3], requires_grad=True)
    o_expected, s_expected, _ = recurrence(**for_oracle(expected))
    ((o_expected * do.double()).sum() + (s_expected * dht.double()).sum()).backward()
    limit = 2e-5 if problem.dtype == torch.float32 else 8e-3
    for name, gradient in (("q", dq), ("k", dk), ("v", dv), ("beta", db), ("g", dg)):
        assert relative_rms(gradient, expected[name].grad) < limit, name
    if problem.state_dtype is None:
        assert dh0 is None
    else:
        assert dh0.dtype == torch.float32 and relative_rms(dh0, expected["initial_state"].grad) < limit


def test_low_level_functions_record_no_gradient():
    a = with_gradients(make(Problem(l2norm=False)))
    inputs, options = call(a)
    g, A, o, _, final, _ = chunk_gated_delta_rule_fwd(*inputs, **options)
    assert not any(x.requires_grad for x in (g, A, o, final))
    gradients = chunk_gated_delta_rule_bwd(*inputs[:3], g, inputs[4], A, torch.ones_like(o), **options)
    assert not any(x.requires_grad for x in gradients)


def test_results_that_were_not_asked_for_are_none():
    inputs, _ = call(make(Problem(l2norm=False)))
    g, A, o, h, final, cache = chunk_gated_delta_rule_fwd(*inputs, output_final_state=False)
    assert h is None and final is None and cache is None
