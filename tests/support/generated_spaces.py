"""Spaces of every kind that the wire knows, nested, for properties."""

from typing import Any

import numpy as np
from gymnasium import Space, spaces
from hypothesis import strategies as st

_WHOLE = st.sampled_from([np.int64, np.int32, np.uint8])
_LEAVES: st.SearchStrategy[Space[Any]] = st.one_of(
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(lambda dtype: spaces.Discrete(7, start=2, dtype=dtype), _WHOLE),
    st.builds(
        lambda dtype: spaces.Box(0, 9, (2, 3), dtype), st.sampled_from([np.float32, np.float64, np.uint8])
    ),
    st.just(spaces.Box(-np.inf, np.inf, (2,), np.float64)),
    st.builds(
        lambda sizes, dtype: spaces.MultiDiscrete(sizes, dtype=dtype),
        st.lists(st.integers(1, 5), min_size=1, max_size=4),
        _WHOLE,
    ),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
    st.just(spaces.Text(4)),
    st.just(spaces.Graph(spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(3))),
)
SPACES: st.SearchStrategy[Space[Any]] = st.recursive(
    _LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(spaces.Tuple),
        st.lists(parts, min_size=1, max_size=3).map(spaces.OneOf),
        st.dictionaries(st.sampled_from("zyxa"), parts, min_size=1, max_size=3).map(spaces.Dict),
        parts.map(spaces.Sequence),
    ),
    max_leaves=5,
)
