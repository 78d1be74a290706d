"""A server as an arm: how it is started, what it understands, and who is known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, ReadBy, option, require


class Api(Enum):
    """Which of OpenAI's endpoints is asked: the prompt as it is, or a conversation.

    With chat the server writes the prompt, by the model's chat template.
    """

    completions = "completions"
    chat = "chat"


class Ending(Enum):
    """How a server is told not to stop at the model's end token."""

    ignore_eos = "ignore_eos"  # a field of the request, as vLLM's
    logit_bias = "logit_bias"  # the end token is made unlikely
    none = "none"


@dataclass(frozen=True)
class Preset:
    """What is known of a server.

    Parameters
    ----------
    command
        How it is started, with the words of ``FILLED_IN`` in braces; empty: it runs already.
    model
        What a request calls the model; empty: the first that ``/v1/models`` lists.
    token_prompts
        Whether it takes a prompt as token ids; else prompts are sent as text.
    token_ids
        Whether ``return_token_ids`` makes it say the ids that it sampled.
    ending
        How outputs get their full length.
    multiplies_by_blas
        Whether MLX's CPU build multiplies in it, so that ``engine.blas`` applies (Linux).
    run_here
        Whether labkit's own tests run it; else it is written by its documentation.
    """

    command: str
    model: str = ""
    token_prompts: bool = False
    token_ids: bool = False
    ending: Ending = Ending.none
    multiplies_by_blas: bool = False
    run_here: bool = False


# What a command may name: {model} a directory, {gguf} the same weights as one GGUF file (float32).
FILLED_IN = ("port", "model", "gguf", "python", "threads", "labkit")
LOCAL = "--host 127.0.0.1 --port {port}"

PRESETS = {
    "mlx_lm": Preset(
        "{python} -m mlx_lm server --model {model} " + LOCAL,
        model="default_model",
        ending=Ending.logit_bias,
        multiplies_by_blas=True,
        run_here=True,
    ),
    "labkit": Preset(
        "{python} -m labkit.serve engine=paged model=local 'model.path=\"{model}\"' "
        "server.port={port} engine.threads={threads}",
        token_prompts=True,
        token_ids=True,
        ending=Ending.ignore_eos,
        run_here=True,
    ),
    "xllamacpp": Preset(
        "{python} {labkit}/engine/openai/llama_cpp_server.py --model {gguf} --port {port} "
        "--threads {threads}",
        token_prompts=True,
        ending=Ending.ignore_eos,
        run_here=True,
    ),
    "null_server": Preset(
        "{python} -m labkit.engine.openai.null_server --port {port}",
        model="null",
        ending=Ending.ignore_eos,
        run_here=True,
    ),
    "llama_server": Preset(
        "llama-server --model {gguf} --threads {threads} " + LOCAL,
        token_prompts=True,
        ending=Ending.ignore_eos,
    ),
    # It answers one request at a time, and breaks one off for the next unless told not to.
    "llama_cpp_python": Preset(
        "{python} -m llama_cpp.server --model {gguf} --n_threads {threads} --n_ctx 4096 "
        "--interrupt_requests False " + LOCAL,
        ending=Ending.logit_bias,
    ),
    "vllm": Preset(
        "vllm serve {model} " + LOCAL,
        token_prompts=True,
        token_ids=True,
        ending=Ending.ignore_eos,
    ),
    "vllm_metal": Preset(
        "vllm serve {model} " + LOCAL,
        token_prompts=True,
        token_ids=True,
        ending=Ending.ignore_eos,
    ),
    "omlx": Preset("omlx serve --model-dir {model}/.. " + LOCAL),
    "exo": Preset(""),
    "lm_studio": Preset("lms server start --port {port}"),
    "ollama": Preset(""),
    "other": Preset(""),
}
SERVED = ReadBy("engine.name", ("openai",))


@dataclass
class Opponent(Group, place="engine.server"):
    """An OpenAI-compatible server that is asked over HTTP (engine=openai)."""

    preset: str = option(
        "mlx_lm",
        "What is known of the server: its command, the form of its prompts, how it is told to go "
        "on behind the end token (docs/opponents.md).",
        words=tuple(PRESETS),
        read_by=SERVED,
    )
    command: str | None = option(
        None,
        "How it is started, fresh for every run, with {port}, {model}, {gguf}, {python}, {threads} "
        "filled in.",
        null="the preset's",
        read_by=SERVED,
    )
    args: str = option("", "What is added to the command.", read_by=SERVED)
    python: str | None = option(
        None, "The interpreter that {python} stands for.", null="this one", read_by=SERVED
    )
    url: str | None = option(
        None,
        "A server that runs already, such as http://127.0.0.1:8000: it is kept, not started.",
        null="a fresh one",
        read_by=SERVED,
    )
    model: str | None = option(
        None, "What requests call the model.", null="what the preset says", read_by=SERVED
    )
    api: Api = option(Api.completions, read_by=SERVED)
    start_timeout_s: float = option(
        300.0,
        "How long it may take until it has generated a token.",
        above=0,
        most=3600,
        unit="seconds",
        read_by=SERVED,
    )
    silence_s: float = option(
        120.0,
        "A stream that says nothing for so long has failed.",
        above=0,
        most=3600,
        unit="seconds",
        read_by=SERVED,
    )
    most_late_ms: float = option(
        50.0,
        "A client that is later than this (99th percentile of its event loop's lag, of its sends, "
        "or of its own part of TTFT) measures itself: the cell is not healthy.",
        above=0,
        most=10_000,
        unit="milliseconds",
        read_by=SERVED,
    )

    def __post_init__(self) -> None:
        """Check what spans options."""
        super().__post_init__()
        self._check_url()
        if self.command is not None:
            words = _filled_in(self.command)
            unknown = next((word for word in words if word not in FILLED_IN), None)
            require(
                unknown is None,
                f"engine.server.command: {{{unknown}}} is not filled in; allowed are "
                f"{', '.join(f'{{{word}}}' for word in FILLED_IN)}",
            )
            require(
                "port" in words,
                "engine.server.command: it names no {port}, at which labkit would ask it",
            )

    def _check_url(self) -> None:
        if self.url is None:
            return
        require(
            self.url.startswith(("http://", "https://")),
            f"engine.server.url={self.url}: must begin with http:// or https://",
        )
        for name in ("command", "args", "python"):
            self.require_default(name, "engine.server.url names a server that runs already")

    @property
    def known(self) -> Preset:
        """What is known of the server."""
        return PRESETS[self.preset]

    @property
    def words(self) -> str:
        """The command as it is written, empty where there is none."""
        return f"{self.command or self.known.command} {self.args}".strip()

    def check_startable(self) -> None:
        """Refuse a server that nobody starts; raises ``ConfigError``."""
        require(
            self.url is not None or bool(self.command or self.known.command),
            f"engine.server.preset={self.preset}: labkit does not know how it is started; start it "
            "and set engine.server.url=http://..., or set engine.server.command",
        )


def _filled_in(command: str) -> list[str]:
    """Return the words in braces; a command that cannot be read as such is refused."""
    from string import Formatter

    try:
        return [word for _, word, _, _ in Formatter().parse(command) if word is not None]
    except ValueError as error:
        require(False, f"engine.server.command: {error}; write {{{{ for a brace")
        return []
