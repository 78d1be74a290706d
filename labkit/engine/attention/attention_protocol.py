"""The interface between a model's layers and the attention over the KV memory.

Once per engine: ``bind`` for each layer. Once per step: ``forward`` for each layer, then
``report``.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from labkit.engine.attention.launch_report import Reports

Arrays = Literal["numpy", "mlx"]


class Attention(Protocol):
    """One step's way to the KV memory and back, layer by layer."""

    @property
    def arrays(self) -> Arrays | Literal["any"]:
        """The kind that ``forward`` takes and returns; MLX's are lazy. ``any``: both."""

    def bind(
        self,
        layer: int,
        *,
        scale: float,
        heads: int,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
    ) -> None:
        """Say what does not change of a layer: see ``AttentionLayer``; ``heads``: query heads.

        Raises
        ------
        ValueError
            One line that says what is wrong.
        """

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        """Write a layer's new keys and values, then attend to all that are cached.

        Parameters
        ----------
        q
            [total_q, num_heads, head_dim], the metadata's packed queries.
        k, v
            [total_q, num_kv_heads, head_dim]; None: they are written already.
        metadata
            The step's.
        out
            NumPy only: where to write, shaped and typed as ``q``; None: a new array.

        Returns
        -------
        array
            Shaped and typed as ``q``.

        Raises
        ------
        ValueError
            One line that says what is wrong; nothing was launched.
        """

    def report(self, metadata: Any) -> Reports:
        """Say what was launched since the last report, layers that are alike added up.

        To be called when what ``forward`` returned has been evaluated.
        """

    def pending(self, metadata: Any) -> list[Any]:
        """Return the lazy arrays, besides what ``forward`` returned, that end the step."""
