"""The tabletop as MuJoCo models: a UR5e with a parallel gripper on a table, and what each task puts there.

The arm has the UR5e's joints and lengths (zero pose: straight up), drawn as capsules; it does not collide, its gripper
does. Weights are a quarter of the real ones, gravity is compensated, and each joint is a servo: at the hand this makes
a spring of about 3 N a millimetre. No mesh and no package but mujoco: a control step takes less than 2 ms.
"""

from __future__ import annotations

import numpy as np

from prism_sims.mjcf import box, free, numbers

JOINTS = ("pan", "lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
REACH = np.array([0.0, -0.35, 2.25, np.pi / 2 - 1.9, -np.pi / 2, 0.0])  # joints, radians: the hand points down
OPEN = 0.044  # metres between a fingertip and the middle, the hand open
PADS = ("pad_left", "pad_right")
TIP = 0.016  # metres from the hand's point down to the end of the fingers

# insertion
BOARD_TOP, BOARD_UNIT, HOLE, PEG = 0.05, 0.045, 0.0125, 0.010  # the last three are half widths
PEG_FOOT = 0.055  # metres from the hand's point down to the peg's foot
# containers
BOX, CAVITY, BALL = 0.023, 0.018, 0.007  # half widths, radius
# stacking
BLOCK = 0.02  # half an edge
# cups
CUP, CUP_WALL, CUP_HEIGHT = 0.031, 0.003, 0.07  # distance of the walls' middle from the axis, half thickness
HANDLE = CUP + 0.021  # from the axis to the middle of the handle's opening
HANDLE_Z = 0.036  # its height
CUP_HELD = 0.036  # height of the hand's point above the foot of a cup that it takes
SMALL_BALL = 0.017
HOOK, HOOK_LENGTH = np.array([0.62, 0.02, 0.21]), 0.09  # the root of the hook, which points to -y


def scene(things: str, tool: str = "", sensors: str = "", exclude: str = "") -> str:
    """The whole model; `tool` is fixed to the hand, in whose frame y points to the fingertips and x crosses them."""
    fingers = "".join(
        f'<body name="finger_{side}" pos="0 0.13 0" gravcomp="1">'
        f'<joint name="finger_{side}" type="slide" axis="{sign} 0 0" range="0 {OPEN}" damping="4" armature="0.05"/>'
        f'<geom name="pad_{side}" type="box" size="0.006 0.046 0.012" '
        f'pos="{sign * 0.006} 0 0" mass="0.04" friction="1.6 0.02 0.001" group="1" rgba="0.2 0.2 0.22 1"/>'
        f'<site name="pad_{side}" type="box" size="0.014 0.05 0.016" rgba="0 0 0 0"/></body>'
        for side, sign in (("left", 1), ("right", -1))
    )
    # (name, position, axis, geom)
    links = (
        ("pan", "0 0 0.1625", "0 0 1", 'type="cylinder" size="0.06 0.07" mass="1"'),
        ("lift", "0 0.138 0", "0 1 0", 'type="capsule" fromto="0 0 0 0 0 0.425" size="0.05" mass="1.2"'),
        ("elbow", "0 -0.131 0.425", "0 1 0", 'type="capsule" fromto="0 0 0 0 0 0.392" size="0.04" mass="0.6"'),
        ("wrist_1", "0 0.127 0.3922", "0 1 0", 'type="capsule" fromto="0 0 -0.03 0 0 0.05" size="0.04" mass="0.4"'),
        ("wrist_2", "0 0 0.0997", "0 0 1", 'type="capsule" fromto="0 0 0 0 0.06 0" size="0.037" mass="0.4"'),
        ("wrist_3", "0 0.0996 0", "0 1 0", 'type="cylinder" fromto="0 0 0 0 0.08 0" size="0.035" mass="0.3"'),
    )
    arm = "".join(
        f'<body name="{name}" pos="{pos}" gravcomp="1"><joint name="{name}" axis="{axis}" damping="2" armature="0.05"/>'
        f'<geom {geom} contype="0" conaffinity="0" group="1" rgba="0.7 0.72 0.75 1"/>'
        for name, pos, axis, geom in links
    )
    servos = "".join(
        f'<position joint="{name}" kp="{6000 if i < 3 else 3000}" dampratio="1" forcerange="-150 150"/>'
        for i, name in enumerate(JOINTS)
    )
    return f"""<mujoco model="tabletop">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="0.005" integrator="implicitfast" cone="elliptic" impratio="10"/>
  <visual><map znear="0.01" zfar="6"/></visual><statistic extent="1" center="0.5 0 0.2"/>
  <default><geom solref="0.012 1" condim="4" friction="0.8 0.01 0.0005"/></default>
  <worldbody>
    <light pos="0.5 0 2" dir="0 0 -1"/>
    <camera name="agentview" pos="1.25 0 0.65" xyaxes="0 1 0 -0.5 0 0.866" fovy="45"/>
    <geom name="table" type="plane" size="0.4 0.5 0.02" pos="0.55 0 0" rgba="0.55 0.45 0.35 1"/>
    {arm}
    <site name="hand" pos="0 0.16 0" size="0.004" rgba="0 0 0 0"/>
    <camera name="eye_in_hand" pos="0 0.04 0.075" xyaxes="1 0 0 0 0.42 0.908" fovy="60"/>
    {fingers}{tool}{"</body>" * len(links)}
    {things}
  </worldbody>
  <contact>{exclude}</contact>
  <equality><joint joint1="finger_left" joint2="finger_right" polycoef="0 1 0 0 0" solref="0.01 1"/></equality>
  <actuator>{servos}<position joint="finger_left" kp="3000" dampratio="1" forcerange="-20 20"/></actuator>
  <sensor>{sensors}</sensor>
</mujoco>"""


def board(name: str) -> str:
    """What collides, a frame of four boxes that a reset puts where the hole is, and what is drawn, where it seems."""
    wide, off, half = (BOARD_UNIT - HOLE) / 2, (BOARD_UNIT + HOLE) / 2, BOARD_TOP / 2
    solid = 'group="3" friction="0.1 0.005 0.0001" priority="1" condim="3"'  # polished: its friction counts
    frame = "".join(
        box(size, pos, "0.5 0.5 0.5 1", solid)
        for size, pos in (
            ((wide, BOARD_UNIT, half), (-off, 0, 0)), ((wide, BOARD_UNIT, half), (off, 0, 0)),
            ((HOLE, wide, half), (0, -off, 0)), ((HOLE, wide, half), (0, off, 0)),
        )
    )  # fmt: skip
    drawn = 'group="1" contype="0" conaffinity="0"'
    plate = box((BOARD_UNIT, BOARD_UNIT, half), (0, 0, 0), "0.6 0.6 0.62 1", drawn)
    dark = box((0.026, 0.026, 0.0005), (0, 0, half), "0.08 0.08 0.08 1", drawn)
    return f'<body name="hole_{name}">{frame}</body><body name="seen_{name}">{plate}{dark}</body>'


def peg() -> str:
    """Between the fingers, on a spring of 1.5 N a millimetre that lets it in by up to a centimetre."""
    pos = f"0 {0.16 + PEG_FOOT - 0.045} 0"
    slide = 'type="slide" axis="0 -1 0" range="0 0.01" stiffness="1500" damping="12" armature="0.02"'
    shape = f'type="box" size="{PEG} 0.045 {PEG}" mass="0.05" rgba="0.95 0.75 0.1 1"'
    return f'<body name="peg" pos="{pos}" gravcomp="1"><joint name="peg" {slide}/><geom name="peg" {shape}/></body>'


def container(name: str) -> str:
    """A closed box; the ball of the task fits in."""
    wall, off = (BOX - CAVITY) / 2, (BOX + CAVITY) / 2
    sides = []
    for axis in range(3):
        for sign in (-1, 1):
            size, pos = np.array([BOX, BOX, BOX - (0.002 if axis < 2 else 0.0)]), np.zeros(3)  # it stands on its floor
            size[axis], pos[axis] = wall, sign * off
            sides.append(box(size, pos, "0.75 0.6 0.4 1", 'mass="0.012"'))
    return free(name, "".join(sides))


def ball(name: str, radius: float, mass: float, rgba: str) -> str:
    shape = f'type="sphere" size="{radius}" mass="{mass}" rgba="{rgba}" friction="1 0.02 0.002"'
    return free(name, f'<geom {shape}/><site name="{name}" type="sphere" size="{radius * 1.3}" rgba="0 0 0 0"/>')


def cup(name: str, rgba: str) -> str:
    """Eight walls on a disc, and a handle at +x, in the plane of x and z."""
    geoms = [f'<geom type="cylinder" size="{CUP} 0.003" pos="0 0 0.003" rgba="{rgba}" mass="0.03"/>']
    width = (CUP + CUP_WALL) * np.tan(np.pi / 8)
    for angle in np.arange(8) * np.pi / 4:
        place = numbers((CUP * np.cos(angle), CUP * np.sin(angle), CUP_HEIGHT / 2 + 0.002))
        place = f'pos="{place}" euler="0 0 {angle:.6g}"'
        size = numbers((CUP_WALL, width, CUP_HEIGHT / 2 - 0.002))
        geoms.append(f'<geom type="box" size="{size}" {place} rgba="{rgba}" mass="0.005"/>')
    outer = CUP + CUP_WALL
    bar = 0.004
    light = 'mass="0.001"'
    geoms += [
        box((0.018, bar, bar), (outer + 0.018, 0, HANDLE_Z + 0.022), rgba, light),
        box((0.018, bar, bar), (outer + 0.018, 0, HANDLE_Z - 0.022), rgba, light),
        box((bar, bar, 0.026), (outer + 0.036, 0, HANDLE_Z), rgba, light),
    ]
    return free(name, "".join(geoms))


def hook() -> str:
    """A post with an arm that points to -y and ends in a raised tip."""
    x, y, z = HOOK
    steel = "0.3 0.3 0.33 1"
    return (
        box((0.008, 0.008, z / 2 + 0.01), (x, y + 0.008, z / 2), steel)
        + box((0.004, HOOK_LENGTH / 2, 0.004), (x, y - HOOK_LENGTH / 2, z), steel)
        + box((0.004, 0.003, 0.006), (x, y - HOOK_LENGTH, z + 0.006), steel)
    )
