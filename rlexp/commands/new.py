"""`rlexp new NAME`: a folder with a project of one's own, which trains and whose test passes. It is made of `rlexp/template`."""

import importlib.util
import keyword
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlexp import endings
from rlexp.config import ConfigError

_TEMPLATE = Path(__file__).resolve().parents[1] / "template"
_NAME = "my_project"  # what stands in the template for the name


def main(arguments: Sequence[str]) -> int:
    """The exit code. Raises ConfigError."""
    parser = endings.Parser(prog="rlexp new", description="Makes a project of your own.")
    parser.add_argument("name", help="a folder to make; its last part names the Python package")
    folder = Path(parser.parse_args(arguments).name)
    make(folder)
    print(f"made {folder}; next:\n  cd {folder}\n  rlexp --config-dir conf experiment=first\n  python -m pytest")
    return 0


def make(folder: Path) -> None:
    """Raises ConfigError where there is something already, or the name cannot be a package's; then nothing is made."""
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        fits = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or _NAME
        fits = f"my_{fits}" if fits[0].isdigit() or keyword.iskeyword(fits) else fits
        raise ConfigError(f"new: {name!r} cannot name a Python package; small letters, digits and _, such as {fits}")
    hides = importlib.util.find_spec(name)
    if name in ("rlexp", "rlexp_launchers", "hydra_plugins", "conf", "tests") or (hides and hides.origin is not None):
        raise ConfigError(f"new: there is a Python package {name!r} already; give it another name")
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"new: {str(folder)!r} is there already")
    try:
        for source in sorted(
            path for path in _TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ):
            target = folder / str(source.relative_to(_TEMPLATE)).replace(_NAME, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text().replace(_NAME, name))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"new: {str(folder)!r} cannot be written: {error.strerror}") from error
