"""When are torch and numpy there, and what is known of them before?"""

import importlib.util
import pickle
import sys


def there() -> list[str]:
    return [name for name in ("numpy", "torch", "torch.nn", "torch.distributed") if name in sys.modules]


print(there())
for name in ("torch", "numpy", "no_such_module"):
    spec = importlib.util.find_spec(name)
    print(name, spec and (spec.name, spec.origin, spec.has_location, list(spec.submodule_search_locations or [])))
print(there())
import numpy  # noqa: E402

print(there())
import torch.nn.functional as functional  # noqa: E402

print(there())
import torch  # noqa: E402

print(functional is torch.nn.functional is sys.modules["torch.nn.functional"], numpy is sys.modules["numpy"])
print(
    type(torch.__spec__.loader).__name__, torch.__spec__.name, torch.__file__, torch.__spec__.loader.is_package("torch")
)
print(importlib.util.find_spec("torch") is torch.__spec__)
print(pickle.loads(pickle.dumps(torch.nn.Linear)) is torch.nn.Linear, torch.ones(2).numpy().tolist())
try:
    import torch.no_such_module
except ModuleNotFoundError as error:
    print(error)
