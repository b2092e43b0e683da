"""Embeddings of a folder of images, and scores of a finished run again or of embeddings from anywhere."""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.distances import BaseDistance

from dmlbench.apps.loading import TrainedModel, distance_of_run, load, load_run, table_of_run
from dmlbench.components import component
from dmlbench.data.readers.folder import PART_FOLDERS
from dmlbench.data.readers.layouts import images_below, images_in, subfolders
from dmlbench.evaluation.embeddings.embed import (
    BY_ORDER,
    OWN_DISTANCE,
    StoredEmbeddings,
    load_embeddings,
    read_embeddings,
    save_embeddings,
)
from dmlbench.evaluation.evaluate import (
    Evaluation,
    check_hardest,
    evaluate,
    per_class_table,
    per_query_table,
    to_csv,
)
from dmlbench.evaluation.metrics.registry import of_queries, score_names
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.caveats import DEGENERATE, caveats
from dmlbench.results.store import EMBEDDINGS, read_result, require_own_files, require_tested
from dmlbench.runtime import atomic_write, package_versions, set_strict_float32, write_json
from dmlbench.types import ConfigError, DataError, EmbeddingSet, ImageTable, RunError

INPUTS, OUTPUTS = ("embeddings", "labels", "gallery", "gallery_labels"), ("output", "per_query", "per_class")
"""Keys of the configuration that name files."""
log = logging.getLogger(__name__)


def embed_folder(
    model: TrainedModel, folder: str | Path, output: str | Path, *, normalize: bool = False, batch_size: int = 128,
    num_workers: int = 0, progress: bool = False,
) -> StoredEmbeddings:  # fmt: skip
    """Embed every image below a folder and write rows, labels and ids as safetensors.

    ``<folder>/<class>/.../<image>`` gives the labels, numbers of the sorted classes; ``query/<class>/...`` with
    ``gallery/<class>/...`` both sets. Images without class folders are each a class of its own. The ids count the
    images; the file's metadata names them (``paths``) and the classes (``classes``), as lists in JSON.
    """
    check_output(output)
    folder, output = Path(folder).expanduser(), Path(output).expanduser()
    parts = _parts(folder)
    paths = [path for part in parts for path, _ in part]
    names = [name for part in parts for _, name in part]
    classes, labels = np.unique(names, return_inverse=True)
    rows = model.embed(
        [folder / path for path in paths],
        normalize=normalize, progress=progress, batch_size=batch_size, num_workers=num_workers,
    )  # fmt: skip
    count = len(parts[0])
    columns = (rows, torch.from_numpy(labels), torch.arange(len(rows)))
    sets = [EmbeddingSet(*(column[at] for column in columns)) for at in (slice(count), slice(count, None))]
    about = {**BY_ORDER, "model": model.name, "paths": json.dumps(paths), "classes": json.dumps(classes.tolist())}
    if model.has_own_distance:
        about[OWN_DISTANCE] = type(model.network.distance).__name__
    stored = StoredEmbeddings(sets[0], sets[1] if len(parts) > 1 else None, about)
    save_embeddings(output, stored.queries, stored.gallery, about)
    return stored


def check_output(output: str | Path) -> None:
    """Raise a ConfigError unless ``embed_folder`` can write to ``output``."""
    output = Path(output).expanduser()
    if output.suffix != ".safetensors" or not output.parent.is_dir():
        raise ConfigError(f"output: got {output}, expected a .safetensors file in an existing folder.")


def _parts(folder: Path) -> list[list[tuple[str, str]]]:
    """Paths relative to ``folder`` and classes: of all images, or of queries and gallery."""
    if not folder.is_dir():
        raise DataError(f"images: got {folder}, expected a folder of images or of class folders.")
    prefixes = ["query/", "gallery/"] if sorted(subfolders(folder)) == ["gallery", "query"] else [""]
    if prefixes != [""] and (alone := images_in(folder)):
        raise DataError(
            f"'{folder / alone[0]}' is next to the folders query and gallery. Move it into one of them, or remove it."
        )
    found = []
    for prefix in prefixes:
        part = [(image, image.rpartition("/")[0].split("/")[0]) for image in images_below(folder / prefix)]
        if not part:
            raise DataError(f"'{folder / prefix}' holds no images.")
        nested = {top for image, top in part if image.count("/") > 1 and top.casefold() in PART_FOLDERS}
        if nested and not prefix:
            raise DataError(
                f"'{folder}' has split folders, such as '{min(nested)}', expected class folders. Pass one split "
                "folder, or a folder that has only query and gallery."
            )
        outside = [image for image, top in part if not top]
        if outside and len(outside) < len(part):
            raise DataError(f"'{folder / prefix / outside[0]}' is next to class folders. Move it into one of them.")
        if outside:
            log.warning("'%s' has no class folders: each image counts as its own class", folder / prefix)
        found.append([(prefix + image, top or prefix + image) for image, top in part])
    return found


