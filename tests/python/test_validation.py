"""C06, A23, A26: every wrong argument is named, with what was expected and what came, before any work."""

import pytest
import torch
from problems import Problem, make

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_pool,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_pool,
)

BOTH = pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
ZEROS = torch.zeros

WRONG = [
    ("q", ZEROS(1, 70, 16), ValueError, r"^q: expected 4 dimensions.*got 3"),
    ("k", ZEROS(1, 70, 16), ValueError, r"^k: expected shape \[B=1, T=70, Hq=1, K=16\], got \[1, 70, 16\]"),
    ("k", ZEROS(1, 69, 1, 16), ValueError, r"^k: .*got \[1, 69, 1, 16\]"),
    ("k", ZEROS(1, 70, 2, 16), ValueError, r"^k: .*Hq=1"),
    ("k", ZEROS(1, 70, 1, 8), ValueError, r"^k: .*K=16"),
    ("v", ZEROS(2, 70, 2, 16), ValueError, r"^v: .*B=1"),
    ("v", ZEROS(70, 2, 16), ValueError, r"^v: expected 4 dimensions"),
    ("g", ZEROS(1, 70), ValueError, r"^g: expected shape \[B=1, T=70, Hv=2\]"),
    ("g", ZEROS(()), ValueError, r"^g: "),
    ("g", ZEROS(1, 70, 2, 16), ValueError, r"^g: "),
    ("beta", ZEROS(1, 70, 1), ValueError, r"^beta: "),
    ("initial_state", ZEROS(2, 2, 16, 16), ValueError, r"^initial_state: expected shape \[N=1, Hv=2, K=16, V=16\], got \[2,"),
    ("initial_state", ZEROS(1, 2, 16), ValueError, r"^initial_state: "),
    ("k", ZEROS(1, 70, 1, 16, dtype=torch.bfloat16), TypeError, r"^k: expected float32 as q and v, got bfloat16"),
    ("v", ZEROS(1, 70, 2, 16, dtype=torch.float16), TypeError, r"^v: expected float32 as q and k, got float16"),
    ("q", ZEROS(1, 70, 1, 16, dtype=torch.float64), TypeError, r"^q: expected float32 as k and v, got float64"),
    ("g", ZEROS(1, 70, 2, dtype=torch.int64), TypeError, r"^g: expected .*float32.*got int64"),
    ("g", ZEROS(1, 70, 2, dtype=torch.float64), TypeError, r"^g: expected .*got float64"),
    ("beta", ZEROS(1, 70, 2, dtype=torch.bool), TypeError, r"^beta: .*Bool"),
    ("initial_state", ZEROS(1, 2, 16, 16, dtype=torch.int32), TypeError, r"^initial_state: .*int32"),
    ("q", [1.0], TypeError, r"^q: expected Tensor, got list"),
    ("g", 0.5, TypeError, r"^g: expected Optional\[Tensor\], got float"),
    ("scale", float("nan"), ValueError, r"^scale: expected a finite number, got nan"),
    ("scale", float("inf"), ValueError, r"^scale: "),
    ("scale", "big", TypeError, r"^scale: "),
    ("k", ZEROS(1, 70, 1, 16, device="meta"), ValueError, r"^k: expected device cpu as q, got meta"),
]


@BOTH
@pytest.mark.parametrize("name, value, error, text", WRONG, ids=lambda x: x if isinstance(x, str) and len(x) < 14 else "")
def test_wrong_argument_is_named(function, name, value, error, text):
    if function is fused_recurrent_gated_delta_rule and name == "beta" and value.dim() == 4:
        pytest.skip("refused by name")
    with pytest.raises(error, match=text):
        function(**{**make(Problem()), name: value})


