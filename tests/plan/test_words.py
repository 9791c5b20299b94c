"""Numbers are told with what they are and in which unit."""

import pytest

from rlexp.modes.words import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (3e-5, "less than a minute"),
        (59.9, "less than a minute"),
        (60, "1 minute"),
        (90, "1.5 minutes"),
        (3000, "50 minutes"),
        (3590, "1 hour"),
        (3 * 3600, "3 hours"),
        (47 * 3600, "47 hours"),
        (48 * 3600, "2 days"),
        (400 * 86400, "400 days"),
    ],
)
def test_durations_as_one_says_them(seconds, words):
    assert duration(seconds) == words
