"""The operations on a pool of states: in place, read and write rows, padding, checkpoints, drafts and their roll-back."""

import itertools

import pytest
import torch
from bounds import relative_rms
from conftest import implementations
from problems import Problem, for_oracle, make
from recurrence import recurrence

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_pool,
    fused_recurrent_gated_delta_rule,
    num_checkpoints,
    recurrent_gated_delta_rule_pool,
)

FUNCTIONS = {
    chunk_gated_delta_rule_pool: chunk_gated_delta_rule,
    recurrent_gated_delta_rule_pool: fused_recurrent_gated_delta_rule,
}
BOTH = pytest.mark.parametrize("function", list(FUNCTIONS))
PER_TOKEN = ("q", "k", "v", "g", "beta")


def pool_of(slots, dtype=torch.float32, gap=0):
    """[slots, 2, 16, 16] with `gap` elements between slots."""
    memory = torch.randn(slots, 2 * 16 * 16 + gap).to(dtype)
    return memory[:, : 2 * 16 * 16].view(slots, 2, 16, 16)


def part(a, begin, end):
    return {name: x[:, begin:end] if name in PER_TOKEN else x for name, x in a.items()}


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gap", [0, 24])
def test_read_and_write_rows(function, dtype, index_dtype, gap):
    """In place, elsewhere, from zero, not written, padding. Other slots and the gaps between slots keep every bit."""
    a = make(Problem(batch=5, tokens=4, state_dtype=None))
    pool = pool_of(9, dtype, gap)
    read = torch.tensor([2, 3, -1, 5, -1], dtype=index_dtype)
    write = torch.tensor([2, 7, 0, -1, -1], dtype=index_dtype)
    memory = pool.untyped_storage()
    before = torch.tensor(list(memory), dtype=torch.uint8)
    states = torch.where((read >= 0)[:, None, None, None], pool[read.clamp(min=0).long()].float(), 0.0)
    o_expected, s_expected = FUNCTIONS[function](**a, initial_state=states, output_final_state=True)
    o_expected[4] = 0  # padding
    o = function(**a, state_pool=pool, read_rows=read, write_rows=write)
    assert torch.equal(o, o_expected)
    for entry, slot in ((0, 2), (1, 7), (2, 0)):
        assert torch.equal(pool[slot], s_expected[entry].to(dtype))
    after = torch.tensor(list(memory), dtype=torch.uint8)
    mask = torch.ones_like(pool, dtype=torch.bool)
    written = torch.zeros(after.numel(), dtype=torch.bool)
    size = pool.element_size()
    for slot in (2, 7, 0):
        begin = slot * pool.stride(0) * size
        written[begin : begin + mask[slot].numel() * size] = True
    assert torch.equal(before[~written], after[~written])


@BOTH
def test_write_rows_default_to_read_rows(function):
    a = make(Problem(batch=2, tokens=3, state_dtype=None))
    pools = [pool_of(4) for _ in range(1)]
    pools.append(pools[0].clone())
    rows = torch.tensor([3, 1])
    o = function(**a, state_pool=pools[0], read_rows=rows)
    o_explicit = function(**a, state_pool=pools[1], read_rows=rows, write_rows=rows)
    assert torch.equal(o, o_explicit) and torch.equal(*pools)


@BOTH
def test_packed_value_first_and_inside_options(function):
    a = make(
        Problem(lengths=(3, 0, 66), slack=2, gate="computed", beta="doubled", state_v_first=True, state_dtype=None, dim_v=16)
    )
    pool = pool_of(6)
    rows = torch.tensor([4, 0, 2])
    o_expected, s_expected = FUNCTIONS[function](**a, initial_state=pool[rows], output_final_state=True)
    o = function(**a, state_pool=pool, read_rows=rows)
    assert torch.equal(o, o_expected) and torch.equal(pool[rows], s_expected)


def test_A18_a_permuted_pool_is_written_itself():
    """[Hv, N, V, K] in memory, seen as [N, Hv, V, K]: the caller's tensor changes, not a copy."""
    a = make(Problem(batch=2, tokens=2, dim_k=80, dim_v=96, state_v_first=True, state_dtype=None))
    memory = torch.randn(2, 3, 96, 80)
    pool = memory.permute(1, 0, 2, 3)
    rows = torch.tensor([2, 0])
    _, s_expected = fused_recurrent_gated_delta_rule(**a, initial_state=pool[rows], output_final_state=True)
    recurrent_gated_delta_rule_pool(**a, state_pool=pool, read_rows=rows)
    assert torch.equal(memory[:, 2], s_expected[0]) and torch.equal(memory[:, 0], s_expected[1])


