"""Where the time of a run goes: each part of a step, validation and test, as shares of the whole run.

python scripts/profile_run.py [--steps 20] [--threads 1] OVERRIDES...        # those of dmlbench train
python scripts/profile_run.py dataset=cars196 backbone=efficientnet_lite0 paths.data_dir=/data pooling=gsp num_workers=0

Steps are timed part by part, on a GPU with a wait behind each (which the training itself does without); the parts of a
validation are timed once. The whole is then reckoned from the steps and validations of the configuration.
"""

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dmlbench.build import make_experiment
from dmlbench.checks import check
from dmlbench.cli.errors import guarded
from dmlbench.cli.main import keep_freed_memory
from dmlbench.config import compose
from dmlbench.experiment import Experiment
from dmlbench.runtime import autocast, device_name, select_device, set_strict_float32
from dmlbench.training.optim import clip_gradients, decay_added
from dmlbench.types import RetrievalSet

STEP = ("batch", "forward", "loss", "backward", "optimizer")
RETRIEVAL = ("embedding", "search")


@dataclass(frozen=True)
class Profile:
    """Seconds of a step by part, of a validation and the test by part, and how many there are of each in a run."""

    device: str
    images: int  # of a step
    step: dict[str, float]
    validation: dict[str, float]
    test: dict[str, float]
    num_steps: int
    num_validations: int

    @property
    def images_per_second(self) -> float:
        return self.images / sum(self.step.values())

    def of_run(self) -> dict[str, float]:
        """Seconds of the whole run by part."""
        parts = {name: seconds * self.num_steps for name, seconds in self.step.items()}
        parts |= {f"{name} (validation)": seconds * self.num_validations for name, seconds in self.validation.items()}
        return parts | {f"{name} (test)": seconds for name, seconds in self.test.items()}


class Clock:
    """Seconds by part; a GPU is waited for at both ends of each."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: Counter[str] = Counter()
        self._device = device

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = self._now()
        yield
        self.seconds[part] += self._now() - started

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def profile(overrides: Sequence[str], *, steps: int) -> Profile:
    """Time ``steps`` steps of a run, behind two that are not counted, a validation and the test."""
    cfg = compose("train", list(overrides))
    check(cfg)
    set_strict_float32()
    device = select_device(cfg.device)
    with tempfile.TemporaryDirectory() as folder:
        experiment = make_experiment(cfg, Path(folder), device)
        clock, images = Clock(device), 0
        for step in range(1, steps + 3):
            if step == 3:
                clock.seconds.clear()
            images = _step(experiment, clock, step)
        experiment.batches.close()
        split = experiment.setup.data.split
        return Profile(
            device=device_name(device),
            images=images,
            step={part: clock.seconds[part] / steps for part in STEP},
            validation=_retrieval(experiment, split.val),
            test=_retrieval(experiment, split.test),
            num_steps=(settings := experiment.setup.settings).max_steps,
            num_validations=math.ceil(settings.max_steps / settings.validate_every) if split.val is not None else 0,
        )


def _step(experiment: Experiment, clock: Clock, step: int) -> int:
    """One step as ``training.fit`` takes it, without what is rare; the number of its images."""
    setup, settings, optimizer = experiment.setup, experiment.setup.settings, experiment.optimizer
    memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
    setup.model.train()
    experiment.objective.train()
    with clock("batch"):
        batch = next(experiment.batches)
    with clock("forward"), autocast(setup.device, settings.precision):
        output = setup.model(batch.images.contiguous(memory_format=memory_format))
    with clock("loss"):
        setup.model.observe(output, step=step)
        loss = experiment.objective(output, batch.labels, step=step)["loss"]
    with clock("backward"):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
    with clock("optimizer"), decay_added(optimizer, settings.clip_form):
        clip_gradients(optimizer, norm=settings.clip_norm, value=settings.clip_value, form=settings.clip_form)
        optimizer.step()
    return len(batch.images)


def _retrieval(experiment: Experiment, part: RetrievalSet | None) -> dict[str, float]:
    """Seconds of embedding a set and of scoring it."""
    if part is None:
        return dict.fromkeys(RETRIEVAL, 0.0)
    clock = Clock(experiment.setup.device)
    with clock("embedding"):
        queries, gallery = experiment.setup.embed(part)
    with clock("search"):
        experiment.setup.score(queries, gallery)
    return dict(clock.seconds)


def table_of(found: Profile) -> list[str]:
    """Markdown lines: a part of the run, its seconds and its share."""
    of_run = found.of_run()
    whole = sum(of_run.values())
    lines = [
        f"{found.num_steps} steps of {found.images} images, {found.num_validations} validations and a test on "
        f"{found.device}: {whole:.0f} s; {found.images_per_second:.1f} images/s in training\n",
        "| part | ms a step | seconds of the run | share |",
        "|---|---|---|---|",
    ]
    for part, seconds in of_run.items():
        of_step = f"{1e3 * found.step[part]:.1f}" if part in found.step else "-"
        lines.append(f"| {part} | {of_step} | {seconds:.1f} | {seconds / whole:.1%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    sys.exit(guarded(lambda: print("\n".join(table_of(profile(options.overrides, steps=options.steps))))))


if __name__ == "__main__":
    main()
