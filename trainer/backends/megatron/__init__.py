"""Training with Megatron-Core (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198).

Layers, stages, rows and experts are divided over ranks. It is imported at its point of use: the package is an extra.
"""
