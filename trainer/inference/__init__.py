"""Sample from the policy; from `rollout` and `cluster` up all enter."""
