"""The commands as functions: ``import dmlbench as db; db.run(...)``, ``db.evaluate(...)``, ``db.table(...)``.

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
from dmlbench.cli.arguments import in_train
from dmlbench.cli.hydra_command import ProgressFriendlyHandler
from dmlbench.cli.train import composed_run
from dmlbench.components import add_module_folder
from dmlbench.config import arguments_of, compose, composing
from dmlbench.evaluation.embeddings.embed import Array
from dmlbench.evaluation.evaluate import Evaluation, evaluate_arrays
from dmlbench.evaluation.metrics.registry import DEFAULT_METRICS, DEFAULT_RECALL_AT
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.runtime import progress_bars, shows_progress
from dmlbench.types import ConfigError

log = logging.getLogger(__name__)


def run(*overrides: str, config_dir: str | os.PathLike[str] | None = None, progress: bool | None = None) -> Path:
    """Train and test one config at one fold and repeat, as ``dmlbench train`` does; returns the run directory.

    Complete runs are skipped, interrupted ones resume.

    Args:
        overrides: of ``dmlbench train``, such as ``"pooling=gsp"``, ``"fit.max_steps=100"``, ``"device=cpu"``,
            ``"paths.output_dir=results"``.
        config_dir: folder of your own options, as ``--config-dir``; modules beside it can be imported from now on.
        progress: show the progress bars and log lines of the command. None: in a terminal or notebook.
            Logging that you configured is left alone.

    Raises:
        DmlbenchError: what you can fix: a misspelt key, a module that is not found, unreadable data.
    """
    from dmlbench.runner import run as run_config

    if wrong := [each for each in overrides if not isinstance(each, str)]:
        raise ConfigError(f"run: got {wrong[0]!r}, expected texts, as in run('pooling=gsp', 'fold=0').")
    add_module_folder(config_dir)
    with composing(None if config_dir is None else Path(config_dir).expanduser()):
        cfg = composed_run(in_train(overrides))
    with _reporting(shows_progress() if progress is None else progress):
        return run_config(cfg)


@contextlib.contextmanager
def _reporting(shown: bool) -> Iterator[None]:
    """Show progress bars and, unless somebody configured logging, log lines as commands print them."""
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
    model: str | os.PathLike[str] | None = None,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    recall_at: Sequence[int] = DEFAULT_RECALL_AT,
    config_dir: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Exact scores of a run, of a file of embeddings, or of rows in memory, searched among themselves.

    Args:
        source: a run directory, a file of ``dmlbench evaluate``, or rows [N, D].
        labels: of rows [N]; of a file without labels another file.
        model: of a file whose rows have their own distance, the run or exported folder that made it.
        metrics: names of ``dmlbench.evaluation.metrics.registry``.
        recall_at: values of K for metrics with a K, such as R@K.
        config_dir: folder of options that the run was trained with, as ``--config-dir``; its modules can be imported
            from now on.

    Returns:
        ``.scores`` are fractions by name, ``.per_query`` has the scores of every query.
    """
    add_module_folder(config_dir)
    if not isinstance(source, str | os.PathLike):
        if labels is None or isinstance(labels, str | os.PathLike):
            raise TypeError("rows in memory need labels in memory: evaluate(rows, labels)")
        spec = EvaluationSpec(metrics=_listed(metrics), recall_at=tuple(recall_at))
        return _warned(evaluate_arrays(source, labels, spec=spec))
    cfg = compose("evaluate", [])
    cfg.metrics, cfg.recall_at = list(_listed(metrics)), list(recall_at)
    path = Path(source).expanduser()
    cfg["run" if path.is_dir() else "embeddings"] = str(path)
    cfg.labels = None if labels is None else str(labels)
    cfg.model = None if model is None else str(model)
    return _warned(evaluate_from(arguments_of(cfg)).evaluation)


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
    """Configs side by side, as ``dmlbench aggregate`` and ``dmlbench table`` make them: a row a config.

    Args:
        configs: pattern of ``<data set>/<protocol>/<config>``.
        compare: patterns of two or more configs: return the differences from the first, as ``compare=`` does.
        output_dir: folder of the runs; None: ``DMLBENCH_OUTPUT``, else ``outputs``, as for ``run``.
        metrics: scores to show; what the runs lack is computed and kept.
        recall_at: values of K for metrics with a K, such as R@K.
        allow_partial: also configs of which runs are missing.
        config_dir: folder of options that the runs were trained with, as ``--config-dir``; its modules can be imported
            from now on.

    Returns:
        Columns ``dataset``, ``protocol``, ``row``, mean and deviation of each score in percent, and ``notes``, which
        say what the scores are not: partial, selected on the test set, imported. With ``compare``: a row a config and
        metric, with both means and their ``difference`` as fractions, its 95 % interval (``low``, ``high``),
        ``p_value`` and ``p_holm``, which Holm's method corrects.
    """
    add_module_folder(config_dir)
    spec = EvaluationSpec(metrics=_listed(metrics), recall_at=tuple(recall_at))
    root = compose("table", []).paths.output_dir if output_dir is None else str(output_dir)
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
