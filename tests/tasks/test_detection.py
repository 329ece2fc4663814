"""Boxes to cells and back, box geometry by hand, and greedy suppression."""

from __future__ import annotations

import pytest
import torch

from tasks.detection import cell_boxes, decode, encode, generalized_iou, grid_loss, pairwise_iou, true_boxes
from tasks.driving import NUM_CELLS, STYLE, driving_scenes


def test_every_object_of_the_scenes_keeps_its_cell() -> None:
    scenes, _ = driving_scenes(0)
    targets = encode(scenes.boxes / STYLE.side, scenes.classes, NUM_CELLS)
    assert int(targets[0].sum()) == int((scenes.classes >= 0).sum())


def test_encode_and_true_boxes_are_inverse() -> None:
    boxes = torch.tensor([[[0.1, 0.1, 0.3, 0.4], [0.6, 0.5, 0.9, 0.9]], [[0.0, 0.0, 0.1, 0.1], [0.0, 0.0, 0.0, 0.0]]])
    classes = torch.tensor([[3, 7], [2, -1]])
    first, second = true_boxes(encode(boxes, classes, 8))
    assert torch.equal(first["boxes"], boxes[0])
    assert torch.equal(first["labels"], classes[0])
    assert torch.equal(second["boxes"], boxes[1, :1])


def test_cell_boxes_of_zero_logits_are_centred_in_their_cells() -> None:
    boxes = cell_boxes(torch.zeros(1, 7, 4, 4))
    assert boxes[0, 2, 1].tolist() == pytest.approx([0.375 - 0.15, 0.625 - 0.15, 0.375 + 0.15, 0.625 + 0.15])


def test_generalized_iou_by_hand() -> None:
    unit = torch.tensor([0.0, 0.0, 1.0, 1.0])
    half = torch.tensor([0.0, 0.0, 1.0, 0.5])
    apart = torch.tensor([2.0, 0.0, 3.0, 1.0])
    assert float(generalized_iou(unit, unit)) == pytest.approx(1.0)
    assert float(generalized_iou(unit, half)) == pytest.approx(0.5)
    assert float(generalized_iou(unit, apart)) == pytest.approx(-1 / 3)
    assert pairwise_iou(torch.stack([unit, half, apart])[None])[0, 0].tolist() == pytest.approx([1.0, 0.5, 0.0])


def test_loss_falls_towards_the_truth() -> None:
    targets = encode(torch.tensor([[[0.1, 0.1, 0.4, 0.4]]]), torch.tensor([[1]]), 4)
    wrong = torch.zeros(1, 7, 4, 4)
    right = wrong.clone()
    right[:, 0] = -6.0
    right[0, 0, 1, 1] = 6.0
    right[0, 6, 1, 1] = 6.0
    right[0, 1:3, 1, 1] = torch.tensor(0.25).logit()
    assert float(grid_loss(right, targets)) < 0.1 < float(grid_loss(wrong, targets))


def test_a_batch_without_objects_has_a_loss_with_gradients() -> None:
    outputs = torch.zeros(2, 7, 4, 4, requires_grad=True)
    grid_loss(outputs, encode(torch.zeros(2, 1, 4), torch.full((2, 1), -1), 4)).backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


def test_of_overlapping_boxes_of_a_class_the_best_stays() -> None:
    outputs = torch.zeros(1, 7, 4, 4)
    outputs[:, 0] = -20.0
    outputs[:, 5] = 20.0
    # Three neighbouring cells: the first two tell nearly the same box, the third another class at the same place.
    for column, confidence, shift in ((1, 4.0, 0.75), (2, 3.0, 0.25)):
        outputs[0, 0, 1, column] = confidence
        outputs[0, 1, 1, column] = torch.tensor(shift).logit()
    outputs[0, 0, 2, 1] = 2.0
    outputs[0, 5:, 2, 1] = torch.tensor([0.0, 20.0])
    (found,) = decode(outputs)
    likely = found["scores"] > 0.5
    assert found["labels"][likely].tolist() == [0, 1]
    assert found["scores"][likely].tolist() == pytest.approx([torch.tensor(x).sigmoid().item() for x in (4.0, 2.0)])
