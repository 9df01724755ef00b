"""The kind of an action: one enum, from the dataset to the robot's command."""

from __future__ import annotations

from enum import Enum


class ActionKind(str, Enum):
    """Of the motion; a gripper and a quaternion are absolute, and a mobile base is a velocity, whatever the kind.

    It decides what standing still is: an absolute action is sent again, a delta and a velocity become zero. What takes
    one for the other drives a robot away.
    """

    ABSOLUTE = "absolute"
    DELTA = "delta"
    VELOCITY = "velocity"

    __str__ = str.__str__  # the word, as enum.StrEnum of Python 3.11

    @property
    def meaning(self) -> str:
        """The kind in words."""
        meanings = {"absolute": "each is a pose", "delta": "each is a change of pose", "velocity": "each is a speed"}
        return meanings[self]

    @classmethod
    def words(cls) -> str:
        """All of them, for an error."""
        return ", ".join(cls)

    @classmethod
    def parse(cls, word: object) -> ActionKind | None:
        """None where it is not one of them."""
        return cls(word) if word in tuple(cls) else None
