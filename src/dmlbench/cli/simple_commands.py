"""Commands that need no more than their composed configuration: a function of it each, and two with sub-commands.

Functions import what they need, so that an overview or a misspelt key does not wait for torch or matplotlib.
"""

import contextlib
import functools
import importlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmlbench.cli.arguments import CommandLine
from dmlbench.cli.hydra_command import run_command, sub_command
from dmlbench.config import listed
from dmlbench.types import (
    ConfigError,
    DmlbenchError,
    IncompleteConfig,
    RunError,
    check_at_least,
    check_file_name,
    counted,
)

if TYPE_CHECKING:
    from dmlbench.apps.embeddings import Evaluated
    from dmlbench.results.store import RunInfo

OODML = {
    "splits": "exchange and remove classes for train-test splits of growing distance; a file for protocol=oodml",
    "distances": "measure the splits of a file by a network, beside the distances that the file gives",
    "scores": "scores of configs over the distance of their splits, and the area under them",
    "frozen": "score a network's features as they are over the splits of a file",
    "transfer": "test trained models on another data set",
    "few_shot": "adapt the last layer of finished runs to a few images of each test class; scores before and after",
    "structure": "measure how training embeddings are arranged, and whether that goes along with test scores",
}
"""Sub-commands of ``dmlbench oodml``, configured by ``conf/oodml_<word>.yaml``."""
_OODML_FUNCTIONS = {
    "splits": "splits.make_splits",
    "distances": "distances.measure",
    "scores": "scores.scores_over_distance",
    "frozen": "distances.frozen",
    "transfer": "distances.transfer",
    "few_shot": "few_shot_table.few_shot",
    "structure": "structure.correlate",
}
"""Functions of ``dmlbench.oodml`` from a configuration to the lines to print."""
_MOST_SETTINGS = 4
"""Differing settings that `status` lists for a config."""
STUDIES = {
    "two_moons": "what the temperature does to the boundary of a softmax classifier (ProxyNCA++, figure 3)",
    "gsp_timing": "what GSP's transport costs, with both solvers (GSP, figures 7 left, 8 and 9)",
    "xml_prototypes": "prototypes in place of averages, and whether they serve other classes (XML, figures 3 and 4)",
    "gsp_tokens": "average pooling and GSP on bags of trainable tokens (GSP, figure 3a)",
    "zero_shot_prediction": "attributes for classes that they were not fitted to, with and without ZSR (GSP, figure 5)",
    "gsp_weights": "pooling weights on a map of colors, by linear program and smoothed (GSP, figure 2)",
    "collage_samples": "collages of CIFAR-100 beside the images that they are made of (GSP, figures 4 and 11)",
    "gsp_mu": "GSP over mu, the share of the pixels that is transported (GSP, figure 7 right)",
    "gsp_m_eps": "GSP over the number of prototypes and the smoothing (GSP, figure 10, table 7)",
    "untrained_poolings": "poolings of a pretrained map without training (ProxyNCA++, table 11, first rows)",
    "object_size": "average and maximum pooling by the size of the object (ProxyNCA++, figure 7); needs boxes",
}
"""Studies, each with ``conf/study_<name>.yaml`` and ``conduct`` of ``studies/<name>.py``, or ``_STUDY_FUNCTIONS``."""
_STUDY_FUNCTIONS = {
    "gsp_mu": "gsp_values.over_mu",
    "gsp_m_eps": "gsp_values.over_m_and_epsilon",
    "xml_prototypes": "prototypes.xml",
    "zero_shot_prediction": "prototypes.zero_shot_prediction",
}


def evaluate(args: Any) -> None:
    from dmlbench.apps.embeddings import evaluate_from, require_scores

    result = evaluate_from(args)
    evaluation = result.evaluation
    print(f"{evaluation.n_query} queries, gallery of {evaluation.n_gallery}, "
          f"{evaluation.n_skipped_queries} queries without a positive left out")  # fmt: skip
    width = max(14, *map(len, evaluation.scores))
    for name, value in evaluation.scores.items():
        note = ""
        if (stored := (result.stored or {}).get(name)) is not None:
            note = "  as in result.json" if stored == value else f"  result.json has {stored:.6f}"
        print(f"{name:<{width}} {value:.6f}{note}")
    for note in result.notes():
        print(f"  {note}")
    if args.hardest is not None:
        _print_hardest(args, result)
    for path in (args.output, args.per_query, args.per_class):
        if path is not None:
            print(f"written: {path}")
    require_scores(evaluation.scores, args.fail_below or {})


