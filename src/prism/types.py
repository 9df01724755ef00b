"""The data types of the system, and the legend of dimensions.

Legend: B batch, G global batch (all ranks), K candidates, To / Tp / Ta observation, prediction and
execution horizons, Da action dimension, S context tokens, D width, H heads, M random features, Z latent.

| stage       | name                                     | shape, units                                |
| ----------- | ---------------------------------------- | ------------------------------------------- |
| disk        | Episode                                  | streams (T, ...), actions (T, Da), robot units |
| sample      | Window                                   | streams (To, ...), actions (Tp, Da), action_valid (Tp) |
| batch       | Batch                                    | + B; images still uint8                     |
| encoder     | context                                  | (B, S, D); S = To, or context_tokens with mixing |
| generator   | candidates                               | (B, K, Tp, Da), normalised                  |
| distances   | own_distance, batch_distance             | (B, K), (B, K, G)                           |
| sample      | candidates                               | (B, K, Tp, Da), robot units                 |
| controller  | plan, action                             | (Tp, Da), (Da)                              |

Time: `actions[i]` is the command issued *at* observation i (what nearly every dataset stores). A
window at step t sees observations t-To+1 .. t and predicts actions t .. t+Tp-1:

    observations   o[t-1]  o[t]
    actions                a[t]  a[t+1]  ...  a[t+Tp-1]
                           ^ executed first, as the answer to o[t]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prism.rows import WHOLE, Random, Share


@dataclass(frozen=True)
class Observation:
    """Sensor streams by sensor name, each (B, To, ...), and which readings are present.

    Each is as its SensorSpec says: vectors float32 in sensor units, pixels uint8 (B, To, H, W, C), depth
    float32 metres (B, To, H, W), audio float32 (B, To, S), text uint8 (B, To, L). `present[name]` is (B, To):
    False where the sensor was missing; the content of the stream there is ignored. A sensor with a history has one more
    dimension, its readings, (B, To, history, ...): prism.data.history.
    """

    streams: dict[str, Tensor]
    present: dict[str, Bool[Tensor, "B To"]]

    def to(self, device: torch.device) -> Observation:
        return Observation(
            {k: v.to(device, non_blocking=True) for k, v in self.streams.items()},
            {k: v.to(device, non_blocking=True) for k, v in self.present.items()},
        )

    @property
    def batch_size(self) -> int:
        return next(iter(self.present.values())).shape[0]


@dataclass(frozen=True)
class Batch:
    """A training batch: actions in robot units, `action_valid` is False past the end of the episode or instruction."""

    observation: Observation
    actions: Float[Tensor, "B Tp Da"]
    action_valid: Bool[Tensor, "B Tp"]
    share: Share = WHOLE  # which rows of the global batch these are

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.observation.to(device),
            self.actions.to(device, non_blocking=True),
            self.action_valid.to(device, non_blocking=True),
            self.share,
        )

    def random(self, seed: int) -> Random:
        """The random numbers of these rows, the same in every split of the global batch."""
        return self.share.random(seed, len(self.actions))

    def split(self, count: int) -> list[Batch]:
        """At most `count` parts of nearly equal size, each of which knows its place in the global batch."""
        rows = len(self.actions)
        count, total = min(count, rows), self.share.total or rows
        if count == 1:
            return [self]
        parts = []
        for start, stop in pairwise(part * rows // count for part in range(count + 1)):
            streams = {name: value[start:stop] for name, value in self.observation.streams.items()}
            present = {name: value[start:stop] for name, value in self.observation.present.items()}
            share = Share(self.share.start + start, total)
            observation = Observation(streams, present)
            parts.append(Batch(observation, self.actions[start:stop], self.action_valid[start:stop], share))
        return parts
