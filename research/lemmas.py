"""The paper's theory as checks: quantile variance, FAVOR+ error, likelihood bound, soft term's limit. Seconds.

Try:
    python -m research lemmas --json lemmas.json --plot lemmas.png

    quantile     Lemma E.2: Var(Q_N(q)) = q(1-q) / (N f^2); N independent draws of an exponential, whose f is known
    rejection    what the literal threshold (a quantile of all pairs) rejects, when candidates are as good as the data
    favor        Theorem 1 of Performers as App. E.4 quotes it: error of attention by number of features, and its bias
    likelihood   Prop. E.1: log p(x) >= -d*^2 / (2 sigma^2) - log K + C; Lemma E.1: equality as sigma -> 0
    soft         Lemma E.3: -log sum exp(-d/tau) -> min d; the entropy; the barrier
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from prism.attention import orthogonal_features, softmax_attention
from prism.cli.style import option
from prism.distance import batch_distance
from prism.errors import PrismError
from prism.objective import soft_coverage
from prism.rows import quantile
from research import attention
from research.report import Claim, Drawn, Study, confirmed, show_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Config(Drawn):
    quantile: float = 0.2
    """q."""
    sample_sizes: Annotated[tuple[int, ...], option("N ...")] = (16, 64, 256, 1024, 4096)
    """Numbers of independent distances."""
    repeats: int = 2000
    """Samples of each size."""
    batch_sizes: Annotated[tuple[int, ...], option("B ...")] = (8, 32, 128, 512)
    """Batches of the literal rule."""
    candidates: int = 16
    """K."""
    features: Annotated[tuple[int, ...], option("M ...")] = (16, 64, 256, 1024, 4096, 16384)
    """Random features when measuring the error."""
    bias_features: Annotated[tuple[int, ...], option("M ...")] = (16, 64, 256)
    """Random features when measuring the bias."""
    bias_draws: int = 2000
    """Draws of the features for the bias."""
    temperatures: Annotated[tuple[float, ...], option("TAU ...")] = (1.0, 0.1, 0.01, 0.001)
    """Of the soft term."""
    seed: int = 0
    """Of every draw."""

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise PrismError(f"lemmas: quantile is {self.quantile}; it must lie between 0 and 1")
        sizes = (*self.sample_sizes, *self.batch_sizes, *self.features, *self.bias_features, self.candidates)
        if min(sizes) < 1 or self.repeats < 2 or self.bias_draws < 2 or min(self.temperatures) <= 0:
            raise PrismError("lemmas: sizes must be at least 1, repeats and draws 2, temperatures above 0")


def slope(x: list[float], y: list[float]) -> float:
    """Exponent of a power law through the points."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def quantile_variance(config: Config) -> dict[str, Any]:
    """{N: [measured variance, Lemma E.2's]}: exponential with mean 1, where f(F^-1(q)) = 1 - q."""
    rng = np.random.default_rng(config.seed)
    q = config.quantile
    found = {}
    for size in config.sample_sizes:
        values = np.quantile(rng.exponential(size=(config.repeats, size)), q, axis=1)
        found[str(size)] = [float(values.var(ddof=1)), q * (1 - q) / (size * (1 - q) ** 2)]
    exponent = slope([float(n) for n in found], [v[0] for v in found.values()])
    largest = found[str(max(config.sample_sizes))]
    return {"variance": found, "exponent": exponent, "ratio_at_largest": largest[0] / largest[1]}


