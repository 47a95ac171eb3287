"""Environments and verifiers with one defect each, for the audit to find."""
