"""An inference server for tests that speaks as vLLM or as SGLang does, on a model small enough to check by hand.

It is a faithful double: routes, switches, errors, pauses, weight updates and version spans behave as those of the
release whose version string it was started with. `python -m tests.support.inference_server --help` starts one.
"""
