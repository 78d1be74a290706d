"""``engine.speculation=draft``: a smaller model goes ahead.

The draft model's layers are further layers of the target's own blocks: a token's draft keys
lie under the same block id and offset as its target keys, so nothing is allocated, freed or
shared twice. What the draft has computed is remembered per request and not trusted across a
change of its blocks: it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from labkit import config
from labkit.engine import compute_dtype, load_self_test
from labkit.engine.batch import Batch, Ints, pack
from labkit.engine.engine_protocol import EngineError
from labkit.engine.input_builder import stack_block_tables
from labkit.engine.kv_layout.kv_cache_manager import KVCacheFactory, KVCacheManager
from labkit.engine.kv_layout.kv_shape import KVShape
from labkit.engine.model_runner import RunModel
from labkit.engine.packed_forward import PackedForward
from labkit.engine.request import RequestState, RequestStatus
from labkit.engine.sampler import Sampler
from labkit.engine.shared_models import SharedModels
from labkit.engine.speculation.draft_verification import Wanted


@dataclass(frozen=True, slots=True)
class _Computed:
    """The tokens of a request whose draft keys lie in ``blocks``: known ones, then drafts."""

    state: RequestState
    known: int
    drafts: tuple[int, ...]
    blocks: Ints

    def still_valid(self, blocks: Ints) -> int:
        """Return how many of the request's tokens need not be computed again."""
        held = len(self.blocks)
        if held > len(blocks) or not np.array_equal(self.blocks, blocks[:held]):
            return 0
        right = 0
        for draft, token in zip(self.drafts, self.state.token_ids[self.known :], strict=False):
            if draft != token:
                break
            right += 1
        # The last token is computed anew: what follows it is asked.
        return min(self.known + right, self.state.num_tokens - 1)


class DraftModel:
    """Drafts as the target samples: same parameters, same random numbers, a smaller model.

    ``run_model`` is the draft's forward, over its own layers of the target's KV memory;
    ``budget``: tokens per forward at most, where the draft catches up with a prompt.
    """

    name = "draft"

    def __init__(self, run_model: RunModel, cache: KVCacheManager, budget: int) -> None:
        self._run_model = run_model
        self._cache = cache
        self._budget = budget
        self._sampler = Sampler()
        self._computed: dict[str, _Computed] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        """Catch up with every request, then go ahead token by token; see ``Proposer``."""
        running = RequestStatus.running
        self._computed = {k: c for k, c in self._computed.items() if c.state.status is running}
        drafts: list[list[int]] = [[] for _ in wanted]
        self._catch_up(wanted, drafts)
        for length in range(1, max(want.limit for want in wanted)):
            ahead = [i for i, want in enumerate(wanted) if want.limit > length]
            segments = [(wanted[i].state.num_tokens + length - 1, 1) for i in ahead]
            tokens = [drafts[i][-1] for i in ahead]
            self._sample(tokens, segments, ahead, list(range(len(ahead))), wanted, drafts)
        for want, tokens in zip(wanted, drafts, strict=True):
            self._remember(want.state, tokens)
        return [tuple(tokens) for tokens in drafts]

    def _catch_up(self, wanted: Sequence[Wanted], drafts: list[list[int]]) -> None:
        """Compute what the draft lacks of each request, and draw each one's first draft."""
        start = [self._valid(want.state) for want in wanted]
        while todo := [i for i, w in enumerate(wanted) if start[i] < w.state.num_tokens]:
            left = self._budget
            tokens: list[int] = []
            segments: list[tuple[int, int]] = []
            taken: list[int] = []
            rows: list[int] = []
            for i in todo:
                state = wanted[i].state
                count = min(left, state.num_tokens - start[i])
                if count == 0:
                    break
                tokens += state.token_ids[start[i] : start[i] + count]
                segments.append((start[i], count))
                taken.append(i)
                start[i] += count
                left -= count
                if start[i] == state.num_tokens:
                    rows.append(len(tokens) - 1)
            self._sample(tokens, segments, taken, rows, wanted, drafts)

    def _sample(
        self,
        tokens: list[int],
        segments: list[tuple[int, int]],
        taken: list[int],
        rows: list[int],
        wanted: Sequence[Wanted],
        drafts: list[list[int]],
    ) -> None:
        """Run one forward; give the first ``len(rows)`` requests of ``taken`` a draft more."""
        tables = stack_block_tables([self._cache.table(wanted[i].state.request_id) for i in taken])
        drawing = taken[: len(rows)]
        states = [wanted[i].state.with_output(drafts[i]) for i in drawing]
        batch: Batch = pack(tokens, segments, tables, rows, states)
        logits = self._run_model(batch)
        for i, drawn in zip(drawing, self._sampler(logits, states), strict=True):
            drafts[i].append(drawn.token)

    def _valid(self, state: RequestState) -> int:
        computed = self._computed.get(state.request_id)
        if computed is None or computed.state is not state:
            return 0
        return computed.still_valid(self._cache.table(state.request_id).block_ids)

    def _remember(self, state: RequestState, drafts: list[int]) -> None:
        # The last draft was never computed.
        blocks = self._cache.table(state.request_id).block_ids
        self._computed[state.request_id] = _Computed(
            state, state.num_tokens, tuple(drafts[:-1]), blocks
        )


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model over the layers after the target's; ``shapes`` are its own layers'."""

    forward: PackedForward
    shapes: tuple[KVShape, ...]
    source: str


def load_draft(
    options: config.Engine,
    model_dir: Path,
    kind: KVCacheFactory,
    target: load_self_test.ExpectedLogits,
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
        ready = models.prepare(
            directory,
            options.kv.block_size,
            options.attention.device,
            dtype=compute_dtype.cast_target(options),
            matrix_storage=compute_dtype.matrix_storage(options),
            layers=drafts.draft_layers,
            first_layer=len(target.shapes),
        )
        loaded, choice, expected = ready.loaded, ready.choice, ready.expected
        sizes = [asked.logits[0].shape[-1] for asked in (target, expected)]
        if sizes[0] != sizes[1]:
            raise EngineError(f"its vocabulary has {sizes[1]} ids, the model's {sizes[0]}")
        shapes = target.shapes + expected.shapes
        small = kind.create_for(shapes, len(expected.sequences), expected.max_sequence_tokens)
        load_self_test.verify(loaded, choice.forward, small, expected, options.kv.dtype.value)
    except EngineError as error:
        raise EngineError(f"engine.speculation=draft: {error}") from error
    layers = f", {len(expected.shapes)} layers" if drafts.draft_layers else ""
    return LoadedDraft(choice.forward, expected.shapes, f"{directory.name}{layers}")
