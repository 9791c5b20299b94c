"""V-trace: the targets and advantages of a policy, from what an older one did. Unbatched, time first; the caller vmaps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlexp.ops.returns import Number, assert_rows


class VTrace(NamedTuple):
    """Both are constants: no gradient goes through them."""

    target: Float[Array, " T"]  # vs, which the value is to become
    advantage: Float[Array, " T"]  # what the policy gradient is weighted by


def vtrace(
    reward: Float[Array, " T"],
    *,
    discount: Float[Array, " T"],
    valid: Float[Array, " T"],
    value: Float[Array, " T+1"],
    log_ratio: Float[Array, " T"],
    gamma: Number,
    lam: Number,
    rho_bar: Number,
    c_bar: Number,
    rho_bar_pg: Number,
) -> VTrace:
    """Espeholt et al. 2018, arXiv:1802.01561, equation 1 and remark 2, with truncation and padding rows as in `ops.returns`.

        rho_t   = min(rho_bar, pi_t / mu_t),   c_t = lam min(c_bar, pi_t / mu_t)
        delta_t = rho_t (r_t + gamma d_t V_{t+1} - V_t)
        vs_t    = V_t + e_t,   e_t = valid_t (delta_t + gamma d_t c_t e_{t+1}),   e_T = 0
        A_t     = valid_t min(rho_bar_pg, pi_t / mu_t) (r_t + gamma d_t vs_{t+1} - V_t)

    The row of an episode's last observation has valid 0, so that vs is its own value there: the transition before it bootstraps
    from that at a truncation (d_t = 1), and from nothing at a termination (d_t = 0).

    Args:
      reward: reward of the transition t -> t+1.
      discount: 0 where that transition truly ended the episode, else 1.
      valid: 1, or 0 on the row between an episode's last step and its reset.
      value: estimates of the rows' observations; row T is the bootstrap of the window.
      log_ratio: log pi - log mu of the action taken: of the policy that learns, and of the one that acted.
      gamma: discount of one step.
      lam: weight of the longer returns.
      rho_bar: clips the ratio at a temporal difference; it decides which policy's value is learnt.
      c_bar: clips the ratio that carries it to earlier rows; it decides how fast.
      rho_bar_pg: clips the ratio of the policy gradient.
    """
    assert_rows(reward, discount, valid, log_ratio)
    assert_rows(value, length=reward.shape[0] + 1)
    value, ratio = jax.lax.stop_gradient((value, jnp.exp(log_ratio)))
    decay = gamma * discount
    delta = jnp.minimum(rho_bar, ratio) * (reward + decay * value[1:] - value[:-1])
    carried = decay * lam * jnp.minimum(c_bar, ratio)

    def backward(error: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        delta_t, carried_t, valid_t = row
        # Chosen, not multiplied: what stands on a row that is no transition may be anything, an infinite ratio too.
        error = jnp.where(valid_t > 0, delta_t + carried_t * error, 0.0)
        return error, error

    _, error = jax.lax.scan(backward, jnp.zeros((), jnp.float32), (delta, carried, valid), reverse=True)
    target = value[:-1] + error
    following = jnp.concatenate([target[1:], value[-1:]])
    advantage = jnp.minimum(rho_bar_pg, ratio) * (reward + decay * following - value[:-1])
    return VTrace(target, jnp.where(valid > 0, advantage, 0.0))
