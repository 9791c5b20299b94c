"""Pictures of a scene, the ego vehicle in the middle and upwards. Python, for videos."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.envs.driving import traffic
from rlexp.envs.driving.geometry import SPACING
from rlexp.envs.driving.scenario import CARS, LANE_WIDTH, LENGTH, NUM_LANES
from rlexp.envs.driving.state import State
from rlexp.envs.driving.vehicle import SIZE

_SIDE, _METRE = 360, 4.0  # pixels
_GRASS, _ROAD, _MIDDLE, _ROUTE = (205, 214, 196), (120, 120, 124), (150, 150, 154), (170, 196, 224)
_EGO, _CAR, _LOGGED = (33, 102, 172), (224, 130, 20), (118, 42, 131)
_LIGHTS = ((26, 152, 80), (254, 224, 55), (215, 48, 39))


def draw(state: State) -> np.ndarray:
    """uint8 [360, 360, 3], 90 m wide: lanes, the route, lines with their lights, and vehicles."""
    from PIL import Image, ImageDraw  # which matplotlib needs

    scenario, ego = state.scenario, state.ego
    placed, driven, time = jax.tree.map(jnp.asarray, (scenario, state.cars, state.time))  # a film's states are NumPy's
    heading = float(np.asarray(ego.heading))
    back = np.array([[np.sin(heading), -np.cos(heading)], [np.cos(heading), np.sin(heading)]])  # forwards is upwards

    def pixels(points: Any) -> list[tuple[float, float]]:
        at = (np.asarray(points) - np.asarray(ego.position)) @ back.T * _METRE
        return [(_SIDE / 2 + x, 0.65 * _SIDE - y) for x, y in at]

    def vehicle(position: Any, heading: Any, colour: tuple[int, int, int]) -> None:
        forwards = np.array([np.cos(heading), np.sin(heading)])
        left = np.array([-forwards[1], forwards[0]])
        front, side = SIZE[0] / 2 * forwards, SIZE[1] / 2 * left
        position = np.asarray(position)
        drawing.polygon(
            pixels(
                [position + front + side, position + front - side, position - front - side, position - front + side]
            ),
            fill=colour,
        )
        nose = [position + 0.9 * front + 0.8 * side, position + 0.9 * front - 0.8 * side]
        drawing.line(pixels(nose), fill=(255, 255, 255), width=2)

    picture = Image.new("RGB", (_SIDE, _SIDE), _GRASS)
    drawing = ImageDraw.Draw(picture)
    points = np.stack([scenario.lanes.x, scenario.lanes.y], axis=-1)
    lanes = [lane for lane, exists in zip(points, scenario.exists, strict=True) if exists]
    for colour, width in ((_ROAD, LANE_WIDTH), (_MIDDLE, 0.25)):
        for lane in lanes:
            drawing.line(pixels(lane), fill=colour, width=round(width * _METRE), joint="curve")
    drawing.line(pixels(lanes[0]), fill=_ROUTE, width=2)
    shown = np.asarray(traffic.colour(placed, time))
    for lane, line, heading, light in zip(
        points, np.asarray(scenario.line), scenario.lanes.heading, shown, strict=True
    ):
        if line < LENGTH:
            at = int(line / SPACING)
            left = np.array([-np.sin(heading[at]), np.cos(heading[at])]) * LANE_WIDTH / 2
            drawing.line(pixels([lane[at] - left, lane[at] + left]), fill=_LIGHTS[light], width=3)
    cars = traffic.places(placed, driven)
    logged = np.broadcast_to(
        np.asarray(scenario.logged)[:, None] & ~np.asarray(traffic.behind_ego()), (NUM_LANES, CARS)
    )
    for position, angle, present, log in zip(
        np.asarray(cars.position), cars.heading, np.ravel(state.cars.present), logged.ravel(), strict=True
    ):
        if present:
            vehicle(position, angle, _LOGGED if log else _CAR)
    vehicle(ego.position, ego.heading, _EGO)
    return np.asarray(picture)
