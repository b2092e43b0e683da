"""What GSP's transport costs: by iterations, prototypes and pixels, with both solvers (GSP, figures 7 left, 8 and 9).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023, section 5.2.2
    and supplement 1.4. The paper iterates (algorithm 3) and compares the gradient in closed form with differentiating
    the iterations; the exact solver has no iterations, and the gradient in closed form.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from dmlbench.apps.pictures import plt
from dmlbench.components import component
from dmlbench.models.backbones import Backbone
from dmlbench.models.transport import prototype_cost, transport_weights
from dmlbench.runtime import seed_everything
from dmlbench.studies.record import Claim, Findings, Parts, require_positive, several_values
from dmlbench.types import check_positive

Action = Callable[[], object]

EXACT, AUTODIFF, CLOSED = "exact", "iterations, differentiated", "iterations, closed form"
_MARKERS = {EXACT: "s", AUTODIFF: "^", CLOSED: "o"}
_WIDTH = 128
_MARGINAL = 0.01


def in_turns(
    actions: Mapping[str, Action], rounds: int, device: torch.device | str, *, of_processor: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of each action in each round, after one round of warm-up.

    Every round runs each action once in a random order, since an action pays for caches that the one before it filled.
    With ``of_processor``, a CPU's time is the process's own, which leaves out other processes of a busy machine.
    """
    on_gpu = torch.device(device).type != "cpu"
    clock = time.process_time if of_processor and not on_gpu else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in actions}
    order, shuffle = list(actions.items()), random.Random(0).shuffle
    for turn in range(rounds + 1):
        shuffle(order)
        for name, action in order:
            if on_gpu:
                torch.cuda.synchronize()
            started = clock()
            action()
            if on_gpu:
                torch.cuda.synchronize()
            if turn > 0:
                times[name].append(1000 * (clock() - started))
    return times


