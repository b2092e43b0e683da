"""What the temperature does to the boundary of a softmax classifier of two moons (ProxyNCA++, section 3.4, figure 3).

Source: E. W. Teh, T. DeVries, G. W. Taylor, "ProxyNCA++", ECCV 2020, section 3.4 and appendix 0.B: layers 2-100-2 with
    a ReLU between, 600 points of scikit-learn's moons with noise 0.3 and random state 0. The optimizer, its rate and
    length, and the temperatures of the figure are not given; those of the configuration are ours.
"""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.nn import functional as F

from dmlbench.apps.pictures import plt
from dmlbench.runtime import derive_seed, seed_everything
from dmlbench.studies.record import Claim, Findings, Float, Parts, require_positive, several_values, spread

_WINDOW = ((-2.0, 3.0), (-1.6, 2.1))
"""Left and right, lower and upper edge of the picture, in which the boundary's length is taken, too."""
_GRID = 201
_FRESH = 20_000


def moons(count: int, *, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    points, labels = make_moons(n_samples=count, noise=noise, random_state=seed)
    return torch.from_numpy(points).float(), torch.from_numpy(labels)


def classifier(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def train(
    points: Tensor, labels: Tensor, *, temperature: float, hidden: int, steps: int, lr: float, seed: int
) -> nn.Sequential:
    """Train a classifier on all points at once by Adam and the cross entropy of softmax(logits / temperature)."""
    seed_everything(derive_seed(seed, "two moons"))  # the same initial weights for every temperature
    net = classifier(hidden)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(points) / temperature, labels).backward()
        optimizer.step()
    return net


@torch.no_grad()
def accuracy(net: nn.Module, points: Tensor, labels: Tensor) -> float:
    return float((net(points).argmax(dim=1) == labels).double().mean())


@torch.no_grad()
def margin_on_grid(net: nn.Module) -> tuple[Float, Float, Float]:
    """Coordinates [G] and [G] of a grid over the window, and the difference of the two logits [G, G] there."""
    across, up = (np.linspace(low, high, _GRID) for low, high in _WINDOW)
    x, y = np.meshgrid(across, up)
    places = torch.from_numpy(np.stack([x.ravel(), y.ravel()], axis=1)).float()
    logits = net(places).double()
    return across, up, (logits[:, 1] - logits[:, 0]).view(_GRID, _GRID).numpy()


def boundary_length(across: Float, up: Float, margin: Float) -> float:
    """Length of the zero contour."""
    figure, axes = plt.subplots()
    lines = axes.contour(across, up, margin, levels=[0.0]).allsegs[0]
    plt.close(figure)
    return float(sum(np.linalg.norm(np.diff(line, axis=0), axis=1).sum() for line in lines))


def measure(temperature: float, args: Any) -> dict[str, Any]:
    """Accuracies and boundary lengths of all seeds at one temperature, and the weights of the first seed."""
    points, labels = moons(args.points, noise=args.noise, seed=args.data_seed)
    fresh = moons(_FRESH, noise=args.noise, seed=args.data_seed + 1)
    nets = [
        train(points, labels, temperature=temperature, hidden=args.hidden, steps=args.steps, lr=args.lr, seed=seed)
        for seed in range(args.seed, args.seed + args.repeats)
    ]
    return {
        "train": [accuracy(net, points, labels) for net in nets],
        "fresh": [accuracy(net, *fresh) for net in nets],
        "length": [boundary_length(*margin_on_grid(net)) for net in nets],
        "weights": {name: value.tolist() for name, value in nets[0].state_dict().items()},
    }


def conduct(args: Any, parts: Parts) -> Findings:
    """Train at every temperature."""
    require_positive(args, "points", "hidden", "steps", "repeats", "lr")
    names = {f"T={value:g}": value for value in reversed(several_values(args, "temperatures"))}
    found = parts.get(list(names), lambda name: measure(names[name], args), describe="temperatures")
    means = {key: [float(np.mean(found[name][key])) for name in names] for key in ("train", "fresh", "length")}
    rows = [
        (name, *(spread(found[name][key], 2) for key in ("train", "fresh")),
         f"{np.mean(found[name]['length']):.2f} ± {np.std(found[name]['length']):.2f}")
        for name in names
    ]  # fmt: skip
    train_accuracy = " → ".join(f"{100 * value:.1f}" for value in means["train"])
    best = list(names)[int(np.argmax(means["fresh"]))]
    grows = {}
    for key in ("train", "length"):  # no mean falls below the previous one by more than its std
        deviations = [float(np.std(found[name][key])) for name in names]
        no_fall = (np.diff(means[key]) >= -np.array(deviations[1:])).all()
        grows[key] = bool(no_fall and means[key][-1] > means[key][0])
    ends = (means["fresh"][-1] - max(means["fresh"])) * 100
    claims = (
        Claim("3.4, figure 3", "the smaller T, the better the samples are classified",
              f"{train_accuracy} % of them", grows["train"]),
        Claim("3.4, figure 3", "the smaller T, the more refined the boundary",
              "its length: " + " → ".join(f"{value:.2f}" for value in means["length"]),
              grows["length"]),
        Claim("3.4", "below the best T the model overfits (said of CUB, where 1/9 is best)",
              f"fresh points: best at {best}; the smallest T is {-ends:.1f} points below it", bool(ends < 0)),
    )  # fmt: skip
    notes = (
        f"{args.points} points of noise {args.noise:g} (random state {args.data_seed}), layers 2-{args.hidden}-2; mean "
        f"± population deviation over {args.repeats} initial weights from seed {args.seed} on, the same for every T",
        f"the paper does not say, so ours: temperatures, Adam at {args.lr:g}, {args.steps} steps with all "
        "points at once",
        "a claim comes out if no smaller T falls back by more than the deviation over initial weights",
        f"fresh points: {_FRESH:,} others of the same moons; the boundary's length is that within the picture",
    )
    title = "Two moons: the temperature of a softmax classifier"
    heads = ("T", "samples, %", "fresh points, %", "length of the boundary")
    return Findings(title, heads, tuple(rows), claims, notes, _figure(found, args, title))


def _figure(found: dict[str, Any], args: Any, title: str) -> Figure:
    """Draw the points, and the first seed's boundary and probability of class 1, in a panel per temperature."""
    points, labels = moons(args.points, noise=args.noise, seed=args.data_seed)
    figure, panels = plt.subplots(1, len(found), figsize=(3.1 * len(found), 3.3), layout="constrained", squeeze=False)
    for axes, (name, one) in zip(panels[0], found.items(), strict=True):
        net = classifier(args.hidden)
        net.load_state_dict({key: torch.tensor(value) for key, value in one["weights"].items()})
        across, up, margin = margin_on_grid(net)
        probability = 1 / (1 + np.exp(-np.clip(margin / float(name.removeprefix("T=")), -50, 50)))
        axes.contourf(across, up, probability, levels=np.linspace(0, 1, 11), cmap="RdBu", alpha=0.6)
        axes.contour(across, up, margin, levels=[0.0], colors="black", linewidths=1.2)
        for label, color in ((0, "darkred"), (1, "navy")):
            axes.scatter(*points[labels == label].T, s=4, color=color, linewidths=0)
        axes.set_title(f"{name}: {100 * one['train'][0]:.1f} % of the samples", fontsize=9)
        axes.set(xticks=[], yticks=[])
    figure.suptitle(f"{title}: probabilities (color) and boundary (black)", fontsize=9)
    return figure
