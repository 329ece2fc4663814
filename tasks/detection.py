"""Grid detection: how boxes become cells (targets), cells become boxes (predictions), and the loss between them.

Boxes are x1, y1, x2, y2 as fractions of the image side. A cell answers for the object whose box centre lies in it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

GridTargets = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

MAX_BOXES_PER_IMAGE = 20
MIN_SCORE = 0.01
OBJECT_WEIGHT = 4.0
BOX_WEIGHT = 2.0

_TYPICAL_SIDE = 0.3
_NMS_IOU = 0.5


def encode(boxes: torch.Tensor, classes: torch.Tensor, num_cells: int) -> GridTargets:
    """Targets of fixed size from boxes (N, M, 4) and classes (N, M), -1 where there is no object.

    Returns:
        Objectness (N, S, S) 0 or 1, boxes (N, S, S, 4), classes (N, S, S), with S = `num_cells`, 0 where no object is.
    """
    count = len(boxes)
    objectness = torch.zeros(count, num_cells, num_cells)
    cell_boxes = torch.zeros(count, num_cells, num_cells, 4)
    cell_classes = torch.zeros(count, num_cells, num_cells, dtype=torch.long)
    image, slot = torch.nonzero(classes >= 0, as_tuple=True)
    chosen = boxes[image, slot]
    column, row = ((chosen[:, :2] + chosen[:, 2:]) / 2 * num_cells).long().clamp(0, num_cells - 1).unbind(1)
    objectness[image, row, column] = 1.0
    cell_boxes[image, row, column] = chosen
    cell_classes[image, row, column] = classes[image, slot]
    return objectness, cell_boxes, cell_classes


def cell_boxes(outputs: torch.Tensor) -> torch.Tensor:
    """Boxes (N, S, S, 4) told by the model's outputs (N, 5 + classes, S, S)."""
    num_cells = outputs.shape[-1]
    raw = outputs[:, 1:5]
    axis = torch.arange(num_cells, device=outputs.device, dtype=outputs.dtype)
    x = (axis + raw[:, 0].sigmoid() * 2 - 0.5) / num_cells
    y = (axis[:, None] + raw[:, 1].sigmoid() * 2 - 0.5) / num_cells
    half = raw[:, 2:4].clamp(-4, 2).exp() * (_TYPICAL_SIDE / 2)
    return torch.stack([x - half[:, 0], y - half[:, 1], x + half[:, 0], y + half[:, 1]], dim=-1)


def grid_loss(outputs: torch.Tensor, targets: GridTargets) -> torch.Tensor:
    """Mean over images of: objectness BCE over cells, and (1 - GIoU) and class cross-entropy over objects.

    Sums over cells are divided by constants, never by a count over the batch: the loss of a batch must be the mean of
    the losses of its micro-batches.
    """
    objectness, boxes, classes = targets
    occupied = objectness > 0
    weight = torch.where(occupied, OBJECT_WEIGHT, 1.0)
    found = F.binary_cross_entropy_with_logits(outputs[:, 0], objectness, weight=weight, reduction="sum")
    image, row, column = torch.nonzero(occupied, as_tuple=True)
    told = cell_boxes(outputs)[image, row, column]
    placed = (1.0 - generalized_iou(told, boxes[image, row, column])).sum()
    named = F.cross_entropy(outputs[image, 5:, row, column], classes[image, row, column], reduction="sum")
    return (found + BOX_WEIGHT * placed + named) / len(outputs)


def generalized_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """GIoU of boxes pair by pair, (..., 4) to (...), in -1..1 (Rezatofighi et al. 2019)."""
    overlap, union = _overlap_union(a, b)
    low, high = torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])
    hull = (high - low).prod(-1).clamp(min=1e-9)
    return overlap / union - (hull - union) / hull


def pairwise_iou(boxes: torch.Tensor) -> torch.Tensor:
    """IoU of all pairs within each image, (N, K, 4) to (N, K, K)."""
    overlap, union = _overlap_union(boxes[:, :, None], boxes[:, None, :])
    return overlap / union


def _overlap_union(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    overlap = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    area_a, area_b = (a[..., 2:] - a[..., :2]).prod(-1), (b[..., 2:] - b[..., :2]).prod(-1)
    return overlap, (area_a + area_b - overlap).clamp(min=1e-9)


def decode(outputs: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Predictions per image, at most MAX_BOXES_PER_IMAGE, best first: `boxes` (K, 4), `scores` (K,), `labels` (K,).

    A class scores objectness times its probability in a cell. Of boxes of one class that overlap by more than
    an IoU of 0.5 only the best stays (greedy NMS, all images at once).
    """
    count = len(outputs)
    probability = outputs[:, :1].sigmoid() * outputs[:, 5:].softmax(dim=1)
    num_classes = probability.shape[1]
    pairs = probability.permute(0, 2, 3, 1).reshape(count, -1)
    scores, index = pairs.topk(min(MAX_BOXES_PER_IMAGE, pairs.shape[1]), dim=1)
    labels = index % num_classes
    cells = (index // num_classes).unsqueeze(-1).expand(-1, -1, 4)
    boxes = cell_boxes(outputs).reshape(count, -1, 4).gather(1, cells).clamp(0.0, 1.0)
    rivals = (pairwise_iou(boxes) > _NMS_IOU) & (labels[:, :, None] == labels[:, None, :])
    kept = scores >= MIN_SCORE
    for rank in range(1, scores.shape[1]):
        kept[:, rank] &= ~(rivals[:, rank, :rank] & kept[:, :rank]).any(dim=1)
    return [
        {"boxes": boxes[image, keep], "scores": scores[image, keep], "labels": labels[image, keep]}
        for image, keep in enumerate(kept)
    ]


def true_boxes(targets: GridTargets) -> list[dict[str, torch.Tensor]]:
    """The objects of each image, back from the cells: `boxes` (K, 4) and `labels` (K,)."""
    return [
        {"boxes": boxes[found > 0], "labels": classes[found > 0]}
        for found, boxes, classes in zip(*targets, strict=True)
    ]
