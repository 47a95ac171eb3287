"""Where a run's roles are, what starts them there, what happens when one dies; `assembly` and `commands` enter."""
