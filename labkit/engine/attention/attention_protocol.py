"""The interface between a model's layers and the attention over the KV memory.

Once per engine: ``bind`` for each layer. Once per step: ``forward`` for each layer, then
``report``.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from labkit.engine.attention.launch_report import Reports

Arrays = Literal["numpy", "mlx"]


class Attention(Protocol):
    """Writes a layer's new keys and values to the KV memory and attends to all that are cached."""

    @property
    def arrays(self) -> Arrays | Literal["any"]:
        """The kind of arrays that ``forward`` takes and returns; MLX's are lazy. ``any``: both."""

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
        """Set what does not change of a layer; see ``AttentionLayer``. ``heads``: query heads.

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
            [total_q, num_q_heads, head_dim], the packed queries of the step.
        k, v
            [total_q, num_kv_heads, head_dim]; None: they have been written.
        metadata
            The step's ``AttentionMetadata``, or the layout's own step.
        out
            NumPy only: the array to write to, shaped and typed as ``q``; None: a new array.

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
        """Return the launches since the last report, identical ones summed.

        The outputs of ``forward`` must have been evaluated.
        """

    def pending(self, metadata: Any) -> list[Any]:
        """Return the lazy arrays to evaluate at the end of the step besides the outputs."""
