"""`prism study arithmetic`: do the paper's own numbers agree with each other? Its tables, added up. No measurement.

The constants below are the paper's (tables of Sec. 5, App. B, C and E); the claims are sentences of its text that
follow from them, or do not.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from rich.console import Console

from prism.studies.report import Claim, Study, confirmed, show_rows

# App. E.6, PRISM's rows, % success; two cells that the tables leave out are not here.
PER_TASK: dict[str, tuple[float, ...]] = {
    "easy": (
        *(100, 100, 100, 90, 100, 100),
        *(100, 100, 100, 100, 100, 100, 100, 38),
        *(100, 53, 76, 100, 100, 93, 55, 83),
        *(100, 100, 100),
    ),
    "medium": (98, 63, 70, 93, 97, 100, 88, 75, 49, 98, 39),
    "hard": (100, 30, 48, 63, 75),  # push-back is a dash
    "very_hard": (68, 83, 78, 100, 98),
}
TABLE_1 = {"easy": 96.4, "medium": 85.5, "hard": 58.0, "very_hard": 85.8}
FLOW_POLICY = {"easy": 92.1, "medium": 73.6, "hard": 46.2, "very_hard": 80.0}  # the strongest one-step flow baseline
DIFFUSION = {"easy": 83.6, "medium": 31.1, "hard": 9.0, "very_hard": 26.6}
PARAMETERS = {"prism": 44.4, "unet_rs_imle": 91.8}
MEGABYTES = {"prism": 169.4, "unet_rs_imle": 350.4}
LATENCY_MS = {"diffusion": (142.3, 285.7), "flow_matching": (73.8, 147.6), "prism": (15.0, 31.2)}
PRISM_P99_MS = (16.0, 35.8)
JERK = {"diffusion": 3.783, "flow_matching": 1.148, "imle": 1.053, "prism": 0.052}
SWITCH = {"imle": 0.276, "prism": 0.101}
CALVIN = {"diffusion": 36.4, "flow_matching": 44.4, "imle": 56.2, "prism": 65.2}
CALVIN_GAINS = {"imle": 10, "diffusion": 28, "flow_matching": 20}  # "about", in the text
TABLE_SIZE_SUCCESS = {"prism": 66.0, "diffusion": 62.0, "flow_matching": 61.5, "unet_rs_imle": 58.8}
ROBOMIMIC = {"prism": (1.00, 1.00, 0.84, 0.91, 0.86), "adaflow": (1.00, 1.00, 0.98, 0.92, 0.88)}
FAILURES = ((10, 15), (5, 10), (8, 12), (1, 2))  # % of failures: switching, jerk, occlusion, other


def run() -> Study:
    means = {split: mean(values) for split, values in PER_TASK.items()}
    figures: dict[str, Any] = {
        "metaworld_means_of_the_per_task_table": means,
        "metaworld_tasks_listed": sum(len(values) for values in PER_TASK.values()),
        "robomimic_means": {name: mean(values) for name, values in ROBOMIMIC.items()},
        "jerk_ratios": {name: value / JERK["prism"] for name, value in JERK.items() if name != "prism"},
        "latency_ratios": {
            name: [a / b for a, b in zip(values, LATENCY_MS["prism"], strict=True)]
            for name, values in LATENCY_MS.items()
            if name != "prism"
        },
    }
    return Study("arithmetic", figures, tuple(claims(figures)), {}, ())


def claims(figures: dict[str, Any]) -> list[Claim]:
    means = figures["metaworld_means_of_the_per_task_table"]
    over_flow = {split: TABLE_1[split] - FLOW_POLICY[split] for split in TABLE_1}
    over_diffusion = {split: TABLE_1[split] - DIFFUSION[split] for split in TABLE_1}
    fewer = 1 - PARAMETERS["prism"] / PARAMETERS["unet_rs_imle"]
    smaller = 1 - MEGABYTES["prism"] / MEGABYTES["unet_rs_imle"]
    calvin = {name: CALVIN["prism"] - value for name, value in CALVIN.items() if name != "prism"}
    jerk, robomimic = figures["jerk_ratios"], figures["robomimic_means"]
    least, most = (sum(shares) for shares in zip(*FAILURES, strict=True))
    rate = 1000 / PRISM_P99_MS[1]
    ratios = figures["latency_ratios"]
    return [
        Claim(
            "Table 1, App. E.6",
            "MetaWorld means 96.4 / 85.5 / 58.0 / 85.8 over 50 tasks",
            f"the per-task table has {figures['metaworld_tasks_listed']} tasks with a number; its means are "
            + " / ".join(f"{value:.1f}" for value in means.values()),
            confirmed(all(abs(means[split] - TABLE_1[split]) < 0.1 for split in means)),
        ),
        Claim(
            "Sec. 5, MetaWorld",
            "4 to 5 points on Easy and Medium over the strongest one-step flow baseline",
            f"Easy {over_flow['easy']:.1f}, Medium {over_flow['medium']:.1f} by Table 8",
            confirmed(over_flow["medium"] <= 5.5),
        ),
        Claim(
            "Sec. 5, MetaWorld",
            "5 to 12 points on Hard and Very Hard over it",
            f"Hard {over_flow['hard']:.1f}, Very Hard {over_flow['very_hard']:.1f} by Table 8",
            confirmed(all(4.9 <= over_flow[split] <= 12.1 for split in ("hard", "very_hard"))),
            "the conclusion says up to 5 for the same splits",
        ),
        Claim(
            "Sec. 5, MetaWorld",
            "gains over Diffusion Policy reach about 12 points on the hardest tasks",
            f"Hard {over_diffusion['hard']:.1f}, Very Hard {over_diffusion['very_hard']:.1f} by Table 1",
            confirmed(over_diffusion["very_hard"] < 15),
            "the conclusion says about 20",
        ),
        Claim(
            "Sec. 5, CALVIN",
            "about 10 over IMLE Policy, 28 over diffusion, 20 over flow matching",
            f"{calvin['imle']:.1f}, {calvin['diffusion']:.1f}, {calvin['flow_matching']:.1f} by Table 2",
            confirmed(all(abs(calvin[name] - said) <= 1.1 for name, said in CALVIN_GAINS.items())),
            f"but Table 6 has {TABLE_SIZE_SUCCESS['prism']:.0f} against {TABLE_SIZE_SUCCESS['diffusion']:.0f} for "
            "diffusion, and the abstract says 25",
        ),
        Claim(
            "Sec. 5, CALVIN",
            "jerk is reduced 20 times (abstract: 20 to 50 times), mode switches 3 times",
            ", ".join(f"{value:.0f}x against {name}" for name, value in jerk.items())
            + f"; switches {SWITCH['imle'] / SWITCH['prism']:.1f}x",
            confirmed(19 <= jerk["imle"] <= 51 and max(jerk.values()) <= 51),
            "20 times is against IMLE Policy; against diffusion the table gives more than the text",
        ),
        Claim(
            "App. B.3",
            "48 % fewer parameters (44.4 M against 91.8 M) and 45 % less memory",
            f"{fewer:.0%} fewer, {smaller:.0%} less",
            confirmed(abs(fewer - 0.48) < 0.01 and abs(smaller - 0.45) < 0.01),
        ),
        Claim(
            "App. B.3, Table 7",
            "latency stays below 33 ms (30 Hz), mean and p99, at both horizons",
            f"p99 {PRISM_P99_MS[1]} ms at (16, 32): {rate:.1f} Hz",
            confirmed(PRISM_P99_MS[1] <= 33),
            "the text below the table says about 22 Hz for the same row",
        ),
        Claim(
            "Table 7",
            "latency ratios at (8, 16): 9.5 against Diffusion Policy at NFE 10, 4.9 against Flow Matching at NFE 5",
            ", ".join(f"{name} {value[0]:.1f}x" for name, value in ratios.items()),
            confirmed(abs(ratios["diffusion"][0] - 9.5) < 0.1 and abs(ratios["flow_matching"][0] - 4.9) < 0.1),
            "measured here: prism bench latency",
        ),
        Claim(
            "Table 3 (Robomimic)",
            "averages 92.2 (PRISM) and 95.6 (AdaFlow)",
            f"{100 * robomimic['prism']:.1f} and {100 * robomimic['adaflow']:.1f}",
            confirmed(all(abs(100 * robomimic[n] - v) < 0.1 for n, v in (("prism", 92.2), ("adaflow", 95.6)))),
            "AdaFlow is called NFE 1.2 in the text and 2 in the table",
        ),
        Claim(
            "App. E.5",
            "the classes of failures cover the failures (100+ episodes)",
            f"they add up to {least} to {most} % of them; 30 to 45 episodes as 10 to 15 % makes 300",
            confirmed(least >= 95),
        ),
    ]


def show(study: Study, console: Console) -> None:
    rows = [[split, f"{value:.1f}", f"{TABLE_1[split]}"] for split, value in study.figures[_MEANS].items()]
    show_rows("MetaWorld, PRISM", ("split", "mean of the per-task table", "Table 1"), rows, console)


_MEANS = "metaworld_means_of_the_per_task_table"
