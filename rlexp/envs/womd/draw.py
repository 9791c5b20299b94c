"""Pictures of a recorded scene, the ego vehicle in the middle and upwards. Python, for videos."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlexp.envs.driving.draw import Sketch
from rlexp.envs.womd.scenes import NOWHERE, NUM_STEPS, Scene

_GROUND, _EDGE, _LANE, _ROUTE = (214, 214, 214), (60, 60, 64), (160, 160, 164), (110, 160, 210)
_EGO, _OTHER = (33, 102, 172), (224, 130, 20)
_LIGHTS = ((26, 152, 80), (254, 224, 55), (215, 48, 39))


def drawer(given: Scene) -> Callable[[Any, Any], np.ndarray]:
    """(state, params) -> uint8 [360, 360, 3], 90 m wide: edges of the road, lanes, the route, lights, and who is there."""

    def draw(state: Any, params: Any) -> np.ndarray:
        del params
        scenes = jax.tree.map(np.asarray, given)
        which, step = int(state.scene), min(int(state.step), NUM_STEPS - 1)
        sketch = Sketch(np.asarray(state.ego.position), float(state.ego.heading), _GROUND)
        route = np.stack([scenes.route.x[which], scenes.route.y[which]], axis=-1)
        sketch.line(route, _ROUTE, 3)
        for points, colour, width in (
            (np.stack([scenes.lanes.x[which], scenes.lanes.y[which]], axis=-1), _LANE, 0.3),
            (scenes.edges[which], _EDGE, 0.5),
        ):
            for point in points[points[:, 0] < NOWHERE]:
                sketch.box(point, 0.0, (width, width), colour)
        for line, colour, lit in zip(
            scenes.line[which], scenes.colour[which, step], scenes.lit[which, step], strict=True
        ):
            at = int(line / 2.0)
            if lit and at < len(route):
                heading = scenes.route.heading[which, at]
                across = np.array([-np.sin(heading), np.cos(heading)]) * 2.0
                sketch.line(np.stack([route[at] - across, route[at] + across]), _LIGHTS[colour], 3)
        for i in np.flatnonzero(scenes.present[which, step]):
            sketch.vehicle(
                scenes.position[which, step, i], scenes.heading[which, step, i], scenes.sizes[which, i], _OTHER
            )
        sketch.vehicle(state.ego.position, state.ego.heading, state.size, _EGO)
        return sketch.picture()

    return draw
