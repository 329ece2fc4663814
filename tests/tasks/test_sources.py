"""Data from packages and from disk: what is missing is named in one line, and no pickle of unknown content is read."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.contracts import DataSpec
from tasks import sources, vision, watch_converter
from tasks.base import TaskError
from tasks.data import loaded
from tasks.registry import build
from tasks.sources import cache_directory, faces, mnist_5k, packaged_file, small_digits, watch_recordings


def test_shapes_and_classes() -> None:
    images, classes = mnist_5k(0)
    assert (images.shape, images.dtype) == ((5000, 28, 28), np.uint8)
    assert np.bincount(classes).tolist() == [500] * 10
    images, classes = small_digits(0)
    assert (images.shape, int(images.max())) == ((1797, 8, 8), 16)
    images, classes = faces(0)
    assert (images.shape, int(classes.sum())) == ((200, 25, 25), 100)


def test_faces_have_their_labels() -> None:
    # Faces resemble each other; what is beside a face may be anything.
    images, classes = faces(0)
    likeness = [np.corrcoef(images[classes == kind].reshape(100, -1)).mean() for kind in (0, 1)]
    assert likeness[1] > likeness[0] + 0.05


def test_a_missing_package_is_named_with_its_remedy() -> None:
    with pytest.raises(TaskError, match="package 'no_such_package' is not installed; pip install no_such_package"):
        packaged_file("no_such_package", "x.csv")
    with pytest.raises(TaskError, match=r"package 'skimage' lacks its data file data/nothing.png"):
        packaged_file("skimage", "data/nothing.png")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_directory()


def test_watch_recordings_are_converted_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = watch_recordings()
    assert recordings["samples"].shape == (244102, 6)
    assert (len(recordings["lengths"]), len(np.unique(recordings["subjects"]))) == (140, 10)
    assert [path.name for path in own_cache.iterdir()] == ["watch-eb122f23.npz"]
    monkeypatch.setattr(sources, "_convert_watch", lambda *paths: pytest.fail("converted again"))
    assert np.array_equal(watch_recordings()["samples"], recordings["samples"])


def test_a_damaged_cache_is_made_anew(own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    (own_cache / "watch-eb122f23.npz").write_bytes(b"half a file")
    assert len(watch_recordings()["lengths"]) == 140


class Boobytrap:
    """Writes a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_another_pickle_is_never_opened(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap, sprung = tmp_path / "watch_dataset.npy", tmp_path / "sprung"
    trap.write_bytes(pickle.dumps(Boobytrap(sprung)))
    monkeypatch.setattr(sources, "packaged_file", lambda package, relative: trap)
    with pytest.raises(TaskError, match=r"task 'watch': cannot convert watch_dataset.npy of seglearn: .* SHA-256"):
        watch_recordings()
    with pytest.raises(ValueError, match="SHA-256"):
        watch_converter.convert(trap, tmp_path / "out.npz")
    assert not sprung.exists()
    assert not (tmp_path / "out.npz").exists()


def idx_files(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 6), ("t10k", 4)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, header, content in (
            ("images-idx3", b"\x00\x00\x08\x03" + b"".join(n.to_bytes(4, "big") for n in images.shape), images),
            ("labels-idx1", b"\x00\x00\x08\x01" + count.to_bytes(4, "big"), np.arange(count, dtype=np.uint8)),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            with gzip.open(folder / f"{prefix}-{name}-ubyte.gz", "wb") as file:
                file.write(header + content.tobytes())


def test_fashion_mnist_from_gzip_files(tmp_path: Path) -> None:
    idx_files(tmp_path)
    data = loaded(build("fashion-mnist", DataSpec(directory=str(tmp_path))))
    assert data.train.inputs.shape == (6, 1, 28, 28)
    assert data.test.targets.tolist() == [0, 1, 2, 3]


def test_fashion_mnist_from_torchvisions_folder_holds_the_same(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    idx_files(raw)
    for packed in list(raw.glob("*.gz")):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    one, other = (loaded(build("fashion-mnist", DataSpec(directory=str(folder)))) for folder in (tmp_path, raw))
    assert one.train.inputs.equal(other.train.inputs)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    idx_files(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(TaskError, match=f"task 'fashion-mnist': cannot read train images in {tmp_path}"):
        loaded(build("fashion-mnist", DataSpec(directory=str(tmp_path))))


@pytest.mark.parametrize(
    ("ref", "remedy"),
    [
        ("fashion-mnist", "install Debian's dataset-fashion-mnist or set data.directory, or data.download=true"),
        ("cifar10", "set data.directory to the folder that holds cifar-10-batches-py, or data.download=true"),
    ],
)
def test_missing_images_name_task_folder_and_remedy(ref: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        loaded(build(ref, DataSpec(directory=str(tmp_path))))
    assert str(caught.value) == f"task '{ref}': no images in {tmp_path}; {remedy}"


def test_missing_images_without_a_folder_name_the_place_looked_in(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    with pytest.raises(TaskError, match=f"no images in {tmp_path / 'debian'};"):
        loaded(build("fashion-mnist", DataSpec()))
    with pytest.raises(TaskError, match=f"no images in {own_cache};"):
        loaded(build("cifar10", DataSpec()))


@pytest.mark.parametrize("ref", ["fashion-mnist", "cifar10"])
def test_a_download_without_a_network_is_one_line(ref: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        loaded(build(ref, DataSpec(directory=str(tmp_path), download=True)))
    assert f"task '{ref}': cannot download to {tmp_path}: " in str(caught.value)
    assert "\n" not in str(caught.value)
