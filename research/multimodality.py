"""Push-T from starts with two equally good ways: which methods take both, and which the average? (App. B.1, Fig. 5)

Try:
    python -m research multimodality --json multimodality.json --plot multimodality.png
    python -m research multimodality --methods --policies prism=runs/pusht-human mse=runs/mse      trained before

The scene is that of prism_sims/pusht.py: the agent has to walk round the block, left or right. Its start is swept along
the T's top edge; at 0 the two ways are equally good, and the demonstrations (with their mirror images) equally often
take either. The default recipe, pusht-edge, has demonstrations from around these starts; pusht and pusht-human have
them from everywhere, and need a longer training to say anything here.

    shares.METHOD.OFFSET = {left, right, neither, pushed, mode_distance, score, success, jerk, paths}
A rollout goes left or right by the side on which the agent first passes the bar, seen from the block as it lies then;
"neither": it never passes it, or only after it has pushed the block away. `pushed`: share of all rollouts that do so,
the block more than MOVED away at the end: straight, the average of the two ways. The expert has no jerk (null).
Rollouts differ in the random numbers of the policy alone. `mode_distance`: pixels between the mean paths of the two
(docs/reference/metrics.md). `candidates`: share of the plans of the first replan that end left of the axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from prism_sims.pusht import BEYOND, GAP, SIDE, edge_start
from rich.console import Console
from rich.progress import Progress

from prism.cli.style import option
from prism.controller import Controller
from prism.errors import PrismError
from prism.evaluation import metrics
from prism.experiments.recipes import Experiment, recipe, with_budget, with_method
from prism.experiments.run_folder import Run
from prism.io.jsonconfig import with_settings
from research.report import Claim, ComputedTrials, Drawn, Result, Study, confirmed, settings_of, show_rows, train_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from prism_sims.pusht import PushTEnv
    from prism_sims.pusht_expert import PushTExpert

Float = NDArray[np.float64]

MOVED = 40.0  # pixels that the block may have been pushed until then
PAST = 15.0  # pixels behind the bar's outer edge: half the bar
EXPERT = "expert"
DETERMINISTIC = ("mse", "act")  # one plan for one observation
BOTH, ONE = 0.25, 0.75  # a mode is covered; a mode is (nearly) the only one


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    recipe: str = "pusht-edge"
    """A Push-T recipe: pusht-edge (starts like those of the study), pusht or pusht-human (from everywhere)."""
    methods: Annotated[tuple[str, ...], option("METHOD ...")] = ("prism", "mse")
    """Methods to train."""
    policies: Annotated[tuple[str, ...], option("NAME=RUN ...")] = ()
    """Runs that are there already, beside them."""
    steps: int = 3000
    """Training steps of each method."""
    offsets: Annotated[tuple[float, ...], option("PX ...")] = (-60.0, -40.0, -20.0, 0.0, 20.0, 40.0, 60.0)
    """Starts along the block's top edge, in pixels from its middle; 0 must be among them."""
    beyond: float = BEYOND
    """How far past the goal the block lies, in pixels."""
    gap: float = GAP
    """From the bar's edge to the agent's centre, in pixels."""
    rollouts: int = 40
    """From each start."""
    max_steps: int = 120
    """Of a rollout."""
    seed: int = 0
    """Of the trainings."""
    work: Annotated[Path, option("FOLDER")] = Path("runs/study-multimodality")
    """Where the runs and finished parts are kept; default: runs/study-multimodality."""

    def __post_init__(self) -> None:
        if self.rollouts < 1 or self.steps < 1 or self.max_steps < 10 or not self.offsets:
            raise PrismError("multimodality: offsets, rollouts, steps must not be empty; max_steps >= 10")
        if not (self.methods or self.policies):
            raise PrismError("multimodality: name a method to train, or a policy that is there (--policies)")
        if bad := [text for text in self.policies if not all(text.partition("="))]:
            raise PrismError(f"multimodality: --policies {bad[0]}: write NAME=RUN, for example mse=runs/mse")
        names = [EXPERT, *self.methods, *(text.partition("=")[0] for text in self.policies)]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise PrismError(
                f"multimodality: '{repeated[0]}' is named twice, among methods and policies (or is the expert): "
                "use another name, or leave it out of --methods"
            )
        if 0.0 not in self.offsets:
            raise PrismError("multimodality: offsets must hold 0, the symmetric start")


