"""Hydra's own suite for launchers, on ours with `pack=off`: then it runs the jobs of any application, one after the other."""

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import LauncherTestSuite
from hydra.version import VersionBase
from packaging.version import Version

from hydra_plugins.rlexp_launcher import RlexpLauncher

# Hydra warns of an application that names no version_base.
pytestmark = [
    pytest.mark.filterwarnings("ignore:\\s*The version_base parameter is not specified:UserWarning"),
    pytest.mark.filterwarnings("ignore:Future Hydra versions will no longer change working directory:UserWarning"),
]


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch):
    """The suite's applications name no version_base, and whatever an earlier test's has named, or has left open, would count."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(VersionBase.instance(), "version_base", Version("1.1"))


def test_hydra_finds_the_launcher():
    assert RlexpLauncher.__name__ in [x.__name__ for x in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("rlexp", ["hydra.launcher.pack=off"])])
class TestConformance(LauncherTestSuite):
    """All of it."""
