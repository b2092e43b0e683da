"""Give every command bad values, damaged files and damaged data, and count how it takes them.

    python scripts/reliability/inputs.py                        # some 1,500 inputs, half an hour on one core
    python scripts/reliability/inputs.py --only values data     # some groups
    python scripts/reliability/inputs.py --output outputs/published/reliability/inputs.md

What comes of an input:

- clear: refused with a message and an exit code, within the limit of time;
- harmless: taken, and every file and every printed line are those of the sound input (the command does not read it, or
  makes it again);
- said: taken, with a warning that names the damage;
- traceback, hang, silent: defects. Silent is whatever ends with 0, differs, and says nothing.
"""

import argparse
import io
import json
import os
import pickle
import random
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from children import Ended, import_libraries, run
from kills import FEATURES, GSP, PHOTOGRAPHS, TINY, Command, birds, contents, differences, photographs
from PIL import Image
from tqdm import tqdm

OUTCOMES = ("clear", "harmless", "said", "traceback", "hang", "silent")
DEFECTS = OUTCOMES[3:]
_LIMIT_S = 60
_WARNINGS = (
    *("damaged", "another version", "again", "building", "PARTIAL", "missing"),
    *("not as published", "warning", "failed", "without"),
)
_OF_DATA = ("have no images", "not as published", "their images are repeated")
Damage = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One bad input: what is done to the folder, and the command that meets it."""

    name: str
    command: Command
    damage: Damage = lambda folder: None
    make: Damage = lambda folder: None
    """What makes the sound data."""
    may_end_well: bool = False
    """Damage of a file that the command may not read, where the same files as without it are right."""
    memory: int | None = None
    """Bytes that the command may take."""


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)


# ---- values of the configuration

BASES = {
    "gsp": (*GSP, "regularizer=zsr", "schedule=step"),
    "xbm": ("loss=xbm_contrastive",),
    "proxies": ("loss=proxy_anchor", "schedule=warmup_cosine"),
    "margin": ("loss=margin", "miner=distance_weighted"),
    "multi_similarity": ("loss=multi_similarity", "miner=multi_similarity", "pooling=gem"),
}
_REAL = ("loss.distance.p", "loss.distance.power")  # numbers that files give as integers
_FREE = ("paths.", "runtime.", "hydra.", "logger")  # any text is a path, or is filled in by the program
_ANY = {
    "base_seed": "every whole number is a seed",
    "dataset.table.seed": "every whole number is a seed",
    "dataset.name": "every name is one",
    "loss.alpha": "PML takes every number",
    "loss.beta": "PML takes every number",
    "loss.nu": "PML takes every number",
    "loss.triplets_per_anchor": "PML asks for it only where there is no miner",
}
_BY_TYPE = {
    int: ("abc", "1.5", "nan", "-7", "[1]", "{a:1}"),
    float: ("abc", "nan", "inf", "-inf", "[1]", "{a:1}"),
    bool: ("maybe", "3.7", "[true]"),
    str: ("no_such_word", "[1,2]", "{a:1}"),
}


def _leaves(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{at}.{key}" if at else str(key))
    elif not isinstance(node, list):
        yield at, node


def of_values() -> Iterator[Case]:
    """Each key of several configurations with values that are none of its kind."""
    from omegaconf import OmegaConf

    from dmlbench.config import compose

    seen: set[str] = set()
    for name, base in BASES.items():
        node: Any = OmegaConf.to_container(compose("train", [*TINY, *base]))
        for key, value in _leaves(node):
            kind = type(value)
            text = isinstance(value, str) and ("${" in value or key.endswith("_target_"))
            if key in seen or key.startswith(_FREE) or key in _ANY or kind not in _BY_TYPE or text:
                continue
            seen.add(key)
            for bad in _BY_TYPE[kind]:
                if key in _REAL and bad == "1.5":
                    continue
                command = ("train", *TINY, *base, "fit.max_steps=2", f"{key}={bad}")
                yield Case(f"{name}: {key}={bad}", command)
        for key in sorted({key.rpartition(".")[0] for key, _ in _leaves(node)} - {""}):
            if not key.startswith(_FREE):
                yield Case(f"{name}: {key}.no_such_key=1", ("train", *TINY, *base, f"{key}.no_such_key=1"))


BAD_LINES = """
train: =3 | = | fit | fit.max_steps | fit.max_steps= | fit..max_steps=3 | +fit.max_steps=3 | ++ | ~ | fit=[short]
train: hydra=null | hydra=x | fit={max_steps:3} | fold=9 | fold=-1 | repeat=x | repeat=-1 | device=tpu | device=cuda:99
train: "'loss.alpha={}'" | loss.alpha={} | pooling=gap,gmp | fold=range( | fold=glob( | 'a b' | head=gap | fit.T_max=0
train: loss._target_= | loss._target_=os.system | loss._target_=no.such.module | loss._target_=torch | loss._target_=3
train: loss._target_=builtins.eval | optim._target_=torch.optim.NoSuch | paths.output_dir= | "paths.output_dir=''"
train: paths.output_dir=/proc/nothing | paths.cache_dir=/dev/null | num_workers=-1 | num_workers=1000000
train: fit.monitor=nonsense | fit.monitor=val/accuracy | evaluation.metrics=[nonsense] | evaluation.metrics=[]
train: evaluation.recall_at=[0] | evaluation.recall_at=[-1] | evaluation.recall_at=[a] | evaluation.recall_at=[]
train: evaluation.back_end=abacus | evaluation.shortlist=-1 | protocol.num_folds=1 | protocol.num_folds=1000
train: sampler.classes_per_batch=100 | sampler.images_per_class=1000 | sampler.images_per_class=1 | optim.lr=1e300
train: head.out_features=0 | head.out_features=100000000 | optim.lr=0 | optim.lr=-1 | +experiment=no_such | --package
train: --no-such-flag | --config-dir | --config-dir=/nope | --config-name=nope | --cfg | --cfg=nonsense | --resolve | -x
train: --multirun=3 | --info=nonsense
aggregate: metrics=[nonsense] | metrics=7
aggregate: recall_at=[0] | recall_at=x | configs=nothing | configs=[a] | force=3 | fold=1
table: name=../../evil | name=a/b | name=.. | metrics=[nonsense] | compare=x | compare=[a] | compare=[a,b]
table: facts=[nonsense] | facts=3 | configs=nothing | allow_partial=perhaps | "name=''" | name=[x]
report: queries=-1 | queries=x | queries=1.5 | metrics=[nonsense] | configs=nothing
explain: run=nowhere | run=[] | run=[1,2] | run=/ | run=. | images=[1] | pair=1,2 | output=/nope/x.png
evaluate: run=nowhere | embeddings=nowhere.npz | embeddings=. | run=. | run=[] | embeddings=/dev/zero | hardest=-1
evaluate: embeddings=/dev/null | labels=x | gallery=x | hardest=x | output=/nope/x.json
data: nonsense | stats | stats nonsense | verify | verify nonsense | prepare nonsense | stats folder
data: verify folder jobs=0 | verify folder jobs=x | verify folder --jobs 3 | prepare cub200 download=false
data: prepare cub200 archives=nowhere.tar | verify cub200 decode=perhaps | list nonsense=3
data: stats glyphs dataset.table.num_classes=-1 | prepare glyphs
status: --no-such-flag | = | nonsense=3 | state=nonsense
clean: state=nonsense | --no-such-flag | ask=perhaps | configs=[a] | configs=x paths.output_dir= | --yes
nonsense: --help | x=1
"""


def of_lines() -> Iterator[Case]:
    """Command lines that are no command lines."""
    groups = ("dataset", "backbone", "pooling", "head", "loss", "miner", "optim", "schedule", "fit", "protocol")
    for group in (*groups, "transform", "sampler", "regularizer", "evaluation", "logger", "paths", "experiment"):
        for bad in ("no_such_option", "[gap]", "{a:1}", "../../etc/passwd", "gap/", ".", "*", "''"):
            yield Case(f"train {group}={bad}", ("train", *TINY, f"{group}={bad}"))
        if group not in ("miner", "schedule", "regularizer", "logger", "experiment"):
            yield Case(f"train ~{group}", ("train", *TINY, f"~{group}"))
    for line in BAD_LINES.split("\n"):
        name, _, words = line.partition(": ")
        fixed = (*TINY, "fit.max_steps=2") if name == "train" else ()
        for word in words.split(" | ") if name else ():
            yield Case(f"{name} {word}", (name, *fixed, *shlex.split(word)), memory=8 << 30)


# ---- files of runs


def _json(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(path: Path) -> None:
        content = json.loads(path.read_text())
        content.pop("checksum", None)  # which would be all that is looked at
        path.write_text(json.dumps(change(content)))

    return damage


def _with(key: str, value: Any) -> Damage:
    return _json(lambda content: content | {key: value})


def _score(value: Any) -> Damage:
    def change(content: dict[str, Any]) -> dict[str, Any]:
        content["metrics"]["test"]["p_at_1"] = value
        return content

    return _json(change)


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 0x10
    path.write_bytes(data)


def _replaced(make: Callable[[Path], Any]) -> Damage:
    def damage(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)

    return damage


ANY_FILE: dict[str, Damage] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit flipped": _flipped,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "noise": lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)),
    "text": lambda path: path.write_text("nothing of the kind\n"),
    "removed": lambda path: path.unlink(),
    "a folder": _replaced(lambda path: path.mkdir()),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a link to nothing": _replaced(lambda path: path.symlink_to("nowhere")),
    "a pipe": _replaced(os.mkfifo),
}
JSON_FILE: dict[str, Damage] = {
    "[]": lambda path: path.write_text("[]"),
    "[1]": lambda path: path.write_text("[1]"),
    '{"schema": 1}': lambda path: path.write_text('{"schema": 1}'),
    "null": lambda path: path.write_text("null"),
    "deeply nested": lambda path: path.write_text("[" * 100_000),
    "schema 99": _with("schema", 99),
}
RESULT_FILE: dict[str, Damage] = {
    "score NaN": lambda path: path.write_text(re.sub(r'("p_at_1": )[\d.e-]+', r"\1NaN", path.read_text())),
    "score 1e999": lambda path: path.write_text(re.sub(r'("p_at_1": )[\d.e-]+', r"\g<1>1e999", path.read_text())),
    "score text": _score("high"),
    "score null": _score(None),
    "score 7.5": _score(7.5),
    "metrics list": _with("metrics", [1]),
    "seed": _with("seed", 1),
    "fold": _with("fold", 3),
    "repeat text": _with("repeat", "x"),
    "fold null": _with("fold", None),
    "protocol number": _with("protocol", 3),
    "hash": _with("embeddings_sha256", "0" * 64),
    "choices list": _with("choices", [1]),
    "wall_s text": _with("wall_s", "long"),
    "num_folds 0": _with("num_folds", 0),
    "n_query text": _with("n_query", "many"),
}  # fmt: skip


def _from_other_fold(path: Path) -> None:
    other = path.parent.with_name("fold1_rep0") / path.name
    shutil.copyfile(other, path)


_READERS: dict[str, Command] = {
    "aggregate": ("aggregate", "allow_partial=true"),
    "aggregate more": ("aggregate", "allow_partial=true", "metrics=[p_at_1,map_at_r,ndcg_at_k]"),
    "table": ("table", "allow_partial=true"),
    "report": ("report", "allow_partial=true", "queries=1"),
    "compare": ("table", "compare=[*/*/*gap-*,*/*/*gmp-*]"),
    "status": ("status",),
    "evaluate": ("evaluate", "run=RUN"),
    "evaluate again": ("evaluate", "run=RUN", "from_checkpoint=true", "device=cpu"),
    "explain": ("explain", "run=RUN", "num_images=1"),
    "train": ("train", *TINY, "fit.max_steps=2", "pooling=gap"),
}


def of_files(run_dir: str) -> Iterator[Case]:
    """Each file of a run and of its config, damaged in many ways, met by each command that may read it."""
    in_run = ("result.json", "config.yaml", "embeddings.safetensors", "best.ckpt", "history.csv", "per_query.csv")
    files = dict.fromkeys(in_run, run_dir) | {
        n: str(Path(run_dir).parent) for n in ("aggregate.json", "collections.csv")
    }
    for name, folder in files.items():
        ways = dict(ANY_FILE)
        if name.endswith(".json"):
            ways |= JSON_FILE
        if name == "result.json":
            ways |= RESULT_FILE
        if name == "history.csv":
            ways["NaN"] = lambda path: path.write_text(re.sub(r"(?m)^(1,.*,).*$", r"\1nan", path.read_text(), count=1))
        if folder == run_dir:
            ways["of another fold"] = _from_other_fold
        for way, damage in ways.items():
            for reader, command in _READERS.items():
                path = f"{folder}/{name}"
                yield Case(
                    f"{name} {way}: {reader}", tuple(word.replace("RUN", run_dir) for word in command),
                    lambda top, path=path, damage=damage: damage(top / path), may_end_well=True,
                )  # fmt: skip


# ---- caches of images and features

CACHED = ("train", *PHOTOGRAPHS, *FEATURES)


def of_caches() -> Iterator[Case]:
    """Caches that a run has filled, damaged in many ways before another run of the same weights reads them."""
    for kind in ("images", "features"):
        for way, damage in ANY_FILE.items():
            yield Case(
                f"{kind} {way}", (*CACHED, "optim.lr=0.01"),
                lambda top, kind=kind, damage=damage: damage(next((top / "cache").glob(f"*.{kind}"))),
                may_end_well=True,
            )  # fmt: skip


# ---- searches, and machines with little memory

SEARCH = ("tune", "search=demo", "trials=2", "name=t", *TINY, "fit.max_steps=2", "fit.validate_every=1")


def _corrupted(draw: random.Random, path: Path) -> None:
    """Random bytes at 1 to 500 places; every fifth file is cut off."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 5, 50, 500))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.2 else content)


def of_searches(database: str) -> Iterator[Case]:
    """The data base of a search with random bytes."""
    for seed in range(40):
        yield Case(
            f"study.db, seed {seed}", SEARCH,
            lambda top, seed=seed: _corrupted(random.Random(seed), top / database), may_end_well=True,
        )  # fmt: skip


def of_memory() -> Iterator[Case]:
    """Commands that get too little memory, or just enough."""
    train: Command = ("train", *TINY, "fit.max_steps=2")
    for command in (
        train,
        (*train, *GSP),
        ("study", "two_moons"),
        ("train", "-m", *TINY, "fit.max_steps=2", "fold=0,1"),
    ):
        for megabytes in (4, 16, 64, 256):  # with less, native libraries crash
            name = f"{command[0]} {command[-1]}, {megabytes} MB"
            yield Case(name, command, may_end_well=True, memory=megabytes << 20)


# ---- embeddings from anywhere


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.system, ("touch executed",))


def of_embeddings() -> Iterator[Case]:
    """Files of embeddings that are none."""
    draw = np.random.default_rng(0)
    rows, labels = draw.standard_normal((40, 8)).astype(np.float32), np.repeat(np.arange(10), 4)

    def arrays(name: str, **given: Any) -> tuple[str, Damage]:
        return name, lambda top: np.savez(top / "x.npz", **given)

    bad = rows.copy()
    made = [
        arrays("no labels", rows=rows),
        arrays("labels short", rows=rows, labels=labels[:-1]),
        arrays("labels of text", rows=rows, labels=np.array(["a"] * 40)),
        arrays("labels with fractions", rows=rows, labels=labels + 0.5),
        arrays("labels in two dimensions", rows=rows, labels=np.stack([labels, labels], 1)),
        arrays("labels all different", rows=rows, labels=np.arange(40)),
        arrays("ids short", rows=rows, labels=labels, ids=np.arange(3)),
        arrays("ids twice", rows=rows, labels=labels, ids=np.zeros(40, np.int64)),
        arrays("rows in one dimension", rows=rows[0], labels=labels[:8]),
        arrays("rows in three dimensions", rows=rows[None], labels=labels[:1]),
        arrays("no rows", rows=rows[:0], labels=labels[:0]),
        arrays("no columns", rows=rows[:, :0], labels=labels),
        arrays("one row", rows=rows[:1], labels=labels[:1]),
        arrays("NaN", rows=np.where(rows == bad.max(), np.nan, rows), labels=labels),
        arrays("infinity", rows=np.where(rows == bad.max(), np.inf, rows), labels=labels),
        arrays("complex", rows=rows.astype(np.complex64), labels=labels),
        arrays("text", rows=rows.astype(str), labels=labels),
        arrays("objects", rows=np.array([_Evil()] * 40, dtype=object), labels=labels),
        arrays("other names", a=rows, b=labels),
    ]
    for name, damage in made:
        yield Case(f"npz: {name}", ("evaluate", "embeddings=x.npz"), damage)
    for suffix in ("npz", "npy", "safetensors", "pt"):
        for way, make in ANY_FILE.items():
            if way in ("half", "one bit flipped", "zeros", "removed", "empty"):
                continue

            def damage(top: Path, suffix: str = suffix, make: Damage = make) -> None:
                (top / f"x.{suffix}").write_bytes(b"x" * 100)
                make(top / f"x.{suffix}")

            yield Case(f"{suffix}: {way}", ("evaluate", f"embeddings=x.{suffix}"), damage)

        def cut(top: Path, suffix: str = suffix) -> None:
            import safetensors.numpy
            import torch

            given, path = {"rows": rows, "labels": labels}, top / f"x.{suffix}"
            if suffix == "npz":
                np.savez(path, **given)
            elif suffix == "npy":
                np.save(path, rows)
            elif suffix == "pt":
                torch.save({k: torch.from_numpy(v) for k, v in given.items()}, path)
            else:
                safetensors.numpy.save_file(given, path)
            path.write_bytes(path.read_bytes()[:-200])

        yield Case(f"{suffix}: cut off", ("evaluate", f"embeddings=x.{suffix}", "labels=x.npy"), cut)

    def evil(top: Path) -> None:
        (top / "x.pt").write_bytes(pickle.dumps(_Evil()))

    yield Case("pt: a pickle that runs a command", ("evaluate", "embeddings=x.pt"), evil)
    yield Case("other suffix", ("evaluate", "embeddings=x.csv"), lambda top: (top / "x.csv").write_text("1,2\n"))


# ---- files of the user and of strangers

_BOMB = "a0: &a0 [1, 1]\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
YAML_FILE = {
    "5": b"5",
    "[1]": b"[1]",
    "text": b"nothing of the kind",
    "not UTF-8": b"\xff\xfe",
    "zero byte": b"\x00",
    "open quote": b"a: 'x",
    "deep": b"[" * 100_000,
    "deep list": b"- " * 5000,
    "alias bomb": _BOMB.encode(),
    "alias of itself": b"a: &a [*a]",
    "a tag": b"!!python/object/apply:os.system ['touch executed']",
}
RECIPE_FILE = """
extends: mine | extends: 5 | extends: no_such | defaults: 5 | defaults: [5] | defaults: [{override /optim: 5}]
covers: 5 | covers: [5] | covers: [{loss: 5}] | settings: 5 | settings: [5] | settings: [{set: 5, source: x}]
settings: [{set: {loss.margin: 1}}] | settings: [{when: 5, set: {}, source: x}] | paper: [1] | rows: []
settings: [{choose: {miner: 5}, source: x}] | settings: [{choose: [miner], source: x}] | deviations: [{text: 5}]
settings: [{set: {fit: 3, fit.max_steps: 4}, source: x}] | settings: [{set: {optim.lr: 1, optim.lr: 2}, source: x}]
"""
REPRODUCE_PART = """
5 | [1] | {rows: 5} | {rows: [a]} | {rows: {a: 5}} | {rows: {a: {override: x}}} | {rows: {a: x, a: y}}
{settings: 5} | {datasets: [1]} | {metrics: 5} | {metrics: {a: 5}} | {needs: [1]} | {commands: train} | {commands: [5]}
{hours_per_run: 5} | {hours_per_run: {cub200: long}} | {also: 5} | {also: [5]} | {row: {}}
"""
_SPLITS = '{"format": "dmlbench oodml splits 1", "dataset": "glyphs", "measured_by": "x", "splits": []'
SPLIT_FILE = {
    "empty": b"{}",
    "a list": b"[]",
    "another format": b'{"format": "another"}',
    "a key twice": b'{"a": 1, "a": 2}',
    "deep": b'{"a": ' + b"[" * 100_000,
    "no checksum": f"{_SPLITS}}}".encode(),
    "a wrong checksum": f'{_SPLITS}, "checksum": "0"}}'.encode(),
    "pickle of tuples": b"\x80\x04)" + b"\x85" * 300_000 + b".",
    "pickle of lists": b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "pickle of shared lists": b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(40)) + b".",
    "pickle of none": b"N.",
    "pickle of numbers": pickle.dumps({1: 2, "a": [3]}),
    "pickle without a distance": pickle.dumps({1: {}}),
    "pickle with NaN": pickle.dumps({1: {"train": ["a"], "test": ["b"], "fid": float("nan")}}),
}
PATTERNS = ("f{fold:s}r{repeat}.npz", "{fold}{repeat:>100000000}.npz", "{fold}{seed}.npz", "{0}.npz", "{fold", "x.npz")
TUNE = ("pruner=5", "pruner=[1]", "runs=5", "runs=[5]", "space=5", "space={optim.lr: 5}", "trials=many")


