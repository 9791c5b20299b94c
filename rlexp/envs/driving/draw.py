"""Pictures of a scene, the ego vehicle in the middle and upwards. Python, for videos."""

from typing import Any

import numpy as np

from rlexp.envs.driving import traffic
from rlexp.envs.driving.scenario import CARS, LANE_WIDTH, NUM_LANES
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
    lanes = [np.asarray(lane) for lane, exists in zip(scenario.lanes, scenario.exists, strict=True) if exists]
    for colour, width in ((_ROAD, LANE_WIDTH), (_MIDDLE, 0.25)):
        for lane in lanes:
            drawing.line(pixels(lane[:, :2]), fill=colour, width=round(width * _METRE), joint="curve")
    drawing.line(pixels(lanes[0][:, :2]), fill=_ROUTE, width=2)
    shown = np.asarray(traffic.colour(scenario, state.time))
    for lane, line, light in zip(np.asarray(scenario.lanes), np.asarray(scenario.line), shown, strict=True):
        if line < 2 * (len(lane) - 1):
            pose = lane[int(line / 2)]
            left = np.array([-np.sin(pose[2]), np.cos(pose[2])]) * LANE_WIDTH / 2
            drawing.line(pixels([pose[:2] - left, pose[:2] + left]), fill=_LIGHTS[light], width=3)
    cars = np.asarray(traffic.poses(scenario, state.cars))
    present, behind = np.asarray(state.cars.present), np.asarray(traffic.behind_ego())
    for lane in range(NUM_LANES):
        for car in range(CARS):
            if present[lane, car]:
                logged = scenario.logged[lane] and not behind[lane, car]
                vehicle(cars[lane, car, :2], cars[lane, car, 2], _LOGGED if logged else _CAR)
    vehicle(ego.position, heading, _EGO)
    return np.asarray(picture)