@dataclass(frozen=True)
class Evaluated:
    """What was evaluated, and its scores."""

    source: str
    queries: EmbeddingSet
    gallery: EmbeddingSet | None  # None where the queries were searched among themselves
    spec: EvaluationSpec
    evaluation: Evaluation
    stored: dict[str, float] | None = None  # a run's scores in its ``result.json``
    table: ImageTable | None = None  # the images that the ids count, where they were asked for and found
    distance: BaseDistance | None = None  # by which rows were compared; None is that of unit vectors
    caveats: tuple[str, ...] = ()  # what a run's scores are not (``results.caveats``)
    text_labels: Sequence[str] | None = None  # by label, of a file's labels that are text

    @property
    def class_names(self) -> Sequence[str] | None:
        """By label, where they are known."""
        return self.text_labels if self.table is None else self.table.class_names

    def notes(self) -> list[str]:
        """What a reader of the scores must know."""
        result, n = list(self.caveats), self.evaluation
        if n.n_skipped_queries:
            skipped = f"{n.n_skipped_queries} of {n.n_query} queries"
            result.append(f"{skipped} have no positive and are left out of the means")
        if n.degenerate and not any(caveat.startswith(DEGENERATE) for caveat in result):
            result.append(f"{DEGENERATE}{'; '.join(n.degenerate)}")
        beyond = [k for k in self.spec.recall_at if k > n.n_gallery]
        if beyond and "recall_at_k" in self.spec.metrics:
            result.append(f"recall at {', '.join(map(str, beyond))} looks at the whole gallery of {n.n_gallery}")
        if n.kmeans is not None:
            result.append(f"clusters of nmi and ami: k-means of {n.kmeans}")
        return result

    def summary(self) -> dict[str, Any]:
        """Scores, counts and settings, for a JSON file."""
        n = self.evaluation
        return {
            "source": self.source,
            "scores": n.scores,
            **{key: getattr(n, key) for key in ("n_query", "n_gallery", "n_skipped_queries")},
            "settings": {**dataclasses.asdict(self.spec), "kmeans": n.kmeans},
            "notes": self.notes(),
            "versions": package_versions(),
        }


def evaluate_from(args: Any) -> Evaluated:
    """Evaluate what a configuration of ``dmlbench evaluate`` names, and write the files that it asks for."""
    _check_request(args)
    result = _evaluate_run(args) if args.run is not None else _evaluate_file(args)
    if args.output is not None:
        write_json(Path(args.output), result.summary())
    if args.per_query is not None:
        atomic_write(Path(args.per_query), to_csv(per_query_table(result.queries, result.evaluation)))
    if args.per_class is not None:
        table = per_class_table(result.queries, result.evaluation, class_names=result.class_names)
        atomic_write(Path(args.per_class), to_csv(table))
    return result


def _check_request(args: Any) -> None:
    """Check the arguments before any work starts."""
    if (args.run is None) == (args.embeddings is None):
        given = "neither" if args.run is None else "both"
        raise ConfigError(f"expected either run=<run directory> or embeddings=<file>, got {given}.")
    if args.rerank is not None and not (args.run is not None and args.from_checkpoint):
        raise ConfigError("rerank needs the test images' feature maps. Set run=<run directory> from_checkpoint=true.")
    for key in (*INPUTS[1:], "model"):
        if args.run is not None and getattr(args, key) is not None:
            raise ConfigError(
                f"{key}: got {getattr(args, key)} with run=, expected embeddings=<file>. Leave {key} out."
            )
    outputs = [Path(path) for key in OUTPUTS if (path := getattr(args, key)) is not None]
    for path in outputs:
        if not path.parent.is_dir():
            raise RunError(f"cannot write {path}: the folder {path.parent} does not exist. Create it first.")
    inputs = [path for key in INPUTS if (path := getattr(args, key)) is not None]
    files = [os.path.realpath(path) for path in (*outputs, *inputs)]
    for path in outputs:
        if files.count(os.path.realpath(path)) > 1:
            raise ConfigError(f"{path} is given twice, expected a different file for each input and output.")
    scores = component(args.evaluation).scores
    if args.hardest is not None:
        check_hardest(args.hardest, args.hardest_by, score_names(of_queries(scores)))
    if args.fail_below:
        known = score_names(score for score in scores if score.metric.better == "higher")
        for name, least in args.fail_below.items():
            if name not in known:
                raise ConfigError(
                    f"fail_below: got {name}, expected one of {', '.join(known)}. Add other metrics to metrics=."
                )
            if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
                raise ConfigError(f"fail_below.{name}: got {least}, expected a fraction from 0 to 1.")


