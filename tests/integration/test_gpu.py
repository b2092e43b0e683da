"""What must be the same on a GPU as on a CPU; skipped where torch sees no CUDA device."""

import subprocess
import sys

import pytest
import torch

from dmlbench import build
from dmlbench.config import compose
from dmlbench.evaluation.collections.concatenated import concatenated_scores
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.results.store import read_result
from dmlbench.runner import run
from dmlbench.runtime import set_strict_float32
from dmlbench.types import EmbeddingSet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]


def test_scores_of_embeddings_on_the_gpu_are_those_on_the_cpu_bit_by_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3000) % 60
    rows = torch.randn(60, 128, generator=generator)[labels] + 1.5 * torch.randn(3000, 128, generator=generator)
    rows[1500:1600] = rows[:100]  # exact duplicates: ties by index
    on_cpu = evaluate(EmbeddingSet(rows, labels, torch.arange(3000)))
    on_gpu = evaluate(EmbeddingSet(rows.cuda(), labels.cuda(), torch.arange(3000).cuda()))
    assert on_cpu.scores == on_gpu.scores


def test_collections_on_the_gpu_are_those_on_the_cpu_bit_by_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    labels, ids = torch.arange(900) % 30, torch.arange(900)
    centers = torch.randn(30, 64, generator=generator)[labels]
    members = [
        [EmbeddingSet(centers + 1.5 * torch.randn(900, 64, generator=generator), labels, ids) for _ in range(2)]
        for _ in range(3)
    ]
    found = [concatenated_scores(members, spec=EvaluationSpec(device=device), own=True) for device in ("cpu", "cuda")]
    (on_cpu, own), (on_gpu, own_there) = found
    assert {choice: x.scores for choice, x in on_cpu.items()} == {choice: x.scores for choice, x in on_gpu.items()}
    assert [x.scores for fold in own for x in fold] == [x.scores for fold in own_there for x in fold]


@pytest.mark.parametrize("rerank", [None, 200])
def test_scores_by_a_distance_on_the_gpu_are_those_on_the_cpu_bit_by_bit(rerank: int | None) -> None:
    torch.manual_seed(2)
    distance = AvslDistance(3, 32, top_k=8)
    distance.observe([(torch.rand(4, 32, 9), torch.rand(4, 32, 9)) for _ in range(2)])
    labels = torch.arange(900) % 30
    embeddings = torch.randn(30, 3, 32)[labels] + 1.5 * torch.randn(900, 3, 32)
    rows = distance.pack(torch.nn.functional.normalize(embeddings, dim=2), torch.rand(900, 3, 32))
    rows[450:500] = rows[:50]  # exact duplicates: ties by index
    spec = EvaluationSpec(shortlist=rerank)
    on_cpu = evaluate(EmbeddingSet(rows, labels, torch.arange(900)), spec=spec, distance=distance)
    distance.cuda()
    for where in ("cpu", "cuda"):  # a run embeds to the CPU
        queries = EmbeddingSet(rows.to(where), labels.to(where), torch.arange(900).to(where))
        assert evaluate(queries, spec=spec, distance=distance).scores == on_cpu.scores


@pytest.mark.parametrize("pooling", ["gap", "gmp", "gem", "k_max", "gsp"])
def test_model_on_the_gpu_gives_the_embeddings_of_the_cpu(pooling: str) -> None:
    set_strict_float32()
    torch.manual_seed(0)
    model = build.build_model(compose("train", [f"pooling={pooling}"])).eval()
    images = torch.randint(0, 256, (8, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(images).embedding
        found = model.cuda()(images.cuda()).embedding.cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(tmp_path) -> None:
    overrides = [
        *("experiment=demo", "hydra.mode=RUN", "pooling=gap", "fold=0", "repeat=0", "backbone.batch_norm=all"),
        *("fit.max_steps=40", "device=cuda"),
    ]
    scores = []
    for number in (1, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={number}"]
        output_dir = tmp_path / str(number)
        command = [*launcher, "-m", "dmlbench", "train", *overrides, f"paths.output_dir={output_dir}"]
        subprocess.run(command, check=True)
        (result,) = output_dir.rglob("result.json")
        scores.append(read_result(result.parent)["metrics"]["test"]["map_at_r"])
    assert abs(scores[0] - scores[1]) < 0.002


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_run_on_the_gpu_starts_prototypes_and_learns(tmp_path, precision: str) -> None:
    overrides = [
        *("device=cuda", f"fit.precision={precision}", "fit.channels_last=true", "loss=contrastive", "optim.lr=3e-3"),
        *(f"paths.output_dir={tmp_path / 'out'}", f"paths.cache_dir={tmp_path / 'cache'}", "pooling=gsp_small"),
        *("dataset.table.num_classes=60", "dataset.table.images_per_class=40", "fit.keep=both"),
    ]
    cfg = compose("train", overrides)
    run_dir = run(cfg)
    assert bool(torch.load(run_dir / "last.ckpt", weights_only=True)["model"]["pooling.prototypes_started"])
    assert read_result(run_dir)["metrics"]["test"]["p_at_1"] > 0.06  # chance is 0.03
