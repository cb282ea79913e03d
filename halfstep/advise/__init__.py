"""What to do: predictions, as findings whose cures are edits of the plan."""
