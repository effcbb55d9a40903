"""Modules beside the script are found, also such as were made a moment ago."""

import pathlib
import sys

import beside

print(beside.VALUE, beside.__file__)
folder = pathlib.Path(sys.argv[1])
(folder / "made_just_now.py").write_text("VALUE = 'new'\n")
sys.path.append(sys.argv[1])
import made_just_now  # noqa: E402

print(made_just_now.VALUE)
