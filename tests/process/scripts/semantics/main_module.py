"""What is my module?"""

import multiprocessing
import sys

print(__name__, __file__, __doc__, __spec__, __package__, __cached__, type(__builtins__).__name__, __annotations__)
print(__loader__.name, __loader__.path, __loader__.get_filename())
print(sorted(globals()))
print(sys.modules["__main__"].__dict__ is globals(), sys.modules["__mp_main__"].__dict__ is globals())
print(multiprocessing.current_process().name, multiprocessing.parent_process())
