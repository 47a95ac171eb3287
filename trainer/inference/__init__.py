"""Sample from the policy."""
