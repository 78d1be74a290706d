"""EleutherAI's evaluation harness with tasks of its own.

With ``local-chat-completions`` a task generates texts. With ``local-completions`` tasks also choose
one of several answers and compute the perplexity of texts, from log-likelihoods.
"""

import json
import math
from pathlib import Path

from tasks import MODEL, TOKENIZER, URL, argument, check, command, task

DATA = """\
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
"""
GREETING = """\
task: greeting
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 32}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICE = """\
task: choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: "{{[answer, 'zebra']}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
PERPLEXITY = """\
task: text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{answer}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""
QUESTIONS = {
    "The capital of France is": "Paris",
    "The opposite of hot is": "cold",
    "Monday, Tuesday,": "Wednesday",
    "One, two, three,": "four",
}


def evaluate(model, path, tasks, arguments=(), options=()):
    """Run tasks, given as their YAML by name; return the results by name."""
    lines = [{"question": question, "answer": answer} for question, answer in QUESTIONS.items()]
    Path("questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, text in tasks.items():
        Path(f"{name}.yaml").write_text(DATA + text)
    given = [f"model={MODEL}", f"base_url={URL}/v1/{path}", "num_concurrent=2", "max_retries=1"]
    line = ["--model", model, "--model_args", ",".join([*given, *arguments])]
    line += ["--tasks", ",".join(tasks), "--include_path", ".", "--output_path", "results"]
    command("lm_eval", "run", *line, *options)
    (file,) = Path("results").rglob("results_*.json")
    return json.loads(file.read_text())["results"]


@task("chat")
def chat():
    if argument("chat") == "chat":
        tasks = {"greeting": GREETING}
        results = evaluate(
            "local-chat-completions", "chat/completions", tasks, (), ["--apply_chat_template"]
        )
        check("greeting" in results, "no result")
        return
    tasks = {"choice": CHOICE, "text": PERPLEXITY, "greeting": GREETING}
    tokenizer = [f"tokenizer={TOKENIZER}", "tokenizer_backend=huggingface"]
    options = ["--batch_size", "2"]
    results = evaluate("local-completions", "completions", tasks, tokenizer, options)
    check(results["choice"]["acc,none"] == 1, f"wrong answers: {results['choice']}")
    perplexity = results["text"]["word_perplexity,none"]
    check(1 < perplexity < math.inf, f"perplexity: {perplexity}")
    check("greeting" in results, "no result")