def _print_hardest(args: Any, result: "Evaluated") -> None:
    from dmlbench.evaluation.evaluate import hardest_queries

    def name(item: int, label: int) -> str:
        of_class = label if result.class_names is None else result.class_names[label]
        return f"id {item} of class {of_class}" + ("" if result.table is None else f" ({result.table.paths[item]})")

    measure = "similarity" if getattr(result.distance, "is_inverted", False) else "distance"
    print(f"\nqueries with the lowest {args.hardest_by}, the {measure} to their nearest images, and these")
    hardest = hardest_queries(
        result.queries, result.gallery, result.evaluation, count=args.hardest, metric=args.hardest_by,
        tile_bytes=result.spec.tile_bytes, distance=result.distance,
    )  # fmt: skip
    for query in hardest:
        nearest = name(query.nearest_id, query.nearest_label)
        print(f"{query.score:.4f}  {name(query.id, query.label)}  <- {query.distance:.4f} ->  {nearest}")


def export(args: Any) -> None:
    from dmlbench.apps.export import export_run

    formats = None if args.formats is None else list(args.formats)
    options = {"formats": formats, "license": args.license, "modules": args.modules}
    for name, reason in export_run(args.run, args.output, **options).items():
        print(f"no {name}: {reason}")
    print(f"written: {args.output}")


def embed(args: Any) -> None:
    from dmlbench.apps.embeddings import check_output, embed_folder
    from dmlbench.apps.loading import load

    check_output(args.output)
    model = load(args.model, device=args.device, modules=args.modules)
    options = {key: getattr(args, key) for key in ("normalize", "batch_size", "num_workers")}
    stored = embed_folder(model, args.images, args.output, progress=sys.stderr.isatty(), **options)
    gallery = "" if stored.gallery is None else f" and {len(stored.gallery)} of the gallery"
    print(f"{counted(len(stored.queries), 'image')}{gallery}, {model.embedding_size} numbers each")
    print(f"written: {args.output}")


def import_(args: Any) -> None:
    from dmlbench.apps.import_embeddings import import_config
    from dmlbench.evaluation.metrics.registry import score_named
    from dmlbench.results.store import run_name

    found = import_config(args)
    for coordinates, scores in found.scores.items():
        shown = ((score_named(name), value) for name, value in scores.items())
        print(f"{run_name(coordinates)}: " + ", ".join(f"{s.label} {s.scale * value:.2f}" for s, value in shown))
    for note in found.notes:
        print(f"  {note}")
    print(f"written: {found.config}; `dmlbench aggregate` and `dmlbench table` treat it like any other config")


def aggregate(args: Any) -> None:
    from dmlbench.apps.loading import distance_of_run
    from dmlbench.components import component
    from dmlbench.results.aggregate import aggregate_config
    from dmlbench.results.caveats import caveats
    from dmlbench.results.store import find_runs, runs_by_config, without_trials

    spec = component(args.evaluation)
    configs = without_trials(runs_by_config(find_runs(args.paths.output_dir, args.configs)), args.configs)
    if not configs:
        raise RunError(
            f"no run under {args.paths.output_dir} matches '{args.configs}'. List the runs with `dmlbench status`."
        )
    how = {"allow_partial": args.allow_partial, "force": args.force, "progress": sys.stderr.isatty()}
    incomplete, failures = [], []
    for number, (path, runs) in enumerate(configs.items(), start=1):
        print(f"[{number}/{len(configs)}] {path}")
        try:
            summary = aggregate_config(runs, spec, distance_of=distance_of_run, **how)
        except IncompleteConfig as error:
            incomplete.append(error)
            print("      incomplete")
            continue
        except DmlbenchError as error:
            failures.append(error)
            print("      cannot be aggregated")
            continue
        for caveat in caveats(summary):
            print(f"      {caveat}")
        for kind, scores in summary["scores"].items():
            print(f"      {kind}: " + ", ".join(f"{name} {score['mean']:.4f}" for name, score in scores.items()))
    done = len(configs) - len(incomplete) - len(failures)
    print(f"aggregated: {done} of {len(configs)} configs")
    for problem in incomplete if done or failures else ():
        print(f"  {problem}")
    if failures:
        count = f"{len(failures)} of {len(configs)} configs cannot be aggregated"
        raise type(failures[0])(f"{count}: " + " ".join(map(str, failures)))
    if not done:
        raise RunError("no config is complete: " + " ".join(map(str, incomplete)))


