"""Options of ``python -m labkit.serve``: an engine, a model, and the server around them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from labkit.config.engine import Engine
from labkit.config.model import Model
from labkit.config.option import Group, option, require

time_option = partial(option, gt=0, unit="seconds")


class SpecialTokens(Enum):
    """How special tokens that appear in the text of messages are tokenised.

    act: as control tokens. escape: as plain text.
    """

    act = "act"
    escape = "escape"


@dataclass
class Server(Group, place="server"):
    """The HTTP server: address, key, limits and timeouts."""

    host: str = option(
        "127.0.0.1", "Address to listen on; a loopback address accepts only local clients."
    )
    port: int = option(
        8000, "Port to listen on; 0: any free port, which is printed.", ge=0, le=65535
    )
    api_key: str | None = option(
        None,
        "Bearer token that clients must send; '${oc.env:NAME}' reads an environment variable.",
        null_means="no authentication",
    )
    model_name: str | None = option(
        None, "Model name in the API.", null_means="the model's own name"
    )
    cors_origins: str | None = option(
        None,
        "Origins of web pages that may call the server, separated by spaces, or '*'.",
        null_means="none",
    )
    hosts: str | None = option(
        None,
        "Names of this server in Host headers besides localhost, IP addresses and server.host, "
        "separated by spaces, or '*'; requests for other names are refused (403).",
        null_means="none on a loopback address, and any on others",
    )
    special_tokens_in_content: SpecialTokens = option(SpecialTokens.act)
    max_body_bytes: int = option(
        4 << 20,
        "Maximum size of a request body; larger ones are refused (413).",
        ge=1 << 10,
        unit="bytes",
    )
    max_prompt_tokens: int = option(
        32_768, "Maximum prompt length; longer prompts are refused (400).", ge=1, unit="tokens"
    )
    max_output_tokens: int | None = option(
        None,
        "Maximum of a request's max_tokens, and its default except for /v1/completions (16); more "
        "is refused (400).",
        ge=1,
        unit="tokens",
        null_means="what the context leaves after the prompt",
    )
    max_choices: int = option(
        16, "Maximum completions per request (n); more are refused (400).", ge=1
    )
    max_live: int = option(
        256,
        "Maximum completions running or waiting, requests in preparation (being tokenised) "
        "included; further requests are refused (429).",
        ge=1,
    )
    max_grammar_bytes: int = option(
        1 << 20,
        "Maximum size of a JSON schema, or of a request's tools as a grammar (400).",
        ge=1,
        unit="bytes",
    )
    grammar_timeout_s: float = time_option(
        5.0, "Time limit of compiling a schema or a grammar, in a process of its own (400)."
    )
    grammar_memory_bytes: int = option(
        256 << 20,
        "Memory limit of compiling a schema or a grammar (400).",
        ge=1 << 20,
        unit="bytes",
    )
    receive_timeout_s: float = time_option(
        60.0, "Time limit of receiving a request, headers and body (408)."
    )
    timeout_s: float = time_option(
        600.0,
        "Timeout of a request, which is then aborted (504, or an error that ends the stream).",
    )
    grace_s: float = option(
        10.0, "Time that running requests get to finish at shutdown.", ge=0, unit="seconds"
    )
    stuck_s: float = time_option(
        60.0, "Duration of a step beyond which the engine is reported unhealthy (503)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        key = self.api_key
        require(bool(self.host), "server.host: must be an address, such as 127.0.0.1")
        origins = (self.cors_origins or "*").split()
        require(
            origins == ["*"] or all("://" in origin and "*" not in origin for origin in origins),
            f"server.cors_origins={self.cors_origins}: must be origins such as "
            "http://localhost:3000, separated by spaces, or '*'",
        )
        require(
            all(name == "*" or re.fullmatch(r"[\w.-]+", name) for name in self.host_names),
            f"server.hosts={self.hosts}: must be names such as gpu.example, without a port, "
            "separated by spaces, or '*'",
        )
        require(
            key is None or (key.isascii() and key.isprintable() and bool(key.strip())),
            "server.api_key: must be printable ASCII with at least one character besides spaces",
        )

    @property
    def host_names(self) -> list[str]:
        return (self.hosts or "").lower().split()


@dataclass
class ServeConfig(Group):
    """Options of ``python -m labkit.serve`` itself."""

    engine: Engine = field(default_factory=Engine)
    model: Model = field(default_factory=Model)
    server: Server = field(default_factory=Server)
    shell: bool = option(
        False, "Chat with the model in this terminal instead of starting a server."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.model.has_source,
            f"model={self.model.name}: set model.path=PATH to a directory that mlx_lm can load or "
            "to a GGUF file",
        )
        require(
            self.engine.attention.resolver != "identity",
            "engine.attention.resolver=identity: it handles decode only, and requests begin "
            "with a prefill; set another resolver",
        )
        require(
            self.engine.name != "openai",
            "engine=openai: it forwards to another server; set an engine that runs here, such as "
            "engine=paged",
        )
        why = "shell=true starts no server"
        require(  # without the key, which is a secret
            not self.shell or self.server.api_key is None, f"server.api_key: {why}; leave it null"
        )
        for name, _, _ in self.server.options() if self.shell else ():
            if name != "max_output_tokens":
                self.server.require_default(name, why)
