"""Arguments of a wrong kind (None, lists, sparse tensors) and calls that only look right: refused in the caller's names."""

import pytest
import torch
from problems import Problem, make

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_pool,
    explain,
    fused_recurrent_gated_delta_rule,
    num_checkpoints,
    recurrent_gated_delta_rule_pool,
)
from flash_qla.utils import l2norm

BOTH = pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
POOLS = pytest.mark.parametrize("function", [chunk_gated_delta_rule_pool, recurrent_gated_delta_rule_pool])
ZEROS = torch.zeros


@BOTH
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_none_for_a_tensor(function, name):
    with pytest.raises(TypeError, match=rf"^{name}: expected Tensor, got NoneType"):
        function(**{**make(Problem()), name: None})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("wrong", [None, [1.0]])
def test_no_tensor_for_the_low_level_functions(name, wrong):
    a = make(Problem(l2norm=False, state_dtype=None))
    inputs = {n: a[n] for n in ("q", "k", "v", "g", "beta")}
    g, A, o, *_ = chunk_gated_delta_rule_fwd(**inputs)
    with pytest.raises(TypeError, match=rf"^{name}: expected Tensor, got"):
        chunk_gated_delta_rule_fwd(**{**inputs, name: wrong}, output_h=True)
    with pytest.raises(TypeError, match=rf"^{name}: expected Tensor, got"):
        chunk_gated_delta_rule_bwd(**{**inputs, "g": g, name: wrong}, A=A, do=o)
    with pytest.raises(TypeError, match=rf"^{name}: expected Tensor, got"):
        explain(**{**inputs, name: wrong})


def test_no_tensor_for_what_the_low_level_backward_takes_besides():
    a = make(Problem(l2norm=False, state_dtype=None))
    q, k, v, g, beta = inputs = [a[n] for n in ("q", "k", "v", "g", "beta")]
    g, A, o, *_ = chunk_gated_delta_rule_fwd(*inputs)
    with pytest.raises(TypeError, match=r"^A: expected Tensor, got list"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, [1], o)
    with pytest.raises(ValueError, match=r"^A: expected device cpu as k, got meta"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, A.to("meta"), o)
    with pytest.raises(TypeError, match=r"^g: expected Tensor, got NoneType"):
        chunk_gated_delta_rule_bwd(q, k, v, None, beta, A, o)
    with pytest.raises(TypeError, match=r"^initial_state: expected Tensor, got list"):
        chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, o, initial_state=[1])


@BOTH
@pytest.mark.parametrize(
    "name, wrong, got",
    [
        ("q", ZEROS(1, 70, 1, 16).to_sparse(), "torch.sparse_coo"),
        ("g", ZEROS(1, 70, 2).to_sparse(), "torch.sparse_coo"),
        ("v", ZEROS(1, 70, 2, 16).to_mkldnn(), "torch._mkldnn"),
    ],
    ids=["sparse q", "sparse g", "mkldnn v"],
)
def test_tensors_without_strides(function, name, wrong, got):
    with pytest.raises(TypeError, match=rf"^{name}: expected a dense tensor, got {got}"):
        function(**{**make(Problem(state_dtype=None)), name: wrong})


@BOTH
@pytest.mark.parametrize(
    "name, dtype, text",
    [
        ("q", torch.complex64, r"^q: expected float32, bfloat16 or float16, got ComplexFloat"),
        ("v", torch.float8_e4m3fn, r"^v: expected float32, bfloat16 or float16, got Float8_e4m3fn"),
        ("beta", torch.bool, r"^beta: expected float32, bfloat16 or float16, got Bool"),
        ("cu_seqlens", torch.int16, r"^cu_seqlens: expected int64 or int32, got Short"),
    ],
)
def test_element_types_that_no_argument_has(function, name, dtype, text):
    a = {**make(Problem(state_dtype=None)), "cu_seqlens": torch.tensor([0, 70])}
    with pytest.raises(TypeError, match=text):
        function(**{**a, name: a[name].to(dtype)})


@BOTH
def test_options_have_the_callers_names(function):
    with pytest.raises(TypeError, match=r"^use_qk_l2norm_in_kernel: expected bool, got str"):
        function(**{**make(Problem()), "use_qk_l2norm_in_kernel": "yes"})


@BOTH
def test_offsets_and_their_copy(function):
    a = make(Problem(tokens=64, state_dtype=None))
    offsets = torch.tensor([0, 30, 64])
    with pytest.raises(TypeError, match=r"^cu_seqlens: expected Tensor, got list"):
        function(**a, cu_seqlens=[0, 30, 64], cu_seqlens_cpu=offsets)
    with pytest.raises(TypeError, match=r"^cu_seqlens_cpu: expected Tensor, got list"):
        function(**a, cu_seqlens=offsets, cu_seqlens_cpu=[0, 30, 64])
    with pytest.raises(ValueError, match=r"^cu_seqlens_cpu: expected a copy of cu_seqlens, \[0, 30, 64\], got \[0, 31, 64\]"):
        function(**a, cu_seqlens=offsets, cu_seqlens_cpu=torch.tensor([0, 31, 64], dtype=torch.int32))
    function(**a, cu_seqlens=offsets, cu_seqlens_cpu=offsets.int())


@POOLS
@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"state_pool": None}, r"^state_pool: expected Tensor, got NoneType"),
        ({"state_pool": [1]}, r"^state_pool: expected Tensor, got list"),
        ({"read_rows": None}, r"^read_rows: expected Tensor, got NoneType"),
        ({"state_pool": ZEROS(2, 2, 16, 16, device="meta")}, r"^state_pool: expected device cpu as q, got meta"),
    ],
    ids=["no pool", "list", "no rows", "device"],
)
def test_pool_arguments_of_a_wrong_kind(function, wrong, text):
    # As many slots as sequences: rows that are left out must not be taken for all of them.
    call = {**make(Problem(batch=2, tokens=5, state_dtype=None)), "state_pool": ZEROS(2, 2, 16, 16), "read_rows": torch.arange(2)}
    with pytest.raises((TypeError, ValueError), match=text):
        function(**{**call, **wrong})


def test_the_index_that_writes_a_row_twice_is_named():
    a = make(Problem(tokens=64, state_dtype=None))
    call = {"state_pool": ZEROS(4, 2, 16, 16), "read_rows": torch.tensor([1])}
    with pytest.raises(ValueError, match=r"^checkpoint_rows: expected every row written at most once, got row 1 "):
        chunk_gated_delta_rule_pool(**a, **call, states_every=64, checkpoint_rows=torch.tensor([1]))
    rows = torch.full((1, 64), -1)
    rows[0, 2] = rows[0, 3] = 2
    with pytest.raises(ValueError, match=r"^token_rows: expected every row written at most once, got row 2 "):
        recurrent_gated_delta_rule_pool(**a, **call, token_rows=rows)


def test_an_overlap_is_told_in_the_callers_names():
    a = make(Problem(tokens=64, state_dtype=None))
    memory = ZEROS(6, 2, 16, 16)
    with pytest.raises(ValueError, match=r"^checkpoints: expected memory apart from that of state_pool, got an overlap"):
        chunk_gated_delta_rule_pool(
            **a, state_pool=memory[:4], read_rows=torch.tensor([0]), states_every=64, checkpoints=memory[2:]
        )


