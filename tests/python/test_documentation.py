"""C07: every example in a docstring runs and gives what it shows."""

import doctest
import importlib
import pkgutil

import pytest

import flash_qla

MODULES = ["flash_qla", *(m.name for m in pkgutil.walk_packages(flash_qla.__path__, "flash_qla."))]


@pytest.mark.parametrize("name", MODULES)
def test_C07_docstring_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_C07_there_are_examples():
    finder = doctest.DocTestFinder()
    assert sum(len(t.examples) for name in MODULES for t in finder.find(importlib.import_module(name))) > 40
