"""The schema: every rule's error is one line that names the option."""

import dataclasses

import pytest

from labkit.config import (
    GPU,
    KV,
    Ablation,
    Activations,
    Admission,
    ArrivalKind,
    Arrivals,
    Attention,
    Budget,
    CacheState,
    Case,
    ChunkPolicy,
    Composition,
    ConfigError,
    DecodeShape,
    Design,
    Device,
    Drafts,
    DType,
    Engine,
    Experiment,
    KVDType,
    KVLayout,
    LatencySLO,
    Mlx,
    Model,
    ModelShape,
    Order,
    PackagedFile,
    Pipeline,
    PlannedLook,
    Precision,
    PrefixAlign,
    PrefixCache,
    Reservation,
    Scheduler,
    ServeConfig,
    Server,
    Speculation,
    Verification,
    Weights,
    Workload,
    from_plain,
    to_plain,
)


def experiment(**changes):
    base = {"ablation": Ablation(arms={"base": {}}), "model": Model(shape=ModelShape())}
    return Experiment(**{**base, **changes})


def kernel(**changes):
    return Workload(name="k", kind="kernel", cases=[Case("d", decode=1, context=1)], **changes)


def asking(metric, **changes):
    return experiment(ablation=Ablation(arms={"base": {}}, metric=metric), **changes)


def at_once(concurrency):
    return Workload(arrivals=Arrivals(ArrivalKind.at_once), concurrency=concurrency)


def test_requests_that_are_all_sent_at_once_have_a_lateness_and_no_rate():
    assert asking("late_p99_ms", workload=at_once(None)).primary_metrics == ("late_p99_ms",)
    assert asking("sent_req_s", workload=at_once(2)).primary_metrics == ("sent_req_s",)


def test_a_question_is_about_its_own_metric_or_about_what_its_requests_are_for():
    assert asking("e2e_p99_ms").primary_metrics == ("e2e_p99_ms",)
    both = asking(["ttft_p50_ms", "total_tok_s"], workload=Workload(limits=LatencySLO(e2e_ms=9)))
    assert both.primary_metrics == ("ttft_p50_ms", "total_tok_s")
    rate = Arrivals(kind=ArrivalKind.poisson, rate=2)
    primary = {
        "total_tok_s": Workload(),
        "goodput_req_s": Workload(arrivals=rate, concurrency=None, limits=LatencySLO(ttft_ms=200)),
        "e2e_p50_ms": Workload(arrivals=rate, concurrency=None),
        "e2e_ms": Workload(per_request=True),
        "dispatch_us": kernel(),
    }
    for metric, workload in primary.items():
        assert experiment(workload=workload).primary_metrics == (metric,)
    assert Workload(arrivals=Arrivals(kind=ArrivalKind.at_once)).primary_metrics == ("total_tok_s",)
    assert Workload(kind="mine.kinds:Kind").primary_metrics == ()


def test_workloads_that_serve_or_score_load_a_model():
    for kind in ("requests", "mine.kinds:Kind"):
        workload = Workload(kind=kind)
        assert workload.serves and workload.loads_model and workload.has_engine
    scoring = Workload(kind="scoring")
    assert scoring.loads_model and not scoring.serves
    assert kernel().loads_model is False


def test_plain_round_trip():
    whole = experiment(
        workload=Workload(
            name="k",
            kind="kernel",
            cases=[Case("decode", decode=4, context=16)],
        ),
        engine=Engine(threads=2, kv=KV(block_size=32), mlx=Mlx(tf32=False, sdpa_blocks=32)),
        ablation=Ablation(arms={"base": {"engine.threads": 1, "x": None}}),
    )
    assert from_plain(Experiment, to_plain(whole)) == whole


@pytest.mark.parametrize(("former", "unit"), [(True, "auto"), (False, "head")])
def test_the_former_name_of_unit_is_read_and_not_written(former, unit):
    plain = to_plain(experiment())
    assert "gqa_sharing" not in plain["engine"]["attention"]
    del plain["engine"]["attention"]["unit"]
    plain["engine"]["attention"]["gqa_sharing"] = former
    attention = from_plain(Experiment, plain).engine.attention
    assert attention == Attention(unit=unit)
    with pytest.raises(ConfigError, match=r"unit=head: engine\.attention\.backend=reference does"):
        Attention("reference", gqa_sharing=False)


