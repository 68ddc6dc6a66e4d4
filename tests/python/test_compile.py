"""torch.compile without graph breaks and with sizes that change, torch.library.opcheck, meta tensors."""

import pytest
import torch
from problems import TENSORS, Problem, make, with_gradients

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_pool,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_pool,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Compiled:
    """A compiled function that counts how often it was compiled."""

    def __init__(self, function, backend, **options):
        self.graphs = 0

        def counting(module, inputs):
            self.graphs += 1
            return torch._dynamo.lookup_backend(backend)(module, inputs)

        self.function = torch.compile(function, fullgraph=True, backend=counting, **options)

    def __call__(self, **arguments):
        return self.function(**arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("gate, beta", [("log", "given"), ("computed", "doubled")])
def test_training_with_changing_lengths(backend, gate, beta):
    def loss(**a):
        o, state = chunk_gated_delta_rule(**{**a, "q": a["q"] * 2}, output_final_state=True)
        return o.sin().sum() + state.sum()

    compiled = Compiled(loss, backend, dynamic=True)
    for tokens in (70, 33, 129):
        problem = Problem(tokens=tokens, gate=gate, beta=beta, seed=tokens)
        eager, traced = with_gradients(make(problem)), with_gradients(make(problem))
        loss(**eager).backward()
        compiled(**traced).backward()
        for name in TENSORS:
            if eager.get(name) is not None:
                torch.testing.assert_close(traced[name].grad, eager[name].grad, rtol=1e-4, atol=1e-5)
    # inductor guards the size from which it runs the multiplication in parallel
    assert compiled.graphs == 1 if backend == "aot_eager" else compiled.graphs <= 2


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_inference_with_changing_lengths(function):
    compiled = Compiled(lambda **a: function(**a, output_final_state=True), "aot_eager", dynamic=True)
    for tokens in (70, 33, 129):
        a = make(Problem(tokens=tokens, seed=tokens))
        with torch.no_grad():
            assert all(map(torch.equal, compiled(**a), function(**a, output_final_state=True)))
    assert compiled.graphs == 1


def test_packed_with_another_number_of_sequences():
    compiled = Compiled(lambda **a: chunk_gated_delta_rule(**a, output_final_state=True), "aot_eager", dynamic=True)
    for lengths in ((30, 0, 40), (5, 64, 1, 7)):
        a = make(Problem(lengths=lengths))
        assert all(map(torch.equal, compiled(**a), chunk_gated_delta_rule(**a, output_final_state=True)))
    assert compiled.graphs == 1


def test_low_level_functions():
    def both(q, k, v, g, beta, cu_seqlens=None):
        g, A, o, h, final, _ = chunk_gated_delta_rule_fwd(q, k, v, g, beta, output_h=True, cu_seqlens=cu_seqlens)
        gradients = chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, o, final, cu_seqlens=cu_seqlens)
        return o, h, final, *gradients[:5]

    for problem in (Problem(l2norm=False), Problem(l2norm=False, lengths=(65, 3))):
        a = make(problem)
        call = {name: a[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens") if name in a}
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            assert all(map(torch.equal, Compiled(both, "aot_eager")(**call), both(**call)))


def test_pool_forms_write_the_callers_pool():
    a = make(Problem(batch=2, tokens=130, state_dtype=None))
    rows, writes, kept = torch.tensor([0, 1]), torch.tensor([4, -1]), torch.tensor([2, 3, 5, 6])

    def prefill(pool, **a):
        o = chunk_gated_delta_rule_pool(
            **a, state_pool=pool, read_rows=rows, write_rows=writes, states_every=64, checkpoint_rows=kept
        )
        return o * 2

    def decode(pool, buffer, **a):
        o = recurrent_gated_delta_rule_pool(**a, state_pool=pool, read_rows=rows, token_states=buffer)
        return o + pool.sum()

    results = []
    for run in (prefill, Compiled(prefill, "inductor")):
        pool = torch.ones(8, 2, 16, 16)
        results.append((run(pool=pool, **a), pool))
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(pool, torch.ones_like(pool))

    step = {name: value[:, :3] if isinstance(value, torch.Tensor) else value for name, value in a.items()}
    results = []
    for run in (decode, Compiled(decode, "inductor")):
        pool, buffer = torch.ones(8, 2, 16, 16), torch.zeros(2, 3, 2, 16, 16)
        results.append((run(pool=pool, buffer=buffer, **step), pool, buffer))
    torch.testing.assert_close(results[0], results[1])


def test_export_with_a_length_of_its_own():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

    names = ("q", "k", "v", "g", "beta")
    inputs = [[make(Problem(tokens=tokens))[name] for name in names] for tokens in (70, 33)]
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(Layer(), tuple(inputs[0]), dynamic_shapes={name: {1: tokens} for name in names}).module()
    assert all(map(torch.equal, exported(*inputs[1]), Layer()(*inputs[1])))


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"beta": torch.rand(1, 69, 2)}, r"beta: expected shape \[B=1, T=70, Hv=2\], got \[1, 69, 2\]"),
        ({"k": torch.rand(1, 70, 1, 16, dtype=torch.bfloat16)}, r"k: expected float32 as q and v, got bfloat16"),
        ({"v": torch.rand(1, 70, 3, 16)}, r"g: expected shape"),
        ({"scale": float("nan")}, r"scale: expected a finite number"),
        ({"head_first": True}, r"head_first"),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_errors_while_tracing_say_the_same(wrong, text, dynamic):
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="eager", dynamic=dynamic)
    with pytest.raises(Exception, match=text):
        compiled(**{**make(Problem()), **wrong})


