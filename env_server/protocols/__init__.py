"""Other projects' protocols, spoken for every environment in the catalog; `process` alone enters."""
