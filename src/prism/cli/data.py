"""prism data collect | inspect | convert"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from prism.cli.style import CalvinOption, DatasetOptions, OutputFile, option
from prism.errors import PrismError, check_numbers

if TYPE_CHECKING:
    from prism.data import EpisodeSource


@dataclass(frozen=True)
class Collect(CalvinOption):
    """Record demonstrations of a task from its expert, or fetch public ones.

    Try:
        prism data collect metaworld-button-press-topdown --episodes 20
        prism data collect metaworld-drawer-open-pixels --episodes 50
        prism data collect calvin-open_drawer-state --calvin ~/calvin
        prism data collect pusht-human              206 demonstrations of people, from the internet

    Only episodes that succeed are kept. Nothing existing is overwritten.
    """

    task: Positional[str]
    """Name of the task, or of a public dataset (pusht-human)."""
    episodes: int = 20
    """Successful episodes to record."""
    out: Annotated[Path | None, option("FOLDER")] = None
    """Folder of the dataset; default: data/TASK, or for a public one PRISM_DATA or the user's cache."""
    seed: Annotated[int | None, option("N")] = None
    """Seed of the first episode; default: the task's, usually 0."""
    noise: Annotated[float | None, option("N")] = None
    """Noise on the executed, not the recorded actions, to show recovery; 1 is half the action range; default:
    the task's, as for `prism train TASK`."""
    beyond: Annotated[int | None, option("N")] = None
    """Steps to record after success, so that a policy learns to come to rest; default: the task's, as above."""
    failures: bool = False
    """Keep failed episodes as well: --episodes attempts in all."""
    workers: Annotated[int | None, option("N")] = None
    """Parallel worker processes; default: one per core."""
    overwrite: bool = False
    """Replace an existing dataset."""

    def __post_init__(self) -> None:
        check_numbers(self, "--", {"[1, inf)": "episodes workers", "[0, inf)": "seed noise beyond"})

    def run(self) -> None:
        from rich.console import Console

        from prism.data.locate import DOWNLOADS
        from prism.experiments.demonstrations import COLLECTED
        from prism.experiments.recipes import recipe
        from prism.sims.collect import collect
        from prism.sims.task_table import TASKS

        self.find_calvin()
        if self.task in DOWNLOADS:
            self._download()
            return
        usual, out = recipe(self.task).demonstrations, self.out or COLLECTED / self.task
        if out.exists() and not self.overwrite:
            raise PrismError(f"{out} exists already: name another folder with --out, or replace it with --overwrite")
        how: Any = {"overwrite": self.overwrite, "workers": self.workers, "failures": self.failures}
        how["seed"] = TASKS[self.task].first_seed if self.seed is None else self.seed
        how["noise"] = usual.noise if self.noise is None else self.noise
        how["beyond"] = usual.beyond if self.beyond is None else self.beyond
        collected = collect(self.task, self.episodes, out, console=Console(stderr=True), **how)
        expert = f"the expert succeeded in {collected.success:.0%} of {collected.attempts} attempts"
        print(f"{collected.path}: {collected.episodes} episodes, {collected.steps} steps; {expert}")

    def _download(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

        from prism.data.locate import download
        from prism.io.progress import Bar

        for name in ("episodes", "seed", "noise", "beyond", "failures", "workers"):
            if getattr(self, name) != getattr(Collect, name):
                raise PrismError(
                    f"--{name} is for a task that is recorded; {self.task} is fetched as it is: leave it out"
                )
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            row = bar.add_task(self.task, total=None)
            tell = lambda done, total: bar.update(row, completed=done, total=total)  # noqa: E731
            print(download(self.task, self.out, self.overwrite, progress=tell))


@dataclass(frozen=True, kw_only=True)
class _OfDataset(DatasetOptions):
    """A command that reads one dataset."""

    episodes: Annotated[str, option("0-46,48-")] = ""
    """Only these episodes."""

    def open(self, path: Path, skip_damaged: bool | None) -> EpisodeSource:
        from prism.data import open_dataset, parse_map

        more = (self.sensor, self.tolerance, self.episodes, self.without, skip_damaged)
        return open_dataset(path, self.fps, parse_map(self.map), *more)


@dataclass(frozen=True)
class Inspect(_OfDataset):
    """Summarise a dataset: episodes, lengths, sensors, ranges.

    Try:
        prism data inspect data/metaworld-button-press-topdown
        prism data inspect pusht_cchi_v7_replay.zarr.zip --page pusht.html
        prism data inspect my-dataset --episodes 0-3 --rerun my.rrd      cameras, depth, touch, sound, actions over time
        prism data inspect lift.hdf5 --map agentview_image=rgb_static robot0_eef_pos=proprio actions=action

    Reads prism's own format, Diffusion Policy's zarr, HDF5 of robomimic and ALOHA, LeRobot v2.0, v2.1 and v3, CALVIN,
    ROS 2 bags.
    """

    path: Positional[Path]
    """The dataset: a folder or a file."""
    page: OutputFile = None
    """Write a page with plots of every stream and sample frames of every camera: one HTML file."""
    rerun: OutputFile = None
    """Write every episode for the rerun viewer: one .rrd file (pip install 'prism-policy[rerun]')."""
    overwrite: bool = False
    """Replace these files if they exist."""

    def run(self) -> None:
        from rich.console import Console

        from prism.data import format_name
        from prism.data.inspect import print_summary, readable, summarise
        from prism.evaluation.results import refuse_existing
        from prism.report.dataset_page import write_page

        refuse_existing(self.rerun, overwrite=self.overwrite)
        source, problems = readable(self.open(self.path, skip_damaged=None))
        with steps_bar() as advance:
            if self.page is None:
                summary = summarise(source, format_name(Path(source.path)), advance, problems)
            else:
                summary = write_page(source, self.page, self.overwrite, advance, problems)
        print_summary(summary, Console())
        if self.page is not None:
            print(f"page: {self.page}")
        if self.rerun is not None:
            from prism.report.rerun_log import log_dataset

            with steps_bar() as advance:
                print(f"rerun: {log_dataset(source, self.rerun, self.overwrite, advance)}")


@dataclass(frozen=True)
class Convert(_OfDataset):
    """Convert a dataset to prism's own format, LeRobot v3, or (robosuite tasks) robomimic's HDF5.

    Try:
        prism data convert lift.hdf5 data/lift
        prism data convert data/lift lift-lerobot --to lerobot
        prism data convert pusht-human pusht-lerobot --to lerobot
        prism data convert data/robosuite-lift lift.hdf5 --to robomimic
        prism data convert calvin/training data/calvin --sensor 'depth_*.clip=0.1,5' 'rgb_*.random_shift=6'
    """

    path: Positional[Path]
    """The dataset: a folder or a file, hf://USER/NAME, or a recipe: the demonstrations it trains on."""
    out: Positional[Path]
    """The new folder."""
    to: Literal["prism", "lerobot", "robomimic"] = "prism"
    """The new format."""
    task: Annotated[str | None, option("TEXT")] = None
    """Instruction of the demonstrations; default: the dataset's."""
    codec: Literal["h264", "av1"] = "h264"
    """LeRobot: how pictures are compressed."""
    pictures: Literal["auto", "video", "pixels"] = "auto"
    """Of prism's own format: video (h264, about 30 times smaller, not the same bytes), or every pixel; auto: a camera
    that is video in the dataset stays video."""
    skip_damaged: bool = False
    """Leave out episodes that hold NaN, or whose files are missing or cannot be decoded."""
    overwrite: bool = False
    """Replace the new folder if it exists."""

    def run(self) -> None:
        from prism.data.convert import convert

        source = self._source()
        with steps_bar() as advance:
            if self.to == "robomimic":
                try:
                    from prism_sims.robosuite import to_robomimic  # replays them, for the simulator's states
                except ImportError:
                    raise PrismError("--to robomimic replays in robosuite: pip install ./packages/prism-sims") from None

                episodes, steps = to_robomimic(source, self.out, overwrite=self.overwrite, progress=advance)
                print(f"{self.out}: {episodes} episodes, {steps} steps")
                return
            how: Any = {"to": self.to, "task": self.task, "codec": self.codec, "pictures": self.pictures}
            tell = lambda text: print(text, flush=True)  # noqa: E731
            result = convert(source, self.out, **how, overwrite=self.overwrite, progress=advance, say=tell)
        for note in result.notes:
            print(f"note: {note}")
        print(f"{result.path}: {result.episodes} episodes, {result.steps} steps")

    def _source(self) -> EpisodeSource:
        from rich.console import Console

        from prism.data.damage import chosen
        from prism.data.views import with_sensor_settings
        from prism.experiments.demonstrations import open_demonstrations
        from prism.experiments.recipes import names, recipe

        if not self.path.exists() and str(self.path) in names():
            if self.map or self.fps or self.tolerance:
                raise PrismError(f"'{self.path}' is a recipe: --map, --fps and --tolerance are for datasets of yours")
            experiment = recipe(str(self.path))
            source = open_demonstrations(experiment.demonstrations, experiment.task, Console(stderr=True))[1]
            return with_sensor_settings(chosen(source, self.episodes, self.without, self.skip_damaged), self.sensor)
        return self.open(self.path, self.skip_damaged)


@contextmanager
def steps_bar() -> Iterator[Callable[[int, int], None]]:
    """How far it is; call it with the steps done and the steps in all."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    from prism.io.progress import Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("steps", total=None)
        yield lambda done, total: bar.update(row, completed=done, total=total)