def _written(name: str, content: str | bytes) -> Damage:
    def damage(top: Path) -> None:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def _texts(table: str) -> list[str]:
    return [text for line in table.strip().split("\n") for text in line.split(" | ")]


def of_external() -> Iterator[Case]:
    """Recipes, experiments, options and splits that others wrote, patterns of files, and numbers out of all bounds."""
    train: Command = ("train", "--config-dir", "mine", *TINY, "fit.max_steps=2")
    for group, asked in (("recipe", "recipe=mine"), ("experiment", "+experiment=mine"), ("pooling", "pooling=mine")):
        for way, content in YAML_FILE.items():
            yield Case(f"{group} {way}", (*train, asked), _written(f"mine/{group}/mine.yaml", content))
    yield Case("pooling no component", (*train, "pooling=mine"), _written("mine/pooling/mine.yaml", "power: 3"))
    for text in _texts(RECIPE_FILE):
        yield Case(f"recipe {text}", (*train, "recipe=mine"), _written("mine/recipe/mine.yaml", text))
    experiment = "mine/experiment/mine.yaml"
    yield Case(
        "experiment of itself", (*train, "+experiment=mine"), _written(experiment, "defaults: [/experiment: mine]")
    )
    reproduce: Command = ("reproduce", "mine", "--config-dir", "mine", "run_missing=false")
    for part in _texts(REPRODUCE_PART):
        yield Case(f"reproduce {part}", reproduce, _written(experiment, f"reproduce: {part}"))
    oodml: Command = ("train", *TINY, "fit.max_steps=2", "protocol=oodml", "protocol.splits=splits.file")
    for way, content in SPLIT_FILE.items():
        yield Case(f"splits {way}", oodml, _written("splits.file", content))
    taken: Command = ("import", "name=theirs", "dataset=glyphs")
    for pattern in PATTERNS:
        yield Case(f"import {pattern}", (*taken, f"embeddings='{pattern}'"), _written("x.npz", b"no embeddings"))
    for many in ("protocol.num_folds=10000000", "protocol.num_repeats=10000000"):
        yield Case(f"import {many}", (*taken, "embeddings='{fold}{repeat}.npz'", many))
    for override in TUNE:
        yield Case(f"tune {override}", ("tune", "name=t", override))


