"""Which packages are there once torch is imported?"""

import json
import sys

import numpy.random  # noqa: F401
import torch.distributed
import torch.nn.parallel
import torch.utils.data  # noqa: F401

print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names)))
