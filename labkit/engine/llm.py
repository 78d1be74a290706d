"""The offline Python API: ``LLM(path).generate(prompts, params)``."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit import config
from labkit.config import option_index
from labkit.engine.engine_factory import create
from labkit.engine.engine_protocol import EngineError, PromptLogprobs
from labkit.engine.output_processor import OutputProcessor, RequestOutput
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams, as_integers
from labkit.machine import worker_environment
from labkit.models import model_json
from labkit.models.tokenizer import Tokenizer
from labkit.models.tokenizer import load as load_tokenizer

Prompt = str | Sequence[int]
PROMPT_TYPES = "a prompt is a text or a list of token ids"


@dataclasses.dataclass(frozen=True, slots=True)
class TextScore:
    """A text's token ids, and their log probabilities from the second token on."""

    token_ids: tuple[int, ...]
    logprobs: PromptLogprobs

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log probability of the scored tokens."""
        return float(np.exp(-self.logprobs.tokens.mean()))


def _model_directory(path: Path) -> Path:
    """Return a model's directory. A GGUF file is converted, unless it was converted before."""
    if path.suffix.lower() != ".gguf" and not path.is_file():
        return path
    from labkit.models.model_directory import find_model

    return find_model(str(path)).path


class LLM:
    """An engine over a model directory, for offline inference. It is also a context manager.

    The ``LLM`` stays usable after an exception or ctrl-C: the running step is finished first,
    and the requests of the interrupted call are aborted. If a step fails, the requests of every
    call end. With ``parallel_size`` above 1, a step that fails ends the ranks, too, and every later
    call raises ``EngineError``: create a new ``LLM``.

        with LLM("path/to/model", max_num_seqs=8) as llm:
            (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=32))

    Parameters
    ----------
    path
        A directory that mlx_lm can load, or a GGUF file, which is converted on first use.
    **options
        The options of ``labkit.config.Engine``, with or without their group: ``block_size`` or
        ``kv_block_size`` is ``engine.kv.block_size``, and ``parallel_size`` is
        ``engine.parallel.size``, whose ranks are started and ended with the ``LLM``. ``dtype`` is
        ``engine.dtype``; write ``kv_dtype`` for ``engine.kv.dtype``, because ``dtype`` alone means
        the option outside any group. ``kv_layout="padded"`` or ``"contiguous"`` also sets what the
        engine of that name sets. ``name`` and the group ``server`` are not accepted. Neither are
        ``blas``, ``threads``, ``memory_limit`` and the group ``mlx``, because they must be set
        before MLX and numba are imported (``labkit.machine``, ``NUMBA_NUM_THREADS``, MLX's own
        variables).

    Raises
    ------
    ConfigError
        An option is unknown, ambiguous or set twice, its value is not allowed, or the GGUF file is
        missing or not supported.
    EngineError
        The model cannot be served. The message gives the reason.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        with _advice_for_llm():
            engine_options, model_dir = _engine_config(options), _model_directory(Path(path))
            if "numba" not in sys.modules:  # it counts cores, and not how many a container may use
                os.environ.setdefault("NUMBA_NUM_THREADS", str(worker_environment.core_count()))
            self._tokenizer: Tokenizer = load_tokenizer(model_dir)
            self._engine = create(engine_options, model_dir)
        self._takes_priorities = engine_options.scheduler.takes_priorities
        self._max_context = model_json.max_context(
            model_json.read_object(model_dir / "config.json")
        )
        self._ids = itertools.count()
        # By the id of a request in the engine: what makes its outputs, and those not yet yielded.
        self._live: dict[str, tuple[OutputProcessor, deque[RequestOutput]]] = {}

    def __enter__(self) -> LLM:
        """Return the LLM itself."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete all prompts in batches, and return the outputs in the order of the prompts.

        ``prompts`` are texts or lists of token ids. ``params`` is one ``SamplingParams`` for all
        prompts, or one for each. An output ends with the model's context
        (``finish_reason="length"``). A request that cannot be served has
        ``finish_reason="error"``, and the others are still served.

        ``priority`` is one integer for all prompts, or one for each. With ``queue="priority"``, the
        lower number is served first; with ``fcfs``, it must be 0.

        Raises ``EngineError`` if a prompt is neither text nor token ids, or the numbers of
        ``params`` or priorities and prompts differ, or the queue takes no priorities.
        """
        with contextlib.closing(self.stream(prompts, params, priority)) as outputs:
            last = {output.request_id: output for output in outputs}
        return [last[key] for key in sorted(last, key=int)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> Generator[RequestOutput, None, None]:
        """Yield every request's output after each of its tokens.

        Leaving the loop early aborts the unfinished requests. Several streams may be read
        alternately: they share the engine's batches. The arguments and errors are those of
        ``generate``. Errors are raised before the first output.
        """
        prompts = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise EngineError(
                f"prompts and sampling parameters must be equally many, not {len(prompts)} and "
                f"{len(params)}"
            )
        priorities = self._priorities(priority, len(prompts))
        arguments = zip(prompts, params, priorities, strict=True)
        return self._serve([self._request(*three) for three in arguments])

    def _priorities(self, priority: int | Sequence[int], count: int) -> tuple[int, ...]:
        """Return the priorities of ``count`` requests, or raise ``EngineError``."""
        given: Any = priority if hasattr(priority, "__len__") else [priority] * count
        try:
            priorities = as_integers("priority", given)
        except ValueError as error:
            raise EngineError(str(error)) from None
        if len(priorities) != count:
            raise EngineError(
                f"prompts and priorities must be equally many, not {count} and {len(priorities)}"
            )
        if any(priorities) and not self._takes_priorities:
            raise EngineError(
                f"priority={max(priorities, key=abs)}: the queue is fcfs; set "
                'queue="priority" or a class of your own'
            )
        return priorities

    def score(self, texts: Prompt | Sequence[Prompt], top: int = 0) -> list[TextScore]:
        """Return the log probabilities of all texts' tokens, in the order of the texts.

        ``texts`` are texts or lists of token ids. A text is scored as it is: no token is put before
        it, so its first token has no log probability. ``top`` is the number of likeliest tokens to
        return per position. The prefix cache is not used. Raises ``EngineError`` if a text has
        fewer than two tokens, or the engine cannot serve it.
        """
        params = SamplingParams(prompt_logprobs=top, max_tokens=1, ignore_eos=True)
        scores = []
        for index, output in enumerate(self.generate(texts, params)):
            if len(output.prompt_token_ids) < 2:
                raise EngineError(
                    f"text {index}: a score needs 2 or more tokens, not "
                    f"{len(output.prompt_token_ids)}"
                )
            if output.prompt_logprobs is None:
                raise EngineError(f"text {index}: {output.error}")
            scores.append(TextScore(output.prompt_token_ids, output.prompt_logprobs))
        return scores

    def _request(
        self, prompt: Prompt, params: SamplingParams, priority: int
    ) -> tuple[Request, str | None]:
        if not isinstance(params, SamplingParams):
            raise EngineError(f"{params!r}: sampling parameters must be SamplingParams")
        text = prompt if isinstance(prompt, str) else None
        try:
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        except config.ConfigError as error:
            raise EngineError(f"{prompt!r:.100}: {error}") from None
        room = params.max_tokens if self._max_context is None else self._max_context - len(ids)
        if 0 < room < params.max_tokens and not params.ignore_eos:
            params = dataclasses.replace(params, max_tokens=room)
        return Request(str(next(self._ids)), tuple(ids), params, priority), text

    def _serve(
        self, requests: list[tuple[Request, str | None]]
    ) -> Generator[RequestOutput, None, None]:
        outputs: deque[RequestOutput] = deque()
        unfinished = {request.request_id for request, _ in requests}
        try:
            for request, prompt in requests:
                processor = OutputProcessor(request, prompt, self._tokenizer)
                self._live[request.request_id] = processor, outputs
                # The engine has no tokenizer: stop texts are matched here.
                params = dataclasses.replace(request.params, stop=())
                self._engine.submit(dataclasses.replace(request, params=params))
            while unfinished:
                if not outputs:
                    self._step(unfinished)
                    continue
                output = outputs.popleft()
                if output.finish_reason is not None:
                    unfinished.remove(output.request_id)
                yield output
        finally:
            with defer_sigint():
                for request_id in unfinished & self._live.keys():
                    self._end(request_id)

    def _step(self, unfinished: set[str]) -> None:
        """Run one batch and append each event's output to the stream of its request."""
        if not self._engine.has_work():
            lost = ", ".join(sorted(unfinished, key=int))
            raise EngineError(f"requests {lost} were lost: a step failed, or the LLM was closed")
        with defer_sigint():
            for event in self._engine.step():
                live = self._live.get(event.request_id)
                if live is None:
                    continue
                processor, outputs = live
                output = processor.next_output(event)
                outputs.append(output)
                if output.finish_reason is not None:
                    self._end(event.request_id)

    def _end(self, request_id: str) -> None:
        """Remove a request, and abort it in the engine unless it is finished."""
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
    """Defer ctrl-C, which only the main thread gets, so that a step is never interrupted."""
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


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A single text, or a single list of token ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items: list[Any] = list(prompts)
    except TypeError:
        raise EngineError(f"{prompts!r}: {PROMPT_TYPES}") from None
    return [items] if items and not hasattr(items[0], "__len__") else items


