"""Our side of gpu.py, in processes of its own: trainings for each seed asked, or what a step of the rollout costs.

Reads {"do", ...} as JSON from the command line. "train" answers seeds on standard input (`benchmarks.worker`), "costs" once.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.measure import BENCH, Sample
from benchmarks.work import built, packed, sample_of
from benchmarks.worker import answer

REPETITIONS = 5


def main() -> None:
    """What is asked for."""
    asked = json.loads(sys.argv[1])
    if asked["do"] == "train":
        answer(lambda seed: _train(asked["overrides"], seed))
    else:
        print(json.dumps({"sample": _costs(asked["overrides"], asked["num_envs"])}))


def _train(overrides: list[str], seed: int) -> Sample:
    folder = BENCH / "runs" / f"gpu{os.getpid()}"
    summary = packed(overrides, [seed], folder)[0]
    shutil.rmtree(folder)
    return sample_of(seed, summary)


def _costs(overrides: list[str], sizes: list[int]) -> list[Sample]:
    """For each number of environments: seconds of a chunk, and of its halves; what the rollout's loop consists of. Medians of
    calls that take turns."""
    import jax

    from rlexp.modes.profile import halves
    from rlexp.training import program
    from rlexp.training.layout import layout_of

    found = []
    for num_envs in sizes:
        (lead,) = built([[*overrides, f"algo.num_envs={num_envs}"]])
        layout = layout_of([lead])
        traced = program.trace([lead], layout)
        compiled = traced.compile()
        run, shared = compiled.init(), jax.device_put(lead.shared, layout.replicated)
        rollout_of, learn = halves(lead, layout, traced)
        collect = rollout_of.lower(*run, shared).compile()
        text = collect.as_text() or ""
        rounds = []
        for i in range(REPETITIONS + 2):
            chunk_s, (run, _) = _timed(compiled.chunk, run, 1)
            rollout_s, (data, batch, _) = _timed(collect, *run, shared)
            update_s, (run, _) = _timed(learn, run._replace(data=data), batch, shared)
            if i > 1:  # the first ones compile
                rounds.append((chunk_s, rollout_s, update_s))
        chunk_s, rollout_s, update_s = (sorted(x)[len(x) // 2] for x in zip(*rounds, strict=True))
        steps = lead.env_steps_per_update
        found.append(
            {
                "num_envs": num_envs,
                "env_steps_per_second": steps / chunk_s,
                "rollout_env_steps_per_second": steps / rollout_s,
                "rollout_step_us": rollout_s / (steps / num_envs) * 1e6,
                "update_s": update_s,
                "loop": _loop(text),
            }
        )
        if keep := os.environ.get("KEEP_HLO"):
            Path(keep).mkdir(parents=True, exist_ok=True)
            (Path(keep) / f"rollout-{num_envs}.txt").write_text(text)
            (Path(keep) / f"chunk-{num_envs}.txt").write_text(compiled.executable.as_text() or "")
        compiled.close()
    return found


def _timed(f: Any, *args: Any) -> tuple[float, Any]:
    import jax

    began = time.perf_counter()
    out = jax.block_until_ready(f(*args))
    return time.perf_counter() - began, out


def _loop(text: str) -> dict[str, int]:
    """{operation: how many} in the largest body of a loop of a compiled program: what is started for each of its turns.

    A command buffer is a call, and starts all that it calls at once; its operations are counted, and it is.
    """
    from rlexp.modes import hlo

    module = hlo.parse(text)

    def counted(computation: str) -> Counter[str]:
        total = Counter[str]()
        for instruction in module.computations[computation].instructions.values():
            if instruction.op not in ("parameter", "tuple", "get-tuple-element", "constant", "bitcast"):
                total[instruction.op] += 1
            if instruction.op == "call":
                total += counted(hlo.called(instruction, "to_apply"))
        return total

    loops = [x for each in module.computations.values() for x in each.instructions.values() if x.op == "while"]
    bodies = [counted(hlo.called(loop, "body")) for loop in loops]
    return dict(max(bodies, key=lambda body: body.total(), default=Counter()))


if __name__ == "__main__":
    main()
