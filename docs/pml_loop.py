"""Train with pytorch-metric-learning on the folds of dmlbench, and save test embeddings for `dmlbench import`.

    python pml_loop.py runs  # runs/fold<f>_rep<r>.npz and submission.yaml

Data set: glyphs_collage with num_classes=60, images_per_class=40 and image_size=48.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dmlbench.data.protocols import Mlrc
from dmlbench.data.readers.glyphs import glyphs_collage

DESCRIPTION = """\
method: my_method
backbone: small CNN
pretraining_data: none
trained_parameters: 25600
image_size: 48
tuning_budget: none, one setting
selected: last step
dataset: glyphs_collage
"""


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 32))


def main(folder: Path, *, steps: int = 60, classes: int = 60, images: int = 40, size: int = 48) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "submission.yaml").write_text(DESCRIPTION, encoding="utf-8")
    table = glyphs_collage(cache_dir=folder, num_classes=classes, images_per_class=images, image_size=size)
    pixels = torch.from_numpy(np.array(table.pixels))[:, None].float() / 255
    labels = torch.from_numpy(table.labels)
    protocol = Mlrc()
    for fold in range(protocol.num_folds):
        split = protocol.split(table, fold=fold)
        assert split.test is not None
        train, test = torch.from_numpy(split.train), split.test.query
        for repeat in range(protocol.num_repeats):
            torch.manual_seed(3 * fold + repeat)
            np.random.seed(3 * fold + repeat)  # noqa: NPY002 -- the sampler draws from it
            model, loss = network(), MultiSimilarityLoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
            sampler = MPerClassSampler(labels[train], m=4, batch_size=32, length_before_new_iter=32 * steps)
            for x, y in DataLoader(TensorDataset(pixels[train], labels[train]), batch_size=32, sampler=sampler):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
            with torch.inference_mode():
                rows = model.eval()(pixels[torch.from_numpy(test)])
            np.savez(folder / f"fold{fold}_rep{repeat}.npz", rows=rows.numpy(), labels=table.labels[test], ids=test)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
