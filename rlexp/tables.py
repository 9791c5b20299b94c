"""Tables on stdout. Nothing in them is parsed: not [brackets], not :emoji:, no escape sequences."""

import io
import shutil
import sys
from collections.abc import Sequence


def show(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = (), width: int = 132
) -> None:
    """Prints a table as wide as the terminal; what is too long for a column goes on in the next line.

    Args:
      head: names of the columns; empty ones for a table without a head.
      right: the columns that are aligned to the right.
      width: where stdout is no terminal.
    """
    text = drawn(head, rows, title=title, right=right, width=_terminal() or width)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def drawn(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = (), width: int = 132
) -> str:
    """The table as text."""
    from rich.console import Console  # slow to import
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(plain(title)) if title else None, box=None, show_header=any(head))
    for i, name in enumerate(head):
        table.add_column(Text(plain(name)), justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue()


def plain(text: str) -> str:
    """What a terminal would act on is spelt out: of all that does not print, only the end of a line stays."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _terminal() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
