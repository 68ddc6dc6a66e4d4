"""What the tests on a CUDA device share. Without a device they are skipped; `pytest -rs` says why."""

import pytest
import torch

import flash_qla


def skip_without_cuda():
    """For the top of a file of tests."""
    reason = flash_qla.device_support("cuda")
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)


def moved(x, device="cuda"):
    """A tensor on the device with the same strides, expanded and overlapping ones too; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    base = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return torch.as_strided(base.to(device), x.shape, x.stride(), x.storage_offset())


def moved_all(arguments, device="cuda"):
    return {name: moved(x, device) for name, x in arguments.items()}


def copy_into(old, new):
    """New contents for the tensors of a call, where they are."""
    for name, x in old.items():
        if isinstance(x, torch.Tensor):
            x.copy_(new[name])


def expect_taken(arguments, operation):
    """The device's kernels take the call."""
    answer = flash_qla.explain(**arguments, operation=operation)
    assert answer.implementation is not None, str(answer)
