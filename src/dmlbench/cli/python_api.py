"""The commands as functions: ``import dmlbench as db; db.run(...)``, ``db.tune(...)``, ``db.table(...)``.

Nothing here reads or changes Hydra's state of the process; relative paths are those of the working directory. What a
user can fix raises ``DmlbenchError``.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dmlbench.apps.compare_configs import build_tables, compare_with_first, comparison_table, find_configs
from dmlbench.apps.embeddings import evaluate_from
from dmlbench.cli.arguments import CommandLine, in_train
from dmlbench.cli.hydra_command import ProgressFriendlyHandler
from dmlbench.cli.train import composed_run
from dmlbench.components import add_module_folder
from dmlbench.config import arguments_of, compose, composing
from dmlbench.evaluation.embeddings.embed import Array
from dmlbench.evaluation.evaluate import Evaluation, evaluate_arrays
from dmlbench.evaluation.metrics.registry import DEFAULT_METRICS, DEFAULT_RECALL_AT
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.runtime import progress_bars, shows_progress
from dmlbench.types import ConfigError, RunError

log = logging.getLogger(__name__)


def run(*overrides: str, config_dir: str | os.PathLike[str] | None = None, progress: bool | None = None) -> Path:
    """Train and test one config for one fold and one repeat (seed), like ``dmlbench train``. Returns the run directory.

    If the run is already complete, the function trains nothing. An interrupted run resumes from its last checkpoint.

    Args:
        overrides: settings that replace the defaults, written as for ``dmlbench train``: ``"pooling=gsp"``,
            ``"fit.max_steps=100"``, ``"device=cpu"``, ``"paths.output_dir=results"``.
        config_dir: the folder with your own YAML options, as for ``dmlbench train --config-dir``. The call adds the
            parent of this folder to ``sys.path``, so Python can import your modules from the parent folder.
        progress: whether to show progress bars and log lines. None shows them only in a terminal or notebook. Your
            logging setup stays unchanged.

    Raises:
        DmlbenchError: the input contains an error, such as a misspelt key, a missing module or unreadable data.
    """
    from dmlbench.identity import forget_data
    from dmlbench.runner import run as run_config

    forget_data()
    _check_texts("run", overrides, "run('pooling=gsp', 'fold=0')")
    add_module_folder(config_dir)
    with composing(_folder(config_dir)):
        cfg = composed_run(in_train(overrides))
    with _reporting(progress):
        return run_config(cfg)


def tune(
    search: str, *overrides: str, config_dir: str | os.PathLike[str] | None = None, progress: bool | None = None
) -> pd.DataFrame:
    """Search hyperparameters on the validation classes (``protocol=hpo``), like ``dmlbench tune``.

    The function writes the best trial's values as a recipe into the folder ``<paths.output_dir>/tuning/<search>``. To
    use this recipe, call ``run("recipe=<search>", ..., config_dir=<this folder>)``. If you call ``tune`` again, an
    interrupted search continues, and a complete search returns its trials.

    Args:
        search: the name of the search space, a file ``search/<name>.yaml`` in ``config_dir`` or ``conf``.
        overrides: settings of the search or of all trials. They override the file: ``"trials=20"``,
            ``"loss=contrastive"``.
        config_dir: the folder with your own YAML options, as for ``run``.
        progress: whether to show progress bars and log lines, as for ``run``.

    Returns:
        One row per trial, the best first. The column ``score`` holds the validation score as a fraction, ``steps`` the
        number of steps, and ``runs`` the run directories, relative to ``paths.output_dir``. Each searched key has a
        column with its values.

    Raises:
        DmlbenchError: the input contains an error, or every trial failed.
    """
    from dmlbench.cli.tune import trials_of

    _check_texts("tune", (search, *overrides), "tune('letters', 'trials=20')")
    with _reporting(progress):
        return trials_of(CommandLine((search,), overrides, _folder(config_dir))).to_frame()


def _check_texts(function: str, given: Sequence[str], example: str) -> None:
    if wrong := [each for each in given if not isinstance(each, str)]:
        raise ConfigError(f"{function}: got {wrong[0]!r}, expected strings, as in {example}.")


def _folder(config_dir: str | os.PathLike[str] | None) -> Path | None:
    return None if config_dir is None else Path(config_dir).expanduser()


@contextlib.contextmanager
def _reporting(progress: bool | None) -> Iterator[None]:
    """Show progress bars and, unless somebody configured logging, log lines as commands print them."""
    shown = shows_progress() if progress is None else progress
    logger, root = logging.getLogger("dmlbench"), logging.getLogger()
    with contextlib.ExitStack() as ended:
        ended.enter_context(progress_bars(shown))
        if shown and not (logger.handlers or root.handlers):
            handler = ProgressFriendlyHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
            ended.callback(logger.setLevel, logger.level)
            ended.callback(logger.removeHandler, handler)
            logger.setLevel(logging.INFO)
            logger.addHandler(handler)
        yield


def evaluate(
    source: str | os.PathLike[str] | Array,
    labels: str | os.PathLike[str] | Array | None = None,
    *,
    gallery: str | os.PathLike[str] | Array | None = None,
    gallery_labels: str | os.PathLike[str] | Array | None = None,
    model: str | os.PathLike[str] | None = None,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    recall_at: Sequence[int] = DEFAULT_RECALL_AT,
    config_dir: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Compute the retrieval scores of a run, a file of embeddings, or embeddings in memory, by exact search.

    Without ``gallery``, each image is a query, and all other images are its gallery.

    Args:
        source: a run directory, a file that ``dmlbench evaluate`` can read, or embeddings [Q, D], one per row.
        labels: for embeddings in memory, the class of each embedding [Q]. For a file of embeddings without labels, the
            path of the file with the labels.
        gallery: the embeddings to search: a file if ``source`` is a file, or [N, D] if ``source`` is in memory. If both
            files contain ids, the search for a query skips the gallery item with the query's id. If a gallery in memory
            contains the queries, use ``evaluate_arrays``, which takes ids.
        gallery_labels: for a gallery in memory, the class of each embedding [N]. For a file without labels, the path of
            the file with the labels.
        model: the run directory or exported folder of the model that computed the embeddings. Only needed if ``source``
            is a file and the model compares embeddings by a special distance, as AVSL does.
        metrics: names of metrics from the table in ``docs/evaluation.md``.
        recall_at: the values of K for metrics such as ``recall_at_k``.
        config_dir: the ``config_dir`` that the run was trained with, if any.

    Returns:
        An ``Evaluation``. Its attribute ``scores`` holds each score as a fraction, and ``per_query`` holds the scores
        of each query.
    """
    add_module_folder(config_dir)
    if not isinstance(source, str | os.PathLike):
        if labels is None:
            raise TypeError("labels: got None, expected an array [Q], as in evaluate(embeddings, labels).")
        if (gallery is None) != (gallery_labels is None):
            raise RunError("a gallery needs embeddings and labels. Give both gallery and gallery_labels.")
        if model is not None:
            raise TypeError(f"model: got {model!r}, which needs a file as source. Save the embeddings in a file.")
        own, rows, of_rows = (
            _array("labels", labels),
            _array("gallery", gallery),
            _array("gallery_labels", gallery_labels),
        )
        spec = EvaluationSpec(metrics=_listed(metrics), recall_at=tuple(recall_at))
        return _warned(evaluate_arrays(source, own, gallery_rows=rows, gallery_labels=of_rows, spec=spec))
    cfg = compose("evaluate", [])
    cfg.metrics, cfg.recall_at = list(_listed(metrics)), list(recall_at)
    path = Path(source).expanduser()
    cfg["run" if path.is_dir() else "embeddings"] = str(path)
    others = {"labels": labels, "gallery": gallery, "gallery_labels": gallery_labels, "model": model}
    for name, value in others.items():
        if value is not None and not isinstance(value, str | os.PathLike):
            raise TypeError(f"{name}: got an array, expected a path, because the source {source} is a path.")
        cfg[name] = None if value is None else str(Path(value).expanduser())
    return _warned(evaluate_from(arguments_of(cfg)).evaluation)


