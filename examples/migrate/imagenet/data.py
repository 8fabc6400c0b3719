"""Images of two kinds of stripes, in place of ImageNet. Both scripts use them unchanged."""

import torch
from torch.utils.data import Dataset


class Stripes(Dataset):
    """Image ``index`` has stripes along rows (class 0) or columns (class 1), and noise.

    ``augment`` flips and shifts images at random, as transforms for training do.
    """

    def __init__(self, size: int, *, seed: int, augment: bool) -> None:
        self.targets = torch.arange(size) % 2
        self.augment = augment
        generator = torch.Generator().manual_seed(seed)
        stripes = (torch.arange(8) % 2).to(torch.get_default_dtype()).expand(size, 1, 8, 8)
        rows = stripes.transpose(2, 3)
        self.images = torch.where(self.targets.view(-1, 1, 1, 1) == 0, rows, stripes)
        self.images = self.images + torch.randn(self.images.shape, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.augment:
            if torch.rand(()) < 0.5:
                image = image.flip(2)
            image = image.roll(int(torch.randint(8, ())), 1)
        return image, int(self.targets[index])