def test_token_states_are_batch_entries_and_tokens():
    a = make(Problem(batch=2, tokens=3, state_dtype=None))
    call = {**a, "state_pool": ZEROS(2, 2, 16, 16), "read_rows": torch.arange(2)}
    for states in (ZEROS(3, 2, 2, 16, 16), ZEROS(2, 4, 2, 16, 16)):
        with pytest.raises(ValueError, match=r"^token_states: expected shape \[B=2, T=3, Hv, K, V\], got"):
            recurrent_gated_delta_rule_pool(**call, token_states=states)
    with pytest.raises(ValueError, match=r"^token_states: expected batch entries that follow each other without a gap"):
        recurrent_gated_delta_rule_pool(**call, token_states=ZEROS(2, 8, 2, 16, 16)[:, :3])
    with pytest.raises(TypeError, match=r"^token_states: expected Optional\[Tensor\], got list"):
        recurrent_gated_delta_rule_pool(**call, token_states=[1])


def test_what_is_written_has_no_gradient():
    a = make(Problem(tokens=64, state_dtype=None))
    call = {**a, "state_pool": ZEROS(4, 2, 16, 16), "read_rows": torch.tensor([1])}
    states = ZEROS(64, 2, 16, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^recurrent_gated_delta_rule_pool has no gradient"):
        recurrent_gated_delta_rule_pool(**call, token_states=states)
    with pytest.raises(NotImplementedError, match=r"^chunk_gated_delta_rule_pool has no gradient"):
        chunk_gated_delta_rule_pool(**call, states_every=64, checkpoints=states)


@pytest.mark.parametrize(
    "wrong, error, text",
    [
        ({"states_every": 0}, ValueError, r"^states_every: expected a positive multiple of 64, got 0"),
        ({"states_every": -64}, ValueError, r"^states_every: "),
        ({"states_every": 96}, ValueError, r"^states_every: "),
        ({"states_every": 64.0}, TypeError, r"^states_every: .*got 64.0"),
        ({"cu_seqlens": [0, 64]}, TypeError, r"^cu_seqlens: expected Tensor, got list"),
        ({"cu_seqlens": torch.tensor([0.0, 64.0])}, TypeError, r"^cu_seqlens: expected int64 or int32"),
        ({"cu_seqlens": torch.tensor(0)}, ValueError, r"^cu_seqlens: expected one dimension"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, ValueError, r"^cu_seqlens: expected shape \[N\+1\]"),
        ({"cu_seqlens": None}, ValueError, r"^cu_seqlens: needed unless batch and tokens"),
        ({"cu_seqlens": None, "batch": -1, "tokens": 4}, ValueError, r"^batch: expected at least 0, got -1"),
        ({"cu_seqlens": None, "batch": 1, "tokens": -4}, ValueError, r"^tokens: "),
        ({"cu_seqlens": None, "batch": 1.5, "tokens": 4}, TypeError, r"^batch: expected int, got float"),
        ({"prefix_lengths": torch.tensor([1, 2])}, ValueError, r"^prefix_lengths: expected shape \[N=1\], got \[2\]"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_num_checkpoints(wrong, error, text):
    with pytest.raises(error, match=text):
        num_checkpoints(**{"states_every": 64, "cu_seqlens": torch.tensor([0, 200]), **wrong})


def test_l2norm_of_other_kinds():
    with pytest.raises(TypeError, match=r"^x: expected floating point, got torch.int64"):
        l2norm(torch.tensor([3, 4]))
    with pytest.raises(TypeError, match=r"^x: expected Tensor, got list"):
        l2norm([3.0, 4.0])
    with pytest.raises(TypeError, match=r"^output_dtype: expected floating point, got torch.int32"):
        l2norm(torch.tensor([3.0, 4.0]), output_dtype=torch.int32)


@pytest.mark.parametrize("batch, tokens", [(0, 70), (0, 0), (2, 0)])
def test_states_before_no_chunks(batch, tokens):
    a = make(Problem(batch=batch, tokens=tokens, l2norm=False, state_dtype=None))
    h = chunk_gated_delta_rule_fwd(*(a[n] for n in ("q", "k", "v", "g", "beta")), output_h=True)[3]
    assert h.shape == (batch, (tokens + 63) // 64, 2, 16, 16)