def test_unknown_keys_and_wrong_types_are_refused_with_their_path():
    plain = to_plain(experiment())
    plain["engine"]["kv"]["block_sise"] = 16
    with pytest.raises(ConfigError, match=r"^engine\.kv\.block_sise: no such option$"):
        from_plain(Experiment, plain)
    plain = to_plain(experiment())
    plain["engine"]["threads"] = "many"
    with pytest.raises(ConfigError, match=r"^engine\.threads='many': must be of type int$"):
        from_plain(Experiment, plain)
    plain = to_plain(experiment())
    plain["engine"]["kv"]["dtype"] = "float8"
    with pytest.raises(
        ConfigError,
        match=r"^engine\.kv\.dtype=float8: must be one of: float32, float16, bfloat16, int8, int4$",
    ):
        from_plain(Experiment, plain)
    plain = to_plain(experiment())
    plain["engine"]["blas"] = "mkl"
    with pytest.raises(ConfigError, match=r"^engine\.blas=mkl: must be one of: openblas, stock$"):
        from_plain(Experiment, plain)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: KV(block_size=0), "engine.kv.block_size=0"),
        (lambda: KV(block_size=24), "engine.kv.block_size=24"),
        (lambda: Engine(threads=0), "engine.threads=0"),
        (lambda: Engine(dtype=DType.float16), "engine.dtype=float16: engine.attention.backend="),
        (lambda: Mlx(max_ops_per_buffer=0), "engine.mlx.max_ops_per_buffer=0: must be 1 to"),
        (lambda: Mlx(max_mb_per_buffer=-1), "engine.mlx.max_mb_per_buffer=-1"),
        (lambda: Mlx(sdpa_blocks=1025), "engine.mlx.sdpa_blocks=1025: must be 1 to 1024"),
        (lambda: Mlx(bfs_max_width=0), "engine.mlx.bfs_max_width=0"),
        (
            lambda: Workload(dtype=Precision.float16),
            "workload.dtype=float16: workload.kind=requests does not read it (read by kernel)",
        ),
        (
            lambda: experiment(workload=kernel(dtype=Precision.bfloat16)),
            "workload.dtype=bfloat16: engine.attention.backend=fused on "
            "engine.attention.device=cpu computes in float32; set device=metal or emulated",
        ),
        (
            lambda: Engine(
                kv=KV(dtype=KVDType.float16), attention=Attention(device=Device.emulated)
            ),
            "engine.kv.dtype=float16: engine.attention.backend=fused on "
            "engine.attention.device=emulated",
        ),
        (
            lambda: Engine(kv=KV(dtype=KVDType.bfloat16), attention=Attention(backend="reference")),
            "engine.kv.dtype=bfloat16: engine.attention.backend=reference",
        ),
        (
            lambda: Engine(name="mlx_lm", kv=KV(dtype=KVDType.float16)),
            "engine.kv.dtype=float16: engine=mlx_lm does not have this option; leave it float32",
        ),
        (
            lambda: experiment(
                engine=Engine(kv=KV(dtype=KVDType.float16)),
                workload=Workload(kind="kernel", cases=[Case("c", decode=1, context=1)]),
            ),
            "engine.kv.dtype=float16: workload=",
        ),
        (
            lambda: Engine(kv=KV(block_size=64), attention=Attention(device=Device.emulated)),
            "engine.kv.block_size=64: the kernels of engine.attention.device=emulated read blocks",
        ),
        (
            lambda: Engine(kv=KV(dtype=KVDType.int8), attention=Attention(backend="gather")),
            "engine.kv.dtype=int8: engine.attention.backend=gather on",
        ),
        (
            lambda: preset("padded", "padded", dtype=KVDType.int4),
            "engine.kv.dtype=int4: engine.kv.layout=padded holds float32; set engine=paged",
        ),
        (
            lambda: Engine(activations=Activations.int8, weights=Weights.float32),
            "engine.activations=int8: engine.weights=float32 dequantises the weights",
        ),
        (
            lambda: Engine(
                activations=Activations.int8,
                dtype=DType.float16,
                attention=Attention(backend="gather"),
            ),
            "engine.activations=int8: engine.dtype=float16 computes on MLX",
        ),
        (
            lambda: Engine(
                activations=Activations.int8, attention=Attention(device=Device.emulated)
            ),
            "engine.activations=int8: engine.attention.device=emulated runs the model on MLX",
        ),
        (
            lambda: Engine(name="mlx_lm", activations=Activations.int8),
            "engine.activations=int8: engine=mlx_lm does not have this option; leave it float32",
        ),
        (lambda: Drafts(num_draft_tokens=0), "engine.drafts.num_draft_tokens=0"),
        (lambda: Drafts(ngram_min=5), "engine.drafts.ngram_min=5"),
        (lambda: Drafts(draft_layers=0), "engine.drafts.draft_layers=0"),
        (lambda: Drafts(draft_layers=1, draft_path="d"), "names another"),
        (lambda: Engine(drafts=Drafts(num_draft_tokens=2)), "engine.drafts.num_draft_tokens=2"),
        (
            lambda: Engine(drafts=Drafts(verification=Verification.staircase)),
            "engine.drafts.verification=staircase: engine.speculation=none",
        ),
        (
            lambda: Engine(speculation=Speculation.ngram, drafts=Drafts(draft_layers=1)),
            "engine.drafts.draft_layers=1: engine.speculation=ngram does not read it",
        ),
        (
            lambda: Engine(speculation=Speculation.draft, drafts=Drafts(ngram_max=2)),
            "engine.drafts.ngram_max=2: engine.speculation=draft does not read it",
        ),
        (
            lambda: Engine(speculation=Speculation.ngram, pipeline=Pipeline.overlap),
            "engine.pipeline=overlap: engine.speculation=ngram",
        ),
        (lambda: Engine(name="nope"), "engine.name=nope"),
        (lambda: Engine(attention=Attention(backend="a:"), name="a.b:C"), "attention.backend=a:"),
        (lambda: Engine(attention=Attention(resolver="nope")), "engine.attention.resolver=nope"),
        (
            lambda: Engine(prefix_align=PrefixAlign.chunk, scheduler=Scheduler(chunk=32)),
            "engine.prefix_align=chunk: engine.prefix_cache=none caches no prefix",
        ),
        (
            lambda: Engine(prefix_align=PrefixAlign.chunk, prefix_cache=PrefixCache.hash),
            "engine.scheduler.chunk (now null)",
        ),
        (
            lambda: Engine(
                prefix_align=PrefixAlign.chunk,
                prefix_cache=PrefixCache.radix,
                scheduler=Scheduler(chunk=24),
            ),
            "multiple of engine.kv.block_size=16",
        ),
        (
            lambda: Engine(
                prefix_align=PrefixAlign.chunk,
                prefix_cache=PrefixCache.radix,
                scheduler=Scheduler(chunk=32, chunk_policy=ChunkPolicy.shrinking),
            ),
            "engine.scheduler.chunk_policy=shrinking",
        ),
        (
            lambda: Workload(
                kind="kernel",
                cache_state=CacheState.warm,
                cases=[Case("c", decode=1, context=1)],
            ),
            "workload.cache_state",
        ),
        (lambda: Attention(split_kv="some"), "engine.attention.split_kv=some"),
        (lambda: Attention(split_kv="1"), "engine.attention.split_kv=1: must be off, auto or"),
        (lambda: Attention(tile_threshold=1), "engine.attention.tile_threshold=1"),
        (
            lambda: Attention("reference", split_kv="2"),
            "split_kv=2: engine.attention.backend=reference does not read it",
        ),
        (
            lambda: Attention("reference", Device.emulated),
            "engine.attention.device=emulated: engine.",
        ),
        (lambda: Attention("reference", window_skip=False), "engine.attention.window_skip=false: "),
        (lambda: Attention("a.b:C", unit="head"), "engine.attention.unit=head: "),
        (
            lambda: Attention("reference", resolver="seq_map"),
            "resolver=seq_map: engine.attention.backend=reference does not",
        ),
        (lambda: Attention(unit="two"), "engine.attention.unit=two: must be auto, head, kv_head"),
        (
            lambda: Attention(unit="token", gqa_sharing=False),
            "engine.attention.unit=token: contradicts engine.attention.gqa_sharing=false",
        ),
        (lambda: Workload(window=4), "workload.window=4: workload.kind=requests does not read it"),
        (
            lambda: Workload(kind="kernel", window=0, cases=[Case("c", decode=1, context=1)]),
            "workload.window=0",
        ),
        (lambda: Scheduler(max_num_seqs=0), "engine.scheduler.max_num_seqs=0"),
        (
            lambda: Engine(scheduler=Scheduler(max_num_seqs=64, max_num_batched_tokens=8)),
            "max_num_batched_tokens=8",
        ),
        (lambda: Engine(scheduler=Scheduler(chunk=513)), "engine.scheduler.chunk=513: must be 1"),
        (lambda: Scheduler(chunk=0), "engine.scheduler.chunk=0"),
        (lambda: Scheduler(admission=Admission.static), "engine.scheduler.admission=static"),
        (lambda: Scheduler(watermark=0.1), "engine.scheduler.watermark=0.1"),
        (
            lambda: Scheduler(reservation=Reservation.optimistic, watermark=0.6),
            "engine.scheduler.watermark=0.6",
        ),
        (
            lambda: Scheduler(
                admission=Admission.static,
                order=Order.prefill_first,
                reservation=Reservation.optimistic,
            ),
            "engine.scheduler.reservation=optimistic",
        ),
        (
            lambda: Scheduler(chunk_policy=ChunkPolicy.shrinking),
            "engine.scheduler.chunk_policy=shrinking",
        ),
        (
            lambda: Scheduler(chunk_policy=ChunkPolicy.shrinking, chunk=15),
            "engine.scheduler.max_num_seqs=16",
        ),
        (
            lambda: Scheduler(
                chunk_policy=ChunkPolicy.shrinking, chunk=64, composition=Composition.split
            ),
            "engine.scheduler.composition=split",
        ),
        (lambda: Budget(blocks=1), "engine.budget.blocks=1"),
        (lambda: Budget(fraction=0.5), "engine.budget.fraction=0.5"),
        (lambda: ModelShape(num_heads=6, num_kv_heads=4), "model.shape.num_heads=6"),
        (lambda: ModelShape(head_dim=0), "model.shape.head_dim=0: must be 1 or more"),
        (
            lambda: Workload(kind="video", decoder_threads=0),
            "workload.decoder_threads=0: must be 1 to 64",
        ),
        (lambda: Model(shape=ModelShape(), path="x"), "model.path=x"),
        (lambda: Model(shape=ModelShape(), seed=-1), "model.seed=-1: must be 0 or more"),
        (lambda: Model(name="local", path="x", seed=3), "model.seed=3: model=local is not built"),
        (lambda: Workload(concurrency=None), "kind=closed needs a number of clients"),
        (lambda: Workload(concurrency=0), "workload.concurrency=0"),
        (lambda: Workload(stagger_ms=-1), "workload.stagger_ms=-1"),
        (lambda: Workload(cases=[Case("c", decode=1, context=1)]), "workload.cases"),
        (lambda: Workload(kind="kernel"), "workload.cases is empty"),
        (
            lambda: Workload(kind="kernel", concurrency=3, cases=[Case("c", decode=1, context=1)]),
            "workload.concurrency=3",
        ),
        (lambda: Case("c", decode=1), "decode and context go together"),
        (lambda: Case("c", decode=1, context=1, past=4), "past needs prefill"),
        (lambda: Case("c"), "no requests"),
        (lambda: Case("c", decode=1, context=1 << 31), "context=2147483648: must be 0 to 1048576"),
        (lambda: Case("c", uneven=[[1, 1 << 31]]), "them], at most 1048576 each"),
        (lambda: Ablation(arms={"control": {}}), "ablation.arms.control"),
        (lambda: Ablation(arms={"Control": {}}), "ablation.arms.Control: this is the A/A arm"),
        (lambda: Ablation(arms={"Map": {}, "a": {}, "map": {}}), "only its case differs from Map"),
        (lambda: Ablation(arms={"on": {}}), "ablation.arms.on"),
        (lambda: Ablation(arms={"a b": {}}), "'a b' is not a valid name"),
        (lambda: Ablation(arms={"我" * 51: {}}), "must have at most 150 bytes"),
        (lambda: from_plain(Arrivals, {"rate": 10**400}), "rate: is too large for a number"),
        (lambda: Ablation(arms={"a": 3}), "ablation.arms.a"),
        (lambda: Ablation(arms={"a": {}}, baseline="b"), "ablation.baseline=b"),
        (lambda: Ablation(metric=3), "ablation.metric=3: must be the name of a metric"),
        (lambda: Ablation(metric=[]), "ablation.metric=[]: must be"),
        (lambda: Ablation(metric=["e2e_ms", "e2e_ms"]), "a list of different names"),
        (lambda: asking("dispatch_us"), "ablation.metric=dispatch_us: workload=chat has no such"),
        (lambda: asking("total_tok_s", workload=kernel()), "must be one of: dispatch_us"),
        (lambda: asking("goodput_req_s"), "needs a limit such as workload.limits.ttft_ms=200"),
        (lambda: asking("row_steps"), "needs workload.per_request=true"),
        (lambda: asking("late_p99_ms"), "needs an open loop such as workload.arrivals.kind"),
        (lambda: asking("sent_req_s"), "needs arrivals over time such as workload.arrivals.kind"),
        (lambda: asking("sent_req_s", workload=at_once(None)), "needs arrivals over time"),
        (lambda: asking("outputs"), "set ablation.claims.identity"),
        (lambda: Design(blocks=0), "design.blocks=0"),
        (lambda: Design(runs_per_block=3), "design.runs_per_block=3"),
        (lambda: Design(alpha=0), "design.alpha=0"),
        (lambda: Design(timeout_s=0), "design.timeout_s=0"),
        (lambda: experiment(seed=-1), "seed=-1"),
        (
            lambda: experiment(
                engine=Engine(name="a.b:C"),
                workload=Workload(kind="kernel", cases=[Case("c", decode=1, context=1)]),
            ),
            "engine.name=a.b:C",
        ),
        (
            lambda: experiment(engine=Engine(attention=Attention(resolver="identity"))),
            "engine.attention.resolver=identity: it handles decode only",
        ),
        (
            lambda: experiment(engine=Engine(scheduler=Scheduler(queue="priority"))),
            "engine.scheduler.queue=priority: no workload gives its requests priorities",
        ),
        (lambda: experiment(ablation=Ablation()), "there is no arm"),
        (lambda: experiment(model=Model()), "set model.path=PATH"),
        (lambda: preset("paged", "padded"), "engine.kv.layout=padded: engine.name=paged"),
        (lambda: preset("padded", "contiguous"), "engine.kv.layout=contiguous"),
        (lambda: preset("contiguous", "paged"), "set engine=naive, padded, contiguous or paged"),
        (lambda: preset("paged", "paged", "sdpa"), "engine.attention.backend=sdpa"),
        (lambda: preset("padded", backend="fused"), "engine.attention.backend=fused"),
        (lambda: preset("contiguous", "contiguous", "gather"), "backend=gather: it needs blocks"),
        (lambda: preset("naive"), "engine.scheduler.admission=continuous"),
        (
            lambda: preset("contiguous", "contiguous", dtype=KVDType.float16),
            "engine.kv.dtype=float16: engine.kv.layout=contiguous holds float32",
        ),
        (
            lambda: preset(
                "padded",
                scheduler={
                    "admission": Admission.static,
                    "order": Order.prefill_first,
                    "composition": Composition.split,
                },
            ),
            "engine.scheduler.admission=static: engine.name=padded",
        ),
        (lambda: preset("padded", scheduler={}), "engine.scheduler.composition=mixed"),
        (lambda: preset("padded", prefix_cache=PrefixCache.hash), "engine.prefix_cache=hash"),
        (
            lambda: preset(
                "contiguous", "contiguous", scheduler={"reservation": Reservation.optimistic}
            ),
            "engine.scheduler.reservation=optimistic: engine.kv.layout=contiguous",
        ),
        (
            lambda: preset("contiguous", "contiguous", prefix_cache=PrefixCache.radix),
            "engine.prefix_cache=radix: engine.kv.layout=contiguous",
        ),
        (
            lambda: preset("padded", decode_shape=DecodeShape.bucketed),
            "engine.decode_shape=bucketed: engine.kv.layout=padded",
        ),
        (
            lambda: preset("contiguous", "contiguous", speculation=Speculation.ngram),
            "engine.speculation=ngram: engine.kv.layout=contiguous",
        ),
        (
            lambda: preset("padded", pipeline=Pipeline.overlap),
            "engine.pipeline=overlap: engine.kv.layout=padded",
        ),
        (
            lambda: Engine(attention=Attention(backend="gather", resolver="seq_map")),
            "engine.attention.resolver=seq_map",
        ),
        (
            lambda: experiment(
                engine=preset("padded"),
                workload=Workload(kind="kernel", cases=[Case("c", decode=1, context=1)]),
            ),
            "engine.name=padded: it serves requests",
        ),
    ],
)
def test_each_rule_names_its_option_in_one_line(make, names):
    with pytest.raises(ConfigError) as caught:
        make()
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_design_of_very_many_blocks_has_a_smallest_p():
    """6 ** 397 is more than a float holds."""
    many = Design(blocks=1000, runs_per_block=2, looks=[PlannedLook(500, 0.01)])
    assert many.smallest_p(1000) == 2e-5 < many.smallest_p(6) == 2 / 6**6


