"""A program configures logging before it imports torch."""

import logging
import logging.config
import sys

early = logging.getLogger("torch.distributed")
early.setLevel(logging.ERROR)
early.addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("torch._utils_internal").setLevel(logging.ERROR)
logging.getLogger("torch.fx.of_mine").setLevel(logging.INFO)
print(sorted(name for name in logging.root.manager.loggerDict if name.startswith("torch")))
logging.config.dictConfig(
    {
        "version": 1,
        "formatters": {"plain": {"format": "%(name)s: %(message)s"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stdout"}},
        "loggers": {"torch.nn": {"level": "INFO", "handlers": ["out"], "propagate": False}},
        "root": {"handlers": ["out"], "level": "INFO"},
    }
)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

for name in ("torch", "torch._logging._internal", "torch._utils_internal", "torch.distributed", "torch.fx.of_mine"):
    logger = logging.getLogger(name)
    handlers = [type(handler).__name__ for handler in logger.handlers]
    print(name, logger.level, logger.disabled, logger.propagate, handlers, logger.parent.name)
early.setLevel(logging.INFO)
print(logging.getLogger("torch.distributed").level, dist.is_available(), torch.__name__)
logging.getLogger("torch.nn").info("of torch.nn")
