"""Studies of a pooling's values and of poolings without training, in miniature."""

from pathlib import Path

import numpy as np
import pytest
import torch
from composed import arguments
from small_data_sets import write_cub200
from torch import nn

from dmlbench.apps.pictures import plt
from dmlbench.config import compose
from dmlbench.identity import read_table
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.global_pooling import Gap, Gmp
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.results.store import find_runs, read_result
from dmlbench.runner import run
from dmlbench.runtime import read_json, seed_everything
from dmlbench.studies import gsp_values, object_size, untrained_poolings
from dmlbench.studies.record import conduct_study
from dmlbench.types import DataError

TINY = ["dataset.table.num_classes=16", "dataset.table.images_per_class=4", "dataset.table.image_size=24",
        "transform.train.padding=2", "fit.max_steps=2", "head.out_features=8", "sampler.classes_per_batch=4",
        "pooling.memory_rows=32"]  # fmt: skip


def places(tmp_path: Path) -> list[str]:
    return [f"paths.output_dir={tmp_path}", f"paths.cache_dir={tmp_path}/cache", "device=cpu"]


@pytest.mark.slow
def test_gsp_over_mu_in_miniature(tmp_path: Path) -> None:
    own = "training=[" + ",".join(f"'{override}'" for override in [*TINY, "pooling.num_prototypes=4"]) + "]"
    args = arguments("study_gsp_mu", own, "folds=[0]", "transport_ratios=[1.0,0.3]", *places(tmp_path))
    findings, _ = conduct_study("gsp_mu", args, gsp_values.over_mu)
    assert [row[0] for row in findings.rows] == ["mu = 0.3", "mu = 1"]
    runs = find_runs(tmp_path)
    assert len(runs) == 2 and all("-gsp-" in run.config for run in runs)
    scores = {read_result(run.path)["metrics"]["test"]["map_at_r"] for run in runs}
    parts = read_json(tmp_path / "studies" / "gsp_mu.json")["parts"]
    assert {part["value"]["map_at_r"] for part in parts.values()} == scores


def test_scores_must_fall_at_every_step_over_mu(monkeypatch: pytest.MonkeyPatch) -> None:
    args, rows = arguments("study_gsp_mu"), []
    monkeypatch.setattr(gsp_values, "scores_of", lambda configs, *_: dict(zip(configs, rows, strict=True)))
    for scores, holds, shown in (
        ([0.3, 0.4, 0.3, 0.2], True, "1: 20.0"),
        ([0.4, 0.1, 0.2], None, "(rank correlation -0.5: on the whole, not at every step)"),
        ([0.1, 0.3, 0.2], False, "1: 20.0"),
    ):
        rows[:] = [{"map_at_r": [score], "p_at_1": [0.5]} for score in scores]
        args.transport_ratios = [0.1, 0.3, 0.5, 1.0][-len(scores) :]
        findings = gsp_values.over_mu(args, None)
        plt.close(findings.figure)
        assert findings.claims[1].holds is holds
        assert findings.claims[1].ours.endswith(shown)


def test_gsp_m_eps_finds_the_best_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def scores_of(configs, args, parts):
        asked.update(configs)
        return {name: {"map_at_r": [0.1 * i, 0.1 * i], "p_at_1": [0.5, 0.5]} for i, name in enumerate(configs)}

    monkeypatch.setattr(gsp_values, "scores_of", scores_of)
    args = arguments("study_gsp_m_eps", "prototypes=[4,2]", "smoothings=[1.0,5.0]", *places(tmp_path))
    findings, written = conduct_study("gsp_m_eps", args, gsp_values.over_m_and_epsilon)
    assert [row[:2] for row in findings.rows] == [
        ("GAP", "0.0 ± 0.0"), ("m = 2, epsilon = 1", "10.0 ± 0.0"), ("m = 2, epsilon = 5", "20.0 ± 0.0"),
        ("m = 4, epsilon = 1", "30.0 ± 0.0"), ("m = 4, epsilon = 5", "40.0 ± 0.0"),
    ]  # fmt: skip
    assert "best at m = 4, epsilon = 5, 40.0 %" in findings.claims[0].ours
    assert "differ by 20.0 over m and by 10.0 over epsilon" in findings.claims[1].ours
    assert asked["m = 2, epsilon = 5"][1:3] == ("pooling.num_prototypes=2", "pooling.smoothing=5.0")
    assert written[-1].exists()


def test_maps_are_pooled_without_a_projection() -> None:
    maps = torch.rand(3, 5, 2, 4)
    poolings: dict[str, nn.Module] = {"gap": Gap(), "gmp": Gmp(), "gem": Gem(power=2.0)}
    rows = untrained_poolings.pooled_by(poolings, maps)
    flat = maps.flatten(2)
    expected = torch.cat([flat.mean(dim=2), flat.amax(dim=2), flat.square().mean(dim=2).sqrt()], dim=1)
    assert torch.allclose(rows, expected, atol=1e-6)


