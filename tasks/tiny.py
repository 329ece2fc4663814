"""The suite for tests and first tries: three tasks that train in seconds on data of scikit-learn and scikit-image."""

from __future__ import annotations

from typing import ClassVar

import torch

from tasks.base import TaskData, TensorExamples
from tasks.classification import Classification
from tasks.data import Once
from tasks.driving import Segmentation
from tasks.models import SmallConvNet, UNet
from tasks.scenes import NUM_MASK_CLASSES, Scenes, SceneStyle, train_and_test
from tasks.sources import faces, small_digits

NUM_TRAIN_DIGITS = 1400
NUM_TRAIN_FACES = 150
NUM_TRAIN_SCENES = 800
NUM_TEST_SCENES = 100
STYLE = SceneStyle(side=32, digit_sides=(12, 16), max_objects=2, max_regions=3)

_scenes: Once[tuple[Scenes, Scenes]] = Once()


def tiny_scenes(seed: int) -> tuple[Scenes, Scenes]:
    """Training and test scenes of 32x32 pixels, composed once per process and seed."""

    def compute() -> tuple[Scenes, Scenes]:
        return train_and_test(
            *small_digits(seed),
            num_train_digits=NUM_TRAIN_DIGITS,
            num_train=NUM_TRAIN_SCENES,
            num_test=NUM_TEST_SCENES,
            seed=seed,
            style=STYLE,
        )

    return _scenes.get(seed, compute)


class TinyDigits(Classification):
    """Handwritten digits of 8x8 pixels: 1400 training and 397 test images, 10 classes."""

    name: ClassVar[str] = "tiny-digits"
    learning_rate: ClassVar[float] = 0.01
    num_classes: ClassVar[int] = 10
    input_shape: ClassVar[tuple[int, ...]] = (1, 8, 8)

    def build_model(self) -> SmallConvNet:
        """Two convolutions, 10 thousand parameters."""
        return SmallConvNet(self.num_classes)

    def load(self) -> TaskData:
        """scikit-learn's digits, shuffled by the seed."""
        images, classes = small_digits(self.data.seed)
        inputs = (torch.from_numpy(images).float().unsqueeze(1) - 5.0) / 6.0
        return _split(inputs, torch.from_numpy(classes), NUM_TRAIN_DIGITS)


class TinyFaces(Classification):
    """Whether a crop of 25x25 pixels shows a face: 150 training and 50 test images."""

    name: ClassVar[str] = "tiny-faces"
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 0.003
    num_classes: ClassVar[int] = 2
    input_shape: ClassVar[tuple[int, ...]] = (1, 25, 25)

    def build_model(self) -> SmallConvNet:
        """Two convolutions, 2 thousand parameters."""
        return SmallConvNet(self.num_classes, width=8)

    def load(self) -> TaskData:
        """scikit-image's lfw_subset, shuffled by the seed."""
        images, classes = faces(self.data.seed)
        inputs = (torch.from_numpy(images).unsqueeze(1) - 0.5) / 0.25
        return _split(inputs, torch.from_numpy(classes), NUM_TRAIN_FACES)


class TinyScenes(Segmentation):
    """The pixels of a composed 32x32 scene: building, vegetation, road or object; 800 training and 100 test scenes."""

    name: ClassVar[str] = "tiny-scenes"
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 0.01
    style: ClassVar[SceneStyle] = STYLE

    def build_model(self) -> UNet:
        """U-Net of width 8, 21 thousand parameters."""
        return UNet(NUM_MASK_CLASSES, width=8)

    def scenes(self) -> tuple[Scenes, Scenes]:
        """Training and test scenes."""
        return tiny_scenes(self.data.seed)


def _split(inputs: torch.Tensor, targets: torch.Tensor, num_train: int) -> TaskData:
    return TaskData(
        train=TensorExamples(inputs=inputs[:num_train], targets=targets[:num_train]),
        test=TensorExamples(inputs=inputs[num_train:], targets=targets[num_train:]),
        partition_labels=targets[:num_train].numpy(),
    )