@pytest.mark.parametrize("own_buffer", [False, True])
@pytest.mark.parametrize("prefix", [None, [10, 64, 0]])
def test_checkpoints(own_buffer, prefix, force):
    """States after every 64 tokens, counted from the prefix; -1 skips one."""
    lengths = (130, 64, 63)
    a = make(Problem(lengths=lengths, state_dtype=None))
    offsets = a["cu_seqlens"].tolist()
    prefixes = prefix or [0, 0, 0]
    counts = num_checkpoints(64, cu_seqlens=a["cu_seqlens"], prefix_lengths=None if prefix is None else torch.tensor(prefix))
    places = [[64 * i - p for i in range(p // 64 + 1, (p + n) // 64 + 1)] for p, n in zip(prefixes, lengths, strict=True)]
    assert counts.tolist() == [len(x) for x in places]
    total = int(counts.sum())
    rows = torch.arange(4, 4 + total, dtype=torch.int32)
    rows[1] = -1
    for implementation in implementations("chunk_forward"):
        force(implementation)
        pool = pool_of(12)
        before = pool.clone()
        checkpoints = pool_of(12) if own_buffer else None
        o = chunk_gated_delta_rule_pool(
            **a, state_pool=pool, read_rows=torch.tensor([0, 1, 2]), states_every=64, checkpoints=checkpoints,
            checkpoint_rows=rows,
            prefix_lengths=None if prefix is None else torch.tensor(prefix),
        )  # fmt: skip
        plain, _ = chunk_gated_delta_rule(**a, initial_state=before[:3])
        assert torch.equal(o, plain) if prefix is None else relative_rms(o, plain) < 2e-6
        target = checkpoints if own_buffer else pool
        place = 0
        for n, ends in enumerate(places):
            for end in ends:
                if rows[place] >= 0:
                    alone = part(a, offsets[n], offsets[n] + end) | {"cu_seqlens": None}
                    _, expected, _ = recurrence(**for_oracle(alone), initial_state=before[n : n + 1])
                    assert relative_rms(target[rows[place]], expected[0]) < 2e-6, (implementation, n, end)
                place += 1
        if not own_buffer:
            assert torch.equal(pool[4 + total :], before[4 + total :])
    assert total == 3


def test_checkpoints_without_rows_are_packed_in_order():
    a = make(Problem(batch=2, tokens=200, state_dtype=None))
    buffer = torch.full((7, 2, 16, 16), 9.0)
    chunk_gated_delta_rule_pool(**a, state_pool=pool_of(2), read_rows=torch.tensor([-1, -1]), write_rows=torch.tensor([0, 1]),
                                states_every=64, checkpoints=buffer)  # fmt: skip
    for n, i in itertools.product(range(2), range(3)):
        alone = {name: x[n : n + 1, : 64 * (i + 1)] if name in PER_TOKEN else x for name, x in a.items()}
        assert torch.equal(buffer[3 * n + i], chunk_gated_delta_rule(**alone, output_final_state=True)[1][0])
    assert (buffer[6] == 9.0).all()


@pytest.mark.parametrize("five_dimensions", [False, True])
def test_states_after_every_token(five_dimensions, force):
    a = make(Problem(batch=2, tokens=5, state_dtype=None))
    pool = pool_of(3)
    rows = torch.tensor([1, 2])
    _, _, states = recurrence(**for_oracle(a), initial_state=pool[rows])
    expected = torch.stack([torch.stack(s) for s in states])
    for implementation in implementations("recurrent_forward"):
        force(implementation)
        buffer = torch.zeros(2, 5, 2, 16, 16) if five_dimensions else torch.zeros(10, 2, 16, 16)
        copy = pool.clone()
        recurrent_gated_delta_rule_pool(
            **a, state_pool=copy, read_rows=rows, write_rows=torch.tensor([-1, -1]), token_states=buffer
        )
        assert torch.equal(copy, pool)
        assert relative_rms(buffer.view(2, 5, 2, 16, 16), expected) < 1e-6
        last = buffer.view(2, 5, 2, 16, 16)[:, -1]
        recurrent_gated_delta_rule_pool(**a, state_pool=copy, read_rows=rows)
        assert torch.equal(copy[rows], last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rolled_back_drafts(dtype, force):
    """Draft, accept some, draft again from the accepted row of the same pool: as if only accepted tokens had ever been seen."""
    drafts, entries = 4, 3
    rows = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]])
    rounds = [torch.tensor([1, 4, 2]), torch.tensor([3, 1, 4]), torch.tensor([2, 2, 2])]
    steps = [make(Problem(batch=entries, tokens=drafts, state_dtype=None, seed=seed)) for seed in range(4)]
    for implementation in implementations("recurrent_forward"):
        force(implementation)
        pool = pool_of(15, dtype)
        start = pool[:3].float()
        first = recurrent_gated_delta_rule_pool(
            **steps[0], state_pool=pool, read_rows=torch.arange(3), write_rows=torch.full((3,), -1), token_rows=rows
        )
        outputs = [first]
        for step, accepted in zip(steps[1:], rounds, strict=True):
            outputs.append(
                recurrent_gated_delta_rule_pool(**step, state_pool=pool, read_rows=rows, accepted=accepted, token_rows=rows)
            )
        for n in range(entries):
            kept = [step[name][n : n + 1, : rounds[i][n]] for i, step in enumerate(steps[:3]) for name in ("q",)]
            assert sum(x.shape[1] for x in kept) == sum(int(r[n]) for r in rounds)
            accepted = {
                name: torch.cat(
                    [*(step[name][n : n + 1, : rounds[i][n]] for i, step in enumerate(steps[:3])), steps[3][name][n : n + 1]], 1
                )
                for name in PER_TOKEN
            }
            truth, _, _ = recurrence(**accepted, l2norm=True, initial_state=start[n : n + 1])
            limit = 2e-6 if dtype == torch.float32 else 2e-2  # states rounded to bfloat16 after each of a dozen tokens
            assert relative_rms(outputs[3][n], truth[0, -drafts:]) < limit, (implementation, n)


def test_padding_entry_of_a_draft_call():
    a = make(Problem(batch=2, tokens=3, state_dtype=None))
    pool, buffer = pool_of(4), torch.full((6, 2, 16, 16), 5.0)
    before = pool.clone()
    o = recurrent_gated_delta_rule_pool(
        **a, state_pool=pool, read_rows=torch.tensor([1, -1]), write_rows=torch.tensor([1, -1]), token_states=buffer
    )
    assert not o[1].any() and o[0].any()
    assert (buffer[3:] == 5.0).all() and not (buffer[:3] == 5.0).all()
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])


