"""``dmlbench train``: one run, or a sweep with ``-m``."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dmlbench.cli.arguments import CommandLine, for_hydra, remove_former_arguments
from dmlbench.cli.errors import explain, root_cause
from dmlbench.cli.hydra_command import run_command
from dmlbench.cli.progress import Progress
from dmlbench.config import complete_config, composing, config_folder, key_of, without_hydra
from dmlbench.types import ConfigError, DmlbenchError, RunInUse, flatten, num_launched

COMMAND_LINE = "command line"
_RECIPE = "recipe/values/"


def main(line: CommandLine) -> None:
    """Train one run or a sweep; ``--why`` prints every value and its source, ``--dry-run`` the runs and what lacks."""
    if line.why:
        print_value_sources(line)
    elif line.dry_run:
        from dmlbench.cli.preflight import check_sweep

        check_sweep(line)
    else:
        run_command("train", task, line)


def task(cfg: DictConfig, progress: Progress | None = None) -> str:
    """Run the composed configuration; returns the run directory as a string for sweepers."""
    from dmlbench.identity import directory_of  # torch is imported only once the configuration is known to compose
    from dmlbench.results.store import RESULT
    from dmlbench.runner import run

    settle_choices(cfg, HydraConfig.get())
    if progress is None:
        return str(run(cfg))
    progress.log_start(HydraConfig.get().job.num)
    progress.skipped += (directory_of(cfg) / RESULT).exists()
    try:
        return str(run(cfg))
    except RunInUse:
        progress.skipped += 1
        raise


def composed_run(overrides: Sequence[str]) -> DictConfig:
    """A run's configuration as ``dmlbench train`` has it; inside of ``composing()``."""
    with explained():
        cfg = hydra.compose("train", list(overrides), return_hydra_config=True)
        complete_config(cfg)
        settle_choices(cfg, cfg.hydra)
    return without_hydra(cfg)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raise Hydra's and OmegaConf's errors as ``ConfigError``, in our words."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        cause = root_cause(error)
        raise ConfigError(str(cause) if isinstance(cause, DmlbenchError) else explain(error)) from error


def settle_choices(cfg: DictConfig, hydra: Any) -> None:
    """Store the chosen option of each group in ``runtime.choices``; a config's name is made of them."""
    runtime = hydra.runtime
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    choices = {group: str(option) for group, option in runtime.choices.items() if "/" not in group}
    given: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    if cfg.regularizer and "regularizer" not in choices:  # of several options Hydra says nothing
        choices["regularizer"] = "+".join(sorted(str(name) for name in cfg.regularizer if name != "mixing"))
    choices |= cfg.runtime.recipe.get("chosen", {})
    choices |= remove_former_arguments(cfg, given, choices, folders)
    if choices.get("backbone") == "timm":
        choices["backbone"] = str(cfg.backbone.name)
    if (processes := num_launched()) > 1:
        if cfg.fit.processes not in (1, processes):
            raise ConfigError(
                f"fit.processes: got {cfg.fit.processes}, expected {processes}, the number that torchrun started."
            )
        OmegaConf.update(cfg, "fit.processes", processes)
    OmegaConf.update(cfg, "runtime.choices", choices, force_add=True)
    OmegaConf.update(cfg, "runtime.given", [key_of(override) for override in given])
    OmegaConf.update(cfg, "runtime.config_dir", next((str(f) for f in folders if f != config_folder()), None))


def print_value_sources(line: CommandLine) -> None:
    """Print every key with its value and its source, and the recipe's values that something else replaced."""
    if line.is_sweep or line.help or line.cfg or line.dry_run:
        raise ConfigError("--why explains one run. Leave -m, --help, --cfg and --dry-run out.")
    overrides = for_hydra("train", line)
    with composing(line.config_dir):
        cfg = composed_run(overrides)
        places = _places(overrides, cfg.runtime.recipe)
    rows = [(key, str(value), place) for key, value, place in _values(cfg, places)]
    widths = [min(max(len(row[i]) for row in rows), 56) for i in (0, 1)]
    for key, value, place in rows:
        print(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {place}")
    recipe = cfg.runtime.recipe
    if recipe:
        print(f"\nrecipe={recipe.name} recipe.side={recipe.side}")
        for key, value in recipe.overridden.items():
            print(f"  replaced: {key}, {value} in the recipe ({recipe.places[key]})")
        for text in recipe.deviations:
            print(f"  deviates: {text}")


def _values(cfg: Any, places: dict[str, str]) -> Iterator[tuple[str, Any, str]]:
    for key, value in flatten(OmegaConf.to_container(cfg, resolve=False)).items():
        if key.partition(".")[0] == "runtime":
            continue
        part = key
        while part not in places and "." in part:  # a whole node was given at once
            part = part.rpartition(".")[0]
        yield key, value, places.get(part, "unknown")


def _places(overrides: Sequence[str], recipe: Any) -> dict[str, str]:
    """The last of the files, the recipe's entries and the command line that gives a key, by key."""
    places: dict[str, str] = {}
    loader: Any = GlobalHydra.instance().config_loader()
    _, repository = loader._parse_overrides_and_create_caching_repo("train", list(overrides))
    defaults = loader.compute_defaults_list("train", list(overrides), RunMode.RUN)
    for part in defaults.defaults:
        path = part.config_path
        if path is None or path.split("/")[0] == "hydra":
            continue
        content = OmegaConf.to_container(repository.load_config(path).config, resolve=False)
        for key in flatten(content, part.package or ""):
            if path.startswith(_RECIPE):
                places[key] = f"recipe {recipe.name}: {recipe.places.get(key, '')}"
            else:
                places[key] = "the schema's default" if path.startswith("schema/") else f"conf/{path}.yaml"
    for override in defaults.config_overrides:
        places.update(dict.fromkeys(flatten({override.key_or_group: override.value()}), COMMAND_LINE))
    return places
