"""Backbones: images to feature maps, and the networks of timm."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dmlbench.models.hub import create_any_size, create_from_hub, hub_id, portable, read_hub_config
from dmlbench.models.tokens import as_map, fit_images, set_image_size
from dmlbench.models.weights import load_weights, read_weights
from dmlbench.types import ConfigError, DataError, check_choice, closest

BatchNormFreezing = Literal["none", "stats", "all"]
ALL = "all"
"""The name for ``frozen_until`` that freezes the whole backbone."""


@dataclass(frozen=True)
class Stage:
    """One step of a backbone's forward pass, its modules, and parameters that are in none of them."""

    run: Callable[[Tensor], Tensor]
    modules: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter] = ()


@dataclass(frozen=True)
class StoredMaps:
    """What stands in a record of a feature cache in place of an image.

    Attributes:
        shapes: of each stored tensor without the batch: [C, H, W] of maps (stored with the channels last), [N, C] of
            tokens.
        image_size: height and width of the images that they were computed from.
    """

    shapes: tuple[tuple[int, ...], ...]
    image_size: tuple[int, int]

    def pack(self, outputs: Sequence[Tensor]) -> Tensor:
        """Records [B, F, 1, 1] of the tensors."""
        parts = [x.permute(0, 2, 3, 1) if x.ndim == 4 else x for x in outputs]
        return torch.cat([x.flatten(1) for x in parts], dim=1)[:, :, None, None]

    def unpack(self, records: Tensor) -> tuple[Tensor, ...]:
        """The tensors of records [B, F, 1, 1]."""
        parts = records.flatten(1).split([math.prod(shape) for shape in self.shapes], dim=1)
        outputs = []
        for part, shape in zip(parts, self.shapes, strict=True):
            is_map = len(shape) == 3
            x = part.unflatten(1, (*shape[1:], shape[0]) if is_map else shape)
            outputs.append(x.permute(0, 3, 1, 2) if is_map else x)
        return tuple(outputs)


