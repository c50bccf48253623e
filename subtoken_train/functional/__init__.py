"""Pure functions: value groups, masks, straight-through, balance loss, byte ledger, objective.

Nothing is imported here, so that ``functional.ledger`` stays usable without torch.
"""
