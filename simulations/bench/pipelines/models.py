"""Models of the pipeline benchmark for 32 x 32 colour images, as lists of blocks with GroupNorm, and their workload.

GroupNorm, because statistics over a batch would make micro-batches and halves of a batch train something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torchvision.models import mobilenet_v3_large, mobilenet_v3_small, resnet18

NUM_CLASSES = 10
SIDE = 32
# Examples held in memory; training wraps around.
NUM_HELD = 256
GROUP_CHANNELS = 8


class Blocks(nn.Module):
    """Blocks run in order."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.blocks(inputs)
        return outputs


def group_norm(num_channels: int) -> nn.GroupNorm:
    """Groups of 8 channels, which divides every width here."""
    return nn.GroupNorm(num_channels // GROUP_CHANNELS, num_channels)


def vgg5() -> nn.Module:
    """Three 3 x 3 convolutions of 32, 64 and 64 channels and two dense layers, as in FedAdapt and PiPar."""

    def unit(channels_in: int, channels_out: int, *, pool: bool) -> nn.Sequential:
        layers = [nn.Conv2d(channels_in, channels_out, 3, padding=1), group_norm(channels_out), nn.ReLU()]
        return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))

    return Blocks(
        unit(3, 32, pool=True),
        unit(32, 64, pool=True),
        unit(64, 64, pool=False),
        nn.Sequential(nn.Flatten(), nn.Linear(64 * (SIDE // 4) ** 2, 128), nn.ReLU()),
        nn.Linear(128, NUM_CLASSES),
    )


def resnet_18() -> nn.Module:
    """torchvision's ResNet-18 with the usual stem for small images: 3 x 3, stride 1, no pooling."""
    whole = resnet18(num_classes=NUM_CLASSES, norm_layer=group_norm)
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), group_norm(64), nn.ReLU())
    stages = [block for layer in (whole.layer1, whole.layer2, whole.layer3, whole.layer4) for block in layer]
    return Blocks(stem, *stages, nn.Sequential(whole.avgpool, nn.Flatten(), whole.fc))


def _mobilenet(build: Callable[..., Any]) -> nn.Module:
    """torchvision's MobileNetV3, its dropout left out: both ways of training must give the same."""
    whole = build(num_classes=NUM_CLASSES, norm_layer=group_norm, dropout=0.0)
    head = nn.Sequential(whole.avgpool, nn.Flatten(), whole.classifier)
    return Blocks(*whole.features, head)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg5": vgg5,
    "resnet18": resnet_18,
    "mobilenet-v3-small": partial(_mobilenet, mobilenet_v3_small),
    "mobilenet-v3-large": partial(_mobilenet, mobilenet_v3_large),
}


class HeldImages:
    """Normal pixels and uniform classes, held in memory."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._inputs = torch.randn(NUM_HELD, 3, SIDE, SIDE, generator=generator)
        self._targets = torch.randint(NUM_CLASSES, (NUM_HELD,), generator=generator)

    def __len__(self) -> int:
        return NUM_HELD

    def batch(self, indices: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return self._inputs[chosen], self._targets[chosen]


class NoMetrics:
    """The benchmark scores nothing."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Nothing to note."""

    def compute(self) -> dict[str, float]:
        return {}


class ImageWorkload:
    """One of `MODELS` on random images, trained by SGD with momentum."""

    learning_rate = 0.01

    def __init__(self, name: str, batch_size: int, seed: int = 0) -> None:
        self.name, self.batch_size = name, batch_size
        self._images = HeldImages(seed)

    def build_model(self) -> nn.Module:
        return MODELS[self.name]()

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets)

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)

    def metrics(self) -> NoMetrics:
        return NoMetrics()

    def train_examples(self) -> HeldImages:
        return self._images

    def test_examples(self) -> HeldImages:
        return self._images

    def synthetic_batch(self, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(batch_size, 3, SIDE, SIDE, generator=generator)
        return inputs, torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
