"""Kill every command at every file operation, start it again, and compare every file with those of a whole run.

    python scripts/reliability/kills.py                     # some 700 kills, under an hour on one core
    python scripts/reliability/kills.py --only train table  # some commands
    python scripts/reliability/kills.py --output outputs/published/reliability/kills.md

A command is killed (a) before each file operation that it does, (b) where it writes at a position or syncs, also with
half of the data on the disk, (c) at each of some random moments, (d) twice in a row at random operations. What it left
must not be taken for a result; the same command, started again, must end with exit code 0, with the very files of a run
that was never stopped, and with no temporary file.
"""

import argparse
import io
import json
import random
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import Ended, import_libraries, run
from PIL import Image
from tqdm import tqdm

Command = tuple[str, ...]

TINY = (
    "dataset.table.num_classes=16", "dataset.table.images_per_class=8", "dataset.table.image_size=32",
    "sampler.classes_per_batch=4", "sampler.images_per_class=4", "head.out_features=16", "fit.max_steps=6",
    "fit.validate_every=3", "fit.checkpoint_every=2", "fit.log_every=1", "device=cpu", "num_workers=0",
)  # fmt: skip
GSP = ("pooling=gsp", "pooling.num_prototypes=8", "pooling.memory_rows=32")
PHOTOGRAPHS = (
    "dataset=folder", "num_workers=0", "device=cpu", "transform.train.resize=36", "transform.train.crop=32",
    "transform.eval.resize=36", "transform.eval.crop=32", "sampler.classes_per_batch=4", "sampler.images_per_class=4",
    "fit.max_steps=2", "fit.log_every=1", "head.out_features=16",
)  # fmt: skip
FEATURES = ("backbone=resnet20_small", "backbone.frozen_until=all", "feature_cache=pooled", "feature_cache.views=2")
# Of a run, what differs between two that are alike: times, memory, dates.
_OF_THE_DAY = {"wall_s", "peak_memory_bytes", "finished", "hours", "time", "checksum", "runs_sha256"}
_TEMPORARY = (".tmp", ".partial", ".lock")


@dataclass(frozen=True)
class Scenario:
    """A command that is killed, after others that made what it works on."""

    command: Command
    before: tuple[Command, ...] = ()
    make: Callable[[Path], None] = lambda folder: None
    makes: str = ""
    """What the command makes at once and does not make again."""