def table(args: Any) -> None:
    from dmlbench.apps.compare_configs import (
        build_tables,
        compare_with_first,
        comparison_table,
        find_configs,
        runs_frame,
    )
    from dmlbench.components import component
    from dmlbench.runtime import atomic_write

    if args.name is not None:
        check_file_name(args.name)
    spec = component(args.evaluation)
    folder = Path(args.paths.output_dir) / "tables"
    if args.compare is not None:
        found = compare_with_first(
            args.paths.output_dir, list(args.compare), spec, among=args.configs, allow_partial=args.allow_partial
        )
        dataset, protocol = found[0].first.parts[-3:-1]
        comparison_table(found).publish(folder / (args.name or f"{dataset}-{protocol}-differences"))
        return
    grouped = find_configs(args.paths.output_dir, args.configs, spec, allow_partial=args.allow_partial)
    tables = build_tables(grouped, spec, facts=list(args.facts))
    for (dataset, protocol), one in tables.items():
        name = args.name or f"{dataset}-{protocol}"
        if args.name and len(tables) > 1:
            name = f"{args.name}-{dataset}-{protocol}"
        one.publish(folder / name)
    of_runs = folder / (f"{args.name}-runs.csv" if args.name else "runs.csv")
    atomic_write(of_runs, runs_frame(grouped).to_csv(index=False).encode())
    print(f"written: {of_runs}, a row per run")


def report(args: Any) -> None:
    from dmlbench.apps.compare_configs import asked_columns, find_configs, table_title
    from dmlbench.apps.report.page import draw_report, write_page
    from dmlbench.components import component
    from dmlbench.runtime import remove_leftovers

    _check_suffix(args.output, ".png" if args.picture else ".html")
    check_at_least(0, queries=args.queries, classes=args.classes)
    check_at_least(1, nearest=args.nearest)
    folder = Path(args.paths.output_dir) / "tables"
    spec = component(args.evaluation)
    remove_leftovers(folder)
    left_out: list[str] = []
    grouped = find_configs(
        args.paths.output_dir, args.configs, spec, allow_partial=args.allow_partial, left_out=left_out
    )
    reasons = [reason.replace(f"{args.paths.output_dir}/", "") for reason in left_out]
    shown = {"num_queries": args.queries, "num_nearest": args.nearest, "left_out": reasons}
    if not args.picture:
        path = Path(args.output or folder / "report.html")
        write_page(
            grouped, path, spec=spec, num_classes=args.classes, with_overlays=args.overlays, device=args.device, **shown
        )
        print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")
        return
    if args.output is not None and len(grouped) > 1:
        raise ConfigError(f"output: got one file for {len(grouped)} tables, expected one table. Narrow configs=.")
    for (dataset, protocol), configs in grouped.items():
        path = Path(args.output or folder / f"{dataset}-{protocol}.png")
        draw_report(configs, path, title=table_title(dataset, protocol), metrics=asked_columns(spec), **shown)
        print(f"written: {path}")


def explain(args: Any) -> None:
    if not args.run:
        raise ConfigError("run is missing: expected run=<run directory>, or run=[<one>,<another>] side by side.")
    check_at_least(1, num_images=args.num_images)
    runs = [Path(str(run)) for run in listed(args.run)]
    _check_suffix(args.output, ".png")
    if args.pair is not None:
        _explain_pair(args, runs)
        return
    from dmlbench.apps.explain import explain_runs

    path = Path(args.output or runs[0] / "explain.png")
    images = listed(args.images) or None
    explain_runs(runs, images=images, num_images=args.num_images, device=args.device, path=path)
    print(f"written: {path}")


def _explain_pair(args: Any, runs: list[Path]) -> None:
    from dmlbench.apps.explain_pair import explain_pair, write_pair

    if len(runs) > 1 or args.images is not None:
        given = counted(len(runs), "run") + " and images=" * (args.images is not None)
        raise ConfigError(f"pair: got {given}, expected one run and no images=.")
    pair = listed(args.pair)
    names = [re.sub(r"[^\w.+-]+", "-", str(image) if isinstance(image, int) else Path(image).stem) for image in pair]
    path = Path(args.output or runs[0] / f"{'_'.join(['explain', *names])}.png")
    explanation = explain_pair(runs[0], pair=pair, num_nodes=args.num_nodes, reliable=args.reliable, device=args.device)
    numbers = write_pair(explanation, path)
    print(f"distance: {explanation.distance:.6g}")
    print(f"written: {path}, {numbers}")


def _check_suffix(output: str | None, suffix: str) -> None:
    if output is not None and Path(output).suffix != suffix:
        raise ConfigError(f"output: got {output}, expected a {suffix} file.")


