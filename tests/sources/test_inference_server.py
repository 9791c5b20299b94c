"""The server of `source=inference`, with workers that are threads of this process: what it makes of their steps, and of faults."""

import functools
import re
import socket
import stat
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import Any

import grpc
import jax
import numpy as np
import pytest
from sources.remote import NUM_ENVS, NUM_STEPS, Call, Plays, acting, arrays, policy, told

from rlexp.config import ConfigError
from rlexp.sources import acting as acting_module
from rlexp.sources.acting import Acting, Counted, Player
from rlexp.sources.door import Life
from rlexp.sources.unrolls import side_by_side
from rlexp.types import TimeStep
from rlexp.workers import address, keeper, meeting, wire
from rlexp.workers.wire import Kind

Code = grpc.StatusCode
HERE = "127.0.0.1:0"


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    deadline = time.monotonic() + 10
    names = ("inference", "workers", "plays")
    while any(t.name.startswith(names) for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [t.name for t in threading.enumerate() if t.name.startswith(names)] == []


# --- what it makes of steps ------------------------------------------------------------------------------------------------


def assert_whole(unrolls) -> None:
    """Each is of one life, in order, with what the steps brought."""
    for unroll in unrolls:
        rows, num = arrays(unroll), len(unroll.rows)
        obs = rows.obs[0][:num]
        for column in (0, 1):
            assert (rows.obs[0][..., column] == obs[0, 0, column]).all()
        steps = obs[:, 0, 2].astype(int)
        np.testing.assert_array_equal(steps, steps[0] + np.arange(len(steps)))
        valid = steps % 5 != 4  # after the last row of an episode comes its reset
        np.testing.assert_array_equal(rows.valid[:num, 0], valid)
        np.testing.assert_array_equal(rows.reward[:num, 0], (steps + 1) * valid)
        np.testing.assert_array_equal(rows.first[:num, 0], steps % 5 == 0)
        np.testing.assert_array_equal(rows.extras[0][:num, 0], steps % 5)  # what the policy has seen
        np.testing.assert_array_equal(unroll.memory[0], (steps[0] + 4) % 5 + 1 if steps[0] else 0)


@pytest.mark.parametrize("max_lag", [0, 1, 4])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_step_is_there_once_and_none_is_too_old(tmp_path, num_workers, max_lag):
    with acting(tmp_path, num_workers=num_workers, max_lag=max_lag) as server:
        workers = [Plays(tmp_path, i) for i in range(num_workers)]
        calls, seen = 0, dict.fromkeys(range(num_workers), 0)
        for update in range(10):
            unrolls, counted = server.learn_from((policy(update),))
            assert len(unrolls) == num_workers and counted.lost == 0
            calls += counted.calls
            assert_whole(unrolls)
            rows, _ = side_by_side(unrolls, NUM_STEPS, server.rows, 0)
            assert rows.obs[0].shape == (NUM_STEPS + 1, num_workers * NUM_ENVS, 3)
            for unroll in unrolls:
                versions = [int(row.extras[1][0]) for row in unroll.rows]
                assert versions == sorted(versions) and versions[0] == unroll.version and versions[-1] <= update
                assert 0 <= update - unroll.version <= max_lag
                worker, _, step = told(unroll.rows[0].message)
                if num_workers == 1:
                    assert step == seen[worker]
                seen[worker] = step + len(unroll.rows)
        assert calls >= 10 * NUM_STEPS  # each acts once for a worker
    for worker in workers:
        worker.join(10)
    assert [worker.kind for worker in workers] == [Kind.END] * num_workers


def test_devices_share_the_workers(tmp_path):
    """Each acts for its own with its own policy, and remembers for them; policies tell here which device it was."""
    devices = jax.devices()[1:3]
    with acting(tmp_path, num_workers=3, max_lag=1) as server:
        workers = [Plays(tmp_path, i) for i in range(3)]
        seen = set()
        for update in range(6):
            policies = tuple(jax.device_put(policy(10 * update + i), device) for i, device in enumerate(devices))
            unrolls, _ = server.learn_from(policies)
            assert_whole(unrolls)
            for unroll in unrolls:
                worker = told(unroll.rows[0].message)[0]
                assert {int(row.extras[1][0]) % 10 for row in unroll.rows} == {worker % 2}
                seen.add(worker)
        assert seen == {0, 1, 2}
    assert [list(table.devices()) for table in server._tables] == [[d] for d in devices]  # nobody acts any more
    for worker in workers:
        worker.join(10)


def test_a_slow_worker_stalls_nobody(tmp_path):
    goes_on = threading.Event()
    with acting(tmp_path, num_workers=3, max_lag=1) as server:
        workers = [Plays(tmp_path, i) for i in range(2)]
        workers.append(Plays(tmp_path, 2, before_step=lambda step: step == 2 and goes_on.wait(30)))
        for update in range(8):  # it is in the middle of its unroll all the time
            unrolls, _ = server.learn_from((policy(update),))
            assert_whole(unrolls)
            assert all(update - unroll.version <= 1 for unroll in unrolls)
        goes_on.set()
        came = set()
        for update in range(8, 20):
            unrolls, _ = server.learn_from((policy(update),))
            assert all(update - unroll.version <= 1 for unroll in unrolls)
            came |= {told(unroll.rows[0].message)[0] for unroll in unrolls}
        assert 2 in came
    for worker in workers:
        worker.join(10)


def test_each_worker_has_its_place_where_batches_are_remembered(tmp_path):
    """A life that ends leaves a row that starts no transition, and the next one begins behind it."""
    with acting(tmp_path, num_workers=2, max_lag=1, own_places=True) as server:
        workers = [
            Plays(tmp_path, 0),
            Plays(tmp_path, 1, before_step=lambda step: step == 7 and threading.Event().wait(0.3)),
        ]
        batches = [server.learn_from((policy(0),))[0]]
        workers.append(Plays(tmp_path, 0, life=1))
        batches += [server.learn_from((policy(update),))[0] for update in range(1, 8)]
        ends: dict[int, list] = {}
        for unrolls in batches:
            assert [told(u.rows[0].message)[0] for u in unrolls] == [0, 1]
            for worker, unroll in enumerate(unrolls):
                assert len(unroll.rows) == NUM_STEPS
                begin = told(unroll.rows[0].message)
                assert begin == ends.get(worker, begin)
                ends[worker] = told(unroll.final)
        assert ends[0][1] == 1
        gaps = [rows for unrolls in batches for u in unrolls if np.ptp((rows := arrays(u)).obs[0][:-1, 0, 1])]
        assert len(gaps) == 1 and not gaps[0].valid[0].any()
    for worker in workers:
        worker.join(10)


def asked(server) -> list[set[int]]:
    """Whom the policy acts for from now on, call by call."""
    calls: list[set[int]] = []
    ask = server._ask

    def noted(device, players):
        calls.append({player.life.worker for player in players})
        return ask(device, players)

    server._ask = noted
    return calls


def test_a_part_of_a_batch_does_not_wait_for_the_others(tmp_path):
    """Two of four: the others step for as long as the test lasts."""
    goes_on, held = threading.Event(), [threading.Event() for _ in range(2)]

    def hold(i: int, step: int) -> None:
        if step == 1:
            held[i].set()
            goes_on.wait(30)

    with acting(tmp_path, num_workers=4, max_lag=1, batch_timeout_s=0.01) as server:
        workers = [Plays(tmp_path, i) for i in range(2)]
        workers += [Plays(tmp_path, 2 + i, before_step=functools.partial(hold, i)) for i in range(2)]
        server.learn_from((policy(0),))
        assert all(one.wait(20) for one in held)
        calls = asked(server)
        for update in range(1, 4):
            server.learn_from((policy(update),))
        assert calls and set().union(*calls) == {0, 1}
        goes_on.set()
    for worker in workers:
        worker.join(10)


def test_no_more_than_batch_size_at_once(tmp_path):
    with acting(tmp_path, num_workers=4, max_lag=2, batch_size=2 * NUM_ENVS, batch_timeout_s=5.0) as server:
        calls = asked(server)
        workers = [Plays(tmp_path, i) for i in range(4)]
        for update in range(4):
            _, counted = server.learn_from((policy(update),))
            assert counted.acted_for <= 2 * NUM_ENVS * counted.calls
        assert max(map(len, calls)) == 2 and set().union(*calls) == {0, 1, 2, 3}
    for worker in workers:
        worker.join(10)


# --- who comes in ----------------------------------------------------------------------------------------------------------


def test_who_has_not_the_token_stays_outside(tmp_path):
    with acting(tmp_path):
        for token in ("", "0" * 64):
            call = Call(tmp_path, token=token).hello()
            code, why = call.refused()
            assert code is Code.UNAUTHENTICATED and "rlexp-token" in why
            call.close()
        for path in (tmp_path / meeting.FOLDER / meeting.TOKEN, tmp_path / meeting.FOLDER / meeting.NOTE):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"worker": 1}, "worker: expected a number from 0 to 0, got 1"),
        ({"worker": True}, "worker: expected a number"),
        ({"worker": "0"}, "worker: expected a number"),
        ({"run": ""}, "run: expected an id"),
        ({"protocol": 0}, "protocol: expected 1, got 0"),
        ({"rows": "obs.0 float64[2]"}, r"rows: expected .*; got obs\.0 float64\[2\]"),
    ],
)
def test_a_hello_that_does_not_fit_is_told(tmp_path, body, said):
    with acting(tmp_path):
        call = Call(tmp_path).hello(**body)
        code, why = call.refused()
        assert code is Code.INVALID_ARGUMENT and re.search(said, why), why
        call.close()


