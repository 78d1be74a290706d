"""Loads the draft model: a directory of its own, or the target with fewer layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit import config
from labkit.engine import dtype, self_test
from labkit.engine.base import EngineError
from labkit.engine.forward import Forward
from labkit.engine.kv_layout import LayerShape, LayoutKind
from labkit.engine.shared_models import SharedModels


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model over the layers after the target's; ``shapes`` are its own layers'."""

    forward: Forward
    shapes: tuple[LayerShape, ...]
    source: str


def load_draft(
    options: config.Engine,
    model_dir: Path,
    kind: LayoutKind,
    target: self_test.Expected,
    models: SharedModels,
) -> LoadedDraft | None:
    """Load the draft that ``options`` name; None where nobody drafts with a model.

    Raises
    ------
    EngineError
        The draft cannot be served, or has another vocabulary; one line with the reason.
    """
    if options.speculation is not config.Speculation.draft:
        return None
    drafts = options.drafts
    directory = Path(drafts.draft_path) if drafts.draft_path else model_dir
    try:
        ready = models.ready(
            directory,
            options.kv.block_size,
            options.attention.device,
            kind=dtype.asked(options),
            layers=drafts.draft_layers,
            first_layer=len(target.shapes),
        )
        loaded, choice, expected = ready.loaded, ready.choice, ready.expected
        sizes = [asked.logits[0].shape[-1] for asked in (target, expected)]
        if sizes[0] != sizes[1]:
            raise EngineError(f"its vocabulary has {sizes[1]} ids, the model's {sizes[0]}")
        shapes = target.shapes + expected.shapes
        small = kind.holding(shapes, len(expected.sequences), expected.longest)
        self_test.verify(loaded, choice.forward, small, expected, options.kv.dtype.value)
    except EngineError as error:
        raise EngineError(f"engine.speculation=draft: {error}") from error
    layers = f", {len(expected.shapes)} layers" if drafts.draft_layers else ""
    return LoadedDraft(choice.forward, expected.shapes, f"{directory.name}{layers}")
