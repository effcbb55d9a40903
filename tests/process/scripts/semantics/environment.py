"""The environment, as Python, C and a child see it. The launcher's own names are left out."""

import ctypes
import os
import subprocess

OURS = ("RESILIENCE_", "TORCHELASTIC_", "MASTER_", "TRACEPARENT")
names = sorted(name for name in os.environ if not name.startswith(OURS) and name != "_")
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
for name in names:
    value = os.fsencode(os.environ[name])
    print(name, value, getenv(os.fsencode(name)) == value)
child = subprocess.run(["env", "-0"], capture_output=True, check=True).stdout.split(b"\0")
print(sorted(item for item in child if os.fsdecode(item.partition(b"=")[0]) in names))
print(os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"])
