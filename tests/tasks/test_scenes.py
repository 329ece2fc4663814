"""Composed scenes: exact labels, disjoint sources, and the same scenes for detection and segmentation."""

from __future__ import annotations

import numpy as np
import torch

from gpu_runtime.contracts import DataSpec
from tasks.data import loaded
from tasks.driving import driving_scenes
from tasks.registry import build
from tasks.scenes import OBJECT, SceneStyle, compose, photo_parts

STYLE = SceneStyle(side=64, digit_sides=(16,), max_objects=3, max_regions=4)


def plain_scenes(count: int = 50, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scenes whose digits are full squares on black photos, so that every box and pixel is known."""
    digits = np.full((3, 8, 8), 255, dtype=np.uint8)
    photos = [np.zeros((100, 100), dtype=np.float32)] * 3
    scenes = compose(count=count, photos=photos, digits=digits, digit_classes=np.arange(3), seed=(seed,), style=STYLE)
    return scenes.images, scenes.masks, scenes.boxes, scenes.classes


def test_boxes_cover_the_object_pixels_exactly() -> None:
    _, masks, boxes, classes = plain_scenes()
    for mask, scene_boxes, scene_classes in zip(masks, boxes, classes, strict=True):
        painted = torch.zeros_like(mask, dtype=torch.bool)
        for (x1, y1, x2, y2), kind in zip(scene_boxes.int().tolist(), scene_classes.tolist(), strict=True):
            if kind >= 0:
                assert (x2 - x1, y2 - y1) == (16, 16)
                painted[y1:y2, x1:x2] = True
        assert torch.equal(mask == OBJECT, painted)


def test_objects_do_not_overlap_and_have_cells_of_their_own() -> None:
    scenes, _ = driving_scenes(0)
    centres = ((scenes.boxes[..., :2] + scenes.boxes[..., 2:]) / 16).long()
    cells = centres[..., 1] * 8 + centres[..., 0]
    for first in range(3):
        for second in range(first):
            both = (scenes.classes[:, first] >= 0) & (scenes.classes[:, second] >= 0)
            assert not (cells[both, first] == cells[both, second]).any()
            a, b = scenes.boxes[both, first], scenes.boxes[both, second]
            overlap = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
            assert not overlap.any()


def test_ink_is_brighter_than_what_it_covers() -> None:
    images, masks, _, _ = plain_scenes()
    assert images[:, 0][masks == OBJECT].min() > images[:, 0][masks != OBJECT].max()


def test_every_scene_has_an_object_and_all_classes_occur() -> None:
    scenes, test = driving_scenes(0)
    for one in (scenes, test):
        assert (one.classes >= 0).any(dim=1).all()
        assert set(one.classes.unique().tolist()) == set(range(-1, 10))
        assert set(one.masks.unique().tolist()) == {0, 1, 2, OBJECT}


def test_seed_decides() -> None:
    assert torch.equal(plain_scenes(seed=1)[1], plain_scenes(seed=1)[1])
    assert not torch.equal(plain_scenes(seed=1)[1], plain_scenes(seed=2)[1])


def test_training_and_test_use_disjoint_parts_of_the_photos() -> None:
    for train, test in zip(photo_parts("train"), photo_parts("test"), strict=True):
        assert train.shape == (512, 300)
        assert test.shape == (512, 180)
        assert not np.array_equal(train[:, -180:], test)


def test_detection_and_segmentation_share_their_images() -> None:
    detection, segmentation = (loaded(build(name, DataSpec())) for name in ("detection", "segmentation"))
    assert detection.train.inputs is segmentation.train.inputs
    assert detection.test.inputs is segmentation.test.inputs
