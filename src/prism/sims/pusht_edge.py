"""Push-T's ambiguous start (App. B.1, Fig. 5): the agent between block and goal, in front of the T's top edge.

The block lies on the axis of Push-T's mirror symmetry, beyond its goal, with the bar's outer edge towards the goal. The
agent has to walk round it, left or right, to push it back. `edge_start` sweeps its start along the edge; at 0 the whole
scene is its own mirror image, so both ways are equally good. The task `pusht-edge` draws its starts from around there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prism.sims.pusht_features import GOAL

Float = NDArray[np.float64]

AXIS: Float = np.array([np.sqrt(0.5), -np.sqrt(0.5)])  # from the stem to the bar, and on to the agent
SIDE: Float = np.array([-np.sqrt(0.5), -np.sqrt(0.5)])  # left, seen from the agent to the block
BEYOND = 110.0  # how far past the goal the block lies, pixels
GAP = 40.0  # from the bar's edge to the agent's centre
REACH = 60.0  # half the bar: how far along the edge the starts go
_SHIFT, _TURN = 6.0, 0.05  # standard deviations of the block's pose in `pusht-edge`: pixels, radians


def edge_start(offset: float, beyond: float = BEYOND, gap: float = GAP) -> Float:
    """Agent xy, block xy, block angle (5,); at offset 0 its own mirror image."""
    block = GOAL[:2] - beyond * AXIS
    agent = block + gap * AXIS + offset * SIDE
    return np.concatenate([agent, block, GOAL[2:]])


def random_edge_start(seed: int) -> Float:
    """A start of `pusht-edge`: anywhere along the edge, the block a little off its place."""
    rng = np.random.default_rng([seed, 5])
    state = edge_start(rng.uniform(-REACH, REACH), gap=GAP + rng.uniform(0.0, 10.0))
    shift, turn = rng.normal(0.0, _SHIFT, 2), rng.normal(0.0, _TURN)
    moved: Float = state + np.concatenate([shift, shift, [turn]])
    return moved