def token_ids(prompt: Sequence[int]) -> list[int]:
    """Return a prompt's token ids; raise ``EngineError`` if one is no integer of 0 or more."""
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise EngineError(f"{prompt!r}: {PROMPT_TYPES}") from None
    if min(ids, default=0) < 0:
        raise EngineError(f"token id {min(ids)}: must be 0 or more")
    return ids


def _engine_config(options: dict[str, Any]) -> config.Engine:
    """Return the engine's config from the options of ``LLM``, named as in ``_option_key``."""
    tree: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in options.items():
        key = _option_key(name)
        config.require(key not in names, f"{name}: {names.get(key)} sets engine.{key} already")
        names[key] = name
        group, _, leaf = key.rpartition(".")
        (tree.setdefault(group, {}) if group else tree)[leaf] = value
    tree = config.to_plain(tree)
    layout = str(tree.get("kv", {}).get("layout"))
    for group, preset in LAYOUT_PRESETS.get(layout, {}).items():
        tree[group] = preset | tree.get(group, {})
    if layout in LAYOUT_PRESETS:
        is_static = tree.get("scheduler", {}).get("admission") == "static"
        tree["name"] = "naive" if is_static and layout == "padded" else layout
    return config.from_plain(config.Engine, tree)


@contextlib.contextmanager
def _advice_for_llm() -> Iterator[None]:
    """Write the advice of errors in terms of ``LLM``, which has no option ``engine``."""
    try:
        yield
    except (config.ConfigError, EngineError) as error:
        text = str(error)
        for pattern, advice in ADVICE:
            text = re.sub(pattern, advice, text)
        raise type(error)(text) from error


