"""The audit: a report card of an environment or a verifier, played over the wire; entered by `roll-env audit`."""
