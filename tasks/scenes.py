"""Composed scenes from real pixels: regions of photographed texture with real handwritten digits pasted on them.

Texture and ink are real; the layout (Voronoi regions, positions, brightness) is drawn, so masks and boxes are exact by
construction. They are easier than photographs of streets and stand for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from tasks.sources import packaged_file

REGIONS = ("building", "vegetation", "road")
PHOTOS = ("brick", "grass", "gravel")
# Each surface has its own tone, as in daylight: lowest and highest (contrast, brightness). The ranges overlap.
TONES = (((0.45, 0.16), (0.60, 0.26)), ((0.45, 0.05), (0.60, 0.15)), ((0.40, 0.0), (0.55, 0.06)))
OBJECT = len(REGIONS)
NUM_MASK_CLASSES = len(REGIONS) + 1

_CHUNK = 256
_INK = 0.3
_PLACE_ATTEMPTS = 4
# Photos are cut into a left part for training and a right part for testing, with a gap that belongs to neither.
_TRAIN_COLUMNS = slice(0, 300)
_TEST_COLUMNS = slice(332, 512)


@dataclass(frozen=True, kw_only=True)
class SceneStyle:
    """How scenes are laid out, in pixels.

    `min_center_gap` apart (in x or in y) lie the centres of any two objects, so that a grid of such cells holds at most
    one centre a cell.
    """

    side: int = 64
    digit_sides: tuple[int, ...] = (20, 24, 28, 32)
    max_objects: int = 3
    max_regions: int = 5
    min_center_gap: int = 8


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """N scenes: `images` (N, 1, side, side) around 0, `masks` (N, side, side) uint8 with the class of each pixel,
    `boxes` (N, max_objects, 4) as x1, y1, x2, y2 in pixels, `classes` (N, max_objects) int64 with -1 for no object."""

    images: torch.Tensor
    masks: torch.Tensor
    boxes: torch.Tensor
    classes: torch.Tensor


def photo_parts(split: str) -> list[np.ndarray]:
    """The textures' part for `split` ("train" or "test"), one per region class, as float32 in 0..1."""
    from skimage.io import imread

    columns = _TRAIN_COLUMNS if split == "train" else _TEST_COLUMNS
    files = [packaged_file("skimage", f"data/{name}.png") for name in PHOTOS]
    return [np.ascontiguousarray(imread(path)[:, columns], dtype=np.float32) / 255.0 for path in files]


def compose(
    *,
    count: int,
    photos: Sequence[np.ndarray],
    digits: np.ndarray,
    digit_classes: np.ndarray,
    seed: Sequence[int],
    style: SceneStyle,
) -> Scenes:
    """Draw `count` scenes from `photos` and from `digits` (M, h, w) uint8, a pure function of the arguments."""
    rng = np.random.default_rng(list(seed))
    brushes = _Brushes(digits, style.digit_sides)
    chunks = [
        _compose_chunk(rng, min(_CHUNK, count - start), photos, brushes, digit_classes, style)
        for start in range(0, count, _CHUNK)
    ]
    images, masks, boxes, classes = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*chunks, strict=True))
    return Scenes(images=images, masks=masks, boxes=boxes, classes=classes)


class _Brushes:
    """The digits at every pasted size, as opacity in 0..1, with the box around their ink."""

    def __init__(self, digits: np.ndarray, sides: Sequence[int]) -> None:
        source = torch.from_numpy(digits).float().unsqueeze(1) / float(digits.max())
        self.sides = np.asarray(sides)
        self.num_digits = len(digits)
        self.opacity = [
            F.interpolate(source, size=(side, side), mode="bilinear", antialias=True).squeeze(1).numpy()
            for side in sides
        ]
        self.boxes = np.stack([_ink_boxes(opacity > _INK) for opacity in self.opacity])


def _ink_boxes(ink: np.ndarray) -> np.ndarray:
    """Tight boxes (N, 4) as x1, y1, x2, y2 around the True pixels of (N, h, w)."""
    columns, rows = np.asarray(ink.any(axis=1)), np.asarray(ink.any(axis=2))
    x1, y1 = columns.argmax(axis=1), rows.argmax(axis=1)
    x2 = columns.shape[1] - columns[:, ::-1].argmax(axis=1)
    y2 = rows.shape[1] - rows[:, ::-1].argmax(axis=1)
    return np.stack([x1, y1, x2, y2], axis=1).astype(np.float32)


def train_and_test(
    images: np.ndarray,
    classes: np.ndarray,
    *,
    num_train_digits: int,
    num_train: int,
    num_test: int,
    seed: int,
    style: SceneStyle,
) -> tuple[Scenes, Scenes]:
    """Training and test scenes that share no digit and no part of a photo; the first digits are for training."""

    def scenes(split: str, digits: slice, count: int) -> Scenes:
        return compose(
            count=count,
            photos=photo_parts(split),
            digits=images[digits],
            digit_classes=classes[digits],
            seed=(seed, int(split == "train")),
            style=style,
        )

    return scenes("train", slice(0, num_train_digits), num_train), scenes(
        "test", slice(num_train_digits, None), num_test
    )


