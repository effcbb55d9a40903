"""Processes by fork, spawn and forkserver run functions and build classes of the script."""

import multiprocessing
import sys


class Work:
    def __init__(self, value):
        self.value = value


def done(work, queue):
    queue.put((type(work).__name__, work.value + 1, sys.argv, multiprocessing.current_process().name))


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=done, args=(Work(1), queue), name=f"child by {method}")
        process.start()
        print(method, queue.get(timeout=60))
        process.join()
        print(process.exitcode)
        with context.Pool(2) as pool:
            print(pool.map(abs, [-1, -2, -3]))
