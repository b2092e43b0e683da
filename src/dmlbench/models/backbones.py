"""Backbones: images to feature maps, and the networks of timm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dmlbench.models.tokens import as_map, fit_images, set_image_size
from dmlbench.models.weights import load_weights
from dmlbench.types import ConfigError, DataError, check_choice, closest

BatchNormFreezing = Literal["none", "stats", "all"]


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

    ``native(images)`` is the vector of the pooling that the network was trained with (class token, attention pooling;
    the average where no other is known).

    Attributes:
        channels: channels of the maps that ``forward`` returns.
        native_channels: width of the vector that ``native`` returns.
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

    def freeze_batch_norm(self, batch_norm: BatchNormFreezing) -> None:
        """Freeze nothing, statistics, or statistics and affine parameters of every batch norm (see the class)."""
        check_choice("batch_norm", batch_norm, get_args(BatchNormFreezing))
        self._batch_norm = batch_norm
        for layer in self._batch_norms():
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(batch_norm != "all")
        self.train(self.training)

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        if self._batch_norm != "none":
            for layer in self._batch_norms():
                layer.eval()
        return self

    def _batch_norms(self) -> list[_BatchNorm]:
        return [module for module in self.modules() if isinstance(module, _BatchNorm)]


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
    ) -> None:
        """
        Args:
            name: model of timm, with or without a tag of its weights.
            pretrained: start from the published weights (from ``weights_file``, timm's cache or the network).
            weights_file: ``.pth`` or ``.safetensors`` with the names of timm's full model; loaded whenever given.
                A classifier in it is ignored.
            out_indices: timm's numbers of the stages (of ViTs: blocks) whose maps are returned, ascending, after the
                final norm where it fits. None: the last map alone.
            image_size: side, or height and width, that position embeddings are resampled to once. None: as the weights
                have them. ViT, DINOv2, CLIP, EVA and Swin take other sizes as well, resampling in every step.
            pad_images: pad images at the bottom and the right with the mean color, up to whole patches.
        """
        model = _create(name, pretrained=pretrained and weights_file is None)
        channels = [int(model.num_features)] if out_indices is None else _stage_channels(model, name, out_indices)
        super().__init__(channels, mean=model.pretrained_cfg["mean"], std=model.pretrained_cfg["std"])
        self.native_channels = int(getattr(model, "head_hidden_size", model.num_features))
        self._name = name
        self._pad_images = pad_images
        self._out_indices = None if out_indices is None else list(out_indices)
        self.model = model
        if weights_file is not None:
            load_weights(model, weights_file, ignore=_classifier_prefixes(model))
        if image_size is not None:
            # After the weights: a file has the position embeddings of the size that it was trained on.
            set_image_size(model, image_size, name=name, pad=pad_images)
        self.freeze_batch_norm(batch_norm)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        images = fit_images(images, name=self._name, model=self.model, pad=self._pad_images)
        if self._out_indices is None:
            output = self.model.forward_features(images)
            maps = (as_map(output, name=self._name, model=self.model, size=images.shape[2:]),)
        else:
            # What follows the last stage that is asked for is not computed.
            options = {"norm": True, "stop_early": True, "intermediates_only": True, "output_fmt": "NCHW"}
            maps = tuple(self.model.forward_intermediates(images, indices=self._out_indices, **options))
        for level, channels in zip(maps, self.channels, strict=True):
            if level.ndim != 4 or level.shape[1] != channels:
                raise ConfigError(
                    f"backbone '{self._name}' returns {tuple(level.shape)} instead of a map [B, {channels}, H, W]; "
                    "choose another network of timm"
                )
        return maps

    def native(self, images: Tensor) -> Tensor:
        images = fit_images(images, name=self._name, model=self.model, pad=self._pad_images)
        vector = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        if not isinstance(vector, Tensor) or vector.shape != (images.shape[0], self.native_channels):
            raise ConfigError(
                f"timm's own pooling of '{self._name}' returns {getattr(vector, 'shape', type(vector).__name__)} "
                f"instead of one vector of {self.native_channels} per image; choose another pooling than native"
            )
        return vector


def _create(name: str, *, pretrained: bool) -> Any:
    """timm's model without its classifier but with its own pooling."""
    import timm  # here, as it takes a second or two to import

    if not timm.is_model(name):
        raise ConfigError(f"timm {timm.__version__} has no model '{name}'; {closest(name, timm.list_models())}")
    options: dict[str, Any] = {"num_classes": 0, "pretrained": pretrained}
    try:
        config = timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        tags = ", ".join(timm.list_pretrained(f"{name.split('.')[0]}.*")) or "none"
        raise ConfigError(f"timm {timm.__version__} has no weights '{name}'; it has: {tags}") from error
    if pretrained:
        if config is None or not (config.hf_hub_id or config.url or config.file):
            raise ConfigError(f"timm publishes no weights for '{name}'; give weights_file=<path> or pretrained=false")
        url = config.url if isinstance(config.url, str) else None
        cached = _cached_file(config.hf_hub_id, url)
        if cached is not None:  # by path: a name would ask the server for a newer version first
            options["pretrained_cfg_overlay"] = {"file": str(cached)}
    try:
        try:
            return timm.create_model(name, dynamic_img_size=True, **options)
        except TypeError as error:
            if "dynamic_img_size" not in str(error):
                raise
            return timm.create_model(name, **options)  # a network without this choice: any size, or one alone
    except Exception as error:
        if not pretrained or config is None:
            raise
        # timm, its hub client and their HTTP libraries raise many unrelated types for "cannot download".
        hub = f"https://huggingface.co/{config.hf_hub_id} (model.safetensors)" if config.hf_hub_id else ""
        sources = " or ".join(filter(None, (hub, str(config.url or ""))))
        raise ConfigError(
            f"pretrained weights of '{name}': {str(error) or type(error).__name__}. Download {sources} on a connected "
            "machine and set weights_file=<path>, or set pretrained=false."
        ) from error


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
        raise ConfigError(f"timm's '{name}' returns its last map only; leave out_indices at null")
    stages = select_levels(out_indices, len(model.feature_info))
    return [int(model.feature_info[stage]["num_chs"]) for stage in stages]


def _classifier_prefixes(model: Any) -> tuple[str, ...]:
    classifier = model.pretrained_cfg.get("classifier") or ()
    names = (classifier,) if isinstance(classifier, str) else classifier
    return tuple(f"{name}." for name in names)
