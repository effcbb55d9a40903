"""Ends in the way that it is told."""

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time


class Last:
    def __del__(self):
        print("deleted, and this module's names are there:", time is not None)


def remember():
    print("at exit", repr(getattr(sys, "last_value", None)))


def later():
    threading.Event().wait(0.2)
    print("a thread that ended after the program")


def fail(depth=2):
    if depth:
        fail(depth - 1)
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("on purpose\nin two lines") from error


class MyExit(SystemExit):
    pass


def hook(kind, error, frames):
    if sys.argv[1] == "hook-exits":
        sys.exit(7)
    raise RuntimeError("the hook fails")


last = Last()
atexit.register(remember)
how = sys.argv[1]
if how == "thread":
    threading.Thread(target=later).start()
elif how == "exit":
    sys.exit(3)
elif how == "exit-none":
    sys.exit()
elif how == "exit-true":
    sys.exit(True)
elif how == "exit-negative":
    sys.exit(-1)
elif how == "exit-text":
    sys.exit("nothing to do, ü")
elif how == "exit-tuple":
    raise MyExit((1, "two"))
elif how == "exit-now":
    os._exit(4)
elif how == "exception":
    fail()
elif how == "group" and sys.version_info >= (3, 11):
    raise ExceptionGroup("several", [ValueError(1), TypeError(2)])  # noqa: F821
elif how == "base":
    raise GeneratorExit("not an Exception")
elif how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
elif how in ("hook", "hook-exits"):
    sys.excepthook = hook
    fail()
elif how == "thread-exception":
    thread = threading.Thread(target=fail, name="mine")
    thread.start()
    thread.join()
elif how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "terminate":
    os.kill(os.getpid(), signal.SIGTERM)
elif how == "crash":
    faulthandler.enable()
    faulthandler._sigsegv()
elif how == "abort":
    os.abort()
