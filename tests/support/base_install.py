"""A base install, without its own environment: none of the packages that the extras bring can be imported.

Imported first by a child interpreter (`python -c "from tests.support import base_install; ..."`).
"""

import sys

from rollgym.extras import EXTRAS

for _modules in EXTRAS.values():
    for _name in _modules:
        assert _name not in sys.modules, f"{_name} is imported already"
        sys.modules[_name] = None  # type: ignore[assignment]
