"""The words of `rlexp` that are no configuration: `rlexp ls`, `rlexp sweep`, … Each imports what it needs once it is called.

`rlexp …` and `python -m rlexp …` are the same. Exit codes as of the rest: 0 done, 1 failed, 2 bad input.
"""

import os
import sys

from rlexp.machine import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The word -> where its main is, and what it is called with before the arguments.
VERBS = {
    "completion": ("rlexp.commands.completion", ()),
    "ls": ("rlexp.commands.ls", ()),
    "new": ("rlexp.commands.new", ()),
    "reference": ("rlexp.commands.reference", ()),
    "sweep": ("rlexp.sweep.__main__", ()),
    "report": ("rlexp.report.__main__", ()),
}


def main() -> None:
    """The console script."""
    process.prepare()
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: one's own modules lie there
    leave_if_verb(sys.argv[1:])
    from rlexp.__main__ import main as run

    process.run(run)


def leave_if_verb(arguments: "Sequence[str]") -> None:
    """Does what a verb says and ends the process with its exit code; comes back where the command line names none."""
    first = arguments[0] if arguments else ""
    if first == "--version":
        from importlib.metadata import version

        print(f"rlexp {version('rlexp')}")
        sys.exit(0)
    if first in VERBS:
        import importlib

        module, before = VERBS[first]
        sys.exit(_printed(importlib.import_module(module).main, [*before, *arguments[1:]]))


def _printed(verb: "Callable[[list[str]], int]", arguments: list[str]) -> int:
    """The exit code of a verb. Names that cannot be encoded are escaped; who stops reading ends it quietly."""
    from rlexp import endings

    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = verb(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it ends
        return 0
    except Exception as error:
        return endings.told(error)
    return code
