"""Other projects' protocols, spoken for every environment in the catalog: clients of theirs need no change."""
