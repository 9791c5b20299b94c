"""Bad input about a replay: one line with what is allowed, exit code 2, nothing left behind."""

import pytest
from cli.test_bad_input import run_cli

from rlexp.training import layout

SIZES = ("algo=dqn", "algo.num_envs=8", "algo.num_steps=4", "compilation_cache=null")
PRIORITISED = "algo.source.selector=prioritised"
WRONG = [
    (["algo.source.capacity=64"], ["algo.source.capacity: 64 is less than algo.source.batch_size 128"]),
    (
        ["algo.source.capacity=128", "algo.source.sequence_length=16"],
        ["algo.source.capacity: 128 holds no sequence of 16 transitions", "needs 160"],
    ),
    (["algo.source.capacity=1000"], ["algo.source.capacity: 1000 is no multiple", "nearest that fits is 992"]),
    (
        ["algo.source.sequence_length=16", "algo.source.prefill_env_steps=0"],
        ["algo.source.prefill_env_steps: 0 is too little for a first sequence of 16 transitions", "needs 128"],
    ),
    (["total_env_steps=5000"], ["total_env_steps: 5000 leaves none to learn from", "first 8192", "more than 8192"]),
    (["total_env_steps=8192"], ["total_env_steps: 8192 leaves none to learn from"]),
    (["algo.source.prefill_env_steps=1000", "total_env_steps=1024"], ["total_env_steps: 1024", "first 1024"]),
    (["algo.source.storage=attic"], ["algo.source.storage", "attic", "device", "host"]),
    (["algo.source.selector=best"], ["algo.source.selector", "best", "uniform", "prioritised"]),
    (["algo.source.hp.priority_exponent=nan", PRIORITISED], ["algo.source.hp.priority_exponent", "nan"]),
    (["algo.source.hp.priority_exponent=-1", PRIORITISED], ["algo.source.hp.priority_exponent", "-1"]),
    (["algo.source.hp.priority_floor=0", PRIORITISED], ["algo.source.hp.priority_floor", "0"]),
    (["algo.source.hp.importance_end=inf", PRIORITISED], ["algo.source.hp.importance_end", "inf"]),
    (
        ["algo.source.hp.priority_exponent=0.5"],
        ["algo.source.hp.priority_exponent=0.5: nothing reads it", "algo.source.selector=uniform", PRIORITISED],
    ),
    (["checkpoint.replay=maybe"], ["checkpoint.replay", "maybe"]),
]


def check(arguments, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code = run_cli([*SIZES, *arguments], monkeypatch)
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert [word for word in words if word not in err] == [], err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_one_line_and_nothing_left(arguments, words, tmp_path, monkeypatch, capfd):
    check(arguments, words, tmp_path, monkeypatch, capfd)


def test_storage_on_the_host_where_the_devices_reach_none(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(layout, "_HOST_MEMORY", "attic")
    words = ["algo.source", "keeps data in the host's memory, which cpu devices cannot reach; theirs are", "device"]
    check(["algo.source.storage=host"], words, tmp_path, monkeypatch, capfd)
