"""Pools of states on a CUDA device: rows read and written, padding, checkpoints, drafts and their roll-back."""

import itertools

import pytest
import torch
from bounds import assert_close
from on_cuda import moved, moved_all, skip_without_cuda
from problems import Problem, for_oracle, make
from recurrence import recurrence, single_precision_error

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_pool,
    num_checkpoints,
    recurrent_gated_delta_rule_pool,
)

skip_without_cuda()

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FUNCTIONS = [
    (chunk_gated_delta_rule_pool, BF16),
    (chunk_gated_delta_rule_pool, F16),
    (recurrent_gated_delta_rule_pool, BF16),
    (recurrent_gated_delta_rule_pool, F32),
]
EACH_FUNCTION = pytest.mark.parametrize("function, dtype", FUNCTIONS)
HEADS, DIM = 2, 16


def pool_of(slots, dtype=F32, gap=0):
    """[slots, 2, 16, 16] on the CPU, with `gap` elements between slots."""
    memory = torch.randn(slots, HEADS * DIM * DIM + gap, generator=torch.Generator().manual_seed(slots)).to(dtype)
    return memory[:, : HEADS * DIM * DIM].view(slots, HEADS, DIM, DIM)


def rows_of(pool, rows):
    return torch.where((rows >= 0)[:, None, None, None], pool[rows.clamp(min=0).long()].float(), 0.0)


def truth_of(arguments, initial_state, dtype):
    """o, last states, states after every token; error of the recurrence in single precision."""
    arguments = arguments | {"initial_state": initial_state}
    o, final, states = recurrence(**for_oracle(arguments))
    return o, final, states, single_precision_error(arguments, o, final) if dtype == F32 else 0.0


def check_states(got, truth, dtype, error):
    assert_close("state", got.cpu(), truth, "state", dtype, error)


