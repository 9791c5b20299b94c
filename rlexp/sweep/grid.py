"""`sweeper=grid`: no search space. The one trial is multiplied by what the command line sweeps over, as by Hydra's own sweeper."""

from rlexp.config import Host, schema
from rlexp.sweep.sweepers import Batches, Sweep, Sweeper


@schema
class Config:
    """Nothing to set."""

    module: Host[str]


def make(config: Config, sweep: Sweep) -> Sweeper:
    """One batch of one trial without parameters."""
    del config, sweep
    return Sweeper({}, batches())


def batches() -> Batches:
    """The one batch."""
    yield [()]