class Backbone(nn.Module):
    """Images to feature maps. Subclasses implement ``forward``.

    ``forward(images)`` takes what ``preprocess`` returns, float [B, 3, H, W], and returns at least one map
    [B, channels[i], H_i, W_i], from low to high level; the last one is pooled.

    "Frozen batch norm" means three things in public codes, hence ``batch_norm``:
    ``none`` freezes nothing;
    ``stats`` normalizes by the running statistics and keeps them, while scale and shift train
    (pytorch-metric-learning's benchmarker, the RDML code);
    ``all`` fixes scale and shift, too (``trainable = False`` in Keras, hence the GSP framework).
    The choice outlasts every later ``train()`` of this module or of one that holds it.

    ``frozen_until`` freezes the stages up to the named one ("all": the whole network): they stay in evaluation mode and
    have no gradient. ``batch_norm`` then applies to the rest.

    ``native(images)`` is the vector of the pooling that the network was trained with (class token, attention pooling;
    the average where no other is known).

    Attributes:
        channels: channels of the maps that ``forward`` returns.
        native_channels: width of the vector that ``native`` returns.
        frozen_until: the last frozen stage, "all" or None.
        tuning: name of the parameter-efficient method that trains it, or None (see ``parameter_efficient``).
        stored: layout of the records that ``maps_of`` takes in place of images; None takes images.
        weights_license: of the published weights that ``pretrained`` loads, as hubs call it.
    """

    weights_license: ClassVar[str] = "unknown"

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        channels: Sequence[int],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        bgr: bool = False,
        value_range: float = 1.0,
    ) -> None:
        """
        Args:
            channels: channels of every returned map, low to high.
            mean, std: three of each, in the network's own channel order and value range.
            bgr: the network was trained on blue-green-red images.
            value_range: 1 or 255, the value of white in the images that the network was trained on.
        """
        super().__init__()
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ConfigError(
                f"mean, std: got {tuple(mean)} and {tuple(std)}, expected three numbers each, std above 0."
            )
        self.channels = tuple(channels)
        self.native_channels = self.channels[-1]
        self._bgr = bgr
        self._value_range = value_range
        self._batch_norm: BatchNormFreezing = "none"
        self.frozen_until: str | None = None
        self.tuning: str | None = None
        self.stored: StoredMaps | None = None
        # Not part of the weights: a public weights file has no such entries.
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def native(self, images: Tensor) -> Tensor:
        """Vector [B, native_channels] of the network's own pooling of preprocessed images, before any classifier."""
        last = self(images)[-1]
        return last.mean(dim=(2, 3), dtype=torch.promote_types(last.dtype, torch.float32))

    @torch.no_grad()
    def map_sizes(self, image_size: Sequence[int]) -> list[list[int]]:
        """Height and width of every map of images of ``image_size``."""
        was_training = self.training
        self.eval()
        maps = self(self.preprocess(torch.zeros(1, 3, *image_size, dtype=torch.uint8)))
        self.train(was_training)
        return [list(x.shape[2:]) for x in maps]

    def preprocess(self, images: Tensor) -> Tensor:
        """Normalize images [B, 3, H, W], RGB, uint8 or floating point in [0, 1], as this network was trained."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise DataError(f"images: got shape {tuple(images.shape)}, expected [B, 3, H, W]. Convert them to RGB.")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise DataError(f"images: got type {images.dtype}, expected uint8 or floating point in [0, 1].")
        scale = self._value_range / 255.0 if images.dtype == torch.uint8 else self._value_range
        pixels = images.to(self.mean.dtype)
        if self._bgr:
            pixels = pixels.flip(1)
        if scale != 1.0:
            pixels = pixels * scale
        return (pixels - self.mean) / self.std

    def normalization(self) -> dict[str, Any]:
        """What ``preprocess`` does, for model cards."""
        return {
            "channels_first_layer": "BGR" if self._bgr else "RGB",
            "white": self._value_range,
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
        }

    def named_stages(self) -> Mapping[str, Stage]:
        """The steps of ``forward`` by name, in order; empty where the network cannot be cut."""
        return {}

    def layer_ids(self) -> dict[str, int]:
        """The layer of every parameter by its name, 0 for the lowest, for ``optim.layer_decay``.

        Raises:
            ConfigError: layers of this network are unknown.
        """
        raise ConfigError(
            f"optim.layer_decay: got a backbone of {type(self).__name__}, expected a timm model with layer groups. "
            "Set optim.layer_decay=null."
        )

    def maps_of(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Maps of images [B, 3, H, W], or of records of a feature cache where ``stored`` is set."""
        if self.stored is None:
            return self(self.preprocess(inputs))
        return self.finish(self.stored.unpack(inputs.to(self.mean.dtype)), self.stored.image_size)

    def frozen_outputs(self, images: Tensor) -> tuple[Tensor, ...]:
        """What the frozen part makes of images: all maps if it is the whole network, else one tensor."""
        if self.frozen_until == ALL:
            return self(self.preprocess(images))
        x = self.preprocess(images)
        for name, stage in self.named_stages().items():
            x = stage.run(x)
            if name == self.frozen_until:
                break
        return (x,)

    def finish(self, outputs: tuple[Tensor, ...], image_size: tuple[int, int]) -> tuple[Tensor, ...]:
        """Maps from what ``frozen_outputs`` returned for images of a size."""
        if self.frozen_until == ALL:
            return outputs
        (x,) = outputs
        for stage in list(self.named_stages().values())[len(self._frozen_stages()) :]:
            x = stage.run(x)
        return (self.as_map(x, image_size),)

    def as_map(self, x: Tensor, image_size: Sequence[int]) -> Tensor:
        """The map [B, C, H, W] that the last stage's output stands for."""
        return x

    def frozen_state(self) -> list[Tensor]:
        """Parameters and buffers of the frozen part."""
        tensors = [x for module in self._frozen_modules() for x in module.state_dict().values()]
        return [*tensors, *(p.detach() for stage in self._frozen_stages() for p in stage.parameters)]

    def freeze(self, batch_norm: BatchNormFreezing, frozen_until: str | None = None) -> None:
        """Freeze batch norm's statistics or all of it, and the stages up to ``frozen_until`` (see the class)."""
        check_choice("batch_norm", batch_norm, get_args(BatchNormFreezing))
        if frozen_until == ALL and batch_norm == "stats":
            raise ConfigError(
                "backbone.batch_norm: got stats with backbone.frozen_until=all, which freezes scale and shift, too. "
                "Set backbone.batch_norm=all."
            )
        self._batch_norm = batch_norm
        for layer in self._batch_norms():
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(batch_norm != "all")
        if frozen_until not in (None, ALL):
            self._check_stage(str(frozen_until))
        self.frozen_until = frozen_until
        for module in self._frozen_modules():
            module.requires_grad_(False)
            if module is not self:
                module.eval()
        for stage in self._frozen_stages():
            for parameter in stage.parameters:
                parameter.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Backbone":
        if self.frozen_until == ALL:  # its layers stay in evaluation mode: visiting all costs more than a cached step
            self.training = mode
            return self
        super().train(mode)
        if self._batch_norm != "none":
            for layer in self._batch_norms():
                layer.eval()
        for module in self._frozen_modules():
            module.eval()
        return self

    def _batch_norms(self) -> list[_BatchNorm]:
        return [module for module in self.modules() if isinstance(module, _BatchNorm)]

    def _frozen_stages(self) -> list[Stage]:
        if self.frozen_until in (None, ALL):
            return []
        stages = self.named_stages()
        return [stages[name] for name in list(stages)[: list(stages).index(self.frozen_until) + 1]]

    def _frozen_modules(self) -> list[nn.Module]:
        if self.frozen_until == ALL:
            return [self, *self.children()]
        return [module for stage in self._frozen_stages() for module in stage.modules]

    def _check_stage(self, name: str) -> None:
        stages = list(self.named_stages())
        if name not in stages[:-1]:
            raise ConfigError(
                f"backbone.frozen_until: got the unknown stage '{name}': {closest(name, [*stages[:-1], ALL])}"
            )
        if len(self.channels) > 1:
            raise ConfigError(f"backbone.frozen_until: got {name} with maps of several levels, expected {ALL} or null.")


