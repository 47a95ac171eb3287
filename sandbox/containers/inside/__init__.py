"""The first process of a container: it runs one program after another, by orders of the host over its two streams.

The image's Python is given these files as text, so they may import nothing but the standard library of Python 3.8.
Programs have the same user as this process, which is safe from them all the same: as process 1 it gets no signal that
it does not handle, not even SIGKILL; its memory and descriptors are closed to them, because it is not dumpable; and the
seccomp profile keeps them from changing limits, priority or processors of another process. Whatever a program starts is
a descendant of this process, is killed by it, and is reaped by it, before the next program runs.
"""
