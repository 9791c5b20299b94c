"""What the report and the tables say of a population, read from the lines of its members."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import yaml
from made_up_sweep import made_up

from rlexp.report import details
from rlexp.report.found import Finder
from rlexp.sweep import report
from rlexp.sweep.lineage import counted, populations, searched, shown
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.results import combined, gather, origin_of, reproduce

SPACE = "between.space=[{key: algo.hp.lr, low: 1e-05, high: 0.01, log: true, step: null, whole: false, choices: null}]"
# Of each generation: the parents, the returns and the learning rates of three members. Of the third nothing was evaluated at last.
GENERATIONS = [
    ([0, 1, 2], [1.0, 2.0, 3.0], [1e-3, 2e-3, 3e-3]),
    ([2, 1, 2], [5.0, 2.0, 4.0], [2.4e-3, 2e-3, 3e-3]),
    ([0, 0, 2], [4.0, 7.0, None], [2.4e-3, 2e-3, 3e-3]),
]


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Two populations in one environment, of which the second has not begun."""
    manifest = Manifest(tmp_path)
    for number in range(6):
        member, own = number % 3, [f"algo.num_envs={4 if number < 3 else 8}", f"seed={number}", "algo.hp.lr=0.001"]
        given = [f"between.number={number // 3}", "between.population=3", f"between.seed={number // 3 * 3}", SPACE]
        manifest.add(number, [*own, "between=population", *given])
        if number > 2:
            continue
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text("env: {name: CartPole-v1}\nalgo: {module: rlexp.algos.ppo}\n")
        lines, env_steps = [{"env_steps": 0, "wall_s": 0.0, "eval/return_mean": 0.0}], 0
        for generation, (parents, returns, lrs) in enumerate(GENERATIONS):
            told = {"population/generation": generation, "population/parent": parents[member]}
            told["population/algo.hp.lr"] = lrs[member]
            for evaluated in ({}, {"eval/return_mean": returns[member]}):
                env_steps += 50
                lines.append({"env_steps": env_steps, "wall_s": 0.1, **evaluated, **told})
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        manifest.change([number], again=True, status="finished", objective=GENERATIONS[-1][1][member])
    manifest.remember(
        "command",
        [
            "-m",
            "sweeper=pbt",
            "algo.num_envs=4,8",
            "algo.hp.lr=interval(1e-5,1e-2)",
            "hydra.sweep.dir=x",
            "launcher.workers=2",
        ],
    )
    manifest.remember("cwd", "/somewhere")
    return tmp_path


def test_the_tree_is_read_from_the_lines(sweep):
    first, second = populations(sweep, Manifest(sweep).jobs())
    assert (first.num_generations, first.best, first.keys) == (3, 1, ["algo.hp.lr"])
    assert [(s.member, s.generation, s.begin, s.end) for s in first.ancestry(1)] == [
        (2, 0, 0, 100),
        (0, 1, 100, 200),
        (1, 2, 200, 300),
    ]
    assert [s.values["algo.hp.lr"] for s in first.ancestry(1)] == [3e-3, 2.4e-3, 2e-3]
    assert [(s.generation, s.parent, s.member) for s in first.copies()] == [(1, 2, 0), (2, 0, 1)]
    assert (second.num_generations, second.best, second.stretches) == (0, None, {})
    (job, *_) = Manifest(sweep).jobs()
    assert shown(job.overrides) == ["algo.num_envs=4", "seed=0", "algo.hp.lr=0.001"]
    assert searched(job.overrides) == {"algo.hp.lr"} and searched(["algo.hp.lr=1"]) == set()


def test_the_report_has_a_population_as_one_configuration_and_draws_it(sweep):
    results = gather(sweep)
    assert [(c.settings, len(c.jobs)) for c in results.configurations] == [
        ({"algo.num_envs": "4"}, 3),
        ({"algo.num_envs": "8"}, 3),
    ]
    command = "python -m rlexp -m sweeper=pbt algo.num_envs=8 'algo.hp.lr=interval(1e-5,1e-2)'"
    assert reproduce(results, results.configurations[1]) == command
    for run in (run for run in Finder([str(sweep)]).runs() if run.entry.number > 2):
        assert details.words(run).repeat == command and details.words(run._replace(sweep=None)).repeat == ""
    written = report.write(sweep)
    page = written.page.read_text()
    assert "3 members, 2 exchanges, 2 copied; what is there now descends from 1 of the first." in page
    assert all(f'id="{name}"' in page for name in ("lineage-0", "schedule-0-0"))
    assert "No member has been evaluated yet." in page
    table = list(csv.reader((sweep / "report/populations.csv").read_text().splitlines()))
    assert table[0][:3] == ["population", "job", "generation"] and len(table) == 10
    assert table[4] == ["0", "0", "1", "100", "200", "2", "5.0", "0.0024"]


def test_of_tournaments_the_last_ages_count_in_each_sweep_by_itself(tmp_path):
    """One has ended, the same line once more has pods of its first age alone, however they are ordered."""
    pod = "between=pods between.number=0 between.first_seed=4 between.population=2 between.space=[]"
    over = made_up(tmp_path / "over", [(f"seed={4 + i} {pod}", float(i)) for i in range(6)])
    begun = made_up(tmp_path / "begun", [(f"seed={4 + i} {pod}", 10.0 + i if i < 2 else None) for i in range(6)])
    for order in ([over, begun], [begun, over]):
        (found,) = combined(tmp_path, [origin_of(one) for one in order]).configurations
        assert sorted(found.objectives) == [4.0, 5.0, 10.0, 11.0] and len(found.jobs) == 12
    of_some = Manifest(over).jobs()[1:]
    assert [job.number for job in counted(of_some)] == [4, 5]


@pytest.mark.parametrize("kept", [[1], [1, 2], [0, 1]])
def test_members_copied_out_of_their_population_are_themselves(sweep, kept):
    """By their seeds they are who they were; whom they come from is not here, or is."""
    jobs = [Manifest(sweep).jobs()[i] for i in kept]
    (found,) = populations(sweep, jobs)
    assert list(found.jobs) == kept and found.best == max(kept, key=lambda i: (GENERATIONS[-1][1][i] or 0, -i))
    for (generation, member), stretch in found.stretches.items():
        parent = GENERATIONS[generation][0][member]
        assert stretch.parent == (parent if parent in kept else None)
    line = [(s.generation, s.member) for s in found.ancestry(1)]
    assert line == ([(1, 0), (2, 1)] if 0 in kept else [(2, 1)])
    for i in kept:
        shutil.copytree(sweep / str(i), sweep / f"alone/best{i}")
        own = next(job.overrides for job in jobs if job.number == i)
        (sweep / f"alone/best{i}/overrides.yaml").write_text(yaml.safe_dump(own))
        (sweep / f"alone/best{i}/environment.json").write_text("{}")
    written = report.write_all([str(sweep / "alone")], sweep / "alone")
    table = list(csv.DictReader((sweep / "alone/report/populations.csv").read_text().splitlines()))
    assert len(table) == 3 * len(kept) and written.page.exists()