def _array(name: str, value: Any) -> Any:
    """What goes with embeddings in memory: anything but a path."""
    if isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}: got {value!r}, which needs a file as source. Save the embeddings in a file.")
    return value


def _listed(metrics: str | Sequence[str]) -> tuple[str, ...]:
    return (metrics,) if isinstance(metrics, str) else tuple(metrics)


def _warned(found: Evaluation) -> Evaluation:
    if found.degenerate:
        log.warning("degenerate embeddings: %s", "; ".join(found.degenerate))
    return found


def table(
    configs: str = "**",
    *,
    compare: Sequence[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    metrics: str | Sequence[str] = ("p_at_1", "map_at_r"),
    recall_at: Sequence[int] = DEFAULT_RECALL_AT,
    allow_partial: bool = False,
    config_dir: str | os.PathLike[str] | None = None,
) -> pd.DataFrame:
    """Aggregate complete runs into a table with one row per config, like ``dmlbench table``.

    Args:
        configs: shell pattern that selects configs by their folder ``<data set>/<protocol>/<config>``.
        compare: two or more patterns, each of which selects one config. The function then compares the first config
            with each of the others, like ``dmlbench table compare=``.
        output_dir: the folder that holds the runs. None uses the environment variable ``DMLBENCH_OUTPUT`` if set, else
            ``outputs``.
        metrics: names of the metrics to show. If a run lacks a score, the function computes it from the run's stored
            embeddings and saves it.
        recall_at: the values of K for metrics such as ``recall_at_k``.
        allow_partial: whether to include configs that lack some of the protocol's runs.
        config_dir: the ``config_dir`` that the runs were trained with, if any.

    Returns:
        The columns are ``dataset``, ``protocol`` and ``row`` (label of the config), the mean and standard deviation of
        each score in percent, and ``notes``. Notes warn of missing runs, checkpoints selected on the test set, or
        imported embeddings. With ``compare``, each row instead compares the first config (A) with one other config (B)
        in one metric. The columns include ``A mean``, ``B mean`` and ``difference`` (B - A), in percent. The columns
        ``low`` and ``high`` bound the 95 % interval of the difference. ``p_value`` is the p-value of the difference.
        ``p_holm`` is this p-value after Holm's correction for the number of configs that are compared with the first.
    """
    add_module_folder(config_dir)
    spec = EvaluationSpec(metrics=_listed(metrics), recall_at=tuple(recall_at))
    root = compose("table", []).paths.output_dir if output_dir is None else str(Path(output_dir).expanduser())
    if compare is not None:
        pairs = compare_with_first(root, compare, spec, among=configs, allow_partial=allow_partial)
        return comparison_table(pairs).to_frame()
    found: list[Any] = []
    tables = build_tables(find_configs(root, configs, spec, allow_partial=allow_partial), spec)
    for (dataset, protocol), one in tables.items():
        frame = one.to_frame()
        frame.insert(0, "protocol", protocol)
        frame.insert(0, "dataset", dataset)
        found.append(frame)
    return pd.concat(found, ignore_index=True)