def select_levels(out_levels: Sequence[int], count: int) -> tuple[int, ...]:
    """Check requested levels: ascending, distinct, in [0, count)."""
    levels = tuple(out_levels)
    if not levels or list(levels) != sorted(set(levels)) or levels[0] < 0 or levels[-1] >= count:
        raise ConfigError(f"out_levels: got {levels}, expected at least one of 0..{count - 1}, ascending and distinct.")
    return levels


class TimmBackbone(Backbone):
    """A network of timm by name, for instance ``resnet50.tv_in1k`` (torchvision's IMAGENET1K_V1).

    Networks of tokens (ViT, DINOv2, CLIP, Swin) return their patch tokens as a map, row by row, without class and
    register tokens, after their final norm unless it follows the pooling (ViTs trained on averages). ``native`` is
    timm's own pooling of the same features, and the layers between it and the classifier.

    The tag of a name selects the weights, and with them mean and standard deviation.

    Attributes:
        hub_config: architecture, its arguments and facts of the weights of a model of the Hugging Face hub; else None.
    """

    def __init__(
        self,
        name: str,
        *,
        pretrained: bool,
        weights_file: str | None = None,
        batch_norm: BatchNormFreezing = "none",
        out_indices: Sequence[int] | None = None,
        image_size: int | Sequence[int] | None = None,
        pad_images: bool = False,
        frozen_until: str | None = None,
        hub_config: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            name: model of timm, with or without a tag of its weights; or ``hf_hub:owner/model``, one of the Hugging
                Face hub in timm's format.
            pretrained: start from the published weights (from ``weights_file``, timm's cache or the network).
            weights_file: ``.pth`` or ``.safetensors`` with the names of timm's full model; loaded whenever given.
                A classifier in it is ignored.
            out_indices: timm's numbers of the stages (of ViTs: blocks) whose maps are returned, ascending, after the
                final norm where it fits. None: the last map alone.
            image_size: side, or height and width, that position embeddings are resampled to once. None: as the weights
                have them. ViT, DINOv2, CLIP, EVA and Swin take other sizes as well, resampling in every step.
            pad_images: pad images at the bottom and the right with the mean color, up to whole patches.
            frozen_until: of CNNs a stage or block such as ``layer3`` or ``blocks.4``; of ViTs ``patch_projection`` (the
                patch embedding's layers), ``patch_embed`` (also position embeddings and prefix tokens) or
                ``blocks.<i>``; or "all".
            hub_config: ``hub_config`` of another ``TimmBackbone``, which replaces ``config.json`` of the hub; set by
                exports, which load without a network connection.
        """
        download = pretrained and weights_file is None
        if hub_config is None and hub_id(name) is not None:
            hub_config = read_hub_config(name)
        if hub_config is None:
            model = _create(name, pretrained=download)
        else:
            model = create_from_hub(name, hub_config, pretrained=download)
            hub_config = portable(hub_config)
        channels = [int(model.num_features)] if out_indices is None else _stage_channels(model, name, out_indices)
        super().__init__(channels, mean=model.pretrained_cfg["mean"], std=model.pretrained_cfg["std"])
        self.native_channels = int(getattr(model, "head_hidden_size", model.num_features))
        self.hub_config = hub_config
        self._name = name
        self._pad_images = pad_images
        self._out_indices = None if out_indices is None else list(out_indices)
        self.model = model
        misfit = None
        if weights_file is not None:
            # Before the size: published files have the position embeddings of the size that they were trained on.
            try:
                load_weights(model, weights_file, ignore=_classifier_prefixes(model))
            except ConfigError as error:
                if image_size is None:
                    raise
                misfit = error
        if image_size is not None:
            set_image_size(model, image_size, name=name, pad=pad_images)
        if misfit is not None:
            try:  # the file may be of a run with this size
                load_weights(model, str(weights_file), ignore=_classifier_prefixes(model))
            except ConfigError:
                raise misfit from None
        self.freeze(batch_norm, frozen_until)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        images = fit_images(images, name=self._name, model=self.model, pad=self._pad_images)
        if self._out_indices is None:
            output = self.model.forward_features(images)
            maps = (self.as_map(output, images.shape[2:]),)
        else:
            # What follows the last stage that is asked for is not computed.
            options = {"norm": True, "stop_early": True, "intermediates_only": True, "output_fmt": "NCHW"}
            maps = tuple(self.model.forward_intermediates(images, indices=self._out_indices, **options))
        for level, channels in zip(maps, self.channels, strict=True):
            if level.ndim != 4 or level.shape[1] != channels:
                raise ConfigError(
                    f"backbone '{self._name}': got a map {tuple(level.shape)}, expected [B, {channels}, H, W]. "
                    "Choose another timm model."
                )
        return maps

    def as_map(self, x: Tensor, image_size: Sequence[int]) -> Tensor:
        return as_map(x, name=self._name, model=self.model, size=image_size)

    def named_stages(self) -> Mapping[str, Stage]:
        if self._out_indices is not None:
            return {}
        from timm.models import VisionTransformer  # here, as it takes a second or two to import

        model: Any = self.model
        if isinstance(model, VisionTransformer):

            def project(images: Tensor) -> Tensor:
                return model.patch_embed(fit_images(images, name=self._name, model=model, pad=self._pad_images))

            def embed(patches: Tensor) -> Tensor:
                return model.norm_pre(model.patch_drop(model._pos_embed(patches.contiguous())))

            layers = [model.pos_drop, model.patch_drop, model.norm_pre]
            found = {
                "patch_projection": Stage(project, [model.patch_embed]),
                "patch_embed": Stage(embed, layers, list(model.parameters(recurse=False))),
            }
            layout: Sequence[tuple[str, ...]] = (("blocks",), ("norm",))
        else:
            found = {}
            layout = next((x for x in _LAYOUTS if all(hasattr(model, name) for group in x for name in group)), ())
        for names in layout:
            modules = [getattr(model, name) for name in names]
            if names in (("blocks",), ("stages",)):
                found |= {f"{names[0]}.{i}": Stage(block, [block]) for i, block in enumerate(modules[0])}
            else:
                found[names[0]] = Stage(nn.Sequential(*modules), modules)
        return found

    def layer_ids(self) -> dict[str, int]:
        from timm.models import group_parameters

        if not hasattr(self.model, "group_matcher"):
            return super().layer_ids()
        layers = group_parameters(self.model, self.model.group_matcher(coarse=False), reverse=True)
        return {f"model.{name}": int(layer) for name, layer in layers.items()}

    @torch.no_grad()
    def _check_stage(self, name: str) -> None:
        super()._check_stage(name)
        side = max(self.model.pretrained_cfg["input_size"][1:])
        images = torch.linspace(-1, 1, 3 * side * side).view(1, 3, side, side)
        x, was_training = images, self.training
        self.eval()
        for stage in self.named_stages().values():
            x = stage.run(x)
        same = torch.equal(self.as_map(x, images.shape[2:]), self(images)[-1])
        self.train(was_training)
        if not same:
            raise ConfigError(
                f"backbone.frozen_until: got {name}, expected {ALL} or null, as '{self._name}' is not a plain "
                "sequence of stages."
            )

    def native(self, images: Tensor) -> Tensor:
        images = fit_images(images, name=self._name, model=self.model, pad=self._pad_images)
        vector = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        if not isinstance(vector, Tensor) or vector.shape != (images.shape[0], self.native_channels):
            raise ConfigError(
                f"pooling=native: got {getattr(vector, 'shape', type(vector).__name__)} from timm's '{self._name}', "
                f"expected one vector of {self.native_channels} numbers per image. Choose another pooling."
            )
        return vector


# Layers of timm's CNNs in the order of their forward pass, those of one stage together.
_LAYOUTS: Sequence[Sequence[tuple[str, ...]]] = (
    (("conv_stem", "bn1"), ("blocks",), ("conv_head", "bn2")),  # EfficientNet
    (("conv1", "bn1", "act1", "maxpool"), ("layer1",), ("layer2",), ("layer3",), ("layer4",)),  # ResNet
    (("stem",), ("stages",), ("norm_pre",)),  # ConvNeXt
    (("stem",), ("stages",), ("final_conv",)),  # NFNet
)


def _create(name: str, *, pretrained: bool) -> Any:
    """timm's model without its classifier but with its own pooling."""
    import timm  # here, as it takes a second or two to import

    if not timm.is_model(name):
        raise ConfigError(f"timm {timm.__version__} has no model '{name}': {closest(name, timm.list_models())}")
    options: dict[str, Any] = {"num_classes": 0, "pretrained": pretrained}
    try:
        config = timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        tags = ", ".join(timm.list_pretrained(f"{name.split('.')[0]}.*")) or "none"
        raise ConfigError(f"timm {timm.__version__} has no weights '{name}'; it has: {tags}.") from error
    if pretrained:
        if config is None or not (config.hf_hub_id or config.url or config.file):
            raise ConfigError(
                f"timm publishes no weights for '{name}'. Set backbone.weights_file=<path> or "
                "backbone.pretrained=false."
            )
        url = config.url if isinstance(config.url, str) else None
        cached = _cached_file(config.hf_hub_id, url)
        if cached is not None:  # by path: a name would ask the server for a newer version first
            if cached.suffix in (".bin", ".pth"):
                read_weights(cached)  # raises for Python objects, which older versions of timm execute
            options["pretrained_cfg_overlay"] = {"file": str(cached)}
    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself, retries too
    try:
        if pretrained and cached is None and config is not None and config.hf_hub_id:
            _require_hub(config.hf_hub_id)
        return create_any_size(name, **options)
    except Exception as error:
        if not pretrained or config is None:
            raise
        # timm, its hub client and their HTTP libraries raise many unrelated types for "cannot download".
        hub = f"https://huggingface.co/{config.hf_hub_id} (model.safetensors)" if config.hf_hub_id else ""
        sources = " or ".join(filter(None, (hub, str(config.url or ""))))
        why = str(error).rstrip(" .") or type(error).__name__
        raise ConfigError(
            f"pretrained weights of '{name}': {why}. Download {sources} on a connected machine and set "
            "backbone.weights_file=<path>, or backbone.pretrained=false."
        ) from error


def _require_hub(hub_id: str) -> None:
    """Fail at once without a connection: a download would retry for a minute."""
    from huggingface_hub import HfApi

    HfApi().model_info(hub_id, timeout=10)


def _cached_file(hub_id: str | None, url: str | None) -> Path | None:
    """The published weights in the caches that timm uses."""
    if hub_id:
        from huggingface_hub import try_to_load_from_cache

        for filename in ("model.safetensors", "pytorch_model.bin"):
            found = try_to_load_from_cache(hub_id, filename)
            if isinstance(found, str):
                return Path(found)
    if url:
        path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
        if path.is_file():
            return path
    return None


def _stage_channels(model: Any, name: str, out_indices: Sequence[int]) -> list[int]:
    if not hasattr(model, "forward_intermediates") or not hasattr(model, "feature_info"):
        raise ConfigError(
            f"backbone.out_indices: got {list(out_indices)}, expected null, as timm's '{name}' returns only its last "
            "map."
        )
    stages = select_levels(out_indices, len(model.feature_info))
    return [int(model.feature_info[stage]["num_chs"]) for stage in stages]


def _classifier_prefixes(model: Any) -> tuple[str, ...]:
    classifier = model.pretrained_cfg.get("classifier") or ()
    names = (classifier,) if isinstance(classifier, str) else classifier
    return tuple(f"{name}." for name in names)
