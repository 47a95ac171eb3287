"""Common parts of environments: kwargs, replies, grids, text games, profiles and splits. All rooms enter."""