@dataclass(frozen=True)
class Transport:
    """Transport of random pixels to random prototypes, by the exact solver and by k iterations for several k."""

    pixels: int
    prototypes: int
    iterations: tuple[int, ...]
    batch: int
    rounds: int
    ratio: float
    smoothing: float
    device: torch.device
    seed: int

    def _inputs(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shapes = (self.batch, self.pixels, _WIDTH), (self.prototypes, _WIDTH)
        features, omega = (torch.randn(shape, generator=generator) / _WIDTH**0.5 for shape in shapes)
        return features.to(self.device), omega.to(self.device)

    def _solvers(self) -> dict[str, Callable[[Tensor], tuple[Tensor, ...]]]:
        solve = partial(transport_weights, transport_ratio=self.ratio, smoothing=self.smoothing)
        iterated = {str(k): partial(solve, solver="fixed_point", iterations=k) for k in self.iterations}
        return {"exact": partial(solve, solver="exact"), **iterated}

    def times(self) -> dict[str, dict[str, float]]:
        """Median milliseconds from the cost matrix, "forward" and with its gradient ("both"), by "exact" and k."""
        generator = torch.Generator().manual_seed(self.seed)
        cost = prototype_cost(*self._inputs(generator)).requires_grad_()
        widths = self.pixels, self.prototypes
        grads = [torch.randn(self.batch, width, generator=generator).to(self.device) for width in widths]

        def both(solve: Callable[[Tensor], tuple[Tensor, ...]]) -> object:
            return torch.autograd.grad(tuple(solve(cost)), [cost], grads)

        actions: dict[str, Action] = {}
        for name, solve in self._solvers().items():
            actions[f"{name}, forward"] = partial(solve, cost.detach())
            actions[f"{name}, both"] = partial(both, solve)
        times = in_turns(actions, self.rounds, self.device, of_processor=True)
        return {
            name: {what: median(times[f"{name}, {what}"]) for what in ("forward", "both")} for name in self._solvers()
        }

    @torch.no_grad()
    def inference_times(self) -> dict[str, float]:
        """Median milliseconds from the pixels to their weights, costs included, by "exact" and k."""
        features, omega = self._inputs(torch.Generator().manual_seed(self.seed))

        def weigh(solve: Callable[[Tensor], tuple[Tensor, ...]]) -> object:
            return solve(prototype_cost(features, omega))

        actions = {name: partial(weigh, solve) for name, solve in self._solvers().items()}
        times = in_turns(actions, self.rounds, self.device, of_processor=True)
        return {name: median(values) for name, values in times.items()}


def training_times(found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Forward and backward by way and k.

    The closed form after k iterations takes their forward pass and the exact solver's backward pass (same formula).
    """
    backward = found["exact"]["both"] - found["exact"]["forward"]
    of_k = {name: one for name, one in found.items() if name != "exact"}
    return {
        EXACT: dict.fromkeys(of_k, found["exact"]["both"]),
        AUTODIFF: {name: one["both"] for name, one in of_k.items()},
        CLOSED: {name: one["forward"] + backward for name, one in of_k.items()},
    }


def network_time(backbone: Backbone, *, image_size: int, rounds: int, device: torch.device) -> tuple[float, int]:
    """Median milliseconds of one image, and the pixels of its last map."""
    backbone.to(device).eval()
    images = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=device)
    with torch.no_grad():
        map_shape = backbone(backbone.preprocess(images))[-1].shape
        times = in_turns({"network": lambda: backbone(backbone.preprocess(images))}, rounds, device, of_processor=True)
    return median(times["network"]), map_shape[2] * map_shape[3]


def conduct(args: Any, parts: Parts) -> Findings:
    """Time the transport alone over iterations, prototypes and pixels, and beside a network."""
    iterations = tuple(several_values(args, "iterations"))
    require_positive(args, "batch", "rounds")
    check_positive(**{key: min(getattr(args, key), default=0) for key in ("prototypes", "pixels")})
    seed_everything(args.seed)
    usual = Transport(
        args.pixels_of_others, args.prototypes_of_others, iterations, args.batch, args.rounds, args.transport_ratio,
        args.smoothing, parts.device, args.seed,
    )  # fmt: skip

    def compute(name: str) -> Any:
        if name == "iterations":
            return usual.times()
        if name == "network":
            backbone = component(args.backbone)
            rounds = max(3, args.rounds // 5)
            of_network, pixels = network_time(
                backbone, image_size=args.image_size, rounds=rounds, device=parts.device
            )  # fmt: skip
            times = replace(usual, batch=1, pixels=pixels).inference_times()
            return {"network": of_network, "pixels": pixels, "times": times}
        over, _, value = name.partition(" ")
        size: dict[str, Any] = {over: int(value)}
        return replace(usual, iterations=(args.iterations_of_others,), **size).times()

    sizes = [*(f"prototypes {m}" for m in args.prototypes), *(f"pixels {n}" for n in args.pixels)]
    found = parts.get(["iterations", *sizes, "network"], compute, describe="timing")
    by_k = training_times(found["iterations"])
    first, last = str(iterations[0]), str(iterations[-1])
    rows = [_row("exact", found["iterations"]["exact"], None)]
    exact = found["iterations"]["exact"]["both"]
    rows += [_row(f"k = {k}", found["iterations"][str(k)], by_k[CLOSED][str(k)], exact) for k in iterations]
    for name in sizes:
        one, shown = found[name], name.replace(" ", " = ")
        k = str(args.iterations_of_others)
        rows.append(_row(f"exact, {shown}", one["exact"], None))
        rows.append(_row(f"k = {k}, {shown}", one[k], training_times(one)[CLOSED][k], one["exact"]["both"]))
    added = {name: 100 * ms / found["network"]["network"] for name, ms in found["network"]["times"].items()}
    growth = {way: by_k[way][last] - by_k[way][first] for way in (AUTODIFF, CLOSED)}
    forward = args.batch * found["network"]["network"]
    more = {
        way: f"from k = {first} to {last} {ms:.1f} ms more, of {by_k[way][first]:.1f} ms; that is "
        f"{100 * ms / forward:.2f} % of the network's forward pass"
        for way, ms in growth.items()
    }
    within = [added[str(k)] for k in iterations if 25 <= k <= 50]
    shown_within = f"{min(within):.1f} to {max(within):.1f} %" if within else "not timed"
    claims = (
        Claim("5.2.2, figures 7 left, 9", "with the gradient in closed form more iterations cost little",
              more[CLOSED], growth[CLOSED] < _MARGINAL * forward),
        Claim("1.4, figure 9", "differentiating the iterations costs substantially more with k",
              more[AUTODIFF], growth[AUTODIFF] > _MARGINAL * forward),
        Claim("1.4, figure 8", "inference takes less than 6 % longer at k of 25 to 50 (43.1 to 45.6 ms an image)",
              f"costs and transport add {shown_within} to the network, the exact solver {added['exact']:.1f} %",
              max(within) < 6 if within else None),
    )  # fmt: skip
    notes = (
        f"m = {usual.prototypes} prototypes and n = {usual.pixels} pixels where nothing else is said, batches of "
        f"{args.batch}, mu = {args.transport_ratio:g}, epsilon = {args.smoothing:g}; medians of {args.rounds} rounds "
        "in turns, of the process's own time on a CPU; from the costs on, which both solvers share",
        "closed form: k iterations without a graph, then the exact solver's backward pass",
        f"network: {args.network}, one image of {args.image_size} pixels, {found['network']['network']:.0f} ms, "
        f"{found['network']['pixels']} pixels in its map; random weights, which cost the same time",
        f"little is less than {_MARGINAL:.0%} of the network's forward pass for the batch, taken as that of one image "
        "times the batch; the paper times training on its GPU",
    )
    heads = ("transport", "forward, ms", "with gradient, ms", "with closed form, ms", "exact / with closed form")
    title = "Time of GSP's transport"
    return Findings(title, heads, tuple(rows), claims, notes, _figure(found, iterations, args, title))


def _row(name: str, one: Mapping[str, float], closed: float | None, exact: float | None = None) -> tuple[str, ...]:
    rest = ("–", "–") if closed is None or exact is None else (f"{closed:.2f}", f"{exact / closed:.2f}")
    return (name, f"{one['forward']:.2f}", f"{one['both']:.2f}", *rest)


def _figure(found: Mapping[str, Any], iterations: tuple[int, ...], args: Any, title: str) -> Figure:
    figure, panels = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for way, of_k in training_times(found["iterations"]).items():
        values = [of_k[str(k)] for k in iterations]
        panels[0].plot(iterations, values, marker=_MARKERS[way], markersize=4, label=way)
    panels[0].set_title("figures 7 and 9: forward and backward", fontsize=9)
    panels[0].set_xlabel("iterations k")
    k = str(args.iterations_of_others)
    for axes, over, values in ((panels[1], "prototypes", args.prototypes), (panels[2], "pixels", args.pixels)):
        for way in (EXACT, AUTODIFF, CLOSED):
            times = [training_times(found[f"{over} {value}"])[way][k] for value in values]
            axes.plot(list(values), times, marker=_MARKERS[way], markersize=4, label=way)
        axes.set_title(f"forward and backward, k = {k}", fontsize=9)
        axes.set_xlabel({"prototypes": "prototypes m", "pixels": "pixels of the map n"}[over])
    of_network = found["network"]
    added = {name: 100 * ms / of_network["network"] for name, ms in of_network["times"].items()}
    panels[3].plot(iterations, [added[str(value)] for value in iterations], marker="o", markersize=4, color="tab:green",
                   label="iterations")  # fmt: skip
    panels[3].axhline(added["exact"], linestyle="--", color="tab:blue", label="exact")
    panels[3].axhline(6, linestyle=":", color="0.5", label="6 % (the paper, k of 25 to 50)")
    panels[3].set_title(f"figure 8: inference, one image, {args.network}", fontsize=9)
    panels[3].set_xlabel("iterations k")
    panels[3].set_ylabel("% of the network's time")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    for axes in panels[:3]:
        axes.set_ylabel(f"ms for {args.batch} images")
    figure.suptitle(title, fontsize=10)
    return figure