def require_scores(scores: Mapping[str, float], least: Mapping[str, float]) -> None:
    """Raise RunError that names every score below its lowest accepted value."""
    short = [f"{name}: got {scores[name]:.6f}, expected at least {value}." for name, value in least.items()
             if scores[name] < value]  # fmt: skip
    if short:
        raise RunError(" ".join(short))


def _evaluate_file(args: Any) -> Evaluated:
    spec: EvaluationSpec = component(args.evaluation)
    stored = read_embeddings(args.embeddings, args.labels, gallery=args.gallery, gallery_labels=args.gallery_labels)
    distance = _distance_of_file(args, stored)
    evaluation = evaluate(stored.queries, stored.gallery, spec, distance=distance)
    return Evaluated(
        str(args.embeddings), stored.queries, stored.gallery, spec, evaluation, distance=distance,
        text_labels=stored.class_names,
    )  # fmt: skip


def _distance_of_file(args: Any, stored: StoredEmbeddings) -> BaseDistance | None:
    """What compares the rows of a file; None is the distance of unit vectors."""
    if args.model is None:
        if own := stored.metadata.get(OWN_DISTANCE):
            raise RunError(
                f"{args.embeddings}: {stored.metadata.get('model', 'the model')} compares its embeddings by {own}, not "
                "as unit vectors. Set model=<run directory or exported folder> to that model, or to evaluate a run, "
                "set run=<run directory> instead of embeddings."
            )
        return None
    model = load(args.model, device="cpu", modules=args.modules)
    if stored.queries.rows.shape[1] != model.embedding_size:
        raise RunError(
            f"{args.embeddings}: got embeddings of {stored.queries.rows.shape[1]} dimensions, expected "
            f"{model.embedding_size} as from {args.model}. Set model= to the model that computed them."
        )
    return model.network.distance if model.has_own_distance else None


def _evaluate_run(args: Any) -> Evaluated:
    run_dir = Path(args.run)
    result = read_result(run_dir)
    require_tested(run_dir, result)
    stored = result["metrics"]["test"]
    spec: EvaluationSpec = component(args.evaluation)
    warned = tuple(caveats({**result, "search": spec.search}))
    if not args.from_checkpoint:
        require_own_files(run_dir, result)
        kept = load_embeddings(run_dir / EMBEDDINGS)
        distance = distance_of_run(run_dir)
        evaluation = evaluate(kept.queries, kept.gallery, spec, distance=distance)
        table = None
        if args.per_class is not None or args.hardest is not None:
            try:
                table = table_of_run(run_dir, result)
            except (DataError, RunError) as error:
                log.warning("image paths and class names are not available: %s", error)
        return Evaluated(str(run_dir), kept.queries, kept.gallery, spec, evaluation, stored, table, distance, warned)
    set_strict_float32()
    again = {} if args.rerank is None else {"rerank": args.rerank}
    asked = {"num_workers": args.num_workers, "evaluation": args.evaluation, **again}
    trained = load_run(run_dir, asked, device=args.device)
    assert trained.data.split.test is not None
    queries, gallery, evaluation = trained.test(trained.data.split.test)
    table, distance = trained.data.table, trained.rerank or trained.model.distance
    if trained.rerank is not None:
        warned = tuple(caveats({**result, "search": spec.search, "rerank": trained.rerank.description}))
    return Evaluated(str(run_dir), queries, gallery, spec, evaluation, stored, table, distance, warned)
