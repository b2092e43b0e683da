"""Embeddings of other code as runs of a config, beside our own in collections, tables, comparisons and reports."""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dmlbench.components import component
from dmlbench.config import as_config, to_yaml
from dmlbench.evaluation.embeddings.embed import BY_ORDER, OWN_DISTANCE, StoredEmbeddings, read_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.identity import config_sha256, read_table, run_sha256
from dmlbench.results import store
from dmlbench.results.caveats import UNKNOWN
from dmlbench.results.config_table import IMPORTED
from dmlbench.runner import save_test, tested_result
from dmlbench.runtime import atomic_write, derive_seed, file_sha256
from dmlbench.types import (
    ConfigError,
    EmbeddingSet,
    ImageTable,
    IntArray,
    RetrievalSet,
    RunError,
    Split,
    check_file_name,
    counted,
)

FILES = ("embeddings", "labels", "gallery", "gallery_labels")
"""Keys of the configuration that are patterns of files, with {fold} and {repeat}."""

_FILE = "<file>"
"""Stands for the file's name, so that problems that several files share are said once."""

TOLD = ("trained", "selected")
"""Keys for what somebody tells of a model that we have not trained."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Imported:
    """Folder of the config, test scores by (fold, repeat), and what is not known or was not checked."""

    config: Path
    scores: Mapping[tuple[int, int], Mapping[str, float]]
    notes: tuple[str, ...]


def import_config(args: Any) -> Imported:
    """Check files of test embeddings against a data set, and make the runs of a config of them.

    A file has rows [N, D] and labels [N] of the protocol's test images of its fold, and if possible ``ids``: rows of
    the data set's table, from 0 (image files are sorted by path). The rows may then be in any order; without ids they
    must be in the table's order. Labels may be numbers of any kind, but one for each class.
    """
    check_file_name(args.name)
    protocol = component(args.protocol)
    patterns = {key: str(getattr(args, key)) for key in FILES if getattr(args, key) is not None}
    if "embeddings" not in patterns:
        raise ConfigError(
            "embeddings is missing: expected a file pattern, such as 'embeddings=runs/fold{fold}_rep{repeat}.npz'."
        )
    coordinates = [(fold, repeat) for fold in range(protocol.num_folds) for repeat in range(protocol.num_repeats)]
    files = {at: files_of(patterns, *at) for at in coordinates}
    for key, pattern in patterns.items():
        if len({of[key] for of in files.values()}) < len(coordinates):
            raise ConfigError(
                f"{key}: got {pattern}, expected a different file for each of {protocol.num_folds} {{fold}} and "
                f"{protocol.num_repeats} {{repeat}}. Set protocol.num_repeats if you have fewer repeats."
            )
    missing = [at for at in coordinates if not files[at]["embeddings"].is_file()]
    if len(missing) == len(coordinates) or (missing and not args.allow_partial):
        raise RunError(
            f"{len(missing)} of the {len(coordinates)} files of protocol '{protocol.name}' are missing, such as "
            f"{files[missing[0]]['embeddings']}. Add them, correct the pattern, or set allow_partial=true."
        )
    table = read_table(args.dataset["table"])
    spec: EvaluationSpec = component(args.evaluation)
    name = f"{args.name}-imported-{config_sha256(as_config(_identity(args)))[:8]}"
    config = Path(args.paths.output_dir) / str(args.dataset["name"]) / protocol.name / name
    scores, problems = {}, dict[str, list[str]]()
    checked: dict[tuple[int, int], tuple[Split, StoredEmbeddings, bool]] = {}
    for fold, repeat in [at for at in coordinates if at not in missing]:  # everything is checked before the first run
        split = protocol.split(table, fold=fold)
        if split.test is None:
            raise ConfigError(f"protocol: got {protocol.name}, expected a protocol that evaluates the test half.")
        of = files[fold, repeat]
        try:
            stored = read_embeddings(of["embeddings"], **{key: of.get(key) for key in FILES[1:]})
            checked[fold, repeat] = (split, *_of_table(stored, table, split.test, str(of["embeddings"])))
        except RunError as error:
            problems.setdefault(str(error).replace(str(of["embeddings"]), _FILE, 1), []).append(str(of["embeddings"]))
    if problems:
        raise RunError("\n  ".join(each.replace(_FILE, _listed(those), 1) for each, those in problems.items()))
    widths = {found.queries.rows.shape[1] for _, found, _ in checked.values()}
    if len(widths) > 1:
        listed = " and ".join(map(str, sorted(widths)))
        raise RunError(f"embeddings: got files of {listed} dimensions, expected the same number in all files.")
    for (fold, repeat), (split, found, is_by_order) in checked.items():
        of = files[fold, repeat]
        about = {
            "name": str(args.name),
            **{key: UNKNOWN if getattr(args, key) is None else str(getattr(args, key)) for key in TOLD},
            "file": of["embeddings"].name,
            "file_sha256": file_sha256(of["embeddings"]),
            **({"gallery_sha256": file_sha256(of["gallery"])} if "gallery" in of else {}),
            "ids": "by order" if is_by_order else "given",
        }
        scores[fold, repeat] = _write(
            dataclasses.replace(args, fold=fold, repeat=repeat), config, protocol, table, split, found, about, spec
        )
    on_trust = any(is_by_order for *_, is_by_order in checked.values())
    note = "the files have no ids: images of one class are assumed to be in the data set's order"
    return Imported(config, scores, (note,) * on_trust)


def _listed(files: Sequence[str]) -> str:
    return files[0] + (f" (and {counted(len(files) - 1, 'more file')})" if len(files) > 1 else "")


def files_of(patterns: Mapping[str, str], fold: int, repeat: int) -> dict[str, Path]:
    places = {"{fold}": str(fold), "{repeat}": str(repeat)}
    files = {}
    for key, pattern in patterns.items():
        if unknown := set(re.findall("{.*?}", pattern)) - places.keys():
            raise ConfigError(f"{key}: got the placeholder {min(unknown)}, expected only {{fold}} and {{repeat}}.")
        name = re.sub("{.*?}", lambda place: places[place[0]], pattern)
        files[key] = Path(name).expanduser()
    return files


def _of_table(
    stored: StoredEmbeddings, table: ImageTable, test: RetrievalSet, source: str
) -> tuple[StoredEmbeddings, bool]:
    """The rows in the order of the test set with its labels and ids; and whether their order was taken on trust."""
    if (stored.gallery is None) != (test.gallery is None):
        needs = "has a gallery. Add gallery=<pattern>" if test.gallery is not None else "has no gallery. Leave it out"
        raise RunError(f"{source}: the test half of {table.name} {needs}.")
    if own := stored.metadata.get(OWN_DISTANCE):
        raise RunError(f"{source}: its model compares embeddings by {own}, and imports are compared as unit vectors.")
    pairs = [("query", stored.queries, test.query)]
    if stored.gallery is not None and test.gallery is not None:
        pairs.append(("gallery", stored.gallery, test.gallery))
    is_by_order = stored.metadata.items() >= BY_ORDER.items()
    found, theirs, ours = [], [], []
    for what, part, rows in pairs:
        if len(part) != len(rows):
            raise RunError(
                f"{source}: got {len(part)} {what} rows, expected {len(rows)}, the test half of {table.name}. Check "
                "dataset= and its options, protocol= and the fold."
            )
        order = np.arange(len(rows)) if is_by_order else _order_of(part.ids.numpy(), rows, table, source)
        labels = part.labels.numpy()[order]
        found.append(EmbeddingSet(part.rows[order], torch.from_numpy(table.labels[rows]), torch.from_numpy(rows)))
        theirs.append(labels)
        ours.append(rows)
    remedy = "Add ids, or sort the rows in the data set's order." if is_by_order else "Correct the labels, or the ids."
    _require_same_classes(np.concatenate(theirs), np.concatenate(ours), table, source, remedy)
    return StoredEmbeddings(found[0], found[1] if len(found) > 1 else None, {}), is_by_order


def _order_of(ids: IntArray, rows: IntArray, table: ImageTable, source: str) -> IntArray:
    """Where each of the table's rows stands among ``ids``."""
    if len(wrong := np.setxor1d(ids, rows)):
        what = "lacks" if wrong[0] in rows else "has"
        raise RunError(
            f"{source} {what} the id {wrong[0]}, expected the row of each test image of {table.name} once, from 0 in "
            f"dmlbench's order (image files sorted by path): here {rows.min()} to {rows.max()}."
        )
    order = np.argsort(ids, kind="stable")
    return np.asarray(order[np.searchsorted(ids[order], rows)])


