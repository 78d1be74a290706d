"""``engine.speculation=draft``: a smaller model proposes the draft tokens.

The draft model's layers are additional layers of the target's KV blocks. A token's keys have the
same block id and offset in both models, so blocks are managed only once. The tokens that the draft
model has computed are recorded per request, and are computed again from the first block on that has
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from labkit import config
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.batch import Ints, pack
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_cache_interface import KVCacheFactory, KVCacheManager
from labkit.engine.memory_budget import model_footprint
from labkit.engine.model.dtype_resolution import WeightLoading
from labkit.engine.request import RequestState, RequestStatus
from labkit.engine.runner import logits_self_test
from labkit.engine.runner.input_builder import stack_block_tables
from labkit.engine.runner.model_runner import RunModel
from labkit.engine.runner.packed_forward import PackedForward
from labkit.engine.runner.shared_models import SharedModels
from labkit.engine.sampling.sampler import sample_rows
from labkit.engine.speculation.propose_and_verify import DraftRequest


@dataclass(frozen=True, slots=True)
class _DraftState:
    """The tokens of a request that the draft model has computed.

    They are the request's first ``known`` tokens, followed by the draft tokens ``drafts``.
    ``blocks`` are the ids of the blocks that the request had when the draft model computed these
    tokens.
    """

    state: RequestState
    known: int
    drafts: tuple[int, ...]
    blocks: Ints

    def num_valid_tokens(self, blocks: Ints, block_size: int) -> int:
        """Return how many of the request's first tokens the draft model has computed and can keep.

        ``blocks`` are the ids of the request's blocks now, of ``block_size`` tokens each. A block
        with the same id has the same keys, because drafting for other requests, the only other use
        of the draft model's layers, drops this state unless the request runs.
        """
        count = min(len(self.blocks), len(blocks))
        (changed,) = np.nonzero(self.blocks[:count] != blocks[:count])
        num_kept = block_size * int(changed[0] if len(changed) else count)
        accepted = 0
        for draft, token in zip(self.drafts, self.state.token_ids[self.known :], strict=False):
            if draft != token:
                break
            accepted += 1
        # The last token is computed again, for the logits of the next one.
        return min(self.known + accepted, self.state.num_tokens - 1, num_kept)


@dataclass(slots=True)
class _Draft:
    """The draft tokens of a request so far.

    The draft model has computed the first ``num_computed`` of the request's tokens and these.
    """

    request: DraftRequest
    num_computed: int
    tokens: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Samples draft tokens from a smaller model, with the request's parameters and random stream.

    ``run_model``: the draft model's forward, over its own layers of the target's KV memory.
    ``cache``: the target's KV cache. ``budget``: the largest number of tokens per forward while the
    draft model catches up with a prompt.
    """

    name = "draft"

    def __init__(self, run_model: RunModel, cache: KVCacheManager, budget: int) -> None:
        self._run_model = run_model
        self._cache = cache
        self._budget = budget
        self._draft_states: dict[str, _DraftState] = {}

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        running = RequestStatus.running
        self._draft_states = {
            request_id: draft_state
            for request_id, draft_state in self._draft_states.items()
            if draft_state.state.status is running
        }
        drafts = [
            _Draft(request, self._num_valid_tokens(request.state)) for request in draft_requests
        ]
        # Compute what the draft model lacks, which samples the first tokens.
        while behind := [d for d in drafts if d.num_computed < d.request.state.num_tokens]:
            left = self._budget
            chunks: list[tuple[_Draft, int]] = []
            for draft in behind:
                count = min(left, draft.request.state.num_tokens - draft.num_computed)
                if count:
                    chunks.append((draft, count))
                    left -= count
            self._compute(chunks)
        for length in range(1, max(request.limit for request in draft_requests)):
            self._compute([(draft, 1) for draft in drafts if draft.request.limit > length])
        for draft in drafts:
            state = draft.request.state
            blocks = self._cache.table(state.request_id).block_ids
            # The last draft token was never computed.
            self._draft_states[state.request_id] = _DraftState(
                state, state.num_tokens, tuple(draft.tokens[:-1]), blocks
            )
        return [tuple(draft.tokens) for draft in drafts]

    def _compute(self, chunks: Sequence[tuple[_Draft, int]]) -> None:
        """Run one forward over the next tokens of some drafts, as many as each tuple says.

        A draft whose tokens are all computed then gets another.
        """
        tokens: list[int] = []
        segments: list[tuple[int, int]] = []
        rows: list[int] = []
        sampling: list[_Draft] = []
        states: list[RequestState] = []
        for draft, count in chunks:
            state, start = draft.request.state.with_output(draft.tokens), draft.num_computed
            draft.num_computed += count
            tokens += state.token_ids[start : draft.num_computed]
            segments.append((start, count))
            if draft.num_computed == state.num_tokens:
                rows.append(len(tokens) - 1)
                sampling.append(draft)
                states.append(state)
        tables = [self._cache.table(draft.request.state.request_id) for draft, _ in chunks]
        logits = self._run_model(pack(tokens, segments, stack_block_tables(tables), rows, states))
        for draft, sampled in zip(sampling, sample_rows(logits, states), strict=True):
            # If sampling failed, any token may be the draft: the target rejects it.
            draft.tokens.append(sampled.token if sampled.error is None else 0)

    def _num_valid_tokens(self, state: RequestState) -> int:
        draft_state = self._draft_states.get(state.request_id)
        if draft_state is None or draft_state.state is not state:
            return 0
        table = self._cache.table(state.request_id)
        block_size = self._cache.num_slots(table) // len(table)
        return draft_state.num_valid_tokens(table.block_ids, block_size)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft model.

    ``shapes`` are the KV shapes of its own layers, ``weight_bytes`` the bytes of its weights.
    """

    forward: PackedForward
    shapes: tuple[KVShape, ...]
    weight_bytes: int
    source: str


def load_draft(
    options: config.Engine,
    model_dir: Path,
    factory: KVCacheFactory,
    target: logits_self_test.ExpectedLogits,
    models: SharedModels,
) -> LoadedDraft | None:
    """Load the draft model if ``engine.speculation=draft``, else return None.

    Raises ``EngineError`` if the draft model cannot be served, or the size of its vocabulary
    differs from the target's.
    """
    if options.speculation is not config.Speculation.draft:
        return None
    drafts = options.drafts
    directory = Path(drafts.draft_path) if drafts.draft_path else model_dir
    loading = WeightLoading.of(options, drafts.draft_layers)
    try:
        prepared = models.prepare(
            directory,
            options.kv.block_size,
            options.attention.device,
            loading=loading,
            first_layer=len(target.cached.attention),
            activations=options.activations,
        )
        loaded, forward, expected = prepared.loaded, prepared.forward, prepared.expected
        if expected.cached.states:
            raise EngineError(
                f"the draft model (model_type={loaded.model_type}) has recurrent states, which "
                "are wrong after a rejected draft; choose a draft model with attention in every "
                "layer, or set engine.speculation=ngram"
            )
        target_vocab, vocab = (e.logits[0].shape[-1] for e in (target, expected))
        if vocab != target_vocab:
            raise EngineError(
                f"the draft model's vocabulary has {vocab} ids, but the model's has {target_vocab}"
                "; choose a draft model with the same vocabulary"
            )
        shapes = target.cached.attention + expected.cached.attention
        small = factory.create_for(shapes, len(expected.sequences), expected.max_sequence_tokens)
        dtypes = options.kv.dtype.value, options.activations.value
        logits_self_test.verify(loaded, forward, small, expected, *dtypes)
    except EngineError as error:
        layers = f" draft_layers={drafts.draft_layers}" if drafts.draft_layers else ""
        raise EngineError(f"engine.speculation=draft{layers}: {error}") from error
    layers = f", layers: {len(expected.cached.attention)}" if drafts.draft_layers else ""
    weights = directory, loading
    sizes = model_footprint.from_directory(*weights) or model_footprint.from_weights(*weights)
    own, source = expected.cached.attention, f"{directory.name}{layers}"
    return LoadedDraft(forward, own, sizes.weight_bytes, source)
