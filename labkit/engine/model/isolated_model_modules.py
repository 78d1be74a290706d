"""Load mlx_lm's unedited model modules with some of their names bound to other objects.

A ``ModuleLoader`` runs mlx_lm's own code in a separate namespace. Nothing is patched globally:
``import mlx_lm.models.qwen3`` still returns the original, and each loader has copies of its own.

``import mlx_lm`` takes about 800 ms, most of it for transformers. A model module alone takes 40 ms,
so only the model modules are imported (``light_package``).

``OVERRIDES`` replaces the parts of mlx_lm's models that do not run over packed tokens: they compute
attention without ``scaled_dot_product_attention``, or expect the offset of the cache to be one
number. Called with mlx_lm's own caches, a replacement runs the original code.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

PACKAGE = "mlx_lm.models"
Override = Callable[[Any], Any]
# mlx_lm's cache classes compute no part of a forward, so all loaders share their module.
SHARED_MODULES = (f"{PACKAGE}.cache",)


@contextmanager
def light_package() -> Iterator[None]:
    """Make ``mlx_lm.models.*`` importable without running ``mlx_lm/__init__.py``.

    Inside the context ``mlx_lm`` is an empty package with mlx_lm's path. The empty package is
    removed at the end, so that a later ``import mlx_lm`` imports the real package and reuses the
    model modules imported meanwhile. Raises ``ModuleNotFoundError`` if mlx_lm is not installed.
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


def softcapped_attention(original: Any) -> Any:
    """Return a replacement for an attention that applies ``attn_logit_softcapping`` itself."""

    def attend(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if not takes_packed_tokens(cache):
            return original(self, x, mask, cache)
        numbers = self.n_heads, self.n_kv_heads, self.n_kv_heads
        queries, keys, values = _project(self, x, cache, numbers, self.rope)
        softcap = self.attn_logit_softcapping
        out = keys.attend(queries, values, self.scale, None, None, softcap)
        return self.o_proj(_join_heads(out))

    return attend


def tiled_attention(original: Any) -> Any:
    """Return a replacement for an attention with query head ``h`` on KV head ``h % kv_heads``."""

    def attend(self: Any, hidden_states: Any, attention_mask: Any = None, cache: Any = None) -> Any:
        if not takes_packed_tokens(cache):
            return original(self, hidden_states, attention_mask, cache)
        numbers = self.q_num_heads, self.k_num_heads, self.v_num_heads
        queries, keys, values = _project(self, hidden_states, cache, numbers, self.rotary_emb)
        # labkit's attention expects the query heads of a KV head to be adjacent.
        out = keys.attend(_regroup(queries, self.k_num_heads), values, self.scale, None, None)
        return self.o_proj(_join_heads(_regroup(out, self.q_num_heads // self.k_num_heads)))

    return attend


def _project(layer: Any, x: Any, cache: Any, numbers: tuple[int, ...], rope: Any) -> Any:
    """Return the rotated queries of a layer, and the handles of its new keys and values."""
    projected = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    queries, keys, values = map(_split_heads, projected, numbers)
    queries, keys = (rope(array, offset=cache.offset) for array in (queries, keys))
    return queries, *cache.update_and_fetch(keys, values)


def _regroup(array: Any, inner: int) -> Any:
    """Reorder heads [T, outer * inner, 1, dim] to [T, inner * outer, 1, dim]."""
    grouped = array.reshape(array.shape[0], -1, inner, 1, array.shape[3])
    return grouped.transpose(0, 2, 1, 3, 4).reshape(array.shape)


def _split_heads(array: Any, num_heads: int) -> Any:
    """Reshape [T, 1, heads * dim] to [T, heads, 1, dim]."""
    return array.reshape(array.shape[0], 1, num_heads, -1).transpose(0, 2, 1, 3)


def _join_heads(array: Any) -> Any:
    """Reshape [T, heads, 1, dim] to [T, 1, heads * dim]."""
    return array.transpose(0, 2, 1, 3).reshape(array.shape[0], 1, -1)


def arange_of_offsets(original: Any) -> Any:
    """Return a replacement for NumPy in a module that computes ``arange(offset, offset + length)``.

    Every token is a batch entry of length 1, so ``arange`` of offsets [T] returns them as positions
    [T, 1].
    """

    def arange(start: Any, stop: Any = None) -> Any:
        return original.arange(start, stop) if np.ndim(start) == 0 else start[:, None]

    return SimpleNamespace(arange=arange)


def takes_packed_tokens(cache: Any) -> bool:
    """Return whether a cache is labkit's, which takes every token as a batch entry of its own."""
    return bool(getattr(cache, "packed", False))


# By module of mlx_lm, the replacement of each name as a function of the original object. In a name
# with a dot, the part before it is a class.
OVERRIDES: Mapping[str, Mapping[str, Override]] = {
    "gemma2": {"Attention.__call__": softcapped_attention},
    "gpt_bigcode": {"np": arange_of_offsets},
    "plamo": {"Attention.__call__": tiled_attention},
}


class ModuleLoader:
    """Loads copies of model modules with rebound names, and applies ``OVERRIDES``.

    Modules loaded by the same loader import each other's copies, not the originals.

    ``modules``: maps each module name to the object that the loaded modules import in its place.
    ``members``: maps each module name to the replacements of the module's own definitions, by their
    name.
    """

    def __init__(
        self, modules: Mapping[str, Any], members: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._modules = modules
        self._members = members
        self._loaded: dict[str, ModuleType] = {}

    def load(self, name: str) -> ModuleType:
        """Return the loader's copy of the module ``name`` (in full). It is executed on first use.

        Raises ``ModuleNotFoundError`` if mlx_lm has no such module, or the module needs a package
        that is not installed.
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
