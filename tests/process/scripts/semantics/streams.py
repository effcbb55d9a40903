"""Streams are unbuffered, of Python and of C."""

import ctypes
import io
import os
import sys

for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno(), stream.line_buffering)
    print(type(stream.buffer).__name__, stream.newlines, stream.write_through, stream.closed)
print(sys.__stdout__ is sys.stdout, sys.__stderr__ is sys.stderr, sys.__stdin__ is sys.stdin)
print(isinstance(sys.stdout, io.TextIOWrapper), repr(sys.stdin.read()))
print("ümläut \udcff".encode("utf-8", "surrogateescape"))
sys.stderr.write("to stderr, ")
sys.stderr.write("no end of line")
libc = ctypes.CDLL(None)
libc.printf(b"from C, ")
print("from Python, ", end="")
libc.printf(b"from C again")
os._exit(0)  # whatever was not written is lost
