"""Chat templates that never end or fill the memory, in processes that can be killed."""

import asyncio
import json

import psutil
import pytest
from fake_engine import CharTokenizer

from labkit.config import ConfigError
from labkit.models.chat_template import RenderOptions, load_template
from labkit.server.generation import template_processes
from labkit.server.generation.template_processes import TemplateProcesses
from labkit.server.types.api_error import ApiError

TEMPLATE = """\
{%- set text = messages[0].content %}
{%- if text == 'loop' %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif text == 'memory' %}{{ '%2000000000d' % 1 }}
{%- elif text == 'refuse' %}{{ raise_exception('no') }}
{%- else %}{{ style }}{{ tools }}{{ text }}{{ messages[0].big }}{{ "\\ud800" }}
{%- if add_generation_prompt %}:{% endif %}{% endif %}"""


def message(text):
    return [{"role": "user", "content": text, "big": 10**30}]


class OwnTemplate(CharTokenizer):
    """A tokenizer with a model's template, which fails if this process renders it."""

    def __init__(self, model_dir):
        super().__init__()
        self.template = load_template(model_dir)

    def render_chat(self, *_):
        pytest.fail("it renders in this process")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run ``scenario(processes, tokenizer)``; no process may be left behind."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    monkeypatch.setattr(template_processes, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(template_processes, "MEMORY_BYTES", 32 << 20)

    def run(scenario):
        tokenizer = OwnTemplate(tmp_path)

        async def main():
            processes = TemplateProcesses(tokenizer, tmp_path)
            await processes.start()
            try:
                await asyncio.wait_for(scenario(processes, tokenizer), 60)
            finally:
                await processes.close()
            with pytest.raises(ApiError, match="stopping"):
                await processes.render(message("a"), (), None)

        before = set(psutil.Process().children())
        asyncio.run(main())
        assert set(psutil.Process().children()) <= before

    return run


def test_a_template_renders_what_it_renders_in_this_process(run):
    async def scenario(processes, tokenizer):
        for options in (None, RenderOptions(False, variables={"style": "é😀"})):
            arguments = message("a\n" * 100_000), [{"type": "function"}], options
            expected = tokenizer.template.render(*arguments)
            assert await processes.render(*arguments) == expected
        with pytest.raises(ConfigError, match=r"refuses the conversation \(no\)"):
            await processes.render(message("refuse"), (), None)

    run(scenario)


@pytest.mark.parametrize(
    ("text", "limit_s", "reason"),
    [("loop", 0.3, "longer than 0.3 s"), ("memory", 60.0, "more than 33554432 bytes")],
)
def test_a_template_that_exceeds_a_limit_ends_its_process_alone(
    run, monkeypatch, text, limit_s, reason
):
    monkeypatch.setattr(template_processes, "TIMEOUT_S", limit_s)

    async def scenario(processes, tokenizer):
        with pytest.raises(ConfigError, match=f"^the chat template .*{reason}"):
            await processes.render(message(text), (), None)
        # A new process, which a busy machine may not let answer in so short a time.
        for _ in range(200):
            try:
                rendered = await processes.render(message("a"), (), None)
                break
            except ConfigError as error:
                assert "longer than 0.3 s" in str(error)
        assert rendered.startswith("a1000")

    run(scenario)


def test_a_client_that_leaves_ends_the_rendering(run):
    async def scenario(processes, tokenizer):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(processes.render(message("loop"), (), None), 0.05)
        assert (await processes.render(message("a"), (), None)).startswith("a1000")

    run(scenario)
