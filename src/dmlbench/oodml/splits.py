"""``dmlbench oodml splits``: a file of train-test splits of growing distance, and its figures."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from dmlbench.config import listed
from dmlbench.data.given_splits import FORMAT, read_splits, validation_part
from dmlbench.oodml.features import Features, features_of, network_name
from dmlbench.oodml.pictures import draw_embedding, draw_progression
from dmlbench.oodml.sequence import ClassFeatures, Step, alike_halves, exchange, pick_evenly, removal
from dmlbench.runtime import read_json, write_json
from dmlbench.types import ConfigError, DataError, ImageTable, is_file_name

_MANY_CLASSES = 1000


def make_splits(cfg: DictConfig) -> Iterator[str]:
    """Exchange and remove classes, pick splits on the way, and write the file and its figures."""
    _check(cfg)
    others = [(path, _way_of(path)) for path in map(Path, map(str, listed(cfg.also)))]  # before the work
    features = features_of(cfg)
    table = features.table
    by_class = ClassFeatures.of(features.rows, table.labels, over=cfg.over)
    train, test = halves_of(table)
    per_step = cfg.per_step or (2 if table.num_classes < _MANY_CLASSES else table.num_classes // 20)
    total = cfg.exchanges + cfg.reversed_exchanges + cfg.removals
    with tqdm(total=total, desc="splits", unit="step", disable=not sys.stderr.isatty()) as bar:

        def walked(steps: Iterable[Step]) -> list[Step]:
            found = []
            for step in steps:
                found.append(step)
                bar.update()
            return found

        away = walked(exchange(by_class, train, test, steps=cfg.exchanges, per_step=per_step))
        back = exchange(by_class, train, test, steps=cfg.reversed_exchanges, per_step=per_step, memory=30, reverse=True)
        nearer = walked(back)[1:]
        furthest = max(away, key=lambda step: step.distance)
        fewer = removal(
            by_class, furthest.train, furthest.test, steps=cfg.removals, per_step=per_step, keep=cfg.keep
        )  # fmt: skip
        further = walked(fewer)[1:]
    picked = pick_evenly([*nearer, *away, *further], cfg.picks)
    counts = np.diff(by_class.start)
    paired = [c for c in (*train, *test) if counts[c] > 1]
    alike = [alike_halves(by_class, paired, seed=seed) for seed in range(cfg.alike)] if paired else []
    notes = _notes(features, by_class, picked, len(train) + len(test) - len(paired))
    path = Path(cfg.output or Path(cfg.paths.output_dir) / "oodml" / f"{table.name}-{_file_stem(cfg)}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "format": FORMAT,
        "dataset": table.name,
        "dataset_fingerprint": table.fingerprint,
        "measured_by": features.measured_by,
        "features_sha256": features.sha256,
        "dimension": features.rows.shape[1],
        "over": cfg.over,
        "settings": {
            "per_step": per_step,
            **{key: cfg[key] for key in ("exchanges", "reversed_exchanges", "removals", "keep", "picks")},
        },
        "notes": notes,
        "alike": alike,
        "way": [_on_the_way(step) for step in (*reversed(nearer), *away, *further)],
        "splits": [_in_file(step, table, name=str(i)) for i, step in enumerate(picked, start=1)],
    }
    write_json(path, document)
    written = [path, path.with_name(f"{path.stem}-way.png")]
    draw_progression(_labeled(document, others), written[1], dataset=table.name)
    if cfg.points:
        written.append(path.with_name(f"{path.stem}-embedding.png"))
        title = f"{table.name}, features of {features.measured_by}"
        draw_embedding(features.rows, table.labels, picked, written[2], points=cfg.points, title=title)
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


def _check(cfg: DictConfig) -> None:
    for key, least in (
        ("per_step", 1), ("exchanges", 0), ("reversed_exchanges", 0), ("removals", 0), ("picks", 2), ("alike", 0),
        ("points", 0),
    ):  # fmt: skip
        if cfg[key] is not None and cfg[key] < least:
            raise ConfigError(f"{key}: got {cfg[key]}, expected at least {least}.")
    if not 0 <= cfg.keep <= 1:
        raise ConfigError(f"keep: got {cfg.keep}, expected a number in [0, 1].")


def _labeled(own: Mapping[str, Any], others: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    """Ways by network, and by file where the network is not enough."""
    labeled = {str(own["measured_by"]): own}
    for path, way in others:
        measured_by = str(way["measured_by"])
        plain = way["dataset"] == own["dataset"] and measured_by not in labeled
        labeled[measured_by if plain else f"{measured_by} ({path})"] = way
    return labeled


def _way_of(path: Path) -> Mapping[str, Any]:
    read_splits(path)
    found = read_json(path) if path.suffix == ".json" else {}
    if "way" not in found:
        raise DataError(f"'{path}' does not say the way to its splits; name a file of `dmlbench oodml splits`")
    return dict(found)


def _notes(features: Features, by_class: ClassFeatures, picked: Sequence[Step], single: int) -> list[str]:
    notes = features.notes
    dimension = features.rows.shape[1]
    counts = np.diff(by_class.start)
    over_means = by_class.over == "class_means"
    halves = [half for step in picked for half in (step.train, step.test)]
    least = min(len(half) if over_means else int(counts[list(half)].sum()) for half in halves)
    if least <= dimension:
        what = "means of classes" if over_means else "images"
        rank = f"covariances of rank {least - 1} then, which are computed as they are"
        notes.append(f"halves of down to {least} {what} in {dimension} dimensions: {rank}")
    if single:
        notes.append(f"{single} classes of one image take no part in the halves of the same classes")
    return notes


def _file_stem(cfg: DictConfig) -> str:
    stem = network_name(cfg) if cfg.run is None else "-".join(Path(cfg.run).parts[-2:])
    over = "" if cfg.over == "class_means" else f"-{cfg.over}"
    name = f"{stem}{over}".replace("/", "_")
    return name if is_file_name(name) else "splits"


def _on_the_way(step: Step) -> dict[str, Any]:
    sizes = {"n_train": len(step.train), "n_test": len(step.test)}
    return {"kind": step.kind, "count": step.count, "distance": step.distance, **sizes}


def _in_file(step: Step, table: ImageTable, *, name: str) -> dict[str, Any]:
    train, test = ([table.class_names[c] for c in half] for half in (step.train, step.test))
    fitted, validation = validation_part(train)
    return {
        "name": name, "kind": step.kind, "count": step.count, "distance": step.distance, "train": train, "test": test,
        "fitted": list(fitted), "validation": list(validation),
    }  # fmt: skip
