"""The CUDA library as far as it goes without a device: it loads when it should, starts nothing, and says what is missing."""

import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from processes import run_python

import flash_qla

PACKAGE = Path(flash_qla.__file__).parent
LIBRARY = PACKAGE / "lib" / "libflashqla_torch_cuda.so"

needs_library = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CUDA library was not built: no nvcc")
needs_cpu_torch = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def pretending(code: str) -> str:
    """The code in a process whose torch says that it is built with CUDA."""
    begin = 'import torch\ntorch.version.cuda = "13.0"\nimport flash_qla\nfrom flash_qla import _load\n'
    return begin + textwrap.dedent(code)


@needs_cpu_torch
def test_beside_a_torch_for_the_cpu_it_is_not_looked_for():
    reason = flash_qla.device_support("cuda")
    assert reason == (
        f"flash_qla has no kernels for device type 'cuda': the installed torch {torch.__version__} is built without CUDA"
    )


@needs_library
@without_device
def test_it_loads_beside_any_torch_and_names_what_is_missing():
    """Torch's part that it calls is looked up only when it is needed."""
    code = """
        print(_load.cuda_load_error, flash_qla.device_support("cuda"), sep="\\n")
        ops, meta = torch.ops.flashqla, torch.zeros(1, 4, 1, 16, device="meta")
        call = (meta, meta, meta, None, None, None, None, None, None, "none", "one", False, False, None, False)
        for name in ("chunk_forward", "recurrent_forward"):
            print(getattr(ops, "explain_" + name).cuda(0, *call))
    """
    error, support, *answers = run_python(pretending(code), PYTHONPATH=str(PACKAGE.parent)).splitlines()
    assert error == "None"
    assert support.startswith("flash_qla has no kernels for device type 'cuda': ")
    # The implementations of an operation in turn, each with what is missing.
    assert len(answers) == 2 and answers[0].startswith("['cuda-hopper', 'needs ")
    assert all("'cuda-portable', 'needs " in answer for answer in answers)


@needs_library
@needs_cpu_torch
@without_device
def test_fake_tensors_on_the_device_are_refused_with_the_reason():
    code = """
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            x = torch.empty(1, 4, 1, 16, dtype=torch.bfloat16, device="cuda")
            for call in (
                lambda: flash_qla.chunk_gated_delta_rule(x, x, x, None, None),
                lambda: flash_qla.chunk_gated_delta_rule(x, torch.empty_like(x, device="cpu"), x, None, None),
                lambda: flash_qla.explain(x, x, x),
            ):
                try:
                    call()
                    print("no error")
                except Exception as error:
                    print(type(error).__name__, error)
    """
    one, other, explained = run_python(pretending(code), PYTHONPATH=str(PACKAGE.parent)).splitlines()
    assert one.startswith("NotImplementedError flash_qla has no kernels for device type 'cuda': ")
    assert other == "ValueError k: expected device cuda:0 as q, got cpu"
    assert explained.startswith("NotImplementedError flash_qla has no kernels for device type 'cuda': ")


@needs_library
def test_a_library_that_is_missing_broken_or_old_leaves_the_cpu_alone(tmp_path):
    code = """
        print(_load.load_error, flash_qla.device_support("cpu"))
        print(flash_qla.device_support("cuda"))
        x = torch.zeros(1, 4, 1, 16)
        print(flash_qla.chunk_gated_delta_rule(x, x, x, None, None)[0].shape)
    """
    expected = {
        "missing": "`FLASHQLA_CUDA=1 pip install .`, on a machine that has nvcc 12.8 or newer",
        "broken": "could not be loaded: ",
    }
    for kind, words in expected.items():
        package = tmp_path / kind / "flash_qla"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", LIBRARY.name))
        (package / "VERSION").write_text(flash_qla.__version__ + "\n")
        if kind == "broken":
            (package / "lib" / LIBRARY.name).write_bytes(b"not a library")
        cpu, cuda, shape = run_python(pretending(code), PYTHONPATH=str(package.parent)).splitlines()
        assert cpu == "None None" and shape == "torch.Size([1, 4, 1, 16])"
        assert cuda.startswith("flash_qla has no kernels for device type 'cuda': ") and words in cuda


@needs_library
def test_importing_starts_nothing():
    """A process may still fork, and CUDA_VISIBLE_DEVICES may still be set, after the import."""
    assert run_python(pretending("print(torch.cuda.is_initialized())"), PYTHONPATH=str(PACKAGE.parent)) == "False\n"
