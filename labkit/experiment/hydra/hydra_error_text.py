"""Configuration errors of Hydra, OmegaConf and YAML, rewritten as one line each.

The line names the file or override, the key and the allowed values. Each private function explains
one kind of error, and returns None for an error of another kind.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from labkit.config import ConfigError, Experiment, option_index
from labkit.config.engine.openai_server import PRESETS
from labkit.config.option_index import did_you_mean, override_key
from labkit.experiment.hydra.job_launchers import not_installed

HELP = "python -m labkit --help lists them"
# Launchers of Hydra plugins that files in conf/ extend, with the extra that installs each plugin.
LAUNCHERS = {"submitit_slurm": "slurm"}
SWEEPERS = {"optuna": "optuna"}  # the extra that installs each sweeper


def explain_config_error(
    error: BaseException, overrides: Sequence[str] = (), root: Any = Experiment
) -> str:
    """Return one line that names the wrong file or override, the key and the allowed values.

    ``error``: of Hydra, OmegaConf or the schema. ``overrides``: those in effect; the message names
    the wrong one. ``root``: the schema's class.
    """
    for item in _causes(error):
        if isinstance(item, ConfigError):
            return _flat(str(item))
    text = "\n".join(str(item) for item in _causes(error))
    for rule in (  # each explains one kind of error, and returns None for all others
        _boolean_key,
        _interpolation,
        _missing_option,
        functools.partial(_unknown_key, root=root),
        _wrong_choice,
        _wrong_type,
        _not_a_map,
        _yaml,
        _grammar,
    ):
        if line := rule(text, overrides):
            return line
    return _flat(str(error).split("\n")[0] or type(error).__name__)


@contextmanager
def config_errors_in_one_line(overrides: Sequence[str], root: Any = Experiment) -> Iterator[None]:
    """Raise any other exception of the ``with`` block as the ``ConfigError`` that explains it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(explain_config_error(error, overrides, root)) from None


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an exception and those that caused it, at most 8."""
    chain: list[BaseException] = []
    while error is not None and len(chain) < 8:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _flat(text: str) -> str:
    return " ".join(text.split())


def _boolean_key(text: str, overrides: Sequence[str]) -> str | None:
    """Explain the error for a key that YAML reads as a boolean: ``on: {}``."""
    if not (match := re.search(r"Key (\w+) \((\w+)\) is incompatible with \(str\)", text)):
        return None
    spellings = {"True": "on, yes, true or y", "False": "off, no, false or n"}
    where = re.search(r"In '([^']+)'", text)
    return _flat(
        f"{where[1] + ': ' if where else ''}YAML reads a name as the {match[2]} {match[1]} "
        f"({spellings.get(match[1], 'not a text')}); quote it or choose another name"
    )


def _interpolation(text: str, overrides: Sequence[str]) -> str | None:
    """Explain the error for an interpolation without a value, such as ``${no.such}``."""
    kinds = (
        r"(Environment variable '.*' not found)",
        r"(Interpolation key '.*' not found|Recursive interpolation.*|Unsupported interpolation.*)",
        r"raised while resolving interpolation: (.*)",
    )
    match = next(filter(None, (re.search(kind, text) for kind in kinds)), None)
    full = re.search(r"full_key: (\S+)", text)
    if not match or not full:
        return None
    from labkit.experiment.hydra.hydra_composer import config_folders
    from labkit.experiment.hydra.yaml_validation import locate

    key = full.group(1)
    given = next((o for o in overrides if override_key(o) == key), None)
    places = [given]
    if given is None:
        places = [locate(key, config_folders(overrides), overrides), key]
    return _flat("".join(f"{place}: " for place in places if place) + match.group(1))


def _missing_option(text: str, overrides: Sequence[str]) -> str | None:
    """Explain the error for a group or option that does not exist: ``ablation=nope``."""
    if package := re.search(r"In '([^']+)': Could not override '([\w/]+)@\S+'", text):
        file, group = package.groups()
        right = f"/{group}@_global_.{group.replace('/', '.')}"
        return (
            f"{file}.yaml: override /{group}: a file of a config group must write override {right}"
        )
    match = re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text)
    if not match:
        alone = re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text)
        return f"{alone[1]}: no such option or group; {HELP}" if alone else None
    group, option = match.groups()
    if (elsewhere := _misplaced_choice(overrides)) is not None:
        return elsewhere
    listed = re.search(r"Available options in '[^']+':\n((?:\t.*\n?)+)", text)
    options = listed.group(1).split() if listed else []
    if group == "hydra/launcher" and option in LAUNCHERS:
        return not_installed(LAUNCHERS[option], LAUNCHERS[option])
    if group == "hydra/sweeper" and option in SWEEPERS:
        return not_installed(option, SWEEPERS[option], group)
    if not options:
        return f"{group}={option}: no such group or file; " + HELP
    return (
        f"{group}={option}: no such {group}{did_you_mean(option, options)}; must be one of: "
        + ", ".join(options)
    )


def _misplaced_choice(overrides: Sequence[str]) -> str | None:
    """Explain the error for a model's path or a server's name in place of a config file's name."""
    for override in overrides:
        group, _, value = override.partition("=")
        if group == "model" and ("/" in value or value.lower().endswith(".gguf")):
            return f"{override}: not a file of conf/model; set model=local model.path={value}"
        if group == "engine" and value in PRESETS:
            return (
                f"{override}: a server is not an engine; set engine=openai "
                f"engine.server.preset={value}"
            )
    return None


