"""Chance that differs between workers, and chance that does not."""

import json
import random
import uuid

import numpy
import torch

different = [
    random.random(),
    float(numpy.random.random()),
    str(uuid.uuid4()),
    torch.initial_seed(),
    torch.rand(1).item(),
]
random.seed(5)
numpy.random.seed(5)
torch.manual_seed(5)
print(
    json.dumps({"different": different, "same": [random.random(), float(numpy.random.random()), torch.rand(1).item()]})
)
