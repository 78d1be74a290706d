"""Generator of docs/metrics.md: a table of every metric that a workload gives.

``python -m docs.generators.metrics > docs/metrics.md``.
"""

from __future__ import annotations

from labkit.analysis.findings.effect_wording import effect_phrase
from labkit.records.metric_registry import DEFINITIONS, MetricDefinition

HEAD = """\
# Metrics

The answer to a question is about its primary metrics. `ablation.metric` names one, or several:

```yaml
# mine/ablation/burst.yaml
name: burst
question: What does a smaller step cost those who wait?
metric: [ttft_p50_ms, output_tok_s]
arms:
  large: {engine.scheduler.max_num_batched_tokens: 512}
  small: {engine.scheduler.max_num_batched_tokens: 64}
```

Several metrics are one family and share `design.alpha` ([statistics.md](statistics.md#family)). All
other metrics are in the report below them and decide nothing. Without `ablation.metric`, the metric
of requests is

- `goodput_req_s` if `workload.limits` are set;
- `e2e_ms` of every request with `workload.per_request=true`;
- `e2e_p50_ms` if requests arrive at a rate or as recorded, because their throughput is then the
  offered load;
- `total_tok_s` otherwise.

The metric of kernels is `dispatch_us`, of clips `decode_ms`, of memory plans `taken_pct`, of scored
texts `total_tok_s`. `metric: outputs` stands for the claim on the outputs
(`ablation.claims.identity`): the answer is then whether it holds. A study keeps its metric: a
command that names another one for an existing folder is refused.

A verdict is `better` or `worse` in files and commands. A sentence says it in the metric's own
words, which the column "an arm that is better" shows: it takes 55 % less time (2.2 times as fast),
serves 12 % more tokens, waits 30 ms less, uses 8 % less memory. A percentage is always of the
metric itself, so a time that fell by 55 % is never "55 % faster". A metric that is computed (from
sizes and counts, not from times) and has the same value in every run of each arm is reported as it
is, without a test.

This page is generated from `labkit/records/metric_registry.py`:
`python -m docs.generators.metrics > docs/metrics.md`.

| metric | unit | better | workload.kind | meaning | an arm that is better |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Return ``docs/metrics.md``."""
    return HEAD + "".join(map(_row, DEFINITIONS))


def _row(metric: MetricDefinition) -> str:
    words, kinds = metric.words, ", ".join(metric.kinds)
    better = effect_phrase(
        metric, [], amount=words.more if metric.better == "higher" else words.less
    )
    note = f"{better} (computed)" if metric.computed else better
    return (
        f"| `{metric.name}` | {metric.unit} | {metric.better} | {kinds} | {metric.meaning} | "
        f"{note} |\n"
    )


if __name__ == "__main__":
    print(page(), end="")
