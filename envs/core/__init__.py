"""What environments are made of: kwargs, replies, grids, text games, profiles and splits. All rooms enter."""
