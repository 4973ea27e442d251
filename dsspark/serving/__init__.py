"""What an engine runs around a round: the delayed scheduler."""
