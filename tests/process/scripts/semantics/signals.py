"""Signals are as in a fresh interpreter; one that is handled arrives."""

import os
import signal

for number in sorted(signal.valid_signals()):
    handler = signal.getsignal(number)
    print(int(number), getattr(handler, "__name__", handler))
with open("/proc/self/status") as status:
    print([line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt", "ShdPnd", "SigPnd"))])
print(signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL))
signal.signal(signal.SIGUSR1, lambda number, frame: print("got", number, frame.f_code.co_name))
os.kill(os.getpid(), signal.SIGUSR1)
