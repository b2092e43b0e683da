"""Loading images: cached against decoded, building the cache, long lists, memory, and whether a training step waits.

Everything that is compared runs in this one process, in turns; ratios are of medians. Decoders other than Pillow and
torchvision (simplejpeg, opencv-python-headless) are compared where they are installed.

python scripts/bench_data.py [--images FOLDER] [--parts loader cache lists memory step] [--threads 1] [--rounds 7]
"""

import argparse
import importlib.util
import os
import resource
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from dmlbench.data.batches.loaders import TrainBatches, _cut, _Request
from dmlbench.data.batches.samplers import ClassBalancedBatchSampler
from dmlbench.data.batches.transforms import CropTransform, random_resized_crop
from dmlbench.data.images import image_cache
from dmlbench.data.images.image_cache import CachedImages, cached_images
from dmlbench.data.images.sources import DecodedImages, ImageSource, Kernel
from dmlbench.data.protocols import class_index
from dmlbench.data.readers.folder import folder
from dmlbench.runtime import available_cores, derive_seed, device_name, select_device
from dmlbench.types import ImageTable

CROP, RESIZE, SCALE = 227, 256, (0.16, 1.0)
PARTS = ("loader", "cache", "lists", "memory", "step")


def in_turns(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each action, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def print_rates(seconds: dict[str, float], images: int, base: str) -> None:
    for name, value in seconds.items():
        print(f"  {name:<58} {images / value:8.0f} images/s {seconds[base] / value:7.2f} x")


def synthetic_photographs(root: Path, count: int = 96) -> ImageTable:
    """JPEGs of 500 x 400, as detailed and as strongly compressed as CUB's (about 100 kB at quality 90)."""
    random = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(random.integers(0, 255, (25, 32, 3), dtype=np.uint8)).resize((500, 400), Image.BICUBIC)
        pixels = np.asarray(coarse) + random.normal(0, 12, (400, 500, 3))
        file = root / f"class{i % 8}" / f"{i:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=90)
    return folder(root, name="photographs")


def train_transform(kernel: Kernel) -> CropTransform:
    return random_resized_crop(crop=CROP, resize=RESIZE, scale=SCALE, kernel=kernel)


def read_through(source: ImageSource, transform: CropTransform, rows: np.ndarray) -> None:
    """What the loader does for each batch of 32, in this process."""
    for start in range(0, len(rows), 32):
        part = rows[start : start + 32]
        _cut(source, transform, _Request(part, [derive_seed(0, start, i) for i in range(len(part))]))


def bench_loader(table: ImageTable, cache_dir: Path, rounds: int) -> None:
    print(f"training images per second and core, JPEG to uint8 {CROP} x {CROP} (mlrc), one thread")
    rows = np.arange(min(len(table), 96))
    names = [os.path.join(table.root, table.paths[row]) for row in rows]
    crop = [v2.Resize(RESIZE), v2.RandomResizedCrop(CROP, scale=SCALE), v2.RandomHorizontalFlip()]
    to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.2] * 3)]
    peers = {
        "torchvision v2 on PIL, float and normalized": v2.Compose([*crop, *to_float]),
        "torchvision v2 on PIL": v2.Compose([*crop, v2.PILToTensor()]),
    }

    def peer(pipeline: v2.Compose) -> Callable[[], object]:
        return lambda: torch.stack([pipeline(Image.open(name).convert("RGB")) for name in names])

    def tensors() -> torch.Tensor:
        pipeline = v2.Compose(crop)
        files = (torch.from_numpy(np.fromfile(name, dtype=np.uint8)) for name in names)
        return torch.stack([pipeline(decode_jpeg(file, ImageReadMode.RGB)) for file in files])

    actions: dict[str, Callable[[], object]] = {name: peer(pipeline) for name, pipeline in peers.items()}
    actions["torchvision decode_jpeg + v2 on uint8 tensors"] = tensors
    kernels: tuple[Kernel, ...] = ("pillow", "torch")
    for kernel in kernels:
        transform = train_transform(kernel)
        sources: dict[str, ImageSource] = {
            "decoded": DecodedImages(table, short_side=RESIZE, kernel=kernel),
            "cached": cached_images(table, cache_dir, short_side=RESIZE, kernel=kernel),
        }
        for name, source in sources.items():
            actions[f"dmlbench {name}, kernel={kernel}"] = lambda s=source, t=transform: read_through(s, t, rows)
    print_rates(in_turns(actions, rounds), len(rows), "torchvision v2 on PIL")
    small = [cached_images(table, cache_dir, short_side=RESIZE).read(row) for row in rows]
    apart = []
    for row, image in enumerate(small):
        box = train_transform("pillow").plan(np.array([image.shape[:2]]), [row]).boxes[0]
        both = [train_transform(kernel).cut(image, box).astype(int) for kernel in kernels]
        apart.append(np.abs(both[0] - both[1]))
    print(
        f"  kernel=torch against pillow: at most {max(a.max() for a in apart)} grey level apart, "
        f"{100 * np.mean([(a > 0).mean() for a in apart]):.3f} % of the values differ"
    )


