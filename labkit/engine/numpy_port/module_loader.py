"""Runs mlx_lm's unedited model modules a second time, against NumPy names.

A twin of ``mlx_lm.models.qwen3`` is the same code in a namespace of its own, in which
``mlx.core`` and ``mlx.nn`` are ``namespace``'s.  Nothing global is patched: the original
module and any number of twins live in one process.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from labkit.engine.cpu import activations
from labkit.engine.numpy_port import mlx_shim
from labkit.engine.numpy_port.mlx_shim import Namespace, NoCounterpart

PACKAGE = "mlx_lm.models"
# Caches are the engine's own, so the module of mlx_lm's cache classes needs no twin.
SHARED = (f"{PACKAGE}.cache",)


class ModuleLoader:
    """Loads twins; one loader serves one model, so that its twins know each other."""

    def __init__(self) -> None:
        core, nn = mlx_shim.core(), mlx_shim.nn()
        self._names: Mapping[str, Any] = {
            "mlx": Namespace("mlx", {"core": core, "nn": nn}),
            "mlx.core": core,
            "mlx.nn": nn,
        }
        self._twins: dict[str, ModuleType] = {}

    def twin_class(self, original: type) -> type:
        """Return the twin of a class of a model module.

        Raises
        ------
        NoCounterpart
            The class is not at the top level of its module.
        """
        twin = getattr(self.load(original.__module__), original.__qualname__, None)
        if not isinstance(twin, type):
            raise NoCounterpart(f"its class {original.__qualname__} is made inside a function")
        return twin

    def load(self, name: str) -> ModuleType:
        """Return the twin of a module of ``mlx_lm.models``, run on first use."""
        if name in self._twins:
            return self._twins[name]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise NoCounterpart(f"its module {name} cannot be found")
        code = spec.loader.get_code(name)  # type: ignore[attr-defined]
        twin = ModuleType(name)
        twin.__dict__.update(
            __package__=PACKAGE,
            __file__=spec.origin,
            __spec__=spec,
            __builtins__={**vars(builtins), "__import__": self._import},
        )
        self._twins[name] = twin
        exec(code, twin.__dict__)
        if name == f"{PACKAGE}.base":
            twin.__dict__["scaled_dot_product_attention"] = mlx_shim.attend
        if name == f"{PACKAGE}.activations":
            twin.__dict__["swiglu"] = activations.swiglu
        return twin

    def _import(
        self,
        name: str,
        scope: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Stand in for ``__import__`` inside a twin."""
        full = importlib.util.resolve_name("." * level + name, PACKAGE) if level else name
        if full in self._names:
            # ``import mlx.core as mx`` asks for the package and takes ``core`` from it.
            return self._names[full] if names else self._names["mlx"]
        if full == PACKAGE and names:
            return Namespace(PACKAGE, {part: self._module(f"{PACKAGE}.{part}") for part in names})
        if full.startswith(f"{PACKAGE}.") and names:
            return self._module(full)
        return builtins.__import__(name, scope, local, names or (), level)

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(name) if name in SHARED else self.load(name)
