"""From table rows to batches of images, in this process or in workers, with the same numbers either way."""

import atexit
import logging
import signal
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dmlbench.data.samplers import ClassBalancedBatchSampler, IndexBatch
from dmlbench.data.table import read_image
from dmlbench.data.transforms import Transform
from dmlbench.runtime import derive_seed
from dmlbench.types import Batch, ConfigError, DataError, DmlbenchError, ImageTable, IntArray

logger = logging.getLogger(__name__)


class TrainBatches:
    """An endless iterator over training batches whose state is that of the last batch that was handed out.

    The randomness of an image comes from (seed, epoch, number of the batch in it, position in the batch), so the
    images are the same for any number of workers and after resuming. Images are uint8 [B, 3, H, W] RGB.
    """

    def __init__(
        self,
        table: ImageTable,
        rows: IntArray,
        *,
        class_index: IntArray,
        sampler: ClassBalancedBatchSampler,
        transform: Transform,
        seed: int,
        num_workers: int = 0,
    ) -> None:
        """Set up; nothing is read and no worker is started before the first batch is asked for.

        Args:
            table: the data set.
            rows: [N] training rows of it.
            class_index: [table.num_classes] training class 0..C-1 of each label of the table, -1 for others
                (``dmlbench.data.protocols.class_index`` makes it).
            sampler: draws positions into ``rows``; it was made from their labels.
            transform: of training images.
            seed: of the transform's randomness.
            num_workers: processes that read ahead; 0 reads in this one.

        Raises:
            ConfigError: a negative number of workers, or a sampler of other rows.
        """
        self._rows = np.asarray(rows, dtype=np.int64)
        self._class_index = np.asarray(class_index, dtype=np.int64)
        _check_workers(num_workers)
        if len(sampler.labels) != len(self._rows):
            raise ConfigError(
                f"the sampler draws from {len(sampler.labels)} labels, but there are {len(self._rows)} rows"
            )
        if (self._class_index[table.labels[self._rows]] < 0).any():
            raise ConfigError(
                "class_index has no number for some classes of the training rows; make it from these rows"
            )
        self._sampler = sampler
        self._num_workers = num_workers
        self._reader = _TrainReader(table, self._rows, transform, seed)
        self._stream: Iterator[_Read] | None = None
        self._state = sampler.state_dict()
        self._labels = table.labels

    def __len__(self) -> int:
        """Batches of a nominal epoch; the iterator itself does not end."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stream is None:
            self._sampler.load_state_dict(self._state)
            self._stream = _stream(self._reader, self._sampler, self._num_workers)
        try:
            index, images = _unwrap(next(self._stream))
        except BaseException:
            self.close()
            raise
        self._state = self._sampler.state_after(index)
        ids = self._rows[index.rows]
        labels = self._class_index[self._labels[ids]]
        return Batch(images=images, labels=torch.from_numpy(labels), ids=torch.from_numpy(ids))

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last batch that was handed out, whatever was read ahead."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch at which ``state`` was taken; batches that were read ahead are dropped.

        Raises:
            RunError: the state is that of another sampler.
        """
        self.close()
        self._sampler.load_state_dict(state)
        self._state = self._sampler.state_dict()

    def close(self) -> None:
        """End the workers. The next batch starts new ones, so nothing is lost."""
        _end(self._stream)
        self._stream = None


class EvalBatches:
    """Batches of images in row order; can be gone through again and again. Labels are the table's."""

    def __init__(
        self, table: ImageTable, rows: IntArray, *, transform: Transform, batch_size: int, num_workers: int = 0
    ) -> None:
        """
        Args:
            table: the data set.
            rows: [N] rows of it, embedded in this order; the last batch may be smaller.
            transform: of evaluation images; not a random one.
            batch_size: images of a batch.
            num_workers: processes that read ahead; 0 reads in this one.

        Raises:
            ConfigError: a batch size below 1, a negative number of workers or a random transform.
        """
        _check_workers(num_workers)
        if batch_size < 1:
            raise ConfigError(f"batch_size ({batch_size}) must be at least 1")
        if transform.is_random:
            raise ConfigError("the evaluation transform is random; use one that is not, such as mlrc_eval or identity")
        self._rows = np.asarray(rows, dtype=np.int64)
        self._labels = table.labels
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._reader = _EvalReader(table, transform)

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        parts = [self._rows[i : i + self._batch_size] for i in range(0, len(self._rows), self._batch_size)]
        stream = _stream(self._reader, parts, min(self._num_workers, len(parts)))
        try:
            for read in stream:
                ids, images = _unwrap(read)
                yield Batch(images=images, labels=torch.from_numpy(self._labels[ids]), ids=torch.from_numpy(ids))
        finally:
            _end(stream)


