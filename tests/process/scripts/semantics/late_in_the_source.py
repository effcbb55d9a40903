"""Variables that torch reads only when it is imported, and that are set before."""

import logging
import os

os.environ["TORCH_LOGS"] = "+dynamo"
os.environ.setdefault("MKL_NUM_THREADS", "3")

import torch

print(logging.getLogger("torch._dynamo").getEffectiveLevel(), torch.get_num_threads())