def side_of(states: Float) -> str:
    """left, right or neither, from agent xy, block xy and angle (T, 5): the side on which the agent first passes the
    bar's outer edge, in the block's own frame (u along the bar, v along the stem; the bar is v in 0 .. 30)."""
    cos, sin = np.cos(states[:, 4]), np.sin(states[:, 4])
    x, y = (states[:, :2] - states[:, 2:4]).T
    u, v = cos * x + sin * y, cos * y - sin * x
    past = np.flatnonzero(v > PAST)
    if len(past) == 0 or np.linalg.norm(states[past[0], 2:4] - states[0, 2:4]) > MOVED:
        return "neither"
    return "left" if u[past[0]] < 0 else "right"


def pushed(states: Float) -> bool:
    """The block was pushed away, and not after the agent had gone round it."""
    return side_of(states) == "neither" and bool(np.linalg.norm(states[-1, 2:4] - states[0, 2:4]) > MOVED)


def rollout(env: PushTEnv, controller: Controller, state: Float, seed: int, max_steps: int) -> dict[str, Any]:
    """One episode from `state`: its path, score, jerk; and where the first plans would go."""
    controller.reset(seed)
    observation = env.reset_to_state(state)
    states, best, success = [env.state()], 0.0, False
    actions: list[NDArray[np.float32]] = []
    ends: list[float] = []
    while len(actions) < max_steps:
        action = np.clip(controller.act(observation), env.action_low, env.action_high).astype(np.float32)
        if not actions and controller.last_plan is not None:
            plans = controller.last_plan.candidates[:, :, :2].astype(np.float64)
            ends = list((plans[:, -1] - state[2:4]) @ SIDE)
        result = env.step(action)
        actions.append(action)
        states.append(env.state())
        observation, best = result.observation, max(best, float(result.score))
        success = success or result.success
        if result.done:
            break
    return {
        "states": np.stack(states),
        "score": best,
        "success": success,
        "jerk": metrics.jerk(np.stack(actions), controller.scale),
        "ends": ends,
    }


def mode_distance(paths: Sequence[Float], modes: Sequence[str], a: str, b: str, steps: int = 40) -> float | None:
    """Distance between the mean paths of modes `a` and `b`: mean over steps 0 .. `steps` of the Euclidean distance.

        D = 1 / (steps + 1) * sum_t || mean_{i in a} x_t^i - mean_{i in b} x_t^i ||

    paths: (T, 2) each, one point a control step; one that ends early stays where it ended. None where a mode is empty:
    a mean of nothing is nowhere.
    """
    means = []
    for mode in (a, b):
        members = [_held(path, steps + 1) for path, of in zip(paths, modes, strict=True) if of == mode]
        if not members:
            return None
        means.append(np.mean(members, axis=0))
    return float(np.linalg.norm(means[0] - means[1], axis=-1).mean())


def _held(path: Float, length: int) -> Float:
    return np.asarray(path, dtype=np.float64)[np.minimum(np.arange(length), len(path) - 1)]


def summarise(rollouts: list[dict[str, Any]]) -> Result:
    sides = [side_of(r["states"]) for r in rollouts]
    ends = np.array([end for r in rollouts for end in r["ends"]])
    return {
        **{side: sides.count(side) / len(sides) for side in ("left", "right", "neither")},
        "pushed": metrics.mean([float(pushed(r["states"])) for r in rollouts]),
        "mode_distance": mode_distance([r["states"][:, :2] for r in rollouts], sides, "left", "right"),
        "candidates": float((ends > 0).mean()) if len(ends) else None,
        "score": metrics.mean([r["score"] for r in rollouts]),
        "success": metrics.mean([float(r["success"]) for r in rollouts]),
        "jerk": metrics.mean(jerks) if (jerks := [r["jerk"] for r in rollouts if r["jerk"] is not None]) else None,
        "rollouts": len(rollouts),
        "paths": [np.round(r["states"][:41:2, :2], 1).tolist() for r in rollouts[:20]],  # for the picture
        "sides": sides[:20],
    }


def experiment_of(config: Config, method: str) -> Experiment:
    experiment = recipe(config.recipe)
    if experiment.task is None or not experiment.task.startswith("pusht"):
        raise PrismError(f"multimodality: '{config.recipe}' is no Push-T recipe")
    experiment = experiment if method == "prism" else with_method(experiment, method)
    return with_settings(with_budget(experiment, steps=config.steps, seed=config.seed), ["train.threads=1"])


def train_and_roll(config: Config, trials: ComputedTrials, method: str) -> Result:
    experiment = experiment_of(config, method)
    train_run(experiment, trials.training(method), trials.console)
    return roll_policy(config, trials.training(method), trials.console)


