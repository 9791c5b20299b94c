"""The keys of `checkpoint` in the configuration."""

from typing import Literal

from rlexp.config import Count, CountOrZero, Flag, Host, Positive, schema

What = Literal["all", "learner", "params"]


@schema
class Config:
    """When the Run is saved, what is kept, and how much of a checkpoint a resumed run takes."""

    module: Host[str]
    enabled: Flag
    """False never saves: the run can then not be resumed, evaluated or loaded."""
    every_minutes: Positive | None
    """Minutes between saves; null saves only when stopped and at the end."""
    every_updates: Count | None
    """Updates between saves; where it is set, every_minutes is not read."""
    keep_last: Count
    """How many of the newest checkpoints are kept."""
    keep_best: CountOrZero
    """How many of the checkpoints with the highest evaluation return are kept besides."""
    restore: What
    """all goes on bit for bit; learner takes parameters, normaliser and optimiser; params leaves the optimiser out."""
    replay: Flag = True
    """False leaves a replay's memory and its environments out, which may be gigabytes: a resumed run fills it anew."""