def test_drafts_of_different_lengths_with_offsets():
    """vLLM's way: [1, L, ...] and offsets, rows [N, P] of which the first few are used."""
    lengths, tokens = (3, 1, 2), 6
    a = make(Problem(lengths=lengths, state_dtype=None))
    token_rows = torch.tensor([[4, 5, 6, 7, 8, 9]])
    pool = pool_of(12)
    start = pool.clone()
    read = torch.tensor([[0, 1, 2], [3, 2, 1], [10, 11, 0]])
    accepted = torch.tensor([2, 1, 2])
    o = recurrent_gated_delta_rule_pool(**a, state_pool=pool, read_rows=read, accepted=accepted, token_rows=token_rows)
    first = torch.stack([start[1], start[3], start[11]])
    truth, _, states = recurrence(**for_oracle(a), initial_state=first)
    assert relative_rms(o, truth) < 2e-6
    assert relative_rms(pool[4:10], torch.stack(list(itertools.chain(*states)))) < 2e-6
    assert sum(lengths) == tokens and torch.equal(pool[:4], start[:4])


@BOTH
@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_that_needs_the_old_pool_is_refused(function, compiled):
    a = make(Problem(tokens=64, state_dtype=None))
    pool, other, factor = pool_of(4), pool_of(64), torch.ones(1, requires_grad=True)
    option = (
        {"token_states": other} if function is recurrent_gated_delta_rule_pool else {"states_every": 64, "checkpoints": other}
    )
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    losses = [(tensor * factor).sum() for tensor in (pool, other)]
    with torch.no_grad():
        function(**a, state_pool=pool, read_rows=torch.tensor([1]), **option)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