def decoders() -> dict[str, Callable[[str], object]]:
    """File name -> pixels, with every decoder that is installed."""
    found: dict[str, Callable[[str], object]] = {
        "Pillow": lambda name: Image.open(name).load(),
        "torchvision decode_jpeg": lambda name: decode_jpeg(torch.from_numpy(np.fromfile(name, dtype=np.uint8))),
    }
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        found["simplejpeg"] = lambda name: simplejpeg.decode_jpeg(Path(name).read_bytes())
    if importlib.util.find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)

        def area(name: str) -> object:
            image = cv2.imdecode(np.fromfile(name, dtype=np.uint8), cv2.IMREAD_COLOR)
            height, width = (RESIZE * side // min(image.shape[:2]) for side in image.shape[:2])
            return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)

        found["opencv"] = lambda name: cv2.imdecode(np.fromfile(name, dtype=np.uint8), cv2.IMREAD_COLOR)
        found["opencv + its resize by areas"] = area
    return found


def bench_cache(table: ImageTable, rounds: int, threads: int) -> None:
    print(f"building the cache (sizes, decode, resize, write, sync), {threads} threads, against decoding alone")
    names = [os.path.join(table.root, name) for name in table.paths]

    def build(kernel: Kernel) -> None:
        with tempfile.TemporaryDirectory() as folder_of_one:
            cached_images(table, folder_of_one, short_side=RESIZE, kernel=kernel, num_threads=threads)

    def alone(decode: Callable[[str], object]) -> Callable[[], object]:
        def action() -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(decode, names))

        return action

    actions: dict[str, Callable[[], object]] = {f"{name} alone": alone(decode) for name, decode in decoders().items()}
    actions["dmlbench cache, kernel=pillow"] = lambda: build("pillow")
    actions["dmlbench cache, kernel=torch"] = lambda: build("torch")
    seconds = in_turns(actions, rounds)
    fastest = min(
        (name for name in seconds if "dmlbench" not in name and "resize" not in name), key=seconds.__getitem__
    )
    print_rates(seconds, len(names), fastest)


