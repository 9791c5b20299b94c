"""The rate limiter: Reverb's rules, threads that wait, and none that waits for ever."""

import itertools
import math
import threading

import pytest

from rlexp.config import ConfigError
from rlexp.replay.rate_limiter import Closed, Counts, RateLimiter, can_insert, can_sample, limits


def made(samples_per_insert: float | None = 2.0, min_size: int = 3, error_buffer: float | None = 4.0):
    return limits(samples_per_insert=samples_per_insert, min_size=min_size, error_buffer=error_buffer, path="replay")


def test_the_rules_are_reverbs():
    """inserts - deletes >= min_size and inserts * spi - samples - n >= min_diff; (inserts + n) * spi - samples <= max_diff."""
    found = made()
    assert (found.min_diff, found.max_diff) == (2.0, 10.0)
    for inserts, samples, deletes, num in itertools.product(range(9), range(20), range(4), (1, 3)):
        counts = Counts(inserts, samples, deletes)
        sample = inserts - deletes >= 3 and inserts * 2.0 - samples - num >= 6.0 - 4.0
        insert = inserts + num - deletes <= 3 or (inserts + num) * 2.0 - samples <= 6.0 + 4.0
        assert can_sample(found, counts, num) == sample
        assert can_insert(found, counts, num) == insert


def test_without_a_ratio_only_the_least_size_is_waited_for():
    found = made(samples_per_insert=None, error_buffer=None)
    assert not can_sample(found, Counts(2))
    assert can_sample(found, Counts(3, samples=10**9))
    assert can_insert(found, Counts(10**9))


def test_two_threads_keep_to_the_ratio():
    limiter, worst = RateLimiter(made()), []

    def act() -> None:
        for _ in range(300):
            limiter.insert(timeout_s=60.0)

    def learn() -> None:
        for _ in range(590):
            limiter.sample(timeout_s=60.0)
            worst.append(limiter.counts)

    threads = [threading.Thread(target=run) for run in (act, learn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert limiter.counts == Counts(300, 590, 0)
    assert all(0 <= 2.0 * c.inserts - c.samples <= 10.0 for c in worst)


def test_a_wait_ends_at_its_deadline_and_says_why():
    limiter = RateLimiter(made(), Counts(inserts=2))
    with pytest.raises(TimeoutError, match="1 samples after 2 inserts, 0 samples, 0 deletes are not within"):
        limiter.sample(timeout_s=0.01)
    assert limiter.counts == Counts(inserts=2)
    limiter.insert(timeout_s=0.0)
    limiter.sample(timeout_s=0.0)
    limiter.delete(2)
    with pytest.raises(TimeoutError):  # below the least size again
        limiter.sample(timeout_s=0.0)


def test_closing_ends_every_wait():
    limiter, heard = RateLimiter(made()), []

    def wait() -> None:
        with pytest.raises(Closed):
            limiter.sample(timeout_s=math.inf)
        heard.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    limiter.close()
    thread.join(60)
    assert heard == [True]
    with pytest.raises(Closed):
        limiter.insert(timeout_s=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(min_size=0), "replay.min_size: 0 is not allowed; expected at least 1"),
        (dict(samples_per_insert=-1.0), "replay.samples_per_insert: -1 is not allowed; expected more than 0"),
        (dict(samples_per_insert=math.nan), "replay.samples_per_insert: nan is not allowed; expected more than 0"),
        (
            dict(error_buffer=1.5),
            "replay.error_buffer: 1.5 is not allowed; with samples_per_insert 2 less than 2 can block inserts and samples "
            "for ever",
        ),
        (dict(samples_per_insert=None), "replay.error_buffer: 4 means nothing without replay.samples_per_insert"),
    ],
)
def test_settings_that_block_for_ever_are_told(changes, message):
    with pytest.raises(ConfigError) as error:
        made(**changes)
    assert str(error.value) == message
