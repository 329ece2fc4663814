"""Metric values that a person can check by hand, and refusal to report a metric of nothing."""

from __future__ import annotations

import pytest
import torch

from tasks.base import TaskError
from tasks.detection import encode
from tasks.metrics import ClassAccuracy, DetectionMap, MeanIoU


def logits_of(classes: list[int], num_classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), num_classes).float()


def test_accuracy_over_unequal_batches() -> None:
    metric = ClassAccuracy(3)
    metric.update(logits_of([0, 1, 2], 3), torch.tensor([0, 1, 1]))
    metric.update(logits_of([2], 3), torch.tensor([0]))
    assert metric.compute() == {"accuracy": 0.5}


def test_miou_by_hand() -> None:
    # Class 0: 2 of 3 pixels in the union, class 1: 1 of 2; class 2 occurs nowhere and does not count.
    told = torch.tensor([[[0, 0], [0, 1]]])
    true = torch.tensor([[[0, 0], [1, 1]]], dtype=torch.uint8)
    metric = MeanIoU(3)
    metric.update(torch.nn.functional.one_hot(told, 3).permute(0, 3, 1, 2).float(), true)
    assert metric.compute()["miou"] == pytest.approx((2 / 3 + 1 / 2) / 2)


BOX = (0.25, 0.25, 0.5, 0.5)
FAR = (0.7, 0.7, 0.95, 0.95)


def grid_logits(found: list[tuple[tuple[float, ...], int, float]], num_classes: int = 2) -> torch.Tensor:
    """Outputs (1, 5 + classes, 4, 4) of a detector that is sure of the given (box, class, objectness logit)."""
    outputs = torch.zeros(1, 5 + num_classes, 4, 4)
    outputs[:, 0] = -20.0
    for box, kind, confidence in found:
        x, y = (box[0] + box[2]) / 2 * 4, (box[1] + box[3]) / 2 * 4
        column, row = int(x), int(y)
        offset = torch.tensor([(x - column + 0.5) / 2, (y - row + 0.5) / 2]).logit()
        size = torch.tensor([(box[2] - box[0]) / 0.3, (box[3] - box[1]) / 0.3]).log()
        outputs[0, :5, row, column] = torch.cat([torch.tensor([confidence]), offset, size])
        outputs[0, 5 + kind, row, column] = 20.0
    return outputs


def map50(found: list[tuple[tuple[float, ...], int, float]], true: list[tuple[tuple[float, ...], int]]) -> float:
    metric = DetectionMap()
    boxes, classes = torch.tensor([[box for box, _ in true]]), torch.tensor([[kind for _, kind in true]])
    metric.update(grid_logits(found), encode(boxes, classes, 4))
    return metric.compute()["map50"]


def test_map50_of_a_perfect_detector_is_one() -> None:
    assert map50([(BOX, 0, 5.0), (FAR, 1, 5.0)], [(BOX, 0), (FAR, 1)]) == pytest.approx(1.0)


def test_map50_counts_a_wrong_class_as_missed() -> None:
    assert map50([(BOX, 0, 5.0), (FAR, 0, 4.0)], [(BOX, 0), (FAR, 1)]) == pytest.approx(0.5)


def test_map50_needs_an_overlap_of_one_half() -> None:
    near, far = (0.25, 0.25, 0.5, 0.42), (0.25, 0.25, 0.5, 0.36)
    assert map50([(near, 0, 5.0)], [(BOX, 0)]) == pytest.approx(1.0)
    assert map50([(far, 0, 5.0)], [(BOX, 0)]) == pytest.approx(0.0)


def test_map50_of_a_false_alarm_ranked_first_is_half() -> None:
    assert map50([(FAR, 0, 6.0), (BOX, 0, 5.0)], [(BOX, 0)]) == pytest.approx(0.5, abs=0.01)
    assert map50([(FAR, 0, 4.0), (BOX, 0, 5.0)], [(BOX, 0)]) == pytest.approx(1.0)


@pytest.mark.parametrize("metric", [lambda: ClassAccuracy(3), lambda: MeanIoU(3), DetectionMap])
def test_a_metric_of_nothing_is_refused(metric: type[ClassAccuracy]) -> None:
    with pytest.raises(TaskError, match="at least one"):
        metric().compute()  # type: ignore[call-arg]


def test_an_empty_batch_changes_nothing() -> None:
    metric = ClassAccuracy(3)
    metric.update(torch.empty(0, 3), torch.empty(0, dtype=torch.long))
    metric.update(logits_of([1], 3), torch.tensor([1]))
    assert metric.compute() == {"accuracy": 1.0}


def test_a_detection_set_without_objects_is_refused() -> None:
    metric = DetectionMap()
    metric.update(grid_logits([]), encode(torch.zeros(1, 1, 4), torch.full((1, 1), -1), 4))
    with pytest.raises(TaskError, match="at least one object"):
        metric.compute()