def read_images(table: ImageTable, rows: IntArray, *, transform: Transform, seeds: Sequence[int]) -> Tensor:
    """Images [B, 3, H, W] uint8 RGB of the rows; grey ones have three equal channels.

    Raises:
        DataError: an image cannot be read, or a transform of whole batches meets images of different sizes.
    """
    if transform.works_on == "image":
        images = [transform(_pil(table, int(row)), seed) for row, seed in zip(rows, seeds, strict=True)]
        return torch.stack(images)
    if table.pixels is not None:
        pixels = np.ascontiguousarray(table.pixels[rows])
        stack = torch.from_numpy(pixels)
        stack = stack[:, None] if stack.ndim == 3 else stack.permute(0, 3, 1, 2)  # [B, C, H, W]
    else:
        stack = _stack(table, rows)
    stack = transform(stack, seeds)
    return stack.expand(-1, 3, -1, -1).contiguous()


def _pil(table: ImageTable, row: int) -> Image.Image:
    if table.pixels is None:
        return read_image(Path(table.root) / str(table.paths[row]))
    return Image.fromarray(np.asarray(table.pixels[row])).convert("RGB")


def _stack(table: ImageTable, rows: IntArray) -> Tensor:
    """[B, 3, H, W] uint8 from image files of one size."""
    images = [_pil(table, int(row)) for row in rows]
    expected = images[0].size
    for row, image in zip(rows, images, strict=True):
        if image.size != expected:
            raise DataError(
                f"images of '{table.name}' differ in size ('{table.paths[rows[0]]}' is {expected[0]} x {expected[1]}, "
                f"'{table.paths[row]}' is {image.size[0]} x {image.size[1]}), but the transform takes whole batches; "
                "use one that crops, such as mlrc_train and mlrc_eval"
            )
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)


# What a reader returns: the request and its images, or the error instead of them. An error travels as a value because
# the loader would wrap one that is raised in a worker into a message with that worker's traceback.
_Read = tuple[Any, Tensor] | DmlbenchError


class _TrainReader(Dataset[_Read]):
    def __init__(self, table: ImageTable, rows: IntArray, transform: Transform, seed: int) -> None:
        self._table, self._rows, self._transform, self._seed = table, rows, transform, seed

    def __getitem__(self, request: IndexBatch) -> _Read:
        count = len(request.rows)
        seeds = [0] * count
        if self._transform.is_random:
            seeds = [derive_seed(self._seed, "image", request.epoch, request.index, i) for i in range(count)]
        try:
            return request, read_images(self._table, self._rows[request.rows], transform=self._transform, seeds=seeds)
        except DmlbenchError as error:
            return error


class _EvalReader(Dataset[_Read]):
    def __init__(self, table: ImageTable, transform: Transform) -> None:
        self._table, self._transform = table, transform

    def __getitem__(self, request: IntArray) -> _Read:
        try:
            return request, read_images(self._table, request, transform=self._transform, seeds=[0] * len(request))
        except DmlbenchError as error:
            return error


def _unwrap(read: _Read) -> tuple[Any, Tensor]:
    if isinstance(read, DmlbenchError):
        raise read
    return read


def _stream(reader: Dataset[_Read], requests: Iterable[Any], num_workers: int) -> Iterator[_Read]:
    """What the reader returns for each request, in order."""
    if num_workers == 0:
        return (reader[request] for request in requests)
    loader: DataLoader[_Read] = DataLoader(
        reader,
        batch_size=None,
        sampler=requests,
        num_workers=num_workers,
        worker_init_fn=_prepare_worker,
        collate_fn=_as_is,
        # Without one of its own it would draw from the global generator, and numbers would depend on num_workers.
        generator=torch.Generator().manual_seed(0),
    )
    stream = iter(loader)
    _open_streams.add(stream)
    return stream


def _as_is(read: Any) -> Any:
    # The default would turn the request's arrays into tensors.
    return read


def _prepare_worker(worker: int) -> None:
    """Signals are the main process's affair.

    Ctrl-C and a scheduler's SIGTERM reach the whole process group. A worker that died of it would make the main
    process fail in the middle of saving; instead it goes on until the main process ends it, or is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


_open_streams: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _end(stream: Iterator[_Read] | None) -> None:
    """End the stream's workers now. Dropping the last reference does it too, but who holds one?"""
    shut_down = getattr(stream, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
        _open_streams.discard(stream)


@atexit.register
def _end_all() -> None:
    # Runs before multiprocessing's own exit handler, which would send SIGTERM and then wait forever.
    for stream in list(_open_streams):
        _end(stream)


def _check_workers(num_workers: int) -> None:
    if num_workers < 0:
        raise ConfigError(f"num_workers ({num_workers}) must be at least 0")