def _option_key(name: str) -> str:
    """Return the key, relative to ``engine``, of the option that ``LLM`` calls ``name``.

    An option's name is its key with ``_`` for each dot: ``kv_dtype`` is ``engine.kv.dtype``, and
    ``dtype`` is ``engine.dtype``. The group may be omitted (``block_size``) if no other option of
    ``LLM_KEYS`` has the same last name. Raises ``ConfigError`` if no option has this name, or
    several have it.
    """
    named = [key for key in LLM_KEYS if key.replace(".", "_") == name]
    named = named or [key for key in LLM_KEYS if key.rpartition(".")[2] == name]
    if not named:
        leaves = [key.rpartition(".")[2] for key in LLM_KEYS]
        short = sorted(
            leaf if leaves.count(leaf) == 1 else key.replace(".", "_")
            for key, leaf in zip(LLM_KEYS, leaves, strict=True)
        )
        raise config.ConfigError(
            f"{name}: no such engine option; must be one of: {', '.join(short)}"
        )
    if len(named) > 1:
        full = " or ".join(key.replace(".", "_") for key in named)
        raise config.ConfigError(f"{name}: several engine options have this name; write {full}")
    return named[0]


# What the layouts without blocks need; the same as in conf/engine.
LAYOUT_PRESETS: dict[Any, dict[str, dict[str, str]]] = {
    "contiguous": {"attention": {"backend": "sdpa"}},
    "padded": {
        "attention": {"backend": "sdpa"},
        "scheduler": {"order": "prefill_first", "composition": "split"},
    },
}
# Advice to choose another engine, and the same for ``LLM``.
ADVICE = (
    (r"set engine=mlx_lm( engine\.scheduler\.max_num_seqs=1)?\b", "generate with mlx_lm itself"),
    (r"set engine=openai \S+=mlx_lm, whose server", "run mlx_lm's server, which"),
    (r"\bengine=(padded|contiguous|paged)\b", r'kv_layout="\1"'),
)
# Groups and options that ``LLM`` lacks: the preset's name, the servers that only engine=openai
# starts, and the options that must be set before MLX and numba are imported.
EXCLUDED_OPTIONS = ("name", "server", "blas", "threads", "memory_limit", "mlx")
# The keys, relative to ``engine``, of the options that ``LLM`` has.
LLM_KEYS = tuple(
    entry.key
    for group in option_index.option_groups(config.Engine)
    for entry in group.entries
    if entry.key.partition(".")[0] not in EXCLUDED_OPTIONS
)
