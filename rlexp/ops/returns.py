"""Returns and advantages of one environment's trajectory: unbatched, time first. The caller vmaps.

Three facts of `types.Trajectory` make them right at the end of an episode:
  * `discount` is 0 only at true termination, so a truncated episode still bootstraps;
  * the true last observation is a row of its own, so what it bootstraps from is that observation's value;
  * that row has valid 0, and no sum goes on past it, so nothing leaks from the next episode.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Number = float | Float[Array, ""]  # a Python number or a traced hyperparameter


def gae(
    reward: Float[Array, " T"],
    *,
    discount: Float[Array, " T"],
    valid: Float[Array, " T"],
    value: Float[Array, " T+1"],
    gamma: Number,
    lam: Number,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), with truncation and padding rows.

        delta_t = r_t + gamma d_t v_{t+1} - v_t
        A_t     = valid_t (delta_t + gamma lam d_t A_{t+1}),   A_T = 0
        target  = A_t + v_t

    The last transition of an episode, t, is followed by the row of its last observation, whose `valid` is 0, hence
    A_{t+1} = 0: at a truncation (d_t = 1) the advantage is r_t + gamma v(last observation) - v_t, at a termination
    (d_t = 0) it is r_t - v_t. The padding row itself gets advantage 0 and its own value for a target.

    Args:
      reward: reward of the transition t -> t+1.
      discount: 0 where that transition truly ended the episode, else 1.
      valid: 1, or 0 on the row between an episode's last step and its reset.
      value: estimates of the rows' observations; row T is the bootstrap of the window.
      gamma: discount of one step.
      lam: weight of the longer returns.

    Returns:
      The advantages, and the targets of the value function (the lambda-returns). No gradient is stopped.
    """
    assert_rows(reward, discount, valid)
    assert_rows(value, length=reward.shape[0] + 1)
    delta = reward + gamma * discount * value[1:] - value[:-1]
    decay = gamma * lam * discount

    def backward(advantage: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        delta_t, decay_t, valid_t = row
        advantage = valid_t * (delta_t + decay_t * advantage)
        return advantage, advantage

    _, advantage = jax.lax.scan(backward, jnp.zeros((), jnp.float32), (delta, decay, valid), reverse=True)
    return advantage, advantage + value[:-1]


def lambda_returns(
    reward: Float[Array, " T"],
    *,
    discount: Float[Array, " T"],
    valid: Float[Array, " T"],
    bootstrap: Float[Array, " T"],
    gamma: Number,
    lam: Number,
) -> Float[Array, " T"]:
    """Lambda-returns over given bootstrap values, such as Q(lambda) of PQN (Gallici et al. 2024, eq. 9).

        G_t = r_t + gamma d_t ((1 - lam) bootstrap_t + lam G_{t+1})

    with G_{t+1} replaced by bootstrap_t at the end of the window, and where row t+1 is the last observation of an
    episode (valid 0): there is no longer return than that.

    Args:
      reward: reward of the transition t -> t+1.
      discount: 0 where that transition truly ended the episode, else 1.
      valid: 1, or 0 on the row between an episode's last step and its reset.
      bootstrap: the value of row t+1, such as max_a Q(s_{t+1}, a).
      gamma: discount of one step.
      lam: 0 is the one-step target, 1 the longest return.

    Returns:
      The targets. What stands on rows with valid 0 is finite and means nothing.
    """
    assert_rows(reward, discount, valid, bootstrap)
    goes_on = jnp.concatenate([valid[1:], jnp.zeros((1,), jnp.float32)]) > 0  # is G_{t+1} a return of this episode?

    def backward(longer: Array, row: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        reward_t, discount_t, bootstrap_t, goes_on_t = row
        longer = jnp.where(goes_on_t, longer, bootstrap_t)
        target = reward_t + gamma * discount_t * ((1 - lam) * bootstrap_t + lam * longer)
        return target, target

    rows = (reward, discount, bootstrap, goes_on)
    _, target = jax.lax.scan(backward, jnp.zeros((), jnp.float32), rows, reverse=True)
    return target


def n_step_return(
    reward: Float[Array, " n"],
    *,
    discount: Float[Array, " n"],
    valid: Float[Array, " n"],
    bootstrap: Float[Array, " n"],
    gamma: Number,
) -> Float[Array, ""]:
    """The n-step return of the first row of a window of n transitions (Sutton & Barto 2018, eq. 7.1).

    Rewards are summed until the window or the episode ends, and the value of the row reached there is added, unless a
    termination set the discount to 0 on the way. An episode that is truncated inside the window thus gives a shorter
    return, which bootstraps from its true last observation.

    Args:
      reward: reward of the transition t -> t+1.
      discount: 0 where that transition truly ended the episode, else 1.
      valid: 1, or 0 on the row between an episode's last step and its reset.
      bootstrap: the value of row t+1.
      gamma: discount of one step.

    Returns:
      The target of row 0; it means nothing where `valid[0]` is 0.
    """
    return lambda_returns(reward, discount=discount, valid=valid, bootstrap=bootstrap, gamma=gamma, lam=1.0)[0]


def n_step_returns(
    reward: Float[Array, " T"],
    *,
    discount: Float[Array, " T"],
    valid: Float[Array, " T"],
    bootstrap: Float[Array, " T"],
    gamma: Number,
    n: int,
) -> Float[Array, " T"]:
    """`n_step_return` of every row of a window; the last n - 1 rows, whose returns it cuts short, bootstrap from its end."""
    assert_rows(reward, discount, valid, bootstrap)
    # With valid 0 beyond the window no return goes on there.
    padded = [jnp.pad(x, (0, n - 1)) for x in (reward, discount, valid, bootstrap)]
    at = jnp.arange(reward.shape[0], dtype=jnp.int32)[:, None] + jnp.arange(n, dtype=jnp.int32)
    return jax.vmap(lambda r, d, v, b: n_step_return(r, discount=d, valid=v, bootstrap=b, gamma=gamma))(
        *(x[at] for x in padded)
    )


def n_step_row(valid: Float[Array, " n"]) -> Int[Array, ""]:
    """The row whose value the n-step return takes, from 1: the window's last, or that of the episode's last observation."""
    assert_rows(valid)
    return 1 + jnp.sum(jnp.cumprod(valid[1:]), dtype=jnp.int32)


def assert_rows(*arrays: Array, length: int | None = None) -> None:
    """All are float32 and of rank 1, with as many rows as the first, or `length`."""
    length = arrays[0].shape[0] if length is None else length
    for array in arrays:
        assert array.dtype == jnp.float32, f"expected float32, got {array.dtype}"
        assert array.shape == (length,), f"expected shape ({length},), got {array.shape}; vmap over further axes"
