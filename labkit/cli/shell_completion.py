"""Completion for bash, zsh and fish: ``eval "$(labkit -sc install=bash)"``.

The script that is printed holds every option and choice, so that no Python starts at a press of the
tab key. awk, which every Unix has, selects the words; the files of ``--config-dir`` are found then.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.cli.help_pages import choices
from labkit.cli.hydra_arguments import PRINT_FLAGS, REFUSED_FLAGS, SHORT_FLAGS
from labkit.config import ConfigError, require
from labkit.config.option_index import option_groups

# Prints what the last word of ``line`` can become: up to its next separator, or a whole value.
SELECT = r"""
BEGIN { n = split(line, words, " "); word = line ~ / $/ ? "" : words[n]
  if (match(word, /^[+~]+/)) { head = substr(word, 1, RLENGTH); word = substr(word, RLENGTH + 1) }
  key = index(word, "=") ? substr(word, 1, index(word, "=")) : ""
  last = substr(word, length(key) + 1)
  if (key) while (i = index(last, ",")) last = substr(last, i + 1)
  kept = substr(word, 1, length(word) - length(last)) }
/\.yaml$/ { sub(/^\.\//, ""); sub(/\.yaml$/, "")
  for (i = length($0); substr($0, i, 1) != "/"; i--);
  $0 = substr($0, 1, i - 1) "=" substr($0, i + 1) }
(/^-/ && word !~ /^-/) || index($0, key last) != 1 { next }
key == $0 { next }
{ rest = substr($0, length(key last) + 1)
  if (!key && match(rest, /[.=\/]/)) rest = substr(rest, 1, RLENGTH + RSTART - 1)
  found = head kept last rest; if (!seen[found]++) print found }
"""
COMMON = """_labkit_select() {
  set -- "$1" "$(printf '%s' "$1" | sed -nE 's/.*(--config-dir|-cd)[ =]([^ ]*) .*/\\2/p')"
  {
    printf '%s\\n' "$_labkit_known"
    if [ -d "$2" ]; then (cd "$2" && find . -mindepth 2 -name '*.yaml'); fi
  } | awk -v line="$1" "$_labkit_awk"
}
_labkit_is_module() { case "$1" in *" -m labkit "*) true ;; *) false ;; esac }
"""
BASH = (
    COMMON
    + """_labkit() {
  local line="${COMP_LINE:0:COMP_POINT}" cur="${COMP_WORDS[COMP_CWORD]}" word
  word="${line##* }"
  case "$cur" in "=" | ":") cur= ;; esac
  local found IFS=$'\\n'
  found=($(_labkit_select "$line"))
  COMPREPLY=("${found[@]#"${word%"$cur"}"}")
  case "${found[*]}" in *[.=/]) compopt -o nospace 2>/dev/null ;; esac
}
_labkit_other=$(complete -p python 2>/dev/null | sed -n 's/.* -F \\([^ ]*\\) .*/\\1/p')
case "$_labkit_other" in _labkit_python | "") _labkit_other= ;; esac
_labkit_python() {
  if _labkit_is_module "${COMP_LINE:0:COMP_POINT}"; then _labkit
  elif [ -n "$_labkit_other" ]; then "$_labkit_other" "$@"; fi
}
complete -F _labkit labkit mlx-labkit
complete -o bashdefault -o default -F _labkit_python python python3
"""
)
ZSH = (
    COMMON
    + """_labkit() {
  local -a found more
  found=("${(@f)$(_labkit_select "$LBUFFER")}")
  more=("${(@M)found:#*[.=/]}")
  compadd -Q -U -S '' -- "${more[@]}"
  compadd -Q -U -- "${(@)found:#*[.=/]}"
}
_labkit_python() {
  if _labkit_is_module "$LBUFFER"; then _labkit
  elif [ -n "$_labkit_other" ]; then "$_labkit_other"; else _default; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
_labkit_other=${${_comps[python]:-}:#_labkit_python}
compdef _labkit labkit mlx-labkit
compdef _labkit_python python python3
"""
)
FISH = """function __labkit_select
  set -l line (commandline -cp)
  set -l folder (string replace -rf '.*(?:--config-dir|-cd)[ =](\\S*) .*' '$1' -- $line)
  begin
    printf '%s\\n' "$_labkit_known"
    if test -d "$folder"; and pushd "$folder"
      find . -mindepth 2 -name '*.yaml'
      popd
    end
  end | awk -v line="$line" "$_labkit_awk"
end
complete -c labkit -c mlx-labkit -f -a '(__labkit_select)'
complete -c python -c python3 -n 'string match -q -- "* -m labkit *" (commandline -cp)' \\
  -f -a '(__labkit_select)'
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion_script(shell: str) -> str:
    """Return the script that a shell evaluates to complete ``labkit`` and ``python -m labkit``.

    Raises ``ConfigError`` if labkit knows no completion for the shell.
    """
    require(shell in SHELLS, f"install={shell}: must be one of: {', '.join(SHELLS)}")
    assign = "set -g {} '{}'\n" if shell == "fish" else "{}='{}'\n"
    if "'" in (known := "\n".join(sorted(set(words())))):
        raise ConfigError(f"install={shell}: a name in {known!r} holds a quote")
    texts = assign.format("_labkit_known", known) + assign.format("_labkit_awk", SELECT)
    return texts + SHELLS[shell]


def words() -> Iterator[str]:
    """Yield every flag, key and ``key=choice`` of the command."""
    yield from (*PRINT_FLAGS, "--config-dir", "--multirun", "--version")
    yield from (short for short, flag in SHORT_FLAGS.items() if flag not in REFUSED_FLAGS)
    for group, names in choices().items():
        yield from (f"{group}={name}" for name in names)
    for entry in (entry for group in option_groups() for entry in group.entries):
        values = ("true", "false") if entry.kind is bool else entry.choices
        if "[]" not in entry.key:
            yield from (f"{entry.key}={value}" for value in ("", *values))
