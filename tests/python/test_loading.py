"""C02, C03, C04: importing never fails, the first error is kept, refusals give reasons, a slow fallback says so once."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from problems import Problem, make
from processes import run_python

import flash_qla
import flash_qla._call
from flash_qla import _load

PACKAGE = Path(flash_qla.__file__).parent


CALLS = """
    import sys, torch

    for path in sys.argv[1:]:  # one damaged package after another, each as if it were the only one
        sys.path.insert(0, path)
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_qla"]:
            del sys.modules[name]
        import flash_qla
        print(flash_qla.__version__)
        x = torch.zeros(1, 4, 1, 16)
        for call in (
            lambda: flash_qla.chunk_gated_delta_rule(x, x, x, None, None),
            lambda: flash_qla.fused_recurrent_gated_delta_rule(x, x, x),
            lambda: flash_qla.chunk_gated_delta_rule_fwd(x, x, x, None, None),
            lambda: flash_qla.explain(x, x, x),
        ):
            try:
                call()
                print("no error")
            except RuntimeError as error:
                print(error, "| cause:", type(error.__cause__).__name__)
        print(flash_qla.device_support("cpu"))
"""


def test_C02_without_a_library_that_loads(tmp_path):
    """Missing, broken, or built from another version: the import works, every call shows the first error."""
    damaged = [tmp_path / name for name in ("missing", "broken", "older")]
    for path in damaged:
        shutil.copytree(PACKAGE, path / "flash_qla", ignore=shutil.ignore_patterns("__pycache__", "lib"))
        (path / "flash_qla" / "VERSION").write_text(flash_qla.__version__ + "\n")
    missing, broken, older = (path / "flash_qla" for path in damaged)
    (broken / "lib").mkdir()
    (broken / "lib" / "libflashqla_torch.so").write_bytes(b"not a library")
    shutil.copytree(PACKAGE / "lib", older / "lib")
    (older / "VERSION").write_text("99.0.0\n")
    lines = run_python(CALLS, *map(str, damaged)).splitlines()
    assert len(lines) == 18
    for kind, text in enumerate(
        ("does not exist: build it with `make build`", "libflashqla_torch.so", "this package is 99.0.0: build it again")
    ):
        version, *answers, support = lines[6 * kind : 6 * kind + 6]
        assert version == ("99.0.0" if kind == 2 else flash_qla.__version__)
        for line in (*answers, support):
            assert "the compiled library could not be loaded. First error: " in line and text in line
        assert all("| cause: " in line and "NoneType" not in line for line in answers)


@pytest.mark.parametrize(
    "version, new_enough",
    [
        ("2.10.0a0+git1234", True),
        ("2.12", True),
        ("3.0rc1", True),
        ("3.0.0.dev20270101", True),
        ("2.9.1+cpu", False),
        ("1.13", False),
    ],
)
def test_C02_versions_of_torch(version, new_enough, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert (_load._torch_version() >= _load.OLDEST_TORCH) == new_enough


def test_C02_import_needs_no_gpu_and_no_compiler():
    code = """
        import sys
        import flash_qla, torch
        x = torch.randn(1, 4, 1, 16)
        print(torch.isfinite(flash_qla.chunk_gated_delta_rule(x, x, x, None, None, use_qk_l2norm_in_kernel=True)[0]).all().item())
        print([name for name in ("triton", "tilelang", "tvm_ffi", "cutlass") if name in sys.modules])
    """
    nothing = {"TORCH_CUDA_ARCH_LIST": "", "CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": "/nowhere", "PATH": ""}
    assert run_python(code, PYTHONPATH=str(PACKAGE.parent), **nothing).splitlines() == ["True", "[]"]


def test_C02_import_needs_nothing_private_of_torch():
    code = """
        import torch
        del torch._subclasses.fake_tensor.unset_fake_temporarily
        import flash_qla
        x = torch.zeros(1, 4, 1, 16)
        print(flash_qla.chunk_gated_delta_rule(x, x, x, None, None)[0].shape)
    """
    assert run_python(code, PYTHONPATH=str(PACKAGE.parent)) == "torch.Size([1, 4, 1, 16])\n"


def test_C02_import_is_found_by_name_alone():
    code = "import importlib.util, sys; print(importlib.util.find_spec('flash_qla') is not None, 'torch' in sys.modules)"
    assert run_python(code, PYTHONPATH=str(PACKAGE.parent)) == "True False\n"


def test_C03_other_devices_are_refused_at_the_call_with_the_reason(monkeypatch):
    assert flash_qla.device_support("cpu") is None
    for device in (*(() if torch.cuda.is_available() else ("cuda", "cuda:1")), "mps", torch.device("xpu")):
        reason = flash_qla.device_support(device)
        assert "no kernels" in reason and torch.device(device).type in reason

    class OpWithoutKernel:
        """What the dispatcher says to tensors on a device that we register nothing for; this machine has no such device."""

        _schema = flash_qla._call.OPS["chunk_forward"]._schema

        def __call__(self, *arguments):
            raise NotImplementedError("Could not run 'flashqla::chunk_forward' with arguments from the 'CUDA' backend")

    monkeypatch.setitem(flash_qla._call.OPS, "chunk_forward", OpWithoutKernel())
    monkeypatch.setattr(flash_qla._call, "device_support", lambda device: "flash_qla has no kernels for device type 'cuda'")
    x = torch.zeros(1, 4, 1, 16)
    with pytest.raises(NotImplementedError, match="^flash_qla has no kernels for device type 'cuda'"):
        flash_qla.chunk_gated_delta_rule(x, x, x, None, None)


@pytest.fixture
def forgotten(monkeypatch):
    """As in a process that has not called anything yet."""
    monkeypatch.setattr(flash_qla._call, "_known", set())
    monkeypatch.setattr(flash_qla._call, "_warned", set())
    answers = ["cpu-avx512", "needs AVX-512", "cpu-scalar", "has no such operation", "reference", ""]
    call = flash_qla._call.call
    monkeypatch.setattr(
        flash_qla._call, "call", lambda name, arguments: answers if name.startswith("explain") else call(name, arguments)
    )


def test_C04_one_warning_when_the_slow_reference_runs(forgotten):
    a = make(Problem(tokens=4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            flash_qla.chunk_gated_delta_rule(**a)
        for dtype in (torch.bfloat16, torch.float16):
            flash_qla.chunk_gated_delta_rule(**make(Problem(tokens=4, dtype=dtype)))
    (warning,) = caught
    text = str(warning.message)
    assert "chunk_forward runs on the slow reference implementation" in text
    assert "cpu-avx512: needs AVX-512" in text and "cpu-scalar: has no such operation" in text
    assert warning.filename == __file__ and issubclass(warning.category, RuntimeWarning)


def test_C04_no_warning_in_float64_or_when_the_reference_is_asked_for(forgotten, force):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_qla.chunk_gated_delta_rule(**make(Problem(tokens=4, dtype=torch.float64, small_dtype=torch.float64)))
        force("reference")
        flash_qla.chunk_gated_delta_rule(**make(Problem(tokens=4)))


def test_explain_names_the_one_that_runs_and_why_others_do_not(force):
    a = make(Problem(gate="computed", beta="doubled", lengths=(3, 4)))
    for operation in ("chunk_forward", "chunk_backward", "recurrent_forward"):
        answer = flash_qla.explain(**a, operation=operation)
        assert isinstance(answer, list) and answer.operation == operation and answer[-1] == ("reference", "")
        names = [name for name, reason in answer if not reason]
        assert answer.implementation == names[0] and str(answer).startswith(f"{operation}: {names[0]}\n")
        assert all(name in str(answer) and reason in str(answer) for name, reason in answer)
    wide = flash_qla.explain(*(torch.zeros(1, 4, 1, 16, dtype=torch.float64) for _ in range(3)))
    assert wide.implementation == "reference" and all(reason for name, reason in wide if name != "reference")
    force("cpu-scalar")
    forced = flash_qla.explain(**a)
    assert forced.implementation == "cpu-scalar" and "FLASHQLA_IMPL=cpu-scalar" in dict(forced)["reference"]


def test_explain_checks_its_arguments_and_computes_nothing():
    a = make(Problem())
    with pytest.raises(ValueError, match="^operation: expected one of"):
        flash_qla.explain(**a, operation="sideways")
    with pytest.raises(ValueError, match="^beta: expected shape"):
        flash_qla.explain(**{**a, "beta": a["beta"][:, 1:]})
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    assert flash_qla.explain(**meta) == flash_qla.explain(**a)


def test_a_forced_implementation_that_does_not_exist_is_an_error(force):
    force("no-such-implementation")
    with pytest.raises(NotImplementedError, match="no-such-implementation"):
        flash_qla.chunk_gated_delta_rule(**make(Problem()))