def preset(name, layout="padded", backend="sdpa", scheduler=None, dtype=KVDType.float32, **options):
    split = {"order": Order.prefill_first, "composition": Composition.split}
    return Engine(
        name=name,
        kv=KV(layout=KVLayout(layout), dtype=dtype),
        attention=Attention(backend=backend),
        scheduler=Scheduler(**(split if scheduler is None else scheduler)),
        **options,
    )


def test_every_layout_preset_can_be_built():
    static = {"admission": Admission.static, "order": Order.prefill_first}
    built = [
        preset("padded"),
        preset("naive", scheduler={**static, "composition": Composition.split}),
        preset("contiguous", "contiguous"),
        preset("contiguous", "contiguous", scheduler=static),
        preset("paged", "paged", "gather"),
    ]
    assert [engine.name for engine in built] == [
        "padded",
        "naive",
        "contiguous",
        "contiguous",
        "paged",
    ]


def test_what_is_served_is_checked_between_groups():
    local = Model(name="local", path="/m")
    assert ServeConfig(model=local).model.has_source
    by_priority = Engine(scheduler=Scheduler(queue="priority"))
    assert ServeConfig(model=local, engine=by_priority).engine.scheduler.takes_priorities
    for made, line in (
        (lambda: ServeConfig(model=Model(name="none")), "model=none: set model.path=PATH"),
        (
            lambda: ServeConfig(model=local, engine=Engine(name="openai")),
            "engine=openai: it forwards to another server",
        ),
        (
            lambda: ServeConfig(
                model=local, engine=Engine(attention=Attention(resolver="identity"))
            ),
            "engine.attention.resolver=identity: it handles decode only",
        ),
        (
            lambda: ServeConfig(model=local, shell=True, server=Server(max_live=2)),
            "server.max_live=2: shell=true starts no server",
        ),
        (lambda: Server(host=""), "server.host: must be an address"),
        (lambda: Server(cors_origins="* http://a"), "server.cors_origins=* http://a: must be"),
        (lambda: Server(cors_origins="a.example"), "server.cors_origins=a.example: must be"),
        (lambda: Server(hosts="gpu:80"), "server.hosts=gpu:80: must be names"),
        (lambda: Server(api_key=" "), "server.api_key: must be printable ASCII"),
        (lambda: Server(api_key="ä"), "server.api_key: must be printable ASCII"),
        (lambda: Server(api_key="a\n"), "server.api_key: must be printable ASCII"),
    ):
        with pytest.raises(ConfigError) as caught:
            made()
        assert str(caught.value).startswith(line)
    shell = ServeConfig(model=local, shell=True, server=Server(max_output_tokens=2))
    assert shell.server.max_output_tokens == 2
    full = Server(cors_origins="http://a https://b", hosts="GPU.example *", api_key="a b")
    assert full.host_names == ["gpu.example", "*"]
    assert Server(cors_origins="*").host_names == []


