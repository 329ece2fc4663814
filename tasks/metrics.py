"""Metric sets over torchmetrics: batches go in from any device, plain floats come out.

torchmetrics is imported when a metric set is made: it costs seconds that training clients need not pay.
"""

from __future__ import annotations

import torch

from tasks.base import TaskError
from tasks.detection import MAX_BOXES_PER_IMAGE, GridTargets, decode, true_boxes


class ClassAccuracy:
    """`accuracy`: fraction of examples whose largest logit is at the true class."""

    def __init__(self, num_classes: int) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        self._metric = MulticlassAccuracy(num_classes=num_classes, average="micro")
        self._num_examples = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch: logits (N, classes) and true classes (N,)."""
        if len(outputs):
            self._metric.update(outputs.detach().argmax(dim=1).cpu(), targets.cpu())
            self._num_examples += len(outputs)

    def compute(self) -> dict[str, float]:
        """Raises TaskError when no example was given."""
        _require(self._num_examples, "example")
        return {"accuracy": float(self._metric.compute())}


class MeanIoU:
    """`miou`: intersection over union of pixels over all images, averaged over the classes that occur."""

    def __init__(self, num_classes: int) -> None:
        from torchmetrics.classification import MulticlassJaccardIndex

        self._metric = MulticlassJaccardIndex(num_classes=num_classes, average="macro")
        self._num_examples = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch: logits (N, classes, H, W) and true classes (N, H, W)."""
        if len(outputs):
            self._metric.update(outputs.detach().argmax(dim=1).cpu(), targets.long().cpu())
            self._num_examples += len(outputs)

    def compute(self) -> dict[str, float]:
        """Raises TaskError when no example was given."""
        _require(self._num_examples, "example")
        return {"miou": float(self._metric.compute())}


class DetectionMap:
    """`map50`: mean over classes of the average precision (COCO) of boxes that match at an IoU of 0.5 or more."""

    def __init__(self) -> None:
        from torchmetrics.detection import MeanAveragePrecision

        self._metric = MeanAveragePrecision(
            iou_thresholds=[0.5],
            max_detection_thresholds=[1, 10, MAX_BOXES_PER_IMAGE],
            backend="pycocotools",
        )
        self._metric.warn_on_many_detections = False
        self._num_objects = 0

    def update(self, outputs: torch.Tensor, targets: GridTargets) -> None:
        """Add a batch: grid logits (N, 5 + classes, S, S) and the targets of `tasks.detection.encode`."""
        if len(outputs):
            objectness, boxes, classes = (part.cpu() for part in targets)
            self._metric.update(decode(outputs.detach().float().cpu()), true_boxes((objectness, boxes, classes)))
            self._num_objects += int((objectness > 0).sum())

    def compute(self) -> dict[str, float]:
        """Raises TaskError when no image with an object was given."""
        _require(self._num_objects, "object")
        return {"map50": float(self._metric.compute()["map_50"])}


def _require(count: int, what: str) -> None:
    """Refuse to report a metric of nothing, which would be NaN."""
    if count == 0:
        raise TaskError(f"a metric needs at least one {what}, but none was given")
