"""What lists of processes show, but for rank and node before a forked worker's interpreter."""

import os

with open("/proc/self/cmdline", "rb") as file:
    program, *arguments = [os.fsdecode(part) for part in file.read().rstrip(b"\0").split(b"\0")]
print(program.rpartition(": ")[2], arguments)
with open("/proc/self/environ", "rb") as file:
    shown = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if entry)
print(all(shown[name] == value for name, value in os.environb.items() if name not in {b"LC_CTYPE"}), len(shown) > 5)
print([shown[name] for name in (b"RANK", b"LOCAL_RANK", b"WORLD_SIZE")])
