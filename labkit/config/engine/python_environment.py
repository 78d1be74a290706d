"""The environment of an arm: what its process imports, if that differs from the study's own."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config.option import Group, option, require


@dataclass
class Environment(Group, place="environment"):
    """What an arm's process imports. Its options may be combined."""

    python: str | None = option(
        None, "Python interpreter, a path or a name on PATH.", null_means="the study's own"
    )
    requirements: list[str] = option(
        factory=list,
        meaning="Packages, as pip spells them. They are installed without their dependencies and "
        "take precedence over the interpreter's own.",
    )
    revision: str | None = option(
        None,
        "Git revision whose files are imported: of labkit, or of the packages in `repository`.",
        null_means="labkit's present files",
    )
    repository: str | None = option(
        None, "Git checkout that `revision` belongs to.", null_means="labkit's own checkout"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.python or self.requirements or self.revision),
            "environment: set python, requirements or revision",
        )
        require(
            bool(self.revision) or self.repository is None,
            f"environment.repository={self.repository}: set environment.revision, too",
        )
        for item in (*self.requirements, self.revision or ""):
            require(not item.startswith("-"), f"environment: {item!r} must not begin with '-'")
