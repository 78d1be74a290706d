"""The author's question as cells of this machine: configs, arms and claims from a study's files.

The arms are the author's, with the options that this version of labkit has; the design is a new one
with the author's margin, alpha and isolation, and as many blocks as ``design.time`` allows. What
this machine cannot run, and what an archive would run here, has one line each, with what to set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from labkit.config import CONTROL, ConfigError, Experiment, from_plain, require
from labkit.config.env_interpolation import EXPRESSION
from labkit.config.former_options import default_of, other_meanings, with_present_names
from labkit.config.option_index import did_you_mean, find_option, value_of
from labkit.experiment.cell import with_units
from labkit.experiment.compose import input_digests
from labkit.experiment.compose.cell_composer import ComposedCell, checked_cell, obstacles
from labkit.experiment.compose.input_digests import FILES, FOLDERS, MODELS, option_of
from labkit.experiment.schedule.noise_history import MeasuredCell
from labkit.records import PROCESSES_SUFFIX, Arm, RecordError, StudyPath, read_arms, read_cell

TIME_S = 540.0  # of all cells: ten minutes with preparation and report
DECIDED_BY = ("design.alpha", "design.margin_pct")  # fixed before the reader's study
DESIGN_KEYS = ("runs_per_block", "margin_pct", "alpha")
ASKED_GROUPS = ("engine", "model", "workload", "seed")
# Options of a server that run, install and reach nothing; others are the author's to be trusted.
SAFE = ("preset", "float32", "api_key", "pause", "model", "api", "start_timeout_s", "silence_s",
        "most_late_ms")  # fmt: skip
SMALLER = "workload.num_requests, workload.concurrency or workload.max_pool_bytes"


@dataclass(frozen=True)
class ReaderOptions:
    """What the reader sets: options of the question, the design and the command; the packages.

    ``values``: by option, in JSON types. ``requirements``: the author's packages, as pip spells
    them; empty: this machine's. ``revision``: the author's commit of labkit; None: this machine's.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    revision: str | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> ReaderOptions:
        """Return the options that the command's words ``key=value`` set.

        Raises ``ConfigError`` if a word is no option with one value.
        """
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        values: dict[str, Any] = {}
        for word in words:
            key = word.partition("=")[0]
            known = find_option(key) is not None
            require(known, f"{word}: no such option; name one such as model.path or design.time")
            try:
                (parsed,) = OverridesParser.create().parse_overrides([word])
            except HydraException:
                raise ConfigError(f"{word}: not a value; write it in quotes") from None
            require(not parsed.is_sweep_override(), f"{word}: give a single value")
            group = key.partition(".")[0]
            require(
                group in (*ASKED_GROUPS, "design", "out", "plan", "redo") and key not in DECIDED_BY,
                f"{word}: the author's study fixes it{did_you_mean(group, ASKED_GROUPS)}",
            )
            values[key] = parsed.value()
        plan = values.get("plan", False)
        require(isinstance(plan, bool), f"plan={plan}: it must be true or false")
        return cls(values)

    def of(self, *groups: str) -> dict[str, Any]:
        """Return the values of options in some groups."""
        return {k: v for k, v in self.values.items() if k.partition(".")[0] in groups}


