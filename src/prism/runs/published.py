"""The numbers that others published for the benchmarks, to stand beside ours; never mixed with them.

`PAPER` is what the PRISM paper prints for PRISM, as success rates. Its MetaWorld tables disagree with each other: the
means of the per-task table are .915 / .791 / .632 / .854, the split means that it prints are the ones below. Four
tasks have no number in it.
"""

from __future__ import annotations

PAPER: dict[str, dict[str, float]] = {
    "metaworld": {
        "easy": 0.964, "medium": 0.855, "hard": 0.580, "very-hard": 0.858, "all": 0.842,
        **{
            f"metaworld-{task}": percent / 100
            for task, percent in {
                "button-press-topdown": 100, "button-press-topdown-wall": 100, "button-press-wall": 100,
                "peg-unplug-side": 90, "door-close": 100, "door-lock": 100, "door-open": 100, "door-unlock": 100,
                "drawer-close": 100, "drawer-open": 100, "faucet-close": 100, "faucet-open": 100, "handle-press": 100,
                "handle-pull": 38, "handle-press-side": 100, "handle-pull-side": 53, "lever-pull": 76,
                "plate-slide": 100, "plate-slide-back": 100, "dial-turn": 93, "reach": 55, "reach-wall": 83,
                "plate-slide-side": 100, "window-close": 100, "window-open": 100, "basketball": 98, "bin-picking": 63,
                "box-close": 70, "coffee-pull": 93, "coffee-push": 97, "hammer": 100, "peg-insert-side": 88,
                "push-wall": 75, "soccer": 49, "sweep": 98, "sweep-into": 39, "assembly": 100, "hand-insert": 30,
                "pick-out-of-hole": 48, "pick-place": 63, "push": 75, "shelf-place": 68, "disassemble": 83,
                "stick-pull": 78, "stick-push": 100, "pick-place-wall": 98,
            }.items()
        },
    },
    "robomimic": {
        "robosuite-lift": 1.0, "robosuite-can": 1.0, "robosuite-square": 0.84, "robosuite-transport": 0.91,
        "robosuite-tool-hang": 0.86, "all": 0.922,
    },
    "calvin": {"single": 0.652},  # 10 % of environment D, K = 8
}  # fmt: skip

# Push-T is no success table of the paper; Diffusion Policy's own figures (state inputs) stand beside it.
OTHERS: dict[str, str] = {
    "pusht": "Diffusion Policy, state inputs, published: score .95 at the best checkpoint, .91 on average of the last "
    "ten; LeRobot's run of it: 64 % success, mean best overlap .957. Our seeds are Diffusion Policy's, but "
    "gym-pusht, LeRobot's environment and ours, makes other starts of them",
    "robomimic": "Diffusion Policy from images, published: lift 1.00, can .97, square .92, transport .93, "
    "tool-hang .73 (average of the last ten checkpoints)",
    "tabletop": "The paper's four commands on hardware (25 demonstrations each, 50 trials): 92, 88, 84, 78 %; this "
    "world is our own, so nothing here is comparable but the kind of task",
    "metaworld": "The paper prints split means that its own per-task table does not have (.915 / .791 / .632 / .854); "
    "its inputs are pictures and proprioception, ours are in the task's name",
    "calvin": "The paper reports single-task success with 8 candidates after training on 10 % of environment D; it "
    "reports no chains",
}
