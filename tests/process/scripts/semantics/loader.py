"""DataLoader workers by fork and by spawn."""

import os
import random

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index * index, os.getppid() == PARENT or PARENT == -1])


PARENT = -1

if __name__ == "__main__":
    PARENT = os.getpid()
    random.seed(1)
    torch.manual_seed(1)
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context=method, shuffle=True)
        print(method, [batch.tolist() for batch in loader])
