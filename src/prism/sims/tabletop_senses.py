"""Touch and sound from contacts: what a camera cannot see.

Fingertips: on each pad a grid of 16 x 16 taxels; a contact presses its normal force, smeared by 1.5 mm, into them.
Sound: a contact microphone at the wrist. A contact force that rises by dF within a substep (2 ms) is a click: it rings
the modes of what was struck, y'' + 2 d y' + w^2 y = dF, w and d by material, and hard on hard rings higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
TAXELS = 16
_SMEAR = 0.0015  # metres
_FULL = 6.0  # newtons on one taxel's Gaussian that saturate it
_LOUD = 0.02  # of full scale a newton
# frequency (Hz), time to fall to 1/e (s), share
_GRASP = ((410.0, 0.008, 1.0), (960.0, 0.004, 0.5))  # rubber on wood
_KNOCK = ((1350.0, 0.010, 1.0), (3100.0, 0.005, 0.6))  # wood on wood


class Microphone:
    """Rings what contacts excite; its state runs through an episode."""

    def __init__(self) -> None:
        self._filters = [[_resonator(*mode) for mode in modes] for modes in (_GRASP, _KNOCK)]
        self.reset()

    def reset(self) -> None:
        self._memory = [[np.zeros(2) for _ in modes] for modes in self._filters]
        self._last = np.zeros(2)

    def step(self, forces: Sequence[NDArray[np.float64]], samples: int) -> NDArray[np.float32]:
        """(samples,) in [-1, 1] from the total normal force at each substep: of pads on things, of things on things."""
        from scipy.signal import lfilter

        excitation = np.zeros((2, samples))
        for i, force in enumerate(forces):
            rise = np.maximum(force - self._last, 0.0)
            rise[rise <= 0.05] = 0.0  # the solver's tremble is mute
            excitation[:, i * samples // len(forces)] += rise
            self._last = force
        sound = np.zeros(samples)
        for source, modes in enumerate(self._filters):
            for number, (b, a) in enumerate(modes):
                part, self._memory[source][number] = lfilter(b, a, excitation[source], zi=self._memory[source][number])
                sound += part
        return np.tanh(_LOUD * sound).astype(np.float32)


def _resonator(frequency: float, fall: float, share: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mode as a filter: an impulse of 1 rings with amplitude `share`."""
    radius, angle = np.exp(-1.0 / (fall * RATE)), 2 * np.pi * frequency / RATE
    return np.array([0.0, share * radius * np.sin(angle)]), np.array([1.0, -2 * radius * np.cos(angle), radius**2])


def contact_forces(model: Any, data: Any, pads: set[int], things: set[int]) -> NDArray[np.float64]:
    """Normal forces, newtons: of pads on things, and of things on anything else, (2,)."""
    import mujoco

    total, force = np.zeros(2), np.zeros(6)
    for i in range(data.ncon):
        pair = {int(data.contact.geom1[i]), int(data.contact.geom2[i])}
        if pair & things:
            mujoco.mj_contactForce(model, data, i, force)
            total[0 if pair & pads else 1] += force[0]
    return total


def tactile_image(model: Any, data: Any, pads: Sequence[int]) -> NDArray[np.uint8]:
    """(16, 16, number of pads): rows along the finger, columns across it."""
    import mujoco

    image = np.zeros((TAXELS, TAXELS, len(pads)))
    force = np.zeros(6)
    for i in range(data.ncon):
        for channel, pad in enumerate(pads):
            if pad not in (data.contact.geom1[i], data.contact.geom2[i]):
                continue
            mujoco.mj_contactForce(model, data, i, force)
            local = data.geom_xmat[pad].reshape(3, 3).T @ (data.contact.pos[i] - data.geom_xpos[pad])
            half = model.geom_size[pad]
            rows, columns = (np.linspace(-half[axis], half[axis], TAXELS) for axis in (2, 0))
            along, across = (np.exp(-(d**2) / (2 * _SMEAR**2)) for d in (rows - local[2], columns - local[0]))
            image[:, :, channel] += force[0] / _FULL * (along[:, None] * across)
    return np.round(255 * np.clip(image, 0.0, 1.0)).astype(np.uint8)
