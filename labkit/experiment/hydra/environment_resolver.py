"""OmegaConf's resolver ``oc.env``, which can also return its own expression.

A composed config is resolved twice: the values of environment variables are checked, and the
expressions are kept for the study's files (:mod:`labkit.config.env_interpolation`).
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from labkit.config.env_interpolation import EXPRESSION

if TYPE_CHECKING:
    from omegaconf import DictConfig

GROUPS = ("engine", "model", "workload", "ablation", "scales")  # what files of a study hold

_keeps: ContextVar[bool] = ContextVar("oc.env returns its expression", default=False)


def register() -> None:
    """Replace OmegaConf's resolver; repeated calls are harmless."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("oc.env", _resolve, replace=True)


def _resolve(name: str, *default: Any) -> Any:
    """Return what ``oc.env`` returns, or its expression. Hydra pickles this function for jobs."""
    from omegaconf.resolvers import oc

    value = oc.env(name, *default)
    return f"${{oc.env:{name}}}" if _keeps.get() and name in os.environ else value


def keep_expressions(tree: DictConfig, plain: dict[str, Any]) -> None:
    """Put the expressions of texts into ``plain``, the resolved form of ``tree``."""
    token = _keeps.set(True)
    try:
        for group in GROUPS:
            _keep_below(tree, plain, group)
    finally:
        _keeps.reset(token)


def _keep_below(node: Any, plain: Any, key: Any) -> None:
    from omegaconf import Container
    from omegaconf.errors import OmegaConfBaseException

    child = node._get_node(key)
    if isinstance(child, Container) and not child._is_interpolation():
        for name in child if isinstance(plain[key], dict) else range(len(plain[key] or ())):
            _keep_below(child, plain[key], name)
        return
    if not isinstance(plain[key], str) or child is None or not child._is_interpolation():
        return
    try:
        text = node[key]
    except OmegaConfBaseException:  # not a text: a number, or a value that was decoded
        return
    if isinstance(text, str) and EXPRESSION.search(text):
        plain[key] = text
