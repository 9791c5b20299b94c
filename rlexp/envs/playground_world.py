"""MuJoCo Playground's tasks as worlds for terms."""

from collections.abc import Mapping
from typing import Any

from rlexp.envs.base import Env
from rlexp.envs.body_world import another, body_world, scaled
from rlexp.envs.managers.world import World
from rlexp.envs.suites import imported

# What a factor multiplies, by the names of MJX's Model. A motor's strength is that of gain and bias together, and the most that it
# gives: so it is for those that are told a force, and for those that are told a position.
_FACTORS = {
    "mass": ("body_mass", "body_inertia", "body_subtreemass"),
    # The second is of two that a model names as a pair, such as the feet of G1 and the floor.
    "friction": ("geom_friction", "pair_friction"),
    "gravity": ("opt.gravity",),
    "gear": ("actuator_gainprm", "actuator_biasprm", "actuator_forcerange", "jnt_actfrcrange"),
}


def playground_world(config: Any, task: Any, env: Env) -> World:
    """A task of Playground without its task."""
    mjx = imported("mujoco.mjx", extra="playground")

    def like(params: Mapping[str, Any]) -> Any:
        return another(task, _mjx_model=task.mjx_model.tree_replace(scaled(task.mjx_model, _FACTORS, params)))

    def joints(state: Any) -> tuple[Any, Any]:
        return state.data.qpos, state.data.qvel

    def moved(own: Any, state: Any, speeds: Any) -> Any:
        return state.replace(data=mjx.forward(own.mjx_model, state.data.replace(qvel=speeds)))

    return body_world(config, task, env, like=like, joints=joints, moved=moved)