def test_errors_while_a_compiled_call_runs_are_named():
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    a = make(Problem(tokens=64, state_dtype=None))
    compiled(**a, cu_seqlens=torch.tensor([0, 32, 64]))
    with pytest.raises(RuntimeError, match="cu_seqlens: expected a last offset of at most T=64, got 65"):
        compiled(**a, cu_seqlens=torch.tensor([0, 32, 65]))


def test_meta_tensors():
    a = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in make(Problem(batch=3, heads_qk=2, heads_v=4)).items()}
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        o, state = function(**a, output_final_state=True)
        assert o.device.type == "meta" and o.shape == (3, 70, 4, 16) and state.shape == (3, 4, 16, 16)
    with pytest.raises(ValueError, match="^k: expected shape"):
        chunk_gated_delta_rule(**{**a, "k": a["k"][:, 1:]})


def op_calls():
    """Name of each op with arguments for torch.library.opcheck."""
    from flash_qla._arguments import op_inputs

    for problem in (
        Problem(gate="computed", beta="doubled", tokens=65),
        Problem(lengths=(3, 0, 64), slack=2, gate="none", beta="one", state_dtype=torch.bfloat16, dtype=torch.bfloat16),
        Problem(tokens=0, state_dtype=None),
    ):
        a = with_gradients(make(problem))
        state = a.pop("initial_state", None)
        inputs = op_inputs(**{"cu_seqlens": None, **a})
        yield "chunk_forward_training", (*inputs, state, True, True)
        a = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in a.items()}
        inputs, state = op_inputs(**{"cu_seqlens": None, **a}), None if state is None else state.detach()
        yield "chunk_forward", (*inputs, state, True)
        yield "chunk_forward", (*inputs, state, False)
        yield "recurrent_forward", (*inputs, state, True)
        yield "chunk_forward_low_level", (*inputs, state, True, problem.lengths is None)
        wanted = sum(1 << i for i, x in enumerate((*inputs[:5], state, *inputs[5:7])) if x is not None)
        yield "chunk_backward", (*inputs, state, torch.randn_like(inputs[2]), None, wanted, None)
        saved = torch.ops.flashqla.chunk_forward_training(*inputs, state, True, True)[2]
        yield "chunk_backward", (*inputs, state, torch.randn_like(inputs[2]), None, wanted, saved)
        sequences = len(problem.lengths) if problem.lengths else problem.batch
        pool, rows = torch.zeros(20, 2, 16, 16), torch.arange(sequences)
        yield "chunk_forward_pool", (*inputs, pool, rows, rows, 64, torch.zeros(4, 2, 16, 16), None, None)
        tokens = inputs[0].shape[0] * inputs[0].shape[1]
        yield "recurrent_forward_pool", (*inputs, pool, rows, rows, None, torch.zeros(tokens, 2, 16, 16), None)


@pytest.mark.parametrize("name, arguments", list(op_calls()))
def test_opcheck(name, arguments):
    torch.library.opcheck(getattr(torch.ops.flashqla, name).default, arguments)