# ---- data


def of_data() -> Iterator[Case]:
    """Folders of images, lists and archives that are damaged."""
    first = "data/folder/class15/0.png"  # of the half that is tested, so that every command reads it
    ways = {way: damage for way, damage in ANY_FILE.items() if way != "removed"}
    commands: dict[str, Command] = {
        "stats": ("data", "stats", "folder"), "verify": ("data", "verify", "folder"), "train": ("train", *PHOTOGRAPHS)
    }  # fmt: skip
    for reader, command in commands.items():
        for way, damage in ways.items():
            if reader == "stats" and way not in ("a link to itself", "a link to nothing", "a pipe"):
                continue  # it counts files, and says so; it opens no image
            yield Case(
                f"image {way}: {reader}", command,
                lambda top, damage=damage: damage(top / first), photographs,
            )  # fmt: skip
        for way, change in {
            "a class without images": lambda top: [p.unlink() for p in (top / "data/folder/class00").iterdir()],
            "one class only": lambda top: [shutil.rmtree(p) for p in sorted((top / "data/folder").iterdir())[1:]],
            "no classes": lambda top: [shutil.rmtree(p) for p in (top / "data/folder").iterdir()],
            "a pipe in a class": lambda top: os.mkfifo(top / "data/folder/class00/x.png"),
            "a loop of folders": lambda top: (top / "data/folder/class00/loop").symlink_to(".."),
            "a link to itself": lambda top: (top / "data/folder/loop").symlink_to("loop"),
            "a name that is not UTF-8": lambda top: os.mkdir(os.fsencode(top / "data/folder") + b"/\xff"),
            "32-bit pixels": lambda top: Image.new("I", (44, 40), 70_000).save(top / first, "TIFF"),
            "a file instead of the folder": lambda top: _replaced(lambda p: p.write_text("x"))(top / "data/folder"),
        }.items():
            if reader == "stats" and way == "32-bit pixels":
                continue
            yield Case(
                f"{way}: {reader}", command, change, photographs,
                may_end_well=way == "a link to itself",
            )  # fmt: skip
    archive = "data/CUB_200_2011_subset.tar"
    prepare: Command = (
        "data", "prepare", "cub200", f"archives={archive}", "accept_other_checksum=true",
        "dataset.table.check_counts=false",
    )  # fmt: skip
    for way, damage in ways.items():
        if way != "one bit flipped":  # of an uncompressed archive whose checksum is accepted whatever it is
            yield Case(
                f"archive {way}: prepare",
                prepare,
                lambda top, damage=damage: damage(top / archive),
                birds,
            )
    for way, member in {
        "path above": "../evil.txt", "absolute path": "/tmp/evil.txt", "no layout": "CUB_200_2011/readme.txt"
    }.items():  # fmt: skip

        def foreign(top: Path, member: str = member) -> None:
            (top / "data").mkdir()
            with tarfile.open(top / archive, "w") as file:
                info = tarfile.TarInfo(member)
                info.size = 1
                file.addfile(info, io.BytesIO(b"x"))

        yield Case(f"archive with {way}: prepare", prepare, foreign)
    for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):

        def special(top: Path, kind: bytes = kind) -> None:
            birds(top)
            with tarfile.open(top / archive, "a") as file:
                info = tarfile.TarInfo("CUB_200_2011/special")
                info.type, info.linkname = kind, "/etc/passwd"
                file.addfile(info)

        yield Case(f"archive with a member of type {kind.decode()}: prepare", prepare, special)


