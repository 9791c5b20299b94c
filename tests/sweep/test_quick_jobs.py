"""Jobs that are over are run by Hydra's `run_job` with quicker copies and quicker YAML: what it leaves and gives is the same."""

import copy
import types
from pathlib import Path

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from support import build

from rlexp import compose, experiment, written
from rlexp.hydra_internals import Callbacks, application, config_loader, copies, quick_jobs


@pytest.fixture(scope="module")
def composed():
    compose.register_resolvers()
    loader = config_loader(compose.CONF_DIR)
    setup_globals()
    return loader.load_configuration("config", overrides=["seed=3", "hydra.job.num=0"], run_mode=RunMode.MULTIRUN)


def flags(node) -> list:
    """Of all nodes, by path, and whether each hangs where it should."""
    found = [(OmegaConf.get_type(node), vars(node)["_metadata"].flags, vars(node)["_metadata"].ref_type)]
    content = vars(node).get("_content")
    for child in content.values() if isinstance(content, dict) else content if isinstance(content, list) else []:
        assert child._get_parent() is node
        found += flags(child) if OmegaConf.is_config(child) else [type(child)]
    return found


def test_copies_are_those_of_deepcopy_and_masked_copy(composed):
    again = copies(composed)
    for ours, theirs in (
        (again(), copy.deepcopy(composed)),
        (copies(composed, ["hydra"])(), OmegaConf.masked_copy(composed, "hydra")),
        (application(composed), OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])),
    ):
        assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
        assert flags(ours) == flags(theirs)
        assert ours._get_parent() is None
    one, other = again(), again()
    one.algo.hp.lr = 5.0
    assert other.algo.hp.lr == composed.algo.hp.lr != 5.0
    assert composed.hydra._get_parent() is composed


def test_a_configuration_of_local_classes_is_copied_too():
    class Local:
        pass

    config = OmegaConf.create({"a": {"b": Local()}}, flags={"allow_objects": True})
    assert isinstance(copies(config)().a.b, Local)
    assert isinstance(copies(config, ["a"])().a.b, Local)
    assert config.a._get_parent() is config
    assert copies(DictConfig(None))() == DictConfig(None)


def test_what_run_job_leaves_and_gives(composed, tmp_path):
    def left(name: str):
        config = copy.deepcopy(composed)
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(tmp_path), name
        seen = []
        context = HydraContext(config_loader=None, callbacks=Callbacks(config))
        returned = run_job(
            lambda job: (seen.append((job, HydraConfig.get().job.num)), 1.0)[1],
            config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=context,
        )
        return returned, seen, tmp_path / name / ".hydra"

    own, seen_by_own, there = left("0")
    with quick_jobs():
        quick, seen, here = left("1")
    assert seen == seen_by_own and quick.return_value == own.return_value and quick.overrides == own.overrides
    assert (
        quick.cfg == own.cfg and flags(quick.cfg) == flags(own.cfg) and flags(quick.hydra_cfg) == flags(own.hydra_cfg)
    )
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        ours, theirs = ((place / name).read_text() for place in (here, there))
        wanted = theirs.replace(str(tmp_path / "0"), str(tmp_path / "1")).replace("subdir: '0'", "subdir: '1'")
        assert yaml.safe_load(ours) == yaml.safe_load(wanted)
        assert ours == wanted or name == "hydra.yaml"  # the text of --help is broken elsewhere
    assert sorted(path.name for path in Path(here).iterdir()) == sorted(path.name for path in Path(there).iterdir())


@pytest.mark.parametrize(
    "value",
    [
        {"a": ["1", "on", "1e3", "null", "~", "", "é ☃", "a: b", "- x", "${b}", "x" * 200], "b": None, "c": 1e-9},
        {"long": "word " * 60, "lines": "one\ntwo\n", "nested": {"empty": {}, "none": []}, "yes": True, "1": 1},
        {"tuple": (1, (2.5, "x")), "enum": RunMode.RUN, "missing": "???", "\t": " a "},
        ["seed=1", "algo.hp.lr=3e-4", "'a b'", '"', "#", "@x", "%"],
    ],
)
def test_yaml_is_omegaconfs(value):
    theirs = OmegaConf.to_yaml(OmegaConf.create(value))
    assert written.yaml_of(value) == written.yaml_of(OmegaConf.create(value)) == theirs
    shared = ["same"]
    assert written.yaml_of({"a": shared, "b": shared}) == "a:\n- same\nb:\n- same\n"


def test_a_member_is_what_would_be_built_of_it():
    lead = build("seed=1", "algo.hp.lr=1e-3", "algo.lr_scaling=sqrt", "algo.num_envs=8")
    other = build("seed=7", "algo.hp.lr=3e-4", "algo.lr_scaling=sqrt", "algo.num_envs=8", "env.params.gravity=5.0")
    member = experiment.alike(lead, other.node, (other.config, other.modules))
    made = experiment.Experiment._fields
    assert {name for name in made if getattr(member, name) is not getattr(lead, name)} >= {
        "config",
        "node",
        "hp",
        "settings",
    }
    data = [name for name in made if not isinstance(getattr(other, name), types.FunctionType) and name != "algorithm"]
    assert all(getattr(member, name) == getattr(other, name) for name in data)