def _short(call: Call) -> bytes:
    return wire.pack(Kind.ROWS, 0, wire.rows_layout(NUM_ENVS, [("float32", (2,))], []), _arrays((NUM_ENVS, 2)))


def _arrays(shape) -> list[np.ndarray]:
    ones = np.ones(NUM_ENVS, np.float32)
    return [ones, ones, np.ones(shape, np.float32), ones == 0, ones == 0]


BAD = {
    "a wrong shape": (_short, "expected a message of"),
    "a wrong number": (
        lambda call: wire.pack(Kind.ROWS, 5, call.rows, _arrays((NUM_ENVS, 3))),
        "expected message ROWS 0, got ROWS 5",
    ),
    "a wrong kind": (
        lambda call: wire.pack(Kind.ACTIONS, 0, call.rows, _arrays((NUM_ENVS, 3))),
        "expected message ROWS 0, got ACTIONS 0",
    ),
    "no message": (lambda call: b"\xff\xff", "this is no message"),
    "nothing": (lambda call: b"", "this is no message"),
    "an unreadable error": (lambda call: wire.write(Kind.FAILED)[:8] + b"{", "expected JSON"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_worker_that_sends_nonsense_is_turned_away_and_the_others_go_on(tmp_path, fault):
    message, said = BAD[fault]
    with acting(tmp_path, num_workers=2) as server:
        good = Plays(tmp_path, 0)
        call = Call(tmp_path).hello(1)
        assert call.answer() is Kind.WELCOME
        code, why = call.send(message(call)).refused()
        assert code is Code.INVALID_ARGUMENT and said in why
        call.close()
        for update in range(3):
            unrolls, _ = server.learn_from((policy(update),))
            assert {told(u.rows[0].message)[0] for u in unrolls} == {0}
    good.join(10)


def test_a_message_over_the_limit_is_turned_away(tmp_path):
    with acting(tmp_path, num_workers=2, max_message_bytes=2000) as server:
        good = Plays(tmp_path, 0)
        limit = meeting.read(tmp_path / meeting.FOLDER)[0]._replace(max_message_bytes=2**24)  # type: ignore[index]
        call = Call(tmp_path, note=limit).hello(1)
        assert call.answer() is Kind.WELCOME
        code, why = call.send(b"\3" * 100_000).refused()
        assert code is Code.RESOURCE_EXHAUSTED and "2000" in why
        call.close()
        server.learn_from((policy(0),))
    good.join(10)


def test_each_life_has_an_id_of_its_own(tmp_path):
    with acting(tmp_path):
        first, second = Call(tmp_path).hello(run="r" * 16), Call(tmp_path)
        assert first.answer() is Kind.WELCOME
        code, why = second.hello(run="r" * 16).refused()
        assert code is Code.ALREADY_EXISTS and "was here before" in why
        first.close()
        second.close()


def test_a_worker_that_comes_again_takes_its_place_and_no_unroll_has_two_lives(tmp_path):
    with acting(tmp_path, max_lag=4, num_steps=6) as server:
        old = Call(tmp_path).hello()
        assert old.answer() is Kind.WELCOME
        threading.Thread(target=old.step, args=(0, 1, 0), name="plays").start()
        learnt: list = []
        learner = threading.Thread(target=lambda: learnt.append(server.learn_from((policy(0),))), name="plays")
        learner.start()
        for step in range(3):  # half an unroll
            assert old.answer() is Kind.ACTIONS
            old.step(0, 1, step + 1)
        new = Plays(tmp_path, 0, life=2)
        assert new.begun.wait(20)
        code, why = old.step(0, 1, 4).refused()
        assert code is Code.ABORTED and "another process is worker 0" in why
        learner.join(20)
        unrolls, counted = learnt[0]
        assert_whole(unrolls)
        assert told(unrolls[0].rows[0].message) == [0, 2, 0] and counted.lost == 1
        for update in range(1, 7):  # what the old one has not completed is not learnt from later either
            unrolls, _ = server.learn_from((policy(update),))
            assert_whole(unrolls)
            assert told(unrolls[0].rows[0].message)[1] == 2
        old.close()
    new.join(10)


# --- silence ---------------------------------------------------------------------------------------------------------------


def test_who_says_nothing_is_given_up(tmp_path):
    with acting(tmp_path, num_workers=2, silence_s=0.5) as server:
        good = Plays(tmp_path, 0)
        silent, mute = Call(tmp_path).hello(1), Call(tmp_path)  # one says nothing more, the other not even hello
        assert silent.answer() is Kind.WELCOME
        for call in (silent, mute):
            assert call.refused()[0] is Code.CANCELLED
            call.close()
        unrolls, _ = server.learn_from((policy(0),))
        assert_whole(unrolls)
    good.join(10)


def test_what_fails_as_it_opens_leaves_nothing(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(meeting, "post", full)
    with pytest.raises(OSError, match="no space left"), acting(tmp_path, address=f"127.0.0.1:{port}"):
        pass
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_nobody_is_given_up_for_what_the_policy_takes(tmp_path):
    """While it acts, or is compiled, nobody can be heard."""
    calls: list[float] = []

    def acts() -> None:
        calls.append(time.monotonic())
        if len(calls) in (2, 5):
            time.sleep(1.5)

    with acting(tmp_path, acts, num_workers=3, batch_size=NUM_ENVS, silence_s=0.5) as server:
        workers = [Plays(tmp_path, i) for i in range(3)]
        lost = [server.learn_from((policy(update),))[1].lost for update in range(4)]
        assert lost == [0] * 4 and all(worker.is_alive() for worker in workers)
    for worker in workers:
        worker.join(10)


def test_who_is_acted_for_is_told_before_the_next_ones_are(tmp_path):
    told = threading.Event()
    came: list[bool] = []

    def acts() -> None:
        if len(came) < 2:
            came.append(told.wait(20) if came else told.is_set())

    with acting(tmp_path, acts, num_workers=2, batch_size=NUM_ENVS) as server:
        workers = [Plays(tmp_path, i, before_step=lambda step: step == 1 and told.set()) for i in range(2)]
        while sum(player.waits_since is not None for player in list(server._players.values())) < 2:
            time.sleep(0.01)
        server.learn_from((policy(0),))
        assert came == [False, True]
    for worker in workers:
        worker.join(10)


def test_without_workers_the_learner_ends_with_an_error(tmp_path):
    said = r"no environment has moved for 0\.5 s; worker 0, 1 is not here"
    with acting(tmp_path, num_workers=2, timeout_s=0.5) as server, pytest.raises(TimeoutError, match=said):
        server.learn_from((policy(0),))


def test_time_in_a_queue_does_not_count_and_is_told_once(tmp_path, caplog):
    """The time-out is as long as from one look to the next: it would end the wait at the second."""
    looks = []
    started = keeper.Started(lambda: None, lambda: None, lambda: (looks.append(1), len(looks) < 8)[1])
    said = r"no environment has moved for 0\.1 s; worker 0 is not here"
    with (
        acting(tmp_path, start=lambda folder: lambda index: started, timeout_s=0.1) as server,
        pytest.raises(TimeoutError, match=said),
    ):
        server.learn_from((policy(0),))
    assert len(looks) >= 8
    assert [record.getMessage() for record in caplog.records] == ["workers wait in Slurm's queue, and the run for them"]


@pytest.mark.parametrize("num_steps", [0, 1, NUM_STEPS - 1])
def test_who_is_lost_again_and_again_without_an_unroll_ends_the_run(tmp_path, monkeypatch, num_steps):
    """Whoever starts it, and however far it comes; one that makes an unroll each time may be lost as often as it likes."""
    monkeypatch.setattr(acting_module, "LOSSES", 3)
    lives: list[int] = []

    def live() -> None:
        for num in [*[NUM_STEPS] * 4, *[num_steps] * 2]:  # the last whole one is lost, too
            call = Call(tmp_path).hello()
            lives.append(num)
            for step in range(num + 1):
                call.answer()
                call.step(0, len(lives), step)
            call.answer()
            call.close()

    def learn(server) -> None:
        for update in range(10):
            assert_whole(server.learn_from((policy(update),))[0])

    with acting(tmp_path, max_lag=10, timeout_s=5.0) as server:
        threading.Thread(target=live, name="plays").start()
        with pytest.raises(RuntimeError, match=r"worker 0 was lost 3 times in a row before it had made an unroll"):
            learn(server)
        assert len(lives) == 6


def test_an_error_of_the_environment_ends_the_run_with_it(tmp_path):
    with acting(tmp_path) as server:
        call = Call(tmp_path).hello()
        assert call.answer() is Kind.WELCOME
        call.send(wire.write(Kind.FAILED, {"error": "Traceback\nRuntimeError: the game crashed"}))
        with pytest.raises(
            RuntimeError, match=r"worker 0: RuntimeError: the game crashed\nTraceback\nRuntimeError: the game crashed"
        ):
            server.learn_from((policy(0),))
        call.close()


# --- where it listens ------------------------------------------------------------------------------------------------------


def test_the_port_is_free_afterwards(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    for _ in range(2):
        with acting(tmp_path, address=f"127.0.0.1:{port}") as server:
            worker = Plays(tmp_path)
            server.learn_from((policy(0),))
            with pytest.raises(ConfigError, match="not possible to listen on"):
                address.check_here(f"127.0.0.1:{port}")
            with (
                pytest.raises(OSError, match="not possible to listen on"),
                acting(tmp_path / "other", address=f"127.0.0.1:{port}"),
            ):
                pass
        worker.join(10)
        address.check_here(f"127.0.0.1:{port}")
        assert meeting.read(tmp_path / meeting.FOLDER) is None


def test_a_unix_socket(tmp_path):
    place = f"unix:{tmp_path}/socket"
    address.check_here(place)
    with acting(tmp_path, address=place) as server:
        worker = Plays(tmp_path)
        assert_whole(server.learn_from((policy(0),))[0])
        with pytest.raises(ConfigError, match="somebody listens there"):
            address.check_here(place)
    worker.join(10)
    assert not (tmp_path / "socket").exists()


def signed(folder, name: str, *, names: str = "IP:127.0.0.1", days: int = 2) -> tuple[str, str]:
    """(certificate, key) of these names, signed by itself."""
    certificate, key, request = (str(folder / f"{name}.{ending}") for ending in ("pem", "key", "csr"))
    for line in (
        ["req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=rlexp",
         "-addext", f"subjectAltName={names}", "-keyout", key, "-out", request],
        ["x509", "-req", "-in", request, "-signkey", key, "-days", str(days), "-copy_extensions", "copy", "-out", certificate],
    ):  # fmt: skip
        subprocess.run(["openssl", *line], check=True, capture_output=True, timeout=60)
    return certificate, key


def test_tls(tmp_path):
    certificate, key = signed(tmp_path, "ours")
    other, other_key = signed(tmp_path, "others")
    tls = address.check_tls(certificate, key, None, HERE)
    with acting(tmp_path, tls=tls) as server:
        worker = Plays(tmp_path)
        assert_whole(server.learn_from((policy(0),))[0])
        note = meeting.read(tmp_path / meeting.FOLDER)[0]  # type: ignore[index]
        for stranger in (note._replace(authority=None), note._replace(authority=other)):
            call = Call(tmp_path, note=stranger).hello()
            assert call.refused()[0] is Code.UNAVAILABLE
            call.close()
    worker.join(10)
    with pytest.raises(ConfigError, match=r"tls_key: .* is no key"):
        address.check_tls(certificate, other_key, None, HERE)
    with pytest.raises(ConfigError, match=r"tls_certificate: .* cannot be read \(No such file"):
        address.check_tls(str(tmp_path / "none"), key, None, HERE)
    with pytest.raises(ConfigError, match=r"tls_key: this key is missing"):
        address.check_tls(certificate, None, None, HERE)
    with pytest.raises(ConfigError, match=r"tls_authority: .* is no certificate"):
        address.check_tls(certificate, key, key, HERE)


@pytest.mark.parametrize(
    ("listens", "given", "said"),
    [
        (HERE, {"names": "DNS:other.example"}, r"reach the server as '127\.0\.0\.1'.* not valid for '127\.0\.0\.1'"),
        ("[::1]:0", {}, r"reach the server as '::1'.* not valid for '::1'"),
        ("0.0.0.0:0", {}, f"reach the server as '{socket.gethostname()}'.* not valid for '{socket.gethostname()}'"),
        (HERE, {"days": -1}, "certificate has expired"),
        ("unix:/tmp/a", {"names": "DNS:localhost"}, "is for host:port, and algo.source.address is 'unix:/tmp/a'"),
    ],
)
def test_a_certificate_that_workers_would_refuse_is_told_at_once(tmp_path, listens, given, said):
    certificate, key = signed(tmp_path, "ours", **given)
    with pytest.raises(ConfigError, match=rf"^algo\.source\.tls_certificate: '{certificate}' .*{said}") as told:
        address.check_tls(certificate, key, None, listens)
    assert "\n" not in str(told.value)


def test_a_certificate_that_the_authority_did_not_sign_is_told_at_once(tmp_path):
    other, _ = signed(tmp_path, "other")
    with pytest.raises(
        ConfigError, match=rf"^algo\.source\.tls_certificate: .* trust '{other}': self.signed certificate"
    ):
        address.check_tls(*signed(tmp_path, "ours"), other, HERE)


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "127.0.0.1:", ":1", "1.2.3.4:99999", "unix:relative", "http://a:1", "::1:0"]
    + [f"unix:/tmp/a{one}b" for one in ("#", "?", ",", "%", "%20", "\0")],
)
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match=r"^algo\.source\.address: "):
        address.check(text)


def test_addresses():
    for text in ("127.0.0.1:0", "[::1]:0", "localhost:5000", "unix:/tmp/a b:c&=+@;ä"):
        address.check(text)
    assert address.reached_at("127.0.0.1:0", 7) == "127.0.0.1:7"
    assert address.reached_at("[::1]:0", 7) == "[::1]:7"
    assert address.reached_at("0.0.0.0:0", 7) == f"{socket.gethostname()}:7"


def test_messages_are_read_as_they_were_written():
    layout = wire.rows_layout(2, [("uint8", (3, 1)), ("float32", ())], ["score"])
    dice = np.random.default_rng(0)
    arrays = [np.asarray(dice.integers(0, 2, leaf.shape)).astype(leaf.dtype) for leaf in layout.leaves]
    message = wire.pack(Kind.ROWS, 3, layout, arrays)
    assert len(message) == layout.num_bytes
    for ours, theirs in zip(wire.unpack(Kind.ROWS, 3, layout, message), arrays, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(wire.Unreadable, match=r"obs\.0: expected uint8\[2, 3, 1\], got float64"):
        wire.pack(Kind.ROWS, 0, layout, [a.astype(float) if a.dtype == np.uint8 else a for a in arrays])
    tree = {"b": [1, (2,)], "a": 3, "c": None}
    assert wire.leaves_of(tree) == jax.tree.leaves(tree)


def test_before_an_episodes_last_step_its_own_numbers_may_be_none():
    layout = wire.rows_layout(2, [("float32", (1,))], ["known"])
    ones, nan = np.ones(2, np.float32), np.float32("nan")
    lasts = np.array([[False, False], [True, False], [False, True]])
    numbers = np.array([[nan, nan], [7, nan], [nan, 9]], np.float32)
    heard = [
        wire.pack(
            Kind.ROWS, i, layout, wire.row_leaves(TimeStep(ones[:, None], ones, ones, ~last, last, info), ["known"])
        )
        for i, (last, info) in enumerate(zip(lasts, ({"known": x} for x in numbers), strict=True))
    ]
    player = Player(Life(None), 2)
    player.heard = heard
    own: Any = SimpleNamespace(_leaves=wire.rows(layout.leaves, 1), _counted=Counted())
    Acting._count_episodes(own, player)
    np.testing.assert_array_equal(
        own._counted.episodes, [1 + 2, 1 + 2, 7 + 9, 2]
    )  # returns, lengths, its own, how many