def _require_same_classes(theirs: IntArray, rows: IntArray, table: ImageTable, source: str, remedy: str) -> None:
    """Raise RunError unless labels map one-to-one to the classes of the data set."""
    ours = table.labels[rows]
    pairs = np.unique(np.stack([theirs, ours]), axis=1)
    for values, what, others in zip(pairs, ("label", "class"), ("classes", "labels"), strict=True):
        found, counts = np.unique(values, return_counts=True)
        if counts.max() > 1:
            raise RunError(
                f"{source}: the labels do not match the test images of {table.name}: {what} "
                f"{found[counts.argmax()]} has {counts.max()} {others}, expected 1. {remedy}"
            )


def _identity(args: Any) -> dict[str, Any]:
    """What makes the config of an imported model: its name, what it was tested on, and what is told of it."""
    kept = asdict(args)
    return {
        "imported": {key: kept[key] for key in ("name", *TOLD)},
        **{key: kept[key] for key in ("dataset", "protocol", "paths", "fold", "repeat")}, "base_seed": 0,
        "runtime": {"choices": {IMPORTED: args.name}},
    }  # fmt: skip


def _write(
    args: Any, config: Path, protocol: Any, table: ImageTable, split: Split, found: StoredEmbeddings,
    about: Mapping[str, Any], spec: EvaluationSpec,
) -> Mapping[str, float]:  # fmt: skip
    """One run; a complete one of the same file is skipped."""
    run_dir = config / store.run_name((args.fold, args.repeat))
    store.make_directory(run_dir)
    identity = as_config(_identity(args))
    with store.locked(run_dir):
        if (run_dir / store.RESULT).exists():
            result = store.read_result(run_dir)
            before = result.get("imported", {})
            if any(before.get(key) != about.get(key) for key in ("file_sha256", "gallery_sha256")):
                raise RunError(
                    f"{run_dir} has other embeddings of the same name. Choose another name, or remove the run with "
                    f"`dmlbench clean {config.name!r}`."
                )
            if result["dataset_fingerprint"] == table.fingerprint:
                log.info("%s is complete: nothing to do", run_dir)
                tested: Mapping[str, float] = result["metrics"]["test"]
                return tested
        test = evaluate(found.queries, found.gallery, spec)
        atomic_write(run_dir / store.CONFIG, to_yaml(identity).encode())
        save_test(run_dir, table, found.queries, found.gallery, test)
        result = {
            "config_id": config.name, "config_sha256": config_sha256(identity), "run_sha256": run_sha256(identity),
            "imported": dict(about), **tested_result(table, protocol, split, test),
            "fold": args.fold, "repeat": args.repeat, "seed": derive_seed(0, args.fold, args.repeat), "base_seed": 0,
            "choices": dict(identity.runtime.choices), "steps": 0, "stop_reason": "imported",
            "monitor": spec.score_names[0], "search": test.search, "metrics": {"test": test.scores},
            **store.hashes_of(run_dir, (store.EMBEDDINGS, store.PER_QUERY)), "wall_s": 0.0,
        }  # fmt: skip
        store.write_result(run_dir, result)
    return test.scores