@BOTH
def test_wrong_argument_is_named_when_a_gradient_is_wanted(function):
    a = make(Problem())
    a["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"^k: expected shape"):
        function(**{**a, "k": ZEROS(1, 69, 1, 16)})


@BOTH
def test_integer_inputs_are_refused(function):
    x = ZEROS(1, 4, 1, 16, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^q: expected float32, bfloat16, float16 or float64, got int32"):
        function(x, x, x, None, beta=None)


@BOTH
def test_three_element_types(function):
    a = make(Problem())
    with pytest.raises(TypeError, match=r"^q, k, v: expected one dtype, got float32, bfloat16 and float16$"):
        function(**{**a, "k": a["k"].bfloat16(), "v": a["v"].half()})


@BOTH
@pytest.mark.parametrize("heads_qk, heads_v", [(2, 3), (3, 2)])
def test_A26_head_counts_that_do_not_divide(function, heads_qk, heads_v):
    with pytest.raises(ValueError, match=rf"heads of v: expected a multiple of heads of q and k = {heads_qk}, got {heads_v}"):
        function(**make(Problem(heads_qk=heads_qk, heads_v=heads_v)))


@pytest.mark.parametrize("heads_qk, heads_v", [(16, 48), (1, 8), (3, 3)])
def test_A26_grouped_heads_match_repeated_ones(heads_qk, heads_v):
    a = make(Problem(heads_qk=heads_qk, heads_v=heads_v, dim_k=8, dim_v=8))
    repeated = {**a, **{n: a[n].repeat_interleave(heads_v // heads_qk, dim=2) for n in ("q", "k")}}
    gradients = []
    for arguments in (a, repeated):
        leaves = [arguments[n].detach().requires_grad_() for n in ("q", "k")]
        o, state = chunk_gated_delta_rule(**{**arguments, "q": leaves[0], "k": leaves[1]}, output_final_state=True)
        gradients.append((o.detach(), state.detach(), *torch.autograd.grad(o.sum() + state.sum(), leaves)))
    for x, y in zip(*gradients, strict=True):
        if x.shape != y.shape:
            y = y.unflatten(2, (heads_qk, -1)).sum(3)
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize(
    "sizes, text", [((257, 16), "head size of q and k: expected 1 to 256, got 257"), ((16, 300), "head size of v: .*got 300")]
)
def test_A23_sizes_out_of_range_are_refused(function, sizes, text):
    with pytest.raises(ValueError, match=text):
        function(**make(Problem(tokens=2, dim_k=sizes[0], dim_v=sizes[1])))


@pytest.mark.parametrize("size", [1, 2, 7, 31, 80, 96, 160, 192, 256])
def test_A23_sizes_in_range_are_right(size):
    from bounds import relative_rms
    from problems import for_oracle
    from recurrence import recurrence

    for problem in (Problem(tokens=66, dim_k=size, dim_v=24), Problem(tokens=66, dim_k=24, dim_v=size)):
        a = make(problem)
        o, state, _ = recurrence(**for_oracle(a))
        got = chunk_gated_delta_rule(**a, output_final_state=True)
        assert relative_rms(got[0], o) < 2e-6 and relative_rms(got[1], state) < 2e-6


OFFSETS = [
    ([0, 16, 40, 40, 40], None),
    ([0, 64], None),
    ([0, 0], None),
    ([0], None),
    ([0, 64, 32], r"^cu_seqlens: expected offsets that never decrease, got 32 at \[2\] after 64"),
    ([0, 100], r"^cu_seqlens: expected a last offset of at most T=64, got 100"),
    ([5, 64], r"^cu_seqlens: expected a first offset of 0, got 5"),
    ([-1, 64], r"^cu_seqlens: "),
    ([], r"^cu_seqlens: expected shape"),
]


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets, text", OFFSETS)
@pytest.mark.parametrize("gradient", [False, True])
def test_C06_offsets(function, dtype, offsets, text, gradient):
    a = make(Problem(tokens=64, state_dtype=None))
    a["v"].requires_grad_(gradient)
    offsets = torch.tensor(offsets, dtype=dtype)
    if text is None:
        o, state = function(**a, cu_seqlens=offsets, output_final_state=True)
        assert state.shape[0] == len(offsets) - 1 and not o[:, int(offsets[-1]) :].any()
        if gradient:
            o.sum().backward()
            assert not a["v"].grad[:, int(offsets[-1]) :].any()
    else:
        with pytest.raises(ValueError, match=text):
            function(**a, cu_seqlens=offsets)


@BOTH
def test_C06_batch_of_two_with_offsets(function):
    with pytest.raises(ValueError, match=r"^batch size: expected 1 with packed sequences \(cu_seqlens\), got 2"):
        function(**make(Problem(batch=2, tokens=64, state_dtype=None)), cu_seqlens=torch.tensor([0, 64]))


@BOTH
@pytest.mark.parametrize("offsets", [torch.tensor([0.0, 64.0]), torch.tensor([[0, 64]]), [0, 64]])
def test_C06_offsets_of_a_wrong_kind(function, offsets):
    with pytest.raises((TypeError, ValueError), match=r"^cu_seqlens: "):
        function(**make(Problem(tokens=64, state_dtype=None)), cu_seqlens=offsets)


def test_C06_low_level_checks():
    a = make(Problem(l2norm=False))
    inputs = [a[n] for n in ("q", "k", "v", "g", "beta")]
    g, A, o, *_ = chunk_gated_delta_rule_fwd(*inputs)
    q, k, v, _, beta = inputs
    with pytest.raises(ValueError, match=r"^A: expected shape \[1, 70, 2, 64\]"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, A[..., :32], o)
    with pytest.raises(TypeError, match=r"^A: expected torch.float32"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, A.bfloat16(), o)
    with pytest.raises(ValueError, match=r"^v: expected 4 dimensions"):
        chunk_gated_delta_rule_bwd(q, k, v[0], g, beta, A, o)
    with pytest.raises(TypeError, match=r"^g: expected float32"):
        chunk_gated_delta_rule_bwd(q, k, v, g.bfloat16(), beta, A, o)
    with pytest.raises(ValueError, match=r"^do: expected shape"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, o[:, 1:])
    with pytest.raises(ValueError, match=r"^dht: expected shape"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, o, dht=ZEROS(3, 2, 16, 16))
    with pytest.raises(ValueError, match=r"^cp_cache: expected None"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, o, cp_cache=object())
    with pytest.raises(NotImplementedError, match=r"^cp_context: must be None"):
        chunk_gated_delta_rule_fwd(*inputs, cp_context=object())
    with pytest.raises(NotImplementedError, match=r"^cp_context: must be None"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, o, cp_context=object())


POOL_CALLS = [
    ({"read_rows": torch.tensor([0, 8])}, r"^read_rows: expected -1 or a row below 8, got 8 at \[1\]"),
    ({"read_rows": torch.tensor([0, -2])}, r"^read_rows: "),
    ({"write_rows": torch.tensor([3, 3])}, r"^write_rows: expected every row written at most once.*row 3"),
    ({"write_rows": torch.tensor([1, 5])}, r"^write_rows: expected no row written for one sequence and read for another"),
    ({"write_rows": torch.tensor([9, 5])}, r"^write_rows: "),
    ({"write_rows": torch.tensor([1, 2, 3])}, r"^write_rows: expected shape"),
    ({"read_rows": torch.tensor([0.0, 1.0])}, r"^read_rows: "),
    ({"state_pool": ZEROS(8, 2, 16, 8)}, r"^state_pool: expected shape"),
    ({"state_pool": ZEROS(8, 2, 16, 16, dtype=torch.int32)}, r"^state_pool: "),
    ({"state_pool": ZEROS(8, 2, 16, 16).transpose(-1, -2)}, r"^state_pool: expected a contiguous last dimension"),
    ({"state_pool": ZEROS(1, 2, 16, 16).expand(8, -1, -1, -1)}, r"^state_pool: .*memory of its own"),
]  # fmt: skip


@pytest.mark.parametrize("function", [chunk_gated_delta_rule_pool, recurrent_gated_delta_rule_pool])
@pytest.mark.parametrize("wrong, text", POOL_CALLS)
def test_C06_slots(function, wrong, text):
    a = make(Problem(batch=2, tokens=5, state_dtype=None))
    pool = torch.full((8, 2, 16, 16), 3.0)
    call = {**a, "state_pool": pool, "read_rows": torch.tensor([0, 1]), **wrong}
    with pytest.raises((ValueError, TypeError), match=text):
        function(**call)
    assert torch.equal(pool, torch.full_like(pool, 3.0))  # nothing was written


def test_C06_accepted_and_token_rows():
    a = make(Problem(batch=2, tokens=3, state_dtype=None))
    rows = torch.tensor([[2, 3, 4], [5, 6, 7]])

    def call(**options):
        return recurrent_gated_delta_rule_pool(**a, state_pool=ZEROS(8, 2, 16, 16), **{"read_rows": rows, **options})

    with pytest.raises(ValueError, match=r"^accepted: expected 1 to P=3, got 4 at \[1\]"):
        call(accepted=torch.tensor([1, 4]))
    with pytest.raises(ValueError, match=r"^accepted: "):
        call(accepted=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"^read_rows: "):
        call()
    with pytest.raises(ValueError, match=r"^token_rows: expected every row written at most once"):
        call(accepted=torch.tensor([1, 1]), token_rows=torch.tensor([[2, 3, 3], [5, 6, 7]]))
    with pytest.raises(ValueError, match=r"^token_rows: expected -1 or a row below 8, got 8"):
        call(accepted=torch.tensor([1, 1]), token_rows=torch.tensor([[2, 3, 4], [5, 6, 8]]))
    with pytest.raises(ValueError, match=r"^token_states: expected at least B \* T = 6 rows"):
        call(accepted=torch.tensor([1, 1]), token_states=ZEROS(5, 2, 16, 16))


def test_C06_checkpoints():
    a = make(Problem(batch=2, tokens=130, state_dtype=None))

    def call(**options):
        return chunk_gated_delta_rule_pool(**a, state_pool=ZEROS(8, 2, 16, 16), read_rows=torch.tensor([0, 1]), **options)

    for states_every in (0, 32, 65, -64):
        with pytest.raises(ValueError, match=r"^states_every: expected a positive multiple of 64"):
            call(states_every=states_every, checkpoints=ZEROS(8, 2, 16, 16))
    with pytest.raises(ValueError, match=r"^checkpoint_rows: needed"):
        call(states_every=64)
    with pytest.raises(ValueError, match=r"^checkpoint_rows: belongs to states_every"):
        call(checkpoint_rows=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"^checkpoints: expected at least 4 rows, got 3"):
        call(states_every=64, checkpoints=ZEROS(3, 2, 16, 16))
    with pytest.raises(ValueError, match=r"^checkpoint_rows: expected one entry for each of 4 stored states"):
        call(states_every=64, checkpoint_rows=torch.tensor([2, 3]))
    with pytest.raises(ValueError, match=r"_rows: expected every row written at most once"):
        call(states_every=64, checkpoint_rows=torch.tensor([1, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"^checkpoint_rows: expected every row written at most once"):
        call(states_every=64, checkpoint_rows=torch.tensor([0, 1, 1, 2]), checkpoints=ZEROS(3, 2, 16, 16))
    with pytest.raises(ValueError, match=r"^prefix_lengths: "):
        call(states_every=64, checkpoint_rows=torch.tensor([2, 3, 4, 5]), prefix_lengths=torch.tensor([-1, 0]))


def test_positive_g_is_legal_and_nan_stays_in_its_head_and_sequence():
    a = make(Problem(batch=2, tokens=70))
    assert torch.isfinite(chunk_gated_delta_rule(**{**a, "g": a["g"].abs() * 0.1})[0]).all()
    clean = chunk_gated_delta_rule(**a, output_final_state=True)
    a["v"][1, 30, 1, 3] = float("nan")
    o, state = chunk_gated_delta_rule(**a, output_final_state=True)
    assert (
        torch.equal(o[0], clean[0][0]) and torch.equal(o[1, :, 0], clean[0][1, :, 0]) and torch.equal(o[1, :30], clean[0][1, :30])
    )
    assert torch.equal(state[0], clean[1][0]) and torch.equal(state[1, 0], clean[1][1, 0])
    assert o[1, 30:, 1].isnan().any() and state[1, 1].isnan().any()
