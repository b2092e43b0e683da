"""What a GPU shows within 9 minutes; see gpu_check.sh. Each part is a process of its own with a limit of seconds: what
fails, or needs a library that is missing, is said in the table, and the next part begins.

python scripts/gpu_check.py [--tiny] [--parts tests scores steps evaluation collections avsl pml]
    [--out outputs/gpu_check.md]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dmlbench.types import EmbeddingSet

HERE = Path(__file__).resolve().parent
CUDA = torch.cuda.is_available()
Row = tuple[str, str, str]  # what, found, compared with
WORSE_BY = {"untrained": 0.002, "trained": 0.05}  # how far scores of two devices may be apart, as fractions


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def on_device(embedding: "EmbeddingSet") -> "EmbeddingSet":
    return type(embedding)(*(x.cuda() if CUDA else x for x in (embedding.rows, embedding.labels, embedding.ids)))


def seconds(action: Callable[[], object], rounds: int = 2) -> float:
    """The least of some rounds behind one that is not counted."""
    action()
    least = float("inf")
    for _ in range(rounds):
        wait()
        started = time.perf_counter()
        action()
        wait()
        least = min(least, time.perf_counter() - started)
    return least


def tests(tiny: bool) -> list[Row]:
    """The tests that are marked gpu."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/integration/test_gpu.py", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    verdict = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    return [("tests marked gpu", verdict, "" if CUDA else "there is no CUDA device"), *((x, "", "") for x in lines)]


def scores(tiny: bool) -> list[Row]:
    """One run on the CPU and on the GPU, without training and with."""
    rows = []
    for name, steps in (("untrained", 0), ("trained", 4 if tiny else 60)):
        found = {}
        for device in ("cpu", "cuda") if CUDA else ("cpu",):
            with tempfile.TemporaryDirectory() as folder:
                fit = ["fit=untrained"] if steps == 0 else []
                small = [f"fit.max_steps={steps}", "dataset.table.num_classes=60", "dataset.table.images_per_class=20"]
                places = [f"paths.output_dir={folder}", f"paths.cache_dir={folder}/cache", f"device={device}"]
                command = ["train", "loss=contrastive", "pooling=gap", "optim.lr=3e-3", "num_workers=0"]
                run = [sys.executable, "-m", "dmlbench.cli.main", *command, *fit, *small, *places]
                done = subprocess.run(run, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"the run on {device} failed: {done.stderr.strip().splitlines()[-1]}")
                (result,) = Path(folder).rglob("result.json")
                found[device] = json.loads(result.read_text())["metrics"]["test"]
        shown = ", ".join(
            f"{device} {100 * v['p_at_1']:.2f} / {100 * v['map_at_r']:.2f}" for device, v in found.items()
        )
        if CUDA:
            apart = max(abs(found["cpu"][key] - found["cuda"][key]) for key in ("p_at_1", "map_at_r"))
            verdict = "as expected" if apart <= WORSE_BY[name] else "FURTHER APART THAN EXPECTED"
            beside = f"{100 * apart:.2f} apart, at most {100 * WORSE_BY[name]:.1f}: {verdict}"
        else:
            beside = "there is no CUDA device to compare with"
        rows.append((f"P@1 / MAP@R in percent, {name}", shown, beside))
    return rows


def steps(tiny: bool) -> list[Row]:
    """Images a second and shares of a step, of GAP and GSP."""
    from bench_data import synthetic_photographs
    from profile_run import STEP, profile

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root, side = Path(folder), 64 if tiny else 224
        synthetic_photographs(root / "photographs", 32 if tiny else 192)
        photographs = [
            "dataset=folder", f"dataset.table.root={root / 'photographs'}", "protocol=conventional", "transform=mlrc",
            "sampler.classes_per_batch=4", f"sampler.images_per_class={2 if tiny else 28}",
        ]  # fmt: skip
        letters = ["dataset=glyphs", "dataset.table.num_classes=80", "dataset.table.images_per_class=20"]
        networks = {
            "ResNet20, 64 px": ["backbone=resnet20", *letters],
            f"ResNet50, {side} px": ["backbone=resnet50", "backbone.pretrained=false", *photographs,
                                 f"transform.train.crop={side}", f"transform.eval.crop={side}"],
        }  # fmt: skip
        shared = ["loss=contrastive", f"paths.cache_dir={root / 'cache'}", f"device={'cuda' if CUDA else 'cpu'}"]
        for network, overrides in networks.items():
            times = {}
            for pooling in ("gap", "gsp"):
                small = ["pooling.memory_rows=128"] if pooling == "gsp" else []
                found = profile([*overrides, *shared, f"pooling={pooling}", *small], steps=2 if tiny else 20)
                times[pooling] = sum(found.step.values()) / found.images
                whole = sum(found.step.values())
                shares = ", ".join(f"{part} {found.step[part] / whole:.0%}" for part in STEP)
                rows.append((f"{network}, {pooling.upper()}, batch of {found.images}",
                             f"{found.images_per_second:.0f} images/s", shares))  # fmt: skip
            share = 1 - times["gap"] / times["gsp"]
            rows.append((f"{network}, GSP's share of its step", f"{share:.0%}", "the same step with GAP"))
    return rows