def _compose_chunk(
    rng: np.random.Generator,
    count: int,
    photos: Sequence[np.ndarray],
    brushes: _Brushes,
    digit_classes: np.ndarray,
    style: SceneStyle,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    masks = _voronoi(rng, count, len(photos), style)
    images = _textured(rng, masks, photos)
    opacity = np.zeros_like(images)
    boxes = np.zeros((count, style.max_objects, 4), dtype=np.float32)
    classes = np.full((count, style.max_objects), -1, dtype=np.int64)
    wanted = rng.integers(1, style.max_objects + 1, size=count)
    for slot in range(style.max_objects):
        chosen = rng.integers(brushes.num_digits, size=count)
        sizes = rng.integers(len(brushes.sides), size=count)
        corners, placed = _place(rng, brushes.boxes[sizes, chosen], brushes.sides[sizes], boxes, classes, style)
        placed &= slot < wanted
        classes[placed, slot] = digit_classes[chosen[placed]]
        boxes[placed, slot] = (brushes.boxes[sizes, chosen] + np.tile(corners, 2))[placed]
        _paste(opacity, np.flatnonzero(placed), chosen, sizes, corners, brushes)
    ink = rng.uniform(0.85, 1.0, size=(count, 1, 1)).astype(np.float32)
    images += opacity * (ink - images)
    masks[opacity > _INK] = OBJECT
    return (images[:, None] - 0.35) / 0.2, masks, boxes, classes


def _voronoi(rng: np.random.Generator, count: int, num_kinds: int, style: SceneStyle) -> np.ndarray:
    """Region class of each pixel (count, side, side): that of the nearest of a few random seed points."""
    axis = np.arange(style.side, dtype=np.float32)
    nearest = np.full((count, style.side, style.side), np.inf, dtype=np.float32)
    masks = np.zeros(nearest.shape, dtype=np.uint8)
    wanted = rng.integers(2, style.max_regions + 1, size=count)
    for region in range(style.max_regions):
        x, y = rng.uniform(0, style.side, size=(2, count, 1)).astype(np.float32)
        kind = rng.integers(num_kinds, size=(count, 1, 1)).astype(np.uint8)
        distance = ((axis - y) ** 2)[:, :, None] + ((axis - x) ** 2)[:, None, :]
        distance[region >= wanted] = np.inf
        closer = distance < nearest
        np.copyto(nearest, distance, where=closer)
        np.copyto(masks, kind, where=closer)
    return masks


def _textured(rng: np.random.Generator, masks: np.ndarray, photos: Sequence[np.ndarray]) -> np.ndarray:
    """Each region class filled from a random window of its photo, at random brightness and contrast."""
    count, side = masks.shape[:2]
    images = np.empty(masks.shape, dtype=np.float32)
    for kind, photo in enumerate(photos):
        windows = np.lib.stride_tricks.sliding_window_view(photo, (side, side))
        texture = windows[rng.integers(windows.shape[0], size=count), rng.integers(windows.shape[1], size=count)]
        contrast, brightness = rng.uniform(*TONES[kind], size=(count, 2)).astype(np.float32).T
        texture = texture * contrast[:, None, None] + brightness[:, None, None]
        np.copyto(images, texture, where=masks == kind)
    return images


def _place(
    rng: np.random.Generator,
    ink: np.ndarray,
    sides: np.ndarray,
    boxes: np.ndarray,
    classes: np.ndarray,
    style: SceneStyle,
) -> tuple[np.ndarray, np.ndarray]:
    """Top-left corners (N, 2) for brushes whose ink box overlaps no earlier one, and which were found (N,)."""
    corners = np.zeros((len(ink), 2), dtype=np.float32)
    placed = np.zeros(len(ink), dtype=bool)
    for _ in range(_PLACE_ATTEMPTS):
        drawn = np.floor(rng.uniform(size=(len(ink), 2)) * (style.side - sides + 1)[:, None]).astype(np.float32)
        box = (ink + np.tile(drawn, 2))[:, None]
        apart = (box[..., :2] >= boxes[..., 2:]).any(-1) | (box[..., 2:] <= boxes[..., :2]).any(-1)
        gap = np.abs((box[..., :2] + box[..., 2:] - boxes[..., :2] - boxes[..., 2:]) / 2).max(-1)
        fits = ((apart & (gap >= style.min_center_gap)) | (classes < 0)).all(1) & ~placed
        corners[fits] = drawn[fits]
        placed |= fits
    return corners, placed


def _paste(
    opacity: np.ndarray,
    scenes: np.ndarray,
    chosen: np.ndarray,
    sizes: np.ndarray,
    corners: np.ndarray,
    brushes: _Brushes,
) -> None:
    """Lay the chosen digits over `opacity` in place, the darker of old and new ink kept."""
    for size, side in enumerate(brushes.sides):
        rows = scenes[sizes[scenes] == size]
        axis = np.arange(side)
        x, y = corners[rows].astype(np.int64).T
        where = (rows[:, None, None], (y[:, None] + axis)[:, :, None], (x[:, None] + axis)[:, None, :])
        opacity[where] = np.maximum(opacity[where], brushes.opacity[size][chosen[rows]])
