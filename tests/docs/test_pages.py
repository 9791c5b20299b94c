"""docs/how-to/render.md and docs/how-to/look_at_a_run.ipynb, on a run of moments."""

import json
import re
import sys
from pathlib import Path

import jax
import pytest
from PIL import Image
from support import QUIET, SMALL

import rlexp

pytestmark = pytest.mark.slow
HOW_TO = Path(__file__).resolve().parents[2] / "docs/how-to"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with one run in it, as a user has."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rlexp.train(*QUIET, *SMALL)
    return folder


def test_an_episode_is_rendered(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    (text,) = re.findall(r"```python\n# render.py\n(.*?)```", (HOW_TO / "render.md").read_text(), re.DOTALL)
    (run,) = place.glob("outputs/*/*")
    monkeypatch.setattr(sys, "argv", ["render.py", str(run)])
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(text, "render.py", "exec"), {"__name__": "__main__"})  # noqa: S102
    steps = int(re.fullmatch(r"episode.gif: (\d+) steps, return \1\n", capsys.readouterr().out)[1])
    with Image.open("episode.gif") as image:
        assert image.n_frames == steps // 2 + 1


def test_the_notebook_runs_from_top_to_bottom(place, monkeypatch):
    monkeypatch.chdir(place)
    cells = json.loads((HOW_TO / "look_at_a_run.ipynb").read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs")]  # nothing of a machine is committed
    seen = {}
    with jax.numpy_dtype_promotion("standard"):
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), seen)  # noqa: S102
    assert seen["run_dir"].parent.parent == Path("outputs") and len(seen["returns"]) == 64
    assert seen["curve"]("eval/return_mean").shape == (2, len(seen["rows"])) and len(seen["rows"]) > 2
    seen["plt"].close("all")
