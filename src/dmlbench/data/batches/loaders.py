"""From table rows to batches of images, in this process or in workers, with identical results."""

import atexit
import logging
import signal
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dmlbench.data.batches.samplers import BatchSampler, IndexBatch
from dmlbench.data.batches.transforms import CropTransform, ShiftTransform, Transform
from dmlbench.data.images.feature_cache import FeatureView
from dmlbench.data.images.sources import ImageSource
from dmlbench.device_copies import ahead_of_computing, to_device
from dmlbench.runtime import available_cores, derive_seed
from dmlbench.types import Batch, ConfigError, DmlbenchError, ImageTable, IntArray, check_at_least

_GPU_WORKERS = 4  # of about 2,000 cached images a second each: more than a ResNet50 trains on

Inputs = ImageSource | Tensor | FeatureView
"""Where batches come from: image files or their cache, a tensor of all images, or a feature cache."""

logger = logging.getLogger(__name__)


class TrainBatches:
    """An endless iterator over training batches whose state is that of the last batch that was returned.

    The randomness of an image comes from (seed, epoch, number of the batch in it, position in the batch), so the
    images are the same for any number of workers and after resuming, with second views or without. Images are uint8
    [B, 3, H, W] RGB, on the device. Nothing is read and no worker is started before the first batch is requested.

    Args:
        rows: [N] training rows of ``table``.
        images: of the table: a source for transforms that cut images, a tensor on the device (``pixel_tensor``) for
            those that shift batches; or records [B, F, 1, 1] of a feature cache, which takes the transform's place.
        class_index: [table.num_classes] training class of each label, -1 for others; see ``protocols.class_index``.
        num_workers: processes that read ahead; 0 reads in this one, None chooses. Ignored for tensors.
        second_views: whether batches have each image once more, transformed by its own draws.
        part: (i, n) reads the images of the i-th of n equal parts of each batch. Labels and ids are the whole batch's.
    """

    def __init__(
        self,
        table: ImageTable,
        rows: IntArray,
        *,
        images: Inputs,
        class_index: IntArray,
        sampler: BatchSampler,
        transform: Transform,
        seed: int,
        device: torch.device | str = "cpu",
        num_workers: int | None = 0,
        second_views: bool = False,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        if second_views and not transform.is_random:
            raise ConfigError(
                "transform.train: got one that is not random, but the regularizer compares two random views. Choose a "
                "random one, such as transform=mlrc, or remove the regularizer."
            )
        if second_views and isinstance(images, FeatureView) and images.cache.settings.views < 2:
            raise ConfigError("feature_cache.views: got 1, but the regularizer compares two views. Set 2 or more.")
        self._rows = np.asarray(rows, dtype=np.int64)
        self._classes = np.asarray(class_index, dtype=np.int64)[table.labels]  # of table rows
        if len(sampler.labels) != len(self._rows):
            raise ConfigError(
                f"sampler: got {len(sampler.labels)} labels, expected {len(self._rows)}, one for each training row."
            )
        if (self._classes[self._rows] < 0).any():
            raise ConfigError(
                "class_index: got -1 for some classes of the training rows, expected a number for each. Compute it "
                "from these rows."
            )
        self._device = torch.device(device)
        self._num_workers = _resolve_workers(num_workers, self._device, images)
        self._sampler = sampler
        self._reader = _Reader(images, transform)
        self._draws = ("image", "second view") if second_views else ("image",)
        self._seed = seed
        self._part = part
        self._stream: Iterator[_Read] | None = None
        self._state = sampler.state_dict()

    def __len__(self) -> int:
        """Batches of a nominal epoch; the iterator itself does not end."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stream is None:
            self._sampler.load_state_dict(self._state)
            self._stream = _stream(self._reader, map(self._request, self._sampler), self._num_workers, self._device)
        try:
            request, batch = _batch(next(self._stream), self._classes, self._device)
        except BaseException:
            self.close()
            raise
        assert request.index is not None
        self._state = self._sampler.state_after(request.index)
        return batch

    def _request(self, index: IndexBatch) -> "_Request":
        number, count = self._part
        if len(index.rows) % count:
            raise ConfigError(
                f"sampler: got batches of {len(index.rows)} images, expected a multiple of {count} processes."
            )
        size = len(index.rows) // count
        positions = range(number * size, (number + 1) * size)
        seeds = [derive_seed(self._seed, draw, index.epoch, index.index, i) for draw in self._draws for i in positions]
        batch = self._rows[index.rows]
        own = batch[positions.start : positions.stop]
        return _Request(np.tile(own, len(self._draws)), seeds, index, batch, len(self._draws))

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last returned batch, whatever was read ahead."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the batch at which ``state`` was taken; drop batches that were read ahead."""
        self.close()
        self._sampler.load_state_dict(state)
        self._state = self._sampler.state_dict()

    def close(self) -> None:
        """End the workers. The next batch starts new ones, so nothing is lost."""
        _end(self._stream)
        self._stream = None


class EvalBatches:
    """Batches of the images ``rows`` [N] in this order, as often as iterated. Labels are the table's.

    The other arguments are those of ``TrainBatches``; the transform must not be random, unless ``seeds`` [N] are given.
    """

    def __init__(
        self,
        table: ImageTable,
        rows: IntArray,
        *,
        images: Inputs,
        transform: Transform,
        batch_size: int,
        device: torch.device | str = "cpu",
        num_workers: int | None = 0,
        seeds: Sequence[int] | None = None,
    ) -> None:
        check_at_least(1, batch_size=batch_size)
        if transform.is_random and seeds is None:
            raise ConfigError("the evaluation transform is random. Use center_crop or identity.")
        self._rows = np.asarray(rows, dtype=np.int64)
        self._labels = table.labels
        self._batch_size = batch_size
        self._device = torch.device(device)
        self._num_workers = _resolve_workers(num_workers, self._device, images)
        self._reader = _Reader(images, transform)
        self._seeds = [0] * len(self._rows) if seeds is None else seeds

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        parts = [slice(i, i + self._batch_size) for i in range(0, len(self._rows), self._batch_size)]
        requests = [_Request(self._rows[part], self._seeds[part]) for part in parts]
        stream = _stream(self._reader, requests, min(self._num_workers, len(parts)), self._device)
        try:
            for read in stream:
                yield _batch(read, self._labels, self._device)[1]
        finally:
            _end(stream)


@dataclass(frozen=True)
class _Request:
    """Table rows to read ([P], of all views one after the other), a seed for each, and the whole batch they are of."""

    rows: IntArray
    seeds: Sequence[int]
    index: IndexBatch | None = None
    batch: IntArray | None = None  # [B] table rows; None: those that are read
    views: int = 1


# The request with its images [B, 3, H, W] and which of them to mirror, or an error: as a value, because the loader
# would wrap one that a worker raises into a message with that worker's traceback.
_Read = tuple[_Request, Tensor, Tensor] | DmlbenchError


class _Reader(Dataset[_Read]):
    def __init__(self, images: Inputs, transform: Transform) -> None:
        takes_batches = transform.works_on == "batch"
        if not isinstance(images, FeatureView) and takes_batches != isinstance(images, Tensor):
            wanted = "a tensor of all images" if takes_batches else "an ImageSource of single images"
            raise ConfigError(f"{type(transform).__name__}: got {type(images).__name__}, expected {wanted}.")
        self._images, self._transform = images, transform

    def __getitem__(self, request: _Request) -> _Read:
        try:
            if isinstance(self._images, FeatureView):
                records = self._images.read(request.rows, list(request.seeds))
                return request, records, torch.zeros(len(records), dtype=torch.bool)
            if isinstance(self._transform, ShiftTransform):
                assert isinstance(self._images, Tensor)
                images = self._transform(self._images, torch.from_numpy(request.rows), request.seeds)
                return request, images, torch.zeros(len(images), dtype=torch.bool)
            assert not isinstance(self._images, Tensor)
            return request, *_cut(self._images, self._transform, request)
        except DmlbenchError as error:
            return error


def _cut(source: ImageSource, transform: CropTransform, request: _Request) -> tuple[Tensor, Tensor]:
    """Images [B, 3, crop, crop] in channels-last order, not yet mirrored, and which of them are to be [B]."""
    rows = request.rows.tolist()
    read = {row: source.read(row) for row in dict.fromkeys(rows)}  # a second view costs no second decoding
    images = [read[row] for row in rows]
    cut = transform.plan(np.array([image.shape[:2] for image in images]), request.seeds)
    result = np.empty((len(images), transform.crop, transform.crop, 3), dtype=np.uint8)
    for out, image, box in zip(result, images, cut.boxes.tolist(), strict=True):
        out[:] = transform.cut(image, box)
    pixels = torch.from_numpy(result).permute(0, 3, 1, 2)
    return transform.augmented(pixels, request.seeds), torch.from_numpy(cut.flip)


def _batch(read: _Read, classes: IntArray, device: torch.device) -> tuple[_Request, Batch]:
    """The batch on the device, labelled by the ``classes`` of table rows."""
    if isinstance(read, DmlbenchError):
        raise read
    request, images, flip = read
    rows = request.rows if request.batch is None else request.batch

    def make() -> Batch:
        on_device = to_device(images, device)
        if bool(flip.any()):
            chosen = to_device(flip.nonzero()[:, 0], device)
            on_device[chosen] = on_device[chosen].flip(-1)
        first, *second = on_device.chunk(request.views)
        return Batch(first, torch.from_numpy(classes[rows]), torch.from_numpy(rows), *second)

    return request, ahead_of_computing(device, make)


_MOST_WORKERS = 256


def check_workers(num_workers: int | None) -> None:
    """Raise ConfigError unless a loader can have as many workers."""
    if num_workers is not None and not 0 <= num_workers <= _MOST_WORKERS:
        raise ConfigError(f"num_workers: got {num_workers}, expected 0 to {_MOST_WORKERS}, or null.")


def _resolve_workers(num_workers: int | None, device: torch.device, images: Inputs) -> int:
    check_workers(num_workers)
    if isinstance(images, Tensor | FeatureView):
        return 0  # nothing is decoded
    if num_workers is not None:
        return num_workers
    return min(_GPU_WORKERS, available_cores()) if device.type == "cuda" else 1


def _stream(
    reader: Dataset[_Read], requests: Iterable[_Request], num_workers: int, device: torch.device
) -> Iterator[_Read]:
    if num_workers == 0:
        return (reader[request] for request in requests)
    loader: DataLoader[_Read] = DataLoader(
        reader,
        batch_size=None,
        sampler=requests,
        num_workers=num_workers,
        worker_init_fn=_prepare_worker,
        collate_fn=_identity,
        pin_memory=device.type == "cuda",
        # Without one of its own it would draw from the global generator, and numbers would depend on num_workers.
        generator=torch.Generator().manual_seed(0),
    )
    # Workers inherit the mask, so that no signal can end one before it ignores them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        stream = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _open_streams.add(stream)
    return stream


def _identity(read: Any) -> Any:
    return read  # the default would turn the request's arrays into tensors


def _prepare_worker(worker: int) -> None:
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group. A worker killed by one would make the main process
    # fail in the middle of saving.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


_open_streams: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _end(stream: Iterator[_Read] | None) -> None:
    """End the stream's workers now, not when the last reference is dropped."""
    shut_down = getattr(stream, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
        _open_streams.discard(stream)


@atexit.register
def _end_all() -> None:
    # Runs before multiprocessing's own exit handler, which would send SIGTERM and then wait forever.
    for stream in list(_open_streams):
        _end(stream)
