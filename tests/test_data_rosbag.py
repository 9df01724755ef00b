"""ROS 2 bags, written with rosbags' own writer: several rates, a gap, header stamps, two storages."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rosbags")

from rich.console import Console
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from prism.cli.train import Train
from prism.data import format_name, open_dataset, parse_map
from prism.data.convert import convert
from prism.data.formats.rosmsg import FIELDS
from prism.errors import PrismError
from prism.experiments.demonstrations import Demonstrations, open_demonstrations
from prism.experiments.recipes import Experiment
from prism.sensors import decode_text
from tests.data_fakes import inspect

STORE = get_typestore(Stores.ROS2_HUMBLE)
T = STORE.types
START = 1_700_000_000


def header(seconds: float) -> Any:
    whole = int(seconds)
    stamp = T["builtin_interfaces/msg/Time"](sec=whole, nanosec=round((seconds - whole) * 1e9))
    return T["std_msgs/msg/Header"](stamp=stamp, frame_id="robot")


def image(seconds: float, value: int, encoding: str = "bgr8") -> Any:
    if encoding == "16UC1":
        data, step = np.full((4, 6), 500 + value, "<u2").view(np.uint8).reshape(-1), 12
    else:
        pixels = np.zeros((4, 8, 3), np.uint8)  # two pixels of padding a row
        pixels[:, :6] = (value, 10, 200)
        data, step = pixels.reshape(-1), 24
    return T["sensor_msgs/msg/Image"](
        header=header(seconds), height=4, width=6, encoding=encoding, is_bigendian=0, step=step, data=data
    )


def pose(seconds: float, x: float) -> Any:
    point = T["geometry_msgs/msg/Point"](x=x, y=0.0, z=1.0)
    turn = T["geometry_msgs/msg/Quaternion"](x=0.0, y=0.0, z=float(np.sin(x / 2)), w=float(np.cos(x / 2)))
    inner = T["geometry_msgs/msg/Pose"](position=point, orientation=turn)
    return T["geometry_msgs/msg/PoseStamped"](header=header(seconds), pose=inner)


def test_a_pose_with_covariance_is_a_pose() -> None:
    """What amcl and robot_localization publish; it was left out."""
    stamped = pose(0.0, 0.4)
    covariance = T["geometry_msgs/msg/PoseWithCovariance"](pose=stamped.pose, covariance=np.zeros(36))
    message = T["geometry_msgs/msg/PoseWithCovarianceStamped"](header=stamped.header, pose=covariance)
    (known,), (plain,) = FIELDS[message.__msgtype__], FIELDS["geometry_msgs/msg/PoseStamped"]
    np.testing.assert_array_equal(known.get(message), plain.get(stamped))
    assert known.quaternions == plain.quaternions


def command(x: float) -> Any:
    layout = T["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
    return T["std_msgs/msg/Float64MultiArray"](layout=layout, data=np.array([x, -x]))


def write_bag(path: Path, mcap: bool = False, backwards: bool = False, seconds: float = 2.0) -> Path:
    plugin = StoragePlugin.MCAP if mcap else StoragePlugin.SQLITE3
    topics: dict[str, tuple[str, float, Any]] = {
        "/camera": ("sensor_msgs/msg/Image", 15.0, lambda t, i: image(START + t, i)),
        "/depth": ("sensor_msgs/msg/Image", 10.0, lambda t, i: image(START + t, i, "16UC1")),
        "/ee_pose": ("geometry_msgs/msg/PoseStamped", 97.0, lambda t, i: pose(START + t, t)),
        "/arm_command": ("std_msgs/msg/Float64MultiArray", 50.0, lambda t, i: command(t)),
        "/say": ("std_msgs/msg/String", 1.0, lambda t, i: T["std_msgs/msg/String"](data=f"task {i}")),
    }
    events = []
    for topic, (kind, rate, make) in topics.items():
        for i, t in enumerate(np.arange(0, seconds, 1 / rate)):
            if topic == "/ee_pose" and 0.8 < t < 1.4:
                continue
            stamp = t - 0.5 if backwards and topic == "/ee_pose" and i == 20 else t
            events.append((int((START + t) * 1e9) + 1000, topic, kind, make(stamp, i)))
    with Writer(path, version=9, storage_plugin=plugin) as writer:
        connections = {
            topic: writer.add_connection(topic, kind, typestore=STORE) for topic, (kind, _, _) in topics.items()
        }
        for time, topic, kind, message in sorted(events, key=lambda event: event[0]):
            writer.write(connections[topic], time, bytes(STORE.serialize_cdr(message, kind)))
    return path


def write_messages(
    path: Path, topics: dict[str, tuple[str, list[Any]]], store: Any = STORE, seconds: float = 2
) -> Path:
    """A bag of a camera and commands, and of topics that each are a type and its messages, over that time."""
    count = round(10 * seconds)
    ours = {
        "/camera": ("sensor_msgs/msg/Image", [image(START + i / 10, i) for i in range(count)]),
        "/arm_command": ("std_msgs/msg/Float64MultiArray", [command(i / 10) for i in range(count)]),
    }
    with Writer(path, version=9, storage_plugin=StoragePlugin.SQLITE3) as writer:
        for topic, (kind, messages) in {**ours, **topics}.items():
            connection = writer.add_connection(topic, kind, typestore=store)
            for i, message in enumerate(messages):
                content = message if isinstance(message, bytes) else bytes(store.serialize_cdr(message, kind))
                writer.write(connection, int((START + i * seconds / len(messages)) * 1e9), content)
    return path


def joint_state(position: list[float], names: str = "") -> Any:
    none = np.array([])
    values = {"position": np.array(position), "velocity": none, "effort": none}
    return T["sensor_msgs/msg/JointState"](header=header(0), name=names.split(), **values)


@pytest.mark.parametrize("mcap", [False, True])
def test_bags_become_episodes(tmp_path: Path, mcap: bool) -> None:
    for number in range(2):
        write_bag(tmp_path / f"bags/take_{number}", mcap, seconds=2.0 + number)
    assert format_name(tmp_path / "bags") == "ROS 2 bags"
    source = open_dataset(tmp_path / "bags", fps=10)
    assert [(s.name, s.kind, s.shape) for s in source.sensors] == [
        ("camera", "rgb", (4, 6, 3)),
        ("depth", "depth", (4, 6)),
        ("ee_pose", "vector", (7,)),
        ("say", "text", (128,)),
    ]
    assert source.lengths.tolist() == [20, 30]
    said = " | ".join(source.notes)
    assert "'/arm_command' is taken for the action" in said
    assert "times of '/camera'" in said
    assert "millimetres" in said
    assert "take_0: '/ee_pose' is absent from" in said
    part = source.read(0)
    ticks = np.arange(20) / 10
    shown = part.streams["camera"][:, 0, 0].astype(int)
    assert (shown[:, :2] == (200, 10)).all()
    assert np.abs(shown[:, 2] / 15 - ticks).max() <= 0.5 / 15 + 1e-6  # the frame nearest to the tick
    times = shown[:, 2] / 15  # everything else is as it was when that frame was taken
    np.testing.assert_allclose(part.actions[:, 0], times, atol=0.011)
    np.testing.assert_allclose(part.actions[:, 1], -part.actions[:, 0])
    here = part.present["ee_pose"]
    np.testing.assert_allclose(part.streams["ee_pose"][here, 0], times[here], atol=0.1)
    inside = here & ((times < 0.75) | (times > 1.45)) & (times < 1.9)
    np.testing.assert_allclose(part.streams["ee_pose"][inside, 0], times[inside], atol=1e-4)
    np.testing.assert_allclose(part.streams["ee_pose"][inside, 5], np.sin(times[inside] / 2), atol=1e-4)
    np.testing.assert_allclose(part.streams["depth"][0], 0.5)
    assert decode_text(part.streams["say"][15]) == "task 1"
    middle = source.read(0, 7, 11)
    np.testing.assert_array_equal(middle.streams["camera"], part.streams["camera"][7:11])
    np.testing.assert_array_equal(middle.present["ee_pose"], here[7:11])
    if not mcap:
        convert(source, tmp_path / "own", task="stack")
        again = open_dataset(tmp_path / "own")
        np.testing.assert_array_equal(again.read(0).present["ee_pose"], here)
        np.testing.assert_array_equal(again.read(1).streams["camera"], source.read(1).streams["camera"])


@pytest.mark.parametrize("mcap", [True, False])
def test_files_of_bags_without_their_folder(tmp_path: Path, mcap: bool) -> None:
    bag = write_bag(tmp_path / "bag", mcap)
    expected = open_dataset(bag, fps=10)
    suffix = ".mcap" if mcap else ".db3"
    (tmp_path / "bare").mkdir()
    for name in ("a", "b"):
        shutil.copy(next(bag.glob(f"*{suffix}")), tmp_path / "bare" / f"{name}{suffix}")
    for path, count in ((tmp_path / "bare", 2), (tmp_path / "bare" / f"a{suffix}", 1)):
        source = open_dataset(path, fps=10)
        assert source.lengths.tolist() == expected.lengths.tolist() * count
        np.testing.assert_array_equal(source.read(count - 1).actions, expected.read(0).actions)


def test_own_rate_and_table(tmp_path: Path) -> None:
    path = write_bag(tmp_path / "take")
    entries = parse_map(["/arm_command=action", "/ee_pose=proprio", "/camera=rgb_static"])
    source = open_dataset(path, entries=entries)
    assert source.fps == 15
    assert [s.name for s in source.sensors] == ["proprio", "rgb_static"]
    assert source.lengths.tolist() == [30]
    assert [s.fps for s in source.sensors] == [97, 15]  # their own, which say when a reading is late
    assert (~source.read(0).present["proprio"]).sum() == 8
    patient = open_dataset(path, entries=entries, tolerance=0.4)
    assert "proprio" not in patient.read(0).present  # nowhere absent


def test_bad_bags(tmp_path: Path) -> None:
    path = write_bag(tmp_path / "back", backwards=True)
    with pytest.raises(PrismError, match=r"back: episode 0, '/ee_pose': time stamps go backwards by 0\.") as error:
        open_dataset(path, fps=10)
    assert "\n" not in str(error.value)
    with pytest.raises(PrismError, match="there is no key '/hand'"):
        open_dataset(write_bag(tmp_path / "x"), fps=10, entries=parse_map(["/hand=proprio"]))


def test_damaged_bag(tmp_path: Path) -> None:
    path = write_bag(tmp_path / "take")
    file = next(path.glob("*.db3"))
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(PrismError, match="take: episode 0"):
        open_dataset(path, fps=10)
    (path / "metadata.yaml").write_text("{")
    with pytest.raises(PrismError, match="take: episode 0"):
        open_dataset(path, fps=10)


def test_sound_in_a_bag(tmp_path: Path) -> None:
    """A microphone's chunks (as audio_common sends them) become the samples that end at each step."""
    kind, rate, chunk = "audio_common_msgs/msg/AudioData", 8000, 200
    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg("uint8[] data", kind))
    ramp = np.arange(2 * rate, dtype="<i2")  # every sample is its own index
    with Writer(tmp_path / "take", version=9, storage_plugin=StoragePlugin.SQLITE3) as writer:
        sound = writer.add_connection("/microphone", kind, typestore=store)
        camera = writer.add_connection("/camera", "sensor_msgs/msg/Image", typestore=store)
        moves = writer.add_connection("/arm_command", "std_msgs/msg/Float64MultiArray", typestore=store)
        for i in range(0, len(ramp), chunk):
            time = START * 10**9 + i * 10**9 // rate
            message = store.types[kind](data=ramp[i : i + chunk].view(np.uint8))
            writer.write(sound, time, bytes(store.serialize_cdr(message, kind)))
        for i in range(20):
            time = START * 10**9 + i * 10**8
            frame = image(START + i / 10, i)
            writer.write(camera, time, bytes(store.serialize_cdr(frame, "sensor_msgs/msg/Image")))
            move = store.serialize_cdr(command(i / 10), "std_msgs/msg/Float64MultiArray")
            writer.write(moves, time, bytes(move))
    assert open_dataset(tmp_path / "take").sensors == open_dataset(tmp_path / "take", fps=10).sensors  # the camera's
    missing = [w for w in inspect(tmp_path / "take").warnings if "microphone" in w and "absent" in w]
    assert missing == ["'microphone' is absent from 5.0% of the steps"]
    source = open_dataset(tmp_path / "take", fps=10)
    sensor = next(s for s in source.sensors if s.kind == "audio")
    assert sensor.shape[0] == rate // 10
    part = source.read(0)
    heard, here = part.streams[sensor.name], part.present[sensor.name]
    assert not here[0], "nothing had been recorded before the first step"
    for step in range(1, 20):
        assert here[step]
        last = step * rate // 10
        expected = np.arange(last - rate // 10, last)
        np.testing.assert_allclose(heard[step] * 32768, expected, atol=1e-2, err_msg=f"step {step}")


def test_topics_that_are_not_read_are_left_out_and_said(tmp_path: Path) -> None:
    """One topic of a type nobody knows, or a picture in an encoding that is not read, is no reason to read nothing."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg("float64[] data", "control_msgs/msg/State"))
    bayer = image(START, 1)
    bayer.encoding = "bayer_rggb8"
    packed = T["sensor_msgs/msg/CompressedImage"](
        header=header(START), format="16UC1; compressedDepth png", data=np.arange(40, dtype=np.uint8)
    )
    clock = T["rosgraph_msgs/msg/Clock"](clock=T["builtin_interfaces/msg/Time"](sec=1, nanosec=0))
    topics: dict[str, tuple[str, list[Any]]] = {
        "/bayer": ("sensor_msgs/msg/Image", [bayer]),
        "/clock": ("rosgraph_msgs/msg/Clock", [clock]),
        "/controller": ("control_msgs/msg/State", [store.types["control_msgs/msg/State"](data=np.ones(3))]),
        "/depth": ("sensor_msgs/msg/CompressedImage", [packed]),
        "/joints": ("sensor_msgs/msg/JointState", [joint_state([])]),
        "/robot_description": ("std_msgs/msg/String", [T["std_msgs/msg/String"](data="<robot/>" * 2300)]),
        "/silent": ("std_msgs/msg/String", []),
    }
    source = open_dataset(write_messages(tmp_path / "take", topics, store), fps=10)
    assert [sensor.name for sensor in source.sensors] == ["camera"]
    assert source.read(0).streams["camera"].shape == (20, 4, 6, 3)
    said = [note for note in source.notes if "left out" in note]
    assert len(said) == len(topics)
    for (topic, (kind, _)), note, why in zip(
        topics.items(),
        said,
        ("'bayer_rggb8'", "type", "type", "compressedDepth", "no numbers", "18400 bytes", "no messages"),
        strict=True,
    ):
        assert note.startswith(f"'{topic}' ({kind}) is left out: ")
        assert why in note
    for topic in topics:
        table = parse_map([f"{topic}=proprio", "/arm_command=action"])
        with pytest.raises(PrismError, match=rf"take: --map {topic}: '{topic}' \(.* is left out: ") as error:
            open_dataset(tmp_path / "take", fps=10, entries=table)
        assert "\n" not in str(error.value)


def test_a_damaged_topic_is_refused_unless_it_is_not_wanted(tmp_path: Path) -> None:
    path = write_messages(tmp_path / "take", {"/ee_pose": ("geometry_msgs/msg/PoseStamped", [b"\0\1\0\0cut"])})
    with pytest.raises(PrismError, match=r"take: episode 0, '/ee_pose': not readable \(.* --map") as error:
        open_dataset(path, fps=10)
    assert "\n" not in str(error.value)
    source = open_dataset(path, fps=10, entries=parse_map(["/camera=rgb", "/arm_command=action"]))
    assert [sensor.name for sensor in source.sensors] == ["rgb"]
    with pytest.raises(PrismError, match=r"'/ee_pose' .* is left out"):
        open_dataset(path, fps=10, entries=parse_map(["/ee_pose=proprio", "/arm_command=action"]))


def test_joint_states_in_a_namespace(tmp_path: Path) -> None:
    topics = {"/arm/joint_states": ("sensor_msgs/msg/JointState", [joint_state([1.0, 2.0])] * 20)}
    source = open_dataset(write_messages(tmp_path / "take", topics), fps=10)
    assert [(s.name, s.shape) for s in source.sensors] == [("arm_joint_states", (2,)), ("camera", (4, 6, 3))]


def test_joints_are_taken_by_their_names(tmp_path: Path) -> None:
    """The same robot, started twice: its driver says them in another order."""

    def write(name: str, joints: str, position: list[float]) -> None:
        messages = [joint_state(position, joints)] * 20
        write_messages(tmp_path / name, {"/joint_states": ("sensor_msgs/msg/JointState", messages)})

    write("a", "elbow wrist", [1.0, 2.0])
    write("b", "wrist elbow", [4.0, 3.0])
    source = open_dataset(tmp_path, fps=10)
    for episode, position in enumerate([[1.0, 2.0], [3.0, 4.0]]):
        assert source.read(episode).streams["joint_states"][0].tolist() == position
    write("c", "elbow hand", [1.0, 2.0])
    with pytest.raises(PrismError, match="message 0 is of elbow, hand, the first of elbow, wrist"):
        open_dataset(tmp_path, fps=10)


def test_texts_have_the_size_of_the_longest_and_errors_name_the_topic(tmp_path: Path) -> None:
    def say(name: str, text: str) -> Path:
        return write_messages(tmp_path / name, {"/say": ("std_msgs/msg/String", [T["std_msgs/msg/String"](data=text)])})

    long = "put it there " * 20
    source = open_dataset(say("long/0", long), fps=10)
    assert next(s.shape for s in source.sensors if s.name == "say") == (len(long),)
    assert decode_text(source.read(0).streams["say"][5]) == long
    say("mixed/0", "here")
    say("mixed/1", long)
    with pytest.raises(PrismError, match="1: episode 1, '/say': text of 260 bytes does not fit the 128"):
        open_dataset(tmp_path / "mixed", fps=10)


def test_a_rotation_of_length_0_is_named(tmp_path: Path) -> None:
    turn = T["geometry_msgs/msg/Quaternion"](x=0.0, y=0.0, z=0.0, w=0.0)
    path = write_messages(tmp_path / "take", {"/imu": ("geometry_msgs/msg/Quaternion", [turn] * 20)})
    with pytest.raises(PrismError, match="take: episode 0, '/imu': the quaternion at step 0 has length 0"):
        open_dataset(path, fps=10)


def test_rotations_begin_with_a_positive_scalar(tmp_path: Path) -> None:
    turn = T["geometry_msgs/msg/Quaternion"](x=0.0, y=0.0, z=0.8, w=-0.6)
    path = write_messages(tmp_path / "take", {"/turn": ("geometry_msgs/msg/Quaternion", [turn] * 20)})
    np.testing.assert_allclose(open_dataset(path, fps=10).read(0).streams["turn"], [[0, 0, -0.8, 0.6]] * 20, atol=1e-6)


def test_stereo_is_left_out(tmp_path: Path) -> None:
    kind = "audio_common_msgs/msg/AudioData"
    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg("uint8[] data", kind))
    chunk = store.types[kind](data=np.zeros(2 * 9600, np.uint8))  # 96,000 values a second: 48 kHz of two channels
    path = write_messages(tmp_path / "take", {"/microphone": (kind, [chunk] * 20)}, store)
    notes = open_dataset(path, fps=10).notes
    assert any("'/microphone'" in note and "96000 values a second" in note and "stereo?" in note for note in notes)
    with pytest.raises(PrismError, match="96000 values a second"):
        open_dataset(path, fps=10, entries=parse_map(["/microphone=audio:audio", "/arm_command=action"]))


def test_training_takes_the_rate_and_the_tolerance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bag(tmp_path / "take")
    config = Demonstrations("path", path=str(path), map=("/ee_pose=proprio", "/camera=rgb", "/arm_command=action"))
    patient = replace(config, fps=5.0, tolerance=0.4)
    assert open_demonstrations(config, None, Console(quiet=True))[1].fps == 15
    source = open_demonstrations(patient, None, Console(quiet=True))[1]
    assert source.fps == 5
    assert "proprio" not in source.read(0).present
    asked: list[Experiment] = []

    def train(experiment: Experiment, *_: object, **__: object) -> None:
        asked.append(experiment)
        raise PrismError("enough")

    monkeypatch.setattr("prism.experiments.workflow.train_experiment", train)
    with pytest.raises(PrismError, match="enough"):
        Train((str(path),), fps=5.0, tolerance=0.4, out=tmp_path / "run").run()
    assert (asked[0].demonstrations.fps, asked[0].demonstrations.tolerance) == (5.0, 0.4)
    for name, bad in (("fps", 0.0), ("tolerance", -1.0)):
        with pytest.raises(PrismError, match=f"--{name} {bad:g} is out of range"):
            Train(("pusht",), **{name: bad})  # type: ignore[arg-type]
        with pytest.raises(PrismError, match=rf"demonstrations\.{name} = {bad:g} is out of range"):
            replace(config, **{name: bad})  # type: ignore[arg-type]
