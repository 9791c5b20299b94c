"""`rlexp completion bash|zsh|fish`: a script for the shell, which asks `rlexp completion --line "rlexp algo=p"` at each Tab.

What may stand there is read from the YAML files, of one's own `--config-dir` too, and from keys.json, which `make reference`
makes from the schema. Neither Hydra nor JAX is imported: an answer takes a tenth of a second.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_HERE = Path(__file__).resolve().parents[1]
_CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"
_LOADER = vars(yaml).get("CSafeLoader", yaml.SafeLoader)

_OPTIONS = ("--cfg", "--config-dir", "--help", "--hydra-help", "--multirun", "--resolve", "--version", "-m")
_AFTER = {
    "--cfg": ["job", "hydra", "all"],
    "completion": ["bash", "fish", "zsh"],
    "sweep": ["cancel", "dashboard", "report", "resume", "retry", "status", "sync"],
}
_FOLDERS_AFTER = ("--config-dir", "-cd", "ls", "report", *_AFTER["sweep"])

_SCRIPTS = {
    "bash": """\
# Put this into ~/.bashrc: source <(rlexp completion bash)
_rlexp() {
    local line="${COMP_LINE:0:COMP_POINT}" word cut
    word="${line##*[[:space:]]}"
    cut="${word%"${word##*[=:]}"}"  # readline replaces what follows the last of these
    mapfile -t COMPREPLY < <("$1" completion --line "$line" 2>/dev/null)
    COMPREPLY=("${COMPREPLY[@]#"$cut"}")
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -F _rlexp rlexp
""",
    "zsh": """\
#compdef rlexp
# Put this into ~/.zshrc: source <(rlexp completion zsh)
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_rlexp() {
    local -a found
    found=("${(@f)$("${words[1]}" completion --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    compadd -Q -S '' -- ${(M)found:#*[=./]}
    compadd -Q -- ${found:#*[=./]}
}
compdef _rlexp rlexp
""",
    "fish": """\
# Put this into ~/.config/fish/config.fish: rlexp completion fish | source
function __rlexp
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion --line (string join ' ' -- $words) 2>/dev/null
end
complete -c rlexp -f -a '(__rlexp)'
""",
}


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    from rlexp import endings

    parser = endings.Parser(prog="rlexp completion", description="Prints a script that completes what you type.")
    parser.add_argument("shell", nargs="?", choices=sorted(_SCRIPTS))
    parser.add_argument("--line", help="prints what may stand at the end of this command line instead")
    chosen = parser.parse_args(arguments)
    if chosen.line is not None:
        print("".join(f"{word}\n" for word in complete(chosen.line)), end="")
    elif chosen.shell:
        print(_SCRIPTS[chosen.shell], end="")
    else:
        parser.error("name a shell: bash, fish or zsh")
    return 0


def complete(line: str) -> list[str]:
    """All words that may stand at the end of a command line, in place of what stands there."""
    before = line.split()
    word = before.pop() if before and not line[-1].isspace() else ""
    given, last = before[1:], before[-1] if len(before) > 1 else ""
    verb = given[0] if given and "=" not in given[0] and not given[0].startswith("-") else ""
    if last in _AFTER:
        found: Iterable[str] = _AFTER[last]
    elif last in _FOLDERS_AFTER:
        found = _folders(word)
    elif verb:
        found = []
    elif word.startswith("-"):
        found = _OPTIONS
    elif "=" in word:
        found = _values(word, given)
    else:
        verbs = ["completion", "ls", "new", "reference", "report", "sweep"] if not given else []
        found = [*verbs, *_keys(word, given)]
    return sorted({x for x in found if x.startswith(word)})


PLACES = {"source": "algo.source"}  # groups that fill another node than that of their name


# --- keys --------------------------------------------------------------------------------------------------------------


def _keys(word: str, given: Sequence[str]) -> Iterator[str]:
    """`al` -> `algo=` and `algo.`: up to the next dot."""
    sign = re.match(r"[+~]*", word)[0]  # type: ignore[index]
    path = word[len(sign) :]
    depth = path.count(".")
    for group in _groups(given):
        yield f"{sign}{group}="
    for key in _known(given):
        parts = key.split(".")
        if len(parts) > depth:
            yield sign + ".".join(parts[: depth + 1]) + ("." if len(parts) > depth + 1 else "=")


def _known(given: Sequence[str]) -> dict[str, list[str]]:
    """{key: the values that it may have, or [] where they cannot be counted}, of the parts that the command line selects."""
    by_module: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("keys.json").read_text())
    known = dict(by_module[""])
    for group, option in _chosen(given).items():
        node, place = _node(group, option, given), PLACES.get(group, group)
        known |= {f"{place}.{key}": [] for key in _paths(node)}
        known |= {f"{place}.{key}": values for key, values in by_module.get(str(node.get("module")), {}).items()}
        if "module" not in node:  # such as debug
            known |= {f"{place}.{key}": values for key, values in by_module.get(group, {}).items()}
    return known


def _paths(node: Mapping[str, Any]) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{path}" for path in _paths(value))
        elif name not in ("module", "defaults"):
            yield str(name)


def _chosen(given: Sequence[str]) -> dict[str, str]:
    """{group: option}: by default, by the algorithm, by the environment, by the experiment, by the command line."""
    chosen = _defaults(_read(_CONF / "config.yaml"))
    said = {key.split("@")[0]: value.strip("'\"[]") for key, _, value in (w.partition("=") for w in given) if value}
    recipe = _defaults(_node("experiment", said["experiment"], given)) if "experiment" in said else {}
    for group in ("algo", "env"):
        if option := said.get(group, (chosen | recipe).get(group)):
            chosen |= _defaults(_node(group, option, given))
    return {group: said.get(group, option) for group, option in (chosen | recipe).items()}


def _defaults(node: Mapping[str, Any]) -> dict[str, str]:
    """Of the list that Hydra reads: `algo: ppo`, `override /algo: dqn`, `env@env: [gymnax/cartpole]`."""
    found = {}
    for entry in node.get("defaults") or []:
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            group = str(key).removeprefix("override ").removeprefix("optional ").lstrip("/").split("@")[0]
            option = value[0] if isinstance(value, list) and value else value
            if isinstance(option, str) and not group.startswith(("hydra", "local")):
                found[group] = option
    return found


def _node(group: str, option: str, given: Sequence[str]) -> dict[str, Any]:
    """A YAML file of a group, on top of those of the same group that its `defaults` name."""
    for folder in _conf_folders(given):
        if node := _read(folder / group / f"{option}.yaml"):
            below = [x for x in node.get("defaults") or [] if isinstance(x, str) and x not in ("_self_", option)]
            merged: dict[str, Any] = {}
            for name in below:
                merged |= _node(group, name.lstrip("/").removeprefix(f"{group}/"), given)
            return merged | node
    return {}


# --- values ------------------------------------------------------------------------------------------------------------


def _values(word: str, given: Sequence[str]) -> Iterator[str]:
    key, _, value = word.partition("=")
    path = key.lstrip("+~").split("@")[0]
    done = value[: value.rfind(",") + 1]  # of a sweep: a,b
    if path == "resume":
        found: Iterable[str] = ["auto", *_run_ids(given), *_folders(value)]
    elif path in ("output_root", "hydra.run.dir", "hydra.sweep.dir"):
        found = _folders(value)
    elif path in _groups(given):
        found = _options(path, given)
    else:
        found = _known(given).get(path, [])
    for one in found:
        yield f"{key}={done}{one}"


def _groups(given: Sequence[str]) -> list[str]:
    return sorted(
        {entry.name for folder in _conf_folders(given) for entry in os.scandir(folder) if entry.is_dir()} - {"local"}
    )


def _options(group: str, given: Sequence[str]) -> Iterator[str]:
    for folder in _conf_folders(given):
        for path in (folder / group).rglob("*.yaml"):
            yield str(path.relative_to(folder / group).with_suffix(""))


def _conf_folders(given: Sequence[str]) -> list[Path]:
    """Ours, and those that the command line adds."""
    own = [given[i + 1] for i, word in enumerate(given[:-1]) if word in ("--config-dir", "-cd")]
    own += [word.partition("=")[2] for word in given if word.startswith("--config-dir=")]
    return [*(Path(os.path.expanduser(folder)) for folder in own if os.path.isdir(os.path.expanduser(folder))), _CONF]


def _run_ids(given: Sequence[str]) -> Iterator[str]:
    from rlexp.commands import ls

    roots = [word.partition("=")[2] for word in given if word.startswith("output_root=")] or ls.ROOTS
    for root in roots:
        if os.path.isdir(root):
            yield from (run_id for run_id in ls.run_ids(root) if re.fullmatch(r"[0-9a-z]{8}", run_id))


def _folders(start: str) -> Iterator[str]:
    """Those whose path begins so, each with a slash at its end."""
    parent, shown = os.path.expanduser(os.path.dirname(start)) or ".", os.path.dirname(start)
    try:
        names = sorted(entry.name for entry in os.scandir(parent) if entry.is_dir())
    except OSError:
        return
    for name in names:
        if not name.startswith(".") or os.path.basename(start).startswith("."):
            yield f"{os.path.join(shown, name)}/"


def _read(path: Path) -> dict[str, Any]:
    """{} where there is no such file, or nothing that can be read in it."""
    try:
        node = yaml.load(path.read_text(), Loader=_LOADER)
    except (OSError, UnicodeError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return node if isinstance(node, dict) else {}
