"""C05, C07, C01: names, positions and import paths that callers rely on; options of the peers work or are refused by name."""

import importlib
import inspect
import pickle
import re

import pytest
import torch
from problems import Problem, make

import flash_qla
from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
)
from flash_qla._arguments import op_inputs

LEADING_NINE = "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel".split()


def parameters(function, kind):
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind == kind]


def defaults(function):
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty}


POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def test_C05_chunk_signature():
    assert parameters(chunk_gated_delta_rule, POSITIONAL) == LEADING_NINE
    assert set(parameters(chunk_gated_delta_rule, KEYWORD)) == set(
        "use_beta_sigmoid_in_kernel allow_neg_eigval use_gate_in_kernel A_log dt_bias state_v_first "
        "transpose_state_layout cu_seqlens cu_seqlens_cpu chunk_indices chunk_size auto_cp enable_fwd_cp_cache force_intra_cp "
        "cp_context head_first".split()
    ) | {"recompute_in_backward"}  # the last is our own
    assert not any(p.kind == p.VAR_KEYWORD for p in inspect.signature(chunk_gated_delta_rule).parameters.values())
    required = [name for name in LEADING_NINE if name not in defaults(chunk_gated_delta_rule)]
    assert required == ["q", "k", "v", "g", "beta"]


def test_C05_low_level_signatures():
    assert parameters(chunk_gated_delta_rule_fwd, POSITIONAL) == (
        "q k v g beta scale initial_state cu_seqlens output_final_state output_h auto_cp state_v_first enable_fwd_cp_cache "
        "cp_context is_train".split()
    )
    assert defaults(chunk_gated_delta_rule_fwd) == {
        "scale": None, "initial_state": None, "cu_seqlens": None, "output_final_state": True, "output_h": False, "auto_cp": True,
        "state_v_first": False, "enable_fwd_cp_cache": False, "cp_context": None, "is_train": None,
    }  # fmt: skip
    assert parameters(chunk_gated_delta_rule_bwd, POSITIONAL) == (
        "q k v g beta A do dht scale initial_state cu_seqlens state_v_first auto_cp cp_cache cp_context".split()
    )
    assert defaults(chunk_gated_delta_rule_bwd) == {
        "dht": None, "scale": None, "initial_state": None, "cu_seqlens": None, "state_v_first": False, "auto_cp": True,
        "cp_cache": None, "cp_context": None,
    }  # fmt: skip


def test_C05_recurrent_signature():
    assert parameters(fused_recurrent_gated_delta_rule, POSITIONAL) == (
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias "
        "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens".split()
    )
    given = defaults(fused_recurrent_gated_delta_rule)
    assert given["g"] is given["beta"] is None and given["output_final_state"] is False


def test_C05_functions_agree_on_their_options():
    """Every signature is written out, so that callers can introspect it; here the lists are held to each other."""

    def options(function):
        return {name: (p.default, p.annotation) for name, p in inspect.signature(function).parameters.items()}

    chunk = options(chunk_gated_delta_rule)
    explained = options(flash_qla.explain)
    assert explained.pop("operation")[0] == "chunk_forward"
    assert list(explained) == list(chunk)
    optional_here = {name: (None, chunk[name][1]) for name in ("g", "beta")}
    assert explained == {**chunk, **optional_here}

    recurrent = options(fused_recurrent_gated_delta_rule)
    assert recurrent.pop("gk") == recurrent.pop("gv") == (None, chunk["g"][1])
    assert recurrent == {name: {**chunk, **optional_here}[name] for name in recurrent}

    common = inspect.signature(op_inputs).parameters
    for pool in (flash_qla.chunk_gated_delta_rule_pool, flash_qla.recurrent_gated_delta_rule_pool):
        names = list(options(pool))
        assert names[:7] == ["q", "k", "v", "g", "beta", "state_pool", "read_rows"]
        assert names[names.index("scale") :] == [name for name in chunk if name in common and name not in names[:5]]
        assert {name: options(pool)[name] for name in common} == {name: chunk[name] for name in common}

    low_level = [options(function) for function in (chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd)]
    for name in ("scale", "initial_state", "cu_seqlens", "state_v_first", "auto_cp", "cp_context"):
        assert low_level[0][name] == low_level[1][name] == chunk[name]


@pytest.mark.parametrize(
    "path, names",
    [
        ("flash_qla", "chunk_gated_delta_rule chunk_gated_delta_rule_fwd chunk_gated_delta_rule_bwd chunk_gdn "
                      "fused_recurrent_gated_delta_rule fused_recurrent_gdn explain __version__"),
        ("flash_qla.ops.gated_delta_rule", "chunk_gated_delta_rule fused_recurrent_gated_delta_rule"),
        ("flash_qla.ops.gated_delta_rule.chunk",
         "chunk_gated_delta_rule chunk_gated_delta_rule_fwd chunk_gated_delta_rule_bwd chunk_gdn"),
        ("flash_qla.ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule fused_recurrent_gdn"),
        ("flash_qla.utils", "l2norm"),
        ("flash_qla.utils.l2norm", "l2norm"),
    ],
)  # fmt: skip
def test_C05_import_paths(path, names):
    module = importlib.import_module(path)
    assert all(hasattr(module, name) for name in names.split())
    for name in names.split():
        value = getattr(module, name)
        if inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value


def test_C05_version_is_that_of_the_checkout():
    assert re.fullmatch(r"\d+\.\d+\.\d+", flash_qla.__version__)
    assert torch.ops.flashqla.version() == flash_qla.__version__


