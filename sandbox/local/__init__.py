"""Back-ends of this machine's own kernel, our processes around each run; `selection`, `warm` and `command` enter."""
