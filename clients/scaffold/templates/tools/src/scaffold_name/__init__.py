"""ScaffoldName-v0: tasks that are solved by calling tools."""

from .environment import ScaffoldObject

__all__ = ["ScaffoldObject"]