def bench_lists() -> None:
    from dmlbench.data.readers.sop import sop

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "Stanford_Online_Products"
        root.mkdir()
        (root / "bicycle_final").mkdir()
        row, first = 0, 1
        for half, classes, images in (("train", 11_318, 59_551), ("test", 11_316, 60_502)):
            of = first + np.minimum(np.arange(images) // 2, classes - 1)
            lines = ["image_id class_id super_class_id path\n"]
            for k, c in enumerate(of.tolist()):
                name = f"bicycle_final/{c:06d}_{k}.JPG"
                if row % 10_000 == 0:  # file systems limit the links of one file
                    one = root / name
                    one.write_bytes(b"x")
                else:
                    os.link(one, root / name)
                row += 1
                lines.append(f"{row} {c} 1 {name}\n")
            (root / f"Ebay_{half}.txt").write_text("".join(lines))
            first += classes
        seconds = in_turns({"sop": lambda: sop(root)}, 3)["sop"]
        print(f"SOP's lists, {row} rows: read, checked, every file looked at, fingerprint: {seconds:.2f} s")


def bench_memory() -> None:
    count, height, width = 60_000, 256, 288  # 13.3 GB, as SOP's 120,053 images of 256 on the short side take
    size = 3 * height * width
    index = np.zeros(count, dtype=image_cache._ENTRY)
    index["offset"] = size * np.arange(count)
    index["height"], index["width"], index["checksum"] = height, width, zlib.crc32(bytes(size))
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "sparse.images"
        path.touch()
        os.truncate(path, size * count)
        cached = CachedImages(path, index, np.arange(count))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        started = time.perf_counter()
        for row in np.random.default_rng(0).permutation(count):
            cached.read(row).sum(dtype=np.int64)
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"a cache of {size * count / 1e9:.1f} GB, every byte read once in random order in {seconds:.0f} s: peak "
        f"resident memory {before / 1e6:.0f} -> {after / 1e6:.0f} MB"
    )


def bench_step(table: ImageTable, cache_dir: Path, steps: int) -> None:
    """What a ResNet50 step needs and what the loader gives while the step runs."""
    import timm

    device = select_device("auto")
    batch_size = 128 if device.type == "cuda" else 16
    model = timm.create_model("resnet50", num_classes=128).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    rows = np.arange(len(table))
    sampler = ClassBalancedBatchSampler(table.labels, classes_per_batch=4, images_per_class=batch_size // 4, seed=0)
    batches = TrainBatches(
        table, rows, images=cached_images(table, cache_dir, short_side=RESIZE), class_index=class_index(table, rows),
        sampler=sampler, transform=train_transform("pillow"), seed=0, device=device, num_workers=None,
    )  # fmt: skip

    def step(images: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(images.float() / 255).square().mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    held = next(batches).images
    step(held)
    waited = computed = 0.0
    for _ in range(steps):
        started = time.perf_counter()
        images = next(batches).images
        arrived = time.perf_counter()
        step(images)
        waited, computed = waited + arrived - started, computed + time.perf_counter() - arrived
    batches.close()
    alone = in_turns({"step": lambda: step(held)}, max(2, steps // 2))["step"]
    started = time.perf_counter()
    for _ in range(20):
        next(batches)
    delivered = 20 * batch_size / (time.perf_counter() - started)
    batches.close()
    share = 100 * waited / (waited + computed)
    print(
        f"resnet50 at {CROP} px, batches of {batch_size}, on {device_name(device)}: needs {batch_size / alone:.1f} "
        f"images/s, the loader delivers {delivered:.0f}; {share:.2f} % of the time of {steps} steps was waiting; a "
        f"step took {computed / steps:.2f} s ({alone:.2f} s without loader)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="a folder class/image.jpg instead of synthetic photographs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=available_cores(), help="for building the cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    print(f"{device_name(torch.device('cpu'))}, Pillow {Image.__version__}, torch {torch.__version__}")
    if "memory" in options.parts:  # first: the peak is that of the whole process
        bench_memory()
    with tempfile.TemporaryDirectory() as temporary:
        images = Path(temporary) / "images"
        table = folder(options.images, name="photographs") if options.images else synthetic_photographs(images)
        sizes = [os.path.getsize(os.path.join(table.root, name)) for name in table.paths]
        print(f"{len(table)} images of {np.mean(sizes) / 1e3:.0f} kB on average")
        if "cache" in options.parts:
            bench_cache(table, options.rounds, options.threads)
        if "loader" in options.parts:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            bench_loader(table, Path(temporary), options.rounds)
            torch.set_num_threads(threads)
        if "step" in options.parts:
            bench_step(table, Path(temporary), options.steps)
    if "lists" in options.parts:
        bench_lists()


if __name__ == "__main__":
    main()
