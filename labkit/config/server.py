"""What ``python -m labkit.serve`` is asked: an engine, a model, and a server around them."""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.config.engine import Engine
from labkit.config.model import Model
from labkit.config.option import Group, option, require

TOKENS, SECONDS = "tokens", "seconds"


@dataclass
class Server(Group, place="server"):
    """Where the server listens, who may ask, and how much."""

    host: str = option(
        "127.0.0.1", "The address it listens at; a loopback address is reached from here only."
    )
    port: int = option(8000, "The port; 0: a free one, which is said.", least=0, most=65535)
    api_key: str | None = option(
        None,
        "What clients must send as a bearer token; '${oc.env:NAME}' reads a variable.",
        null="no key",
    )
    model_name: str | None = option(
        None, "What requests call the model.", null="the model's own name"
    )
    max_body_bytes: int = option(
        4 << 20, "Longer request bodies are refused (413).", least=1 << 10, unit="bytes"
    )
    max_prompt_tokens: int = option(
        32_768, "Longer prompts are refused (400).", least=1, unit=TOKENS
    )
    max_output_tokens: int = option(
        2_048,
        "Requests may ask for so many (400), and get so many where they do not say.",
        least=1,
        unit=TOKENS,
    )
    max_choices: int = option(16, "Completions that one request may ask for (400).", least=1)
    max_live: int = option(
        256, "Completions running or waiting at once; beyond, requests are refused (429).", least=1
    )
    timeout_s: float = option(
        600.0,
        "A request that takes longer is aborted (504, or an error that ends the stream).",
        above=0,
        unit=SECONDS,
    )
    grace_s: float = option(10.0, "For how long a stop lets requests go on.", least=0, unit=SECONDS)
    stuck_s: float = option(
        60.0, "An engine whose step takes longer is unhealthy (503).", above=0, unit=SECONDS
    )

    def __post_init__(self) -> None:
        """Check what no client could send."""
        super().__post_init__()
        key = self.api_key
        require(bool(self.host), "server.host: an address is needed, such as 127.0.0.1")
        require(
            key is None or (key.isascii() and key.isprintable() and bool(key.strip())),
            "server.api_key: allowed are printable ASCII characters, at least one",
        )


@dataclass
class Serve(Group):
    """The command."""

    engine: Engine = field(default_factory=Engine)
    model: Model = field(default_factory=Model)
    server: Server = field(default_factory=Server)
    shell: bool = option(False, "Talk to the model in this terminal; nothing listens.")

    def __post_init__(self) -> None:
        """Check what a group's defaults alone cannot satisfy."""
        super().__post_init__()
        require(
            self.model.given,
            f"model={self.model.name}: set model.path=PATH to a directory that mlx_lm can load or "
            "to a GGUF file",
        )
        require(
            self.engine.attention.resolver != "identity",
            "engine.attention.resolver=identity: it serves pure decode only, and requests begin "
            "with a prefill",
        )
        require(
            self.engine.name != "openai",
            "engine=openai: it asks another server; serve an engine that computes, such as paged",
        )
        for name, _, _ in self.server.options() if self.shell else ():
            if name != "max_output_tokens":
                self.server.require_default(name, "shell=true listens nowhere")
