"""EleutherAI's evaluation harness: a generation task of its own, by ``local-chat-completions``."""

import json
from pathlib import Path

from tasks import MODEL, URL, check, command, task

TASK = """\
task: greeting
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 32}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@task("chat")
def chat():
    lines = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    Path("questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Path("greeting.yaml").write_text(TASK)
    arguments = f"model={MODEL},base_url={URL}/v1/chat/completions,num_concurrent=2,max_retries=1"
    options = ["--model", "local-chat-completions"]
    options += ["--model_args", arguments, "--tasks", "greeting", "--include_path", "."]
    options += ["--apply_chat_template", "--output_path", "results"]
    command("lm_eval", "run", *options)
    (file,) = Path("results").rglob("results_*.json")
    check("greeting" in json.loads(file.read_text())["results"], "no result")
