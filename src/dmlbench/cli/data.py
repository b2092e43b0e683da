"""``dmlbench data``: what data sets are known, what one of them holds, whether it is whole, and making it ready."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from dmlbench.cli.front import compose, config_folder
from dmlbench.types import ConfigError, DataError, ImageTable, closest

if TYPE_CHECKING:
    from dmlbench.data.getting.catalog import Source
    from dmlbench.data.getting.disk import Progress
    from dmlbench.data.getting.verify import Report

_NAMED = 10


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    options, overrides = parser.parse_known_args(list(arguments))
    for unknown in overrides:
        if unknown.startswith("-"):
            parser.error(f"unknown option {unknown}; see dmlbench data {options.command} --help")
    if options.command == "list":
        _list(overrides)
        return
    if options.name not in known():
        raise ConfigError(f"data set '{options.name}' is unknown: {closest(options.name, known())}")
    cfg = compose("train", [f"dataset={options.name}", *overrides])
    if options.command == "stats":
        print("\n".join(_described(_load(cfg, options.name))))
    elif options.command == "verify":
        _verify(cfg, options.name, decode=options.decode, jobs=options.jobs)
    else:
        _prepare(cfg, options, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dmlbench data",
        description="List the data sets, count what one holds, look at every image of it, or make it ready.",
        epilog="example: dmlbench data verify cub200 paths.data_dir=/data",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    about = {
        "list": "every data set that the configuration knows, and whether it is on disk",
        "stats": "read a data set's lists and print its counts",
        "verify": "count a data set and decode every image; exit code 0 when it is whole, else 1",
        "prepare": "extract or download a data set's archives and put them where they belong",
    }
    options_of = {
        "verify": "[--no-decode] [--jobs N] ",
        "prepare": "[--from FILE ...] [--password WORD] [--no-download] [--accept-other-checksum] ",
    }
    command = {}
    for name, text in about.items():
        usage = f"dmlbench data {name} {'' if name == 'list' else 'NAME '}{options_of.get(name, '')}[key=value ...]"
        command[name] = commands.add_parser(
            name, help=text, description=text, usage=usage, epilog="key=value as for `dmlbench train`"
        )
        if name != "list":
            command[name].add_argument("name", help="a data set of `dmlbench data list`")
    command["verify"].add_argument("--no-decode", dest="decode", action="store_false", help="counts only, in seconds")
    command["verify"].add_argument("--jobs", type=_positive, help="threads that decode (default: one per core)")
    add = command["prepare"].add_argument
    add("--from", dest="given", action="append", default=[], metavar="FILE", help="an archive; may be repeated")
    add("--password", metavar="WORD", help="of encrypted archives, as the publisher sent it")
    add("--no-download", dest="download", action="store_false", help="use only what lies on disk")
    add("--accept-other-checksum", action="store_true", help="take archives that differ from the published ones")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be 1 or more")
    return int(text)


def known() -> list[str]:
    """Names of the data sets."""
    return sorted(path.stem for path in (config_folder() / "dataset").glob("*.yaml"))


# ---- list


def _list(overrides: Sequence[str]) -> None:
    from dmlbench.data.getting.catalog import SOURCES

    root = Path(compose("train", overrides).paths.data_dir)
    for name in known():
        first = (config_folder() / "dataset" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        print(f"{name:<15} {first.lstrip('# ')}")
        source = SOURCES.get(name)
        if source is None:
            continue
        for line in _found(source, root):
            print(f"{'':<15} {line}")
        print(f"{'':<15} published: {source.published}")
    print(f"\nLooked in {root.absolute()} (paths.data_dir, DMLBENCH_DATA). `dmlbench data prepare NAME` fetches one.")


def _found(source: "Source", root: Path) -> list[str]:
    """Where a data set lies, and how it differs from the published one."""
    from dmlbench.data.getting.catalog import is_found

    found = is_found(source, root) if root.is_dir() else None
    if found is None:
        return [f"not found in {root}"]
    lines = [f"found in {found[0]}: {found[1].description}"]
    try:
        notes = source.notes(root)
    except DataError as error:
        return [*lines, f"cannot be read: {error}"]
    return lines + [f"NOT AS PUBLISHED: {'; '.join(notes)}"] * bool(notes)


# ---- stats


def _load(cfg: DictConfig, name: str) -> ImageTable:
    """The table; where the data set is not there at all, the error also says how to get it."""
    from dmlbench.data.getting.catalog import SOURCES

    source = SOURCES.get(name)
    if source is not None and "root" in cfg.dataset.table:
        try:
            source.place.find(cfg.dataset.table.root)
        except DataError as error:
            raise DataError(f"{error}\n{_how_to_get(source)}") from None

    from dmlbench.build import component

    table = component(cfg.dataset.table)
    assert isinstance(table, ImageTable)
    return table


def _how_to_get(source: "Source") -> str:
    downloads = all(archive.urls for archive in source.alternatives[0])
    command = f"`dmlbench data prepare {source.name}`"
    return (
        f"  {command} {'downloads it' if downloads else 'extracts the archives, once they are there'}. By hand: "
        f"{source.by_hand}.\n  Terms: {source.terms}. Cite: {source.citation}."
    )


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


# ---- verify


def _verify(cfg: DictConfig, name: str, *, decode: bool, jobs: int | None) -> None:
    from tqdm import tqdm

    from dmlbench.data.getting.catalog import SOURCES
    from dmlbench.data.getting.verify import Report, unlisted, verify
    from dmlbench.data.image_table import counts_by_role
    from dmlbench.data.originals import deviations_of_sample
    from dmlbench.runtime import available_cores

    table = _load(cfg, name)
    print("\n".join(_described(table)))
    expected = SOURCES[name].published if name in SOURCES else None
    is_benchmark = expected is not None and counts_by_role(table.labels, table.role) == dict(expected.by_role)
    # A loader that insisted on the counts of what it found may have found a part of the benchmark.
    is_part = any(note.startswith("a subset") for note in table.notes)
    is_published = is_benchmark or (cfg.dataset.table.get("check_counts") is True and not is_part)
    if expected is not None:
        print(f"  published: {expected}" + ("" if is_benchmark else " (not what is here)"))
    sys.stdout.flush()
    if decode:
        bar: Any = tqdm(total=len(table), desc=f"{name}: images", unit="image", disable=None, leave=False)
        with bar:
            report = verify(table, num_threads=jobs or available_cores(), watch=bar.update)
    else:
        found = deviations_of_sample(table.root, table.paths.tolist(), table.originals) if table.originals else ()
        report = Report(deviations=found, unlisted=tuple(unlisted(table)))
    print("\n".join(_findings(report)))
    print(_verdict(name, report, is_benchmark=is_benchmark, is_published=is_published, has_counts=expected is not None))
    if not report.is_whole:
        sys.exit(1)


def _findings(report: "Report") -> list[str]:
    from dmlbench.data.getting.verify import TINY_SIDE

    twins = report.duplicates
    lines = [f"  looked at: {report.looked_at} images" if report.looked_at else "  images were not decoded"]
    if report.broken:
        lines += [f"  cannot be read: {len(report.broken)}"]
        lines += _first([f"{path}: {reason}" for path, reason in report.broken])
    if report.modes:
        modes = ", ".join(f"{count} {mode}" for mode, count in report.modes.items())
        lines += [f"  converted to RGB when read: {modes}"]
    if report.rotated:
        lines += [f"  turned upright by EXIF when read: {report.rotated}"]
    for text, names in ((f"smaller than {TINY_SIDE} pixels", report.tiny), ("of one color", report.constant)):
        if names:
            lines += [f"  {text}: {len(names)}", *_first(names)]
    if twins.groups:
        lines += [
            f"  identical images: {len(twins.groups)} groups of {twins.images} images in all; {twins.across_classes} "
            f"groups across classes, {twins.across_halves} across training and test half",
            *_first([" = ".join(_first(group, indent="")) for group in twins.groups]),
        ]
    if report.unlisted:
        lines += [f"  on disk but not listed: {len(report.unlisted)}", *_first(report.unlisted)]
    return lines


def _first(names: Sequence[str], *, indent: str = "    ") -> list[str]:
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return [f"{indent}{name}" for name in [*names[:_NAMED], *more]]


def _verdict(name: str, report: "Report", *, is_benchmark: bool, is_published: bool, has_counts: bool) -> str:
    if report.broken:
        return (
            f"{name} is damaged: {len(report.broken)} of {report.looked_at} images cannot be read; replace these files"
        )
    state = "whole" if report.looked_at else "complete by its counts (images were not decoded)"
    if report.deviations:
        counts = "" if is_published or not has_counts else "; its counts differ, too"
        found = "; ".join(report.deviations)
        return f"{name} is readable, but its images are not the published ones: {found}{counts}"
    if is_benchmark:
        return f"{name} is {state}: the benchmark of the papers"
    if is_published:
        return f"{name} is {state}: the part that is asked for has the counts that are known of it"
    if has_counts:
        return f"{name} is readable, but not the benchmark of the papers: its counts differ from the published ones"
    return f"{name} is {state}" + (": every image can be read" if report.looked_at else "")


# ---- prepare


def _prepare(cfg: DictConfig, options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from dmlbench.data.getting.catalog import SOURCES
    from dmlbench.data.getting.prepare import prepare

    source = SOURCES.get(options.name)
    if source is None:
        raise ConfigError(
            f"there is nothing to prepare for '{options.name}'; {', '.join(sorted(SOURCES))} have archives"
        )
    print(f"{source.title}, {source.home}\n  terms: {source.terms}\n  cite: {source.citation}")
    prepared = prepare(
        source, cfg.dataset.table.root, given=options.given, password=options.password, download=options.download,
        accept_other_checksum=options.accept_other_checksum, stage=_stage,
    )  # fmt: skip
    print(f"  {'is there already' if prepared.was_there else 'made'}: {prepared.folder} ({prepared.layout})")
    print("\n".join(_described(_load(cfg, options.name))))
    print("next: " + shlex.join(["dmlbench", "data", "verify", options.name, *overrides]))


@contextmanager
def _stage(text: str) -> "Iterator[Progress]":
    """Print what is being done; on a terminal, a bar of its bytes."""
    from tqdm import tqdm

    print(f"  {text}", flush=True)
    bar: Any = tqdm(unit="B", unit_scale=True, unit_divisor=1000, desc=text, disable=None, leave=False)

    def progress(done: int, total: int | None) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        yield progress
