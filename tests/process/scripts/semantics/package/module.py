"""Run by `-m package.module`, too."""

import multiprocessing
import pickle
import sys

VALUE = 5


class Point:
    pass


def tell(queue):
    queue.put((__name__, VALUE, Point.__module__))


if __name__ == "__main__":
    print(__name__, __file__, __spec__.name, __package__, sys.argv, sys.path[0], sys.orig_argv[1:])
    print(type(pickle.loads(pickle.dumps(Point()))).__module__)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=tell, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
    if len(sys.argv) > 1:
        raise ValueError(sys.argv[1:])
