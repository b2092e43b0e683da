"""The wheel carries the configuration and works outside of the checkout; the container copies what there is."""

import os
import subprocess
import sys
import zipfile

import pytest


@pytest.mark.slow
def test_wheel_trains_outside_of_the_checkout(repository, tmp_path) -> None:
    pytest.importorskip("hatchling", reason="extra dev")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist"],
        cwd=repository, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    members = {
        "dmlbench/conf/pooling/gsp.yaml", "dmlbench/data/readers/cars196_names.txt", "dmlbench/papers/tables.csv",
        "dmlbench/papers/gsp/table2.csv",
    }  # fmt: skip
    assert members <= set(zipfile.ZipFile(wheel).namelist())
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel], check=True
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "DMLBENCH_CACHE": str(tmp_path / "cache")}
    code = "import dmlbench; print(dmlbench.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout
    assert where.startswith(str(site))
    subprocess.run(
        [sys.executable, "-m", "dmlbench", "train", "fit.max_steps=2", "fit.validate_every=2", "device=cpu",
         "dataset.table.num_classes=16", "dataset.table.images_per_class=8", "sampler.classes_per_batch=4"],
        cwd=tmp_path, env=environment, check=True, capture_output=True,
    )  # fmt: skip
    assert len(list(tmp_path.glob("outputs/glyphs_collage/mlrc/*/fold0_rep0/result.json"))) == 1


def test_what_the_containerfile_copies_is_there_and_not_ignored(repository) -> None:
    lines = (repository / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1] if word[:2] != "--"]
    assert copied
    sent = (repository / ".dockerignore").read_text().splitlines()
    for source in copied:
        assert (repository / source).exists() and f"!{source.rstrip('/')}" in sent, source
