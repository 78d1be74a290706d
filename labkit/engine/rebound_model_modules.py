"""Load mlx_lm's unedited model modules with some of their names bound to other objects.

A ``ModuleLoader`` runs mlx_lm's own code in a separate namespace. Nothing is patched globally:
``import mlx_lm.models.qwen3`` still returns the original, and each loader has copies of its own.

``import mlx_lm`` takes about 800 ms, most of it for transformers. A model module alone takes 40 ms,
so only the model modules are imported (``light_package``).
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

from labkit.engine.model_patches import OVERRIDES

PACKAGE = "mlx_lm.models"
# mlx_lm's cache classes compute no part of a forward, so all loaders share their module.
SHARED_MODULES = (f"{PACKAGE}.cache",)


@contextmanager
def light_package() -> Iterator[None]:
    """Make ``mlx_lm.models.*`` importable without running ``mlx_lm/__init__.py``.

    Inside the context ``mlx_lm`` is an empty package with mlx_lm's path. The empty package is
    removed at the end, so that a later ``import mlx_lm`` imports the real package and reuses the
    model modules imported meanwhile.

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
    """Import the original ``mlx_lm.models.<name>`` without the rest of mlx_lm."""
    with light_package():
        return importlib.import_module(f"{PACKAGE}.{name}")


class ModuleLoader:
    """Loads copies of model modules with rebound names, and applies ``model_patches``.

    Modules loaded by the same loader import each other's copies, not the originals.

    Parameters
    ----------
    modules
        Maps each module name to the object that the loaded modules import in its place.
    members
        Maps each module name to the replacements of the module's own definitions, by their name.
    """

    def __init__(
        self, modules: Mapping[str, Any], members: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._modules = modules
        self._members = members
        self._loaded: dict[str, ModuleType] = {}

    def load(self, name: str) -> ModuleType:
        """Return the loader's copy of the module ``name`` (in full). It is executed on first use.

        Raises
        ------
        ModuleNotFoundError
            mlx_lm has no such module, or the module needs a package that is not installed.
        """
        if name not in self._loaded:
            with light_package():
                self._run(name)
        return self._loaded[name]

    def _run(self, name: str) -> None:
        # The original is imported first, because dataclasses look up the module of a class by name
        # in ``sys.modules``.
        original, module = importlib.import_module(name), ModuleType(name)
        module.__dict__.update(
            __package__=PACKAGE,
            __file__=original.__file__,
            __spec__=original.__spec__,
            __builtins__={**vars(builtins), "__import__": self._import},
        )
        self._loaded[name] = module
        try:
            exec(original.__loader__.get_code(name), module.__dict__)  # type: ignore[union-attr]
        except BaseException:
            del self._loaded[name]
            raise
        module.__dict__.update(self._members.get(name, {}))
        for path, override in OVERRIDES.get(name.removeprefix(f"{PACKAGE}."), {}).items():
            class_name, _, member = path.rpartition(".")
            owner = getattr(module, class_name) if class_name else module
            setattr(owner, member, override(getattr(owner, member)))

    def _import(
        self,
        name: str,
        scope: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Replace ``__import__`` in the loaded modules, so that they import copies."""
        full = importlib.util.resolve_name("." * level + name, PACKAGE) if level else name
        if full in self._modules:
            # ``import mlx.core as mx`` imports the package and reads ``core`` from it.
            return self._modules[full if names else full.partition(".")[0]]
        if full == PACKAGE and names:
            return SimpleNamespace(**{part: self._submodule(f"{PACKAGE}.{part}") for part in names})
        if full.startswith(f"{PACKAGE}.") and names:
            return self._submodule(full)
        return builtins.__import__(name, scope, local, names or (), level)

    def _submodule(self, name: str) -> ModuleType:
        return importlib.import_module(name) if name in SHARED_MODULES else self.load(name)