def status(args: Any) -> None:
    from dmlbench.results.store import STATES, find_runs, last_error, runs_by_config, states_of

    wanted = states_of(args.state, STATES)
    found = {run: run.state for run in find_runs(args.paths.output_dir, args.configs)}
    runs = [run for run, state in found.items() if state in wanted]
    if not runs:
        in_state = f" in state {' or '.join(wanted)}" if found else ""
        print(f"no run under {args.paths.output_dir} matches '{args.configs}'{in_state}")
        return
    configs = runs_by_config(runs)
    settings = _differing_settings(configs)
    for path, members in configs.items():
        counts = Counter(found[run] for run in members)
        print(f"{path}{settings.get(path, '')}: " + ", ".join(f"{counts[state]} {state}" for state in sorted(counts)))
        for run in members:
            if found[run] != "done":
                error = last_error(run.path) if found[run] == "failed" else ""
                print(f"  {found[run]:<11} {run.path.name}" + (f": {error}" if error else ""))
    total = Counter[str](found[run] for run in runs)
    print(f"{counted(len(runs), 'run')}: " + ", ".join(f"{total[state]} {state}" for state in STATES))


def _differing_settings(configs: Mapping[Path, Sequence["RunInfo"]]) -> dict[Path, str]:
    """Where folders of configs differ only in their hash: the settings that differ, by folder, as " (key=value)"."""
    from dmlbench.config import read_config
    from dmlbench.identity import config_settings

    alike = defaultdict(list)
    for path in configs:
        alike[str(path).rpartition("-")[0]].append(path)
    found = {}
    for paths in alike.values():
        group: dict[Path, dict[str, Any]] = {}
        for path in paths if len(paths) > 1 else ():
            with contextlib.suppress(RunError):  # what cannot be read is listed without settings
                group[path] = config_settings(read_config(configs[path][0].path / "config.yaml"))
        keys = sorted({key for settings in group.values() for key in settings})
        differing = [key for key in keys if len({repr(settings.get(key)) for settings in group.values()}) > 1]
        for path, settings in group.items():
            own = [f"{key}={settings[key]}" for key in differing if settings.get(key) is not None]
            more = [f"{len(own) - _MOST_SETTINGS} more"] if len(own) > _MOST_SETTINGS else []
            found[path] = f" ({', '.join(own[:_MOST_SETTINGS] + more)})" if own else ""
    return found


def clean(args: Any) -> None:
    from dmlbench.results.store import find_runs, remove_run, states_of

    if args.configs is None:
        raise ConfigError(
            "configs is missing: expected configs=<pattern>, '**' for all. List the runs with `dmlbench status`."
        )
    wanted = states_of(args.state, ("done", "failed", "interrupted"))
    states = {run: run.state for run in find_runs(args.paths.output_dir, args.configs)}
    linked = [run for run in states if any(folder.is_symlink() for folder in list(run.path.parents)[:3])]
    chosen = [run for run, state in states.items() if state in wanted and run not in linked]
    for run, state in states.items():
        if run in linked:
            print(f"skipped, behind a symbolic link: {run.path}")
        elif state == "running":
            print(f"skipped, running: {run.path}")
    if not chosen:
        print(f"nothing under {args.paths.output_dir} matches '{args.configs}' in state {' or '.join(wanted)}")
        return
    for run in chosen:
        print(f"{states[run]:<11} {run.path}")
    if args.ask:
        if not sys.stdin.isatty():
            raise RunError(f"nothing was removed: {counted(len(chosen), 'run')} to confirm. Set ask=false to confirm.")
        if input(f"remove {counted(len(chosen), 'run')}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return
    count = 0
    for run in chosen:
        if (state := run.state) not in wanted:  # while the question waited
            print(f"skipped, {state} by now: {run.path}")
            continue
        remove_run(run.path)
        count += 1
    print(f"removed {counted(count, 'run')}")


def oodml(line: CommandLine) -> None:
    chosen = sub_command(line, OODML, usage="oodml WORD", unknown="dmlbench oodml: got '{}', expected a subcommand")
    if chosen is not None:
        run_command(f"oodml_{chosen[0]}", functools.partial(_run_oodml, chosen[0]), chosen[1])


def _run_oodml(word: str, args: Any) -> None:
    module, _, name = _OODML_FUNCTIONS[word].partition(".")
    for line in getattr(importlib.import_module(f"dmlbench.oodml.{module}"), name)(args):
        print(line)


def study(line: CommandLine) -> None:
    chosen = sub_command(
        line, STUDIES, usage="study NAME", unknown="dmlbench study: got '{}', expected the name of a study"
    )
    if chosen is None:
        return
    name, rest = chosen
    if line.is_sweep:
        raise ConfigError("-m: a study compares values of its own keys. Leave -m out.")
    run_command(f"study_{name}", functools.partial(_conduct_study, name), rest)


def _conduct_study(name: str, args: Any) -> None:
    from dmlbench.studies.record import conduct_study, to_markdown

    module, _, function = _STUDY_FUNCTIONS.get(name, f"{name}.conduct").partition(".")
    study = getattr(importlib.import_module(f"dmlbench.studies.{module}"), function)
    findings, written = conduct_study(name, args, study)
    print(to_markdown(findings))
    print("\n".join(f"written: {path}" for path in written))