# ---- the campaign


class Folder:
    """Where commands run, put back to ``template`` before each."""

    def __init__(self, home: Path, template: Path) -> None:
        self.work, self.template, self.log = home / "work", template, home / "log.txt"
        self._sound: dict[Command, tuple[str, dict[str, Any]]] = {}

    def reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work, symlinks=True)

    def run(self, command: Command, memory: int | None = None) -> Ended:
        environment = {"DMLBENCH_CACHE": "cache", "DMLBENCH_DATA": "data", "DMLBENCH_OUTPUT": "outputs"}
        return run(command, self.work, self.log, environment=environment, limit_s=_LIMIT_S, memory=memory)

    def sound(self, case: Case) -> tuple[str, dict[str, Any]]:
        """What the command prints and leaves where nothing is damaged."""
        if case.command not in self._sound:
            self.reset()
            case.make(self.work)
            ended = self.run(case.command)
            self._sound[case.command] = (_printed(ended.text), contents(self.work))
        return self._sound[case.command]

    def outcome(self, case: Case) -> tuple[str, str]:
        """One of ``OUTCOMES``, and the last line that was printed."""
        sound = self.sound(case) if case.may_end_well else None
        self.reset()
        case.make(self.work)
        case.damage(self.work)
        ended = self.run(case.command, case.memory)
        last = (ended.text.strip().splitlines() or [""])[-1][:200]
        if (self.work / "executed").exists():
            return "silent", "code of the file was executed"
        if ended.code is None:
            return "hang", last
        if "Traceback (most recent call last)" in ended.text or ended.code < 0:
            return "traceback", f"exit code {ended.code}: {last}"
        if ended.code != 0:
            return ("clear" if "error" in ended.text or "damaged" in ended.text or last else "silent"), last
        if sound is not None and _is_as(sound, ended, self.work):
            return "harmless", last
        lines = _printed(ended.text).split("\n")
        new = lines if sound is None else [line for line in lines if line not in sound[0].split("\n")]
        if any(word in line for line in new for word in (_OF_DATA if sound is None else _WARNINGS)):
            return "said", last
        return "silent", last


