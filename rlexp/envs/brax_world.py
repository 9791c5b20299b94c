"""brax's tasks as worlds for terms."""

from collections.abc import Mapping
from typing import Any

from rlexp.envs.base import Env
from rlexp.envs.body_world import another, body_world, scaled
from rlexp.envs.managers.world import World

# What a factor multiplies, by the names of brax's System; the backends read one or the other.
_FACTORS = {
    "mass": (
        "link.inertia.mass",
        "link.inertia.i",
        "body_mass",
        "body_inertia",
        "body_subtreemass",
    ),
    "friction": ("geom_friction", "pair_friction"),
    "gravity": ("gravity", "opt.gravity"),
    "gear": ("actuator.gear", "actuator_gear"),
}


def brax_world(config: Any, task: Any, env: Env) -> World:
    """A task of brax without its task."""

    def like(params: Mapping[str, Any]) -> Any:
        return another(task, sys=task.sys.tree_replace(scaled(task.sys, _FACTORS, params)))

    def joints(state: Any) -> tuple[Any, Any]:
        return state.pipeline_state.q, state.pipeline_state.qd

    def moved(own: Any, state: Any, speeds: Any) -> Any:
        return state.replace(pipeline_state=own.pipeline_init(state.pipeline_state.q, speeds))

    return body_world(config, task, env, like=like, joints=joints, moved=moved)