def test_int8_activations_run_on_the_processor_or_in_an_engine_of_one_s_own():
    for name, device in (("paged", Device.cpu), ("a.b:C", Device.metal), ("a.b:C", Device.cpu)):
        attention = Attention(device=device)
        made = Engine(name=name, activations=Activations.int8, attention=attention)
        assert made.activations is Activations.int8


def test_a_model_has_one_source_and_a_shape_its_kinds_of_layers():
    packaged = PackagedFile("m", "m.gguf", "0" * 64, "m")
    for sources in ({}, {"shape": ModelShape()}, {"path": "/m"}, {"packaged": packaged}):
        assert Model(**sources).has_source is bool(sources)
    for sources, line in (
        ({"path": "/m", "shape": ModelShape()}, "model.path=/m: model=tiny is built from a seed"),
        ({"path": "/m", "packaged": packaged}, "model.path=/m: model=tiny comes in a package"),
        ({"shape": ModelShape(), "packaged": packaged}, "model.shape: model=tiny comes in a"),
    ):
        with pytest.raises(ConfigError) as caught:
            Model(**sources)
        assert str(caught.value).startswith(line)
    plain = ModelShape(num_layers=6)
    windowed = ModelShape(num_layers=6, sliding_window=16)  # every fourth from the last has none
    hybrid = ModelShape(num_layers=6, full_attention_interval=3)
    for shape, windows, attention in (
        (plain, [], range(6)), (windowed, [0, 2, 3, 4], range(6)), (hybrid, [], [2, 5])
    ):  # fmt: skip
        assert [i for i in range(6) if shape.has_window(i)] == windows
        assert [i for i in range(6) if shape.has_attention(i)] == [*attention]