def _is_as(sound: tuple[str, dict[str, Any]], ended: Ended, folder: Path) -> bool:
    """Whether a command printed and wrote the same as with sound files; those that it only reads may stay damaged."""
    if _printed(ended.text) != sound[0]:
        return False
    try:
        now = contents(folder)
    except Exception:  # a damaged file that still lies there
        return True
    written = [name for name in differences(sound[1], now) if name.startswith(("outputs/tables", "scores"))]
    return not written


def _printed(text: str) -> str:
    """Without what differs from run to run: times, the hash of files' times in a cache's name, bars, blank lines."""
    text = re.sub(r"[a-z]+: +\d+%\|[^\r\n]*\]", "", text)
    text = "\n".join(line.rstrip() for line in re.split("[\r\n]+", text) if line.strip())
    return re.sub(r"\d+(\.\d+)? ?(ms|s|min|h)\b|\d\d:\d\d(:\d\d(,\d+)?)?|[0-9a-f]{12}(?=\.images)", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = ("lines", "values", "files", "caches", "searches", "memory", "embeddings", "external", "data")
    parser.add_argument("--only", nargs="+", choices=groups, default=groups)
    parser.add_argument("--share", type=float, default=1.0, help="of the inputs of each group, drawn at random")
    parser.add_argument("--output", type=Path, help="a Markdown file for the outcome")
    options = parser.parse_args()
    import_libraries()
    tallies: dict[str, Tally] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="inputs-") as name:
        home = Path(name)
        empty, runs, cached, searched = (home / template for template in ("empty", "runs", "cached", "searched"))
        for template in (empty, runs, cached, searched):
            template.mkdir()
        maker = Folder(home, empty)
        run_dir = ""
        if "files" in options.only:
            maker.reset()
            for command in (
                ("train", "-m", *TINY, "fit.max_steps=2", "pooling=gap,gmp", "fold=0,1,2,3"),
                ("aggregate", "allow_partial=true"),
            ):
                ended = maker.run(command)
                assert ended.code == 0, ended.text
            shutil.copytree(maker.work, runs, dirs_exist_ok=True)
            found = next(path for path in sorted(runs.glob("outputs/*/*/*gap-*/fold0_rep0")))
            run_dir = str(found.relative_to(runs))
        if "caches" in options.only:
            maker.reset()
            photographs(maker.work)
            ended = maker.run(CACHED)
            assert ended.code == 0, ended.text
            shutil.copytree(maker.work, cached, dirs_exist_ok=True)
        database = ""
        if "searches" in options.only:
            maker.reset()
            ended = maker.run(SEARCH)
            assert ended.code == 0, ended.text
            shutil.copytree(maker.work, searched, dirs_exist_ok=True)
            database = str(next(searched.rglob("study.db")).relative_to(searched))
        made = {"lines": of_lines, "values": of_values, "files": lambda: of_files(run_dir), "caches": of_caches}
        made |= {"searches": lambda: of_searches(database), "memory": of_memory}
        made |= {"embeddings": of_embeddings, "external": of_external, "data": of_data}
        for group in options.only:
            folder = Folder(home, {"files": runs, "caches": cached, "searches": searched}.get(group, empty))
            tally = tallies[group] = Tally()
            cases = [case for case in made[group]() if random.Random(case.name).random() < options.share]
            for case in tqdm(cases, desc=group):
                outcome, last = folder.outcome(case)
                tally.counts[outcome] += 1
                if outcome in DEFECTS:
                    tally.defects.append(f"{outcome}: {case.name}: {last}")
                    tqdm.write(f"{group}: {tally.defects[-1]}")
    text = report(tallies) + f"\n{(time.monotonic() - started) / 60:.0f} minutes.\n"
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    sys.exit(any(tally.defects for tally in tallies.values()))


def report(tallies: dict[str, Tally]) -> str:
    """The outcome as Markdown."""
    lines = [f"| inputs | {' | '.join(OUTCOMES)} | all |", f"|---|{'---|' * len(OUTCOMES)}---|"]
    for name, tally in {**tallies, "all": Tally(sum((t.counts for t in tallies.values()), Counter()))}.items():
        lines.append(f"| {name} | {' | '.join(str(tally.counts[o]) for o in OUTCOMES)} | {tally.counts.total()} |")
    defects = [f"- {name}: {text}" for name, tally in tallies.items() for text in tally.defects]
    return "\n".join([*lines, "", *defects, ""])


if __name__ == "__main__":
    main()