def _unknown_key(text: str, overrides: Sequence[str], root: Any) -> str | None:
    """Explain the error for an unknown key: ``engine.kv.block_sise=16``."""
    if not (match := re.search(r"Key '([^']+)' (?:is )?not in (?:struct|'(\w+)')", text)):
        return None
    key, full = match[1], re.search(r"full_key: (\S+)", text)
    path = full[1] if full else key
    override = next((o for o in overrides if override_key(o).endswith(path)), None)
    file = re.search(r"In '([^']+)'", text)
    where = override or (f"{file.group(1)}.yaml: {path}" if file else path)
    names = option_index.child_names(path.split(".")[:-1], root)
    allowed = f"; the options are: {', '.join(names)}" if names else ""
    return f"{where}: no option {key!r}{did_you_mean(key, names)}{allowed}"


def _wrong_choice(text: str, overrides: Sequence[str]) -> str | None:
    """Explain the error for an invalid choice: ``engine.attention.device=tpu``."""
    if not (match := re.search(r"Invalid value '([^']*)', expected one of \[([^\]]*)\]", text)):
        return None
    value, choices = match.groups()
    hint = did_you_mean(value, choices.split(", "))
    return f"{_key(text, value, overrides)}={value}: must be one of: {choices}{hint}"


def _wrong_type(text: str, overrides: Sequence[str]) -> str | None:
    """Explain the error for a value of the wrong type: ``engine.kv.block_size=abc``."""
    if match := re.search(r"field '([^']+)' is not Optional", text):
        return f"{match[1]}=null: must have a value"
    if match := re.search(r"Invalid type assigned: .*value: (.*)", text):
        key = _key(text, match[1], overrides)
        children = option_index.child_names(key.split("."))
        listed = f" ({', '.join(children)})" if children else ""
        return f"{key}={match[1]}: {key} is a group; set one of its options{listed}"
    list_hint = r"Value '(.*)' \(\w+\) is incompatible with type hint '[\w.]*[Ll]ist\["
    if match := re.search(list_hint, text):
        return f"{_key(text, match[1], overrides)}={match[1]}: must be a list: [{match[1]}]"
    match = re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text)
    match = match or re.search(r"Value '(.*)' is not a valid (bool)", text)
    if not match:
        return None
    value, kind = match.groups()
    names = {"bool": "true or false", "Integer": "an integer", "Float": "a number"}
    key = _key(text, value, overrides)
    entry = option_index.find_option(key)
    allowed = f": {entry.option.allowed}" if entry is not None and entry.option.allowed else ""
    return f"{key}={value}: must be {names.get(kind, f'of type {kind.lower()}')}{allowed}"


def _key(text: str, value: str, overrides: Sequence[str]) -> str:
    if full := re.search(r"full_key: (\S+)", text):
        return next((key for key in map(override_key, overrides) if key.endswith(full[1])), full[1])
    merging = re.search(r"Error merging override (\S+?)=", text)
    return merging[1] if merging else "the config"


def _not_a_map(text: str, overrides: Sequence[str]) -> str | None:
    """Explain the error for a list where a map is required, such as a list of arms."""
    hint = "must be a map of names, such as arms: {a: {}, b: {engine.threads: 1}}"
    if override := re.search(r"Error merging override (ablation\.arms=\[.*)", text):
        return f"{override[1]}: {hint}"
    match = re.search(r"In '([^']+)': ConfigTypeError", text)
    if not match or "ListConfig" not in text:
        return None
    is_ablation = match[1].startswith("ablation/")
    what = f"ablation.arms: {hint}" if is_ablation else "a list was found where a map is required"
    return f"{match[1]}.yaml: {what}"


# PyYAML's words for common mistakes, and what to type instead.
YAML_CAUSES = {
    r"'\t'": "a tab; indent with spaces",
    "could not find expected ':'": "a colon is missing; write NAME: VALUE",
    "mapping values are not allowed here": (
        "the line before lacks its colon (write NAME: VALUE), is indented differently, "
        "or a text that contains ': ' is not in quotes"
    ),
}


def _yaml(text: str, overrides: Sequence[str]) -> str | None:
    if not (match := re.search(r'in "([^"]+)", line (\d+), column (\d+)', text)):
        return None
    name = re.sub(r"^.*/conf/", "conf/", match[1])
    problem = text.split("\n")[0].strip()
    problem = next((words for cause, words in YAML_CAUSES.items() if cause in text), problem)
    return _flat(f"{name}, line {match[2]}, column {match[3]}: not valid YAML: {problem}")


def _grammar(text: str, overrides: Sequence[str]) -> str | None:
    """Explain the error for an override that Hydra cannot parse: ``a=[b``."""
    if match := re.search(r"Error parsing override '([^']*)'\s*\n(.*)", text):
        return _flat(f"{match[1]}: not an override ({match[2]}); write key=value")
    if match := re.search(r"LexerNoViableAltException: (\S+.*)", text):
        digit = re.search(r"^[^=]*[.~+]\d", match[1])
        how = "no part of a key may begin with a digit" if digit else "write key=value"
        return f"{match[1]}: not an override; {how}"
    if "Config group override must be a string or a list" in text:
        group = next((o for o in overrides if o.endswith("=null")), "the group")
        return f"{group}: a group cannot be null; choose one of its files; " + HELP
    if match := re.search(r"(no viable alternative|mismatched input|extraneous input).*", text):
        return _flat(f"not an override: {match[0]}; put special characters in quotes")
    return None
