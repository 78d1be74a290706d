"""The Python door: prompts in, texts out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from labkit import config
from labkit.engine.engine_factory import create
from labkit.engine.engine_protocol import EngineError
from labkit.engine.incremental_detokenizer import Tokenizer
from labkit.engine.output_processor import OutputProcessor, RequestOutput
from labkit.engine.request import Request, SamplingParams
from labkit.models.tokenizer import load as load_tokenizer

Prompt = str | Sequence[int]
PROMPT = "a prompt is a text or a list of token ids"


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    """A request in the engine: what reads its events, and where its outputs wait."""

    processor: OutputProcessor
    outbox: deque[RequestOutput]


class LLM:
    """A model directory, served. Also a context manager that closes it.

    An exception or ctrl-C leaves it usable: a step is finished before it is raised, and
    the requests of the call that it ends are aborted. A step that fails itself ends the
    requests of every call.

    Parameters
    ----------
    path
        A directory that mlx_lm can load.
    **options
        The engine's options (``labkit.config.Engine``), each by its own name wherever it
        stands in the tree: ``LLM(path, max_num_seqs=8, block_size=32, resolver="seq_map")``;
        ``parallel_size`` is that of ``engine.parallel``, whose ranks are started and ended here.
        Not ``name``, which is a preset's, and not ``blas``, ``threads``, ``memory_limit`` and
        those of ``mlx``: a process settles them before MLX and numba are imported
        (``labkit.machine``, ``NUMBA_NUM_THREADS``, MLX's own variables).

    Raises
    ------
    ConfigError
        There is no such option, or its value is not allowed.
    EngineError
        The model cannot be served; the reason in one line.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        engine_options = engine_config(options)
        self._tokenizer: Tokenizer = load_tokenizer(Path(path))
        self._engine = create(engine_options, Path(path))
        self._ids = itertools.count()
        self._live: dict[str, Live] = {}

    def __enter__(self) -> LLM:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, batched; results in the order of the prompts.

        ``prompts`` are texts or lists of token ids; ``params`` is one for all or one each.
        A request that cannot be served has ``finish_reason="error"``; the others go on.

        Raises
        ------
        EngineError
            A prompt is neither, or there are not as many ``params`` as prompts.
        """
        last: dict[str, RequestOutput] = {}
        with contextlib.closing(self.stream(prompts, params)) as outputs:
            for output in outputs:
                last[output.request_id] = output
        return [last[key] for key in sorted(last, key=int)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield every request's output after each of its tokens, as they are computed.

        Leaving the loop early aborts what is not finished. Several streams may be read in
        turns: they share the engine's batches.

        Raises
        ------
        EngineError
            As ``generate``, at once.
        """
        prompts = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise EngineError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
        asked = [self._request(*pair) for pair in zip(prompts, params, strict=True)]
        return self._serve(asked)

    def _request(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, str | None]:
        if not isinstance(params, SamplingParams):
            raise EngineError(f"{params!r}: sampling parameters are SamplingParams")
        text = prompt if isinstance(prompt, str) else None
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        return Request(str(next(self._ids)), tuple(ids), params), text

    def _serve(
        self, asked: list[tuple[Request, str | None]]
    ) -> Generator[RequestOutput, None, None]:
        outbox: deque[RequestOutput] = deque()
        unfinished = {request.request_id for request, _ in asked}
        try:
            for request, prompt in asked:
                processor = OutputProcessor(request, prompt, self._tokenizer)
                self._live[request.request_id] = Live(processor, outbox)
                # The engine has no tokenizer: stop texts are looked for here.
                params = dataclasses.replace(request.params, stop=())
                self._engine.submit(dataclasses.replace(request, params=params))
            while unfinished:
                if not outbox:
                    self._step(unfinished)
                    continue
                output = outbox.popleft()
                if output.finish_reason is not None:
                    unfinished.remove(output.request_id)
                yield output
        finally:
            with defer_sigint():
                for request_id in unfinished & self._live.keys():
                    self._end(request_id)

    def _step(self, wanted: set[str]) -> None:
        """Run one batch and hand each output to the stream that waits for it."""
        if not self._engine.has_work():
            lost = ", ".join(sorted(wanted, key=int))
            raise EngineError(f"requests {lost} are lost: a step failed, or the LLM was closed")
        with defer_sigint():
            for event in self._engine.step():
                live = self._live.get(event.request_id)
                if live is None:
                    continue
                output = live.processor.process(event)
                live.outbox.append(output)
                if output.finish_reason is not None:
                    self._end(event.request_id)

    def _end(self, request_id: str) -> None:
        """Forget a request, and abort it unless the engine has finished it itself."""
        del self._live[request_id]
        self._engine.abort(request_id)

    def counters(self) -> dict[str, float]:
        """Return the engine's counters."""
        return self._engine.counters()

    def close(self) -> None:
        """Release the model and the KV memory."""
        self._live.clear()
        self._engine.close()


@contextlib.contextmanager
def defer_sigint() -> Iterator[None]:
    """Let a step finish before ctrl-C is raised, so that nothing is left half done.

    Only in the main thread, where Python raises it; elsewhere there is nothing to hold.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    pending = []
    signal.signal(signal.SIGINT, lambda *_: pending.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            signal.raise_signal(signal.SIGINT)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: a text or a list of ids alone is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items: list[Any] = list(prompts)
    except TypeError:
        raise EngineError(f"{prompts!r}: {PROMPT}") from None
    return [items] if items and not hasattr(items[0], "__len__") else items


def token_ids(prompt: Sequence[int]) -> list[int]:
    """Return a prompt's ids as integers; EngineError if it holds something else."""
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise EngineError(f"{prompt!r}: {PROMPT}") from None
    if min(ids, default=0) < 0:
        raise EngineError(f"{min(ids)}: a token id is 0 or more")
    return ids


def engine_config(options: dict[str, Any]) -> config.Engine:
    """Build the engine's config from options named without their group.

    Raises
    ------
    ConfigError
        An unknown option or a value that is not allowed.
    """
    tree: dict[str, Any] = {}
    homes = _homes()
    for name, value in options.items():
        config.require(name in homes, f"{name}: no such engine option; there are {_names(homes)}")
        group = homes[name]
        leaf = LEAVES.get(name, name)
        (tree.setdefault(group, {}) if group else tree)[leaf] = value
    return config.from_plain(config.Engine, tree)


# What a process settles before an engine is made, and which engine it is.
NOT_OPTIONS = ("name", "blas", "threads", "memory_limit", "mlx")
# Options whose own name says too little without their group's.
LEAVES = {"parallel_size": "size"}


def _homes() -> dict[str, str | None]:
    """Map every option of the engine to its group, None at the top."""
    homes: dict[str, str | None] = {}
    default = config.Engine()
    for item in dataclasses.fields(default):
        value = getattr(default, item.name)
        if item.name in NOT_OPTIONS:
            continue
        if dataclasses.is_dataclass(value):
            names = {leaf: name for name, leaf in LEAVES.items()}
            leaves = (leaf.name for leaf in dataclasses.fields(value))
            homes |= {names.get(leaf, leaf): item.name for leaf in leaves}
        else:
            homes[item.name] = None
    return homes


def _names(homes: dict[str, str | None]) -> str:
    return ", ".join(sorted(homes))
