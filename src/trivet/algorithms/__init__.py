"""Credit, masks, aggregation, objectives, corrections: pure functions and their registry."""