def literal_rejection(config: Config) -> dict[str, float]:
    """{B: share of candidates with min_j D < the q-quantile of all D}; candidates and targets from one distribution."""
    rng = torch.Generator().manual_seed(config.seed)
    mixing = torch.randn(4, 16 * 2, generator=rng) / 2.0  # smooth sequences: 4 degrees of freedom, Tp = 16, Da = 2
    found = {}
    for size in config.batch_sizes:
        rates = []
        for _ in range(max(1, 256 // size)):
            targets = (torch.randn(size, 4, generator=rng) @ mixing).reshape(size, 16, 2)
            plans = (torch.randn(size * config.candidates, 4, generator=rng) @ mixing).reshape(size, -1, 16, 2)
            valid = torch.ones(size, 16, dtype=torch.bool)
            pairs = batch_distance(plans, targets, valid, torch.ones(2))
            rates.append(float((pairs.amin(2) < quantile(pairs, config.quantile)).float().mean()))
        found[str(size)] = float(np.mean(rates))
    return found


def favor_error(config: Config, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Median relative error by m, correct and literal; then the bias: mean estimate over many draws against exact."""
    bench = attention.Config(error_features=config.features, error_seeds=5, seed=config.seed)
    errors = attention.measure_errors(bench, bench.error_scale, advance)
    exponents = {
        name: slope([float(m) for m in by_m], list(by_m.values())) for name, by_m in errors.items() if len(by_m) > 1
    }
    rng = torch.Generator().manual_seed(config.seed)
    q, k, v = (scale * torch.randn(1, 1, 8, 16, generator=rng) for scale in (0.5, 0.5, 1.0))
    exact = softmax_attention(q, k, v)
    kernel = torch.exp(q @ k.transpose(-1, -2) / 4.0)  # sqrt(16)
    bias = {}
    for m in config.bias_features:
        estimates, kernels = [], []
        for _ in range(config.bias_draws):
            w = orthogonal_features(m, 16, rng)
            estimates.append(attention.linear_attention("favor", q, k, v, w))
            kernels.append(_positive(q, w) @ _positive(k, w).transpose(-1, -2))
        advance()
        bias[str(m)] = {"kernel": _relative_bias(kernels, kernel), "attention": _relative_bias(estimates, exact)}
    return {"error": errors, "exponent": exponents, "bias": bias}


def _positive(x: Tensor, w: Tensor) -> Tensor:
    """phi without the stabiliser: its inner product is the kernel, not only a multiple of it."""
    scaled = x / x.shape[-1] ** 0.25
    return torch.exp(scaled @ w.T - 0.5 * scaled.square().sum(-1, keepdim=True)) / math.sqrt(w.shape[0])


def _relative_bias(draws: list[Tensor], exact: Tensor) -> list[float]:
    """[|mean - exact| / |exact|, what chance alone would give at this number of draws]."""
    stacked = torch.stack(draws).double()
    error = (stacked.mean(0) - exact).norm() / exact.norm()
    chance = (stacked.var(0) / len(draws)).sum().sqrt() / exact.norm()
    return [float(error), float(chance)]


def likelihood_bound(config: Config) -> dict[str, Any]:
    """Prop. E.1 on random samples in 32 dimensions, float64: slack = log p - bound, which must lie in [0, log K]."""
    rng = np.random.default_rng(config.seed)
    lowest, highest, limit = math.inf, 0.0, {}
    for count in (1, 8, 64):
        samples, points = rng.normal(size=(count, 32)), rng.normal(size=(200, 32))
        squared = np.square(points[:, None] - samples[None]).sum(-1)  # (200, K)
        nearest = squared.min(1)
        for sigma in (0.01, 0.1, 0.5, 2.0):
            exponent = -squared / (2 * sigma**2)
            top = exponent.max(1, keepdims=True)
            density = top[:, 0] + np.log(np.exp(exponent - top).sum(1)) - math.log(count)  # without the constant
            slack = density - (-nearest / (2 * sigma**2) - math.log(count))
            lowest, highest = min(lowest, float(slack.min())), max(highest, float((slack / math.log(count + 1)).max()))
            if count == 64:
                limit[str(sigma)] = float(np.abs(-2 * sigma**2 * density - nearest).max())
    return {"slack_min": lowest, "slack_max_in_log_k": highest, "distance_error_by_sigma": limit}


def soft_limit(config: Config) -> dict[str, Any]:
    """Lemma E.3 with prism.objective.soft_coverage itself: as tau -> 0; the entropy identity; an orphan target."""
    rng = torch.Generator().manual_seed(config.seed)
    distance = 0.05 + torch.rand(64, config.candidates, generator=rng, dtype=torch.float64)
    valid = torch.ones_like(distance, dtype=torch.bool)
    least = float(distance.amin(1).mean())
    values, identity = {}, 0.0
    for tau in config.temperatures:
        literal, scaled = (float(soft_coverage(distance, valid, tau, flag)) for flag in (False, True))
        weight = torch.softmax(-distance / tau, 1)
        entropy = -(weight * weight.clamp_min(1e-300).log()).sum(1)
        free_energy = float(((weight * distance).sum(1) - tau * entropy).mean())
        identity = max(identity, abs(free_energy - scaled))
        values[str(tau)] = {"literal": literal, "scaled": scaled}
    tau = 0.1
    orphan = {}
    for gap in (1.0, 10.0, 100.0):
        alone = torch.full((1, config.candidates), gap, dtype=torch.float64)
        orphan[str(gap)] = float(soft_coverage(alone, torch.ones_like(alone, dtype=torch.bool), tau, True)) / gap
    return {"min_distance": least, "by_temperature": values, "entropy_identity_error": identity, "orphan": orphan}


def run(config: Config, console: Console) -> Study:
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("quantiles", total=None)
        figures = {"quantile": quantile_variance(config), "rejection": literal_rejection(config)}
        progress.update(bar, description="random features")
        figures["favor"] = favor_error(config, lambda: progress.advance(bar))
        progress.update(bar, description="likelihood, soft term")
        figures |= {"likelihood": likelihood_bound(config), "soft": soft_limit(config)}
    settings = {"quantile": config.quantile, "candidates": config.candidates, "repeats": config.repeats}
    return Study("lemmas", figures, tuple(claims(figures, config)), settings, (config.seed,))


def claims(figures: dict[str, Any], config: Config) -> list[Claim]:
    found = figures["quantile"]
    ratio, exponent = found["ratio_at_largest"], found["exponent"]
    rejected = figures["rejection"]
    exponents, bias = figures["favor"]["exponent"], figures["favor"]["bias"]
    fewest = min(config.bias_features)
    few = bias[str(fewest)]
    bound, soft = figures["likelihood"], figures["soft"]
    smallest = soft["by_temperature"][str(min(config.temperatures))]
    distances = list(bound["distance_error_by_sigma"].values())
    limits = [rejected[str(size)] for size in config.batch_sizes]
    return [
        Claim(
            "Lemma E.2",
            "Var of the empirical quantile = q(1-q) / (N f^2), so O(1/N), for N independent distances",
            f"N^{exponent:.2f}; {ratio:.2f} of the formula at N = {max(config.sample_sizes)}",
            confirmed(abs(exponent + 1) < 0.1 and abs(ratio - 1) < 0.15),
            "a batch's distances are not independent: python -m research threshold",
        ),
        Claim(
            "App. E.2, Fig. 11",
            "the batch-global quantile keeps a consistent acceptance rate",
            "rejected at q = "
            + f"{config.quantile}: "
            + ", ".join(f"{rejected[str(size)]:.0%} at B = {size}" for size in config.batch_sizes),
            confirmed(max(limits) - min(limits) < 0.05),
            "a quantile of all pairs is no scale for a minimum over B targets: 1 - (1-q)^B",
        ),
        Claim(
            "App. E.4",
            "FAVOR+ has variance O(1/m): its error falls as m^-0.5",
            f"correct form m^{exponents['favor']:.2f}; Eq. 3 as printed m^{exponents['favor_paper']:.2f}",
            confirmed(abs(exponents["favor"] + 0.5) < 0.1),
            "holds for `favor`, not for Eq. 3 as printed (`favor_paper`): the error of that one does not fall",
        ),
        Claim(
            "App. E.4",
            "E[FAVOR+(Q, K)] = softmax(Q K^T): attention is estimated without bias",
            f"m = {fewest}: bias of the kernel {few['kernel'][0]:.2%} (chance {few['kernel'][1]:.2%}), "
            f"of attention {few['attention'][0]:.2%} (chance {few['attention'][1]:.2%})",
            confirmed(few["attention"][0] < 3 * few["attention"][1]),
            "the kernel is unbiased; attention is a ratio of two estimates and is not, for finite m",
        ),
        Claim(
            "Prop. E.1",
            "log p(x) >= -d*^2 / (2 sigma^2) + C",
            f"least slack {bound['slack_min']:.1e}, most {bound['slack_max_in_log_k']:.2f} log(K+1)",
            confirmed(bound["slack_min"] >= -1e-9 and bound["slack_max_in_log_k"] <= 1.0),
            "C holds -log K: more candidates do not tighten it by themselves",
        ),
        Claim(
            "Lemma E.1",
            "minimising the matched distance is asymptotically maximising a kernel-smoothed likelihood",
            f"-2 sigma^2 log p differs from d*^2 by {distances[0]:.1e} at sigma = 0.01, {distances[-1]:.1f} at 2",
            confirmed(distances[0] < 1e-2),
            "in the limit sigma -> 0, for given samples; not for a kernel of finite width",
        ),
        Claim(
            "Lemma E.3",
            "-log sum exp(-d/tau) -> min d as tau -> 0",
            f"at tau = {min(config.temperatures):g}: {smallest['literal']:.1f} as printed, "
            f"{smallest['scaled']:.4f} times tau, min d = {soft['min_distance']:.4f}",
            confirmed(abs(smallest["literal"] - soft["min_distance"]) < 0.01),
            "true only when multiplied by tau, which is the default here (soft_scaled)",
        ),
        Claim(
            "Lemma E.3",
            "the soft term is the assignment cost with an entropy constraint",
            f"tau L_soft = min_p (p d - tau H(p)) to {soft['entropy_identity_error']:.1e}",
            confirmed(soft["entropy_identity_error"] < 1e-9),
            "with the sum over targets; k-center, which the lemma names, has their maximum",
        ),
        Claim(
            "Lemma E.3",
            "an orphan mode is penalised with infinite loss, so no mode is left out",
            f"all candidates at distance 1, 10, 100: {', '.join(f'{v:.2f}' for v in soft['orphan'].values())} of the "
            "distance",
            confirmed(soft["orphan"]["100.0"] > 10),
            "it grows no faster than the hard term: linearly; there is no barrier",
        ),
    ]


def show(study: Study, console: Console) -> None:
    found = study.figures
    rows = [[n, f"{v[0]:.2e}", f"{v[1]:.2e}"] for n, v in found["quantile"]["variance"].items()]
    show_rows("Variance of the quantile of N independent distances", ("N", "measured", "Lemma E.2"), rows, console)
    errors = found["favor"]["error"]
    rows = [[m, f"{errors['favor'][m]:.4f}", f"{errors['favor_paper'][m]:.4f}"] for m in errors["favor"]]
    show_rows("Relative error of attention", ("m", "favor", "Eq. 3 as printed"), rows, console)


def draw(study: Study) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.2), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    variance = study.figures["quantile"]["variance"]
    sizes = [int(n) for n in variance]
    first.loglog(sizes, [v[0] for v in variance.values()], "o", color="#0072b2", label="measured")
    first.loglog(sizes, [v[1] for v in variance.values()], "-", color="#666666", label="Lemma E.2")
    first.set(xlabel="N", ylabel="variance of the quantile")
    for name, color in (("favor", "#0072b2"), ("favor_paper", "#d55e00")):
        by_m = study.figures["favor"]["error"][name]
        second.loglog([int(m) for m in by_m], list(by_m.values()), "o-", color=color, label=name)
    second.set(xlabel="random features m", ylabel="relative error")
    by_tau = study.figures["soft"]["by_temperature"]
    taus = [float(t) for t in by_tau]
    third.loglog(taus, [abs(v["literal"]) for v in by_tau.values()], "o-", color="#d55e00", label="|as printed|")
    third.loglog(taus, [abs(v["scaled"]) for v in by_tau.values()], "o-", color="#0072b2", label="|times tau|")
    third.axhline(study.figures["soft"]["min_distance"], color="#666666", linewidth=0.8, label="min d")
    third.set(xlabel="tau", ylabel="soft term")
    for axes in (first, second, third):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
