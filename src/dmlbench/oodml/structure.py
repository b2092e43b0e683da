"""How the embeddings of a training set are arranged: within and between classes, and over directions.

Source: Roth et al., Revisiting Training Strategies and Generalization Performance in Deep Metric Learning, ICML 2020
    (pi_intra, pi_inter, pi_density, rho); Milbich et al., NeurIPS 2021, section 4.3.
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike

from dmlbench.apps.trained import config_with_weights, distance_of_run, load_run
from dmlbench.evaluation.metrics.clustering import class_distances
from dmlbench.oodml.split_runs import kept_of
from dmlbench.results.store import read_result, require_own_files
from dmlbench.runtime import write_json
from dmlbench.training.fit import BEST
from dmlbench.types import DataError, RetrievalSet, RunError

STRUCTURE = "structure.json"
"""Measures of a run's training embeddings, with the hash of its weights."""
_SCHEMA = 1
_ROUNDING = 1e-6
"""Singular values below this share of the largest are rounding of float32."""
_SAME_DIRECTION = 1e-12
"""Cosine distances below this are rounding of float64."""


@dataclass(frozen=True)
class Structure:
    """Measures of embeddings as unit vectors.

    Attributes:
        intra: mean over classes of the mean cosine distance within the class, without classes of one image.
        inter: mean cosine distance between the normalized class means.
        density: intra / inter; None where all class means have one direction.
        spectral_decay: sum_i u log(u / s_i) with the singular values s, divided by their sum, and u = 1 / D; None where
            it is infinite. All D singular values count, as in ooDML's code on a GPU (metrics/rho_spectrum.py:19); on a
            CPU that code takes the D - 1 largest, 511 at most.
    """

    intra: float
    inter: float
    density: float | None
    spectral_decay: float | None


MEASURES = tuple(field.name for field in fields(Structure))


def structure(rows: ArrayLike, labels: ArrayLike) -> Structure:
    """Measure embeddings [N, D] with labels [N], in float64."""
    given, classes = np.asarray(rows, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if not np.isfinite(given).all():
        raise DataError("embeddings: got NaN or infinity, expected finite numbers. The model has diverged.")
    _, counts = np.unique(classes, return_counts=True)
    if len(counts) < 2 or counts.max() < 2:
        raise DataError(
            f"embeddings: got {len(classes)} images of {len(counts)} classes, expected two classes, one of them with "
            "two images."
        )
    length = np.linalg.norm(given, axis=1, keepdims=True)
    unit = given / np.where(length > 0, length, 1.0)
    intra, inter = class_distances(unit, classes)  # type: ignore[arg-type]  # which it takes of any precision
    values = scipy.linalg.svdvals(unit)
    decay = None
    if values[-1] > _ROUNDING * values[0]:
        decay = float(-np.mean(np.log(values / values.sum() * len(values))))
    return Structure(intra, inter, intra / inter if inter > _SAME_DIRECTION else None, decay)


def structure_of_run(run_dir: Path, *, device: str = "auto", num_workers: int | None = None) -> Structure:
    """Measure a run's training images without augmentation by its best weights; keep that in ``structure.json``."""
    result = read_result(run_dir)
    config_with_weights(run_dir)
    bound = require_own_files(run_dir, result, (BEST,))
    held = kept_of(run_dir / STRUCTURE, bound, lambda held: Structure(**held["measures"]), schema=_SCHEMA)
    if held is not None:
        return held
    if distance_of_run(run_dir) is not None:
        raise RunError(f"{run_dir} compares embeddings by its own distance, expected unit vectors.")
    setup = load_run(run_dir, {"num_workers": num_workers}, device=device)
    embeddings, _ = setup.embed(RetrievalSet(setup.data.split.train))
    found = structure(embeddings.rows.numpy(), embeddings.labels.numpy())
    write_json(
        run_dir / STRUCTURE, {"schema": _SCHEMA, **bound, "n_images": len(embeddings), "measures": asdict(found)}
    )
    return found
