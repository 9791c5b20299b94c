"""The wheel, as `pip install .` makes it, in an environment that does not see the repository."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _call(*command: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([str(x) for x in command], cwd=cwd, env=environment, text=True, capture_output=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, and with our dependencies from where the tests find them.

    The editable install stays outside: a .pth file inside a folder that was itself named by a .pth file is not read.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    executable = folder / "bin" / "python"
    packages = Path(
        _call(executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", executable]
    _call(*pip, "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel, cwd=folder)
    return executable


def _files(folder: str) -> set[str]:
    """Files of a folder that belong to the project, so neither caches nor a user's own conf/local."""
    paths = [p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.is_file()]
    return {
        str(p)
        for p in paths
        if "__pycache__" not in p.parts and p.parts[:2] != ("conf", "local") and p.name != ".gitkeep"
    }


def test_the_wheel_carries_the_packages_and_the_configuration(wheel: Path) -> None:
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = _files("rlexp") | _files("hydra_plugins")
    packages |= {name.removeprefix("launchers/") for name in _files("launchers")}
    assert carried == packages | {f"rlexp/{name}" for name in _files("conf")}
    assert {"rlexp/conf/config.yaml", "rlexp/__main__.py", "rlexp_launchers/__init__.py"} <= carried
    assert "hydra_plugins/__init__.py" not in carried  # it would hide the plugins of every other package


@pytest.mark.slow
def test_the_installed_package_runs_from_an_empty_directory(python: Path, tmp_path: Path) -> None:
    where = _call(
        python, "-c", "import rlexp, rlexp_launchers; print(rlexp.__file__, rlexp_launchers.__file__)", cwd=tmp_path
    ).stdout
    assert str(ROOT) not in where
    version = _call(python, "-c", "import importlib.metadata as m; print(m.version('rlexp'))", cwd=tmp_path).stdout
    assert version.strip() == PROJECT["version"]
    assert "algo=" in _call(python, "-m", "rlexp", "--help", cwd=tmp_path).stdout
    assert "algo.lrr" in _call(python, "-m", "rlexp", "+algo.lrr=1", cwd=tmp_path, code=2).stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_installed_package_trains_from_an_empty_directory(python: Path, tmp_path: Path) -> None:
    _call(python, "-m", "rlexp", "total_env_steps=2000", cwd=tmp_path)
    (summary,) = tmp_path.glob("outputs/*/*/summary.json")
    assert '"finished"' in summary.read_text()


@pytest.mark.slow
def test_the_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    _call(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path
    )  # sdist, then its wheel
    (again,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_constraints_hold_exact_versions_and_no_address() -> None:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if not x.startswith("#")]
    assert [x for x in lines if "==" not in x or "/" in x or "@" in x or x.startswith("-")] == []
    pinned = {x.split("==")[0] for x in lines}
    needed = [*PROJECT["dependencies"], *(x for extra in PROJECT["optional-dependencies"].values() for x in extra)]
    names = {x.replace("[", ">").split(">")[0].split("<")[0].lower() for x in needed}
    assert names - {"rlexp"} <= pinned
