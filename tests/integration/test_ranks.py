"""One run over two processes of torchrun: weights of one process, bits of its scores, and kills."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.results import store

TESTS = Path(__file__).parent.parent
RUN = (
    *("train", "experiment=demo", "hydra.mode=RUN", "pooling=gap", "fold=0", "repeat=0", "backbone.batch_norm=all"),
    *("fit.max_steps=60", "fit.validate_every=30", "fit.checkpoint_every=7", "dataset.table.images_per_class=12"),
)


def torchrun(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *arguments]
    return subprocess.Popen(command, cwd=TESTS, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


def trained(output_dir: Path, *more: str) -> tuple[int, str]:
    """Exit code and messages of the run on two processes."""
    with torchrun("-m", "dmlbench", *RUN, *more, f"paths.output_dir={output_dir}") as process:
        messages = process.communicate(timeout=600)[1]
    return process.returncode, messages


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one_where_nothing_is_trained(tmp_path: Path) -> None:
    untrained = ("fit=untrained", "eval_batch_size=32", "fit.max_steps=0")
    command = [sys.executable, "-m", "dmlbench", *RUN, *untrained, f"paths.output_dir={tmp_path / 'one'}"]
    subprocess.run(command, check=True)
    assert trained(tmp_path / "two", *untrained)[0] == 0
    runs = [next((tmp_path / name).glob("*/*/*/*")) for name in ("one", "two")]
    one, two = (load_embeddings(run / store.EMBEDDINGS).queries for run in runs)
    assert torch.equal(one.rows, two.rows)
    assert torch.equal(one.ids, two.ids)
    assert store.read_result(runs[0])["metrics"] == store.read_result(runs[1])["metrics"]


@pytest.mark.slow
def test_two_processes_give_the_weights_of_one_in_float64(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run([sys.executable, "ranks_worker.py", one], cwd=TESTS, check=True)
    with torchrun("ranks_worker.py", str(two)) as process:
        assert process.wait(timeout=1200) == 0, process.communicate()[1]
    methods = sorted(path.name for path in one.iterdir())
    assert len(methods) == 6
    for method in methods:
        expected = torch.load(one / method / "weights_0.pt")
        for rank in (0, 1):
            found = torch.load(two / method / f"weights_{rank}.pt")
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                scale = float(value.double().abs().max()) if value.numel() else 1.0
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6 * scale, msg=f"{method} {name}")


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_and_the_run_resumes_exactly(tmp_path: Path) -> None:
    assert trained(tmp_path / "whole")[0] == 0
    (whole,) = (tmp_path / "whole").glob("*/*/*/*")
    draws = random.Random(1)
    for kill in range(3):
        after, rank = draws.uniform(0, 6), draws.randint(0, 1)
        folder = tmp_path / f"killed_{kill}"
        with torchrun("-m", "dmlbench", *RUN, f"paths.output_dir={folder}") as process:
            _train_for(after, folder, process)
            os.kill(_pid_of_rank(process.pid, rank), signal.SIGKILL)
            messages = process.communicate(timeout=60)[1]
        assert process.returncode != 0
        ours = [line for line in messages.splitlines() if line.startswith("dmlbench: error: ")]
        assert len(ours) == 1
        assert ours[0].endswith("says why. Start the same torchrun command again to resume.")
        (run_dir,) = folder.glob("*/*/*/*")
        assert not store.is_locked(run_dir)
        assert trained(folder)[0] == 0
        results = [store.read_result(path) for path in (whole, run_dir)]
        assert results[0]["embeddings_sha256"] == results[1]["embeddings_sha256"]
        assert results[0]["history_sha256"] == results[1]["history_sha256"]


def _pid_of_rank(torchrun_pid: int, rank: int) -> int:
    children = Path(f"/proc/{torchrun_pid}/task/{torchrun_pid}/children").read_text().split()
    (found,) = [pid for pid in children if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()]
    return int(found)


def _train_for(seconds: float, folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the run has begun, and so long."""
    while process.poll() is None and not any(folder.glob("*/*/*/*/config.yaml")):
        time.sleep(0.05)
    time.sleep(seconds)
    assert process.poll() is None, process.communicate()[1]


@pytest.mark.slow
def test_sigterm_saves_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    once = ("fit.checkpoint_every=null", "fit.validate_every=60")  # no other checkpoint before the end
    assert trained(tmp_path / "whole", *once)[0] == 0
    folder = tmp_path / "stopped"
    with torchrun("-m", "dmlbench", *RUN, *once, f"paths.output_dir={folder}") as process:
        _train_for(3, folder, process)
        os.kill(process.pid, signal.SIGTERM)
        messages = process.communicate(timeout=60)[1]
    (run_dir,) = folder.glob("*/*/*/*")
    assert (run_dir / "last.ckpt").exists()
    assert not (run_dir / store.RESULT).exists()
    assert "Another process" not in messages
    assert trained(folder, *once)[0] == 0
    (whole,) = (tmp_path / "whole").glob("*/*/*/*")
    results = [store.read_result(path) for path in (whole, run_dir)]
    assert results[0]["embeddings_sha256"] == results[1]["embeddings_sha256"]
