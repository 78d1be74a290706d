"""The bundle of ``make mac`` or ``make gpu``: summary, environment, logs and studies in one zip.

This computer's paths and the user's name are removed. Records are otherwise unchanged: they name
the busiest other programs and hold a hash of the host's name.
"""

from __future__ import annotations

import getpass
import json
import platform
import re
import socket
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit.analysis.pages.cell_report_content import environment_line
from labkit.config import count_text
from labkit.mac.mac_steps import NOT_RUN, PASSED, VERIFICATION_FILE, StepOutcome
from labkit.machine.facts import machine_snapshot
from labkit.records import read_json

# Pictures are left out because they can be redrawn from records, and Hydra's YAML files because
# they contain this computer's paths.
BUNDLED_SUFFIXES = (".json", ".md", ".html", ".csv", ".tex", ".txt", ".log")
MAX_LOG_LINES = 25  # number of last lines of a failed step's log that the summary shows


@dataclass(frozen=True)
class Redactor:
    """Replaces this computer's paths and names, given as pairs (text, placeholder)."""

    paths: tuple[tuple[str, str], ...]
    names: tuple[tuple[str, str], ...]

    @classmethod
    def for_this_computer(cls) -> Redactor:
        """Return a redactor for the working, temporary and home folders, the user and the host."""
        places = [(Path.cwd(), "."), (Path(tempfile.gettempdir()), "TMP")]
        host = socket.gethostname()
        names = [(host, "HOST"), (host.partition(".")[0], "HOST")]
        # In a container, the user's id may have neither a home nor a name.
        with suppress(RuntimeError):
            places.append((Path.home(), "~"))
        with suppress(KeyError, OSError):
            names.append((getpass.getuser(), "USER"))
        paths = [(str(p), alias) for path, alias in places for p in {path, path.resolve()}]
        return cls(
            tuple(sorted((p for p in paths if len(Path(p[0]).parts) > 1), key=_longest_first)),
            tuple(sorted((n for n in names if n[0]), key=_longest_first)),
        )

    def redact(self, text: str, names: bool) -> str:
        """Return the text with the paths and, if ``names`` is true, the names replaced.

        Names are replaced only as whole words. Call it with ``names=False`` for JSON, where a name
        may also be a key.
        """
        for path, alias in self.paths:
            for written in {path, json.dumps(path)[1:-1]}:
                text = re.sub(rf"{re.escape(written)}(?![\w-])", alias, text)
        text = re.sub(r"(?<=/Users/)(?!Shared\b)[^/\s\"']+", "USER", text)
        if names:
            for name, alias in self.names:
                text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", alias, text)
        return text


def _longest_first(pair: tuple[str, str]) -> int:
    return -len(pair[0])


def surroundings() -> dict[str, Any]:
    """Return facts about the machine, its current state and its GPU, as JSON types."""
    import mlx.core as mx

    return {
        **machine_snapshot.take(),
        **machine_snapshot.surroundings(),
        "macos": platform.mac_ver()[0] or None,
        "device": mx.device_info(),
    }


def packages() -> str:
    """Return the installed packages, one ``name==version`` per line."""
    # A folder that a failed installation has left may have no metadata, and so no name.
    versions = {
        facts["Name"].lower(): d.version
        for d in metadata.distributions()
        if "Name" in (facts := d.metadata)
    }
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def write_bundle(
    folder: Path,
    facts: Mapping[str, Any],
    installed: str,
    outcomes: Sequence[StepOutcome],
    redactor: Redactor,
) -> Path:
    """Bundle the results in ``FOLDER.zip`` beside ``folder`` and return the path of the zip file.

    ``folder``: folder with the logs ``STEP.log``, ``answers.md`` and the studies. Any of them may
    be missing. ``facts``, ``installed``: the results of :func:`surroundings` and :func:`packages`,
    taken before the steps.
    """
    for name, text in (
        ("environment.json", json.dumps(facts, indent=2) + "\n"),
        ("packages.txt", installed),
        ("summary.md", _summary(folder, facts, outcomes, redactor)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    path = folder.with_name(f"{folder.name}.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as bundle:
        for file in sorted(f for f in folder.rglob("*") if f.suffix in BUNDLED_SUFFIXES):
            text = file.read_text(encoding="utf-8", errors="replace")
            redacted = redactor.redact(text, names=file.suffix in (".log", ".txt"))
            bundle.writestr(f"{folder.name}/{file.relative_to(folder).as_posix()}", redacted)
    return path


def _summary(
    folder: Path, facts: Mapping[str, Any], outcomes: Sequence[StepOutcome], redactor: Redactor
) -> str:
    mac = f"macOS {facts.get('macos')} ({facts.get('os_build')}), model {facts.get('model')}, "
    is_mac = bool(facts.get("macos"))
    parts = [
        f"# labkit on {'a Mac' if is_mac else 'an NVIDIA GPU'}",
        "",
        environment_line(facts),
        f"{mac if is_mac else ''}Python {facts.get('python')}, commit {facts.get('git')} "
        f"({facts.get('git_changes')}), begun {facts.get('taken')}.",
        "",
        "| step | outcome | minutes | what ran |",
        "| --- | --- | ---: | --- |",
        *map(_outcome_row, outcomes),
        "",
    ]
    for outcome in outcomes:
        if outcome.status not in (PASSED, NOT_RUN):
            parts += _last_lines(folder / f"{outcome.step.name}.log", outcome, redactor)
    if (folder / VERIFICATION_FILE).is_file():
        text = (folder / VERIFICATION_FILE).read_text(encoding="utf-8")
        parts += ["## Answers against the reference on the CPU", "", text]
    for outcome in outcomes:
        parts += _study_lines(folder / outcome.step.name)
    return "\n".join(parts)


def _outcome_row(outcome: StepOutcome) -> str:
    step, minutes = outcome.step, outcome.seconds / 60
    return f"| {step.name} | {outcome.status} | {minutes:.1f} | {step.description} |"


def _last_lines(log: Path, outcome: StepOutcome, redactor: Redactor) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-MAX_LOG_LINES:]
    head = [f"## {outcome.step.name}: {outcome.status}", "", f"`{outcome.step.command}`", ""]
    # The file of the summary is redacted without names, which a study's tables may contain.
    return [*head, "```", redactor.redact("\n".join(lines), names=True), "```", ""]


def _study_lines(folder: Path) -> list[str]:
    """Return the summary of a study in Markdown: the answer to each cell, then all tables."""
    if not (folder / "study.json").is_file():
        return []
    parts = [f"## {folder.name}", ""]
    for cell in read_json(folder / "study.json")["cells"]:
        gates = ", ".join(f"{name} {status}" for name, status in cell["gates"].items())
        parts += [f"### {cell['question'] or cell['cell']}", "", f"**{cell['answer']}**", ""]
        counts = count_text(cell["blocks"], "block"), count_text(cell["failures"], "failed run")
        parts += [f"{', '.join(counts)}; gates: {gates}.", ""]
    for table in sorted((folder / "tables").glob("*.md")):
        parts += [f"`{table.stem}`", "", table.read_text(encoding="utf-8")]
    return [*parts, f"The full report: `{folder.name}/report.html`.", ""]
