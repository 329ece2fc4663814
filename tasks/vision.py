"""Image sets that come with no package: torchvision's loaders, from `data.directory` or, if asked, the network."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tasks.base import TaskData, TaskError, TensorExamples
from tasks.classification import Classification
from tasks.models import ResNet8
from tasks.sources import cache_directory

# Where Debian's package dataset-fashion-mnist puts the four files.
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

Arrays = tuple[np.ndarray, np.ndarray]


class FashionMnist(Classification):
    """Articles of clothing: 60 000 training and 10 000 test images, 28x28 gray, 10 classes."""

    name: ClassVar[str] = "fashion-mnist"
    learning_rate: ClassVar[float] = 0.003
    num_classes: ClassVar[int] = 10
    input_shape: ClassVar[tuple[int, ...]] = (1, 28, 28)

    def build_model(self) -> ResNet8:
        """ResNet-8 of width 16, 78 thousand parameters."""
        return ResNet8(1, self.num_classes)

    def load(self) -> TaskData:
        """The four gzip files from `data.directory` or Debian's package, or torchvision's FashionMNIST.

        Raises:
            TaskError: the images are neither there nor downloaded.
        """
        folder = Path(self.data.directory) if self.data.directory else DEBIAN_FASHION_MNIST
        if (folder / "train-images-idx3-ubyte.gz").is_file():
            train, test = _idx_pair(self.name, folder, "train"), _idx_pair(self.name, folder, "t10k")
        else:
            remedy = "install Debian's dataset-fashion-mnist or set data.directory"
            train, test = _torchvision(self, "FashionMNIST", folder, remedy)
        return _task_data(train, test, mean=(0.286,), deviation=(0.353,))


class Cifar10(Classification):
    """Small colour photos: 50 000 training and 10 000 test images, 32x32, 10 classes."""

    name: ClassVar[str] = "cifar10"
    learning_rate: ClassVar[float] = 0.003
    num_classes: ClassVar[int] = 10
    input_shape: ClassVar[tuple[int, ...]] = (3, 32, 32)

    def build_model(self) -> ResNet8:
        """ResNet-8 of width 16, 78 thousand parameters."""
        return ResNet8(3, self.num_classes)

    def load(self) -> TaskData:
        """torchvision's CIFAR10.

        Raises:
            TaskError: the images are neither in `data.directory` nor downloaded.
        """
        folder = Path(self.data.directory) if self.data.directory else cache_directory()
        remedy = "set data.directory to the folder that holds cifar-10-batches-py"
        train, test = _torchvision(self, "CIFAR10", folder, remedy)
        return _task_data(train, test, mean=(0.491, 0.482, 0.447), deviation=(0.247, 0.243, 0.262))


def _torchvision(task: Classification, kind: str, looked_in: Path, remedy: str) -> tuple[Arrays, Arrays]:
    """Training and test images (N, H, W[, C]) uint8 with their classes, from one of torchvision's data sets."""
    from torchvision import datasets

    root = Path(task.data.directory) if task.data.directory else cache_directory()
    make: Callable[..., Any] = getattr(datasets, kind)
    try:
        sets = [make(str(root), train=train, download=task.data.download) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        if task.data.download:
            reason = " ".join(str(error).split())
            raise TaskError(f"task {task.name!r}: cannot download to {root}: {reason}; or {remedy}") from None
        raise TaskError(f"task {task.name!r}: no images in {looked_in}; {remedy}, or data.download=true") from None
    train, test = ((np.asarray(one.data), np.asarray(one.targets, dtype=np.int64)) for one in sets)
    return train, test


def _idx_pair(task: str, folder: Path, prefix: str) -> Arrays:
    """Images and classes from a pair of gzipped IDX files."""
    try:
        with gzip.open(folder / f"{prefix}-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), dtype=np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(folder / f"{prefix}-labels-idx1-ubyte.gz") as file:
            classes = np.frombuffer(file.read(), dtype=np.uint8, offset=8).astype(np.int64)
    except (OSError, EOFError, ValueError) as error:
        raise TaskError(f"task {task!r}: cannot read {prefix} images in {folder}: {error}") from None
    return images, classes


def _task_data(train: Arrays, test: Arrays, mean: tuple[float, ...], deviation: tuple[float, ...]) -> TaskData:
    return TaskData(
        train=_examples(*train, mean, deviation),
        test=_examples(*test, mean, deviation),
        partition_labels=train[1],
    )


def _examples(
    images: np.ndarray, classes: np.ndarray, mean: tuple[float, ...], deviation: tuple[float, ...]
) -> TensorExamples:
    pixels = torch.from_numpy(np.array(images)).float().div_(255.0)
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    shape = (1, -1, 1, 1)
    inputs = pixels.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(deviation).view(shape))
    return TensorExamples(inputs=inputs, targets=torch.from_numpy(classes))
