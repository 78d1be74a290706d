"""The clients with which the server is tried: their pinned packages, scripts and tasks."""

from dataclasses import dataclass

# Packages published later are not installed, so that the dependencies of the pins are fixed, too.
PACKAGES_UNTIL = "2026-11-23"
TASKS = {
    "chat": "whole",
    "stream": "streamed",
    "turns": "repeated turns",
    "tools": "tools",
    "structured": "structured output",
}
ALL = tuple(TASKS)


@dataclass(frozen=True)
class Client:
    """A client.

    ``packages`` are requirements with exact versions, of which the first one names the client.
    ``tasks`` are those that its script does; the others are not what the client is for, or not
    what its API has.
    """

    name: str
    packages: tuple[str, ...]
    script: str
    tasks: tuple[str, ...] = ALL
    argument: str | None = None

    @property
    def version(self) -> str:
        """The version of the first package."""
        return self.packages[0].partition("==")[2]


OPENAI = "openai==3.54.0"
ANTHROPIC = "anthropic==2.12.0"
AGENTS = ("openai-agents==0.24.0", OPENAI)
PYDANTIC_AI = ("pydantic-ai-slim[openai,anthropic]==2.68.0", OPENAI, ANTHROPIC)
LANGCHAIN = ("langchain-openai==1.7.3", OPENAI)
LM_EVAL = ("lm-eval[api]==0.4.13", "transformers==5.23.0")  # the latter reads the tokenizer
LITELLM = ("litellm[proxy]==1.106.2",)
LOAD = ("chat", "stream")

CLIENTS = (
    Client("openai (chat completions)", (OPENAI,), "openai_client.py"),
    Client("openai (responses)", (OPENAI,), "openai_responses_client.py"),
    Client("anthropic", (ANTHROPIC,), "anthropic_client.py"),
    Client(
        "openai-agents (chat completions)",
        AGENTS,
        "openai_agents_client.py",
        ALL,
        "chat_completions",
    ),
    Client("openai-agents (responses)", AGENTS, "openai_agents_client.py", ALL, "responses"),
    Client("pydantic-ai (chat completions)", PYDANTIC_AI, "pydantic_ai_client.py", ALL, "chat"),
    Client("pydantic-ai (responses)", PYDANTIC_AI, "pydantic_ai_client.py", ALL, "responses"),
    Client("pydantic-ai (messages)", PYDANTIC_AI, "pydantic_ai_client.py", ALL[:4], "messages"),
    Client("langchain-openai (chat completions)", LANGCHAIN, "langchain_client.py", ALL, "chat"),
    Client("langchain-openai (responses)", LANGCHAIN, "langchain_client.py", ALL, "responses"),
    Client("llama-index", ("llama-index-llms-openai-like==0.8.1",), "llama_index_client.py"),
    Client("instructor", ("instructor==1.17.0",), "instructor_client.py", ALL[1:]),
    Client("litellm", LITELLM, "litellm_client.py"),
    Client("litellm's proxy", LITELLM, "litellm_proxy_client.py"),
    Client(
        "outlines",
        ("outlines==1.3.3", OPENAI),
        "outlines_client.py",
        ("chat", "stream", "turns", "structured"),
    ),
    Client("llm", ("llm==0.36",), "llm_client.py"),
    Client(
        "inspect-ai",
        ("inspect-ai==0.3.285", OPENAI),
        "inspect_ai_client.py",
        ("chat", "turns", "tools", "structured"),
    ),
    Client("dspy", ("dspy==3.4.1",), "dspy_client.py", ("chat", "turns", "structured")),
    Client("smolagents", ("smolagents[openai]==1.26.0",), "smolagents_client.py"),
    Client("lm-eval (chat completions)", LM_EVAL, "lm_eval_client.py", ("chat",), "chat"),
    Client("lm-eval (completions)", LM_EVAL, "lm_eval_client.py", ("chat",), "completions"),
    Client("guidellm", ("guidellm==0.8.1",), "guidellm_client.py", LOAD),
    Client("aiperf", ("aiperf==0.13.0",), "aiperf_client.py", ("chat", "stream", "turns")),
    Client("llama-benchy", ("llama-benchy==0.4.0",), "llama_benchy_client.py", ("stream", "turns")),
)
