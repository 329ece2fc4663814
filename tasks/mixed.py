"""The mixed suite: a sensor task whose clients are people, a table, and an image task (`digits` of the driving suite).

`fashion-mnist` (tasks.vision) can take the place of `digits` where its files are present.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from tasks.base import TaskData, TensorExamples
from tasks.classification import Classification
from tasks.models import Mlp, SensorNet
from tasks.sources import watch_recordings

WINDOW = 100
STRIDE = 50
HELD_OUT_SUBJECTS = (9, 10)


class Watch(Classification):
    """Which of 7 shoulder exercises a smartwatch saw, from 2 s of 6 channels at 50 Hz; tested on unseen subjects.

    Each of the 8 training subjects is a natural client (partitioner `natural-id`).
    """

    name: ClassVar[str] = "watch"
    learning_rate: ClassVar[float] = 0.003
    num_classes: ClassVar[int] = 7
    input_shape: ClassVar[tuple[int, ...]] = (6, WINDOW)

    def build_model(self) -> SensorNet:
        """1-D convolutions, 15 thousand parameters."""
        return SensorNet(6, self.num_classes)

    def load(self) -> TaskData:
        """Windows of seglearn's recordings, scaled by the training subjects' mean and deviation."""
        recordings = watch_recordings()
        windows, owners = _windows(recordings["samples"], recordings["lengths"])
        classes, subjects = recordings["exercises"][owners], recordings["subjects"][owners]
        test = np.isin(subjects, HELD_OUT_SUBJECTS)
        mean = windows[~test].mean(axis=(0, 2), keepdims=True)
        deviation = windows[~test].std(axis=(0, 2), keepdims=True)
        inputs = torch.from_numpy((windows - mean) / deviation)
        targets = torch.from_numpy(classes)
        return TaskData(
            train=TensorExamples(inputs=inputs[~test], targets=targets[~test]),
            test=TensorExamples(inputs=inputs[test], targets=targets[test]),
            partition_labels=classes[~test],
            natural_ids=subjects[~test],
        )


class BreastCancer(Classification):
    """Whether a tumour is benign, from 30 measurements of cell nuclei (Wisconsin): 400 training, 169 test rows."""

    name: ClassVar[str] = "breast-cancer"
    batch_size: ClassVar[int] = 16
    learning_rate: ClassVar[float] = 0.003
    num_classes: ClassVar[int] = 2
    input_shape: ClassVar[tuple[int, ...]] = (30,)

    def build_model(self) -> Mlp:
        """Two hidden layers, 2 thousand parameters."""
        return Mlp(30, self.num_classes)

    def load(self) -> TaskData:
        """The table of scikit-learn, shuffled by the seed, scaled by the training rows' mean and deviation."""
        from sklearn.datasets import load_breast_cancer

        table: Any = load_breast_cancer()
        order = np.random.default_rng(self.data.seed).permutation(len(table.target))
        train, test = order[:400], order[400:]
        mean, deviation = table.data[train].mean(axis=0), table.data[train].std(axis=0)
        inputs = torch.from_numpy(((table.data - mean) / deviation).astype(np.float32))
        targets = torch.from_numpy(table.target.astype(np.int64))
        return TaskData(
            train=TensorExamples(inputs=inputs[train], targets=targets[train]),
            test=TensorExamples(inputs=inputs[test], targets=targets[test]),
            partition_labels=table.target[train],
        )


def _windows(samples: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping windows (N, channels, WINDOW) and the recording each comes from (N,)."""
    windows, owners = [], []
    for owner, series in enumerate(np.split(samples, np.cumsum(lengths)[:-1])):
        cut = np.lib.stride_tricks.sliding_window_view(series, WINDOW, axis=0)[::STRIDE]
        windows.append(cut)
        owners.append(np.full(len(cut), owner))
    return np.ascontiguousarray(np.concatenate(windows)), np.concatenate(owners)
