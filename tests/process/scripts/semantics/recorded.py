"""A program that leaves its error where torchelastic wants it."""

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    raise ValueError("on purpose")


main()