def roll_policy(config: Config, run: Path, console: Console) -> Result:
    """{offset: summary} of the policy of a run."""
    from prism_sims.pusht import PushTEnv

    controller = Run(run).controller()
    env = PushTEnv(max_steps=config.max_steps)
    found = {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("rollouts", total=len(config.offsets) * config.rollouts)
        for offset in config.offsets:
            state, rolled = edge_start(offset, config.beyond, config.gap), []
            for seed in range(config.rollouts):
                rolled.append(rollout(env, controller, state, seed, config.max_steps))
                progress.advance(bar)
            found[f"{offset:g}"] = summarise(rolled)
    env.close()
    return found


def roll_expert(config: Config, console: Console) -> Result:
    """What the demonstrations' author does from these starts: the shares that a policy should have."""
    from prism_sims.pusht import PushTEnv
    from prism_sims.pusht_expert import PushTExpert

    env = PushTEnv(max_steps=config.max_steps)
    found = {}
    count = min(config.rollouts, 10)  # it thinks for a second before a push
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("the expert's rollouts", total=len(config.offsets) * count)
        for offset in config.offsets:
            state, rolled = edge_start(offset, config.beyond, config.gap), []
            for seed in range(count):
                rolled.append(expert_rollout(env, PushTExpert(env), state, seed, config.max_steps))
                progress.advance(bar)
            found[f"{offset:g}"] = summarise(rolled)
    env.close()
    return found


def expert_rollout(env: PushTEnv, expert: PushTExpert, state: Float, seed: int, max_steps: int) -> dict[str, Any]:
    env.reset_to_state(state)
    expert.reset(seed)
    states, best, success = [env.state()], 0.0, False
    while len(states) <= max_steps:
        result = env.step(expert.act())
        states.append(env.state())
        best, success = max(best, float(result.score)), success or result.success
        if result.done:
            break
    return {"states": np.stack(states), "score": best, "success": success, "jerk": None, "ends": []}


def run(config: Config, console: Console) -> Study:
    trials = ComputedTrials(config.work, console)
    plan = {"offsets": list(config.offsets), "beyond": config.beyond, "gap": config.gap}
    plan |= {"rollouts": config.rollouts, "max_steps": config.max_steps, "seed": config.seed}
    shares: dict[str, Result] = {}
    if (trial := trials.get(EXPERT, plan, functools.partial(roll_expert, config, trials.console))) is not None:
        shares[EXPERT] = trial
    for method in config.methods:
        settings = {**settings_of(experiment_of(config, method)), **plan}
        if (
            trial := trials.get(method, settings, functools.partial(train_and_roll, config, trials, method))
        ) is not None:
            shares[method] = trial
    for text in config.policies:
        name, _, path = text.partition("=")
        run = Run(path)
        settings = {**settings_of(run.experiment), **plan, "sha256": run.weights_id()["sha256"]}
        if (
            trial := trials.get(
                f"{name}-given", settings, functools.partial(roll_policy, config, Path(path), trials.console)
            )
        ) is not None:
            shares[name] = trial
    settings = {"recipe": config.recipe, "methods": list(config.methods), "steps": config.steps, **plan}
    settings["policies"] = [text.partition("=")[0] for text in config.policies]
    return Study(
        "multimodality",
        {"shares": shares},
        claims(shares),
        settings,
        (config.seed,),
        tuple(trials.missing),
        trials.commits,
    )


def _covers(entry: Result) -> bool:
    return bool(min(entry["left"], entry["right"]) >= BOTH)


def _said(entry: Result) -> str:
    words = ", ".join(f"{entry[side]:.0%} {side}" for side in ("left", "right", "neither"))
    return f"{words}, of {entry['rollouts']} rollouts"


def claims(shares: dict[str, Result]) -> tuple[Claim, ...]:
    found = []
    if "prism" in shares:
        middle = shares["prism"]["0"]
        paper = "PRISM keeps two distinct modes (left, right) where the start is ambiguous"
        note = "" if _covers(middle) else f"asked: each at least {BOTH:.0%}"
        found.append(Claim("App. B.1, Fig. 5", paper, _said(middle), confirmed(_covers(middle)), note))
        found += _corners(shares)
    unimodal = {
        "mse": ("Sec. 2", "behaviour cloning with a squared error averages the modes"),
        "flow_matching": ("App. B.1, Fig. 5", "Flow Matching averages the two modes into a straight push"),
    }
    for method, (where, paper) in unimodal.items():
        if method in shares:
            middle = shares[method]["0"]
            straight = middle["pushed"] >= ONE
            note = "" if straight else f"asked: at least {ONE:.0%} push the block without having gone round it"
            if method in DETERMINISTIC:
                note = "; ".join(filter(None, [note, "a deterministic policy: every rollout is the same path"]))
            ours = f"{_said(middle)}; {middle['pushed']:.0%} push it straight ahead"
            found.append(Claim(where, paper, ours, confirmed(straight), note))
    if "imle" in shares and "prism" in shares:
        rarer = {name: min(shares[name]["0"]["left"], shares[name]["0"]["right"]) for name in ("imle", "prism")}
        words = "the rarer side: " + ", ".join(f"{name} {value:.0%}" for name, value in rarer.items())
        paper = "the IMLE baseline shows fewer distinct modes than PRISM"
        found.append(Claim("Fig. 5", paper, words, confirmed(rarer["imle"] < rarer["prism"] - 0.1)))
    if "diffusion" in shares and "prism" in shares:
        jerks = {name: metrics.mean([e["jerk"] for e in shares[name].values()]) for name in ("diffusion", "prism")}
        words = "jerk: " + ", ".join(f"{name} {value:.3f}" for name, value in jerks.items())
        paper = "Diffusion Policy's branches are noisier than PRISM's"
        found.append(Claim("Fig. 5", paper, words, confirmed(jerks["diffusion"] > jerks["prism"])))
    return tuple(replace(one, note="; ".join(filter(None, (one.note, "of one training each")))) for one in found)


def _corners(shares: dict[str, Result]) -> list[Claim]:
    """The paper's contrast to the middle; it can only be there if the demonstrations have it."""
    offsets = sorted(float(offset) for offset in shares["prism"])
    ends = [f"{offset:g}" for offset in (offsets[0], offsets[-1]) if offset != 0.0]
    if not ends:
        return []
    ours = "; ".join(f"{end} px: {_said(shares['prism'][end])}" for end in ends)
    paper, where = "near the corners the start is unimodal", "App. B.1"
    if EXPERT in shares and any(_covers(shares[EXPERT][end]) for end in ends):
        note = "the demonstrations' author goes both ways from there too"
        return [Claim(where, paper, ours, "cannot be tested here", note)]
    held = all(max(shares["prism"][end]["left"], shares["prism"][end]["right"]) >= ONE for end in ends)
    return [Claim(where, paper, ours, confirmed(held))]


def show(study: Study, console: Console) -> None:
    rows = [
        [f"{method}, {offset}", *(f"{e[side]:.0%}" for side in ("left", "right", "neither")), f"{e['score']:.2f}"]
        for method, by_offset in study.figures["shares"].items()
        for offset, e in by_offset.items()
    ]
    heads = ("method, start", "left", "right", "neither", "score")
    show_rows("Ways round the block, by where the agent starts along its top edge (pixels)", heads, rows, console)


def draw(study: Study) -> Figure:
    """The paper's figure: columns sweep the start, a row a method, paths over the block."""
    from matplotlib.figure import Figure
    from prism_sims.pusht_features import keypoints

    shares = study.figures["shares"]
    offsets = study.settings["offsets"]
    figure = Figure(figsize=(1.6 * len(offsets), 1.7 * len(shares)), layout="constrained")
    grid = figure.subplots(len(shares), len(offsets), squeeze=False)
    colors = {"left": "#0072b2", "right": "#d55e00", "neither": "#777777"}
    config = Config(beyond=study.settings["beyond"], gap=study.settings["gap"])
    for row, (method, by_offset) in zip(grid, shares.items(), strict=True):
        for axes, offset in zip(row, offsets, strict=True):
            state, entry = edge_start(offset, config.beyond, config.gap), by_offset[f"{offset:g}"]
            axes.fill(*keypoints(state[2:5]).T, color="#bbbbbb")
            for path, side in zip(entry["paths"], entry["sides"], strict=True):
                axes.plot(*np.asarray(path).T, color=colors[side], linewidth=0.7, alpha=0.6)
            axes.plot(*state[:2], "ko", markersize=3)
            axes.set(xlim=(20, 380), ylim=(500, 140), xticks=[], yticks=[], aspect="equal")
            axes.set_title(f"{entry['left']:.0%} | {entry['right']:.0%}", fontsize=7)
        row[0].set_ylabel(method, fontsize=8)
    return figure