def test_untrained_poolings_in_miniature(tmp_path: Path) -> None:
    data = ["dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=4",
            "dataset.table.image_size=24", "backbone=resnet20_small",
            "network=resnet20_small", "num_workers=0"]  # fmt: skip
    args = arguments("study_untrained_poolings", *data, *places(tmp_path))
    findings, _ = conduct_study("untrained_poolings", args, untrained_poolings.conduct)
    assert [row[0] for row in findings.rows] == ["gap", "gmp", "gap_gmp", "gem", "k_max"]
    assert "R@1 45.0 with GAP, 53.1 with GMP" in findings.claims[0].paper
    # the first two rows by loops over the queries
    table = read_table(args.dataset["table"])
    seed_everything(args.seed)
    backbone = ResNet20(stem_stride=2).eval()
    with torch.no_grad():
        images = torch.from_numpy(np.repeat(table.pixels[:, None], 3, axis=1))
        maps = backbone(backbone.preprocess(images))[-1].double().numpy()
    labels = table.labels[table.role == "test"]
    for row, pooled in zip(findings.rows, (maps.mean(axis=(2, 3)), maps.max(axis=(2, 3))), strict=False):
        rows = pooled[table.role == "test"]
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        order = [[i for i in np.argsort(-unit @ one) if i != q] for q, one in enumerate(unit)]
        right = [[labels[i] == labels[q] for i in others] for q, others in enumerate(order)]
        recall = [np.mean([any(hits[:k]) for hits in right]) for k in (1, 2, 4, 8)]
        map_at_r = np.mean([sum(hits[k] * sum(hits[: k + 1]) / (k + 1) for k in range(3)) / 3 for hits in right])
        percent = [100 * score for score in (*recall, map_at_r)]
        assert [float(score) for score in row[1:]] == pytest.approx(percent, abs=0.006)


def test_hits_are_grouped_by_the_share_of_the_box() -> None:
    hits = np.array([1.0, 0.0, 1.0, np.nan, 1.0])
    shares = np.array([0.1, 0.2, 0.5, 0.1, 1.0])
    assert object_size.by_size(hits, shares, [0.0, 0.2, 0.5, 0.9, 1.0]) == ([1.0, 0.0, 1.0, 1.0], [1, 1, 1, 1])
    assert object_size.by_size(hits[:1], shares[:1], [0.0, 0.5, 1.0]) == ([1.0, None], [1, 0])


def test_queries_of_runs_are_grouped_by_the_size_of_the_object(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "CUB_200_2011"
    write_cub200(folder)  # photographs of 56 x 48
    names = sorted(str(path.relative_to(folder / "images")) for path in (folder / "images").rglob("*.jpg"))
    classes = sorted({name.split("/")[0] for name in names})
    lists = {
        "images": [f"{i} {name}" for i, name in enumerate(names, 1)],
        "image_class_labels": [f"{i} {int(name[:3])}" for i, name in enumerate(names, 1)],
        "classes": [f"{int(name[:3])} {name}" for name in classes],
        "bounding_boxes": [f"{i} 0.0 0.0 28.0 48.0" for i in range(1, len(names) + 1)],  # half of each
    }
    for name, lines in lists.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    data = ["dataset=cub200", "dataset.table.check_counts=false", f"paths.data_dir={tmp_path}/data", "num_workers=0",
            "transform.eval.resize=16", "transform.eval.crop=16", "transform.train.resize=16",
            "transform.train.crop=16"]  # fmt: skip
    tiny = ["protocol=conventional", "fit=untrained", "fit.keep=none", "head.out_features=4"]
    runs = {way: run(compose("train", [*data, *tiny, f"pooling={way}", *places(tmp_path)])) for way in ("gap", "gmp")}
    named = [f"{way}='{path}'" for way, path in runs.items()]
    args = arguments("study_object_size", *named, "edges=[0,0.4,0.6,1]", f"paths.output_dir={tmp_path}")
    findings, _ = conduct_study("object_size", args, object_size.conduct)
    recall = [f"{100 * read_result(runs[way])['metrics']['test']['recall_at_1']:.1f}" for way in ("gap", "gmp")]
    assert findings.rows[1][2:] == tuple(recall)
    assert [row[1] for row in findings.rows] == ["0", findings.rows[1][1], "0"]
    (folder / "bounding_boxes.txt").unlink()
    args.name = "without"
    with pytest.raises(DataError, match="has no boxes of its objects"):
        conduct_study("object_size", args, object_size.conduct)
