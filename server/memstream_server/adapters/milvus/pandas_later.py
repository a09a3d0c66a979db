"""Imports Milvus' packages without pandas, which they import to support data frames; memstream uses none.

pandas and pyarrow take 70 MB of a process and half of pymilvus' import time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_NAMES = ("pandas", "pandas.api", "pandas.api.types")
"""The modules that pymilvus imports, parents first."""


class _Later(ModuleType):
    """A placeholder for a pandas module; imports the real one on first use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.importing = True
        """True while the importing modules load: names that they import resolve on first use."""

    def __getattr__(self, name: str) -> Any:
        if not self.importing:
            return getattr(importlib.import_module(self.__name__), name)
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # a class in an annotation
            return Any
        return _when_called(self.__name__, name)


def _when_called(module: str, name: str) -> Callable[..., Any]:
    def import_and_call(*given: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*given, **named)

    return import_and_call


class NoPandas(MetaPathFinder):
    """A meta path finder that makes pandas look uninstalled."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for pandas; ignores other modules."""
        if name == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=name)


@contextmanager
def pandas_later() -> Iterator[None]:
    """Import pymilvus inside the block without importing pandas. Later imports of pandas get the real package."""
    if {"pandas", "pymilvus"} & sys.modules.keys():
        yield
        return
    modules = {name: _Later(name) for name in _NAMES}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules |= modules
    try:
        yield
    finally:
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            module.importing = False
