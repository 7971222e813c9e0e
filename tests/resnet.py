"""ResNet-18 (He et al., CVPR 2016, arXiv:1512.03385), narrowed by a factor, for tests of batch normalisation."""

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential()
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inner + self.downsample(x))


class ResNet18(nn.Module):
    """Names and shapes are those of torchvision's with ``width=64``."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for number, (before, after) in enumerate([(1, 1), (1, 2), (2, 4), (4, 8)], 1):
            stride = 1 if number == 1 else 2
            blocks = Block(width * before, width * after, stride), Block(width * after, width * after, 1)
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        for number in (1, 2, 3, 4):
            x = getattr(self, f"layer{number}")(x)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits
