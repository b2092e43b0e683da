"""``dmlbench oodml splits``: a file of train-test splits of growing distance, and its figures."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dmlbench.apps.pictures import plt, save_figure
from dmlbench.config import listed
from dmlbench.data.split_file import FORMAT, read_splits, validation_part
from dmlbench.oodml.features import Features, features_of, network_name
from dmlbench.oodml.frechet import Float
from dmlbench.oodml.split_sequence import ClassFeatures, Step, alike_halves, exchange, pick_evenly, removal
from dmlbench.runtime import read_json, write_json
from dmlbench.types import ConfigError, DataError, ImageTable, IntArray, check_at_least, is_file_name

_MANY_CLASSES = 1000
_SEED = 0
"""Of the embedding in the figure."""


def make_splits(args: Any) -> Iterator[str]:
    """Exchange and remove classes, pick splits on the way, and write the file and its figures."""
    counts = ("exchanges", "reversed_exchanges", "removals", "alike", "points")
    check_at_least(0, **{key: getattr(args, key) for key in counts})
    if args.per_step is not None:
        check_at_least(1, per_step=args.per_step)
    check_at_least(2, picks=args.picks)
    if not 0 <= args.keep <= 1:
        raise ConfigError(f"keep: got {args.keep}, expected a number in [0, 1].")
    others = {}  # before the work
    for also in map(Path, map(str, listed(args.also))):
        read_splits(also)
        others[also] = read_json(also) if also.suffix == ".json" else {}
        if "way" not in others[also]:
            raise DataError(
                f"'{also}' does not record how its splits were made. Name a file of `dmlbench oodml splits`."
            )
    features = features_of(args)
    table = features.table
    by_class = ClassFeatures.of(features.rows, table.labels, over=args.over)
    train, test = halves_of(table)
    per_step = args.per_step or (2 if table.num_classes < _MANY_CLASSES else table.num_classes // 20)
    total = args.exchanges + args.reversed_exchanges + args.removals
    with tqdm(total=total, desc="splits", unit="step", disable=not sys.stderr.isatty()) as bar:

        def walked(steps: Iterable[Step]) -> list[Step]:
            found = []
            for step in steps:
                found.append(step)
                bar.update()
            return found

        away = walked(exchange(by_class, train, test, steps=args.exchanges, per_step=per_step))
        back = exchange(
            by_class, train, test, steps=args.reversed_exchanges, per_step=per_step, memory=30, reverse=True
        )
        nearer = walked(back)[1:]
        furthest = max(away, key=lambda step: step.distance)
        halves = furthest.train, furthest.test
        further = walked(removal(by_class, *halves, steps=args.removals, per_step=per_step, keep=args.keep))[1:]
    picked = pick_evenly([*nearer, *away, *further], args.picks)
    images = np.diff(by_class.start)
    paired = [c for c in (*train, *test) if images[c] > 1]
    alike = [alike_halves(by_class, paired, seed=seed) for seed in range(args.alike)] if paired else []
    notes = _notes(features, by_class, picked, len(train) + len(test) - len(paired))
    stem = network_name(args) if args.run is None else "-".join(Path(args.run).parts[-2:])
    stem = (stem + ("" if args.over == "class_means" else f"-{args.over}")).replace("/", "_")
    stem = f"{table.name}-{stem if is_file_name(stem) else 'splits'}"
    path = Path(args.output or Path(args.paths.output_dir) / "oodml" / f"{stem}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "format": FORMAT,
        "dataset": table.name,
        "dataset_fingerprint": table.fingerprint,
        "measured_by": features.measured_by,
        "features_sha256": features.sha256,
        "dimension": features.rows.shape[1],
        "over": args.over,
        "settings": {
            "per_step": per_step,
            **{key: getattr(args, key) for key in ("exchanges", "reversed_exchanges", "removals", "keep", "picks")},
        },
        "notes": notes,
        "alike": alike,
        "way": [
            {key: getattr(step, key) for key in ("kind", "count", "distance")}
            | {"n_train": len(step.train), "n_test": len(step.test)}
            for step in (*reversed(nearer), *away, *further)
        ],
        "splits": [_in_file(step, table, name=str(i)) for i, step in enumerate(picked, start=1)],
    }
    if path.exists() and read_json(path).get("splits") != document["splits"]:
        raise DataError(f"'{path}' holds other splits, which runs may need. Set output=<another file>, or delete it.")
    write_json(path, document)
    written = [path, path.with_name(f"{path.stem}-way.png")]
    ways: dict[str, Mapping[str, Any]] = {features.measured_by: document}
    for other, way in others.items():  # by file where the network is not enough
        name = str(way["measured_by"])
        ways[name if way["dataset"] == table.name and name not in ways else f"{name} ({other})"] = way
    draw_progression(ways, written[1], dataset=table.name)
    if args.points:
        written.append(path.with_name(f"{path.stem}-embedding.png"))
        title = f"{table.name}, features of {features.measured_by}"
        draw_embedding(features.rows, table.labels, picked, written[2], points=args.points, title=title)
    yield f"{table.name}: squared Fréchet distance between the halves, measured by {features.measured_by}"
    for i, step in enumerate(picked, start=1):
        kind = "the data set's own halves" if step.kind == "default" else f"{step.count} {step.kind}"
        yield f"  {i}  {step.distance:9.4f}  {len(step.train)} + {len(step.test)} classes, {kind}"
    if alike:
        spread = f" ± {np.std(alike):.4f}" if len(alike) > 1 else ""
        yield f"  -  {np.mean(alike):9.4f}{spread}  {len(alike)} x halves of the same classes, drawn at random"
    yield from (f"  note: {note}" for note in notes)
    yield from (f"written: {path}" for path in written)


def halves_of(table: ImageTable) -> tuple[list[int], list[int]]:
    """Classes of the train half and of the test half."""
    train = np.unique(table.labels[table.role == "train"]).tolist()
    test = np.unique(table.labels[table.role != "train"]).tolist()
    if len(train) < 2 or len(test) < 2:
        raise DataError(
            f"'{table.name}': got {len(train)} train and {len(test)} test classes, expected two or more of each."
        )
    return train, test


def _notes(features: Features, by_class: ClassFeatures, picked: Sequence[Step], single: int) -> list[str]:
    notes = features.notes
    dimension, over_means = features.rows.shape[1], by_class.over == "class_means"
    rows = np.ones_like(by_class.start) if over_means else np.diff(by_class.start)
    least = min(int(rows[list(half)].sum()) for step in picked for half in (step.train, step.test))
    if least <= dimension:
        what = "means of classes" if over_means else "images"
        rank = f"covariances of rank {least - 1} then, which are computed as they are"
        notes.append(f"halves of down to {least} {what} in {dimension} dimensions: {rank}")
    if single:
        notes.append(f"{single} classes of one image take no part in the halves of the same classes")
    return notes


def _in_file(step: Step, table: ImageTable, *, name: str) -> dict[str, Any]:
    train, test = ([table.class_names[c] for c in half] for half in (step.train, step.test))
    fitted, validation = validation_part(train)
    own = {"name": name, "kind": step.kind, "count": step.count, "distance": step.distance}
    return {**own, "train": train, "test": test, "fitted": list(fitted), "validation": list(validation)}


def draw_progression(ways: Mapping[str, Mapping[str, Any]], path: Path, *, dataset: str) -> None:
    """Draw distances over exchanged and removed classes of ways by label; several are scaled to [0, 1] (figure S1)."""
    normalized = len(ways) > 1
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, constrained_layout=True)
    for name, file in ways.items():
        steps = file["way"]
        distances = np.array([step["distance"] for step in steps])
        low, high = distances.min(), distances.max()
        scaled = (distances - low) / (high - low) if normalized else distances
        signed = [-step["count"] if step["kind"] == "reversed" else step["count"] for step in steps]
        for axes, kinds in ((left, ("reversed", "default", "exchanged")), (right, ("removed",))):
            chosen = [i for i, step in enumerate(steps) if step["kind"] in kinds]
            if chosen:
                axes.plot([signed[i] for i in chosen], scaled[chosen], marker=".", label=name)
        if not normalized:
            picked = [split["distance"] for split in file["splits"]]
            for axes in (left, right):
                for distance in picked:
                    axes.axhline(distance, color="0.85", linewidth=0.8, zorder=0)
            if file["alike"]:
                left.axhline(np.mean(file["alike"]), color="tab:green", linestyle=":", label="same classes, at random")
    left.axvline(0, color="0.6", linewidth=0.8)
    left.set_xlabel("classes exchanged (left of 0: for halves more alike)")
    right.set_xlabel("classes removed from each half")
    left.set_ylabel("squared Fréchet distance" + (", brought to [0, 1]" if normalized else ""))
    left.legend(fontsize=7)
    grey = "" if normalized else "; grey lines: the splits in the file"
    figure.suptitle(f"{dataset}: distance between train and test half{grey}", fontsize=9)
    save_figure(figure, path)


def draw_embedding(
    rows: Float, labels: IntArray, picked: Sequence[Step], path: Path, *, points: int, title: str
) -> None:
    """Draw a random sample of images, colored by the halves of the easiest, a medium and the hardest split.

    Source: T. Milbich et al., figure S2, which uses UMAP; here t-SNE (scikit-learn), after 50 principal components.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    chosen = np.sort(np.random.default_rng(_SEED).permutation(len(rows))[:points])
    some = PCA(min(50, len(chosen), rows.shape[1]), random_state=_SEED).fit_transform(rows[chosen])
    perplexity = min(30, max(2, (len(chosen) - 1) // 3))
    places = TSNE(init="pca", perplexity=perplexity, random_state=_SEED).fit_transform(some)
    shown = {0: "easy", len(picked) // 2: "medium", len(picked) - 1: "hard"}
    figure, panels = plt.subplots(1, len(shown), figsize=(3.4 * len(shown), 3.6), constrained_layout=True)
    for axes, (i, name) in zip(np.atleast_1d(panels), shown.items(), strict=True):
        step = picked[i]
        for half, classes, color in (("train", step.train, "tab:blue"), ("test", step.test, "tab:red")):
            mine = np.isin(labels[chosen], classes)
            axes.scatter(*places[mine].T, s=4, color=color, alpha=0.6, linewidths=0, label=half)
        axes.set_title(f"{name}: split {i + 1}, distance {step.distance:.1f}", fontsize=9)
        axes.set(xticks=[], yticks=[])
    np.atleast_1d(panels)[0].legend(fontsize=7, markerscale=3)
    figure.suptitle(f"{title}: {len(chosen):,} of {len(rows):,} images by t-SNE", fontsize=8)
    save_figure(figure, path)