@dataclass(frozen=True)
class AuthorsCell:
    """A cell of the author's: its folder, its manifest and its arms as its files hold them.

    ``inputs``: by its name in the archive, the path of a text that came with it.
    """

    folder: StudyPath
    manifest: Mapping[str, Any]
    arms: tuple[Arm, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def measured(self) -> MeasuredCell:
        """What the author measured, for the plan of a machine that has not measured it."""
        base = self.tested[0]
        now = replace(base, config=self.config(base, ReaderOptions()))
        return MeasuredCell(self.folder, self.manifest, now)

    @property
    def environment(self) -> Mapping[str, Any]:
        """The author's machine and software; empty if the files do not name them."""
        return self.manifest.get("environment") or {}

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the author's packages; empty if the files do not name them."""
        return self.environment.get("versions") or {}

    @property
    def tested(self) -> tuple[Arm, ...]:
        """The arms, without the control."""
        return tuple(arm for arm in self.arms if arm.role != "control")

    def config(self, arm: Arm, reader: ReaderOptions) -> dict[str, Any]:
        """Return an arm's config with the reader's options, in JSON types."""
        words = (str(word).lstrip("+~") for word in self.manifest.get("overrides") or ())
        named = {*arm.overrides, *(word.partition("=")[0] for word in words)}
        config = with_present_names(arm.config, named)
        for key in FILES:
            file = PurePath(str(value_of(config, key))).name
            # If the option names a variable, only the folder of the text is known. Archives of
            # earlier versions name a text by its file alone.
            folder = f"{key}/{arm.inputs.get(key)}/"
            below = (name for name in self.inputs if name.startswith(folder))
            names = (input_digests.text_name(arm, key, file), *below, f"{key}/{file}")
            text = next((self.inputs[name] for name in names if name in self.inputs), None)
            if text is not None:
                _set(config, key, text)
        for key, value in reader.of(*ASKED_GROUPS).items():
            _set(config, key, value)
        return config

    def changes(self, reader: ReaderOptions) -> Iterator[str]:
        """Yield what the reader's options, or this version, change of the question, one text each.

        A file whose digest is the author's is no change, wherever it lies.

        Raises ``ConfigError`` if the arms differ in such an option: it is the question.
        """
        for key, value in reader.of(*ASKED_GROUPS).items():
            values = [value_of(arm.config, key, default_of(key)) for arm in self.tested]
            old = ", ".join(dict.fromkeys(map(_shown, values)))
            require(
                all(one == values[0] for one in values),
                f"{key}: the author's arms differ in it ({old}), so it is the question",
            )
            known = all(key in map(option_of, arm.inputs) for arm in self.tested)
            if value != values[0] and not (known and key in (*FILES, *FOLDERS, *MODELS)):
                yield f"{key}={_shown(value)} (the author: {old})"
        for arm in self.tested:
            yield from () if reader.revision else other_meanings(arm.config)
            now = input_digests.input_digests(self.config(arm, reader), arm.environment)
            here = input_digests.named_as_begun(arm, now)
            replaced = {*map(option_of, here), *reader.values}
            for name, digest in arm.inputs.items():
                # A file that is missing although its option has other files here is another one.
                if here.get(name, "" if option_of(name) in replaced else digest) != digest:
                    yield f"the file of {name} is not the author's"

    def experiment(self, arm: Arm, reader: ReaderOptions, time_s: float) -> Experiment:
        """Return an arm's config with the author's claims and the reader's design.

        Raises ``ConfigError`` if this version of labkit lacks an option, or options contradict
        each other.
        """
        base, config = self.tested[0], self.config(arm, reader)
        plain = {
            "model": {"shape": {}},
            **config,
            **reader.of("redo"),
            "design": self._design(reader, time_s),
            "ablation": {
                "name": self.name,
                "question": self.manifest.get("question") or "",
                "baseline": base.name,
                "arms": {one.name: self._overrides(one, reader) for one in self.tested},
                "metric": list(self.manifest["design"].get("metrics") or ()) or None,
                "claims": {
                    "identity": base.identity,
                    "engaged": {one.name: list(one.engaged) for one in self.tested if one.engaged},
                    "quality": dict(base.quality),
                    "all_served": base.all_served,
                    "out_of_memory": [one.name for one in self.tested if one.out_of_memory],
                },
            },
        }
        try:
            return from_plain(Experiment, plain)
        except ConfigError as error:
            if any(str(error).startswith(f"{key}=") for key in reader.values):
                raise  # the reader's mistake
            version = self.versions.get("labkit", "of another version")
            raise ConfigError(f"written by labkit {version}: {error}") from None

    def composed(self, reader: ReaderOptions, time_s: float) -> ComposedCell:
        """Return the cell to run here; raises ``ConfigError`` if an arm cannot run here.

        It has no early look: what ends a study at one, that its own rows are decided, decides no
        replication.
        """
        experiments = {arm.name: self.experiment(arm, reader, time_s) for arm in self.tested}
        cell = checked_cell(
            experiments[self.tested[0].name],
            lambda arm, overrides: experiments[arm],
            self.name,
        )
        named, given = tuple(self.manifest.get("overrides") or ()), "design.blocks" in reader.values
        return replace(cell, overrides=named, blocks_given=given, ends_early=False)

    def _overrides(self, arm: Arm, reader: ReaderOptions) -> dict[str, Any]:
        environment = dict(arm.environment)
        if reader.requirements:
            own = environment.get("requirements", ())
            environment["requirements"] = [*reader.requirements, *own]
        if reader.revision is not None:
            environment.setdefault("revision", reader.revision)
        rest = {key: value for key, value in arm.overrides.items() if key != "environment"}
        return rest | ({"environment": environment} if environment else {})

    def _design(self, reader: ReaderOptions, time_s: float) -> dict[str, Any]:
        author = self.manifest["design"]
        isolation = author.get("isolation", "process")
        separate = isolation == "process"
        if (reader.requirements or reader.revision) and not separate:
            isolation = "auto"  # arms with environments of their own never share a process
        design = {key: author[key] for key in DESIGN_KEYS} | {
            "name": "replication",
            "time": time_s,
            "blocks": 0,
            "control": any(arm.name == CONTROL for arm in self.arms),
            "isolation": isolation,
        }
        own = {key.partition(".")[2]: value for key, value in reader.of("design").items()}
        return design | ({} if separate else {"runs_per_block": 1}) | own


def authors_cells(study: StudyPath, folders: Sequence[StudyPath]) -> tuple[AuthorsCell, ...]:
    """Return the cells that a study asks about, without those that only confirm others.

    Raises ``RecordError`` if a cell's files do not hold its question, or no cell compares arms.
    """
    asked = [folder for folder in folders if not folder.name.endswith(PROCESSES_SUFFIX)]
    cells = [
        AuthorsCell(one, read_cell(one), tuple(with_units(one, arm) for arm in read_arms(one)))
        for one in asked
    ]
    for folder, cell in zip(asked, cells, strict=True):
        missing = [key for key in DESIGN_KEYS if key not in cell.manifest.get("design", {})]
        if missing or not cell.arms or cell.arms[0].role != "baseline":
            raise RecordError(f"{folder}: it has no {missing[0] if missing else 'baseline arm'}")
        if any("workload" not in arm.config for arm in cell.arms):
            raise RecordError(f"{folder}: another tool measured it, and labkit cannot repeat that")
    comparing = tuple(cell for cell in cells if len(cell.tested) > 1)
    if not comparing:
        raise RecordError(f"{study}: it compares no arms, so there is no effect to replicate")
    return comparing


def _shown(value: Any) -> str:
    """Return a value for the page and the file, which name no host and no folder of a machine."""
    if isinstance(value, str) and "://" in value:
        return "an address"
    return PurePath(value).name if isinstance(value, str) and value else str(value)


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *groups, name = key.split(".")
    place = config
    for group in groups:
        place = place.setdefault(group, {})
        require(isinstance(place, dict), f"{key}: the author's config has no such group")
    place[name] = value


def trusted_parts(cell: AuthorsCell) -> Iterator[str]:
    """Yield what an author's arms would run or read here besides labkit itself, one line each."""
    for arm in cell.tested:
        server: Mapping[str, Any] = arm.config.get("engine", {}).get("server", {})
        classes = input_digests.class_paths(arm.config)
        found = [f"the class {key}={path}" for key, path in classes.items()]
        found += [f"engine.server.{n}={v}" for n, v in server.items() if v and n not in SAFE]
        found += [f"environment.{name}={value}" for name, value in arm.environment.items()]
        variables = sorted(set(EXPRESSION.findall(json.dumps(dict(arm.config)))))
        found += [f"the environment variable {name}" for name in variables]
        for part in found:
            yield f"arm {arm.name}: {part}: it is the author's, not labkit's; --trust runs it"


def cell_obstacles(cell: AuthorsCell, reader: ReaderOptions) -> Iterator[str]:
    """Yield a line for each reason why an arm of a cell cannot run on this machine."""
    arms: dict[str, list[str]] = {}
    for arm in cell.tested:
        found: list[object] = []
        try:
            experiment = cell.experiment(arm, reader, TIME_S)
            found += obstacles(experiment)
            found += () if found else _server_and_memory(experiment)
        except ConfigError as error:
            found.append(error)
        for reason in map(str, found):
            arms.setdefault(f"{reason}{_digests(arm, reason)}", []).append(arm.name)
    for text, arm_names in arms.items():
        every = len(arm_names) == len(cell.tested)
        yield f"{'every arm' if every else 'arm ' + ', '.join(arm_names)}: {text}"
    if not arms:
        try:
            cell.composed(reader, TIME_S)
        except ConfigError as error:
            yield str(error)


def _digests(arm: Arm, reason: str) -> str:
    """Return what to set and the digests of the files that a reason names, or nothing."""
    inputs = {n: digest for n, digest in arm.inputs.items() if f"{option_of(n)}=" in reason}
    keys = " and ".join(dict.fromkeys(map(option_of, inputs)))
    names = ", ".join(f"{name} {digest}" for name, digest in inputs.items())
    return f"; set {keys} to your copy of the author's (SHA-256: {names})" if inputs else ""


def _server_and_memory(experiment: Experiment) -> Iterator[str]:
    from labkit import workload
    from labkit.engine import openai
    from labkit.machine.facts import memory_capacity

    if experiment.engine.name == "openai":
        openai.check_installed(experiment.engine)
    needed, total = workload.estimate(experiment).bytes, memory_capacity.this_machine().total
    if needed > total:
        yield (
            f"it needs about {needed / 2**30:.1f} GiB of memory, and this machine has "
            f"{total / 2**30:.1f}; a smaller {SMALLER} asks a smaller question, which is "
            "counted as another"
        )
