"""Numerical libraries use as many threads as the environment says."""

import os
import threading

import numpy
import torch

print(torch.get_num_threads(), torch.get_num_interop_threads())
ones = numpy.ones((600, 600))
print(float((ones @ ones).sum()), len(os.listdir("/proc/self/task")))
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
thread.start()
thread.join()
print(seen, float((torch.ones(600, 600) @ torch.ones(600, 600)).sum()))
