"""Back-ends of this machine's own kernel, with our processes around each run; entered by `selection` and `warm`."""
