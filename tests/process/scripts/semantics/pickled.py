"""Classes and functions of the script can be pickled."""

import copy
import dataclasses
import inspect
import pickle


@dataclasses.dataclass
class Point:
    x: int
    y: int


def double(value):
    return 2 * value


print(pickle.loads(pickle.dumps(Point(1, 2))), pickle.loads(pickle.dumps(double))(3))
print(copy.deepcopy(Point(3, 4)), Point.__module__, inspect.getsource(double), inspect.getmodule(Point).__name__)
