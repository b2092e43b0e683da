"""``dmlbench data``: what data sets are known, what one of them holds, whether it is whole, and making it ready."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from dmlbench.cli.arguments import CommandLine
from dmlbench.cli.command import run_command
from dmlbench.config import config_folders, key_of
from dmlbench.types import ConfigError, DataError, ImageTable, closest

if TYPE_CHECKING:
    from dmlbench.data.getting.catalog import Source
    from dmlbench.data.getting.verify import Report

_COMMANDS = ("list", "stats", "verify", "prepare")
_OF_PREPARE = ("dataset", "archives", "password", "download", "accept_other_checksum")
"""Keys that the suggested next command does not repeat."""
_NAMED = 10


def main(line: CommandLine) -> None:
    command, *names = line.words or ("",)
    if command not in _COMMANDS and not line.help:
        raise ConfigError(f"say what to do: dmlbench data {'|'.join(_COMMANDS)}; '{command}' is none of these")
    names += [override.partition("=")[2] for override in line.overrides if override.startswith("dataset=")]
    if len(names) != (command != "list") and not line.help:
        wanted = "no name" if command == "list" else "the name of one data set"
        raise ConfigError(f"dmlbench data {command} takes {wanted}; `dmlbench data list` has them all")
    known = sorted(_files(line.config_dir))
    for name in names:
        if name not in known:
            raise ConfigError(f"data set '{name}' is unknown: {closest(name, known)}")

    def task(cfg: DictConfig) -> None:
        if command == "list":
            _list(cfg, line.config_dir)
        elif command == "stats":
            print("\n".join(_described(_load(cfg, names[0]))))
        elif command == "verify":
            _verify(cfg, names[0])
        else:
            _prepare(cfg, names[0], [override for override in line.overrides if key_of(override) not in _OF_PREPARE])

    chosen = [override for override in line.overrides if not override.startswith("dataset=")]
    overrides = (*(f"dataset={name}" for name in names), *chosen)
    run_command("data", task, dataclasses.replace(line, words=(), overrides=overrides))


def _files(config_dir: Path | None) -> dict[str, Path]:
    folders = reversed(config_folders(config_dir))
    return {path.stem: path for folder in folders for path in sorted((folder / "dataset").glob("*.yaml"))}


def _list(cfg: DictConfig, config_dir: Path | None) -> None:
    from dmlbench.data.getting.catalog import SOURCES

    root = Path(cfg.paths.data_dir)
    for name, file in sorted(_files(config_dir).items()):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:<15} {first.lstrip('# ')}")
        if (source := SOURCES.get(name)) is not None:
            for line in [*_found(source, root), f"published: {source.place.published}"]:
                print(f"{'':<15} {line}")
    print(f"\nLooked in {root.absolute()} (paths.data_dir, DMLBENCH_DATA). `dmlbench data prepare NAME` fetches one.")


def _found(source: "Source", root: Path) -> list[str]:
    """Where a data set lies, and how it differs from the published one."""
    from dmlbench.data.getting.catalog import is_found

    found = is_found(source, root) if root.is_dir() else None
    if found is None:
        return [f"not found in {root}"]
    lines = [f"found in {found[0]}: {found[1].description}"]
    try:
        notes = source.place.notes(root)
    except DataError as error:
        return [*lines, f"cannot be read: {error}"]
    return lines + [f"NOT AS PUBLISHED: {'; '.join(notes)}"] * bool(notes)


def _load(cfg: DictConfig, name: str) -> ImageTable:
    """The table; where the data set is not there at all, the error also says how to get it."""
    from dmlbench.data.getting.catalog import SOURCES

    source = SOURCES.get(name)
    if source is not None and "root" in cfg.dataset.table:
        try:
            source.place.find(cfg.dataset.table.root)
        except DataError as error:
            downloads = all(archive.urls for archive in source.alternatives[0])
            how = "downloads it" if downloads else "extracts the archives, once they are there"
            raise DataError(
                f"{error}\n  `dmlbench data prepare {name}` {how}. By hand: {source.by_hand}.\n"
                f"  Terms: {source.terms}. Cite: {source.citation}."
            ) from None

    from dmlbench.components import component

    table: ImageTable = component(cfg.dataset.table)
    return table


def _described(table: ImageTable) -> list[str]:
    """Counts, place and fingerprint of a data set, one line each."""
    import numpy as np

    from dmlbench.data.image_table import counts_by_role

    per_class = np.bincount(table.labels, minlength=table.num_classes)
    facts = {
        "images per class": f"{per_class.min()} to {per_class.max()}, median {int(np.median(per_class))}",
        "super-classes": table.super_labels is not None and len(np.unique(table.super_labels)),
        "root": table.root,
        "layout": table.layout,
        "held as one array": table.pixels is not None and f"{' x '.join(map(str, table.pixels.shape[1:]))} pixels",
        "not as published": "; ".join(table.notes),
        "fingerprint": table.fingerprint,
    }
    lines = [f"{table.name}: {len(table)} images of {table.num_classes} classes"]
    counts = counts_by_role(table.labels, table.role)
    lines += [f"  {role:<8} {n} images of {classes} classes" for role, (n, classes) in counts.items()]
    return lines + [f"  {name}: {fact}" for name, fact in facts.items() if fact]


def _verify(cfg: DictConfig, name: str) -> None:
    from tqdm import tqdm

    from dmlbench.data.getting.catalog import SOURCES
    from dmlbench.data.getting.verify import Report, unlisted, verify
    from dmlbench.data.image_table import counts_by_role
    from dmlbench.data.originals import deviations_of_sample
    from dmlbench.runtime import available_cores

    table = _load(cfg, name)
    print("\n".join(_described(table)))
    expected = SOURCES[name].place.published if name in SOURCES else None
    counts = "unknown" if expected is None else "others"
    if expected is not None:
        if counts_by_role(table.labels, table.role) == dict(expected.by_role):
            counts = "published"
        print(f"  published: {expected}" + ("" if counts == "published" else " (not what is here)"))
    # A loader that insisted on the counts of what it found may have found a part of the benchmark.
    is_part = any(note.startswith("a subset") for note in table.notes)
    if counts != "published" and cfg.dataset.table.get("check_counts") is True and not is_part:
        counts = "as asked"
    sys.stdout.flush()
    if cfg.decode:
        bar: Any = tqdm(total=len(table), desc=f"{name}: images", unit="image", disable=None, leave=False)
        with bar:
            report = verify(table, num_threads=cfg.jobs or available_cores(), watch=bar.update)
    else:
        found = deviations_of_sample(table.root, table.paths.tolist(), table.originals) if table.originals else ()
        report = Report(deviations=found, unlisted=tuple(unlisted(table)))
    print("\n".join(_findings(report)))
    print(f"{name} is {_verdict(report, counts)}")
    if not report.is_whole:
        sys.exit(1)


def _findings(report: "Report") -> list[str]:
    from dmlbench.data.getting.verify import TINY_SIDE

    twins = report.duplicates
    found = {
        "cannot be read": [f"{path}: {reason}" for path, reason in report.broken],
        f"smaller than {TINY_SIDE} pixels": report.tiny,
        "of one color": report.constant,
        "on disk but not listed": report.unlisted,
    }
    lines = [f"  looked at: {report.looked_at} images" if report.looked_at else "  images were not decoded"]
    if report.modes:
        modes = ", ".join(f"{count} {mode}" for mode, count in report.modes.items())
        lines += [f"  converted to RGB when read: {modes}"]
    if report.rotated:
        lines += [f"  turned upright by EXIF when read: {report.rotated}"]
    for text, names in found.items():
        if names:
            lines += [f"  {text}: {len(names)}", *_first(names)]
    if twins.groups:
        lines += [
            f"  identical images: {len(twins.groups)} groups of {twins.images} images in all; {twins.across_classes} "
            f"groups across classes, {twins.across_halves} across training and test half",
            *_first([" = ".join(_first(group, indent="")) for group in twins.groups]),
        ]
    return lines


def _first(names: Sequence[str], *, indent: str = "    ") -> list[str]:
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return [f"{indent}{name}" for name in [*names[:_NAMED], *more]]


def _verdict(report: "Report", counts: str) -> str:
    """What a data set is, by its images and its counts: "published", "as asked", "others" or "unknown"."""
    if report.broken:
        return f"damaged: {len(report.broken)} of {report.looked_at} images cannot be read; replace these files"
    if report.deviations:
        more = "; its counts differ, too" if counts == "others" else ""
        return f"readable, but its images are not the published ones: {'; '.join(report.deviations)}{more}"
    if counts == "others":
        return "readable, but not the benchmark of the papers: its counts differ from the published ones"
    state = "whole" if report.looked_at else "complete by its counts (images were not decoded)"
    known = {
        "published": ": the benchmark of the papers",
        "as asked": ": the part that is asked for has the counts that are known of it",
        "unknown": ": every image can be read" if report.looked_at else "",
    }
    return f"{state}{known[counts]}"


def _prepare(cfg: DictConfig, name: str, overrides: Sequence[str]) -> None:
    from dmlbench.data.getting.catalog import SOURCES
    from dmlbench.data.getting.prepare import prepare

    source = SOURCES.get(name)
    if source is None:
        raise ConfigError(f"there is nothing to prepare for '{name}'; {', '.join(sorted(SOURCES))} have archives")
    archives = cfg.archives if isinstance(cfg.archives, ListConfig) else [cfg.archives]
    given = [str(file) for file in archives if file is not None]
    print(f"{source.title}, {source.home}\n  terms: {source.terms}\n  cite: {source.citation}")
    prepared = prepare(
        source, cfg.dataset.table.root, given=given, password=cfg.password, download=cfg.download,
        accept_other_checksum=cfg.accept_other_checksum,
        report=lambda text: print(f"  {text}", flush=True),
    )  # fmt: skip
    print(f"  {'is there already' if prepared.was_there else 'made'}: {prepared.folder} ({prepared.layout})")
    print("\n".join(_described(_load(cfg, name))))
    print("next: " + shlex.join(["dmlbench", "data", "verify", name, *overrides]))
