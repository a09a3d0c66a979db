"""Milvus' packages without pandas, which they import for callers who bring data frames; memstream brings none.

pandas, and pyarrow with it, are 70 MB of a process and half of the time that importing pymilvus takes.
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
"""What pymilvus imports, the parents first."""


class _Later(ModuleType):
    """Stands for a module of pandas, which is imported when something of it is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.importing = True
        """Whether its importers are still being imported: what they take then is a name for later."""

    def __getattr__(self, name: str) -> Any:
        if not self.importing:
            return getattr(importlib.import_module(self.__name__), name)
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # a class, named in an annotation
            return Any
        return _when_called(self.__name__, name)


def _when_called(module: str, name: str) -> Callable[..., Any]:
    def called(*given: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*given, **named)

    return called


class NoPandas(MetaPathFinder):
    """Among the finders of a process that is to do without pandas: importers are told that it is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for pandas; has nothing to say of others."""
        if name == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=name)


@contextmanager
def pandas_later() -> Iterator[None]:
    """Import pymilvus in here: it does not import pandas with it. Whoever imports pandas afterwards gets pandas."""
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
