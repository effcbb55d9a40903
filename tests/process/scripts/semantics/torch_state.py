"""torch is as it was imported."""

import torch
import torch.distributed as dist

print(torch.is_grad_enabled(), torch.get_default_dtype(), torch.manual_seed(3).initial_seed(), torch.rand(3).tolist())
print(dist.is_initialized(), dist.is_torchelastic_launched(), torch.multiprocessing.get_sharing_strategy())
x = torch.ones(3, requires_grad=True)
(x * 2).sum().backward()
print(x.grad.tolist())