@EACH_FUNCTION
@pytest.mark.parametrize("pool_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("v_first", [False, True])
def test_read_and_write_rows(function, dtype, pool_dtype, index_dtype, v_first):
    """In place, elsewhere, from zero, not written, padding; other slots and the gaps between slots keep every bit."""
    a = make(Problem(batch=5, tokens=4, state_dtype=None, dtype=dtype, state_v_first=v_first))
    pool = pool_of(9, pool_dtype, gap=24)
    read = torch.tensor([2, 3, -1, 5, -1], dtype=index_dtype)
    write = torch.tensor([2, 7, 0, -1, -1], dtype=index_dtype)
    o, final, _, error = truth_of(a, rows_of(pool, read), dtype)
    o[4] = 0
    on_device = moved_all(a | {"state_pool": pool, "read_rows": read, "write_rows": write})
    o_got = function(**on_device)
    assert_close("o", o_got.cpu(), o, "o", dtype, error)
    assert not o_got[4].any()
    after = on_device["state_pool"]
    for entry, slot in ((0, 2), (1, 7), (2, 0)):
        check_states(after[slot], final[entry], dtype, error)
    whole = torch.as_strided(after, (9, HEADS * DIM * DIM + 24), (HEADS * DIM * DIM + 24, 1)).cpu()
    before = torch.as_strided(pool, whole.shape, whole.stride())
    assert torch.equal(whole[:, -24:], before[:, -24:])
    for slot in (1, 3, 4, 5, 6, 8):
        assert torch.equal(whole[slot], before[slot])


@EACH_FUNCTION
def test_packed_with_options_computed_inside(function, dtype):
    a = make(
        Problem(lengths=(3, 0, 66), slack=2, gate="computed", beta="doubled", state_v_first=True, state_dtype=None, dtype=dtype)
    )
    pool, rows = pool_of(6), torch.tensor([4, 0, 2])
    o, final, _, error = truth_of(a, rows_of(pool, rows), dtype)
    on_device = moved_all(a | {"state_pool": pool, "read_rows": rows})
    assert_close("o", function(**on_device).cpu(), o, "o", dtype, error)
    check_states(on_device["state_pool"][rows.cuda()], final, dtype, error)


@pytest.mark.parametrize("own_buffer", [False, True])
@pytest.mark.parametrize("prefix", [None, [10, 64, 0]])
def test_checkpoints(own_buffer, prefix):
    lengths, dtype = (130, 64, 63), BF16
    a = make(Problem(lengths=lengths, state_dtype=None, dtype=dtype))
    prefixes = prefix or [0, 0, 0]
    prefix_lengths = None if prefix is None else torch.tensor(prefix)
    counts = num_checkpoints(64, cu_seqlens=a["cu_seqlens"].cuda(), prefix_lengths=moved(prefix_lengths))
    places = [[64 * i - p for i in range(p // 64 + 1, (p + n) // 64 + 1)] for p, n in zip(prefixes, lengths, strict=True)]
    assert counts.is_cuda and counts.tolist() == [len(x) for x in places]
    rows = torch.arange(4, 4 + sum(map(len, places)), dtype=torch.int32)
    rows[1] = -1
    pool, checkpoints = pool_of(12), pool_of(12)
    o, _, states, _ = truth_of(a, pool[:3], dtype)
    options = {
        "state_pool": pool,
        "read_rows": torch.tensor([0, 1, 2]),
        "checkpoint_rows": rows,
        "prefix_lengths": prefix_lengths,
    }
    on_device = moved_all(a | options | ({"checkpoints": checkpoints} if own_buffer else {}))
    assert_close("o", chunk_gated_delta_rule_pool(**on_device, states_every=64).cpu(), o, "o", dtype)
    target = on_device["checkpoints" if own_buffer else "state_pool"].cpu()
    for (n, end), row in zip(((n, end) for n, ends in enumerate(places) for end in ends), rows.tolist(), strict=True):
        if row >= 0:
            check_states(target[row], states[n][end - 1], dtype, 0.0)
    assert torch.equal(target[4 + len(rows) :], (checkpoints if own_buffer else pool)[4 + len(rows) :])


def test_states_after_every_token():
    a = make(Problem(batch=2, tokens=5, state_dtype=None))
    pool, rows = pool_of(3), torch.tensor([1, 2])
    _, _, states, error = truth_of(a, pool[rows], F32)
    buffer = torch.full((2, 5, HEADS, DIM, DIM), float("nan"))
    options = {"state_pool": pool, "read_rows": rows, "write_rows": torch.tensor([-1, -1]), "token_states": buffer}
    on_device = moved_all(a | options)
    recurrent_gated_delta_rule_pool(**on_device)
    assert torch.equal(on_device["state_pool"].cpu(), pool)
    check_states(on_device["token_states"], torch.stack([torch.stack(s) for s in states]), F32, error)


def test_drafts_of_different_lengths_with_offsets():
    """Each sequence starts from the state after its last accepted draft; every new state is kept in the same pool."""
    a = make(Problem(lengths=(3, 1, 2), state_dtype=None))
    token_rows = torch.tensor([[4, 5, 6, 7, 8, 9]])
    pool = pool_of(12)
    read, accepted = torch.tensor([[0, 1, 2], [3, 2, 1], [10, 11, 0]]), torch.tensor([2, 1, 2])
    o, _, states, error = truth_of(a, torch.stack([pool[1], pool[3], pool[11]]), F32)
    on_device = moved_all(a | {"state_pool": pool, "read_rows": read, "accepted": accepted, "token_rows": token_rows})
    o_got = recurrent_gated_delta_rule_pool(**on_device)
    assert_close("o", o_got.cpu(), o, "o", F32, error)
    check_states(on_device["state_pool"][4:10], torch.stack(list(itertools.chain(*states))), F32, error)
    assert torch.equal(on_device["state_pool"][:4].cpu(), pool[:4])


def test_decode_continues_prefill():
    """A prompt in chunks, then token by token in place in the pool: as the prompt and its continuation at once."""
    prompt, more = 100, 5
    a = make(Problem(batch=3, tokens=prompt + more, state_dtype=None, dtype=BF16))
    whole = moved_all(a)
    o_whole, final = chunk_gated_delta_rule(**whole, output_final_state=True)
    pool, rows = pool_of(3).cuda().zero_(), torch.arange(3).cuda()

    def part(begin, end):
        return {name: x[:, begin:end] if name in ("q", "k", "v", "g", "beta") else x for name, x in whole.items()}

    parts = [
        chunk_gated_delta_rule_pool(**part(0, prompt), state_pool=pool, read_rows=torch.full_like(rows, -1), write_rows=rows)
    ]
    for t in range(prompt, prompt + more):
        parts.append(recurrent_gated_delta_rule_pool(**part(t, t + 1), state_pool=pool, read_rows=rows))
    truth = recurrence(**for_oracle(a))
    for name, got, kind in (("o", torch.cat(parts, 1), "o"), ("o at once", o_whole, "o")):
        assert_close(name, got.cpu(), truth[0], kind, BF16)
    for name, got in (("pool", pool), ("state at once", final)):
        assert_close(name, got.cpu(), truth[1], "state", BF16)