def test_the_baseline_is_the_first_arm_unless_named():
    assert Ablation(arms={"a": {}, "b": {}}).baseline_arm == "a"
    assert Ablation(arms={"a": {}, "b": {}}, baseline="b").baseline_arm == "b"


def test_every_group_has_defaults_without_yaml():
    for kind in (Engine, KV, Attention, Scheduler, Budget, Workload, Design, ModelShape):
        assert dataclasses.is_dataclass(kind())


def test_mlx_options_become_environment_variables():
    assert Mlx().environment() == {}
    assert Mlx(tf32=False, fast_synch=True, max_mb_per_buffer=500).environment() == {
        "MLX_ENABLE_TF32": "0",
        "MLX_METAL_FAST_SYNCH": "1",
        "MLX_MAX_MB_PER_BUFFER": "500",
    }
    # Its presence alone turns compilation off, so it may not be set to say on.
    assert Mlx(compile=False).environment() == {"MLX_DISABLE_COMPILE": "1"}
    assert Mlx(compile=True).environment() == {}
    assert Mlx(bfs_max_width=3, compile=False).gpu_options() == []
    assert Mlx(bfs_max_width=3, tf32=True, sdpa_blocks=3).gpu_options() == [
        ("tf32", GPU.any),
        ("sdpa_blocks", GPU.metal),
    ]


@pytest.mark.parametrize("device", [Device.metal, Device.emulated])
def test_half_precision_kernel_cases_are_accepted_on_capable_devices(device):
    half = kernel(dtype=Precision.float16)
    for attention in (Attention(device=device), Attention(backend="gather")):
        made = experiment(workload=half, engine=Engine(attention=attention))
        assert made.workload.dtype is Precision.float16


def test_all_query_heads_may_share_one_key_head():
    cases = [Case("c", decode=1, context=1)]
    assert Workload(kind="kernel", cases=cases, num_heads=8, num_kv_heads=1).num_kv_heads == 1
    assert Workload(kind="kernel", cases=cases, num_heads=1, num_kv_heads=1).num_heads == 1
