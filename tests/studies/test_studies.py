"""Studies that train no network: their numbers by closed forms, and what a study leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composed import arguments
from PIL import Image
from torch import nn

from dmlbench.runtime import read_json
from dmlbench.studies import gsp_timing, two_moons
from dmlbench.studies.record import Parts, conduct_study
from dmlbench.types import RunError

MOONS = ["temperatures=[1.0,0.1]", "steps=15", "repeats=2", "points=60"]


def test_the_boundary_of_a_line_is_as_long_as_the_line() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():  # the logits' difference is x - 0.5: an upright line through the window
        net.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        net.bias.copy_(torch.tensor([0.0, -0.5]))
    length = two_moons.boundary_length(*two_moons.margin_on_grid(net))
    assert length == pytest.approx(2.1 + 1.6, rel=1e-6)
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 1.0], [0.4, 0.0]])
    assert two_moons.accuracy(net, points, torch.tensor([0, 1, 1, 1])) == 0.75


def test_a_study_leaves_its_record_and_is_not_computed_again(
    command: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ["study", "two_moons", *MOONS, f"paths.output_dir={tmp_path}"]
    printed = command(*study)
    files = {path.suffix: path for path in (tmp_path / "studies").iterdir()}
    assert set(files) == {".json", ".md", ".csv", ".png"}
    assert files[".md"].read_text() in printed and "| 3.4, figure 3 | the smaller T, the better the sampl" in printed
    record = read_json(files[".json"])
    assert record["complete"] and record["settings"]["steps"] == 15 and list(record["parts"]) == ["T=1", "T=0.1"]
    with Image.open(files[".png"]) as picture:
        assert min(picture.size) > 200
    before = record["parts"]
    monkeypatch.setattr(two_moons, "train", lambda *a, **k: pytest.fail("computed again"))
    files[".png"].unlink()
    command(*study)
    assert files[".png"].exists() and read_json(files[".json"])["parts"] == before
    assert "steps: 15 there, 16 requested" in command(*study, "steps=16", code=1)


def test_parts_that_are_done_are_kept_when_a_later_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    done: list[str] = []

    def compute(name: str) -> int:
        if name == "c" and len(done) < 3:
            done.append(name)
            raise RunError("stopped")
        done.append(name)
        return len(name)

    def parts() -> Parts:
        return Parts(path, "letters", {"a": 1}, device=torch.device("cpu"))

    with pytest.raises(RunError, match="stopped"):
        parts().get(["a", "bb", "c"], compute, describe="letters")
    assert not read_json(path)["complete"]
    assert parts().get(["a", "bb", "c"], compute, describe="letters") == {"a": 1, "bb": 2, "c": 1}
    assert done == ["a", "bb", "c", "c"]
    bound = parts()
    bound.bind(data="one")
    bound.get(["d"], compute, describe="letters")
    with pytest.raises(RunError, match="made with other data"):
        parts().bind(data="two")
    path.write_text("{}")
    with pytest.raises(RunError, match="is damaged"):
        parts()


def test_closed_form_is_the_iterations_forward_and_the_exact_backward() -> None:
    found = {"exact": {"forward": 1.0, "both": 3.0}, "5": {"forward": 4.0, "both": 9.0}}
    assert gsp_timing.training_times(found) == {
        gsp_timing.EXACT: {"5": 3.0}, gsp_timing.AUTODIFF: {"5": 9.0}, gsp_timing.CLOSED: {"5": 6.0}
    }  # fmt: skip


def test_the_transport_is_timed_beside_a_network(tmp_path: Path) -> None:
    small = ["iterations=[1,30]", "prototypes=[4]", "pixels=[9]", "rounds=3", "batch=4", "backbone=resnet20_small",
             "network=resnet20_small",
             "image_size=32", "iterations_of_others=30"]  # fmt: skip
    # resnet20 has no weights to leave out
    args = arguments("study_gsp_timing", *small, "~backbone.pretrained", f"paths.output_dir={tmp_path}")
    findings, _ = conduct_study("gsp_timing", args, gsp_timing.conduct)
    assert [row[0] for row in findings.rows] == [
        "exact", "k = 1", "k = 30", "exact, prototypes = 4", "k = 30, prototypes = 4", "exact, pixels = 9",
        "k = 30, pixels = 9",
    ]  # fmt: skip
    times = read_json(tmp_path / "studies" / "gsp_timing.json")["parts"]
    assert times["network"]["value"]["pixels"] == 16
    of_k = times["iterations"]["value"]
    assert of_k["30"]["both"] > of_k["1"]["both"] > 0


def test_studies_are_listed(command: Callable[..., str]) -> None:
    assert "  gsp_timing " in command("study", "--help")


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["two_mons"], "did you mean 'two_moons'"),
        (["two_moons", "name=a/b"], "name: got 'a/b', expected a file name"),
        (["two_moons", "temperatures=[1.0]"], "temperatures: got [1.0], expected two or more positive numbers."),
        (["two_moons", "steps=0"], "steps: got 0, expected a positive number."),
        (["gsp_timing", "iterations=[10]"], "iterations: got [10], expected two or more positive numbers."),
        (["gsp_mu", "transport_ratios=[0.3,1.5]"], "expected two or more numbers in (0, 1]."),
        (["gsp_mu", "training=[loss]"], "training: got loss, expected overrides such as fit.max_steps=100."),
        (["gsp_m_eps", "smoothings=[1.0]"], "smoothings: got [1.0], expected two or more positive numbers."),
        (["gsp_weights", "transport_ratio=1"], "transport_ratio: got 1.0, expected a number between 0 and 1."),
        (["collage_samples", "super_classes=[insect]"], "super_classes 'insect' is unknown: did you mean 'insects'"),
        (["collage_samples", "super_classes=[trees]"], "super_classes 'trees' is unknown"),  # background
        (["untrained_poolings", "poolings=[gap,cbam]"], "poolings: got gap, cbam, expected two or more of gap, gmp"),
        (["object_size", "gap=x"], "gmp=... is missing"),
        (["object_size", "edges=[0,0.5]"], "edges: got [0.0, 0.5], expected numbers that ascend from 0 to 1"),
    ],
)
def test_errors_of_studies(command: Callable[..., str], arguments, message, tmp_path: Path) -> None:
    output = [f"paths.output_dir={tmp_path}"] if len(arguments) > 1 else []
    assert message in command("study", *arguments, *output, code=2)