def evaluation(tiny: bool) -> list[Row]:
    """SOP's test set, by itself and beside its product."""
    from bench_evaluation import embedding_sets

    from dmlbench.evaluation.evaluate import evaluate

    held = on_device(*embedding_sets("sop", 512, scale=0.02 if tiny else 1.0))
    ours = seconds(lambda: evaluate(held), rounds=1)
    floor = seconds(lambda: [held.rows[i : i + 2048] @ held.rows.T for i in range(0, len(held.rows), 2048)], rounds=1)
    (embedding,) = embedding_sets("cub", 128, scale=0.1 if tiny else 1.0)
    verdict = "the same" if evaluate(on_device(embedding)).scores == evaluate(embedding).scores else "DIFFERENT"
    return [
        (f"evaluation of {len(held.rows):,} x 512", f"{ours:.2f} s", f"{floor:.2f} s its product alone"),
        ("scores of CUB's size on both devices", verdict, "every digit"),
    ]


def pml(tiny: bool) -> list[Row]:
    """SOP's test set by PML, which needs faiss, beside ours."""
    from bench_evaluation import embedding_sets, pml_call

    from dmlbench.evaluation.evaluate import evaluate

    held = on_device(*embedding_sets("sop", 512, scale=0.02 if tiny else 1.0))
    ours, theirs = seconds(lambda: evaluate(held), rounds=1), seconds(pml_call([held]), rounds=1)
    return [(f"PML, {len(held.rows):,} x 512", f"{theirs:.2f} s", f"{theirs / ours:.1f} times ours")]


def collections(tiny: bool) -> list[Row]:
    """The 81 collections of 1,000 of SOP's queries, or a small part of them, beside 12 products."""
    from bench_evaluation import runs_of

    from dmlbench.results.collections import collections as score

    queries, galleries = (
        [list(map(on_device, fold)) for fold in runs] for runs in runs_of("sop_sample", 0.1 if tiny else 1.0)
    )
    ours = seconds(lambda: score(queries, galleries), rounds=1)
    floor = seconds(
        lambda: [q.rows @ g.rows.T for a, b in zip(queries, galleries, strict=True) for q, g in zip(a, b, strict=True)]
    )
    size = f"{len(queries[0][0].rows):,} queries, {len(galleries[0][0].rows):,} x 128"
    return [(f"81 collections of {size}", f"{ours:.2f} s", f"{floor:.2f} s their 12 products alone")]


def avsl(tiny: bool) -> list[Row]:
    """All pairs of CUB's test set by AVSL's distance, exactly ranked, beside its products."""
    from bench_avsl import make_distance, make_rows

    from dmlbench.evaluation.evaluate import evaluate
    from dmlbench.types import EmbeddingSet

    size, count = (32, 300) if tiny else (512, 5924)
    distance = make_distance(argparse.Namespace(levels=3, size=size))
    rows, labels = make_rows(distance, count)
    distance, rows, labels = (x.cuda() if CUDA else x for x in (distance, rows, labels))
    queries = EmbeddingSet(rows, labels, torch.arange(count, device=rows.device))
    ours = seconds(lambda: evaluate(queries, distance=distance), rounds=1)
    left, right = torch.rand(4096, size, device=rows.device), torch.rand(size, size, device=rows.device)
    floor = seconds(lambda: left @ right) / 4096 * 2 * count * count / 2
    return [(f"AVSL, all pairs of {count:,}, 3 levels of {size}", f"{ours:.2f} s",
             f"{floor:.2f} s the products of half of the pairs alone")]  # fmt: skip


PARTS: dict[str, tuple[Callable[[bool], list[Row]], int]] = {  # and the seconds that each may take
    "tests": (tests, 80), "scores": (scores, 80), "steps": (steps, 120), "evaluation": (evaluation, 60),
    "collections": (collections, 60), "avsl": (avsl, 80), "pml": (pml, 50),
}  # fmt: skip


def machine() -> str:
    name = torch.cuda.get_device_name() if CUDA else "no CUDA device"
    return f"{name}; torch {torch.__version__}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}"


def in_process(part: str, tiny: bool) -> list[Row]:
    """The rows of a part, by a process of its own; one that says what went wrong otherwise."""
    command = [sys.executable, __file__, "--child", part, *(["--tiny"] if tiny else [])]
    limit = PARTS[part][1] * (1 if CUDA else 3)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [(part, "NOT DONE", f"took longer than {limit} s")]
    if done.returncode:
        return [(part, "NOT DONE", (done.stderr.strip() or "no message").splitlines()[-1])]
    return [(what, found, beside) for what, found, beside in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=HERE.parent / "outputs" / "gpu_check.md")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if options.child:
        print(json.dumps(PARTS[options.child][0](options.tiny)))
        return
    lines = [f"# GPU check{' (tiny)' if options.tiny else ''}", f"{machine()}\n", "| what | found | compared with |"]
    lines.append("|---|---|---|")
    print("\n".join(lines), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        for row in in_process(part, options.tiny):
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
