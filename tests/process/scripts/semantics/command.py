"""What lists of processes show."""

import os

with open("/proc/self/cmdline", "rb") as file:
    print([os.fsdecode(part) for part in file.read().rstrip(b"\0").split(b"\0")])
