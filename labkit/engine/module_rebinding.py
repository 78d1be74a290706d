"""Runs mlx_lm's unedited model modules a second time, with some of their names exchanged.

A module loaded here is mlx_lm's own code in a namespace of its own. Nothing of the process is
patched: what ``import mlx_lm.models.qwen3`` returns stays what it is, and the modules of any
number of loaders live beside it.

``import mlx_lm`` costs about 800 ms, most of it transformers; a model module alone costs 40, so
only those are imported (``light_package``).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGE = "mlx_lm.models"
# mlx_lm's cache classes compute nothing of a forward: one module of them serves all loaders.
SHARED = (f"{PACKAGE}.cache",)


@contextmanager
def light_package() -> Iterator[None]:
    """Make ``mlx_lm.models.*`` importable without running ``mlx_lm/__init__.py``.

    While it lasts an empty package that knows only where mlx_lm's files lie stands in for
    mlx_lm. It is taken away again, so that a later ``import mlx_lm`` is the real one and
    finds the modules already imported.

    Raises
    ------
    ModuleNotFoundError
        mlx_lm is not installed.
    """
    if "mlx_lm" in sys.modules:
        yield
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("mlx_lm is not installed: pip install mlx-lm", name="mlx_lm")
    package = ModuleType("mlx_lm")
    package.__spec__ = spec
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mlx_lm"] = package
    try:
        yield
    finally:
        if sys.modules.get("mlx_lm") is package:
            del sys.modules["mlx_lm"]


def import_plain(name: str) -> ModuleType:
    """Import ``mlx_lm.models.<name>`` as it is, without the rest of mlx_lm."""
    with light_package():
        return importlib.import_module(f"{PACKAGE}.{name}")


class ModuleLoader:
    """Loads model modules; those of one loader import each other.

    Parameters
    ----------
    modules
        What an import inside of them finds, by the module's name, where it is another.
    members
        By module, what takes the place of names that it defines.
    """

    def __init__(
        self, modules: Mapping[str, Any], members: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._modules = modules
        self._members = members
        self._loaded: dict[str, ModuleType] = {}

    def load(self, name: str) -> ModuleType:
        """Return a module by its full name, run on first use.

        Raises
        ------
        ModuleNotFoundError
            mlx_lm has no such module, or that module needs one that is not installed.
        """
        if name not in self._loaded:
            with light_package():
                self._run(name)
        return self._loaded[name]

    def _run(self, name: str) -> None:
        # mlx_lm's own is imported first: dataclasses look a class's module up by its name.
        plain, module = importlib.import_module(name), ModuleType(name)
        module.__dict__.update(
            __package__=PACKAGE,
            __file__=plain.__file__,
            __spec__=plain.__spec__,
            __builtins__={**vars(builtins), "__import__": self._import},
        )
        self._loaded[name] = module
        try:
            exec(plain.__loader__.get_code(name), module.__dict__)  # type: ignore[union-attr]
        except BaseException:
            del self._loaded[name]
            raise
        module.__dict__.update(self._members.get(name, {}))

    def _import(
        self,
        name: str,
        scope: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Stand in for ``__import__`` inside a module."""
        full = importlib.util.resolve_name("." * level + name, PACKAGE) if level else name
        if full in self._modules:
            # ``import mlx.core as mx`` asks for the package and takes ``core`` from it.
            return self._modules[full if names else full.partition(".")[0]]
        if full == PACKAGE and names:
            return SimpleNamespace(**{part: self._part(f"{PACKAGE}.{part}") for part in names})
        if full.startswith(f"{PACKAGE}.") and names:
            return self._part(full)
        return builtins.__import__(name, scope, local, names or (), level)

    def _part(self, name: str) -> ModuleType:
        return importlib.import_module(name) if name in SHARED else self.load(name)
