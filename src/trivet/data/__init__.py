"""From raw examples to groups that the trainer packs."""
