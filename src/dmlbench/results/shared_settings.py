"""What all rows of a table share, in words, for its caption."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dmlbench.types import flatten

Stored = Mapping[str, Any]
"""The resolved configuration of a run."""
_SAID = ("optim.lr", "optim.weight_decay", "head.out_features")


def shared_settings(configs: Sequence[Stored], changed: Sequence[Mapping[str, str]], *, whole: bool = True) -> str:
    """Sentences with the settings that all configs share, and with those that all trained ones share.

    Args:
        configs: those of runs made here, without imported ones.
        changed: per config, the settings that differ from their chosen option.
        whole: the table has no imported rows.
    """
    rows = "All rows: " if whole else "All rows but imported ones: "
    trained = [config for config in configs if _at(config, "fit.max_steps") != 0]
    in_words = _shared([_backbone], configs)
    backbone = in_words or _shared([_backbone_name], configs)
    said = (*_SAID, "backbone.frozen_until") if in_words else _SAID
    of_all = [*backbone, *_shared(_OF_MODEL, configs), *_shared_changes(configs, changed, said)]
    of_trained = _shared(_OF_TRAINING, trained)
    if len(trained) == len(configs):
        return _sentence(rows if len(configs) > 1 or not whole else "", of_all + of_trained)
    return " ".join(filter(None, (_sentence(rows, of_all), _sentence("Trained rows: ", of_trained))))


def _sentence(rows: str, texts: Sequence[str]) -> str:
    return f"{rows}{', '.join(texts)}." if texts else ""


def _shared(parts: Sequence[Callable[[Stored], str]], configs: Sequence[Stored]) -> list[str]:
    """The texts in which all configs agree."""
    texts = ({part(config) for config in configs} for part in parts)
    return [text for own in texts if len(own) == 1 for text in own if text]


def _shared_changes(configs: Sequence[Stored], changed: Sequence[Mapping[str, str]], said: Sequence[str]) -> list[str]:
    """The changes that all configs have, without the settings that other words say."""
    keys = [key for key in dict.fromkeys(key for own in changed for key in own) if key not in said]
    stored = [flatten(dict(config)) for config in configs]
    in_all = [key for key in keys if all(key in settings for settings in stored)]
    parts = [lambda config, key=key: f"{key}={_at(config, key)}" for key in in_all]
    return _shared(parts, configs)


def _at(config: Stored, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _choice(config: Stored, group: str) -> str:
    """The chosen option of a group; empty for none."""
    chosen = str(_at(config, f"runtime.choices.{group}"))
    return "" if chosen.lower() == "none" else chosen


def _backbone_name(config: Stored) -> str:
    name = _at(config, "backbone.name") or _choice(config, "backbone")
    return f"{name} backbone" if name else ""


def _backbone(config: Stored) -> str:
    name = _backbone_name(config)
    frozen = _at(config, "backbone.frozen_until")
    states = {None: [], "all": ["frozen"]}.get(frozen, [f"frozen until {frozen}"])
    if not _at(config, "backbone.pretrained") and not _at(config, "backbone.weights_file"):
        states = ["random initial weights", *states]
    return name + (f" ({', '.join(states)})" if name and states else "")


def _pixels(config: Stored) -> str:
    size, views = _at(config, "runtime.image_size"), _at(config, "feature_cache.views")
    return f"{' x '.join(map(str, size))} pixels" + (f" in {views} cached views" if views else "") if size else ""


def _batches(config: Stored) -> str:
    classes, images = _at(config, "sampler.classes_per_batch"), _at(config, "sampler.images_per_class")
    if classes and images:
        return f"batches of {classes} classes x {images} images"
    return _valued("sampler.batch_size", "batches of {} images")(config)


def _steps(config: Stored) -> str:
    bound = "at most " if _at(config, "fit.patience") is not None else ""
    return _valued("fit.max_steps", bound + "{:,} steps")(config)


def _named(group: str, noun: str) -> Callable[[Stored], str]:
    return lambda config: f"{chosen} {noun}" if (chosen := _choice(config, group)) else ""


def _valued(key: str, words: str) -> Callable[[Stored], str]:
    return lambda config: "" if (value := _at(config, key)) is None else words.format(value)


_OF_MODEL: tuple[Callable[[Stored], str], ...] = (
    *(_pixels, _named("tuning", "tuning"), _named("pooling", "pooling"), _named("head", "head")),
    *(_valued("runtime.embedding_size", "{}-D embeddings"), _named("rerank", "reranking")),
)
_OF_TRAINING: tuple[Callable[[Stored], str], ...] = (
    *(_named("loss", "loss"), _named("miner", "miner"), _named("regularizer", "regularizer"), _batches),
    *(_named("transform", "augmentation"), _named("optim", "optimizer"), _valued("optim.lr", "learning rate {}")),
    *(_valued("optim.weight_decay", "weight decay {}"), _named("schedule", "schedule"), _steps),
)