def photographs(folder: Path) -> None:
    """Sixteen classes of four images of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 40, 44, 3), dtype=np.uint8)
    for k, pixels in enumerate(noise):
        path = folder / "data" / "folder" / f"class{k // 4:02d}" / f"{k % 4}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def rows_of_others(folder: Path) -> None:
    """A file of embeddings of the test half of ``photographs``."""
    photographs(folder)
    labels = np.repeat(np.arange(8, 16), 4)
    np.savez(folder / "rows.npz", rows=np.random.default_rng(0).normal(size=(32, 4)).astype("f4"), labels=labels)


def birds(folder: Path) -> None:
    """An archive like that of CUB-200-2011, with two images each of five classes."""
    names = [f"{c:03}.Bird/{i}.jpg" for c in range(1, 6) for i in range(2)]
    files = {
        "images.txt": "".join(f"{k} {name}\n" for k, name in enumerate(names, 1)).encode(),
        "image_class_labels.txt": "".join(f"{k} {int(name[:3])}\n" for k, name in enumerate(names, 1)).encode(),
        "classes.txt": "".join(f"{c} {c:03}.Bird\n" for c in range(1, 6)).encode(),
    }
    for name, pixels in zip(names, np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), np.uint8), strict=True):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "jpeg")
        files[f"images/{name}"] = buffer.getvalue()
    (folder / "data").mkdir()
    with tarfile.open(folder / "data" / "CUB_200_2011_subset.tar", "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"CUB_200_2011/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def _grid(*more: str) -> Command:
    return ("train", "-m", *TINY, "fold=0,1,2,3", "fit.max_steps=2", "fit.keep=none", *more)


_CELLS: tuple[Command, ...] = (_grid("pooling=gap"), _grid("pooling=gmp"))
_SUMMARIES: tuple[Command, ...] = (*_CELLS, ("aggregate", "allow_partial=true"))
SCENARIOS = {
    "train": Scenario(("train", *TINY, *GSP, "fit.keep=both")),
    "sweep": Scenario(("train", "-m", *TINY, "pooling=gap,gmp", "fit.max_steps=2")),
    "cache": Scenario(("train", *PHOTOGRAPHS), make=photographs),
    "features": Scenario(("train", *PHOTOGRAPHS, *FEATURES), make=photographs),
    "prepare": Scenario(
        ("data", "prepare", "cub200", "archives=data/CUB_200_2011_subset.tar", "accept_other_checksum=true",
         "dataset.table.check_counts=false"),
        make=birds,
    ),
    "aggregate": Scenario(
        ("aggregate", "allow_partial=true", "metrics=[p_at_1,map_at_r,ndcg_at_k,nmi]", "recall_at=[1,10]"), _CELLS
    ),
    "evaluate": Scenario(
        ("evaluate", "run=FIRST", "output=scores.json", "per_query=queries.csv", "per_class=classes.csv"), _CELLS[:1]
    ),
    "table": Scenario(("table", "allow_partial=true"), _SUMMARIES),
    "report": Scenario(("report", "allow_partial=true", "queries=2"), _SUMMARIES),
    "explain": Scenario(("explain", "run=FIRST", "num_images=2"), (("train", *TINY, *GSP),)),
    "export": Scenario(
        ("export", "run=FIRST", "output=exported", "formats=[]"), (("train", *TINY, *GSP),), makes="exported"
    ),
    "embed": Scenario(
        ("embed", "model=FIRST", "images=data/folder", "output=rows.safetensors", "device=cpu", "num_workers=0"),
        (("train", *PHOTOGRAPHS),), make=photographs,
    ),
    "import": Scenario(
        ("import", "name=theirs", "dataset=folder", "protocol=conventional", "protocol.num_repeats=1",
         "embeddings=rows.npz"),
        make=rows_of_others,
    ),
    "reproduce": Scenario(("reproduce", "demo", *TINY, "fit.max_steps=2", "pooling=gap,gmp", "fold=[0]", "repeat=[0]")),
    "splits": Scenario(
        ("oodml", "splits", "dataset=folder", "backbone=resnet20_small", "transform.eval.resize=36",
         "transform.eval.crop=32", "exchanges=2", "reversed_exchanges=2", "removals=2", "picks=2", "per_step=1",
         "device=cpu", "num_workers=0"),
        make=photographs,
    ),
    "tune": Scenario(
        ("tune", "search=demo", "trials=2", "name=t", *TINY, "fit.max_steps=2", "fit.validate_every=1")
    ),
    "study": Scenario(("study", "two_moons", "steps=20", "repeats=1", "points=40")),
    "clean": Scenario(("clean", "configs=*gmp*", "ask=false"), _SUMMARIES),
}  # fmt: skip


@dataclass
class Tally:
    """What came of the kills of one command."""

    operations: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Trial:
    """One scenario: its folder as it is before the command, and the files that a whole run of it leaves."""

    def __init__(self, name: str, scenario: Scenario, home: Path) -> None:
        self.name, self.scenario, self.home = name, scenario, home
        self.folder, self.template, self.log = home / "work", home / "template", home / "log.txt"
        home.mkdir(parents=True)
        self.folder.mkdir()
        scenario.make(self.folder)
        for command in scenario.before:
            self._must_end(self.run(command), "before")
        first = min((self.folder / "outputs").glob("*/*/*/fold*_rep*"), default=None)
        named = str(first.relative_to(self.folder)) if first else ""
        self.command = tuple(word.replace("FIRST", named) for word in scenario.command)
        shutil.copytree(self.folder, self.template, symlinks=True)
        self.whole = self._whole()
        self.expected = contents(self.folder)
        self._whole()
        if differing := differences(self.expected, contents(self.folder)):
            raise SystemExit(f"{name}: two whole runs differ, so nothing can be compared: {', '.join(differing)}")

    def run(self, command: Command, **kill: Any) -> Ended:
        environment = {"DMLBENCH_CACHE": "cache", "DMLBENCH_DATA": "data", "DMLBENCH_OUTPUT": "outputs"}
        return run(command, self.folder, self.log, environment=environment, **kill)

    def _must_end(self, ended: Ended, when: str) -> Ended:
        if ended.code != 0:
            raise SystemExit(f"{self.name}, {when}: exit code {ended.code}\n{ended.text}")
        return ended

    def _reset(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.template, self.folder, symlinks=True)

    def _whole(self) -> Ended:
        self._reset()
        return self._must_end(self.run(self.command), "whole")

    def killed(self, kills: Sequence[dict[str, Any]]) -> tuple[int, str | None]:
        """How many kills took place, and what was wrong afterwards."""
        self._reset()
        happened = 0
        for kill in kills:
            if self._is_made():
                break
            ended = self.run(self.command, **kill)
            if ended.code == 0:
                break  # it ended before the moment came
            if ended.code != -9:
                return happened, f"exit code {ended.code} of a run after a kill: {_last(ended.text)}"
            happened += 1
            if wrong := self._taken_for_whole():
                return happened, wrong
        ended = Ended(0, "", 0.0, ()) if self._is_made() else self.run(self.command)
        if ended.code is None:
            return happened, "hangs when started again"
        if ended.code != 0:
            return happened, f"exit code {ended.code} when started again: {_last(ended.text)}"
        now = contents(self.folder)
        differing = differences(self.expected, now)
        if differing:
            return happened, "other files: " + ", ".join(differing)
        return happened, None

    def _is_made(self) -> bool:
        return bool(self.scenario.makes) and (self.folder / self.scenario.makes).exists()

    def _taken_for_whole(self) -> str | None:
        """A result that a kill left must be the one of a whole run."""
        for path in sorted(self.folder.glob("outputs/**/*.json")):
            try:
                json.loads(path.read_text())
            except ValueError:
                return f"{path.relative_to(self.folder)} is cut off"
        return None

    def plan(self, draw: random.Random, *, moments: int, pairs: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The kills to try: kind, and where each falls."""
        operations = self.whole.operations
        for k, operation in enumerate(operations):
            yield "operation", [{"kill_at": k}]
            if operation in ("sync", "pwrite"):
                yield "half written", [{"kill_at": k, "torn": True}]
        for _ in range(moments):
            yield "moment", [{"kill_after": draw.uniform(0.02, self.whole.seconds)}]
        for _ in range(pairs):
            yield "twice", [{"kill_at": draw.randrange(len(operations)), "torn": draw.random() < 0.5} for _ in "ab"]


