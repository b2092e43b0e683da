"""``dmlbench data``: what data sets are known, and what one of them holds."""

import argparse
from collections.abc import Sequence

from dmlbench.cli.front import compose, config_folder
from dmlbench.types import ConfigError, closest


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dmlbench data",
        description="List the data sets, or read one and print its counts.",
        epilog="example: dmlbench data stats omniglot paths.data_dir=/data",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every data set that the configuration knows")
    stats = commands.add_parser("stats", help="read a data set and print its counts")
    stats.add_argument("name", help="a data set of `dmlbench data list`")
    stats.add_argument("overrides", nargs="*", help="key=value as for `dmlbench train`")
    options = parser.parse_args(list(arguments))
    if options.command == "list":
        _list()
    else:
        _stats(options.name, options.overrides)


def known() -> list[str]:
    """Names of the data sets."""
    return sorted(path.stem for path in (config_folder() / "dataset").glob("*.yaml"))


def _list() -> None:
    for name in known():
        first = (config_folder() / "dataset" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        print(f"{name:<16} {first.lstrip('# ')}")


def _stats(name: str, overrides: Sequence[str]) -> None:
    if name not in known():
        raise ConfigError(f"data set '{name}' is unknown: {closest(name, known())}")
    cfg = compose("train", [f"dataset={name}", *overrides])

    import numpy as np

    from dmlbench.build import component

    table = component(cfg.dataset.table)
    counts = np.bincount(table.labels, minlength=table.num_classes)
    print(f"{table.name}: {len(table)} images of {table.num_classes} classes")
    for role in ("train", "test", "query", "gallery"):
        rows = table.role == role
        if rows.any():
            print(f"  {role:<8} {int(rows.sum())} images of {len(np.unique(table.labels[rows]))} classes")
    print(f"  images per class: {counts.min()} to {counts.max()}, median {int(np.median(counts))}")
    print(f"  fingerprint: {table.fingerprint}")
