"""``python -m labkit.server.generation.template_worker``: render chat templates in a process.

A template comes with the model, and may run for ever or fill the memory. A task has the arguments
of ``ChatTemplate.render``; its answer is the text or the reason that there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from labkit.config import ConfigError
from labkit.models.chat_template import RenderOptions, load_template
from labkit.server.killable_process_loop import answer_tasks


def prepare(setup: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Read the model's template and return the function that renders it."""
    template = load_template(Path(setup["model_dir"]))
    assert template is not None

    def render(task: Mapping[str, Any]) -> dict[str, str]:
        try:
            options = RenderOptions(**task["options"])
            return {"text": template.render(task["messages"], task["tools"], options)}
        except ConfigError as error:
            return {"error": str(error)}

    return render


if __name__ == "__main__":
    sys.exit(answer_tasks(prepare))