def contents(folder: Path) -> dict[str, Any]:
    """Every file below ``folder``, without what belongs to the day."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if not p.is_dir()):
        name = str(path.relative_to(folder))
        if "/.sweeps/" in name or path.suffix == ".db":  # folders named by the moment, a data base with times
            continue
        if not path.is_file():  # a pipe would be waited for
            found[name] = "no file"
        elif path.suffix == ".ckpt":
            found[name] = _as_bytes(torch.load(path, weights_only=True))
        elif path.suffix == ".json":
            found[name] = _without_day(json.loads(path.read_text()))
        elif path.suffix == ".csv":
            found[name] = _csv_without_day(path.read_text())
        else:
            found[name] = path.read_bytes()
    return found


def _without_day(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_day(v) for key, v in value.items() if key not in _OF_THE_DAY}
    return [_without_day(v) for v in value] if isinstance(value, list) else value


def _csv_without_day(text: str) -> list[tuple[str, ...]]:
    import csv

    rows = list(csv.reader(io.StringIO(text)))
    kept = [k for k, name in enumerate(rows[0]) if name not in _OF_THE_DAY] if rows else []
    return [tuple(row[k] for k in kept if k < len(row)) for row in rows]


def _as_bytes(value: Any) -> Any:
    if hasattr(value, "numpy"):
        return (str(value.dtype), tuple(value.shape), value.contiguous().view(-1).numpy().tobytes())
    if isinstance(value, dict):
        return {key: _as_bytes(v) for key, v in value.items() if key not in _OF_THE_DAY}
    return [_as_bytes(v) for v in value] if isinstance(value, list | tuple) else value


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names of files that are missing, too many, or other than expected."""
    missing = [f"{name} is missing" for name in expected if name not in found]
    more = [f"{name} is left over" for name in found if name not in expected]
    return missing + more + [f"{n} differs" for n in expected if n in found and expected[n] != found[n]]


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def report(tallies: dict[str, Tally]) -> str:
    """The outcome as Markdown."""
    kinds = ("operation", "half written", "moment", "twice")
    lines = [
        f"| command | file operations | {' | '.join(kinds)} | kills | wrong | minutes |",
        f"|---|---|{'---|' * len(kinds)}---|---|---|",
    ]
    for name, tally in tallies.items():
        counts = " | ".join(str(tally.kills[kind]) for kind in kinds)
        numbers = (sum(tally.operations.values()), counts, sum(tally.kills.values()), len(tally.wrong))
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {tally.seconds / 60:.1f} |")
    total = sum(sum(tally.kills.values()) for tally in tallies.values())
    wrong = [f"- {name}: {text}" for name, tally in tallies.items() for text in tally.wrong]
    return "\n".join([*lines, "", f"{total} kills, {len(wrong)} wrong.", *wrong, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(SCENARIOS), default=tuple(SCENARIOS))
    parser.add_argument("--moments", type=int, default=15, help="kills of each command at random moments")
    parser.add_argument("--pairs", type=int, default=10, help="of each command, two kills in a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a Markdown file for the outcome")
    options = parser.parse_args()
    import_libraries()
    tallies = {name: Tally() for name in options.only}
    with tempfile.TemporaryDirectory(prefix="kills-") as home:
        for name, tally in tallies.items():
            started = time.monotonic()
            trial = Trial(name, SCENARIOS[name], Path(home) / name)
            tally.operations.update(trial.whole.operations)
            draw = random.Random(f"{options.seed}/{name}")
            for kind, kills in tqdm(list(trial.plan(draw, moments=options.moments, pairs=options.pairs)), desc=name):
                happened, wrong = trial.killed(kills)
                tally.kills[kind] += happened
                if wrong:
                    tally.wrong.append(f"{kind} {kills}: {wrong}")
                    tqdm.write(f"{name}: {tally.wrong[-1]}")
            tally.seconds = time.monotonic() - started
            text = report({name: tally for name, tally in tallies.items() if tally.seconds})
            if options.output:  # after every command, so that nothing is lost
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(text)
    print(text)
    sys.exit(any(tally.wrong for tally in tallies.values()))


if __name__ == "__main__":
    main()
