"""What signals ask of a run, in this process."""

import os
import signal

import pytest

from rlexp.machine import stop


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of pytest's own ignore it
    yield now
    signal.signal(signal.SIGINT, before)


def press(clock, at: float) -> None:
    clock[0] = 100.0 + at
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("times", "ends"),
    [
        ([0.0], False),
        ([0.0, 0.1], False),  # one press, which a terminal and whoever started us pass on
        ([0.0, 1.1], True),
        ([0.0, 0.5, 1.1], True),  # pressed on and on
        ([0.0, *(0.3 * i for i in range(1, 4)), 1.2], True),
    ],
)
def test_a_second_ctrl_c_a_second_after_the_first_ends_at_once(clock, times, ends):
    def end():
        with stop.stop_on_signals() as asked:
            for at in times[:-1]:
                press(clock, at)
                assert asked.reason == "SIGINT"
            press(clock, times[-1])

    if ends:
        with pytest.raises(KeyboardInterrupt):
            end()
    else:
        end()


def test_after_another_signal_the_first_ctrl_c_is_one(clock):
    with stop.stop_on_signals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        press(clock, 5.0)
        assert asked.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            press(clock, 6.5)