def test_C05_by_position_and_by_keyword_agree():
    a = make(Problem())
    keyword = chunk_gated_delta_rule(**a, output_final_state=True)
    position = chunk_gated_delta_rule(a["q"], a["k"], a["v"], a["g"], a["beta"], None, a["initial_state"], True, True)
    assert all(map(torch.equal, keyword, position))
    keyword = fused_recurrent_gated_delta_rule(**a, output_final_state=True)
    position = fused_recurrent_gated_delta_rule(
        a["q"], a["k"], a["v"], a["g"], None, None, a["beta"], None, a["initial_state"], True, True
    )
    assert all(map(torch.equal, keyword, position))


def test_C05_a_tenth_position_is_an_error():
    a = make(Problem())
    with pytest.raises(TypeError, match="positional"):
        chunk_gated_delta_rule(a["q"], a["k"], a["v"], a["g"], a["beta"], None, None, False, False, a["g"])


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_C05_unknown_keyword_is_a_type_error(function):
    with pytest.raises(TypeError, match="no_such_option"):
        function(**make(Problem()), no_such_option=1)


@pytest.mark.parametrize(
    "option, error, text",
    [
        ({"head_first": True}, ValueError, r"head_first.*transpose"),
        ({"chunk_size": 128}, ValueError, r"chunk_size: expected 16, 32 or 64.*128"),
        ({"chunk_size": False}, ValueError, r"chunk_size"),
        ({"cp_context": object()}, NotImplementedError, r"cp_context: must be None"),
        ({"allow_neg_eigval": True}, ValueError, r"allow_neg_eigval.*use_beta_sigmoid_in_kernel"),
        ({"A_log": torch.zeros(2)}, ValueError, r"A_log.*use_gate_in_kernel"),
        ({"dt_bias": torch.zeros(2)}, ValueError, r"dt_bias.*use_gate_in_kernel"),
        ({"use_gate_in_kernel": True}, ValueError, r"^A_log: expected a tensor, which use_gate_in_kernel=True needs, got None"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(2), "g": None}, ValueError, r"^g: .*use_gate_in_kernel"),
        ({"use_beta_sigmoid_in_kernel": True, "beta": None}, ValueError, r"^beta: .*use_beta_sigmoid_in_kernel"),
    ],
)  # fmt: skip
def test_C05_refused_by_name(option, error, text):
    with pytest.raises(error, match=text):
        chunk_gated_delta_rule(**{**make(Problem()), **option})


@pytest.mark.parametrize("name", ["gk", "gv", "beta"])
def test_C05_recurrent_refuses_per_dimension_gates(name):
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        fused_recurrent_gated_delta_rule(**{**make(Problem()), name: torch.zeros(1, 70, 2, 16)})


def test_C05_options_without_effect_on_the_result():
    a = make(Problem(lengths=(30, 40)))
    expected = chunk_gated_delta_rule(**a, output_final_state=True)
    options = [{"chunk_size": 16}, {"chunk_size": 32}, {"auto_cp": False}, {"enable_fwd_cp_cache": False},
               {"force_intra_cp": True},
               {"head_first": False}, {"cp_context": None}, {"chunk_indices": torch.zeros(3, 2, dtype=torch.int64)}]  # fmt: skip
    for option in options:
        assert all(map(torch.equal, expected, chunk_gated_delta_rule(**a, **option, output_final_state=True))), option


def test_C05_deprecated_name_of_state_v_first():
    a = make(Problem(state_v_first=True))
    expected = chunk_gated_delta_rule(**a, output_final_state=True)
    a.pop("state_v_first")
    with pytest.warns(FutureWarning, match="use state_v_first"):
        got = chunk_gated_delta_rule(**a, transpose_state_layout=True, output_final_state=True)
    assert all(map(torch.equal, expected, got))
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="transpose_state_layout.*contradicts"):
        chunk_gated_delta_rule(**a, state_v_first=True, transpose_state_layout=False)


def test_C05_cu_seqlens_cpu_is_used():
    a = make(Problem(lengths=(30, 40)))
    offsets = a.pop("cu_seqlens")
    expected = chunk_gated_delta_rule(**a, cu_seqlens=offsets)[0]
    assert torch.equal(chunk_gated_delta_rule(**a, cu_seqlens=offsets.to("meta"), cu_seqlens_cpu=offsets)[0], expected)
    assert torch.equal(chunk_gated_delta_rule(**a, cu_seqlens_cpu=offsets)[0], expected)
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected a copy"):
        chunk_gated_delta_rule(**a, cu_seqlens=offsets, cu_seqlens_cpu=offsets[:2])


def test_C01_one_meaning_of_g():
    """g is the natural logarithm: 0 keeps the state, -inf forgets it, log(2) doubles it."""
    state = torch.randn(1, 1, 16, 16)
    row = torch.zeros(1, 1, 1, 16)

    def after(decay):
        g = torch.full((1, 1, 1), decay)
        return chunk_gated_delta_rule(row, row, row, g, None, initial_state=state, output_final_state=True)[1]

    assert torch.equal(after(0.0), state)
    assert torch.equal(after(float("-inf")), torch.zeros_like(state))
    torch.testing.assert_close(after(0.6931471805599453), 2 * state)


def test_scale_zero_is_zero():
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        assert not function(**{**make(Problem()), "scale": 0.0})[0].any()
    a = make(Problem(l2norm=False))
    assert not chunk_gated_delta_rule_fwd(*(a[n] for n in ("q", "k", "v", "g", "beta")), scale=0.0)[2].any()


def test_C07_docstrings_name_every_argument():
    for name in flash_qla.__all__:
        function = getattr(flash_qla, name)
        if inspect.isfunction(function):
            assert ">>>" in function.__doc__, name
            known = function.__doc__ + (chunk_gated_delta_rule.__doc__ or "")
            missing = [p for p in inspect.signature(function).parameters if p not in known]
            assert not missing, (name, missing)
