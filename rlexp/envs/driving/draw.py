"""Pictures of a scene, the ego vehicle in the middle and upwards. Python, for videos."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.envs.driving import traffic
from rlexp.envs.driving.geometry import SPACING
from rlexp.envs.driving.scenario import CARS, LANE_WIDTH, LENGTH, NO_LIGHT, NUM_LANES
from rlexp.envs.driving.state import State
from rlexp.envs.driving.vehicle import SIZE

_SIDE, _METRE = 360, 4.0  # pixels
_GRASS, _ROAD, _MIDDLE, _ROUTE = (205, 214, 196), (120, 120, 124), (150, 150, 154), (170, 196, 224)
_EGO, _CAR, _LOGGED = (33, 102, 172), (224, 130, 20), (118, 42, 131)
_LIGHTS, _GIVE_WAY = ((26, 152, 80), (254, 224, 55), (215, 48, 39)), (255, 255, 255)

Colour = tuple[int, int, int]


class Sketch:
    """A picture that is being drawn, in metres."""

    def __init__(self, middle: np.ndarray, heading: float, ground: Colour) -> None:
        from PIL import Image, ImageDraw  # which matplotlib needs

        self._middle = middle
        self._back = np.array(
            [[np.sin(heading), -np.cos(heading)], [np.cos(heading), np.sin(heading)]]
        )  # forwards is upwards
        self._picture = Image.new("RGB", (_SIDE, _SIDE), ground)
        self._drawing = ImageDraw.Draw(self._picture)

    def _pixels(self, points: Any) -> list[tuple[float, float]]:
        at = (np.asarray(points) - self._middle) @ self._back.T * _METRE
        return [(_SIDE / 2 + x, 0.65 * _SIDE - y) for x, y in at]

    def line(self, points: Any, colour: Colour, width: int, *, joint: str | None = None) -> None:
        """Through points [N, 2]; the width is in pixels."""
        self._drawing.line(self._pixels(points), fill=colour, width=width, joint=joint)

    def box(self, position: Any, heading: Any, size: Any, colour: Colour) -> tuple[np.ndarray, np.ndarray]:
        """A filled one; gives half of it forwards, and to the left."""
        forwards = np.array([np.cos(heading), np.sin(heading)])
        left = np.array([-forwards[1], forwards[0]])
        front, side = size[0] / 2 * forwards, size[1] / 2 * left
        position = np.asarray(position)
        corners = [position + front + side, position + front - side, position - front - side, position - front + side]
        self._drawing.polygon(self._pixels(corners), fill=colour)
        return front, side

    def vehicle(self, position: Any, heading: Any, size: Any, colour: Colour) -> None:
        """A box with a nose."""
        front, side = self.box(position, heading, size, colour)
        position = np.asarray(position)
        self.line([position + 0.9 * front + 0.8 * side, position + 0.9 * front - 0.8 * side], (255, 255, 255), 2)

    def picture(self) -> np.ndarray:
        """uint8 [360, 360, 3], 90 m wide."""
        return np.asarray(self._picture)


def draw(state: State) -> np.ndarray:
    """uint8 [360, 360, 3], 90 m wide: lanes, the route, lines with their lights, or white where one gives way, and vehicles."""
    scenario, ego = state.scenario, state.ego
    placed, driven, time = jax.tree.map(jnp.asarray, (scenario, state.cars, state.time))  # a film's states are NumPy's
    sketch = Sketch(np.asarray(ego.position), float(np.asarray(ego.heading)), _GRASS)
    points = np.stack([scenario.lanes.x, scenario.lanes.y], axis=-1)
    lanes = [lane for lane, exists in zip(points, scenario.exists, strict=True) if exists]
    for colour, width in ((_ROAD, LANE_WIDTH), (_MIDDLE, 0.25)):
        for lane in lanes:
            sketch.line(lane, colour, round(width * _METRE), joint="curve")
    sketch.line(lanes[0], _ROUTE, 2)
    shown = np.asarray(traffic.colour(placed, time))
    colours = [
        _GIVE_WAY if light == NO_LIGHT else _LIGHTS[now] for light, now in zip(scenario.light, shown, strict=True)
    ]
    for lane, line, heading, colour in zip(
        points, np.asarray(scenario.line), scenario.lanes.heading, colours, strict=True
    ):
        if line < LENGTH:
            at = int(line / SPACING)
            left = np.array([-np.sin(heading[at]), np.cos(heading[at])]) * LANE_WIDTH / 2
            sketch.line([lane[at] - left, lane[at] + left], colour, 3)
    cars = traffic.places(placed, driven)
    logged = np.broadcast_to(
        np.asarray(scenario.logged)[:, None] & ~np.asarray(traffic.behind_ego()), (NUM_LANES, CARS)
    )
    for position, angle, present, log in zip(
        np.asarray(cars.position), cars.heading, np.ravel(state.cars.present), logged.ravel(), strict=True
    ):
        if present:
            sketch.vehicle(position, angle, SIZE, _LOGGED if log else _CAR)
    sketch.vehicle(ego.position, ego.heading, SIZE, _EGO)
    return sketch.picture()
