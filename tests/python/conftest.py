"""What the tests share: the library must be there, and every kernel is tried."""

import os
import warnings

import pytest
import torch

import flash_qla

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    reason = flash_qla.device_support("cpu")
    if reason:
        raise pytest.UsageError(reason)
    torch.set_num_threads(1)


def implementations(operation: str) -> list[str]:
    """Those that this processor can run, `reference` last."""
    x = torch.zeros(1, 1, 1, 16)
    return [name for name, reason in flash_qla.explain(x, x, x, operation=operation) if not reason]


@pytest.fixture
def force(monkeypatch):
    """force(name): every later call of the test runs in that implementation, or fails."""
    return lambda name: monkeypatch.setenv("FLASHQLA_IMPL", name)


@pytest.fixture(autouse=True)
def _quiet_fallback():
    """The warning about the slow reference has a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*slow reference.*")
        yield


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Freed memory full of NaN, so that a result that was not written shows."""
    for size in (1 << 10, 1 << 14, 1 << 18):
        [torch.full((size,), float("nan")) for _ in range(4)]
