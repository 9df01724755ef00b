"""A policy of `prism export RUN --onnx FOLDER` on a robot that has neither PRISM nor PyTorch.

    pip install numpy onnxruntime safetensors
    python onnx_robot.py FOLDER            plans for readings of zeros: put your own in

metadata.json of the folder says all of this in words.
"""

import json
import sys
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession
from safetensors.numpy import load_file


class Exported:
    """`act` at every step; a new object for each episode."""

    def __init__(self, folder):
        self.about = json.loads((folder / "metadata.json").read_text())
        self.graphs = {name: InferenceSession(folder / name) for name in self.about["graphs"]}
        self.absent = load_file(folder / "absent.safetensors")
        self.scale, self.moves, self.center = (
            np.array(self.about[f"action_{k}"]) for k in ("scale", "moves", "center")
        )
        self.window, self.seen, self.plan, self.done = [], [], None, 0
        self.rng = np.random.default_rng(0)

    def run(self, graph, **inputs):
        return self.graphs[graph].run(None, inputs)[0]

    def features(self, sensor):
        """Of the newest time step: one reading, or the latest `history` of them, the newest last."""
        past = [seen.get(sensor["name"]) for seen in self.seen[-max(sensor.get("history", 0), 1) :]]
        known = [i for i, reading in enumerate(past) if reading is not None]
        if not known:
            return self.absent[sensor["name"]]  # a learned vector takes its place
        filled = [past[max([k for k in known if k <= i], default=known[0])] for i in range(len(past))]
        stream = np.stack(filled) if len(past) > 1 else filled[0]
        return self.run(sensor["graph"], stream=stream[None])[0]

    def observe(self, observation):
        """One reading of each sensor; one that is missing is left out. The first of an episode fills the window."""
        horizon, longest = self.about["obs_horizon"], max(s.get("history", 0) for s in self.about["sensors"])
        self.seen = [*(self.seen or [observation] * (horizon + longest)), observation][-(horizon + longest) :]
        parts = [self.features(sensor) for sensor in self.about["sensors"]]
        step = self.run("fusion.onnx", features=np.concatenate(parts)[None])[0]
        self.window = [*(self.window or [step] * horizon), step][-horizon:]

    def candidates(self, count=16):
        """(K, Tp, Da) in robot units, all of them possible plans."""
        latents = self.rng.standard_normal((1, count, self.about["latent"]), np.float32)
        plans = self.run("plan.onnx", steps=np.stack(self.window)[None], latents=latents)[0].astype(float)
        newest = [seen.get(self.about["anchor"]) for seen in self.seen[-self.about["obs_horizon"] :]]
        if newest := [reading for reading in newest if reading is not None]:
            anchor = np.array(newest[-1][: self.about["action_dim"]], float)
            for first, reference in zip(self.about["quaternions"], self.about["quaternion_reference"], strict=True):
                anchor[first : first + 4] *= 1 if anchor[first : first + 4] @ reference >= 0 else -1
            plans += (anchor - self.center) / self.scale * self.moves
        plans = plans * self.moves * self.scale + self.center
        for first in self.about["quaternions"]:
            plans[..., first : first + 4] /= np.linalg.norm(plans[..., first : first + 4], axis=-1, keepdims=True)
        return plans

    def act(self, observation, count=16):
        """The next action (Da,): every exec_horizon steps a new plan, the one nearest to the rest of the old one."""
        self.observe(observation)
        if self.plan is None or self.done == self.about["exec_horizon"]:
            plans, rest = self.candidates(count), [] if self.plan is None else self.plan[self.done :]
            far = np.abs(plans[:, : len(rest)] - rest) / self.scale if len(rest) else np.zeros((count, 1, 1))
            self.plan, self.done = plans[far.mean((1, 2)).argmin()], 0
        self.done += 1
        return self.plan[self.done - 1]


if __name__ == "__main__":
    policy = Exported(Path(sys.argv[1]))
    pixels = ("rgb", "tactile")
    here = [sensor for sensor in policy.about["sensors"] if sensor["graph"]]  # sound and text have none: leave them out
    zeros = {s["name"]: np.zeros(s["shape"], np.uint8 if s["kind"] in pixels else np.float32) for s in here}
    for _ in range(3):
        print(policy.act(zeros))
