"""The command lines of docs/actors.md are ones that can be: every group, option and key in them is there."""

import re
import shlex

from support import QUIET, REPOSITORY

from rlexp import compose, unknown
from rlexp.config import Config


def test_every_command_composes():
    page = (REPOSITORY / "docs/actors.md").read_text()
    lines = re.findall(r"^    python -m rlexp (.*?)(?:  +#.*)?$", page, re.MULTILINE)
    assert len(lines) >= 7
    for line in lines:
        node, _ = compose.compose_node([*shlex.split(line), *QUIET])
        unknown.check(node, Config)
