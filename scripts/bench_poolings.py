"""Poolings and GSP's transport, forward and backward, timed in turns in one process on one thread; prints medians.

python scripts/bench_poolings.py [--part transport step poolings] [--device cpu] [--rounds 15] [--figure transport.png]

The transport's peers are written from the paper (GSP, algorithm 3 and proposition 4.3):
  hoisted k, closed form   k rounds on s_j = sum_i exp(-epsilon c_ij), which is all of the cost that a round depends on
  hoisted k, autodiff      the same rounds, differentiated one by one
  full k, closed form      k rounds over the whole matrix exp(-epsilon c), as the algorithm is printed
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmlbench.components import component
from dmlbench.config import compose
from dmlbench.models.net import PooledModel
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection
from dmlbench.models.transport import _ExactTransport, prototype_cost, transport_weights
from dmlbench.studies.gsp_timing import Action, in_turns
from dmlbench.types import DmlbenchError

BATCH, SIZE, PROTOTYPES = 32, 128, 64
RATIO, SMOOTHING = 0.3, 5.0
ITERATIONS = (25, 50, 100, 1000)
PARTS = ["transport", "step", "poolings"]


class OperationCount(TorchDispatchMode):
    """Counts the tensor operations that are dispatched while it is active, backward included; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def median_times(actions: dict[str, Action], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds of each action, taken in turns."""
    return {name: statistics.median(values) for name, values in in_turns(actions, rounds, device).items()}


def operations(action: Action) -> int:
    with OperationCount() as counter:
        action()
    return counter.count


# The transport -------------------------------------------------------------------------------------------------------


def hoisted_rounds(sums: Tensor, iterations: int) -> Tensor:
    """n rho [B, n] after ``iterations`` rounds of algorithm 3 from t = 1, for s [B, n]."""
    scale = sums.new_ones(len(sums), 1)
    rest = sums
    for _ in range(iterations):
        rest = 1 / (1 + scale * sums)
        scale = RATIO * sums.shape[1] / (sums * rest).sum(dim=1, keepdim=True)
    return rest


class HoistedClosedForm(torch.autograd.Function):
    """The rounds on the column sums with the exact solver's own backward, so that only the solving differs."""

    @staticmethod
    def forward(ctx: Any, cost: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        kernel = torch.exp2(cost * (-SMOOTHING / math.log(2)))
        sums = kernel.sum(dim=1)  # [B, n]
        rest = hoisted_rounds(sums, iterations)
        weights = (1 - rest) / (RATIO * cost.shape[2])
        assignment = kernel / sums[:, None, :]
        histogram = torch.bmm(weights[:, None, :], assignment.transpose(1, 2))[:, 0]
        ctx.save_for_backward(assignment, weights, rest)
        ctx.smoothing = SMOOTHING
        return weights, histogram

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor, grad_histogram: Tensor) -> tuple[Tensor, None]:
        return _ExactTransport.backward(ctx, grad_weights, grad_histogram)[0], None


def hoisted(cost: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    weights, histogram = HoistedClosedForm.apply(cost, iterations)
    return weights, histogram


def hoisted_autodiff(cost: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    kernel = torch.exp2(cost * (-SMOOTHING / math.log(2)))
    sums = kernel.sum(dim=1)
    weights = (1 - hoisted_rounds(sums, iterations)) / (RATIO * cost.shape[2])
    return weights, torch.bmm(weights[:, None, :], (kernel / sums[:, None, :]).transpose(1, 2))[:, 0]


class FullClosedForm(torch.autograd.Function):
    """Algorithm 3 over the whole matrix; returns rho [B, n] and the plan [B, m, n].

    The gradient is proposition 4.3 with rho inside the diagonal factor; q = rho g_rho + sum_i pi_i g_pi_i and
    eta = sum_j (rho g_rho - n rho q)_j.
    """

    @staticmethod
    def forward(ctx: Any, cost: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        kernel = torch.exp2(cost * (-SMOOTHING / math.log(2)))
        pixels = cost.shape[2]
        scale = cost.new_ones(len(cost), 1)
        rho = scale
        for _ in range(iterations):
            rho = 1 / (pixels * (1 + scale * kernel.sum(dim=1)))
            scale = RATIO / (kernel * rho[:, None, :]).sum(dim=(1, 2))[:, None]
        plan = scale[:, :, None] * kernel * rho[:, None, :]
        ctx.save_for_backward(rho, plan)
        return rho, plan

    @staticmethod
    def backward(ctx: Any, grad_rho: Tensor, grad_plan: Tensor) -> tuple[Tensor, None]:
        rho, plan = ctx.saved_tensors
        pixels = rho.shape[1]
        inner = plan * grad_plan
        q = rho * grad_rho + inner.sum(dim=1)
        eta = (rho * grad_rho).sum(dim=1, keepdim=True) - pixels * (rho * q).sum(dim=1, keepdim=True)
        common = q - eta * rho / (1 - RATIO - pixels * rho.square().sum(dim=1, keepdim=True))
        return -SMOOTHING * (inner - pixels * plan * common[:, None, :]), None


def full(cost: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    rho, plan = FullClosedForm.apply(cost, iterations)
    return (1 / cost.shape[2] - rho) / RATIO, plan.sum(dim=2) / RATIO


def exact(cost: Tensor) -> tuple[Tensor, Tensor]:
    weights, histogram = transport_weights(cost, transport_ratio=RATIO, smoothing=SMOOTHING)
    return weights, histogram


def contenders() -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    solvers: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"exact": exact}
    for k in ITERATIONS:
        solvers[f"hoisted {k}, closed form"] = partial(hoisted, iterations=k)
        solvers[f"hoisted {k}, autodiff"] = partial(hoisted_autodiff, iterations=k)
        solvers[f"full {k}, closed form"] = partial(full, iterations=k)
    return solvers


def bench_transport(rounds: int, device: str, sizes: list[int]) -> dict[int, dict[str, float]]:
    """Times from a cost matrix to its gradient ("transport"), and from features to theirs ("with costs")."""
    result = {}
    for pixels in sizes:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(BATCH, pixels, SIZE, generator=generator).to(device) / SIZE**0.5
        prototypes = (torch.randn(PROTOTYPES, SIZE, generator=generator).to(device) / SIZE**0.5).requires_grad_()
        features.requires_grad_()
        cost = prototype_cost(features, prototypes).detach().requires_grad_()  # laid out as the layer has it
        grads = [torch.randn(BATCH, width, generator=generator).to(device) for width in (pixels, PROTOTYPES)]

        def alone(solve: Any, cost: Tensor = cost, grads: list[Tensor] = grads) -> object:
            return torch.autograd.grad(solve(cost), [cost], grads)

        def with_costs(solve: Any, inputs: tuple[Tensor, Tensor] = (features, prototypes), g: Any = grads) -> object:
            return torch.autograd.grad(solve(prototype_cost(*inputs)), inputs, g)

        solvers = contenders()
        wide = exact(cost.detach().double())[0]
        errors = {name: (solve(cost)[0].detach() - wide).abs().max().item() * pixels for name, solve in solvers.items()}
        counts = {name: operations(partial(alone, solve)) for name, solve in solvers.items()}
        fast = {name: solve for name, solve in solvers.items() if "1000" not in name}
        slow = {name: solve for name, solve in solvers.items() if "1000" in name}
        ms: dict[str, float] = {}
        for group, turns in ((fast, rounds), (slow, max(3, rounds // 5))):
            ms |= median_times({n: partial(alone, solve) for n, solve in group.items()}, turns, device)
        layer = median_times({n: partial(with_costs, solve) for n, solve in fast.items()}, rounds, device)
        print(f"\nn = {pixels}, m = {PROTOTYPES}, B = {BATCH}: forward and backward, {device}\n")
        print("| solver | ms | exact / it | operations | with costs: ms | exact / it | n x largest error of a weight |")
        print("|---|---|---|---|---|---|---|")
        for name in solvers:
            shown = f"{layer[name]:.2f} | {layer['exact'] / layer[name]:.2f}" if name in layer else "- | -"
            print(
                f"| {name} | {ms[name]:.2f} | {ms['exact'] / ms[name]:.2f} | {counts[name]} | {shown} | "
                f"{errors[name]:.0e} |"
            )
        result[pixels] = ms
    return result


def draw(times: dict[int, dict[str, float]], path: Path) -> None:
    """Cost against the number of iterations, as the paper's figure, with the exact solver as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(times), figsize=(3.6 * len(times), 3.4), squeeze=False)
    for axis, (pixels, ms) in zip(axes[0], times.items(), strict=True):
        kinds = ("full {}, closed form", "hoisted {}, autodiff", "hoisted {}, closed form")
        for kind, marker in zip(kinds, "s^o", strict=True):
            label = kind.replace(" {}", "")
            axis.plot(ITERATIONS, [ms[kind.format(k)] for k in ITERATIONS], marker=marker, label=label)
        axis.axhline(ms["exact"], color="black", linestyle="--", label="exact")
        axis.set(xscale="log", yscale="log", xlabel="iterations k", title=f"{pixels} pixels")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"forward + backward, ms (batch of {BATCH})")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"\nwrote {path}")


# The poolings --------------------------------------------------------------------------------------------------------


def build_pooling(name: str, channels: int, map_size: tuple[int, int], device: str) -> tuple[Pooling, Projection]:
    """The pooling of ``conf/pooling/<name>.yaml`` with its prototypes started, and the projection that it wants."""
    cfg = compose("train", [f"pooling={name}", f"head.out_features={SIZE}"])
    OmegaConf.set_struct(cfg, False)
    with open_dict(cfg.runtime):
        OmegaConf.update(cfg, "runtime", {"num_channels": channels, "map_size": list(map_size)}, force_add=True)
    torch.manual_seed(0)
    pooling: Pooling = component(cfg.pooling).to(device)
    project = component(cfg.head, in_features=channels, out_features=pooling.input_width(SIZE)).to(device)
    step = 0
    while not pooling.started:
        step += 1
        x = torch.rand(256, channels, *map_size, device=device)
        with torch.no_grad():
            pooled = pooling(x, project)
        pooling.observe(pooled, step=1_000_000 + step)
    return pooling, project


def training_step(pooling: Pooling, project: Projection, x: Tensor) -> Action:
    """Forward and backward with gradients of the embedding and of the histogram, if there is one."""
    inputs = [x, *(p for p in (*pooling.parameters(), *project.parameters()) if p.requires_grad)]

    def parts(pooled: Pooled) -> list[Tensor]:
        return [pooled.embedding] + [pooled.side[name] for name in ("histogram",) if name in pooled.side]

    grads = [torch.randn_like(part) for part in parts(pooling(x, project))]
    return lambda: torch.autograd.grad(parts(pooling(x, project)), inputs, grads, allow_unused=True)


def bench_poolings(rounds: int, device: str, maps: list[int], channels: list[int], names: list[str]) -> None:
    for width in channels:
        rows: dict[str, list[str]] = {}
        for side in maps:
            x = torch.rand(BATCH, width, side, side, device=device).requires_grad_()
            actions: dict[str, Action] = {}
            for name in names:
                print(f"C = {width}, {side} x {side}: {name}", file=sys.stderr)
                try:
                    pooling, project = build_pooling(name, width, (side, side), device)
                    actions[name] = training_step(pooling, project, x)
                except DmlbenchError as error:
                    print(f"{name} at {side} x {side}: {error}")
                    continue
                count = sum(p.numel() for p in pooling.parameters() if p.requires_grad)
                rows.setdefault(name, [str(count)])
            ms = median_times(actions, rounds, device)
            for name, cells in rows.items():
                cells.append(f"{ms[name]:.2f} ({ms[name] / ms['gap']:.2f})" if name in ms else "-")
        print(f"\nC = {width}, D = {SIZE}, B = {BATCH}: forward and backward in ms (ratio to gap), {device}\n")
        print("| pooling | parameters | " + " | ".join(f"{side} x {side}" for side in maps) + " |")
        print("|---|---|" + "---|" * len(maps))
        for name, cells in rows.items():
            print(f"| {name} | " + " | ".join(cells) + " |")


# A training step -----------------------------------------------------------------------------------------------------


def bench_step(rounds: int, device: str, batch: int, image_size: int) -> None:
    """What GSP adds to a training step of ResNet50 with GAP: the difference of the poolings on that network's map.

    Whole steps differ by less than their times scatter, so the poolings are timed by themselves and set against them.
    """
    cfg = compose("train", ["backbone=resnet50", "backbone.pretrained=false"])
    torch.manual_seed(0)
    backbone = component(cfg.backbone).to(device)
    pooling, project = build_pooling("gap", backbone.channels[-1], (8, 8), device)
    model = PooledModel(backbone, pooling, project)
    images = torch.randint(0, 256, (batch, 3, image_size, image_size), dtype=torch.uint8, device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(images).embedding.square().sum().backward()

    whole = median_times({"step": step}, max(3, rounds // 5), device)["step"]
    with torch.no_grad():
        x = backbone(backbone.preprocess(images))[-1]
    map_size = (x.shape[2], x.shape[3])
    actions = {}
    for name in ("gap", "gsp"):
        actions[name] = training_step(*build_pooling(name, x.shape[1], map_size, device), x.detach().requires_grad_())
    ms = median_times(actions, rounds, device)
    share = (ms["gsp"] - ms["gap"]) / whole
    print(f"\nResNet50 at {image_size} px, batch {batch}, {device}, forward and backward: {whole:.0f} ms with gap;")
    print(
        f"on its map {x.shape[1]} x {map_size[0]} x {map_size[1]} gap takes {ms['gap']:.1f} ms and gsp "
        f"{ms['gsp']:.1f} ms, which adds {100 * share:.2f} % to the step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--maps", type=int, nargs="+", default=[7, 8, 14, 16])
    parser.add_argument("--channels", type=int, nargs="+", default=[1024, 512])
    parser.add_argument("--poolings", nargs="+", help="names of conf/pooling; default: all but native and none")
    parser.add_argument("--pixels", type=int, nargs="+", default=[49, 64, 196, 256])
    parser.add_argument("--figure", type=Path, help="where to draw the transport's times, e.g. transport.png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, device {options.device}")
    if "transport" in options.part:
        times = bench_transport(options.rounds, options.device, options.pixels)
        if options.figure is not None:
            draw(times, options.figure)
    if "step" in options.part:
        bench_step(options.rounds, options.device, BATCH // 2, 227)
    if "poolings" in options.part:
        folder = Path(__file__).resolve().parents[1] / "conf" / "pooling"
        every = sorted(path.stem for path in folder.glob("*.yaml") if path.stem not in ("native", "none"))
        names = options.poolings or every
        names = ["gap", *(name for name in names if name != "gap")]
        bench_poolings(options.rounds, options.device, options.maps, options.channels, names)


if __name__ == "__main__":
    main()
